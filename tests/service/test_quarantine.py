"""One workload, node or row that the cycle cannot deal with is quarantined, and everything else goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from makeway_quota.engine.incremental import IncrementalEngine
from makeway_quota.quarantine import FIRST_DELAY, Quarantine
from makeway_quota.store.errors import NotLeading
from running import running

ERRORS = [RecursionError("deep"), OverflowError("huge"), MemoryError(), IndexError("gone")]


def test_what_fails_is_tried_less_and_less_often_until_it_passes() -> None:
    now = [0.0]
    quarantine = Quarantine(lambda: now[0])
    with quarantine.guard("planning", "workload", "j-1"):
        raise IndexError("gone")
    assert quarantine.is_backing_off("planning", "workload", "j-1")
    assert not quarantine.is_backing_off("planning", "workload", "j-2")
    assert "j-1" in (quarantine.sentence(named=True) or "")
    assert "j-1" not in (quarantine.sentence(named=False) or "j-1")
    now[0] += FIRST_DELAY
    assert not quarantine.is_backing_off("planning", "workload", "j-1")
    with quarantine.guard("planning", "workload", "j-1"):
        pass
    assert quarantine.size == 0
    with pytest.raises(NotLeading), quarantine.guard("planning", "workload", "j-1"):
        raise NotLeading("another replica leads")


def test_the_faulty_ones_of_a_batch_are_found() -> None:
    quarantine, done = Quarantine(), set[str]()

    def work(names: Any) -> None:
        if {"b", "e"} & set(names):
            raise OverflowError
        done.update(names)

    quarantine.sort_out("counting", "workload", list("abcdef"), work)
    assert (done, quarantine.names("counting", "workload")) == (set("acdf"), {"b", "e"})


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_job_that_the_engine_fails_with_waits_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    plan, faulty = IncrementalEngine.plan, set[str]()

    def planned(self: IncrementalEngine, now: float, why: bool = True) -> Any:
        if faulty & self.cluster.workloads.keys():
            raise error
        return plan(self, now, why)

    monkeypatch.setattr(IncrementalEngine, "plan", planned)
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=60) as run:
        job = await run.submit("ana", "first", profile="gpu3")
        await run.job(job.id, "running")
        run.service.components.world.quarantine._clock = lambda: 0.0
        store_of_faulty = run.service.components.world.rows
        bad = await run.submit("ana", "bad", profile="gpu3", time_limit=3600)
        faulty.add(bad.id)
        assert store_of_faulty is not None
        running_too = await run.submit("ana", "good", profile="gpu1")
        await run.job(running_too.id, "running")
        assert run.service.components.world.failure is None
