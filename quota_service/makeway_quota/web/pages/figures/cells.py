"""The GPUs of one node as cells: SVG text, one small picture for each GPU."""

from __future__ import annotations

from makeway_api.bars import WHEN_NEEDED
from makeway_api.models import Device, Holder, Kind, Node
from makeway_api.quantities import gpus, number
from markupsafe import Markup

from .display import Display


def node(machine: Node, display: Display) -> Markup:
    """Return the cells of a node; the page breaks them into rows."""
    cells = Markup("").join(_cell(machine, device, display) for device in machine.devices)
    busy = sum(1 for device in machine.devices if device.holders)
    label = f"Node {machine.name}: {busy} of {gpus(len(machine.devices))} in use"
    return Markup('<div class="mw-cells" role="group" aria-label="{}">{}</div>').format(label, cells)


def _cell(machine: Node, device: Device, display: Display) -> Markup:
    """Return one cell; its accessible name begins with the words that it shows."""
    wide, tall = display.cell
    tip = cell_tip(machine, device, display)
    if not device.holders:
        state = "free" if device.free > 0 else "down"
        words = _word("idx", wide // 2, tall // 2 + 4, str(device.index), "middle")
        picture = _picture(state, wide, tall, _box("mw-box", 0, wide, tall) + words)
        return Markup('<span class="mw-cell" role="img" tabindex="0" aria-label="{}" data-tip="{}">{}</span>').format(
            f"{device.index}: {tip}", tip, picture
        )
    first = device.holders[0]
    owner = "" if len(device.holders) > 1 else _shortened(first.owner, wide // 8)
    words = _words(device, first, owner, wide, tall) if owner or not first.owner else Markup("")
    over = " over" if first.over_quota else ""
    picture = _picture(
        f"used {display.colour(first.team)}{over}", wide, tall, _parts(device, display, wide, tall) + words
    )
    label = f"{device.index} {owner}: {tip}" if owner else tip
    if first.kind is Kind.JOB and first.workload and display.opens(first.team):
        whole = Markup('<a class="mw-cell" href="{}{}" aria-label="{}" data-tip="{}" data-w="{}">{}</a>')
        return whole.format(display.jobs, first.workload, label, tip, first.workload, picture)
    whole = Markup('<span class="mw-cell" role="img" tabindex="0" aria-label="{}" data-tip="{}" data-w="{}">{}</span>')
    return whole.format(label, tip, first.workload, picture)


def _shortened(name: str, limit: int) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _picture(state: str, wide: int, tall: int, inside: Markup) -> Markup:
    picture = Markup('<svg class="{}" width="{}" height="{}" aria-hidden="true">{}</svg>')
    return picture.format(state, wide, tall, inside)


def _parts(device: Device, display: Display, wide: int, tall: int) -> Markup:
    """Return the holders of a device, from the left, each by its share."""
    drawn, x = _box("mw-box under", 0, wide, tall), 0.0
    for holder in device.holders:
        part = min(max(2.0, wide * min(holder.gpus, 1.0)), wide - x)
        drawn += _box(f"mw-box fill {display.colour(holder.team)} {holder.state.value}", x, part, tall)
        if holder.over_quota:
            drawn += _box("mw-box hatch", x, part, tall, 'fill="url(#mw-hatch)"')
        x += part
    return drawn


def _words(device: Device, holder: Holder, owner: str, wide: int, tall: int) -> Markup:
    index = _word("idx ink", 7, 15, str(device.index), "start")
    words = Markup("{} {}").format(index, _word("who ink", wide // 2, tall - 13, owner, "middle"))
    if holder.kind is Kind.SESSION:
        mark = Markup('<use href="#mw-session" class="ink" x="{}" y="6" width="14" height="12"></use>')
        words += mark.format(wide - 21)
    return words


def cell_tip(machine: Node, device: Device, display: Display) -> str:
    """Return what a cell shows in words; one line for each holder."""
    here = f"GPU {device.index} on {machine.name}"
    if device.outside:
        here += ", in no pool any more: nothing else starts on it"
    if not device.holders:
        if not machine.ready:
            return f"{here}: the node is not ready"
        if not machine.observed:
            return f"{here}: the node cannot be observed at the moment and takes no new work"
        if machine.cordoned:
            return f"{here}: the node is cordoned and takes no new work"
        return (
            f"{here}: free"
            if device.free > 0
            else f"{here}: held by work of others, or by a pod whose workload has ended"
        )
    return "\n".join(
        [here, *(_holder_line(holder, display) for holder in device.holders)]
        + ([f"{number(device.free)} free"] if 0 < device.free < 1 else [])
    )


def _holder_line(holder: Holder, display: Display) -> str:
    share = "" if holder.gpus >= 1 else f" ({number(holder.gpus)} of it)"
    what = "notebook" if holder.kind is Kind.SESSION else f"job {holder.name or holder.workload}".rstrip()
    quota = f"over quota: makes way {WHEN_NEEDED}" if holder.over_quota else "in quota"
    if holder.kind is Kind.SESSION and not holder.over_quota:
        quota = "guaranteed"
    whose = f" · {holder.owner}" if holder.owner else ""
    return f"{display.title(holder.team)}{whose}: {what}{share}, {holder.state.value}, {quota}"


def _box(classes: str, x: float, wide: float, tall: float, extra: str = "") -> Markup:
    box = Markup('<rect class="{}" x="{}" y="0" width="{}" height="{}" rx="6" {}></rect>')
    return box.format(classes, number(x), number(wide), tall, Markup(extra))


def _word(classes: str, x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(classes, x, y, anchor, text)
