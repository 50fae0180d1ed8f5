"""An error with one workload, node, team, pool or row, at any step of the cycle, stops nothing else, and is told.

Each case raises an error at one step for one object only. All others are still decided for and acted upon, the panel
and `/readyz` name the object, and it goes on by itself once the error is gone.
"""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from makeway_api.models import Kind, Priority, State
from makeway_quota import quarantine
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Phase
from makeway_quota.backends.memory import MemoryAttempt, MemoryBackend
from makeway_quota.control import actuate, reconcile, start_backoff, transitions
from makeway_quota.control.actuate import Actuator, Commands
from makeway_quota.control.hub.leases import Leases
from makeway_quota.control.hub.people import People
from makeway_quota.control.losses import Losses
from makeway_quota.control.reads import read_model
from makeway_quota.control.reads.read_model import ReadModels
from makeway_quota.control.reads.usage_ledger import UsageLedger
from makeway_quota.control.world import pool_assignment
from makeway_quota.control.world.engine_view import EngineView
from makeway_quota.control.world.expectations import Expectations
from makeway_quota.control.world.workload_pods import WorkloadPods
from makeway_quota.control.world.world import World
from makeway_quota.engine.incremental import IncrementalEngine
from makeway_quota.engine.snapshot import PRIORITIES
from makeway_quota.store import damaged_rows
from makeway_quota.store.store import Store
from running import SAMPLE, Running, running

POLICY = SAMPLE.read_text(encoding="utf-8").replace("settings:\n", "settings:\n  history_half_life: 3600\n", 1)
NODES = [NodeStatus(f"n{at}", "gpu", tuple(range(5)), cpu=64000, memory=256_000) for at in (1, 2)]
DEEP = "deep inside of it"


