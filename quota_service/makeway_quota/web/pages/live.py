"""Stream to a page what changes of what it shows: topics that it reads again, and parts of pages as they become.

All tabs of a browser share one stream. A part is rendered for all visitors with the same view (`parts`); nothing is
made for a stream whose connection takes no bytes, and once it does again it is sent the present state alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping

from fastapi import Request
from makeway_api.errors import MakewayError

from ...services import Caller, Services
from ...services.log.audit import POSITION, Batch
from ...services.log.topics import affected_topics
from ..login.auth import still_reads
from ..requests.compression import takes_gzip
from ..stream import GZIP_HEADER, WELCOME, note, packed
from .panel import panel_part
from .parts import PartSource, Rendering, rendered
from .team import team_part

PACE = 0.25
"""Seconds from one message about topics to the next"""
PACE_OF_PARTS = 0.5
"""The same where no topic is asked for: parts have a pace of their own"""
RECHECK_SECONDS = 5.0
"""Seconds after which a silent stream looks for new nodes"""
HIDDEN_REFRESH_SECONDS = 15.0
"""Seconds after which a part is made again where only what its reader may not see has changed: the map shows that"""
MACHINES_SECONDS = 1.0
"""Seconds after which a stream of a page of machines looks for changes of them: no event of the feed is about them"""
RETRY_SECONDS = 1.0
"""Seconds after which a part is tried again that the service could not make: it is busy, or its database is away"""
MAX_PARTS = 8
"""Parts of one stream"""

Pack = Callable[[bytes], bytes] | None
Parts = Mapping[str, str]
"""Name of a part (`panel`, `teams/NAME`) to the version that the page shows, "" for none"""


def read_parts(text: str) -> Parts:
    """Return the parts of a list with commas: `panel@VERSION,teams/NAME`; MakewayError 422 for others."""
    result = dict(entry.rpartition("@")[::2] if "@" in entry else (entry, "") for entry in text.split(",") if entry)
    for name in result:
        if name != "panel" and not (name.startswith("teams/") and len(name) > len("teams/")):
            raise MakewayError(f"There is no part {name[:80]!r} of a page.", code="unknown_part", status=422)
    if len(result) > MAX_PARTS:
        raise MakewayError(f"A stream has at most {MAX_PARTS} parts of pages.", code="too_many_parts", status=422)
    return result


class PageStream:
    """One stream of a browser."""

    def __init__(
        self, request: Request, caller: Caller, topics: frozenset[str], parts: Parts, after: int | None
    ) -> None:
        self._request = request
        self._services: Services = request.app.state.services
        self._caller = caller
        self._topics = topics
        self._shown = dict(parts)
        self._after = after
        self._pack: Pack = packed if takes_gzip(request.headers.get("accept-encoding", "")) else None
        self._stale = set(parts)
        """parts that may have changed since they were sent"""
        self._unseen = False
        """whether something changed that the reader may not see, since the parts were made"""
        self._made = time.monotonic()
        self._progress_seen = 0
        self._machines: Hashable = None
        """what the page of machines shows; None: not looked at yet, so that the page is read again"""
        self._machines_at = float("-inf")

    @property
    def headers(self) -> Mapping[str, str]:
        """Return how the stream is encoded."""
        return {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"} if self._pack else {"Vary": "Accept-Encoding"}

    @property
    def welcome(self) -> bytes:
        """Return how the stream begins: with a sign of life, so that the page hears of a proxy that keeps it back."""
        first = WELCOME + self._beat()
        return GZIP_HEADER + self._pack(first) if self._pack else first

    def beat(self) -> bytes:
        """Return the message that the stream is alive."""
        return self._packed(self._beat())

    def _beat(self) -> bytes:
        return note("beat", {"at": self._services.context.clock()})

    def _packed(self, chunk: bytes) -> bytes:
        return self._pack(chunk) if self._pack else chunk

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield messages until the reader loses its rights."""

        async def renew() -> Caller | None:
            return await still_reads(self._request.app.state.authenticator, self._request)

        pace = PACE if self._topics else PACE_OF_PARTS
        if self._after is None:  # before a part is made: what that does not show yet comes after this event
            _, self._after = await self._services.feed.range()
        batches = self._services.audit.batches(self._caller, self._after, renew, pace)
        coming = asyncio.ensure_future(anext(batches, None))
        making: asyncio.Task[tuple[str, Rendering | None]] | None = None
        nodes = self._nodes()
        recheck = MACHINES_SECONDS if "machines" in self._topics else RECHECK_SECONDS
        try:
            while True:
                if making is None and self._stale:
                    making = asyncio.create_task(self._make(self._stale.pop()))
                waited = {coming, making} if making else {coming}
                await asyncio.wait(waited, timeout=recheck, return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    if (batch := coming.result()) is None:
                        return
                    if changed := self._taken(batch):
                        yield self._packed(note("changed", {"topics": sorted(changed), "after": batch.last}))
                    coming = asyncio.ensure_future(anext(batches, None))
                if making is not None and making.done():
                    part, made = making.result()
                    making = None
                    if chunk := self._sent(part, made):
                        yield chunk
                if nodes is not (nodes := self._nodes()) and (watched := self._watched()):
                    yield self._packed(note("changed", {"topics": sorted(watched)}))
                if await self._machines_changed():
                    yield self._packed(note("changed", {"topics": ["machines"]}))
                self._mark_stale()
        finally:
            tasks = [task for task in (coming, making) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await batches.aclose()  # type: ignore[attr-defined]

    def _nodes(self) -> object:
        return self._services.context.world.assignment

    def _watched(self) -> set[str]:
        """Return what shows nodes: the parts are made again, and these topics changed."""
        self._stale |= self._shown.keys()
        return {topic for topic in self._topics if topic.startswith("node:")}

    async def _machines_changed(self) -> bool:
        """Whether machines have changed since the last look, which is a while ago, and the reader may see them."""
        if "machines" not in self._topics or not self._caller.is_administrator:
            return False
        if time.monotonic() - self._machines_at < MACHINES_SECONDS:
            return False
        self._machines_at = time.monotonic()
        try:
            mark = await self._services.machines.mark(self._caller)
        except MakewayError:
            return False  # the service is busy, or its database is away: looked at again
        changed, self._machines = mark != self._machines, mark
        return changed

    def _taken(self, batch: Batch) -> frozenset[str]:
        """Return the topics of this stream that a batch is about, and note which parts it may have changed."""
        self._caller = batch.caller
        notice = batch.notice
        if notice is not None and notice.kind != POSITION:
            self._stale |= self._shown.keys()
            return self._topics
        if not batch.rows:
            self._unseen = True
            return frozenset()
        self._stale |= self._shown.keys()
        if not self._topics:
            return frozenset()
        return frozenset().union(*(affected_topics(self._topics, row) for row in batch.rows))

    def _mark_stale(self) -> None:
        """Make the parts again where the progress of jobs, or what the reader may not see, has changed a while ago."""
        progressed = self._services.context.progress.written != self._progress_seen
        if (self._unseen or progressed) and time.monotonic() - self._made > HIDDEN_REFRESH_SECONDS:
            self._stale |= self._shown.keys()

    async def _make(self, part: str) -> tuple[str, Rendering | None]:
        """Render a part, in turn with other visitors; None where the reader may not see it (any more)."""
        self._unseen, self._made = False, time.monotonic()
        self._progress_seen = self._services.context.progress.written
        while True:
            try:
                return part, await rendered(self._request, self._source(part))
            except MakewayError as refused:
                if refused.status < 500:
                    return part, None
            await asyncio.sleep(RETRY_SECONDS)

    def _source(self, part: str) -> PartSource:
        settings = self._request.app.state.settings
        if part == "panel":
            return panel_part(self._services, self._caller, settings)
        return team_part(self._services, self._caller, settings, part.removeprefix("teams/"))

    def _sent(self, part: str, made: Rendering | None) -> bytes:
        """Return the message with a part, b"" where the page shows this version already."""
        if made is None:
            self._shown.pop(part, None)
            return self._packed(note("gone", {"part": part}))
        base, self._shown[part] = self._shown.get(part, ""), made.version
        return b"" if base == made.version else made.message(part, base, self._pack)
