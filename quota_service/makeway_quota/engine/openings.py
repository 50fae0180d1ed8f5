"""Where room will appear, and when: nodes as those that run there end, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .state import GPU
from .world import Need, NodeState, PoolState, Tenancy, hosts

UNKNOWN = float("inf")
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
