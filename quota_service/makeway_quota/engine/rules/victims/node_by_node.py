"""Choose victims for a gang node after node, where there are too many candidates for every set (rule 5.4).

Called by the search for victims (rules/reclaim.py). The node whose victims cost the fewest GPUs a worker comes first.
"""

from __future__ import annotations

import heapq
from fractions import Fraction

from ...index.nodes import NodeState
from .on_node import NodeVictims, room_on
from .one_by_one import without_needless
from .preemptor import Preemptor
from .returning import could_return
from .sets import Scored, Victim, Victims, in_legal_order
from .trial import PoolTrial

_Rate = tuple[object, ...]


class _Search:
    """The victims chosen so far, and the best set of every node with room to gain."""

    def __init__(self, preemptor: Preemptor) -> None:
        self.preemptor = preemptor
        self.chosen: dict[str, Victim] = {}
        self.where = preemptor.where()
        self.have = {
            n.position: n.workers(preemptor.need, True) for n in preemptor.pool.nodes if n.suits(preemptor.need)
        }
        self.missing = preemptor.need.min_workers - sum(
            min(preemptor.need.min_workers, many) for many in self.have.values()
        )
        self.heap: list[tuple[_Rate, int, int]] = []
        self.options: dict[int, tuple[int, Victims]] = {}
        """Position of a node to the workers that it gains and the victims."""
        self.versions = dict.fromkeys(self.have, 0)
        self.gone: dict[int, list[Victim]] = {}
        """Position of a node to the victims chosen so far with workers there."""

    def run(self) -> bool:
        """Choose victims until the gang fits; False if no node is left."""
        for position in self.where:
            self.offer(position)
        while self.missing > 0:
            if not self.heap:
                return False
            _, position, version = heapq.heappop(self.heap)
            if version != self.versions.get(position):
                continue
            gain, victims = self.options[position]
            if gain > self.missing or not self.legal(victims):
                self.offer(position)
                continue
            self.take(victims)
        return True

    def offer(self, position: int) -> None:
        """Push a node's best set onto the heap."""
        if position not in self.have:
            return
        self.versions[position] += 1
        best: tuple[_Rate, int, Victims] | None = None
        node, whole = self.preemptor.pool.nodes[position], self.preemptor.need.whole_devices
        max_gain = len(node.free_later) // whole - self.have[position] if whole else self.missing
        for gain in range(1, min(self.missing, max_gain) + 1):
            scored = self.set_for(node, gain)
            if scored is None:
                break
            (stops, gpus, *rest), victims = scored
            gone = (*self.chosen.values(), *victims)
            returns = any(
                could_return(self.preemptor, victim, gone) for victim in _one_of_each_kind(self.preemptor, victims)
            )
            rate = (returns, stops, Fraction(gpus, gain), *rest, -gain)
            if best is None or rate < best[0]:
                best = rate, gain, victims
        if best is not None:
            self.options[position] = best[1], best[2]
            heapq.heappush(self.heap, (best[0], position, self.versions[position]))

    def set_for(self, node: NodeState, gain: int) -> Scored | None:
        candidates = [a for a in self.where[node.position] if a.workload.id not in self.chosen]
        workers, before = self.have[node.position] + gain, self.gone.get(node.position, ())
        return NodeVictims(self.preemptor, node, candidates, workers, before, self.legal).best()

    def legal(self, victims: Victims) -> bool:
        """Whether a set is legal together with the victims chosen so far."""
        if in_legal_order(self.preemptor, victims) is not None:
            return True
        known = self.preemptor.chosen_so_far()
        ordered = in_legal_order(self.preemptor, (*self.chosen.values(), *victims))
        self.preemptor.choose_again(known)
        return ordered is not None

    def take(self, victims: Victims) -> None:
        """Choose a set, and score the nodes that it touches again."""
        nodes: set[int] = set()
        others: set[int] = set()
        for victim in victims:
            self.preemptor.choose(victim.allocation, victim.milli_gpus)
            self.chosen[victim.allocation.workload.id] = victim
            pool = self.preemptor.pool
            here = {node.position for part in victim.gone for node in part.node.host if node.pool is pool}
            nodes |= here
            parts = victim.allocation.parts
            others.update(node.position for part in parts for node in part.node.host if node.pool is pool)
            for position in here:
                self.gone.setdefault(position, []).append(victim)
        for position in nodes & self.have.keys():
            before = self.have[position]
            self.have[position] = room_on(self.preemptor, self.preemptor.pool.nodes[position], self.gone[position])
            min_workers = self.preemptor.need.min_workers
            self.missing -= min(min_workers, self.have[position]) - min(min_workers, before)
        for position in others & self.where.keys():
            self.offer(position)


def _one_of_each_kind(preemptor: Preemptor, victims: Victims) -> Victims:
    """Return one of the victims that are equal in whether they could return."""
    kinds: dict[tuple[object, ...], Victim] = {}
    for victim in victims:
        workload = victim.allocation.workload
        priority = preemptor.cluster.priority(workload)
        kinds[workload.team, workload.profile, priority, victim.allocation.need, victim.kind] = victim
    return tuple(kinds.values())


def node_by_node(preemptor: Preemptor, trial: PoolTrial) -> Victims:
    """Return victims for a gang, evicted in the cluster; empty, with nothing changed, if there are none."""
    search = _Search(preemptor)
    complete = search.run()
    preemptor.chosen_so_far()
    if not complete:
        return ()
    trial.become(search.chosen.values())
    if trial.fits():
        return without_needless(preemptor, tuple(search.chosen.values()), trial)
    trial.become()
    return ()
