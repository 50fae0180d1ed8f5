"""Where room will appear, and when: nodes as those that run there end, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .state import GPU
from .world import Need, NodeState, PoolState, Tenancy, hosts

UNKNOWN = float("inf")
Floats = npt.NDArray[np.float64]
Ends = Callable[[Tenancy], float | None]
"""When somebody who runs is gone; None where nobody knows."""
When = tuple[float, int, int]
"""A time, then (where that is unknown) the milli-GPUs of sessions and of jobs that have to end first."""


@dataclass(frozen=True, slots=True)
class Opening:
    """From `when` on, a node hosts `workers`; `whole`, `cpu` and `memory` are what is left on it then."""

    when: When
    node: NodeState
    workers: int
    whole: int
    cpu: int
    memory: int


def openings(node: NodeState, need: Need, now: float, ends: Ends, before: When) -> Iterator[Opening]:
    """List the moments before `before` at which a node can host more workers, up to the least that is needed."""
    left, whole, cpu, memory = list(node.future), node.whole_future, node.cpu_future, node.memory_future
    many = hosts(need, left, whole, cpu, memory)
    if many:
        when = now
        if node.workers(need, False) < many:
            when = max((ends(t) or UNKNOWN for t in node.guests.values() if t.leaving), default=now)
        if (when, 0, 0) < before:
            yield Opening((when, 0, 0), node, min(many, need.least), whole, cpu, memory)
    for moment, tenancy in _leaving_order(node, now, ends):
        if many >= need.least or moment >= before:
            return
        for part in tenancy.parts:
            if part.node is node:
                for at in part.devices:
                    left[at] += part.milli
                    whole += left[at] == GPU
                cpu += tenancy.need.cpu
                memory += tenancy.need.memory
        more = hosts(need, left, whole, cpu, memory)
        if more > many:
            many = more
            yield Opening(moment, node, min(many, need.least), whole, cpu, memory)


def _leaving_order(node: NodeState, now: float, ends: Ends) -> Iterator[tuple[When, Tenancy]]:
    """Go through those on a node as they end; where nobody knows when, jobs before sessions, small ones first."""
    stay = [t for t in node.guests.values() if not t.leaving]
    known = [(end, t.workload.id, t) for t in stay if (end := ends(t)) is not None]
    for end, _, tenancy in sorted(known, key=lambda each: each[:2]):
        yield (max(now, end), 0, 0), tenancy
    firm = loose = 0
    for tenancy in sorted(stay, key=lambda t: (t.workload.firm, t.amount, t.workload.id)):
        if ends(tenancy) is None:
            firm += tenancy.amount * tenancy.workload.firm
            loose += tenancy.amount * (not tenancy.workload.firm)
            yield (UNKNOWN, firm, loose), tenancy


def first_room(pool: PoolState, need: Need, now: float, ends: Ends) -> tuple[When, list[Opening]] | None:
    """Find when a pool first has room for all the workers, and on which nodes; None if it never will."""
    found: list[Opening] = []
    best: When = (UNKNOWN, 1 << 60, 0)
    for node in pool.nodes:
        if not node.suits(need):
            continue
        for opening in openings(node, need, now, ends, best):
            found.append(opening)
            if opening.workers >= need.least:
                best = min(best, opening.when)
    found.sort(key=lambda o: (o.when, -o.workers if o.workers >= need.least else 0, o.node.position))
    chosen: dict[int, Opening] = {}
    for opening in found:
        chosen[opening.node.position] = opening
        if opening.workers >= need.least:
            return opening.when, [opening]
        if sum(each.workers for each in chosen.values()) >= need.least:
            return opening.when, _without_spare(list(chosen.values()), need.least)
    return None


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

    A node's answer stands until it is touched, or until somebody there should have ended by now.
    """

    def __init__(self, pool: PoolState, need: Need) -> None:
        self.pool, self.need = pool, need
        self.seen, self.now = -1, UNKNOWN
        self.openings: list[list[tuple[float, int]]] = [[] for _ in pool.nodes]
        self.first: Floats = np.full(len(pool.nodes), UNKNOWN)
        self.holds: Floats = np.full(len(pool.nodes), UNKNOWN)
        """Until when each node's answer stands."""

    def when(self, now: float, ends: Ends) -> float | None:
        """Give the time of the first room for all workers; None if there is some now, or nobody knows."""
        self._catch_up(now, ends)
        least = self.need.least
        if least == 1:
            first = float(self.first.min(initial=UNKNOWN))
            return first if now < first < UNKNOWN else None
        news = sorted((when, at, workers) for at, each in enumerate(self.openings) for when, workers in each)
        hosted: dict[int, int] = {}
        total = 0
        for when, at, workers in news:
            total += workers - hosted.get(at, 0)
            hosted[at] = workers
            if total >= least:
                return when if when > now else None
        return None

    def _catch_up(self, now: float, ends: Ends) -> None:
        if self.seen < 0 or self.seen > len(self.pool.touched) or now < self.now:
            stale: Iterable[int] = range(len(self.pool.nodes))
        elif self.seen == len(self.pool.touched) and now == self.now:
            return
        else:
            stale = {*self.pool.touched[self.seen :], *np.flatnonzero(self.holds <= now).tolist()}
        self.seen, self.now = len(self.pool.touched), now
        for at in stale:
            self._ask(at, now, ends)

    def _ask(self, at: int, now: float, ends: Ends) -> None:
        node, need = self.pool.nodes[at], self.need
        found: list[tuple[float, int]] = []
        if node.suits(need):
            found = [(o.when[0], o.workers) for o in openings(node, need, now, ends, (UNKNOWN, 0, 0))]
        self.openings[at] = found if need.least > 1 else []
        self.first[at] = found[0][0] if found else UNKNOWN
        later = [end for t in node.guests.values() if (end := ends(t)) is not None and end > now]
        self.holds[at] = min(later, default=UNKNOWN)
