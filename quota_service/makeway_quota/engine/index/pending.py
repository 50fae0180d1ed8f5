"""Pending workloads with their reasons: one reason for each group that shares it, expanded on access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from ..plan import Code, Fact, Facts, Numbers, Waiting
from ..snapshot import Workload


@dataclass(frozen=True, slots=True)
class PendingReason:
    """A reason to wait. `more` follows it, after the facts of the single workload.

    `patience`: no start before so many seconds after the single workload was submitted.
    """

    code: Code
    rule: str
    facts: Facts
    numbers: Numbers
    not_before: float | None = None
    more: Facts = ()
    patience: float = 0.0

    def to(self, workload: Workload) -> Waiting:
        """Return the reason as one workload's record."""
        facts = self.facts
        if workload.failed_node or self.more:
            facts = (*facts, *_lost(workload), *self.more)
        earliest = self.not_before
        if self.patience:
            earliest = max(workload.submitted_at + self.patience, earliest or 0.0)
        return Waiting(workload.id, self.code, self.rule, facts, self.numbers, earliest)


class PendingGroup(NamedTuple):
    """Workloads of one group that wait for the same reason, in any order. `number` is stable from plan to plan."""

    number: int
    members: tuple[Workload, ...]
    reason: PendingReason


def _lost(workload: Workload) -> Facts:
    return (Fact("node_lost", {"node": workload.failed_node}),) if workload.failed_node else ()


class Pending(Sequence[Waiting]):
    """All pending workloads in the order of ids; those in `single` have a reason of their own."""

    def __init__(self, single: dict[str, Waiting], groups: Sequence[PendingGroup]) -> None:
        self.single = single
        self.groups = tuple(groups)
        self._many = len(single) + sum(len(group.members) for group in groups)
        self._all: tuple[Waiting, ...] | None = None

    def _written(self) -> tuple[Waiting, ...]:
        if self._all is None:
            waiting_workloads = [
                *self.single.values(),
                *(reason.to(workload) for _, members, reason in self.groups for workload in members),
            ]
            self._all = tuple(sorted(waiting_workloads, key=lambda waiting: waiting.id))
        return self._all

    def of(self, workload: Workload) -> Waiting:
        """Return the reason of one workload; KeyError if it does not wait."""
        if workload.id in self.single:
            return self.single[workload.id]
        for _, members, reason in self.groups:
            first = members[0]  # a group has one team and profile
            alike = first.team == workload.team and first.profile == workload.profile
            if alike and any(member.id == workload.id for member in members):
                return reason.to(workload)
        raise KeyError(workload.id)

    @overload
    def __getitem__(self, at: int) -> Waiting: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Waiting]: ...
    def __getitem__(self, at: int | slice) -> Waiting | Sequence[Waiting]:
        return self._written()[at]

    def __len__(self) -> int:
        return self._many

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._written())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._written() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._many)

    def __repr__(self) -> str:
        return repr(self._written())
