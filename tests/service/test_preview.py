"""Previews: which workloads would start, be evicted and wait under another policy, without any effect."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from makeway_api.models import Preview, WorkloadEffect
from makeway_quota.control.world import world
from makeway_quota.services.projection import projection
from running import SAMPLE, Running, running
from worlds import World

TEXT = SAMPLE.read_text(encoding="utf-8")


def quota(text: str, team: str, line: str) -> str:
    """Return the document with another quota line of a team."""
    before, mark, after = text.partition(f"groups: [{team}]")
    head, _, tail = after.partition("- {pools: [gpu], reserved: 5, limit: 9}")
    return f"{before}{mark}{head}- {{{line}}}{tail}"


def names(effects: list[WorkloadEffect]) -> list[str]:
    return [effect.name for effect in effects]


async def asked(run: Running, text: str) -> Preview:
    """Preview a document and check that nothing changes."""
    before = await run.states()
    preview: Preview = await run.client("root").policy_preview(text)
    assert await run.states() == before
    assert not preview.refused
    return preview


async def waits(run: Running, id: str, code: str) -> None:
    async def told() -> bool:
        job = await run.client("root").job(id)
        return job.reason is not None and job.reason.code == code

    await run.until(told, f"{id} waits for {code}")


async def crowd(run: Running) -> None:
    """Three jobs of R&D use its limit of 9, a small one waits for it, and one of DevOps cannot borrow enough."""
    for at in range(3):
        await run.job((await run.submit("ana", f"r{at}", profile="gpu3")).id, "running")
    await waits(run, (await run.submit("ana", "small", profile="gpu1")).id, "limit")
    await waits(run, (await run.submit("bo", "big", profile="gpu3")).id, "no_free_gpus")


NOTHING_FOR_DEVOPS = quota(TEXT, "devops", "pools: [gpu], reserved: 0, limit: 9")


async def test_the_snapshot_of_a_preview_is_not_made_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    divide = world.divide

    def seen(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return divide(*given)

    async with running(tmp_path, NOTHING_FOR_DEVOPS) as run:
        await crowd(run)
        monkeypatch.setattr(world, "divide", seen)
        await asked(run, TEXT)
        assert len(threads) == 1
        assert threads[0].startswith("preview")


@pytest.mark.covers("N17", "F10")
async def test_a_higher_limit_starts_the_jobs_that_wait_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, NOTHING_FOR_DEVOPS) as run:
        await crowd(run)
        preview = await asked(run, quota(NOTHING_FOR_DEVOPS, "rnd", "pools: [gpu], reserved: 5, limit: 10"))
        assert names(preview.starts) == ["small"]
        assert (preview.evicts, preview.waits) == ([], [])
        same = await asked(run, NOTHING_FOR_DEVOPS)
        assert (same.starts, same.evicts, same.waits) == ([], [], []), "what happens anyway is not told"


@pytest.mark.covers("N17", "F45")
async def test_a_reservation_names_victims_and_preemptors(tmp_path: Path) -> None:
    async with running(tmp_path, NOTHING_FOR_DEVOPS) as run:
        await crowd(run)
        preview = await asked(run, TEXT)
        assert names(preview.evicts) == ["r2"], "the job that started last"
        assert names(preview.starts) == ["small", "big"], "once r2 has left there is room for both"
        assert "“big”" in preview.evicts[0].message, "jobs are called by their names"
        assert (preview.evicts[0].team, preview.evicts[0].owner) == ("rnd", "ana")
        assert "r2" not in names(preview.waits)
        await run.client("root").policy_apply(TEXT)
        big = next(job for job in (await run.client("root").jobs()).jobs if job.name == "big")
        await run.job(big.id, "running")
        states = await run.states()
        assert (states["r0"], states["r1"], states["big"]) == ("running", "running", "running"), "as it was told"


@pytest.mark.covers("N17", "F11")
async def test_a_closed_queue_names_the_jobs_that_would_wait(tmp_path: Path) -> None:
    before, mark, after = NOTHING_FOR_DEVOPS.partition("- name: gpu1\n")
    closed = before + mark + after.replace("policies: [[rnd, devops]]", "policies: [devops]", 1)
    async with running(tmp_path, NOTHING_FOR_DEVOPS) as run:
        await crowd(run)
        preview = await asked(run, closed)
        assert names(preview.waits) == ["small"]
        assert "queue" in preview.waits[0].message
        assert (preview.starts, preview.evicts) == ([], []), "who runs runs on"


@pytest.mark.covers("N17")
def test_a_preview_shows_moves_and_the_starts_that_they_allow() -> None:
    """Golden scenario 5: eight GPUs are free, but not on one node."""
    world = World().pool("p", nodes=4, gpus=10).team("a", reserved=20).team("b", reserved=20)
    world.profile("gpu3", 3).profile("gpu8", 8)
    for at, node in enumerate([1, 1, 2, 2, 3, 4]):
        world.run(f"a{at}", "a", "gpu3", f"p-{node}")
    result = projection(world.submit("b", "b", "gpu8").snapshot(), {})
    assert list(result.starts) == ["b"]
    assert len(result.evicts) == 1
    assert not result.waits
    assert projection(world.snapshot(), {}) == result


@pytest.mark.covers("N17")
def test_terminating_work_is_gone_in_a_preview_and_a_session_beyond_the_reservation_refused() -> None:
    world = World().pool("p", gpus=4).team("a").team("b", reserved=4)
    world.profile("one", 1).profile("two", 2)
    world.run("old", "a", "two", "p-1").run("guest", "a", "two", "p-1", kind="session", preemptible=True)
    world.submit("b1", "b", "two")
    world.change("old", state="checkpointing", evicted_for="b1", deadline=world.now + 30)
    world.submit("b2", "b", "two").session("s", "a", "one")
    result = projection(world.snapshot(), {})
    assert sorted(result.starts) == ["b1", "b2"]
    assert list(result.evicts) == ["guest"]
    assert list(result.refused) == ["s"]
    assert {id: code for id, (code, _) in result.waits.items()} == {"old": "no_free_gpus"}