@dataclass
class Fault:
    """An error that is raised for some objects, while it is on."""

    error: type[Exception] = RecursionError
    names: set[str] = field(default_factory=set)
    on: bool = True
    raised: int = 0

    def at(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Raise the error in a function wherever one of its arguments is, or is of, one of the objects."""
        given = inspect.getattr_static(owner, name)
        real = getattr(owner, name)

        if inspect.iscoroutinefunction(real):

            @wraps(real)
            async def awaited(*args: Any, **more: Any) -> Any:
                self.check(args, more)
                return await real(*args, **more)

            patch.setattr(owner, name, awaited)
            return

        @wraps(real)
        def called(*args: Any, **more: Any) -> Any:
            self.check(args, more)
            return real(*args, **more)

        patch.setattr(owner, name, staticmethod(called) if isinstance(given, staticmethod) else called)

    def check(self, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        """Raise the error if it is about one of these arguments."""
        if self.on and any(self._is_about(value) for value in (*args, *more.values())):
            self.raised += 1
            raise self.error(DEEP)

    def _is_about(self, value: object) -> bool:
        if isinstance(value, str):
            return value in self.names
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return any(self._is_about(item) for item in value[:20])
        return any(getattr(value, field, None) in self.names for field in ("id", "workload", "name"))


class Bad(NamedTuple):
    """The object that the error is about: what happens to it meanwhile, and whether it went on."""

    name: str
    provoke: Callable[[], Awaitable[object]]
    healed: Callable[[], Awaitable[object]]


@dataclass
class Site:
    """A service on two nodes of 5 GPUs, and the backend that it runs on."""

    run: Running
    backend: MemoryBackend
    fault: Fault

    @property
    def world(self) -> World:
        return self.run.service.components.world

    async def state(self, id: str) -> str:
        row = await asyncio.to_thread(self.run.service.components.store.workload, id)
        return row.state if row is not None else "removed"

    def is_(self, id: str, *states: str) -> Callable[[], Awaitable[object]]:
        async def found() -> bool:
            return await self.state(id) in states

        return found

    # -- the objects

    async def pending(self) -> Bad:
        """A job that is submitted while the error is on."""
        blocker = await self.job("ana", "blocker", "gpu3", "running")
        await self.job("ana", "second", "gpu3", "running")
        job = await self.run.submit("ana", "bad", profile="gpu3")
        await self.run.job(job.id)

        async def provoke() -> None:
            self.world._view.stale.add(job.id)  # it is looked at again before it starts, not only where it changed
            self.backend.finish(blocker)

        return Bad(job.id, provoke, self.is_(job.id, "running"))

    async def running(self) -> Bad:
        """A job that runs, and ends while the error is on."""
        job = await self.job("ana", "bad", "gpu1", "running")

        async def provoke() -> None:
            self.backend.save(job, 3)
            self.backend.finish(job)

        return Bad(job, provoke, self.is_(job, "succeeded"))

    async def cancelled(self) -> Bad:
        """A job that its owner cancels while the error is on."""
        job = await self.job("ana", "bad", "gpu1", "running")
        return Bad(job, lambda: self.run.client("ana").cancel(job), self.is_(job, "cancelled"))

    async def vanished(self) -> Bad:
        """A job that is lost while the error is on."""
        job = await self.job("ana", "bad", "gpu1", "running")

        async def provoke() -> None:
            del self.backend.attempts[job, 1]
            self.backend._changed()

        async def again() -> bool:
            row = await asyncio.to_thread(self.run.service.components.store.workload, job)
            return row is not None and row.attempt > 1 and row.state == "running"

        return Bad(job, provoke, again)

    async def session(self) -> Bad:
        """A notebook whose lease is not renewed."""
        session = await self.run.granted((await self.run.session("ana", "gpu1", "rnd")).id)

        async def provoke() -> None:
            self.run.service.components.leases._renewed[session.id] -= 10_000

        return Bad(session.id, provoke, self.is_(session.id, "stopped", "cancelled"))

    async def preempted(self) -> Bad:
        """A job beyond its team's reservation that makes way while the error is on."""
        for profile in ("gpu3", "gpu2"):
            await self.job("ana", "kept", profile, "running")
        job = await self.job("ana", "bad", "gpu3", "running")

        async def provoke() -> None:
            await self.run.submit("bo", "wants it", profile="gpu3")

        async def made_way() -> bool:
            row = await asyncio.to_thread(self.run.service.components.store.workload, job)
            return row is not None and row.preemptions > 0 and row.state != "checkpointing"

        return Bad(job, provoke, made_way)

    async def terminating(self) -> Bad:
        """An attempt of a job that is in no row."""

        async def provoke() -> None:
            key = ("j-ghost", 1)
            order = next(iter(self.backend.attempts.values())).order
            seen = AttemptStatus(*key, Phase.RUNNING, started_at=1.0)
            self.backend.attempts[key] = MemoryAttempt(replace(order, workload="j-ghost"), seen)
            self.backend._changed()

        async def forgotten() -> bool:
            return ("j-ghost", 1) in self.backend.forgotten

        return Bad("j-ghost", provoke, forgotten)

    async def node(self) -> Bad:
        """A node that changes while the error is on."""

        async def provoke() -> None:
            self.backend.nodes["n2"] = replace(self.backend.nodes["n2"], devices=tuple(range(6)))
            self.backend._changed()

        async def larger() -> bool:
            shown = {node.name: node for node in self.world.snapshot(await self.world.rows(), 0.0).nodes}
            return "n2" in shown and shown["n2"].gpus == 6

        return Bad("n2", provoke, larger)

    async def job(self, person: str, name: str, profile: str, *states: str) -> str:
        """Submit a job and return its id once it is in a state."""
        job = await self.run.submit(person, name, profile=profile)
        await self.run.job(job.id, *states)
        return job.id

    # -- what has to be

    async def others_go_on(self) -> None:
        """Assert that other jobs start, end, and are cancelled, and that a notebook is granted."""
        first = await self.job("bo", "other", "gpu1", "running")
        self.backend.finish(first)
        await self.run.job(first, "succeeded")
        second = await self.job("bo", "another", "gpu1", "running")
        await self.run.client("bo").cancel(second)
        await self.run.job(second, "cancelled")
        session = await self.run.session("bo", "gpu1", "devops")
        assert (await self.run.granted(session.id)).phase == "granted"
        await self.run.client("spawner").release(session.id)

    async def is_raised(self) -> int:
        """Whether the error was raised, by the cycle or by a page."""
        await self.run.used()
        return self.fault.raised

    async def is_over(self, name: str) -> bool:
        """Whether it is told no more, once a page was read."""
        await self.run.used()
        return not self.is_told(name)

    def is_told(self, name: str) -> bool:
        """Whether the panel of an administrator names the object."""
        return name in (self.world.quarantine.sentence(named=True) or "")


@asynccontextmanager
async def site(
    tmp_path: Path, patch: pytest.MonkeyPatch, error: type[Exception] = RecursionError, **more: Any
) -> AsyncIterator[Site]:
    patch.setattr(quarantine, "FIRST_DELAY", 0.1)
    patch.setattr(quarantine, "MAX_DELAY", 0.4)
    patch.setattr(actuate, "MAX_DELAY", 0.4)
    patch.setattr(start_backoff, "FIRST_DELAY", 0.5)
    backend = MemoryBackend(NODES, real_time=True, leaves_after=0.05)
    async with running(tmp_path, POLICY, backend=backend, MAKEWAY_TICK_SECONDS=0.3, **more) as run:
        yield Site(run, backend, Fault(error))


def planning(fault: Fault, patch: pytest.MonkeyPatch, *_: Any) -> None:
    """Raise the error where the engine plans with the object."""
    plan = IncrementalEngine.plan

    def planned(self: IncrementalEngine, now: float, why: bool = True) -> Any:
        cluster = self.cluster
        names = {*cluster.workloads, *cluster.nodes, *(pool.name for pool in self.shown.pools)}
        if fault.on and fault.names & (names | {policy.name for policy in self.shown.policies}):
            fault.raised += 1
            raise fault.error(DEEP)
        return plan(self, now, why)

    patch.setattr(IncrementalEngine, "plan", planned)


def committing(fault: Fault, patch: pytest.MonkeyPatch, *_: Any) -> None:
    """Raise the error where a change of the object is written."""
    commit = Store.commit

    def committed(self: Store, changes: Any, *args: Any, **more: Any) -> Any:
        fault.check(tuple(change.workload for change in changes), {})
        return commit(self, changes, *args, **more)

    patch.setattr(Store, "commit", committed)


STEPS: list[tuple[str, Any, str]] = [
    ("pending", EngineView, "_show_row"),
    ("pending", planning, ""),
    ("pending", committing, ""),
    ("pending", transitions, "start"),
    ("pending", Commands, "with_command"),
    ("pending", MemoryBackend, "start"),
    ("pending", Actuator, "_start_order"),
    ("pending", ReadModels, "_put"),
    ("pending", People, "excludes"),
    ("pending", WorkloadPods, "note"),
    ("pending", UsageLedger, "add"),
    ("running", committing, ""),
    ("running", reconcile, "_with_possible_times"),
    ("running", reconcile._AttemptEnds, "ended"),
    ("running", transitions, "finish"),
    ("vanished", transitions, "requeue"),
    ("session", transitions, "release"),
    ("running", Actuator, "_end_leftover"),
    ("running", MemoryBackend, "forget"),
    ("vanished", committing, ""),
    ("vanished", reconcile._AttemptEnds, "_lost"),
    ("vanished", Losses, "counts"),
    ("vanished", Expectations, "verdict"),
    ("cancelled", Actuator, "_actuate_job"),
    ("cancelled", MemoryBackend, "kill"),
    ("session", Leases, "_end"),
    ("session", committing, ""),
    ("preempted", transitions, "notice"),
    ("preempted", committing, ""),
    ("preempted", planning, ""),
    ("preempted", MemoryBackend, "notice"),
    ("preempted", reconcile._AttemptEnds, "_evicted"),
    ("terminating", Actuator, "_end_leftover"),
    ("terminating", MemoryBackend, "kill"),
    ("terminating", MemoryBackend, "forget"),
    ("node", World, "_shown"),
    ("node", pool_assignment, "_parts"),
    ("node", EngineView, "_show_host"),
    ("node", planning, ""),
    ("node", read_model, "use_of"),
]


def _id(case: tuple[str, Any, str]) -> str:
    kind, owner, name = case
    return f"{kind}: {name.strip('_') or owner.__name__}"


@pytest.mark.parametrize("case", STEPS, ids=_id)
async def test_an_error_with_one_thing_stops_nothing_else_is_told_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, Any, str]
) -> None:
    kind, owner, name = case
    async with site(tmp_path, monkeypatch) as at, asyncio.timeout(45):
        await at.job("bo", "neighbour", "gpu1", "running")
        bad: Bad = await getattr(at, kind)()
        at.fault.names.add(bad.name)
        (owner if callable(owner) and not name else at.fault.at)(*_args(at.fault, monkeypatch, owner, name))
        await bad.provoke()
        await at.run.until(at.is_raised, "the error is raised")
        await at.others_go_on()
        assert at.is_told(bad.name)
        ready = (await at.run.service.services.audit.ready(named=True)).checks["loop"]
        assert bad.name in ready
        assert "RecursionError" in ready
        assert at.world.failure is None
        at.fault.on = False
        await at.run.until(bad.healed, "it goes on by itself")
        await at.run.until(lambda: at.is_over(bad.name), "it is told no more")


