"""The bar of a team as SVG text, with the parts and the words of `makeway_api.bars`."""

from __future__ import annotations

from makeway_api import bars
from makeway_api.models import TeamUsage
from makeway_api.quantities import gpus, number
from markupsafe import Markup

MANY_TEAMS = 12
"""Teams from which on a page lists them in one line each."""

SEGMENTS = tuple((kind.name, kind.label) for kind in bars.KINDS)


def bar(team: TeamUsage, scale: float, colour: str) -> Markup:
    """Return a team's bar: its parts in order, a tick at the reservation, an end at the limit."""
    scale = max(scale, 0.001)
    end = 100 * min(_end_gpus(team, scale), scale) / scale
    drawn = Markup('<rect class="track" x="0" y="6" width="{}%" height="20" rx="5"></rect>').format(number(end))
    at = 0.0
    for name, label in SEGMENTS:
        amount = max(0.0, getattr(team, name))
        if amount <= 0:
            continue
        x, width = 100 * at / scale, 100 * amount / scale
        tip = f"{gpus(amount)} {label}"
        part = Markup('<rect class="{} {}" x="{}%" y="6" width="{}%" height="20"></rect>')
        piece = part.format(f"seg {name}", colour, number(x), number(width))
        if name in ("borrowed", "lent"):
            hatch = Markup('<rect x="{}%" y="6" width="{}%" height="20" fill="url(#mw-hatch{})"></rect>')
            piece += hatch.format(number(x), number(width), "" if name == "borrowed" else "-lent")
        drawn += Markup('<g data-tip="{}">{}</g>').format(tip, piece)
        at += amount
    drawn += _marks(team, scale, end)
    return Markup('<svg class="mw-bar" role="img" aria-label="{}" width="100%" height="32">{}</svg>').format(
        sentence(team), drawn
    )


def _marks(team: TeamUsage, scale: float, end: float) -> Markup:
    marks = Markup("")
    if team.reserved > 0:
        mark = Markup(
            '<g data-tip="{0}"><rect class="hit" x="{1}%" y="0" width="9" height="32" transform="translate(-4,0)">'
            '</rect><line class="tick" x1="{1}%" x2="{1}%" y1="1" y2="31"></line></g>'
        )
        marks += mark.format(f"Reserved: {gpus(team.reserved)}", number(100 * team.reserved / scale))
    if team.limit is not None:
        mark = Markup('<g data-tip="{0}"><line class="end" x1="{1}%" x2="{1}%" y1="4" y2="28"></line></g>')
        marks += mark.format(f"Limit: {gpus(team.limit)}", number(end))
    return marks


def _end_gpus(team: TeamUsage, scale: float) -> float:
    return scale if team.limit is None else max(team.limit, team.used)


def bar_scale(teams: list[TeamUsage], total: float) -> float:
    """Return one scale for all bars of a page: the largest limit.

    A team without a limit may use the whole cluster, which ends its bar. With many teams the bar ends at twice the
    largest use instead: scaled to the whole cluster, all bars would be too short to read.
    """
    maximum = max([max(team.used + team.lent + team.free, team.reserved) for team in teams], default=0.0)
    unlimited = total if len(teams) <= MANY_TEAMS else min(total, 2 * maximum)
    ends = [team.limit if team.limit is not None else unlimited for team in teams]
    return max([*ends, maximum, 1.0]) * 1.004  # room for the mark at the right edge


def small_bar(team: TeamUsage, scale: float, colour: str) -> Markup:
    """Return a team's bar for a long list: one tooltip for the whole of it."""
    scale, at = max(scale, 0.001), 0.0
    drawn = Markup("")
    for name, _ in SEGMENTS:
        amount = max(0.0, getattr(team, name))
        if amount > 0:
            piece = Markup('<rect class="{}" x="{}%" y="2" width="{}%" height="12"></rect>')
            drawn += piece.format(f"seg {name} {colour}", number(100 * at / scale), number(100 * amount / scale))
            at += amount
    if team.reserved > 0:
        x = number(100 * team.reserved / scale)
        drawn += Markup('<line class="tick" x1="{0}%" x2="{0}%" y1="0" y2="16"></line>').format(x)
    if team.limit is not None:
        x = number(100 * min(_end_gpus(team, scale), scale) / scale)
        drawn += Markup('<line class="end" x1="{0}%" x2="{0}%" y1="2" y2="14"></line>').format(x)
    words = sentence(team)
    return Markup(
        '<svg class="mw-bar" role="img" aria-label="{0}" data-tip="{0}" width="100%" height="16">{1}</svg>'
    ).format(words, drawn)


def sentence(team: TeamUsage) -> str:
    """Return a team's bar in words, for screen readers."""
    return bars.bar(team).sentence
