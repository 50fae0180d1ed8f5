"""Lay out a team's GPUs as a bar: its parts in order, the mark at the reservation, the end at the limit.

Notebooks and the spawn page draw this layout: pure geometry in GPUs, which each multiplies by its own units. The panel,
whose bars are percentages of one scale (`web/pages/figures/bars.py`), takes the parts and the words from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from .models import TeamUsage
from .quantities import gpus, number

WHEN_NEEDED = "when a team needs GPUs that it reserved"
"""When work over quota makes way: the one condition, in all sentences about that risk.

It is true also where GPUs are reserved by several teams, or by none."""


@dataclass(frozen=True, slots=True)
class PartKind:
    """One kind of part: the field of TeamUsage it shows (also its style class), its label, and what it means."""

    name: str
    label: str
    meaning: str

    @property
    def css(self) -> str:
        """Return the style class: `in-quota` for `in_quota`."""
        return self.name.replace("_", "-")


KINDS = (
    PartKind("guaranteed", "in sessions", "held by notebooks and jobs that are never preempted"),
    PartKind("in_quota", "in quota", "held by preemptible jobs and notebooks within the reservation"),
    PartKind(
        "borrowed",
        "borrowed",
        f"held by preemptible jobs and notebooks over quota, which make way {WHEN_NEEDED}",
    ),
    PartKind("lent", "lent", "reserved, now held by other teams' work"),
    PartKind("free", "free", "reserved and idle"),
)
"""In drawing order: what the team uses, then what is left of its reservation. "in sessions" counts jobs, too, that
are not preemptible."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a bar that is not empty: where it starts and how long it is, in GPUs."""

    kind: PartKind
    start: float
    gpus: float

    @property
    def tip(self) -> str:
        """Return the part as a tooltip: `2 GPUs borrowed`."""
        return f"{gpus(self.gpus)} {self.kind.label}"


@dataclass(frozen=True, slots=True)
class Bar:
    """One team's bar in GPUs. `end` is where it ends: the limit, or the size of the cluster where there is none."""

    team: TeamUsage
    parts: tuple[Part, ...]
    reserved: float
    end: float

    @property
    def limited(self) -> bool:
        """Whether the end is a limit of the policy."""
        return self.team.limit is not None

    @property
    def sentence(self) -> str:
        """Return the bar in words, for screen readers and tooltips."""
        limit = f"limit {number(self.team.limit)}" if self.team.limit is not None else "no limit"
        parts = ", ".join(f"{number(part.gpus)} {part.kind.label}" for part in self.parts)
        head = f"{self.team.title or self.team.team} uses {gpus(self.team.used)}"
        return f"{head}; reserved {number(self.reserved)}, {limit}" + (f": {parts}." if parts else ".")

    @property
    def summary(self) -> str:
        """Return the bar in one short line: `9 in use · 5 reserved · limit 9`."""
        limit = "no limit" if self.team.limit is None else f"limit {number(self.team.limit)}"
        return f"{number(self.team.used)} in use · {number(self.reserved)} reserved · {limit}"


def bar(team: TeamUsage, total: float = 0.0) -> Bar:
    """Return a team's bar; `total` is the size of the cluster, where a team without a limit ends.

    The end is never before what the bar shows or the reservation, so that nothing is cut off.
    """
    parts, at = [], 0.0
    for kind in KINDS:
        amount = float(getattr(team, kind.name))
        if amount > 0 and isfinite(amount):
            parts.append(Part(kind, at, amount))
            at += amount
    end = max(team.limit if team.limit is not None else total, at, team.reserved)
    return Bar(team, tuple(parts), team.reserved, end)


def scale(bars: Sequence[Bar], width: float) -> float:
    """Return the width of one GPU, the same for all bars that are compared: the longest one fills `width`."""
    max_length = max((item.end for item in bars), default=0.0)
    return width / max_length if max_length > 0 and isfinite(max_length) else 0.0
