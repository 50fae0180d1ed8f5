"""Forecast where and when room appears, as the workloads on each node end one after the other."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from ..request import Need
from ..snapshot import GPU
from .devices import hosts
from .nodes import Allocation, NodeState, PoolState

UNKNOWN = float("inf")
EVER = (UNKNOWN, 1 << 60, 0)
"""After every time, known or unknown."""
KNOWN = (UNKNOWN, 0, 0)
"""After every known time."""
NOW = -1.0
"""Before every time: room that is there already, or should be."""
Ends = Callable[[Allocation], float | None]
"""The end of an allocation; None where it is unknown."""
When = tuple[float, int, int]
"""A time, then (where that is unknown) the milli-GPUs of sessions and of jobs that have to end first."""
Allocations = list[tuple[Allocation, float | None]]
"""The allocations on a node, and the end of each."""
Key = tuple[When, int, str, int]
"""The order of openings: time, those with room for all workers first, the node's name, the number of workers."""


class Opening(NamedTuple):
    """From `when` on, a node hosts `workers`; `whole`, `cpu` and `memory` are what is left on it then."""

    when: When
    node: NodeState
    workers: int
    whole: int
    cpu: int
    memory: int


def openings(node: NodeState, need: Need, now: float, allocations: Allocations, before: When) -> Iterator[Opening]:
    """List the moments before `before` at which a node can host more workers, up to the least that is needed."""
    devices, whole, cpu, memory = (
        list(node.free_later),
        node.whole_free_later,
        node.cpu_free_later,
        node.memory_free_later,
    )
    pods = node.pods_free_later
    many = hosts(need, devices, whole, cpu, memory, pods)
    if many:
        when = now
        if node.workers(need, False) < many:
            ends = [end or UNKNOWN for allocation, end in allocations if allocation.terminating]
            when = max(ends + [pod.deadline for pod in node.node.terminating], default=now)
        if (when, 0, 0) < before:
            yield Opening((when, 0, 0), node, min(many, need.min_workers), whole, cpu, memory)
    if many >= need.min_workers:
        return
    for moment, allocation in _leaving_order(allocations, now):
        if moment >= before:
            return
        for part in allocation.parts:
            if part.node is node:
                for at in part.devices:
                    devices[at] += part.milli_per_device
                    whole += devices[at] == GPU
                cpu += allocation.need.cpu
                memory += allocation.need.memory
                pods += 1
        more = hosts(need, devices, whole, cpu, memory, pods)
        if more > many:
            many = more
            yield Opening(moment, node, min(many, need.min_workers), whole, cpu, memory)
            if many >= need.min_workers:
                return


def _leaving_order(allocations: Allocations, now: float) -> Iterator[tuple[When, Allocation]]:
    """Iterate over a node's allocations as they end; of unknown ends, jobs before sessions, small ones first."""
    known, unknown = [], []
    for allocation, end in allocations:
        if end is not None and not allocation.terminating:
            known.append((end, allocation.workload.id, allocation))
        elif not allocation.terminating:
            unknown.append(
                (allocation.workload.non_preemptible, allocation.milli_gpus, allocation.workload.id, allocation)
            )
    for end, _, allocation in sorted(known):
        yield (max(now, end), 0, 0), allocation
    non_preemptible = preemptible = 0
    for is_non_preemptible, amount, _, allocation in sorted(unknown):
        if is_non_preemptible:
            non_preemptible += amount
        else:
            preemptible += amount
        yield (UNKNOWN, non_preemptible, preemptible), allocation


def _without_spare(chosen: list[Opening], min_workers: int) -> list[Opening]:
    """Leave out the nodes that are not needed, those with the fewest workers first."""
    spare = sum(opening.workers for opening in chosen) - min_workers
    for opening in sorted(chosen, key=lambda o: (o.workers, -o.node.position)):
        if opening.workers <= spare:
            spare -= opening.workers
            chosen.remove(opening)
    return chosen


