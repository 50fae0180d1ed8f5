"""Where room will appear, and when: nodes as those that run there end, one after the other."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..request import Need
from ..state import GPU
from .nodes import Allocation, NodeState, PoolState, hosts

UNKNOWN = float("inf")
EVER = (UNKNOWN, 1 << 60, 0)
"""After every moment, also of those that nobody knows."""
KNOWN = (UNKNOWN, 0, 0)
"""After every moment that is known."""
NOW = -1.0
"""Before every moment: what is there already, or should be."""
Floats = npt.NDArray[np.float64]
Ends = Callable[[Allocation], float | None]
"""When somebody who runs is gone; None where nobody knows."""
When = tuple[float, int, int]
"""A time, then (where that is unknown) the milli-GPUs of sessions and of jobs that have to end first."""
Allocations = list[tuple[Allocation, float | None]]
"""Those on a node, and when each is gone."""
Key = tuple[When, int, int, int]
"""The order of openings: when, those with room for all first, the node's position, how many workers."""


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
    left, whole, cpu, memory = list(node.future), node.whole_future, node.cpu_future, node.memory_future
    many = hosts(need, left, whole, cpu, memory)
    if many:
        when = now
        if node.workers(need, False) < many:
            when = max((end or UNKNOWN for allocation, end in allocations if allocation.terminating), default=now)
        if (when, 0, 0) < before:
            yield Opening((when, 0, 0), node, min(many, need.least), whole, cpu, memory)
    if many >= need.least:
        return
    for moment, allocation in _leaving_order(allocations, now):
        if moment >= before:
            return
        for part in allocation.parts:
            if part.node is node:
                for at in part.devices:
                    left[at] += part.milli
                    whole += left[at] == GPU
                cpu += allocation.need.cpu
                memory += allocation.need.memory
        more = hosts(need, left, whole, cpu, memory)
        if more > many:
            many = more
            yield Opening(moment, node, min(many, need.least), whole, cpu, memory)
            if many >= need.least:
                return


def _leaving_order(allocations: Allocations, now: float) -> Iterator[tuple[When, Allocation]]:
    """Go through those on a node as they end; where nobody knows when, jobs before sessions, small ones first."""
    known, unknown = [], []
    for allocation, end in allocations:
        if end is not None and not allocation.terminating:
            known.append((end, allocation.workload.id, allocation))
        elif not allocation.terminating:
            unknown.append((allocation.workload.non_preemptible, allocation.amount, allocation.workload.id, allocation))
    for end, _, allocation in sorted(known):
        yield (max(now, end), 0, 0), allocation
    non_preemptible = loose = 0
    for is_non_preemptible, amount, _, allocation in sorted(unknown):
        if is_non_preemptible:
            non_preemptible += amount
        else:
            loose += amount
        yield (UNKNOWN, non_preemptible, loose), allocation


def _without_spare(chosen: list[Opening], least: int) -> list[Opening]:
    """Leave out the nodes that are not needed, those with the fewest workers first."""
    spare = sum(each.workers for each in chosen) - least
    for each in sorted(chosen, key=lambda o: (o.workers, -o.node.position)):
        if each.workers <= spare:
            spare -= each.workers
            chosen.remove(each)
    return chosen


class Foreseen:
    """When a pool will have room for a need: what each node says, asked again only where something happened.

    A node's answer stands until something moves there, or until somebody there should have ended by now. `latest` is
    the last moment that is of interest.
    """

    def __init__(self, pool: PoolState, need: Need, latest: When) -> None:
        self.pool, self.need, self.latest = pool, need, latest
        self.rounds, self.seen, self.now = -1, 0, UNKNOWN
        self.openings: list[dict[int, Opening]] = [{} for _ in pool.nodes]
        """Of each node, by how many workers it hosts then."""
        self.holds: Floats = np.full(len(pool.nodes), UNKNOWN)
        """Until when each node's answer stands."""
        self.soonest = UNKNOWN
        """The first of these moments, or one before it."""
        self._order: list[Key] = []
        self._keys: list[list[Key]] = [[] for _ in pool.nodes]
        self._in_the_end = [0] * len(pool.nodes)
        """How many workers each node will host."""

    def when(self, now: float, ends: Ends) -> float | None:
        """Give the time of the first room for all workers; None if there is some now, or nobody knows."""
        found = self.room(now, ends)
        return found[0][0] if found and now < found[0][0] < UNKNOWN else None

    def room(self, now: float, ends: Ends) -> tuple[When, list[Opening]] | None:
        """Find when the pool first has room for all the workers, and on which nodes; None if it never will."""
        self._catch_up(now, ends)
        least, total = self.need.least, 0
        chosen: dict[int, Opening] = {}
        for (when, non_preemptible, loose), _, position, workers in self._order:
            opening = self.openings[position][workers]
            moment = (max(when, now), non_preemptible, loose)
            if workers >= least:
                return moment, [opening]
            total += workers - (chosen[position].workers if position in chosen else 0)
            chosen[position] = opening
            if total >= least:
                return moment, _without_spare(list(chosen.values()), least)
        return None

    def ever(self, now: float, ends: Ends) -> bool:
        """Say whether there will ever be room for all the workers."""
        self._catch_up(now, ends)
        return sum(self._in_the_end) >= self.need.least

    def _catch_up(self, now: float, ends: Ends) -> None:
        pool = self.pool
        anew = self.rounds != pool.rounds or now < self.now
        if not anew and self.seen == len(pool.moved) and now == self.now:
            return
        if anew:
            for at in range(len(pool.nodes)):
                self._keys[at] = self._ask(at, now, ends)
            self._order = sorted(key for keys in self._keys for key in keys)
        else:
            due = self.soonest <= now
            for at in {*pool.moved[self.seen :], *(np.flatnonzero(self.holds <= now).tolist() if due else ())}:
                self._put_in_order(at, self._ask(at, now, ends))
            if due:
                self.soonest = float(self.holds.min())
        self.rounds, self.seen, self.now = pool.rounds, len(pool.moved), now

    def _put_in_order(self, at: int, keys: list[Key]) -> None:
        before = self._keys[at]
        if keys != before:
            for key in before:
                del self._order[bisect_left(self._order, key)]
            for key in keys:
                insort(self._order, key)
            self._keys[at] = keys

    def _ask(self, at: int, now: float, ends: Ends) -> list[Key]:
        """Ask one node anew; give its openings' places in the order."""
        node, need = self.pool.nodes[at], self.need
        allocations = [(allocation, ends(allocation)) for allocation in node.allocations.values()]
        later = [end for _, end in allocations if end is not None and end > now]
        self.holds[at] = stands = min(later, default=UNKNOWN)
        self.soonest = min(self.soonest, stands)
        found = list(openings(node, need, now, allocations, self.latest)) if node.suits(need) else []
        self.openings[at] = {opening.workers: opening for opening in found}
        self._in_the_end[at] = found[-1].workers if found else 0
        return [
            ((NOW, 0, 0) if o.when[0] <= now else o.when, -o.workers if o.workers >= need.least else 0, at, o.workers)
            for o in found
        ]
