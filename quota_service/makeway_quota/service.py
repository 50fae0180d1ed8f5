"""The parts put together: store, world, leases, backend, loop and services, started and stopped in the right order."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from .backends.base import Backend
from .config import ServiceConfig
from .control.components import Components
from .control.cycle import Loop
from .control.hub_client import HubApi
from .control.leases import Leases
from .control.pool_assignment import sizes
from .control.world import World
from .history.retention import Retention, keep_of
from .policy import Document, PolicyInvalid, Sizes, fit_text, read
from .services import Services
from .store.store import Store, open_store

log = logging.getLogger("makeway.service")


class AlreadyRunning(Exception):
    """Another service uses the same state directory."""


class Service:
    """One running quota service; `start` makes it decide, `stop` lets it go."""

    def __init__(self, parts: Components, lock: IO[str] | None = None) -> None:
        self.config = parts.config
        self.store = parts.store
        self.backend = parts.backend
        self.world = parts.world
        self.leases = parts.leases
        self.hub = parts.hub
        self.clock = parts.clock
        self.loop = Loop(parts)
        self.retention = Retention(
            parts.store, keep_of(parts.config), parts.backend.purge, lambda: self.loop.term, clock=parts.clock
        )
        self.services = Services.of(parts, self.loop.wake)
        self._lock = lock
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls,
        config: ServiceConfig,
        backend: Backend,
        hub: HubApi | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Service:
        """Take the state directory, open the database, adopt what runs, and read (or seed) the policy."""
        lock = take_state_dir(config.state_dir)
        try:
            store = await asyncio.to_thread(open_store, config.db_url)
            await backend.open()
            seen = await backend.observe()
            document, version = current_policy(store, config, clock(), partial(sizes, seen.nodes))
        except BaseException:
            lock.close()
            raise
        world = World(store, document, version, clock, config.start_deadline_seconds)
        world.see(seen)
        return cls(Components(config, store, backend, world, Leases(config.lease_seconds, hub), hub, clock), lock)

    async def start(self, deposed: Callable[[], object] = lambda: None) -> None:
        """Lead, and go on deciding until stopped; `deposed` is called when another service took over."""
        self.loop.term = await asyncio.to_thread(
            self.store.take_term, f"{socket.gethostname()}:{os.getpid()}", self.clock()
        )
        deciding = asyncio.create_task(self.loop.run())
        deciding.add_done_callback(lambda task: deposed() if not task.cancelled() and task.exception() else None)
        self._tasks = [deciding, asyncio.create_task(self.retention.run())]

    async def stop(self, *, stop_jobs: bool) -> None:
        """Stop deciding; with `stop_jobs` everything that runs saves and returns to the queue."""
        self.loop.stop()
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.loop.close(stop_jobs=stop_jobs)
        if self.hub is not None:
            await self.hub.close()
        self.services.close()
        await asyncio.to_thread(self.store.close)
        if self._lock is not None:
            self._lock.close()


def take_state_dir(state_dir: Path) -> IO[str]:
    """Make the state directory ours until the file is closed; AlreadyRunning when another service has it."""
    state_dir.mkdir(parents=True, exist_ok=True)
    file = open(state_dir / "service.lock", "a")  # noqa: SIM115 (held as long as the service lives)
    for _ in range(200):  # one that is just stopping needs a while
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            time.sleep(0.1)
    file.close()
    raise AlreadyRunning(
        f"Another quota service already uses {state_dir}. Stop it first, or choose another MAKEWAY_STATE_DIR."
    )


def current_policy(store: Store, config: ServiceConfig, now: float, sizes: Sizes) -> tuple[Document, int]:
    """The document in force; an empty database is seeded from the policy file, fitted to the machine's `sizes`."""
    current = store.policy_current()
    if current is None:
        text, source = seed_text(config)
        comment = f"seeded from {Path(source).name}"
        fitted = _seed(text, source, sizes)
        if fitted != text:
            text, comment = fitted, f"{comment}, scaled to the GPUs of this machine"
        current = store.add_policy(text, "makeway", comment, 0, now)
    try:
        return read(current.document, f"policy version {current.version}"), current.version
    except PolicyInvalid:
        log.error("Policy version %s is not valid for this service", current.version)
        raise


def _seed(text: str, source: str, sizes: Sizes) -> str:
    """The first document, fitted to the machine; ValueError lists what is wrong with it, line by line."""
    try:
        fitted = fit_text(text, source, sizes)
        read(fitted, source, sizes)
    except PolicyInvalid as invalid:
        many = f"has {len(invalid.issues)} mistakes" if len(invalid.issues) > 1 else "has a mistake"
        raise ValueError(
            f"The policy file that it begins with {many}; mend it, or name another one in MAKEWAY_POLICY_FILE:\n"
            f"{invalid}"
        ) from None
    return fitted


def seed_text(config: ServiceConfig) -> tuple[str, str]:
    """The text that an empty database begins with, and where it came from."""
    if config.policy_file is None:
        raise ValueError(
            "The database has no policy document yet: name one to begin with in MAKEWAY_POLICY_FILE "
            "(hub_config/policy.yaml is a sample)."
        )
    try:
        return config.policy_file.read_text(encoding="utf-8"), str(config.policy_file)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"The policy file {config.policy_file} that Makeway begins with cannot be read: {why}. "
            "Mend it, or name another one in MAKEWAY_POLICY_FILE."
        ) from None
