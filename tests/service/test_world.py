"""Readiness, metrics, and preemptible sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from makeway_api.models import Job, Session
from makeway_quota.backends.base import NodeStatus, Observation
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.services.health import checks, serves
from makeway_quota.services.jobs.listing import ListQuery
from makeway_quota.store.records import Workload
from running import PEOPLE, Running, running

READY = {"database": "writes", "files": "available", "loop": "decides", "backend": "observed"}


@pytest.mark.covers("N19")
async def test_metrics_tell_gpus_teams_and_decisions(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        job = await run.submit("ana", "train", profile="gpu3")
        await run.job(job.id, "running")
        http = run.client("root").http
        text = (await http.get("http://makeway.test/metrics")).text
        assert 'makeway_gpus{state="used"} 3.0' in text
        assert 'makeway_team_gpus{state="in_quota",team="rnd"} 3.0' in text
        assert 'makeway_workloads{kind="job",state="running"} 1.0' in text
        assert 'makeway_decisions_total{team="rnd",verb="start"}' in text


async def test_ready_says_what_is_wrong_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=0.2) as run:
        await run.until(lambda: run.service.components.world.cycled, "a first cycle")
        ready = await run.service.services.audit.ready()
        assert ready.ok, ready.checks
        assert ready.checks == READY

        async def numbers() -> str:
            return (await run.service.services.usage.metrics()).decode()

        async def broken(since: int | None = None) -> Observation:
            raise OSError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(run.service.components.backend, "observe", broken)
            failed = await run.until(lambda: run.service.components.world.failure, "a cycle fails")
            assert failed == "OSError: the disk is full"
            ready = await run.service.services.audit.ready()
            assert ready.ok, "people and workers are still answered"
            assert ready.checks == READY | {"loop": "failed"}, "what it was is in the log: everyone may ask"
            assert 'makeway_part_works{part="loop"} 0.0' in await numbers()
        await run.until(lambda: not run.service.components.world.failure, "the next cycle works")
        assert (await run.service.services.audit.ready()).checks == READY
        assert 'makeway_part_works{part="loop"} 1.0' in await numbers()


async def test_the_gpus_that_no_pool_takes_follow_the_nodes(tmp_path: Path) -> None:
    node = NodeStatus("n1", "gpu", (0,), unassigned=(("amd.com/gpu", 2),))
    async with running(tmp_path, backend=MemoryBackend([node])) as run:
        world = run.service.components.world
        world.observe(Observation((node,)))
        assert world.unassigned == {"n1": (("amd.com/gpu", 2),)}
        world.observe(Observation((replace(node, unassigned=()),)))
        assert world.unassigned == {}
        world.observe(Observation((node,), version=2))
        world.observe(Observation((), version=3))
        assert world.unassigned == {}


async def test_nothing_is_decided_before_the_nodes_are_known(tmp_path: Path) -> None:
    backend = MemoryBackend([NodeStatus("n1", "gpu", tuple(range(10)))], real_time=True)
    backend.synced = False
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        job = await run.submit("ana", "train", profile="gpu3")
        session = await run.session("bo", "gpu1", "devops")
        before = run.service.loop.cycles
        await run.until(lambda: run.service.loop.cycles > before + 2, "some cycles are over")
        assert (await run.client("root").job(job.id)).state.value == "pending"
        assert (await run.client("spawner").session(session.id)).phase == "admission"
        problem = (await run.client("ana").usage()).problem
        assert problem == "Nodes and jobs are not known, and nothing is decided: they have not been read yet."
        assert await reasons(run, job, session) == {problem}, "the engine would say that they fit nowhere"
        ready = await run.service.services.audit.ready()
        assert (ready.ok, ready.checks) == (True, READY | {"backend": "cannot be observed"})
        backend.synced = True
        await run.job(job.id, "running")
        assert (await run.client("ana").usage()).problem is None


@pytest.mark.covers("F40", "N14")
async def test_preemptible_session_uses_idle_gpus_and_gets_a_notice(tmp_path: Path) -> None:
    async with running(tmp_path, _short_grace(), MAKEWAY_TICK_SECONDS=0.2) as run:
        refused = await run.granted((await run.session("ana", "gpu8", "rnd")).id)
        assert refused.state == "cancelled"
        session = await run.granted((await run.session("ana", "gpu8", "rnd", preemptible=True)).id)
        assert session.phase == "granted"
        job = await run.submit("bo", "owner", profile="gpu3")
        asked = await run.until(lambda: noticed(run, session.id), "the session is asked to leave")
        assert asked.notice.by_team == "devops"
        await run.job(job.id, "running")
        over = await run.client("spawner").session(session.id)
        assert (over.phase, over.reason.code) == ("over", "made_way")


def _short_grace() -> str:
    from running import SAMPLE

    return SAMPLE.read_text(encoding="utf-8").replace("    gpus: 8\n", "    gpus: 8\n    grace: 1\n")


async def noticed(run: Running, id: str) -> Workload | None:
    row = (await run.service.components.world.rows()).get(id)
    return row if row and row.notice else None


async def test_a_deposed_service_decides_nothing_in_its_old_term_and_leads_again_in_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as run:
        first = await run.submit("ana", "first", profile="gpu1")
        await run.job(first.id, "running")
        assert run.service.loop.term == 1
        assert run.service.components.store.take_term("another service", 0.0) == 2
        late = await run.submit("ana", "late", profile="gpu1")
        assert (await run.job(late.id, "running")).attempt == 1
        assert run.service.loop.term == 3, "the term that was over was not used again"
        assert (await run.job(first.id)).attempt == 1, "what ran was not touched"
    assert any("leads no more (term 1): term 1 is over" in line for line in caplog.messages)


async def test_a_replica_whose_loop_never_went_through_a_cycle_gets_no_requests(tmp_path: Path) -> None:
    class Broken(MemoryBackend):
        opened = broken = False

        async def observe(self, since: int | None = None) -> Observation:
            if self.opened and self.broken:
                raise ValueError("a bug of the new version")
            self.opened = True
            return await super().observe(since)

    backend = Broken((NodeStatus("n1", "", (0, 1), virtual=True),), real_time=True)
    backend.broken = True
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        context, world = run.service.services.context, run.service.components.world
        await run.until(lambda: world.failure, "a cycle fails")
        assert (checks(context)["loop"], serves(checks(context))) == ("no cycle yet", False)
        backend.broken = False
        await run.until(lambda: serves(checks(context)), "a first cycle")
        backend.broken = True
        await run.until(lambda: world.failure, "a later one fails")
        assert (checks(context)["loop"], serves(checks(context))) == ("failed", True), "the others do no better"
        backend.broken = False


def test_a_replica_gets_no_requests_without_its_database_and_before_its_first_cycle() -> None:
    for part, state, gets in (
        ("database", "cannot be written", False),
        ("loop", "no cycle yet", False),
        ("loop", "late", True),
        ("backend", "cannot be observed", True),
    ):
        assert serves(READY | {part: state}) == gets, (part, state)


async def reasons(run: Running, job: Job, session: Session | None = None) -> set[str]:
    """Return why a job and a session wait, wherever people read it."""
    root = run.client("root")
    result = [await root.job(job.id), *(one for one in (await root.jobs()).jobs if one.id == job.id)]
    waiting = await run.service.services.listings.listing(PEOPLE["root"], ListQuery("waiting"))
    shown = [one.reason for one in (*result, *waiting.lines)]
    if session is not None:
        shown.append((await run.client("spawner").session(session.id)).reason)
    assert len(shown) == (3 if session is None else 5)
    return {"" if one is None else one.message for one in shown}


@pytest.mark.covers("F80")
async def test_work_that_waits_while_the_cluster_cannot_be_read_says_so(tmp_path: Path) -> None:
    """Then it says again what it waits for; what runs goes on, with its own reason."""
    backend = MemoryBackend([NodeStatus("local", "gpu", tuple(range(3)))], real_time=True)
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        runs = await run.submit("ana", "runs", profile="gpu1")
        began = (await run.job(runs.id, "running")).reason
        job = await run.submit("ana", "waits", profile="gpu3")
        before = (await run.job(job.id)).reason
        assert before is not None
        backend.problem = "the Kubernetes API server does not answer"
        await run.until(lambda: run.service.components.world.problem, "it is noticed")
        problem = (await run.client("ana").usage()).problem
        assert await reasons(run, job) == {problem}
        assert (await run.client("root").job(runs.id)).reason == began
        backend.problem = ""
        await run.until(lambda: not run.service.components.world.problem, "it is over")
        assert await reasons(run, job) == {before.message}
