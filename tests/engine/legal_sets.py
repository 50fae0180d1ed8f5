"""List the legal victim sets of a workload in quota by brute force, over all pools that a limit in its way reaches."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from math import prod

from engine.facts import Facts, RemainingByNode, State, amount
from makeway_quota.engine import GPU, Placed, QuotaLine, Workload
from makeway_quota.engine.snapshot import Placement

MAX_SETS = 1024
"""With more combinations than this the engines follow a stated order of attempts, and need not find a set."""
MAX_ORDERS = 5
"""Sets of more units than this are tried in one order only: the smallest first, then those of the own team."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Workers that leave together: an extra worker of an elastic gang, or all that is left of a workload."""

    victim: Workload
    pool: str
    amount: int
    shares: tuple[tuple[str, int], ...] = ()
    """Each pool and what counts there, where its nodes are in several."""

    def covered(self, line: QuotaLine) -> int:
        """Count what a line covers."""
        return sum(n for pool, n in self.shares or ((self.pool, self.amount),) if line.covers(pool))


@dataclass(frozen=True, slots=True)
class Leaving:
    """What happens to one candidate: the placement that it keeps, and the units that it gives up."""

    victim: Workload
    pool: str
    kept: Placement
    units: tuple[Unit, ...]


def legal_sets(facts: Facts, after: State, w: Workload, pool: str, own: bool = True) -> Iterator[tuple[Leaving, ...]]:
    """Iterate over the legal sets that make room for a workload in a pool; `after`: what is held by then.

    `own`: also those that only firm work may evict, of its own team whatever that uses.
    """
    rooms = after.rooms()
    able = [(o, place) for o, place in after.held.values() if _may_leave(facts, after, rooms, w, pool, o, place)]
    ways = [options(facts, o, place, pool) for o, place in able]
    idle = 2 ** _count_without_gpus(facts, after, w, pool, {o.id for o, _ in able})
    if prod(len(item) + 1 for item in ways) * idle > MAX_SETS:
        return
    for choice in product(*([None, *item] for item in ways)):
        group = tuple(leaving for leaving in choice if leaving is not None)
        remaining = without(after, group)
        room = facts.workers(remaining.rooms(), w, pool) >= facts.least(w)
        if room and remaining.admits(w, pool, facts.request(w)) and is_legal(facts, after, w, pool, group, own):
            yield group


def options(facts: Facts, o: Workload, place: Placement, near: str = "") -> list[Leaving]:
    """Return what can happen to a candidate: some of its extra workers leave, or all of it.

    Over several pools it stands in the way in the pool `near`, if it is there, too.
    """
    shares = facts.shares(o, place)
    pool, extra, item = facts.pool(place), max(0, len(place) - facts.least(o)), facts.profile(o).gpus
    if facts.is_fixed(o, place):
        pool = near if near in shares else pool
        whole = Unit(o, pool, sum(shares.values()), tuple(shares.items()))
        return [Leaving(o, pool, (), (whole,))]
    able = [p for p in place if facts.usable(p.node) and is_shown(facts, o, p)]
    result = []
    for count in range(1, extra + 1):
        for gone in combinations(place, count):
            kept = tuple(p for p in able if p not in gone)
            if len(kept) >= facts.least(o):
                first = (
                    amount(facts, o, place) - amount(facts, o, kept) - item * (count - 1)
                )  # with those that cannot stay
                units = (Unit(o, pool, first), *(Unit(o, pool, item),) * (count - 1))
                result.append(Leaving(o, pool, kept, units))
    rest = amount(facts, o, place) - extra * item
    return [*result, Leaving(o, pool, (), (*(Unit(o, pool, item),) * extra, Unit(o, pool, rest)))]


def is_shown(facts: Facts, o: Workload, placed: Placed) -> bool:
    """Whether a worker holds just what it requests, so that it could go on there."""
    devices, milli = facts.devices(o, placed)
    return len(devices) * (min(facts.profile(o).gpus, GPU) if milli is None else milli) == facts.profile(o).gpus


def without(state: State, group: Sequence[Leaving]) -> State:
    """Return the state once these have left."""
    held = dict(state.held)
    for leaving in group:
        del held[leaving.victim.id]
        if leaving.kept:
            held[leaving.victim.id] = leaving.victim, leaving.kept
    return State(state.facts, held)


def _count_without_gpus(facts: Facts, after: State, w: Workload, pool: str, able: Container[str]) -> int:
    """Count the work in a pool that holds no GPUs and would not help: it is among the combinations all the same."""
    others = [(o, place) for name, (o, place) in after.held.items() if name not in able and not amount(facts, o, place)]
    return sum(
        o.state in ("starting", "running")
        and not o.non_preemptible
        and not (w.kind == "job" and is_protected(facts, o))
        and any(facts.nodes[placed.node].pool == pool for placed in place if placed.node in facts.nodes)
        for o, place in others
    )


def _may_leave(
    facts: Facts, after: State, rooms: RemainingByNode, w: Workload, pool: str, o: Workload, place: Placement
) -> bool:
    """Whether a workload is a candidate by what it is and where it runs; not by what its team uses."""
    if o.non_preemptible or o.state not in ("starting", "running"):
        return False
    if w.kind == "job" and is_protected(facts, o):
        return False
    if any(_is_short(facts, rooms, w, pool, o, placed.node) for placed in place):
        return True
    if not amount(facts, o, place):
        return False
    shares = facts.shares(o, place)
    return pool in shares or any(
        any(map(line.covers, shares)) and name in _names(facts, o) for name, line in blocking(facts, after, w, pool)
    )


