"""What every part of the services stands on: the store, the world, and how to wait for a change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

from makeway_api.errors import MakewayError

from ..control.components import Components
from ..policy import Document
from ..store.records import Workload
from .caller import Caller
from .event_feed import EventFeed
from .submission_batches import SubmissionBatcher

T = TypeVar("T")

LONGEST_WAIT = 60.0
"""Seconds that one long poll may take."""


class Core:
    """All services share one store, one world and one loop to wake."""

    def __init__(self, parts: Components, wake: Callable[[], None]) -> None:
        self.store = parts.store
        self.world = parts.world
        self.backend = parts.backend
        self.leases = parts.leases
        self.config = parts.config
        self.clock = parts.clock
        self.wake = wake
        self.feed = EventFeed(parts.store)
        self.batcher = SubmissionBatcher(parts.store, parts.clock)

    @property
    def document(self) -> Document:
        """The policy document in force."""
        return self.world.document

    def teams_of(self, caller: Caller) -> tuple[str, ...]:
        """The caller's own teams, in the order of the policy document."""
        return self.document.teams_of(caller.name, caller.groups)

    def visible_teams(self, caller: Caller) -> tuple[str, ...] | None:
        """The teams that a caller may look at; None means all."""
        return None if caller.sees_all else self.teams_of(caller)

    def title(self, team: str | None) -> str:
        """How people call a team."""
        policy = self.document.policy(team) if team else None
        return policy.label if policy else team or ""

    async def read(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Call the blocking store from the event loop."""
        return await asyncio.to_thread(function, *args, **kwargs)

    async def wait_for_change(
        self, id: str, fetch: Callable[[], Awaitable[Workload]], wait: float, version: int | None
    ) -> Workload:
        """Read a workload, waiting up to `wait` seconds until it is newer than `version`."""
        deadline = time.monotonic() + min(max(wait, 0.0), LONGEST_WAIT)
        with self.world.follow(id) as follower:
            while True:
                row = await fetch()
                left = deadline - time.monotonic()
                if version is None or row.version > version or left <= 0 or not row.live:
                    return row
                await follower.heard(left)


def when(seconds: float | None) -> datetime | None:
    """Return Unix seconds as a time of the wire; None stays None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def at(seconds: float) -> datetime:
    """Return Unix seconds as a time of the wire."""
    return datetime.fromtimestamp(seconds, UTC)


def refuse(message: str, code: str, status: int = 400, **numbers: object) -> MakewayError:
    """Make the error for a request that cannot be done."""
    return MakewayError(message, code=code, status=status, numbers=numbers)
