"""Render templates, everything escaped, in a thread of the requests' own; and the filters that templates use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from makeway_api import curves
from makeway_api.models import WorkerPlacement, money
from makeway_api.quantities import gpus, number
from markupsafe import Markup, escape

from ...services import Services
from ...wording import duration
from .. import assets
from ..login.auth import Visitor
from ..settings import WebSettings
from .figures import bars, cells, display, heat

_ENV = Environment(
    loader=FileSystemLoader(Path(__file__).parent.parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)

VERBS = {
    "submit": ("submitted", "light"),
    "start": ("started", "success"),
    "evict": ("makes way", "warning"),
    "notice": ("makes way", "warning"),
    "move": ("moves", "info"),
    "requeue": ("requeued", "info"),
    "queue": ("changes queue", "info"),
    "finish": ("finished", "success"),
    "succeed": ("finished", "success"),
    "fail": ("failed", "danger"),
    "refuse": ("refused", "danger"),
    "kill": ("killed", "danger"),
    "lost": ("lost", "danger"),
    "cancel": ("cancelled", "secondary"),
    "delete": ("deleted", "secondary"),
    "release": ("ended", "secondary"),
    "policy": ("policy", "primary"),
    "deployment": ("deployment", "primary"),
    "credential": ("credential", "primary"),
    "wait": ("waits", "light"),
    "expire": ("lease ended", "secondary"),
}
"""How a decision's verb is shown; one that is not here is shown as it is."""

TODAY = 20 * 3600
"""Seconds within which a time of day needs no date."""

_AMOUNT = re.compile(r"(?<=\d) (?=[A-Z]{3}\b)")
"""The space between a number and the three letters of a currency"""

_LETTERS = "[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]+"
_ARABIC = re.compile(f"{_LETTERS}(?: +{_LETTERS})*")
"""Words in Hebrew, Arabic and the scripts between them in Unicode"""

STATES = {
    "pending": "secondary",
    "starting": "info",
    "running": "success",
    "checkpointing": "warning",
    "succeeded": "success",
    "failed": "danger",
    "cancelled": "secondary",
    "stopped": "secondary",
}


async def page(
    request: Request, template: str, visitor: Visitor | None, *, status: int = 200, **values: Any
) -> HTMLResponse:
    """Return a template, rendered for a visitor outside the event loop: a large page takes tens of milliseconds.

    `after` is the event up to which the page is current: every changing part carries it (`_parts.html`).
    """
    text = await render(request, template, visitor, **values)
    return HTMLResponse(text.encode("utf-8", "replace"), status_code=status)


FAILED = "The last cycle of decisions failed and is repeated. Nothing starts meanwhile; the service's log says why."


def _problem(services: Services, visitor: Visitor | None) -> str | None:
    """Return what does not work at the moment; an administrator reads the names of what is quarantined."""
    world = services.context.world
    quarantined = world.quarantine.sentence(named=visitor is not None and visitor.caller.admin)
    failed = FAILED if world.failure else None
    return " ".join(filter(None, (world.problem, *world.warnings, failed, quarantined, world.people.problem))) or None


async def render(request: Request, template: str, visitor: Visitor | None, **values: Any) -> str:
    """Render a template in a thread of the requests."""
    settings: WebSettings = request.app.state.settings
    services: Services = request.app.state.services
    make = partial(
        _ENV.get_template(template).generate,
        settings=settings,
        cluster_problem=_problem(services, visitor),
        prefix=settings.prefix,
        hub=settings.hub,
        visitor=visitor,
        **{"after": getattr(request.state, "after", 0), "at": services.context.clock()} | values,
        asset=_asset(settings),
    )
    gate = services.context.gate

    def joined() -> str:
        pieces = []
        for piece in make():
            pieces.append(piece)
            gate.wait_in_thread()  # a cycle goes first, also before the rest of a large page
        return "".join(pieces)

    return await services.context.call(joined)


def is_part(request: Request) -> bool:
    """Whether only the changing part of a page is requested."""
    settings: WebSettings = request.app.state.settings
    return request.url.path.startswith(f"{settings.prefix}live/")


def part(request: Request, name: str) -> str:
    """Return the template of a page, or that of its changing part."""
    return f"_{name}.html" if is_part(request) else f"{name}.html"


def _asset(settings: WebSettings) -> Any:
    return lambda path: f"{settings.prefix}static/{path}?v={assets.version(path)}"


def time_tag(moment: datetime | None, style: str = "ago") -> Markup:
    """Return a time as HTML: the clock, which the page's script turns into `ago`, `for` or `in` and keeps fresh.

    What the server writes stays true, so that a part of a page changes only where something happened.
    """
    if moment is None:
        return Markup("–")
    exact = moment.astimezone(UTC)
    today = abs((datetime.now(UTC) - exact).total_seconds()) < TODAY
    return Markup('<time datetime="{}" data-style="{}" data-tip="{}">{}</time>').format(
        exact.isoformat(timespec="seconds"),
        style,
        exact.strftime("%Y-%m-%d %H:%M:%S UTC"),
        exact.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M"),
    )


def amounts(text: str) -> str:
    """Return a text whose amounts of money stay on one line with their currency."""
    return _AMOUNT.sub("\N{NO-BREAK SPACE}", text)


def sentence(text: str) -> Markup:
    """Return a message as HTML in which names in right-to-left scripts leave the order of what follows them as it is.

    Without the isolation, browsers show a number after such a name before it.
    """
    return Markup(_ARABIC.sub(r"<bdi>\g<0></bdi>", str(escape(text))))


def where(placement: Sequence[WorkerPlacement]) -> str:
    """Return a placement as text: node1: 0–2, node2: 5."""
    return ", ".join(
        f"{worker.node}: {_ranges(worker.devices)}" if worker.devices else worker.node for worker in placement
    )


def _ranges(devices: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for index in sorted(devices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


_ENV.filters.update(
    amounts=amounts, when=time_tag, gpus=gpus, number=number, sentence=sentence, where=where, duration=duration
)
_ENV.globals.update(
    bar=bars.bar,
    small_bar=bars.small_bar,
    cells=cells.node,
    heat_map=heat.heat_map,
    is_large=display.is_large,
    curves=curves,
    money=money,
    verbs=VERBS,
    states=STATES,
)