def _is_short(facts: Facts, rooms: RemainingByNode, w: Workload, pool: str, o: Workload, on: str) -> bool:
    """Whether a node of the pool, on the same machine as another node, has too little of what work there holds."""
    wants, holds = facts.profile(w), facts.profile(o)
    for name in facts.able(rooms, w, pool):
        if name != on and not (facts.nodes[on].host and facts.nodes[name].host == facts.nodes[on].host):
            continue
        room = rooms[name]
        item = wants.gpus // GPU if wants.gpus >= GPU else 1
        many = len(room.devices) // item * (1 if wants.gpus >= GPU else GPU // wants.gpus)
        many = min(facts.least(w), many)
        cpu, memory = room.cpu < many * wants.cpu and holds.cpu, room.memory < many * wants.memory and holds.memory
        if cpu or memory or room.pods < many:
            return True
    return False


def blocking(facts: Facts, after: State, w: Workload, pool: str) -> list[tuple[str, QuotaLine]]:
    """Return the limits that a workload would exceed in a pool."""
    lines = [(team.name, line) for team in facts.family(w.team) for line in team.quotas if line.covers(pool)]
    limited = [(name, line) for name, line in lines if line.limit is not None]
    return [(name, ln) for name, ln in limited if after.usage(name, ln) + facts.request(w) > (ln.limit or 0)]


def is_protected(facts: Facts, o: Workload) -> bool:
    """Whether a job runs for less than its profile's `min_runtime`."""
    minimum = facts.profile(o).min_runtime
    return bool(minimum) and (o.started_at is None or facts.snapshot.now - o.started_at < minimum)


def is_legal(facts: Facts, after: State, w: Workload, pool: str, group: Sequence[Leaving], own: bool = True) -> bool:
    """Whether a set can be evicted in some order by rules 5.1 and 5.7."""
    units = [unit for leaving in group for unit in leaving.units]
    if len(units) > MAX_ORDERS:
        units.sort(key=lambda unit: (owns(facts, w, pool, unit.victim, own), unit.amount))
        return _legal(facts, after, w, pool, units, own)
    return any(_legal(facts, after, w, pool, order, own) for order in permutations(units))


def _legal(facts: Facts, after: State, w: Workload, pool: str, order: Sequence[Unit], own: bool) -> bool:
    gone: list[Unit] = []
    for unit in order:
        if not owns(facts, w, pool, unit.victim, own) and not above(facts, after, w, pool, unit, gone):
            return False
        gone.append(unit)
    return True


def owns(facts: Facts, w: Workload, pool: str, victim: Workload, firm: bool, quota: bool = True) -> bool:
    """Whether a victim of the own team may leave whatever the team uses: for `firm` work, or for a higher priority.

    One without GPUs, of any team, leaves for work in `quota` only.
    """
    if not facts.profile(victim).gpus:
        return quota
    if victim.team != w.team:
        return False
    if w.non_preemptible:
        return firm
    if w.kind != "job" or not facts.snapshot.settings.in_team_preemption:
        return False
    below = priority(facts, victim) < priority(facts, w)
    return below and _rank(facts, victim, pool) >= _rank(facts, w, pool)


def priority(facts: Facts, w: Workload) -> int:
    """Return a workload's priority, one lower once it ran for `yields_after`."""
    after = facts.snapshot.settings.yields_after
    if not after or w.non_preemptible or w.kind != "job":
        return w.priority
    running = w.started_at is not None and w.state in ("starting", "running")
    ran = w.earlier_runtime + (facts.snapshot.now - (w.started_at or 0.0) if running else 0.0)
    return w.priority - (ran >= after)


def _rank(facts: Facts, w: Workload, pool: str) -> tuple[int, int]:
    names, ranks = facts.pools[pool].profiles, facts.profile(w).policies
    in_pool = names.index(w.profile) if w.profile in names else len(set(names))
    return in_pool, next((at for at, group in enumerate(ranks) if w.team in group), len(ranks))


def _names(facts: Facts, w: Workload) -> set[str]:
    return {team.name for team in facts.family(w.team)}


def above(facts: Facts, state: State, w: Workload, pool: str, unit: Unit, gone: Sequence[Unit]) -> bool:
    """Whether a unit's team is above its reservation, the request counted and those in `gone` not (rule 5.1)."""
    mine = [team.name for team in facts.family(w.team)]
    reserves = state.guarantor(w.team, pool) or w.team
    for team in facts.family(unit.victim.team):
        lines = [line for line in team.quotas if line.reserved and line.covers(unit.pool)]
        if team.name in mine[mine.index(reserves) + 1 :]:
            lines = [line for line in lines if not line.covers(pool)]  # the others stand over both sides
        if lines and not any(_used(facts, state, w, pool, team.name, ln, gone) > ln.reserved for ln in lines):
            return False
    return True


def _used(facts: Facts, state: State, w: Workload, pool: str, team: str, line: QuotaLine, gone: Sequence[Unit]) -> int:
    asks = w.id not in state.held and team in _names(facts, w) and line.covers(pool)
    own = facts.request(w) if asks else 0
    less = sum(u.covered(line) for u in gone if team in _names(facts, u.victim))
    return state.without_awaiting().usage(team, line) + own - less
