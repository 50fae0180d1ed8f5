"""Draw a team's bar as nested boxes that are complete by themselves: no ids, no text, nothing where styles are removed.

The layout is `makeway_api.bars`; this module only turns GPUs into pixels. The numbers stand in the table beside it.
"""

from __future__ import annotations

from makeway_api.bars import KINDS, Bar, Part
from markupsafe import Markup

from .blocks import safe

WIDTH = 240
HEIGHT = 16
_HATCH = "background-image:repeating-linear-gradient(135deg,rgba(255,255,255,.5) 0 2px,transparent 2px 6px)"
_FILLS = {
    "guaranteed": "background-color:#3f63b8",
    "in_quota": "background-color:#5b9fdb",
    "borrowed": f"background-color:#d9822b;{_HATCH}",
    "lent": f"background-color:#8d6cc4;{_HATCH}",
    "free": "background-color:rgba(128,128,128,.08);box-shadow:inset 0 0 0 1px rgba(128,128,128,.7)",
}
_BAR = Markup(
    '<div class="mw-bar" role="img" aria-label="{text}" title="{text}" style="position:relative;width:{width}px;'
    'height:{height}px">{room}{parts}{tick}</div>'
)
_BOX = Markup(
    '<div class="mw-{kind}" style="position:absolute;left:{x}px;top:{y}px;width:{width}px;height:{height}px;{fill}">'
    "</div>"
)
_ROOM = "background-color:rgba(128,128,128,.14);border-right:2px solid rgba(128,128,128,.7)"
_TICK = "background-color:currentColor"
_KEY = Markup(
    '<span title="{meaning}" style="white-space:nowrap"><span style="display:inline-block;width:{width}px;height:10px;'
    'margin-right:4px;{fill}"></span>{label}</span>'
)


def draw(bar: Bar, per_gpu: float) -> Markup:
    """Return a bar as HTML; `per_gpu` is the width of one GPU in pixels (`makeway_api.bars.scale`)."""
    return _BAR.format(
        text=safe(bar.sentence),
        width=WIDTH + 4,
        height=HEIGHT + 4,
        room=_box("end", 0, bar.end * per_gpu, _ROOM),
        parts=Markup("").join(_part(part, per_gpu) for part in bar.parts),
        tick=_box("tick", bar.reserved * per_gpu, 2, _TICK, overlap=2),
    )


def legend() -> Markup:
    """Return the meaning of the colours and marks."""
    keys = [_key(kind.label, kind.meaning, _FILLS[kind.name]) for kind in KINDS]
    keys += [_key("reservation", "where the reservation ends", _TICK, width=2)]
    ends = Markup("bar ends at the limit")
    text = Markup(" · ").join([*keys, ends])
    return Markup('<div style="opacity:.85;font-size:.92em">{}</div>').format(text)


def _part(part: Part, per_gpu: float) -> Markup:
    return _box(part.kind.name, part.start * per_gpu, part.gpus * per_gpu, _FILLS[part.kind.name])


def _box(kind: str, x: float, width: float, fill: str, overlap: int = 0) -> Markup:
    return _BOX.format(kind=kind, x=_px(x), y=2 - overlap, width=_px(width), height=HEIGHT + 2 * overlap, fill=fill)


def _key(label: str, meaning: str, fill: str, width: int = 14) -> Markup:
    return _KEY.format(meaning=meaning, fill=fill, label=label, width=width)


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
