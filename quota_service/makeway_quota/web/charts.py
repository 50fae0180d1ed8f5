"""Pictures as SVG text: the cells of a node, and the bar of a team. Pure; colours come from classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from makeway_api.models import Device, Holder, Kind, Node, TeamUsage
from markupsafe import Markup

LARGE, NORMAL, SMALL = (74, 58), (48, 42), (20, 20)
"""A cell's width and height"""
NORMAL_FROM, COMPACT_FROM = 17, 97
"""GPUs from which on cells are drawn smaller, and without words"""


@dataclass(frozen=True, slots=True)
class Look:
    """What a picture must know of its page: a class and a title for each team, and where jobs are shown."""

    classes: Mapping[str, str]
    titles: Mapping[str, str]
    jobs: str
    devices: int = 0
    """how many cells the whole map has"""
    linked: frozenset[str] | None = None
    """teams whose jobs the visitor may open; None: all"""

    @property
    def compact(self) -> bool:
        """True where there is no room for words."""
        return self.devices >= COMPACT_FROM

    @property
    def cell(self) -> tuple[int, int]:
        """Width and height of a cell."""
        return SMALL if self.compact else NORMAL if self.devices >= NORMAL_FROM else LARGE

    def opens(self, team: str) -> bool:
        """Say whether the visitor may open a job of this team."""
        return self.linked is None or team in self.linked

    def colour(self, team: str) -> str:
        """The class of a team; grey for one that the page does not know."""
        return self.classes.get(team, "tx")

    def title(self, team: str) -> str:
        """The name that people read."""
        return self.titles.get(team) or team


def number(gpus: float) -> str:
    """Write a quantity of GPUs: 1, 2, 0.5."""
    return f"{round(gpus, 3):g}"


def gpus(count: float) -> str:
    """Write a quantity of GPUs with its noun."""
    return f"{number(count)} GPU{'' if count == 1 else 's'}"


# -- the map ---------------------------------------------------------------------------------------------------


def node(machine: Node, look: Look) -> Markup:
    """Draw a node: one small picture for each GPU; the page breaks them into rows."""
    cells = Markup("").join(_cell(machine, device, look) for device in machine.devices)
    busy = sum(1 for device in machine.devices if device.holders)
    label = f"Node {machine.name}: {busy} of {gpus(len(machine.devices))} in use"
    return Markup('<div class="mw-cells" role="group" aria-label="{}">{}</div>').format(label, cells)


