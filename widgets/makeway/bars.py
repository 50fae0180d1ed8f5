"""Draw a team's bar as SVG that is complete by itself: no ids, no scripts, readable in a saved notebook.

The layout is `makeway_api.bars`; this module only turns GPUs into pixels.
"""

from __future__ import annotations

from makeway_api.bars import KINDS, Bar, Part
from makeway_api.quantities import number
from markupsafe import Markup

WIDTH = 300
HEIGHT = 18
PAD = 3
"""Pixels left, right, above and below for the mark at the reservation."""
_HATCHED = ("borrowed", "lent")

_SVG = Markup(
    '<svg class="mw-bar" role="img" aria-label="{text}" width="{width}" height="{height}" '
    'viewBox="0 0 {width} {height}"><title>{text}</title>'
    '<rect class="mw-room" x="{pad}" y="{pad}" width="{end}" height="{inner}"/>{parts}'
    '<path class="mw-end" d="M{end_x} {pad}v{inner}"/><path class="mw-tick" d="M{tick} 0v{height}"/></svg>'
)
_RECT = Markup('<rect class="mw-s mw-{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>')
_NUMBER = Markup('<text class="mw-n mw-n-{kind}" x="{x}" y="{y}">{text}</text>')
_KEY = Markup(
    '<span class="mw-key" title="{meaning}"><svg width="14" height="12" aria-hidden="true">{shape}</svg>{label}</span>'
)
_MARKS = Markup(
    '<span class="mw-key"><svg width="6" height="12" aria-hidden="true"><path class="mw-tick" d="M3 0v12"/></svg>'
    'reservation</span><span class="mw-key">bar ends at the limit</span>'
)


def draw(bar: Bar, per_gpu: float) -> Markup:
    """Return a bar as SVG; `per_gpu` is the width of one GPU in pixels (`makeway_api.bars.scale`)."""
    return _SVG.format(
        text=bar.sentence,
        width=WIDTH + 2 * PAD,
        height=HEIGHT + 2 * PAD,
        inner=HEIGHT,
        pad=PAD,
        end=_px(bar.end * per_gpu),
        end_x=_px(PAD + bar.end * per_gpu),
        tick=_px(PAD + bar.reserved * per_gpu),
        parts=Markup("").join(_part(part, per_gpu) for part in bar.parts),
    )


def legend() -> Markup:
    """Return the meaning of the colours and marks."""
    keys = (
        _KEY.format(meaning=kind.meaning, shape=_shape(kind.name, 1, 1, 12, 10), label=kind.label) for kind in KINDS
    )
    return Markup('<div class="mw-legend">{}{}</div>').format(Markup("").join(keys), _MARKS)


def _part(part: Part, per_gpu: float) -> Markup:
    x, width, text = PAD + part.start * per_gpu, part.gpus * per_gpu, number(part.gpus)
    shape = _shape(part.kind.name, x, PAD, width, HEIGHT)
    if width < 9 * len(text) + 6:
        return shape
    return shape + _NUMBER.format(kind=part.kind.name, x=_px(x + width / 2), y=_px(PAD + HEIGHT / 2 + 4), text=text)


def _shape(kind: str, x: float, y: float, width: float, height: float) -> Markup:
    rect = _RECT.format(kind=kind, x=_px(x), y=_px(y), width=_px(width), height=_px(height))
    return rect + (_hatch(x, y, width, height) if kind in _HATCHED else Markup(""))


def _hatch(x: float, y: float, width: float, height: float, step: float = 6) -> Markup:
    """Return slanted lines, cut at the rectangle's edges: an SVG pattern would need an id unique in the notebook."""
    lines, at = [], x - height + step / 2
    while at < x + width:
        left, right = max(at, x), min(at + height, x + width)
        if right > left:
            lines.append(f"M{_px(left)} {_px(y + height - (left - at))}L{_px(right)} {_px(y + height - (right - at))}")
        at += step
    return Markup('<path class="mw-hatch" d="{}"/>').format("".join(lines)) if lines else Markup("")


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
