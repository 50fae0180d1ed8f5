"""Who waits and why, told once for all who are alike, and written out for each only when somebody reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from ..plan import Code, Numbers, Waiting
from ..state import Workload


@dataclass(frozen=True, slots=True)
class Told:
    """A reason to wait. `more` is what is said after it, and after what happened to the one who waits."""

    code: Code
    rule: str
    message: str
    numbers: Numbers
    not_before: float | None = None
    more: str = ""

    def to(self, workload: Workload) -> Waiting:
        """Write out what one of those is told who wait for this reason."""
        message = f"{self.message}{_lost(workload)}{self.more}"
        return Waiting(workload.id, self.code, self.rule, message, self.numbers, self.not_before)


class Alike(NamedTuple):
    """Workloads that wait for the same reason, in any order. `queue` numbers where they wait, from plan to plan."""

    queue: int
    members: tuple[Workload, ...]
    told: Told


def _lost(workload: Workload) -> str:
    return f" It was running on {workload.failed_node}, which was lost." if workload.failed_node else ""


class Pending(Sequence[Waiting]):
    """Everybody who waits, in the order of ids. `single` are those who are told something of their own."""

    def __init__(self, single: dict[str, Waiting], groups: Sequence[Alike]) -> None:
        self.single = single
        self.groups = tuple(groups)
        self._many = len(single) + sum(len(group.members) for group in groups)
        self._all: tuple[Waiting, ...] | None = None

    def _written(self) -> tuple[Waiting, ...]:
        if self._all is None:
            found = [
                *self.single.values(),
                *(told.to(workload) for _, members, told in self.groups for workload in members),
            ]
            self._all = tuple(sorted(found, key=lambda waiting: waiting.id))
        return self._all

    def of(self, id: str) -> Waiting:
        """Return the reason of one workload; KeyError if it does not wait."""
        if id in self.single:
            return self.single[id]
        for group in self.groups:
            for workload in group.members:
                if workload.id == id:
                    return group.told.to(workload)
        raise KeyError(id)

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
