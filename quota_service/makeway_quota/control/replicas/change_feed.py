"""Bring the commits of other replicas into this process: rows, streams, long polls, the policy and lease renewals.

Called by the service, on every replica of a database that replicas may share. A notification wakes it, and it reads
every `POLL` seconds in any case; what it reads goes to the store's listeners, as if this process had committed it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ...policy import PolicyInvalid, read_policy
from ...store.errors import StoreError
from ...store.store import Store
from ..hub.leases import Leases
from ..workers.channel import WorkerChannel
from ..world.world import World
from .leader import Leader

T = TypeVar("T")
log = logging.getLogger("makeway.feed")

POLL = 0.5
"""Seconds between two reads without a notification."""

PACE = 0.02
"""Seconds from one read to the next: commits that follow each other fast are read together."""

LEASES_EVERY = 1.0
"""Seconds between two exchanges of renewals."""


class ChangeFeed:
    """Follows the events after `last`, and exchanges renewals between the followers and the leader."""

    def __init__(
        self,
        store: Store,
        world: World,
        leases: Leases,
        leader: Leader,
        channel: WorkerChannel,
        last: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`last` must be read before anything else, so that no change falls between the rows and the events."""
        self._store = store
        self._world = world
        self._leases = leases
        self._leader = leader
        self._channel = channel
        self._last = last
        self._clock = clock
        self._changed: Callable[[], None] = lambda: None
        self._leases_at = 0.0
        self._lock = asyncio.Lock()
        self._listener = ThreadPoolExecutor(1, thread_name_prefix="makeway-listen")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="makeway-follow")
        self._trouble = ""

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever there are new events."""
        self._changed = changed

    async def run(self) -> None:
        """Follow until cancelled; where the database cannot be read it is tried again."""
        while True:
            try:
                await self.catch_up()
                await self._exchange_leases()
                await self._exchange_reports()
                self._trouble = ""
            except StoreError as error:
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    log.warning("The commits of other replicas cannot be read: %s", error)
            await asyncio.sleep(PACE)
            await asyncio.get_running_loop().run_in_executor(self._listener, self._store.wait_for_commit, POLL)

    async def catch_up(self) -> None:
        """Read everything that was committed before this call; a new leader does so before its first decision."""
        async with self._lock:
            changed, more, policy = False, True, False
            while more:
                followed = await self._read(self._store.follow, self._last)
                self._last, more = followed.last, followed.more
                changed, policy = changed or bool(followed.rows), policy or followed.policy
            if policy:
                await self._use_policy()
        if changed or policy:
            self._changed()

    async def _use_policy(self) -> None:
        """Use the newest policy here, if another replica has applied it."""
        current = await self._read(self._store.policies.current)
        if current is None or current.version <= self._world.policy_version:
            return
        try:
            document = await self._read(
                partial(read_policy, stored=True), current.document, f"policy version {current.version}"
            )
        except PolicyInvalid as error:
            log.error(
                "Policy version %s is not valid for this replica, which keeps the last valid one: %s",
                current.version,
                error,
            )
            return
        self._world.use(document, current.version)
        log.info("Policy version %s by %s is in force", current.version, current.author)

    async def _exchange_leases(self) -> None:
        """Write the renewals that reached a follower; read them on the leader."""
        if time.monotonic() - self._leases_at < LEASES_EVERY:
            return
        self._leases_at = time.monotonic()
        if self._leader.term is not None:
            self._leases.written(await self._read(self._store.lease_times))
        elif renewed := self._leases.unwritten():
            await self._read(self._store.renew_leases, renewed, self._clock() + self._leases.seconds)

    async def _exchange_reports(self) -> None:
        """Read what workers reported to other replicas, and write when workers were heard of here."""
        if not self._channel.used:
            return
        await self._channel.write_heard()
        if await self._channel.refresh():
            self._changed()

    async def close(self) -> None:
        """End the threads."""
        self._listener.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def _read(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, function, *args)
