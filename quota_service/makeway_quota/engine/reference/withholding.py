"""Withhold starts over quota that the very next plan would evict for work in quota (invariant I7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .cluster import Allocation, Cluster
from .decisions import Decisions
from .queues import Queue
from .quota import in_quota, reserving
from .selection import select
from .victims import Preemptor, Right


def withhold(decisions: Decisions, waiting: Sequence[Queue]) -> bool:
    """Withdraw the starts over quota that the next plan would evict; return whether there were any.

    Their queues start nothing over quota in this plan.
    """
    cluster = decisions.cluster
    fresh = [cluster.running[name] for name, quota in decisions.started.items() if not quota]
    fresh = [allocation for allocation in fresh if allocation.amount]
    trial = _next_cluster(decisions)
    names: set[str] = set()
    for queue in waiting:
        if queue.members and queue.need.total and not queue.patient:
            for pool in queue.pools:
                shared = any(_shares_reservation(cluster, allocation, pool) for allocation in fresh)
                if shared and in_quota(trial, queue.levels, pool, queue.need.total, queue.guaranteed):
                    names |= set(_to_withdraw(fresh, _next_victims(trial, queue, pool)))
    for name in sorted(names):
        workload, queue = cluster.live[name], decisions.came_from.pop(name)
        decisions.withdraw(workload)
        queue.members.append(workload)
        queue.may_borrow, queue.withheld = False, True
    return bool(names)


def _next_cluster(decisions: Decisions) -> Cluster:
    """Return the cluster of the next plan: the starts of this one run, and nothing is held."""
    trial = decisions.cluster.copy()
    trial.blocked = ()
    for name in decisions.started:
        found = trial.running[name]
        workload = replace(found.workload, state="running", started_at=trial.now)
        trial.running[name] = replace(found, workload=workload, fresh=False)
    return trial


def _shares_reservation(cluster: Cluster, allocation: Allocation, pool: str) -> bool:
    """Whether a start is in a pool, or counts on a reservation that covers it."""
    lines = [line for level in allocation.levels for line in reserving(cluster, level, allocation.pool)]
    return allocation.pool == pool or any(line.quota.covers(pool) for line in lines)


def _next_victims(trial: Cluster, queue: Queue, pool: str) -> list[Allocation]:
    """Return the victims of a queue's next workload in a pool, by the strongest right that finds any."""
    rights: list[Right] = ["reservation"]
    if queue.kind == "job" and trial.settings.in_team_preemption and not queue.guaranteed:
        rights.append("own_team")
    if queue.guaranteed:
        rights.append("own_policy")
    for right in rights:
        choice = select(Preemptor(trial, next(queue.heads()), queue.need, queue.levels, pool, right))
        if choice is not None:
            return [member.allocation for member in choice.victims]
    return []


def _to_withdraw(fresh: Sequence[Allocation], victims: Sequence[Allocation]) -> list[str]:
    """Return the starts among the victims; else those of the victims' policies, or else of their departments."""
    gone = {victim.id for victim in victims}
    mine = [allocation for allocation in fresh if allocation.id in gone]
    mine = mine or [each for each in fresh if any(each.levels[0] == victim.levels[0] for victim in victims)]
    mine = mine or [each for each in fresh if any(set(each.levels) & set(victim.levels) for victim in victims)]
    return [allocation.id for allocation in mine]
