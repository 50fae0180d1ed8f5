"""Check every choice of victims at the moment of the choice, with independent sums (I3, I4)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from engine.sums import Sums, fits, take
from makeway_quota.engine import QuotaLine, Snapshot, Workload
from makeway_quota.engine.cycle import admission
from makeway_quota.engine.index.nodes import placement_of
from makeway_quota.engine.rules.victims.sets import Victim


@contextmanager
def watched(snapshot: Snapshot) -> Iterator[None]:
    """Check within a block that every choice of victims is legal and minimal."""
    real = admission._carry_out

    def judged(builder: Any, group: Any, preemptor: Any, choice: Any, over: bool) -> None:
        moment = Moment(snapshot, preemptor, list(choice.victims))
        moment.everybody_was_entitled_to_be_asked()
        moment.no_victim_is_needless()
        real(builder, group, preemptor, choice, over)

    with patch.object(admission, "_carry_out", judged):
        yield


class Moment:
    """The cluster at the moment when a preemptor's victims have been evicted."""

    def __init__(self, snapshot: Snapshot, preemptor: Any, victims: list[Victim]) -> None:
        self.sums = Sums(snapshot)
        self.rights: tuple[str, ...] = preemptor.rights
        self.preemptor: Workload = preemptor.workload
        self.pool: str = preemptor.pool.pool.name
        self.victims = victims
        cluster = preemptor.cluster
        self.stay = [t for t in cluster.allocations.values() if not t.terminating]
        self.nominations = [t for i, t in cluster.nominations.items() if i != self.preemptor.id]

    def usage(self, team: str, line: QuotaLine, back: list[Victim]) -> int:
        """Return the future usage of a line with the workloads in `back` still running."""
        kept = [(t, t.milli_gpus) for t in [*self.stay, *self.nominations]]
        given_up = [(v.allocation, v.allocation.milli_gpus - v.allocation.need.gpus * len(v.kept)) for v in back]
        return sum(
            amount
            for t, amount in [*kept, *given_up]
            if team in self.sums.family(t.workload.team) and line.covers(t.pool.pool.name)
        )

    def reserving(self, team: str, pool: str) -> list[QuotaLine]:
        if team not in self.sums.policies:
            return []
        return [ln for ln in self.sums.policies[team].quotas if ln.reserved and ln.covers(pool)]

    def everybody_was_entitled_to_be_asked(self) -> None:
        for at, victim in enumerate(self.victims):
            workload = victim.allocation.workload
            assert not workload.non_preemptible, "I2"
            assert self.has_right(victim, self.victims[at:]), f"I3: {workload} for {self.preemptor} by {self.rights}"

    def has_right(self, victim: Victim, back: list[Victim]) -> bool:
        """Whether a victim may be evicted by any of the rights while the workloads in `back` still run."""
        workload, own = victim.allocation.workload, victim.allocation.workload.team == self.preemptor.team
        if not victim.allocation.milli_gpus:
            return "reservation" in self.rights  # only work in quota evicts work without GPUs
        if own and "own_team_any_priority" in self.rights:
            return True
        if own and "own_team" in self.rights and workload.priority < self.preemptor.priority:
            return True
        if not own and "fair_share" in self.rights:
            return True
        return "reservation" in self.rights and self.above(victim, back)

    def above(self, victim: Victim, back: list[Victim]) -> bool:
        """Whether the victim's team is above its reservation while the workloads in `back` still run."""
        mine = self.sums.family(self.preemptor.team)
        guarantor = next((at for at, name in enumerate(mine) if self.reserving(name, self.pool)), 0)
        for name in self.sums.family(victim.allocation.workload.team):
            if name in mine[guarantor + 1 :]:
                break
            lines = self.reserving(name, victim.allocation.pool.pool.name)
            own = self.sums.request(self.preemptor) if name in mine else 0
            if lines and not any(
                self.usage(name, line, back) + (own if line.covers(self.pool) else 0) > line.reserved for line in lines
            ):
                return False
        return True

    def no_victim_is_needless(self) -> None:
        if any(line.lend is not None for team in self.sums.policies.values() for line in team.quotas):
            return
        for victim in self.victims:
            assert not self.would_do_with(victim), f"I4: {victim.allocation.workload} is needless for {self.preemptor}"

    def would_do_with(self, one: Victim) -> bool:
        """Whether the preemptor could start with this victim still there."""
        request = self.sums.request(self.preemptor)
        for name in self.sums.family(self.preemptor.team):
            for line in self.sums.policies[name].quotas:
                limited = line.limit is not None and line.covers(self.pool)
                if limited and self.usage(name, line, [one]) + request > (line.limit or 0):
                    return False
        others = [n for n in self.nominations if n.workload is not one.allocation.workload]
        everybody = [*self.stay, *others, one.allocation]
        capacity = next(p.capacity for p in self.sums.snapshot.pools if p.name == self.pool)
        used = sum(t.milli_gpus for t in everybody if t.pool.pool.name == self.pool)
        if capacity is not None and used + request > capacity:
            return False
        free = self.sums.left(self.sums.live)
        for allocation in everybody:
            take(free, placement_of(allocation.parts))
        return fits(self.sums.profiles[self.preemptor.profile], self.sums, free, self.pool)
