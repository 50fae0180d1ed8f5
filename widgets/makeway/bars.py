"""A team's GPUs as a bar: what is used, borrowed, lent and free, a tick at the reservation, the end at the limit."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import isfinite

from makeway_api.models import TeamUsage

from .words import gpus, number

WIDTH = 300
HEIGHT = 18
PAD = 3
"""Room left, right, above and below for the tick."""

KINDS = (
    ("guaranteed", "in sessions", "held by notebooks, never taken away"),
    ("in_quota", "jobs in quota", "jobs within the reservation"),
    ("borrowed", "borrowed", "over quota: makes way when an owner comes back"),
    ("lent", "lent", "reserved, now running other teams' work"),
    ("free", "free", "reserved and idle"),
)
WORDS = {kind: word for kind, word, _ in KINDS}


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a bar, in GPUs from its left end."""

    kind: str
    start: float
    gpus: float


def segments(team: TeamUsage) -> list[Segment]:
    """The parts that are not empty, left to right: what is used first, then what is left of the reservation."""
    parts, at = [], 0.0
    for kind, _, _ in KINDS:
        amount = getattr(team, kind)
        if amount > 0:
            parts.append(Segment(kind, at, amount))
            at += amount
    return parts


def end(team: TeamUsage, total: float) -> float:
    """Where the bar ends: at the limit, without one at the size of the cluster; never before what it shows."""
    shown = sum(part.gpus for part in segments(team))
    return max(team.limit if team.limit is not None else total, shown, team.reserved)


def scale(teams: list[TeamUsage], total: float) -> float:
    """Pixels for one GPU, the same for all bars that are compared."""
    longest = max((end(team, total) for team in teams), default=0)
    return WIDTH / longest if longest > 0 and isfinite(longest) else 0.0


def bar(team: TeamUsage, per_gpu: float, total: float) -> str:
    """The bar as SVG."""
    length = end(team, total) * per_gpu
    body = "".join(_segment(part, per_gpu) for part in segments(team))
    tick = PAD + team.reserved * per_gpu
    return (
        f'<svg class="mw-bar" role="img" aria-label="{escape(sentence(team))}" width="{WIDTH + 2 * PAD}" '
        f'height="{HEIGHT + 2 * PAD}" viewBox="0 0 {WIDTH + 2 * PAD} {HEIGHT + 2 * PAD}">'
        f"<title>{escape(sentence(team))}</title>"
        f'<rect class="mw-room" x="{PAD}" y="{PAD}" width="{_px(length)}" height="{HEIGHT}"/>{body}'
        f'<path class="mw-end" d="M{_px(PAD + length)} {PAD}v{HEIGHT}"/>'
        f'<path class="mw-tick" d="M{_px(tick)} 0v{HEIGHT + 2 * PAD}"/></svg>'
    )


def sentence(team: TeamUsage) -> str:
    """The bar in words, for screen readers and the tooltip."""
    limit = f"limit {number(team.limit)}" if team.limit is not None else "no limit"
    parts = ", ".join(f"{number(part.gpus)} {WORDS[part.kind]}" for part in segments(team))
    used = f"{number(team.used)} of {gpus(team.reserved)} reserved"
    return f"{team.title or team.team}: {used}, {limit}. {parts or 'Nothing used'}."


def legend() -> str:
    """What the colours mean."""
    items = "".join(
        f'<span class="mw-key" title="{escape(what)}"><svg width="14" height="12" aria-hidden="true">'
        f"{_shape(kind, 1, 1, 12, 10)}</svg>{escape(word)}</span>"
        for kind, word, what in KINDS
    )
    tick = '<svg width="6" height="12" aria-hidden="true"><path class="mw-tick" d="M3 0v12"/></svg>'
    marks = f'<span class="mw-key">{tick}reservation</span><span class="mw-key">bar ends at the limit</span>'
    return f'<div class="mw-legend">{items}{marks}</div>'


def _segment(part: Segment, per_gpu: float) -> str:
    x, width = PAD + part.start * per_gpu, part.gpus * per_gpu
    label = ""
    if width >= 9 * len(number(part.gpus)) + 6:
        at = f'x="{_px(x + width / 2)}" y="{_px(PAD + HEIGHT / 2 + 4)}"'
        label = f'<text class="mw-n mw-n-{part.kind}" {at}>{number(part.gpus)}</text>'
    return _shape(part.kind, x, PAD, width, HEIGHT) + label


def _shape(kind: str, x: float, y: float, width: float, height: float) -> str:
    rect = f'<rect class="mw-s mw-{kind}" x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"/>'
    return rect + (_hatch(x, y, width, height) if kind in ("borrowed", "lent") else "")


def _hatch(x: float, y: float, width: float, height: float, step: float = 6) -> str:
    """Slanted lines cut at the rectangle's own edges: a pattern would need an id that is unique in the notebook."""
    lines, at = [], x - height + step / 2
    while at < x + width:
        left, right = max(at, x), min(at + height, x + width)
        if right > left:
            lines.append(f"M{_px(left)} {_px(y + height - (left - at))}L{_px(right)} {_px(y + height - (right - at))}")
        at += step
    return f'<path class="mw-hatch" d="{"".join(lines)}"/>' if lines else ""


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
