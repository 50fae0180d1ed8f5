"""Keep the objects of one list of the API server in memory: read once, page by page, then followed by a watch.

Only what `project` makes of an object is kept. A watch that ends is resumed where it was; one whose past the API
server has forgotten (410), or that fails twice where it is resumed, is replaced by a new list, during which the known
objects stay. A list that expires half-way starts over, and what is not in the complete one is dropped. Failures are
repeated after growing pauses with jitter. A watch on which nothing arrives, not even the API server's bookmarks, counts
as dead and is replaced by a list, too: an API server that was restored from a backup waits for versions of the future.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import orjson

from .client import GONE, ApiClient, ApiStatusError, ApiUnreachable, Object

log = logging.getLogger("makeway.kubernetes")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of an informer, in seconds, and the number of objects in one page of a list."""

    watch: float = 240.0
    """after which the API server ends a watch; up to a quarter more, so that watches do not end together"""
    silence: float = 90.0
    """without a byte, after which a watch counts as dead; the API server sends a bookmark every minute"""
    first_pause: float = 0.5
    max_pause: float = 30.0
    resync: float = 3600.0
    """after which everything is listed again, in case that a watch left something out"""
    page: int = 500


DEFAULT_TIMING = Timing()
PASSING = (401, 403, 429)
"""Refusals that say nothing about the version that is followed"""


@dataclass(slots=True)
class InformerCounts:
    """What an informer did so far; for metrics and tests."""

    lists: int = 0
    pages: int = 0
    watches: int = 0
    events: int = 0
    bookmarks: int = 0
    expired: int = 0
    """lists and watches whose resource version the API server had forgotten"""
    failures: int = 0


