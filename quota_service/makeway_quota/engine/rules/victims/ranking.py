"""Rank the nodes of a pool by their best set of victims, cached from one preemptor to the next equivalent one.

Called by the search for victims (rules/reclaim.py). Nodes are scored in the order of their lower bounds
(bounds.py), until no bound is below the best set found. A node where only one team has candidates keeps its
score within that team until it is touched: the team's share moves all its nodes alike. Such nodes are kept in one
heap per team, with their bound until they are scored. Nodes with candidates of several teams are ordered by their
bounds for every preemptor, and only those that may be the best are scored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from ...index.ledger import Account, LineState
from ...index.nodes import Allocation, NodeState
from .bounds import VictimBounds, bounds_of
from .preemptor import WITHOUT_GPUS, Preemptor, Standing, Team
from .sets import Key, Scored, Victims, extra_workers, key

BestSetOnNode = Callable[[Preemptor, NodeState, list[Allocation]], Scored | None]
"""Returns the best set on a node, given the candidates there; None if there is none."""


class Ranked(NamedTuple):
    """A node's best set of victims."""

    key: Key
    position: int
    victims: Victims


class Ranking:
    """The nodes of one pool by the cost of making room there for equivalent preemptors."""

    def __init__(self, judge: BestSetOnNode) -> None:
        self.best_set_on_node = judge
        self.heap_of_team: dict[Team, list[tuple[Key, int]]] = {}
        """Team (in one pool) to the plain scores, or bounds, of the nodes where only it has candidates, with their
        positions."""
        self.score_at: dict[int, tuple[Team, Key, Victims | None]] = {}
        """Position of such a node to its team, its plain score and its best set; None while it is a bound."""
        self.multi_team_positions: set[int] = set()
        """The positions of nodes with candidates of several teams, or on other nodes of the host."""
        self.multi_team_best: dict[int, tuple[dict[Team, Standing], Ranked | None]] = {}
        """Position of such a node to its best set and the standings of all its teams that gave it."""
        self.min_usage: dict[LineState, int] = {}
        """Reserving line to the least usage that any score may stem from."""
        self.touched_seen = self.changes_seen = -1

    def best(self, preemptor: Preemptor, without: Collection[int] = ()) -> Ranked | None:
        """Return the best set of victims on one node, `without` the nodes at these positions; None if there is none."""
        bounds = bounds_of(preemptor.cluster, preemptor.pool, preemptor.need)
        self._drop_outdated_scores(preemptor, bounds)
        preemptor.cluster.pause()
        best: Ranked | None = None
        for bound, name in self._best_of_each_team(preemptor):
            if best is not None and bound > best.key:
                break
            best = _cheaper(best, self._best_of_team(preemptor, name, without))
        return self._best_of_multi_team_nodes(preemptor, bounds, without, best) if self.multi_team_positions else best

    def _best_of_each_team(self, preemptor: Preemptor) -> list[tuple[Key, Team]]:
        """Return the least score or bound in each team's heap and the team, the best first."""
        tops = [(heap[0][0], name) for name, heap in self.heap_of_team.items() if heap]
        if len(tops) < 2:
            return tops
        return sorted([(_with_share(plain, _share(preemptor, name)), name) for plain, name in tops], key=_sort_key)

    def _best_of_multi_team_nodes(
        self,
        preemptor: Preemptor,
        bounds: VictimBounds,
        without: Collection[int],
        best: Ranked | None,
    ) -> Ranked | None:
        """Return the best of this set and of the nodes with candidates of several teams."""
        nodes = bounds.keys(preemptor.shares(), self.multi_team_positions.difference(without))
        heap = [bound for bound in nodes if best is None or bound[0] <= best.key]
        heapq.heapify(heap)
        while heap:
            preemptor.cluster.pause()
            lowest, position = heapq.heappop(heap)
            if best is not None and lowest > best.key:
                break
            best = _cheaper(best, self._rank_multi_team_node(preemptor, position))
        return best

    def _rank_multi_team_node(self, preemptor: Preemptor, position: int) -> Ranked | None:
        """Return the best set of a node with candidates of several teams; the last one if their standing is that."""
        known = self.multi_team_best.get(position)
        if known is not None and all(preemptor.standing(name) == was for name, was in known[0].items()):
            return known[1]
        scored = self._best_set_at(preemptor, position)
        ranked = None if scored is None else Ranked(scored[0], position, scored[1])
        if "fair_share" not in preemptor.rights:
            node = preemptor.pool.nodes[position]
            names: set[Team] = {a.workload.team for a in node.allocations.values()}
            for other in node.host_peers:
                names.update((preemptor.nearest(a), a.workload.team) for a in other.allocations.values())
            self.multi_team_best[position] = {name: preemptor.standing(name) for name in names}, ranked
        return ranked

    def _drop_outdated_scores(self, preemptor: Preemptor, bounds: VictimBounds) -> None:
        """Drop the scores of touched nodes, and of nodes of teams with more candidates than before."""
        pool, ledger = preemptor.pool, preemptor.cluster.ledger
        changed = ledger.changed
        if self.changes_seen < 0 or ("fair_share" in preemptor.rights and len(changed) > self.changes_seen):
            self.heap_of_team, self.score_at, self.multi_team_positions, self.multi_team_best = {}, {}, set(), {}
            pools = (pool.pool.name, *pool.peer_pools)
            accounts = ledger.accounts.values()
            self.min_usage = {
                ln: ln.certain for account in accounts for name in pools for ln in account.reserving(name)
            }
            own = "own_team" in preemptor.rights
            hosting = (node.position for node in pool.nodes if node.allocations or node.host_peers)
            positions = set(preemptor.where()) if own else set(hosting)
        else:
            positions = set(pool.touched[self.touched_seen :])
            grown = self._accounts_with_more_usage((pool.pool.name, *pool.peer_pools), changed[self.changes_seen :])
            if grown and pool.peer_pools:
                positions.update(self._scored_by_host_peers(preemptor, grown))
            candidates_of = preemptor.became_candidates(grown) if grown else ()
            if candidates_of:
                positions.update(node.position for node in pool.nodes if _has_work_of(node, candidates_of))
        for position in positions:
            preemptor.cluster.pause()
            self.score_at.pop(position, None)
            self.multi_team_positions.discard(position)
            self.multi_team_best.pop(position, None)
            bound = bounds.at(position)
            if bound is None:
                continue
            if bound.beside:
                if bound.only is not None and preemptor.is_candidate_team(bound.only[0]):
                    self._push_score(position, *bound.only, None)
                else:
                    self.multi_team_positions.add(position)
                continue
            if bound.only is not None:
                if preemptor.is_candidate_team(bound.only[0]):
                    self._push_score(position, *bound.only, None)
                continue
            teams = {candidate.team for candidate in bound.candidates}
            names = {team for team in teams if isinstance(team, str) and preemptor.is_candidate_team_named(team)}
            if len(names) > 1 or WITHOUT_GPUS in names:
                self.multi_team_positions.add(position)
            elif names:
                (name,) = names
                self._push_score(position, name, bound.plain_key(name), None)
        self.touched_seen, self.changes_seen = len(pool.touched), len(changed)

    def _scored_by_host_peers(self, preemptor: Preemptor, grown: Iterable[Account]) -> set[int]:
        """Return the nodes scored by work on other nodes of their hosts, of teams that now use more."""
        levels, ledger = {level for account in grown for level in account.chain}, preemptor.cluster.ledger
        beside = [team for team in self.heap_of_team if isinstance(team, tuple)]
        teams = {team for team in beside if not levels.isdisjoint(ledger.account(team[1]).chain)}
        return {at for at, (team, _, _) in self.score_at.items() if team in teams} if teams else set()

    def _accounts_with_more_usage(self, pools: Sequence[str], changed: Iterable[Account]) -> list[Account]:
        """Return the accounts whose usage of a reservation is above the least that a score may stem from.

        What was evicted on trial, and stays, is the same as before.
        """
        grown: list[Account] = []
        lines: list[LineState] = []
        for account in set(changed):
            mine = [line for level in account.chain for pool in pools for line in level.reserving(pool)]
            if any(line.certain > self.min_usage[line] for line in mine):
                grown.append(account)
            lines += mine
        for line in lines:
            self.min_usage[line] = line.certain
        return grown

    def _push_score(self, position: int, team: Team, plain: Key, victims: Victims | None) -> None:
        self.score_at[position] = team, plain, victims
        heapq.heappush(self.heap_of_team.setdefault(team, []), (plain, position))

    def _best_set_at(self, preemptor: Preemptor, position: int) -> Scored | None:
        candidates = self._candidates_at(preemptor, position)
        return self.best_set_on_node(preemptor, preemptor.pool.nodes[position], candidates) if candidates else None

    def _candidates_at(self, preemptor: Preemptor, position: int) -> list[Allocation]:
        """Return the candidates on a node; none if they are not enough."""
        node = preemptor.pool.nodes[position]
        if not (node.allocations or node.host_peers) or not node.suits(preemptor.need):
            return []
        candidates = preemptor.candidates_on(node)
        return candidates if candidates and enough_devices(preemptor, node, candidates) else []

    def _best_of_team(self, preemptor: Preemptor, team: Team, without: Collection[int]) -> Ranked | None:
        heap = self.heap_of_team[team]
        excluded: list[tuple[Key, int]] = []
        top: Ranked | None = None
        while heap and top is None:
            plain, position = heap[0]
            known = self.score_at.get(position)
            if known is None or known[:2] != (team, plain):
                heapq.heappop(heap)
            elif position in without:
                entry = heapq.heappop(heap)
                if not excluded or excluded[-1] != entry:
                    excluded.append(entry)
            else:
                top = self._rescored(preemptor, position, known)
        for entry in excluded:
            heapq.heappush(heap, entry)
        return top

    def _rescored(self, preemptor: Preemptor, position: int, known: tuple[Team, Key, Victims | None]) -> Ranked | None:
        """Return a node's best set with its present key if the node has its score still; else enter what it has."""
        team, plain, victims = known
        if victims is not None:
            first = victims[0].allocation
            if len(victims) == 1 and not extra_workers(first) and preemptor.is_candidate(first):
                return Ranked(key(preemptor, victims), position, victims)
        scored = self._best_set_at(preemptor, position)
        if scored is None:
            del self.score_at[position]
            if isinstance(team, tuple):
                self.multi_team_positions.add(
                    position
                )  # its team in the other pool may have candidates again, untouched
            return None
        now = _without_share(scored[0])
        if now == plain:
            self.score_at[position] = team, plain, scored[1]
            return Ranked(scored[0], position, scored[1])
        self._push_score(position, team, now, scored[1])
        return None


