"""The node that is cheapest to clear, remembered from one preemptor to the next that is alike.

A node where only one team could be asked keeps its rank within that team until something happens on it: the
team's share moves all its nodes alike. Such nodes wait in one heap per team and are scored again only when
touched, or when the team may be asked for more than before. Nodes where several teams could be asked are scored
for every preemptor, those where more GPUs have to leave than elsewhere not at all.

Nobody is scored before its turn: until then a node has a bound, which its score cannot be below.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from ..rules.victims import Preemptor
from ..state import GPU
from .nodes import Allocation, NodeState

Score = tuple[object, ...]
Scored = tuple[Score, list[Allocation]]
Bound = tuple[int, int]
"""The first two parts of a score: priority and milli-GPUs."""
Judge = Callable[[Preemptor, NodeState, list[Allocation]], Scored | None]
"""Scores a node, given those who could be asked there in order of terminating; None if that would not do."""


class Ranking:
    """The nodes of one pool by what it costs to clear them for preemptors of one kind."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.heaps: dict[str, list[tuple[Score, int]]] = {}
        self.scores: dict[int, tuple[str, Score, list[Allocation]]] = {}
        self.mixed: set[int] = set()
        self.unseen: list[tuple[Bound, int]] = []
        """A heap of nodes that were not scored yet."""
        self.bounds: dict[int, Bound] = {}
        self.touched = self.grown = -1

    def best(self, preemptor: Preemptor) -> list[Allocation] | None:
        """Give the cheapest set of victims on one node; None if no node would do."""
        self._catch_up(preemptor)
        found = [scored for name in list(self.heaps) if (scored := self._top(preemptor, name)) is not None]
        for position in sorted(self.mixed):
            scored = self._judge(preemptor, position)[1]
            if scored is not None:
                found.append(scored)
            else:
                self.mixed.discard(position)
        best = min(found, key=lambda scored: scored[0]) if found else None
        while self.unseen and (best is None or self.unseen[0][0] <= best[0][:2]):
            bound, position = heapq.heappop(self.unseen)
            if self.bounds.get(position) == bound:
                scored = self._score(preemptor, position)
                if scored is not None and (best is None or scored[0] < best[0]):
                    best = scored
        return best[1] if best is not None else None

    def _catch_up(self, preemptor: Preemptor) -> None:
        """Look anew at what was touched since the last preemptor, and where a team grew and so is easier to ask now."""
        pool, grown = preemptor.pool, preemptor.cluster.ledger.grown
        if self.grown < 0 or (preemptor.right == "fair_share" and len(grown) > self.grown):
            self.heaps, self.scores, self.mixed, self.unseen, self.bounds = {}, {}, set(), [], {}
            positions = set(preemptor.where())
        else:
            positions = set(pool.touched[self.touched :])
            easier = preemptor.easier(grown[self.grown :]) if len(grown) > self.grown else ()
            if easier:
                positions.update(node.position for node in pool.nodes if _hosts_any(node, easier))
        for position in positions:
            self.mixed.discard(position)
            self.scores.pop(position, None)
            self.bounds.pop(position, None)
            able = self._able(preemptor, position)
            if able:
                bound = self.bounds[position] = _bound(preemptor, pool.nodes[position], able)
                heapq.heappush(self.unseen, (bound, position))
        self.touched, self.grown = len(pool.touched), len(grown)

    def _score(self, preemptor: Preemptor, position: int) -> Scored | None:
        teams, scored = self._judge(preemptor, position)
        self.bounds.pop(position, None)
        if scored is None:
            return None
        if len(teams) > 1:
            self.mixed.add(position)
        else:
            (team,) = teams
            plain = _without_share(scored[0])
            self.scores[position] = team, plain, scored[1]
            heapq.heappush(self.heaps.setdefault(team, []), (plain, position))
        return scored

    def _judge(self, preemptor: Preemptor, position: int) -> tuple[set[str], Scored | None]:
        able = self._able(preemptor, position)
        if not able:
            return set(), None
        able.sort(key=preemptor.order)
        return {t.workload.policy for t in able}, self.judge(preemptor, preemptor.pool.nodes[position], able)

    def _able(self, preemptor: Preemptor, position: int) -> list[Allocation]:
        """List those on a node who could be asked; nobody if that would not do."""
        node = preemptor.pool.nodes[position]
        if not node.allocations or not node.suits(preemptor.need):
            return []
        able = preemptor.askable(node)
        return able if able and enough_devices(preemptor, node, able) else []

    def _top(self, preemptor: Preemptor, team: str) -> Scored | None:
        heap = self.heaps[team]
        while heap:
            plain, position = heap[0]
            known = self.scores.get(position)
            if known is None or known[:2] != (team, plain):
                heapq.heappop(heap)
                continue
            if len(known[2]) == 1 and preemptor.may_ask(known[2][0]):
                return score(preemptor, known[2]), known[2]
            scored = self._judge(preemptor, position)[1]
            if scored is not None and _without_share(scored[0]) == plain:
                return scored
            heapq.heappop(heap)
            del self.scores[position]
            if scored is not None:
                self._score(preemptor, position)
        return None


def _hosts_any(node: NodeState, teams: set[str]) -> bool:
    return any(t.workload.policy in teams for t in node.allocations.values())


def _bound(preemptor: Preemptor, node: NodeState, able: Sequence[Allocation]) -> Bound:
    """Give what clearing a node costs at least: one of these, and what is in use on the devices that are needed."""
    missing = preemptor.need.whole - node.whole_future
    used = sorted([GPU - left for left in node.future if left < GPU])[:missing] if missing > 0 else ()
    return min([preemptor.level(t) for t in able]), max(sum(used), min([preemptor.takes(t) for t in able]))


def enough_devices(preemptor: Preemptor, node: NodeState, able: Sequence[Allocation]) -> bool:
    """Say whether a node could have the GPUs for a worker, going by their number alone: if not, it has no room."""
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


def score(preemptor: Preemptor, chosen: Sequence[Allocation]) -> Score:
    """Give what a set of victims costs: the highest priority among them, GPUs, then the order of terminating."""
    orders = sorted(preemptor.order(t) for t in chosen)
    return (max(order[0] for order in orders), sum(preemptor.takes(t) for t in chosen), orders)  # type: ignore[type-var]


def _without_share(score: Score) -> Score:
    priority, amount, orders = score
    assert isinstance(orders, list)
    return (priority, amount, tuple((order[0], *order[2:]) for order in orders))
