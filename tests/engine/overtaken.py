"""Recognize the two cases in which planning again acts (invariant I7).

Shared by both checkers. A nominated workload starts though another one has a better right to its GPUs by now: no plan
withdraws a nomination that it can keep (rule 5.8), so the next one evicts or moves it, and what else has to leave with
it. With what that one gets, its team may use more than it reserves: then work of it may make way for others in turn.
The team of the start uses less without it: its other work may evict for the fair share that is left to it.
And a workload that had no room while the start was there may evict what else stands in its way, also where the start
is spared in the end, as a later eviction of the same plan left room for both.
And a start over quota that puts its team above its reservation makes candidates of the team's other work. Where
only start and other work together make room for a workload in quota, the next plan evicts them: the start cannot wait
instead, or its GPUs would idle for as long as the other work runs (invariant I6).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from engine.facts import State, future
from makeway_quota.engine import Plan, Snapshot


def starts_evicted_with_others(before: Snapshot, plan: Plan, again: Plan) -> set[str]:
    """Return the starts of a plan that the next one may evict, shrink or move: nominated ones, and with other work."""
    nominated = {w.id for w in before.workloads if w.nomination}
    started = {start.id for start in plan.start}
    result = started & nominated
    over_quota = result | {start.id for start in plan.start if not start.in_quota}
    for preemptor, victims in _victims(again, result).items():
        moved = {move.id for move in again.move if move.preemptor == preemptor}
        if victims & nominated & started:
            result |= victims & started
        elif not victims | moved <= over_quota:
            result |= victims & over_quota
    return result


def only_for_such_starts(before: Snapshot, plan: Plan, again: Plan) -> bool:
    """Whether all that the next plan does is to evict or move such starts, and what leaves with them or for that.

    What started or was nominated in the plan evicts nothing once more, and what starts had to leave CPU to GPUs that
    were free beside such a start, and are nominated by now. Other work evicts where the team of a preemptor
    uses more now, or where it had no room beside such starts, whatever else had left for it.
    """
    starts = starts_evicted_with_others(before, plan, again)
    nominated = {start.id for start in plan.start} & {w.id for w in before.workloads if w.nomination}
    victims = _victims(again, nominated)
    served = {start.id for start in plan.start} | {w.id for w in plan.pending if w.nomination}
    kept_out = {w.id for w in plan.pending if w.rule == "guaranteed_gpus"}
    if not kept_out.issuperset(start.id for start in again.start) or not served.isdisjoint(victims):
        return False
    return _in_turn(before, plan, again, victims, starts) == victims.keys()


def starts_evicted_in_turn(before: Snapshot, plan: Plan, again: Plan) -> set[str]:
    """Return the starts of a plan that the next one may evict with others, or in turn for what those make way for."""
    starts = starts_evicted_with_others(before, plan, again)
    victims = _victims(again, {start.id for start in plan.start} & {w.id for w in before.workloads if w.nomination})
    return starts.union(*(victims[item] for item in _in_turn(before, plan, again, victims, starts)))


def _in_turn(before: Snapshot, plan: Plan, again: Plan, victims: Mapping[str, set[str]], starts: set[str]) -> set[str]:
    """Return the preemptors that such starts make way for, and those that other work does because of them."""
    nominated = {start.id for start in plan.start} & {w.id for w in before.workloads if w.nomination}
    result = {p for p, theirs in victims.items() if theirs & starts or _in_the_way(before, plan, again, p, nominated)}
    if result:
        result |= {other for other in victims.keys() - result if not _had_room(before, plan, again, other)}
        if before.settings.fair_share == "reclaim":
            result |= _of_their_teams(before, victims, {item for p in result for item in victims[p] & nominated})
    teams = {team for preemptor in result for team in _teams(before, preemptor)}
    while made := {p for p in victims.keys() - result if any(teams & _teams(before, item) for item in victims[p])}:
        result |= made
        teams |= {team for preemptor in made for team in _teams(before, preemptor)}
    return result


def _of_their_teams(before: Snapshot, victims: Mapping[str, set[str]], evicted: set[str]) -> set[str]:
    """Return the preemptors whose team, or a department of it, uses less once these starts are evicted."""
    teams = {team for item in evicted for team in _teams(before, item)}
    return {preemptor for preemptor in victims if teams & _teams(before, preemptor)}


def _in_the_way(before: Snapshot, plan: Plan, again: Plan, preemptor: str, nominated: set[str]) -> bool:
    """Whether nominated starts alone left a preemptor of the next plan no room, though a later eviction spares them."""
    if not nominated or _had_room(before, plan, again, preemptor):
        return False
    return _had_room(before, plan, again, preemptor, nominated)


def _had_room(before: Snapshot, plan: Plan, again: Plan, preemptor: str, without: Collection[str] = ()) -> bool:
    """Whether a preemptor of the next plan had room after the plan, without its own victims (and some starts) alone."""
    state = future(before, plan)
    evicted = {eviction.id for eviction in again.evict if eviction.preemptor == preemptor}.union(without)
    held = {name: item for name, item in state.held.items() if name not in evicted}
    held |= {m.id: (state.held[m.id][0], m.to) for m in again.move if m.preemptor == preemptor and m.id in state.held}
    trial, facts, w = State(state.facts, held), state.facts, state.facts.live[preemptor]
    return any(
        facts.workers(trial.rooms(), w, pool) >= facts.least(w) and trial.admits(w, pool, facts.request(w))
        for pool in facts.pools_of(w)
    )


def _teams(snapshot: Snapshot, workload: str) -> set[str]:
    """Return the team of a workload and its departments."""
    parents = {team.name: team.parent for team in snapshot.policies}
    at: str | None = next(w.team for w in snapshot.workloads if w.id == workload)
    result: set[str] = set()
    while at is not None and at not in result:
        result.add(at)
        at = parents.get(at)
    return result


def _victims(plan: Plan, nominated: set[str]) -> dict[str, set[str]]:
    """Return by preemptor what a plan evicts and shrinks for it, and the nominated starts that it moves."""
    result: dict[str, set[str]] = {}
    for item in (*plan.evict, *(move for move in plan.move if move.rule == "shrink" or move.id in nominated)):
        result.setdefault(item.preemptor, set()).add(item.id)
    for move in plan.move:
        result.setdefault(move.preemptor, set())
    return result