def _cell(machine: Node, device: Device, look: Look) -> Markup:
    wide, tall = look.cell
    tip = cell_tip(machine, device, look)
    if not device.holders:
        state = "free" if machine.ready and device.free > 0 else "down"
        words = Markup("") if look.compact else _word("idx", wide // 2, tall // 2 + 4, str(device.index), "middle")
        picture = _picture(state, wide, tall, _box("mw-box", 0, wide, tall) + words)
        return Markup('<span class="mw-cell" role="img" tabindex="0" aria-label="{}" data-tip="{}">{}</span>').format(
            tip, tip, picture
        )
    first = device.holders[0]
    words = Markup("") if look.compact or len(device.holders) > 1 else _words(device, first, wide, tall)
    over = " over" if first.over_quota else ""
    picture = _picture(f"used {look.colour(first.team)}{over}", wide, tall, _parts(device, look, wide, tall) + words)
    if first.kind is Kind.JOB and look.opens(first.team):
        whole = Markup('<a class="mw-cell" href="{}{}" aria-label="{}" data-tip="{}" data-w="{}">{}</a>')
        return whole.format(look.jobs, first.workload, tip, tip, first.workload, picture)
    whole = Markup('<span class="mw-cell" role="img" tabindex="0" aria-label="{}" data-tip="{}" data-w="{}">{}</span>')
    return whole.format(tip, tip, first.workload, picture)


def _picture(state: str, wide: int, tall: int, inside: Markup) -> Markup:
    picture = Markup('<svg class="{}" width="{}" height="{}" aria-hidden="true">{}</svg>')
    return picture.format(state, wide, tall, inside)


def _parts(device: Device, look: Look, wide: int, tall: int) -> Markup:
    """Fill the cell from the left, each holder by its share of the device."""
    drawn, x = _box("mw-box under", 0, wide, tall), 0.0
    for holder in device.holders:
        part = min(max(2.0, wide * min(holder.gpus, 1.0)), wide - x)
        drawn += _box(f"mw-box fill {look.colour(holder.team)} {holder.state.value}", x, part, tall)
        if holder.over_quota:
            drawn += _box("mw-box hatch", x, part, tall, 'fill="url(#mw-hatch)"')
        x += part
    return drawn


def _words(device: Device, holder: Holder, wide: int, tall: int) -> Markup:
    most = wide // 8
    owner = holder.owner if len(holder.owner) <= most else holder.owner[: most - 1] + "…"
    words = _word("idx ink", 7, 15, str(device.index), "start") + _word(
        "who ink", wide // 2, tall - 13, owner, "middle"
    )
    if holder.kind is Kind.SESSION:
        mark = Markup('<use href="#mw-session" class="ink" x="{}" y="6" width="14" height="12"></use>')
        words += mark.format(wide - 21)
    return words


def cell_tip(machine: Node, device: Device, look: Look) -> str:
    """Say in words what a cell shows; one line for each holder."""
    here = f"GPU {device.index} on {machine.name}"
    if not device.holders:
        if not machine.ready:
            return f"{here}: the node is not ready"
        return f"{here}: free" if device.free > 0 else f"{here}: held by work that Makeway does not manage"
    return "\n".join(
        [here, *(_holder_line(holder, look) for holder in device.holders)]
        + ([f"{number(device.free)} free"] if 0 < device.free < 1 else [])
    )


def _holder_line(holder: Holder, look: Look) -> str:
    share = "" if holder.gpus >= 1 else f" ({number(holder.gpus)} of it)"
    what = "notebook" if holder.kind is Kind.SESSION else f"job {holder.name or holder.workload}"
    quota = "over quota: makes way when the owner needs it" if holder.over_quota else "in quota"
    if holder.kind is Kind.SESSION and not holder.over_quota:
        quota = "guaranteed"
    return f"{look.title(holder.team)} · {holder.owner}: {what}{share}, {holder.state.value}, {quota}"


def _box(classes: str, x: float, wide: float, tall: float, extra: str = "") -> Markup:
    box = Markup('<rect class="{}" x="{}" y="0" width="{}" height="{}" rx="6" {}></rect>')
    return box.format(classes, number(x), number(wide), tall, Markup(extra))


def _word(classes: str, x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(classes, x, y, anchor, text)


# -- the bar ---------------------------------------------------------------------------------------------------

SEGMENTS = (
    ("guaranteed", "in sessions"),
    ("in_quota", "in quota"),
    ("borrowed", "borrowed"),
    ("lent", "lent"),
    ("free", "free"),
)


def bar(team: TeamUsage, scale: float, colour: str) -> Markup:
    """Draw a team's bar: its parts in order, a tick at the reservation, an end at the limit."""
    scale = max(scale, 0.001)
    end = 100 * min(_end(team, scale), scale) / scale
    drawn = Markup('<rect class="track" x="0" y="6" width="{}%" height="20" rx="5"></rect>').format(number(end))
    at = 0.0
    for name, words in SEGMENTS:
        amount = max(0.0, getattr(team, name))
        if amount <= 0:
            continue
        x, width = 100 * at / scale, 100 * amount / scale
        tip = f"{gpus(amount)} {words}"
        part = Markup('<rect class="{} {}" x="{}%" y="6" width="{}%" height="20"></rect>')
        piece = part.format(f"seg {name}", colour, number(x), number(width))
        if name in ("borrowed", "lent"):
            over = Markup('<rect x="{}%" y="6" width="{}%" height="20" fill="url(#mw-hatch{})"></rect>')
            piece += over.format(number(x), number(width), "" if name == "borrowed" else "-lent")
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


def _end(team: TeamUsage, scale: float) -> float:
    return scale if team.limit is None else max(team.limit, team.used)


def bar_scale(teams: list[TeamUsage], total: float) -> float:
    """One scale for all bars of a page: the largest limit, or the whole cluster where somebody has none."""
    ends = [team.limit if team.limit is not None else total for team in teams]
    most = [max(team.used + team.lent + team.free, team.reserved) for team in teams]
    return max([*ends, *most, 1.0]) * 1.004


def sentence(team: TeamUsage) -> str:
    """Say a team's bar in words, for those who do not see it."""
    limit = "no limit" if team.limit is None else f"limit {number(team.limit)}"
    parts = [f"{number(getattr(team, name))} {words}" for name, words in SEGMENTS if getattr(team, name) > 0]
    return (
        f"{team.title or team.team} uses {gpus(team.used)}; reserved {number(team.reserved)}, {limit}"
        + (": " + ", ".join(parts) if parts else "")
        + "."
    )