class Informer(Generic[T]):
    """The objects of one list by key: `namespace/name`, or the name of those without a namespace.

    `take` returns the keys that changed or are gone. `synced` is whether a list was complete once.
    """

    def __init__(
        self,
        client: ApiClient,
        path: str,
        project: Callable[[Object], T | None],
        *,
        query: dict[str, str] | None = None,
        wake: Callable[[], None] = lambda: None,
        gone: Callable[[T], None] = lambda last: None,
        timing: Timing = DEFAULT_TIMING,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`project` returns None for objects that are not kept; `query` has the selectors of the list.

        `gone` is called with what was made of an object's last state when it is there no more.
        """
        self.objects: dict[str, T] = {}
        self.synced = False
        self.counts = InformerCounts()
        self.problem = ""
        """why the API server cannot be followed at the moment"""
        self.refused = False
        """whether that is because it does not know this client, or does not let it read"""
        self.status = 0
        """the HTTP status of its last refusal; 0 where it could not be reached"""
        self.heard_at: float | None = None
        """when the API server was last heard of (monotonic)"""
        self._client = client
        self._path = path
        self._project = project
        self._query = query or {}
        self._wake = wake
        self._gone = gone
        self._timing = timing
        self._clock = clock
        self._jitter = jitter
        self._changed: set[str] = set()
        self._uids: dict[str, str] = {}
        """of the objects, by key: an object of the same name with another UID is another object"""
        self._version = ""
        self._listed_at = 0.0
        self._failures = 0
        self._synced = asyncio.Event()
        self._limit: asyncio.Timeout | None = None
        """of what is asked now"""
        self._again = asyncio.Event()

    def take(self) -> set[str]:
        """Return the keys that changed or are gone since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    async def wait_synced(self) -> None:
        """Return once the first list is complete."""
        await self._synced.wait()

    def retry_now(self) -> None:
        """End what is requested or waited for: the API server could not be reached, and can again."""
        self._again.set()
        if self._limit is not None:
            self._limit.reschedule(0.0)

    async def run(self) -> None:
        """Follow the list until cancelled."""
        while True:
            try:
                await self._follow()
                self._failures = 0
            except TimeoutError:
                self._failures = 0
                await self._fail(ApiUnreachable("the Kubernetes API server could not be reached"))
            except (ApiStatusError, ApiUnreachable) as error:
                await self._fail(error)
            except Exception as error:  # an informer that ends would leave the service with what it saw last, for ever
                log.exception("%s: an answer that was not understood", self._path)
                if self._failures:
                    self._version = ""
                await self._fail(
                    ApiUnreachable(f"the Kubernetes API server answered what is not understood: {error!r}")
                )

    async def _follow(self) -> None:
        """Read the list, if it is not known or old, and follow one watch to its end; TimeoutError on `retry_now`."""
        try:
            async with asyncio.timeout(None) as self._limit:
                if not self._version or self._clock() - self._listed_at >= self._timing.resync:
                    await self._list()
                began = self._clock()
                await self._watch()
        finally:
            self._limit = None
        if self._clock() - began < self._timing.first_pause:
            await self._pause(1)  # something in between ends watches at once

    async def _pause(self, failures: int, minimum: float = 0.0) -> None:
        pause = min(self._timing.max_pause, self._timing.first_pause * 2.0 ** min(failures - 1, 20))
        self._again.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(minimum, pause * (0.5 + self._jitter()))):
                await self._again.wait()

    async def _fail(self, error: ApiStatusError | ApiUnreachable) -> None:
        """Pause after a failure; an expired version leads to a new list, at once the first time."""
        self.counts.failures += 1
        self._failures += 1
        wanted = 0.0
        self.status = error.status if isinstance(error, ApiStatusError) else 0
        self.refused = self.status in (401, 403)
        if isinstance(error, ApiStatusError):
            wanted = error.retry_after or 0.0
            if has_expired(error):
                self.counts.expired += 1
                self._version = ""
                if self._failures == 1:
                    return
            elif self._failures > 1 and error.status not in PASSING:
                self._version = ""
        if str(error) != self.problem:
            log.warning("%s is not followed at the moment: %s", self._path, error)
            self.problem = str(error)
        await self._pause(self._failures, wanted)

    # -- listing

    async def _list(self) -> None:
        """Read all pages; known objects that are in none of them are gone.

        A list that expires between its pages starts over, then in one page, which cannot expire: pages that were read
        before show what may be deleted by now.
        """
        result: set[str] = set()
        query = {**self._query, "limit": str(self._timing.page)}
        self.counts.lists += 1
        while True:
            page = await self._page(query)
            self._heard()
            if page is None:
                result.clear()
                query = dict(self._query)
                continue
            for item in page.get("items") or ():
                key = key_of(item)
                self._put(key, self._made_of(key, item))
                result.add(key)
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                break
            query["continue"] = metadata["continue"]
        for key in self.objects.keys() - result:
            self._gone(self.objects[key])
            self._put(key, None)
        self._version = metadata["resourceVersion"]
        self._listed_at = self._clock()
        if not self.synced:
            self.synced = True
            self._synced.set()
            self._wake()

    async def _page(self, query: dict[str, str]) -> Object | None:
        """Return the next page; None where the API server has forgotten the version of the pages before it."""
        self.counts.pages += 1
        try:
            return await self._client.get(self._path, query)
        except ApiStatusError as refusal:
            if "continue" not in query or not has_expired(refusal):
                raise
            self.counts.expired += 1
            return None

    # -- watching

    async def _watch(self) -> None:
        """Follow one watch to its end; ApiStatusError where the API server ends it with an error."""
        seconds = self._timing.watch * (1.0 + 0.25 * self._jitter())
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(max(1, int(seconds))),
        }
        self.counts.watches += 1
        try:
            async with asyncio.timeout(seconds + self._timing.silence):
                async with self._client.stream(self._path, query, self._timing.silence) as lines:
                    self._heard()  # nothing may happen for a minute
                    async for line in lines:
                        self._event(line)
        except TimeoutError:
            raise ApiUnreachable("the Kubernetes API server did not end a watch when it should") from None
        except ApiUnreachable:
            if self.heard_at is not None and self._clock() - self.heard_at >= self._timing.silence:
                self._version = ""
            raise

    def _event(self, line: bytes) -> None:
        """Take one event of a watch; ApiStatusError where it is the error that ends the watch."""
        event = orjson.loads(line)
        kind, item = event["type"], event["object"]
        self._heard()
        if kind == "ERROR":
            code = int(item.get("code") or 0)
            raise ApiStatusError(code, str(item.get("reason") or ""), str(item.get("message") or ""))
        version = item["metadata"]["resourceVersion"]
        if _is_before(version, self._version):
            raise ApiStatusError(GONE, "Expired", f"the resource version went back from {self._version} to {version}")
        self._failures = 0
        self._version = version
        if kind == "BOOKMARK":
            self.counts.bookmarks += 1
            return
        self.counts.events += 1
        key = key_of(item)
        value = self._made_of(key, item)
        if kind == "DELETED" and value is not None:
            self._gone(value)
        self._put(key, None if kind == "DELETED" else value)

    def _made_of(self, key: str, item: Object) -> T | None:
        """Return what is kept of an object; one that is not understood stays as it was, and hides no other.

        A known object of its name that has another UID is gone.
        """
        uid = str(item["metadata"].get("uid") or "")
        if key in self.objects and self._uids[key] != uid:
            self._gone(self.objects[key])
            self._put(key, None)
        try:
            value = self._project(item)
        except Exception:
            log.exception("%s: %s was not understood", self._path, key)
            value = self.objects.get(key)
        if value is not None:
            self._uids[key] = uid
        return value

    def _heard(self) -> None:
        self.heard_at = self._clock()
        if self.problem:
            log.info("%s is followed again", self._path)
            self.problem = ""

    def _put(self, key: str, value: T | None) -> None:
        """Keep what was made of an object, or drop it; only what differs counts as a change."""
        if value is None:
            self._uids.pop(key, None)
            if self.objects.pop(key, None) is None:
                return
        elif self.objects.get(key) == value:
            return
        else:
            self.objects[key] = value
        self._changed.add(key)
        if self.synced:
            self._wake()


def has_expired(refusal: ApiStatusError) -> bool:
    """Whether the API server has forgotten the version that it was asked for; the error of a watch may have no code."""
    return refusal.status == GONE or refusal.reason in ("Expired", "Gone")


def _is_before(version: str, known: str) -> bool:
    """Whether a resource version is older than a known one: the API server was restored from a backup."""
    return version.isdecimal() and known.isdecimal() and int(version) < int(known)


def key_of(item: Object) -> str:
    """Return the key of an object: its namespace and name, or its name alone."""
    metadata = item["metadata"]
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata['name']}" if namespace else str(metadata["name"])