def _args(fault: Fault, patch: pytest.MonkeyPatch, owner: Any, name: str) -> tuple[Any, ...]:
    return (fault, patch) if not name else (patch, owner, name)


DAMAGE: dict[str, dict[str, object]] = {
    "cut off": {"placement": '[["n1",[0', "notice": '{"reason": "x"', "reason_numbers": "{", "nomination": "["},
    "of other types": {"placement": '[["n1", 0, 1000]]', "reason_numbers": "[1]", "lost_on": "[{}]", "avoids": "[[1]]"},
    "deep": {"reason_numbers": "[" * 100_000, "notice": "{" * 100_000},
    "huge": {"reason_numbers": '{"a": 1' + "0" * 5000 + "}", "placement": '[["n1",[1e400],[0]]]'},
    "an unknown word": {"priority": "highest"},
    "texts for numbers": {"gpus": "three", "workers": "x", "grace": "long", "submitted_at": "yesterday"},
    "bytes": {"name": b"\xff\xfe", "reason_message": b"\x80", "lost_on": b"\xff"},
    "a notice without its times": {"notice": '{"reason": "x", "at": "now", "deadline": null}'},
    "too few fields": {"notice": "{}", "nomination": "[[]]"},
}


@pytest.mark.parametrize("what", DAMAGE)
async def test_a_row_that_is_damaged_hides_no_other_and_is_read_again_once_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    file = tmp_path / "makeway.sqlite"
    async with site(tmp_path, monkeypatch) as at:
        good, bad = [(await at.run.submit("ana", name, profile="gpu1")).id for name in ("good", "bad")]
        for job in (good, bad):
            await at.run.job(job, "running")
    columns = DAMAGE[what]
    with sqlite3.connect(file) as database:
        [mended] = database.execute(f"SELECT {', '.join(columns)} FROM workloads WHERE id = ?", (bad,)).fetchall()
        setting = ", ".join(f"{column} = ?" for column in columns)
        database.execute(f"UPDATE workloads SET {setting} WHERE id = ?", (*columns.values(), bad))
    async with site(tmp_path, monkeypatch) as at, asyncio.timeout(45):
        await at.run.job(good, "running")
        assert f"The workload {bad} is quarantined: reading its row failed" in caplog.text
        await at.others_go_on()
        page = await at.run.client("root").jobs(limit=100)
        assert {good, bad} <= {job.id for job in page.jobs}
        assert at.world.failure is None
        with sqlite3.connect(file, timeout=30) as database:
            database.execute(f"UPDATE workloads SET {setting} WHERE id = ?", (*mended, bad))
        await at.run.until(lambda: not at.is_told(bad), "it is told no more")
        await at.run.job(bad, "running")


def test_a_row_is_sound_with_every_kind_priority_and_state_that_there_is() -> None:
    assert set(damaged_rows.PRIORITIES) == set(PRIORITIES) == {priority.value for priority in Priority}
    assert set(damaged_rows.KINDS) == {kind.value for kind in Kind}
    assert set(damaged_rows.STATES) == {state.value for state in State}
