"""Simulate clusters without Makeway: static partitions, one queue for all, borrowing without reclaim.

Small schedulers of their own, with the same machines and the same meter, so that only the rules differ. Work up to
one node's GPUs runs on one node (the fullest that has room), larger work on whole nodes; no job is ever stopped.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..engine.snapshot import GPU
from .cluster import SimulatedCluster
from .meter import Finished, Meter
from .replay import Outcome
from .trace import Arrival, TraceInvalid

NAMES = {
    "static": "static partition",
    "fifo": "one FIFO",
    "backfill": "one queue with backfill",
    "borrow": "borrow without reclaim",
}


class Nodes:
    """Equal nodes by how many GPUs are free on each; best fit."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.free: list[list[int]] = [[] for _ in range(size + 1)]
        self.free[size] = list(range(count))

    def take(self, milli: int) -> tuple[tuple[int, int], ...]:
        """Return (node, GPUs) for so many milli-GPUs, or nothing if they are not there."""
        gpus = -(-milli // GPU)
        if gpus > self.size:
            count = -(-gpus // self.size)
            if len(self.free[self.size]) < count:
                return ()
            whole, self.free[self.size] = self.free[self.size][:count], self.free[self.size][count:]
            self.free[0] = sorted(self.free[0] + whole)
            return tuple((node, self.size) for node in whole)
        for remaining in range(gpus, self.size + 1):
            if self.free[remaining]:
                node = self.free[remaining].pop(0)
                insort(self.free[remaining - gpus], node)
                return ((node, gpus),)
        return ()

    def give(self, parts: Iterable[tuple[int, int]]) -> None:
        """Take GPUs back."""
        for node, gpus in parts:
            free = next(at for at, nodes in enumerate(self.free) if node in nodes)
            self.free[free].remove(node)
            insort(self.free[free + gpus], node)


@dataclass(frozen=True, slots=True)
class Running:
    """A job on its nodes, with the queue that it came from."""

    arrival: Arrival
    parts: tuple[tuple[int, int], ...]
    nodes: Nodes
    started: float


class Baseline:
    """One of the four baseline schedulers, on the nodes of a cluster."""

    def __init__(self, kind: str, cluster: SimulatedCluster) -> None:
        if kind not in NAMES:
            raise ValueError(f"There is no baseline {kind}; choose of {', '.join(NAMES)}.")
        sizes = {node.gpus for node in cluster.nodes}
        if len(sizes) != 1:
            raise ValueError("The baselines need nodes that are all of one size.")
        self.kind, self.cluster = kind, cluster
        size = sizes.pop()
        self.meter = Meter(cluster.reserved())
        shared = Nodes(len(cluster.nodes), size)
        self.nodes = dict.fromkeys(self.meter.teams, shared)
        if kind == "static":
            self.nodes = {t: Nodes(team.reserved // (size * GPU), size) for t, team in self.meter.teams.items()}
        self.queues: dict[str, deque[Arrival]] = {}
        self.ends: list[tuple[float, str, Running]] = []

    def run(self, arrivals: Sequence[Arrival], progress: Callable[[float], None] | None = None) -> Outcome:
        """Play the trace to its end."""
        waiting, at = sorted(arrivals, key=lambda a: (a.submit, a.id)), 0
        now = began = waiting[0].submit if waiting else 0.0
        gpus = self.cluster.gpus
        while at < len(waiting) or self.ends:
            now = min([waiting[at].submit] if at < len(waiting) else [], default=float("inf"))
            now = min(now, self.ends[0][0]) if self.ends else now
            self.meter.advance(now, gpus)
            touched = self._finish(now)
            while at < len(waiting) and waiting[at].submit <= now:
                touched.add(self._queue(waiting[at]))
                at += 1
            keys = sorted(touched) if self.kind == "static" else sorted(self.queues)
            for key in keys if self.kind == "borrow" else ():
                self._serve(key, now, within=True)
            for key in keys:
                self._serve(key, now)
            if progress is not None:
                progress(at / len(waiting))
        work = sum(a.gpus * a.duration for a in waiting) / GPU
        return Outcome(NAMES[self.kind], gpus, self.meter, began, now, work)

    def _queue(self, arrival: Arrival) -> str:
        if arrival.team not in self.meter.teams:
            raise TraceInvalid(f"Job {arrival.id} is of team {arrival.team}, which the policy does not have.")
        key = arrival.team if self.kind in ("static", "borrow") else ""
        self.queues.setdefault(key, deque()).append(arrival)
        self.meter.queue(arrival.team, arrival.gpus, 1)
        return key

    def _finish(self, now: float) -> set[str]:
        touched = set()
        while self.ends and self.ends[0][0] <= now:
            _, _, run = heapq.heappop(self.ends)
            a = run.arrival
            run.nodes.give(run.parts)
            self.meter.use(a.team, a.gpus, -1)
            delay = run.started - a.submit
            self.meter.finished.append(Finished(a.id, a.team, a.gpus, a.submit, run.started, delay))
            touched.add(a.team if self.kind in ("static", "borrow") else "")
        return touched

    def _serve(self, key: str, now: float, within: bool = False) -> None:
        """Start from the head; behind a head that does not fit only with backfill, or `within` reservations."""
        queue = self.queues.get(key)
        passing = self.kind in ("backfill", "borrow")
        kept: list[Arrival] = []
        refused: set[int] = set()
        while queue:
            arrival = queue[0]
            nodes = self.nodes[arrival.team]
            team = self.meter.teams[arrival.team]
            over = within and team.used + arrival.gpus > team.reserved
            parts = () if over or arrival.gpus in refused else nodes.take(arrival.gpus)
            if not parts:
                if not passing:
                    break
                refused.add(arrival.gpus)
                kept.append(queue.popleft())
                continue
            queue.popleft()
            self.meter.queue(arrival.team, arrival.gpus, -1)
            self.meter.use(arrival.team, arrival.gpus, 1)
            run = Running(arrival, parts, nodes, now)
            heapq.heappush(self.ends, (now + arrival.duration, arrival.id, run))
        if queue is not None:
            queue.extendleft(reversed(kept))


def baseline(
    kind: str, cluster: SimulatedCluster, arrivals: Iterable[Arrival], progress: Callable[[float], None] | None = None
) -> Outcome:
    """Play a trace on a cluster by one of the baselines (NAMES)."""
    return Baseline(kind, cluster).run(list(arrivals), progress)