class OpeningForecast:
    """When a pool will have room for a request, computed per node and again only for nodes that changed.

    A node's openings are valid until an allocation changes there, or until its next workload should end. `latest` is
    the last time of interest. Nodes are ordered by name, as in the pool, so that none is renumbered
    when another comes or goes.
    """

    def __init__(self, pool: PoolState, need: Need, latest: When) -> None:
        self.pool, self.need, self.latest = pool, need, latest
        self.rounds, self.seen, self.now = -1, 0, UNKNOWN
        self._openings: dict[str, dict[int, Opening]] = {}
        """Node to its openings, by the number of workers that it hosts then."""
        self._stands: dict[str, tuple[float, NodeState]] = {}
        """Node to the time until which its openings are valid, and to itself."""
        self._due: list[tuple[float, str]] = []
        """The same times as a heap; an entry that `_stands` lacks is void."""
        self._keys: dict[str, list[Key]] = {}
        self._order: list[Key] = []
        self._in_the_end: dict[str, int] = {}
        """Node to the number of workers that it will host."""
        self._total = 0

    def when(self, now: float, ends: Ends) -> float | None:
        """Return the time of the first room for all workers; None if there is some now, or if it is not known."""
        first = self.room(now, ends)
        return first[0][0] if first and now < first[0][0] < UNKNOWN else None

    def room(self, now: float, ends: Ends) -> tuple[When, list[Opening]] | None:
        """Return when the pool first has room for all the workers, and on which nodes; None if it never will."""
        self._catch_up(now, ends)
        min_workers, total = self.need.min_workers, 0
        chosen: dict[str, Opening] = {}
        for (when, non_preemptible, preemptible), _, name, workers in self._order:
            opening = self._openings[name][workers]
            moment = (max(when, now), non_preemptible, preemptible)
            if workers >= min_workers:
                return moment, [opening]
            total += workers - (chosen[name].workers if name in chosen else 0)
            chosen[name] = opening
            if total >= min_workers:
                return moment, _without_spare(list(chosen.values()), min_workers)
        return None

    def ever(self, now: float, ends: Ends) -> bool:
        """Whether the pool will ever have room for all workers."""
        self._catch_up(now, ends)
        return self._total >= self.need.min_workers

    def forget(self, name: str) -> None:
        """Drop a node that left the pool."""
        if name in self._keys:
            self._put_in_order(name, [])
            self._total -= self._in_the_end.pop(name)
            del self._keys[name], self._openings[name], self._stands[name]

    def _catch_up(self, now: float, ends: Ends) -> None:
        pool = self.pool
        anew = self.rounds != pool.rounds or now < self.now
        if not anew and self.seen == len(pool.moved) and now == self.now:
            return
        if anew:
            self._start_anew(now, ends)
        else:
            for node in {*pool.moved[self.seen :], *self._outlived(now)}:
                if node.listed:  # else it has left the pool since
                    self._put_in_order(node.node.name, self._ask(node, now, ends))
        self.rounds, self.seen, self.now = pool.rounds, len(pool.moved), now

    def _start_anew(self, now: float, ends: Ends) -> None:
        self._openings, self._stands, self._due, self._in_the_end, self._total = {}, {}, [], {}, 0
        self._keys = {node.node.name: self._ask(node, now, ends) for node in self.pool.nodes}
        self._order = sorted(key for keys in self._keys.values() for key in keys)

    def _outlived(self, now: float) -> Iterator[NodeState]:
        """Return the nodes whose openings are no longer valid."""
        while self._due and self._due[0][0] <= now:
            moment, name = heappop(self._due)
            until, node = self._stands.get(name, (None, None))
            if node is not None and until == moment:
                yield node

    def _put_in_order(self, name: str, keys: list[Key]) -> None:
        before = self._keys.get(name, [])
        if keys != before:
            for key in before:
                del self._order[bisect_left(self._order, key)]
            for key in keys:
                insort(self._order, key)
        self._keys[name] = keys

    def _ask(self, node: NodeState, now: float, ends: Ends) -> list[Key]:
        """Return the sort keys of one node's openings, computed again."""
        need, name = self.need, node.node.name
        allocations = [(allocation, ends(allocation)) for allocation in node.allocations.values()]
        stands = min([end for _, end in allocations if end is not None and end > now], default=UNKNOWN)
        if node.node.terminating:
            stands = min([stands] + [pod.deadline for pod in node.node.terminating if pod.deadline > now])
        before = self._stands.get(name)
        self._stands[name] = stands, node
        if stands < UNKNOWN and (before is None or before[0] != stands):
            self._note(stands, name)
        on_node = list(openings(node, need, now, allocations, self.latest)) if node.suits(need) else []
        self._openings[name] = {opening.workers: opening for opening in on_node}
        in_the_end = on_node[-1].workers if on_node else 0
        self._total += in_the_end - self._in_the_end.get(name, 0)
        self._in_the_end[name] = in_the_end
        return [
            (
                (NOW, 0, 0) if o.when[0] <= now else o.when,
                -o.workers if o.workers >= need.min_workers else 0,
                name,
                o.workers,
            )
            for o in on_node
        ]

    def _note(self, stands: float, name: str) -> None:
        """Push a time onto the heap, which is rebuilt once most of its entries are void."""
        heappush(self._due, (stands, name))
        if len(self._due) > 4 * len(self._stands) + 64:
            self._due = sorted(
                (moment, node_name) for node_name, (moment, _) in self._stands.items() if moment < UNKNOWN
            )
