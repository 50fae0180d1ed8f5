"""Find the sets of victims that make room for workers on one node (rule 5.4).

Called for every node that could be the cheapest (ranking.py), and node after node for gangs (rules/reclaim.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...index.devices import hosts
from ...index.nodes import Allocation, NodeState
from ...snapshot import GPU, STARTING
from .one_by_one import one_by_one, orders, steps_of
from .preemptor import Preemptor
from .sets import (
    MAX_SETS,
    Scored,
    Victim,
    Victims,
    Ways,
    all_minimal_sets,
    combinations_of,
    cost,
    in_legal_order,
    key,
    minimal_sets,
    one_less,
    ways,
    whole,
)
from .trial import allowed_without


class NodeVictims:
    """The victim sets that make room on one node for so many workers, after the victims `before`."""

    def __init__(
        self,
        preemptor: Preemptor,
        node: NodeState,
        candidates: Iterable[Allocation],
        workers: int = 1,
        before: Sequence[Victim] = (),
        legal: Callable[[Victims], object] | None = None,
    ) -> None:
        self.preemptor, self.node, self.workers = preemptor, node, workers
        self.nodes = (node, *node.host_peers)
        self.candidates = sorted(candidates, key=preemptor.order)
        self.before = tuple(before)
        self.legal = legal or (lambda victims: in_legal_order(preemptor, victims))

    def fits(self, victims: Victims) -> bool:
        """Whether the node has room without a set."""
        return has_room(self.preemptor, self.node, (*self.before, *victims), self.workers)

    def best(self) -> Scored | None:
        """Return the best minimal legal set; None if there is none."""
        groups = _groups(self.candidates)
        losing = [a for a in self.candidates if a.milli_gpus and not a.started_in_plan and a.workload.state != STARTING]
        plain = len([a for a in losing if len(a.parts) <= a.need.min_workers]) == len(self.candidates)
        single = self._best_single([group[0] for group in groups]) if plain else None
        if single is not None:
            return single
        every = tuple(map(whole, self.candidates))
        if not every or not self.fits(every):
            return None
        if combinations_of(self.candidates, self.node) > MAX_SETS:
            return min(self._some(), key=lambda scored: scored[0], default=None)
        if plain and not any(self.fits(_without(every, group[0])) for group in groups):
            return (key(self.preemptor, every), every) if self.legal(every) else None
        return self._best_of_all([_ways_of(group, self.node) for group in groups])

    def _best_single(self, candidates: Sequence[Allocation]) -> Scored | None:
        """Return the best set of one victim, if one is enough and any two have more GPUs."""
        singles = [single for a in candidates if self.fits(single := (whole(a),))]
        if not singles:
            return None
        smallest = min([single[0].allocation.milli_gpus for single in singles])
        if 2 * min([a.milli_gpus for a in candidates]) <= smallest:
            return None
        scored = [
            (key(self.preemptor, s), s) for s in singles if s[0].allocation.milli_gpus == smallest and self.legal(s)
        ]
        return min(scored, key=lambda item: item[0], default=None)

    def _best_of_all(self, units: Sequence[Ways]) -> Scored | None:
        best: Scored | None = None

        def worse(victims: Victims) -> bool:
            return best is not None and cost(victims) > best[0][:2]

        for victims in minimal_sets(units, self.fits, worse):
            if worse(victims) or not self.legal(victims):
                continue
            scored = key(self.preemptor, victims), victims
            if best is None or scored[0] < best[0]:
                best = scored
        return best

    def all(self) -> list[Scored]:
        """Return the minimal legal sets, the best first; some of them where there are too many candidates."""
        if combinations_of(self.candidates, self.node) > MAX_SETS:
            return sorted(self._some(), key=lambda scored: scored[0])
        sets = minimal_sets([ways(a, self.nodes) for a in self.candidates], self.fits)
        legal = [(key(self.preemptor, victims), victims) for victims in sets if self.legal(victims)]
        return sorted(legal, key=lambda scored: scored[0])

    def _some(self) -> list[Scored]:
        """Return the legal sets of one victim, and the set that a search one by one finds."""
        sets = [way for a in self.candidates for way in ways(a, self.nodes) if self.fits(way) and self._minimal(way)]
        steps = [step for a in self.candidates for step in steps_of(a, self.nodes)]
        for order in orders(self.preemptor, steps):
            chosen = one_by_one(self.preemptor, order, _NodeTrial(self))
            if chosen:
                sets += [chosen] if chosen not in sets else []
                break
        return [(key(self.preemptor, victims), victims) for victims in sets if self.legal(victims)]

    def _minimal(self, victims: Victims) -> bool:
        return not any(self.fits(fewer) for fewer in one_less(victims))


class NodeVictimsInQuotas(NodeVictims):
    """The sets that make room on one node, and after which no static quota keeps the preemptor out.

    Slower, and different only where an evicted team falls below the GPUs that are kept free for it.
    """

    def fits(self, victims: Victims) -> bool:
        """Whether the preemptor could start on the node with a set gone."""
        return super().fits(victims) and allowed_without(self.preemptor, victims)

    def best(self) -> Scored | None:
        """Return the best minimal legal set; None if there is none."""
        return next(iter(self.all()), None) if self.preemptor.may_tighten() else super().best()

    def all(self) -> list[Scored]:
        """Return the minimal legal sets, the best first; with too many candidates, some of them."""
        if not self.preemptor.may_tighten() or combinations_of(self.candidates, self.node) > MAX_SETS:
            return super().all()
        sets = all_minimal_sets([ways(a, self.nodes) for a in self.candidates], self.fits)
        legal = [(key(self.preemptor, victims), victims) for victims in sets if self.legal(victims)]
        return sorted(legal, key=lambda scored: scored[0])


class _NodeTrial:
    """One node without the victims that were added."""

    booked = False

    def __init__(self, sets: NodeVictims) -> None:
        self.sets = sets
        self.gone: dict[str, Victim] = {}

    def add(self, victim: Victim) -> None:
        self.gone[victim.allocation.workload.id] = victim

    def remove(self, victim: Victim) -> None:
        del self.gone[victim.allocation.workload.id]

    def fits(self) -> bool:
        return self.sets.fits(tuple(self.gone.values()))

    def surely_needs(self, victim: Victim) -> bool:
        return False


def _groups(candidates: Sequence[Allocation]) -> list[list[Allocation]]:
    """Group the candidates on one node that are equal but for their protection, the least protected first.

    One of whose devices the node shows fewer, or that stands for all of them, is equal to none.
    """
    groups: dict[object, list[Allocation]] = {}
    for allocation in candidates:
        need, parts = allocation.need, allocation.parts
        equal = need.gpus >= GPU and len(parts) == 1 and len(parts[0].devices) == need.whole_devices
        equal = equal and not allocation.started_in_plan and allocation.workload.state != STARTING
        known = (allocation.workload.team, need, parts[0].node.node.name) if equal else allocation.workload.id
        groups.setdefault(known, []).append(allocation)
    return list(groups.values())


def _ways_of(group: Sequence[Allocation], node: NodeState) -> Ways:
    """Return the ways in which equal candidates make room: for each number of them, the least protected ones."""
    if len(group) == 1:
        return ways(group[0], node.host)
    members = tuple(map(whole, group))
    return [members[:count] for count in range(len(group), 0, -1)]


def _without(victims: Victims, one: Allocation) -> Victims:
    return tuple(victim for victim in victims if victim.allocation is not one)


def has_room(preemptor: Preemptor, node: NodeState, gone: Iterable[Victim], workers: int) -> bool:
    """Whether a node hosts so many workers of the preemptor in the future, without these victims."""
    return room_on(preemptor, node, gone) >= workers


def room_on(preemptor: Preemptor, node: NodeState, gone: Iterable[Victim]) -> int:
    """Return how many workers of the preemptor a node hosts in the future, without these victims."""
    devices, untouched, cpu, memory = (
        node.free_later,
        node.whole_free_later,
        node.cpu_free_later,
        node.memory_free_later,
    )
    copied, pods = False, node.pods_free_later
    for victim in gone:
        for part in victim.gone:
            if part.node is not node and part.node not in node.host_peers:
                continue
            if not copied:
                devices, copied = list(devices), True
            for at in part.devices if part.node is node else ():
                devices[at] += part.milli_per_device
                untouched += devices[at] == GPU
            cpu += victim.allocation.need.cpu
            memory += victim.allocation.need.memory
            pods += 1
    return hosts(preemptor.need, devices, untouched, cpu, memory, pods)
