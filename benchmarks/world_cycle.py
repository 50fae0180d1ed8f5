"""Measure a cycle after one node of a large cluster changed: all but the database and the network."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle

from makeway_quota import policy
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Phase
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.decisions import change_set_of
from makeway_quota.control.planner import Planner
from makeway_quota.control.reason_throttle import ReasonThrottle
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.world.world import World
from makeway_quota.store.records import NewWorkload, PastRun, Workload
from makeway_quota.store.rows import changed, initial_record
from makeway_quota.values import Place

from .measure import Measured

NODES = 4_000
GPUS_PER_NODE = 8
ROWS = 56_000
TEAMS = 50
CHANGES = 12


def measure() -> Iterator[Measured]:
    """Change one node at a time; the baseline shows the world to a new engine, as a change of a node once did."""
    yield from asyncio.run(_measure())


async def _measure() -> list[Measured]:
    document = policy.read_policy(_document(), "policy.yaml")
    backend = MemoryBackend(NodeStatus(f"n{at:04}", "gpu", tuple(range(GPUS_PER_NODE))) for at in range(NODES))
    rows = _rows()
    for row in rows:
        if row.state == "running":
            backend.attempts[row.id, 1] = ReportedAttempt(AttemptStatus(row.id, 1, Phase.RUNNING))  # type: ignore[assignment]
    world = World(MemoryRows(rows), document, 1)  # type: ignore[arg-type]
    loop = _Cycle(world, backend)
    for _ in range(3):
        await loop.turn()
    gc.collect()
    gc.freeze()
    samples, whole = [], []
    node = backend.nodes["n2000"]
    for at in range(CHANGES):
        backend.nodes["n2000"] = _changed(node, at)
        began = time.perf_counter()
        await loop.turn()
        samples.append(1000 * (time.perf_counter() - began))
    gone = []
    for at in range(CHANGES):
        backend.nodes.pop("n2001") if at % 2 == 0 else backend.nodes.setdefault("n2001", replace(node, name="n2001"))
        began = time.perf_counter()
        await loop.turn()
        gone.append(1000 * (time.perf_counter() - began))
    for _ in range(2):
        began = time.perf_counter()
        world.use(replace(document), 1)
        await loop.turn()
        whole.append(1000 * (time.perf_counter() - began))
    gc.unfreeze()
    name = f"with {NODES} nodes, {ROWS} rows"
    base = "the same after a new policy document: all rows, a new engine"
    return [
        Measured(f"a cycle after one node changed, {name}", "ms", samples, base, min(whole), goal=20.0),
        Measured(f"a cycle after one node came or went, {name}", "ms", gone, base, min(whole)),
    ]


class _Cycle:
    """Observe, reconcile, plan and apply, as the loop does; nothing is committed."""

    def __init__(self, world: World, backend: MemoryBackend) -> None:
        self.world, self.backend = world, backend
        self.planner, self.reasons, self.now = Planner(world), ReasonThrottle(), time.time()

    async def turn(self) -> None:
        world, self.now = self.world, self.now + 1
        world.observe(await self.backend.observe(world.since))
        rows = await world.rows()
        result = reconcile(rows, world.pending_changes.observation(self.now), now=self.now, max_infra_failures=3)
        plan = await self.planner.plan(rows, self.now)
        change_set_of(plan, rows, now=self.now, lease_seconds=15.0, reasons=self.reasons)
        world.pending_changes.not_to_start(self.now)
        world.pending_changes.rows()
        world.pending_changes.observation(self.now)
        world.pending_changes.end_cycle()
        assert not result.changes, "what is reported is what is in the rows"


class ReportedAttempt:
    """An attempt of the memory backend, without its order."""

    def __init__(self, status: AttemptStatus) -> None:
        self.status = status


class MemoryRows:
    """The rows of workloads, in memory; a world follows them."""

    def __init__(self, rows: Sequence[Workload]) -> None:
        self.rows = {row.id: row for row in rows}
        self.damaged: dict[str, Sequence[str]] = {}
        self._followers: list[Callable[[Sequence[Workload]], object]] = []

    def on_change(self, call: Callable[[Sequence[Workload]], object], last: bool = False) -> None:
        """Call back with each row that is put."""
        self._followers.append(call)

    def put(self, row: Workload) -> None:
        """Take a row, or drop it if it has ended."""
        self.rows[row.id] = row
        if not row.live:
            del self.rows[row.id]
        for call in self._followers:
            call([row])

    def active(self) -> Sequence[Workload]:
        """Return all rows."""
        return list(self.rows.values())

    def past_runs(self) -> list[PastRun]:
        """Return nothing: no forecasts."""
        return []

    def histories(self) -> tuple[dict[str, float], float]:
        """Return nothing that was borrowed."""
        return {}, 0.0


def _changed(node: NodeStatus, at: int) -> NodeStatus:
    """Return the changes that nodes of a cluster have all the time."""
    return [
        replace(node, foreign_cpu=500),
        replace(node, cordoned=True),
        replace(node, ready=False),
        node,
    ][at % 4]


def _document() -> str:
    names = [f"team{at:02}" for at in range(TEAMS)]
    lines = ["version: 1", "pools: [{name: gpu}]", "profiles:"]
    for gpus in (1, 2, 4, 8):
        lines.append(f"  - {{name: gpu{gpus}, title: {gpus} GPUs, gpus: {gpus}, policies: [[{', '.join(names)}]]}}")
    lines.append("policies:")
    reserved = NODES * GPUS_PER_NODE // TEAMS // 2
    lines += [f"  - {{name: {name}, groups: [{name}], quotas: [{{reserved: {reserved}}}]}}" for name in names]
    return "\n".join(lines) + "\n"


def _rows() -> list[Workload]:
    """Every node is full, of jobs over quota and in quota; all others wait."""
    teams, sizes, result = cycle(range(TEAMS)), cycle((8, 4, 4, 2, 2, 2, 2)), list[Workload]()
    free = [(f"n{at:04}", GPUS_PER_NODE) for at in reversed(range(NODES))]
    began = time.time() - 7200
    while free:
        node, remaining = free.pop()
        size = min(next(sizes), remaining)
        row = _row(len(result), next(teams), size, began)
        first = GPUS_PER_NODE - remaining
        place = Place(node, tuple(range(first, first + size)), (1000,) * size)
        state = {"state": "running", "attempt": 1, "started_at": began, "placement": (place,)}
        result.append(changed(row, state))
        if remaining > size:
            free.append((node, remaining - size))
    while len(result) < ROWS:
        result.append(_row(len(result), next(teams), (1, 2, 4, 8)[len(result) // TEAMS % 4], began + len(result) / 100))
    return result


def _row(number: int, team: int, size: int, at: float) -> Workload:
    new = NewWorkload(f"j-{number:08x}", "job", f"team{team:02}", f"gpu{size}", f"user{number % 300}", gpus=1000 * size)
    return initial_record(new, at)
