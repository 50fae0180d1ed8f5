"""Rank the nodes of a pool by their best set of victims, cached from one preemptor to the next equivalent one.

Called by the search for victims (rules/reclaim.py). A node where only one policy has candidates keeps its rank within
that policy until it is touched: the policy's share moves all its nodes alike. Such nodes are kept in one heap
per policy and are scored again only when touched, or when more of the policy's work may be evicted than before. Nodes
with candidates of several policies are scored for every preemptor, those with a higher bound than the best not at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..index.nodes import Allocation, NodeState
from ..state import GPU
from .victim_sets import Key, Scored, Victims, extra_workers, key
from .victims import Preemptor

Bound = tuple[bool, int]
"""A lower bound of the first two parts of a node's best key: stops and milli-GPUs."""
Judge = Callable[[Preemptor, NodeState, list[Allocation]], Scored | None]
"""Returns the best set on a node, given the candidates there; None if there is none."""


class Ranked(NamedTuple):
    """A node's best set of victims."""

    key: Key
    position: int
    victims: Victims


class Ranking:
    """The nodes of one pool by the cost of making room there for equivalent preemptors."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.heaps: dict[str, list[tuple[Key, int]]] = {}
        self.scores: dict[int, tuple[str, Key, Victims]] = {}
        self.unseen: list[tuple[Bound, int]] = []
        """A heap of nodes to score: new ones, and those with candidates of several policies."""
        self.bounds: dict[int, Bound] = {}
        self.touched = self.grown = -1

    def best(self, preemptor: Preemptor, without: Collection[int] = ()) -> Ranked | None:
        """Return the best set of victims on one node, `without` the nodes at these positions; None if there is none."""
        self._catch_up(preemptor)
        found = [ranked for name in list(self.heaps) if (ranked := self._top(preemptor, name, without)) is not None]
        best = min(found, key=lambda ranked: ranked[:2], default=None)
        again: list[tuple[Bound, int]] = []
        while self.unseen and (best is None or self.unseen[0][0] <= best.key[:2]):
            bound, position = heapq.heappop(self.unseen)
            if self.bounds.get(position) != bound:
                continue
            if position in without:
                again.append((bound, position))
                continue
            scored = self._score(preemptor, position, again)
            if scored is not None and (best is None or (scored[0], position) < best[:2]):
                best = Ranked(scored[0], position, scored[1])
        for entry in again:
            self.bounds[entry[1]] = entry[0]
            heapq.heappush(self.unseen, entry)
        return best

    def _catch_up(self, preemptor: Preemptor) -> None:
        """Drop the scores of touched nodes, and of policies with more candidates than before."""
        pool, grown = preemptor.pool, preemptor.cluster.ledger.grown
        if self.grown < 0 or (preemptor.right == "fair_share" and len(grown) > self.grown):
            self.heaps, self.scores, self.unseen, self.bounds = {}, {}, [], {}
            positions = set(preemptor.where())
        else:
            positions = set(pool.touched[self.touched :])
            policies = preemptor.became_candidates(grown[self.grown :]) if len(grown) > self.grown else ()
            if policies:
                positions.update(node.position for node in pool.nodes if _hosts_any(node, policies))
        for position in positions:
            self.scores.pop(position, None)
            self.bounds.pop(position, None)
            able = self._able(preemptor, position)
            if able:
                bound = self.bounds[position] = _bound(preemptor, pool.nodes[position], able)
                heapq.heappush(self.unseen, (bound, position))
        self.touched, self.grown = len(pool.touched), len(grown)

    def _score(self, preemptor: Preemptor, position: int, again: list[tuple[Bound, int]]) -> Scored | None:
        """Score a node; with candidates of several policies it is added to `again`, as their shares change."""
        policies, scored = self._judge(preemptor, position)
        self.bounds.pop(position, None)
        if scored is None:
            return None
        if len(policies) > 1:
            again.append((scored[0][:2], position))
        else:
            (policy,) = policies
            plain = _without_share(scored[0])
            self.scores[position] = policy, plain, scored[1]
            heapq.heappush(self.heaps.setdefault(policy, []), (plain, position))
        return scored

    def _judge(self, preemptor: Preemptor, position: int) -> tuple[set[str], Scored | None]:
        able = self._able(preemptor, position)
        if not able:
            return set(), None
        return {a.workload.policy for a in able}, self.judge(preemptor, preemptor.pool.nodes[position], able)

    def _able(self, preemptor: Preemptor, position: int) -> list[Allocation]:
        """Return the candidates on a node; none if they are not enough."""
        node = preemptor.pool.nodes[position]
        if not node.allocations or not node.suits(preemptor.need):
            return []
        able = preemptor.candidates_on(node)
        return able if able and enough_devices(preemptor, node, able) else []

    def _top(self, preemptor: Preemptor, policy: str, without: Collection[int]) -> Ranked | None:
        heap = self.heaps[policy]
        aside: list[tuple[Key, int]] = []
        found: Ranked | None = None
        while heap and found is None:
            plain, position = heap[0]
            known = self.scores.get(position)
            if known is None or known[:2] != (policy, plain):
                heapq.heappop(heap)
            elif position in without:
                aside.append(heapq.heappop(heap))
            else:
                found = self._still(preemptor, position, known[2], plain)
        for entry in aside:
            heapq.heappush(heap, entry)
        return found

    def _still(self, preemptor: Preemptor, position: int, victims: Victims, plain: Key) -> Ranked | None:
        """Return a node's best set with its present key if it is still the best; else score the node again."""
        first = victims[0].allocation
        if len(victims) == 1 and not extra_workers(first) and preemptor.is_candidate(first):
            return Ranked(key(preemptor, victims), position, victims)
        scored = self._judge(preemptor, position)[1]
        if scored is not None and _without_share(scored[0]) == plain:
            return Ranked(scored[0], position, scored[1])
        del self.scores[position]
        if scored is not None:
            self.bounds[position] = scored[0][:2]
            heapq.heappush(self.unseen, (self.bounds[position], position))
        return None


def _hosts_any(node: NodeState, policies: Collection[str]) -> bool:
    return any(a.workload.policy in policies for a in node.allocations.values())


def _bound(preemptor: Preemptor, node: NodeState, able: Sequence[Allocation]) -> Bound:
    """Return a lower bound of the cost of room on a node: the milli-GPUs in use on the devices that are needed."""
    if any(a.fresh for a in able):
        return False, 0
    missing = preemptor.need.whole - node.whole_future
    used = sorted([GPU - left for left in node.future if left < GPU])[:missing] if missing > 0 else ()
    if any(map(extra_workers, able)):
        return False, sum(used)
    return True, max(sum(used), min([a.amount for a in able]))


def enough_devices(preemptor: Preemptor, node: NodeState, able: Sequence[Allocation]) -> bool:
    """Whether evicting all candidates would free enough devices for a worker; False is certain, True is not."""
    wanted = preemptor.need.whole - node.whole_future
    if wanted <= 0:
        return True
    for allocation in able:
        for part in allocation.parts:
            if part.node is node:
                wanted -= len(part.devices)
        if wanted <= 0:
            return True
    return False


def _without_share(key: Key) -> Key:
    """Return a key without the policy's share, which moves the keys of all its nodes alike."""
    stops, gpus, withdrawn, protections, many, orders, given = key
    plain = [tuple((*order[:2], *order[3:]) for order in each) for each in (protections, orders)]
    return stops, gpus, withdrawn, plain[0], many, plain[1], tuple(given)