def _share(preemptor: Preemptor, team: Team) -> int:
    """Return a team's share in the pool of its candidates."""
    pool, name = team if isinstance(team, tuple) else (preemptor.pool.pool.name, team)
    return preemptor.cluster.ledger.account(name).share(pool)


def _sort_key(top: tuple[Key, Team]) -> tuple[Key, tuple[str, ...]]:
    """Sort by key, then by the names of team and pool."""
    key, team = top
    return key, team if isinstance(team, tuple) else (team,)


def _cheaper(one: Ranked | None, other: Ranked | None) -> Ranked | None:
    """Return the one that costs less, of equal ones the first node."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda ranked: ranked[:2])


def _has_work_of(node: NodeState, teams: Collection[str]) -> bool:
    return any(a.workload.team in teams for a in node.allocations.values())


def enough_devices(preemptor: Preemptor, node: NodeState, candidates: Sequence[Allocation]) -> bool:
    """Whether evicting all candidates would free enough devices for a worker; False is certain, True is not."""
    wanted = preemptor.need.whole_devices - node.whole_free_later
    if wanted <= 0:
        return True
    for allocation in candidates:
        for part in allocation.parts:
            if part.node is node:
                wanted -= len(part.devices)
        if wanted <= 0:
            return True
    return False


def _without_share(key: Key) -> Key:
    """Return a key without the team's share, which moves the keys of all its nodes alike."""
    stops, gpus, withdrawn, protections, many, orders, given = key
    plain = [tuple((*order[:2], *order[3:]) for order in part) for part in (protections, orders)]
    return stops, gpus, withdrawn, plain[0], many, plain[1], tuple(given)


def _with_share(plain: Key, share: int) -> Key:
    """Return a plain key with its team's share, as `key` would."""
    stops, gpus, withdrawn, protections, many, orders, given = plain
    full = [[(*order[:2], -share, *order[2:]) for order in part] for part in (protections, orders)]
    return stops, gpus, withdrawn, full[0], many, full[1], list(given)
