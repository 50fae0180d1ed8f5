"""Render the changing parts that many visitors share, and tell each stream how its last one becomes the present one.

A part is rendered once for all visitors with the same view, compared once with each version that a page shows, and
serialised and compressed once for all their streams.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from makeway_api.errors import MakewayError
from markupsafe import Markup

from ...services import Services
from ..login.auth import Visitor
from ..stream import note
from .edits import edits
from .figures.sharing import SharedParts, View, ViewChanged
from .render import is_part, page, render

MAX_TRIES = 3
"""Shared renderings that a visitor waits for while the policy changes under each; then it gets one of its own"""
VERSIONS = 6
"""Versions of a part that are kept: a page that shows an older one is sent the whole part"""
MAX_HISTORIES = 64
"""Views whose versions are kept, the last used"""
_CURRENT = re.compile(r'<div id="mw-current"[^>]*></div>\n?')


@dataclass(frozen=True, slots=True)
class PartSource:
    """A changing part: its template, who shares it, and what it shows.

    `gather` collects the values of the part and of its page; `shell` names those that the page around it needs.
    """

    name: str
    view: Callable[[], View]
    gather: Callable[[], Awaitable[Mapping[str, Any]]]
    shell: Sequence[str] = ()


@dataclass(slots=True)
class Rendering:
    """A version of a part: `after` is the newest event that it shows for sure, `at` its time (epoch seconds)."""

    text: str
    shell: Mapping[str, Any]
    after: int
    at: float
    history: History | None = None
    body: str = ""
    """without the line that names the event, which changes where nothing else does"""
    version: str = ""
    _messages: dict[tuple[str, str, bool], bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Derive the version from the content."""
        self.body = _CURRENT.sub("", self.text, count=1)
        self.version = hashlib.blake2s(self.body.encode("utf-8", "replace"), digest_size=9).hexdigest()

    def message(self, part: str, base: str, pack: Callable[[bytes], bytes] | None) -> bytes:
        """Return the message for a page that shows version `base` of a part ("": none), made once for all streams."""
        known = self.history.find(base) if self.history and base else None
        key = (part, base if known is not None else "", pack is not None)  # a page may name any version
        if (made := self._messages.get(key)) is None:
            data: dict[str, Any] = {"part": part, "version": self.version, "after": self.after, "at": self.at}
            if known is None:
                data["text"] = self.body
            else:
                data |= {"base": base, "edits": edits(known.split("\n"), self.body.split("\n"))}
            made = note("part", data)
            made = self._messages[key] = pack(made) if pack else made
        return made


class History:
    """The last versions of one part in one view."""

    def __init__(self) -> None:
        self._kept: deque[Rendering] = deque(maxlen=VERSIONS)

    def add(self, rendering: Rendering) -> Rendering:
        """Keep a version, and return it; the one that is kept already where nothing changed."""
        if self._kept and self._kept[-1].version == rendering.version:
            last = self._kept[-1]
            last.text, last.after, last.at, last.shell = rendering.text, rendering.after, rendering.at, rendering.shell
            return last
        rendering.history = self
        self._kept.append(rendering)
        return rendering

    def find(self, version: str) -> str | None:
        """Return the text of a version, or None if it is not kept any more."""
        return next((kept.body for kept in reversed(self._kept) if kept.version == version), None)


class Histories:
    """The versions of all parts, by part and view: what one view was sent is compared with no other's."""

    def __init__(self) -> None:
        self._of: OrderedDict[View, History] = OrderedDict()

    def of(self, key: View) -> History:
        """Return the versions of a view."""
        history = self._of.setdefault(key, History())
        self._of.move_to_end(key)
        if len(self._of) > MAX_HISTORIES:
            self._of.popitem(last=False)
        return history


async def shared_page(request: Request, visitor: Visitor, source: PartSource) -> HTMLResponse:
    """Return a page whose changing part is the same for all visitors with the same view, or (below live/) that part."""
    alone = is_part(request)
    made = await rendered(request, source, first=not alone)
    if alone:
        return HTMLResponse(made.text.encode("utf-8", "replace"), headers={"X-Makeway-Version": made.version})
    return await page(request, f"{source.name}.html", visitor, part=Markup(made.text), **made.shell)


async def rendered(request: Request, source: PartSource, *, first: bool = False) -> Rendering:
    """Return a part as it is now; `first` is for a page that is opened, which may begin with the last rendering.

    A part is shared only if its view is the same before and after it was gathered: else each visitor asks for its view
    of now.
    """
    parts: SharedParts = request.app.state.parts
    histories: Histories = request.app.state.histories

    async def make(key: View | None) -> Rendering:
        services: Services = request.app.state.services
        request.state.after = await services.feed.newest()
        at = services.context.clock()
        try:
            values = await source.gather()
        except MakewayError:
            if key is not None and source.view() != key:
                raise ViewChanged from None
            raise
        if key is not None and source.view() != key:
            raise ViewChanged
        text = await render(request, f"_{source.name}.html", None, at=at, **values)
        made = Rendering(text, {name: values[name] for name in source.shell}, request.state.after, at)
        return made if key is None else histories.of((source.name, *key)).add(made)

    ask = parts.first if first else parts.get
    for _ in range(MAX_TRIES):
        key = source.view()
        with suppress(ViewChanged):
            result: Rendering = await ask((source.name, *key), partial(make, key))
            return result
    alone: Rendering = await parts.alone(partial(make, None))
    return alone
