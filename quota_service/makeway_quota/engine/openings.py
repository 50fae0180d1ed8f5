"""Where room will appear, and when: nodes as those that run there end, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .state import GPU
from .world import Need, NodeState, PoolState, Tenancy, hosts

UNKNOWN = float("inf")
EVER = (UNKNOWN, 1 << 60, 0)
"""After every moment, also of those that nobody knows."""
KNOWN = (UNKNOWN, 0, 0)
"""After every moment that is known."""
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

    A node's answer stands until it is touched, or until somebody there should have ended by now. `latest` is the
    last moment that is of interest.
    """

    def __init__(self, pool: PoolState, need: Need, latest: When) -> None:
        self.pool, self.need, self.latest = pool, need, latest
        self.turns, self.seen, self.now = -1, 0, UNKNOWN
        self.openings: list[list[Opening]] = [[] for _ in pool.nodes]
        self.first: Floats = np.full(len(pool.nodes), UNKNOWN)
        self.holds: Floats = np.full(len(pool.nodes), UNKNOWN)
        """Until when each node's answer stands."""

    def when(self, now: float, ends: Ends) -> float | None:
        """Give the time of the first room for all workers; None if there is some now, or nobody knows."""
        self._catch_up(now, ends)
        if self.need.least == 1:
            first = float(self.first.min(initial=UNKNOWN))
            return first if now < first < UNKNOWN else None
        found = self._chosen(now)
        return found[0][0] if found and now < found[0][0] < UNKNOWN else None

    def room(self, now: float, ends: Ends) -> tuple[When, list[Opening]] | None:
        """Find when the pool first has room for all the workers, and on which nodes; None if it never will."""
        self._catch_up(now, ends)
        return self._chosen(now)

    def ever(self, now: float, ends: Ends) -> bool:
        """Say whether there will ever be room for all the workers."""
        self._catch_up(now, ends)
        return sum(each[-1].workers for each in self.openings if each) >= self.need.least

    def _chosen(self, now: float) -> tuple[When, list[Opening]] | None:
        least = self.need.least
        if least == 1:
            first = [each[0] for each in self.openings if each]
            if not first:
                return None
            opening = min(first, key=lambda o: (max(o.when[0], now), *o.when[1:], o.node.position))
            return (max(opening.when[0], now), *opening.when[1:]), [opening]
        found = [((max(o.when[0], now), *o.when[1:]), o) for each in self.openings for o in each]
        found.sort(key=lambda e: (e[0], -e[1].workers if e[1].workers >= least else 0, e[1].node.position))
        chosen: dict[int, Opening] = {}
        for when, opening in found:
            chosen[opening.node.position] = opening
            if opening.workers >= least:
                return when, [opening]
            if sum(each.workers for each in chosen.values()) >= least:
                return when, _without_spare(list(chosen.values()), least)
        return None

    def _catch_up(self, now: float, ends: Ends) -> None:
        pool = self.pool
        if self.turns != pool.turns or now < self.now:
            stale: Iterable[int] = range(len(pool.nodes))
        elif self.seen == len(pool.touched) and now == self.now:
            return
        else:
            stale = {*pool.touched[self.seen :], *np.flatnonzero(self.holds <= now).tolist()}
        self.turns, self.seen, self.now = pool.turns, len(pool.touched), now
        for at in stale:
            self._ask(at, now, ends)

    def _ask(self, at: int, now: float, ends: Ends) -> None:
        node, need = self.pool.nodes[at], self.need
        found = self.openings[at] = list(openings(node, need, now, ends, self.latest)) if node.suits(need) else []
        self.first[at] = found[0].when[0] if found else UNKNOWN
        later = [end for t in node.guests.values() if (end := ends(t)) is not None and end > now]
        self.holds[at] = min(later, default=UNKNOWN)
