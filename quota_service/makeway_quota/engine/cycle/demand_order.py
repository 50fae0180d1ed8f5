"""Keep the pending workloads in the order of rights from one decision to the next: only what changed is sorted anew.

What waits in a rank, and in which order, changes with each start by one owner's line of a group.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from operator import itemgetter
from typing import NamedTuple

from ..index.groups import WorkloadGroup
from ..plan import Demand
from ..request import Need
from ..snapshot import Workload

Place = tuple[object, ...]
Line = tuple[int, str]
"""The number of a group, and an owner"""
Entry = tuple[int, float, str, Line, WorkloadGroup, Workload, Demand | None]
"""A pending workload in its rank: what its owner runs, its age, its id; and its demand, None where no pool helps it"""
Sign = tuple[int | None, int, tuple[str, ...]]
"""What the entries of a line were made from: its version, what its owner runs, the pools of the demand; without a
version, some members are missing"""


class RankedGroup(NamedTuple):
    """A group with its place in the order, and the pools that its demand names."""

    place: Place
    group: WorkloadGroup
    pools: tuple[str, ...]
    intact: bool
    """whether none of its members is left out"""


class DemandOrder:
    """The order of one cluster."""

    def __init__(self) -> None:
        self._ranks: dict[Place, tuple[dict[Line, Sign], list[Entry]]] = {}

    def sort(self, groups: Iterable[RankedGroup], fair: bool, without: Container[str]) -> list[Entry]:
        """Return the members of groups by their place, then by what their owners use, then by age.

        `fair`: whether what their owners use counts; `without`: ids that are left out.
        """
        ranks: dict[Place, list[RankedGroup]] = {}
        for one in groups:
            ranks.setdefault(one.place, []).append(one)
        known, self._ranks = self._ranks, {}
        result: list[Entry] = []
        for place, rank in sorted(ranks.items(), key=itemgetter(0)):
            lines, entries = self._rank(rank, known.get(place, ({}, [])), fair, without)
            self._ranks[place] = lines, entries
            result += entries
        return result

    def _rank(
        self,
        rank: Iterable[RankedGroup],
        before: tuple[dict[Line, Sign], list[Entry]],
        fair: bool,
        without: Container[str],
    ) -> tuple[dict[Line, Sign], list[Entry]]:
        """Return what the lines of a rank were made from, and the sorted entries of all."""
        old, entries = before
        lines: dict[Line, Sign] = {}
        changed = set[Line]()
        new: list[Entry] = []
        for _, group, pools, intact in rank:
            use, number = group.account.used_by_owner if fair else {}, group.number
            for owner, line in group.owner_queues.items():
                key, uses, version = (number, owner), use.get(owner, 0), group.version_of(owner) if intact else None
                sign = lines[key] = version, uses, pools
                if version is None or old.get(key) != sign:
                    changed.add(key)
                    new += _entries(key, group, uses, line, pools, without if version is None else ())
        changed.update(old.keys() - lines.keys())
        if changed:
            entries = [one for one in entries if one[3] not in changed]
            entries += sorted(new)
            entries.sort()  # no two have the same id; two sorted runs are merged
        return lines, entries


def _entries(
    key: Line,
    group: WorkloadGroup,
    uses: int,
    line: Iterable[Workload],
    pools: tuple[str, ...],
    without: Container[str],
) -> list[Entry]:
    shape = shape_of(group.need)
    return [
        (uses, w.submitted_at, w.id, key, group, w, Demand(w.id, pools, *shape) if pools else None)
        for w in line
        if w.id not in without
    ]


def shape_of(need: Need) -> tuple[int, int, int, int, tuple[str, ...], bool]:
    """Return what follows the pools in the demand of a request."""
    return need.min_workers, need.gpus, need.cpu, need.memory, need.models, need.session
