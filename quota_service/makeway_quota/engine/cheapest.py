"""The node that is cheapest to clear, remembered from one seeker to the next that is alike.

A node where only one team could be asked keeps its rank within that team until something happens on it: the
team's share moves all its nodes alike. Such nodes wait in one heap per team and are scored again only when
touched. Nodes where several teams could be asked are scored for every seeker.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from .limits import Account
from .victims import Seeker
from .world import NodeState, Tenancy

Score = tuple[object, ...]
Scored = tuple[Score, list[Tenancy]]
Judge = Callable[[Seeker, NodeState, Sequence[Tenancy]], Scored | None]
"""Scores a node, given those who could be asked there in order of leaving; None if that would not do."""


class Ranking:
    """The nodes of one pool by what it costs to clear them for seekers of one kind."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.heaps: dict[str, list[tuple[Score, int]]] = {}
        self.scores: dict[int, tuple[str, Score]] = {}
        self.mixed: set[int] = set()
        self.own = False
        self.touched = self.grown = -1

    def best(self, seeker: Seeker) -> list[Tenancy] | None:
        """Give the cheapest set of victims on one node; None if no node would do."""
        self._catch_up(seeker)
        found = [scored for name in list(self.heaps) if (scored := self._top(seeker, name)) is not None]
        for position in sorted(self.mixed):
            scored = self._judge(seeker, position)[1]
            if scored is not None:
                found.append(scored)
        return min(found, key=lambda scored: scored[0])[1] if found else None

    def _catch_up(self, seeker: Seeker) -> None:
        """Score what was touched since the last seeker; all, if some team grew and so is easier to ask now."""
        pool, ledger = seeker.pool, seeker.cluster.ledger
        news: set[Account] = set(ledger.grown[self.grown :]) if self.grown >= 0 else set()
        if self.grown < 0 or (news and (self.own or not news <= set(seeker.account.chain))):
            self.heaps, self.scores, self.mixed, self.own = {}, {}, set(), len(seeker.account.chain) > 1
            positions = range(len(pool.nodes))
            for position in positions:
                self._score(seeker, position)
        else:
            for position in sorted(set(pool.touched[self.touched :])):
                self._score(seeker, position)
        self.touched, self.grown = len(pool.touched), len(ledger.grown)

    def _score(self, seeker: Seeker, position: int) -> None:
        teams, scored = self._judge(seeker, position)
        self.mixed.discard(position)
        self.scores.pop(position, None)
        if seeker.account.policy.name in teams:
            self.own = True
        if len(teams) > 1:
            self.mixed.add(position)
        elif teams and scored is not None:
            (team,) = teams
            plain = _without_share(scored[0])
            self.scores[position] = team, plain
            heapq.heappush(self.heaps.setdefault(team, []), (plain, position))

    def _judge(self, seeker: Seeker, position: int) -> tuple[set[str], Scored | None]:
        node = seeker.pool.nodes[position]
        if not node.suits(seeker.need) or not node.guests:
            return set(), None
        able = sorted((t for t in node.guests.values() if seeker.may_take(t)), key=seeker.order)
        return {t.workload.policy for t in able}, self.judge(seeker, node, able) if able else None

    def _top(self, seeker: Seeker, team: str) -> Scored | None:
        heap = self.heaps[team]
        while heap:
            plain, position = heap[0]
            if self.scores.get(position) != (team, plain):
                heapq.heappop(heap)
                continue
            scored = self._judge(seeker, position)[1]
            if scored is not None and _without_share(scored[0]) == plain:
                return scored
            heapq.heappop(heap)
            del self.scores[position]
            if scored is not None:
                self._score(seeker, position)
        return None


def _without_share(score: Score) -> Score:
    priority, amount, orders = score
    assert isinstance(orders, list)
    return (priority, amount, tuple((order[0], *order[2:]) for order in orders))
