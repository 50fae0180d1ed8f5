"""Share the parts of the service between the classes of `services`: store, world, read model, executors, limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from ..backends.base import Backend
from ..control.components import Components
from ..control.hub.client import HubUnreachable
from ..control.hub.leases import Leases
from ..control.reads.cycle_gate import CycleGate
from ..control.reads.read_model import ReadModels
from ..control.workers.progress_keeper import ProgressKeeper
from ..control.world.world import World
from ..policy import Document
from ..settings import ServiceSettings
from ..store.records import Workload
from ..store.store import Store
from .caller import Caller
from .limits.cpu_time import counting
from .limits.storage_limits import StorageLimits
from .limits.user_limits import UserLimits
from .refusals import busy, database_errors

P = ParamSpec("P")
T = TypeVar("T")

MAX_WAIT = 60.0
"""Seconds that one long poll may take."""
REQUEST_THREADS = 8
"""Threads that requests share for reads and writes of the store."""
FILE_READS = 2
"""Reads of job files at the same time: the backend does them in the threads that the loop uses as well."""


@dataclass(frozen=True, slots=True)
class Context:
    """The parts that requests work with. Requests never use asyncio's default executor: the loop plans there."""

    settings: ServiceSettings
    store: Store
    backend: Backend
    world: World
    read_models: ReadModels
    leases: Leases
    clock: Callable[[], float]
    wake: Callable[[], None]
    """Requests a cycle soon."""
    wake_at_once: Callable[[], None]
    """Requests a cycle without the rest before it: a person waits for what it decides."""
    gate: CycleGate
    limits: UserLimits
    storage: StorageLimits
    progress: ProgressKeeper
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(REQUEST_THREADS, "request"))
    what_if_executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "what-if"))
    preview_executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "preview"))
    """one preview at a time, apart from `what_if_executor`: it takes seconds, and offers do not wait for it"""
    file_reads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(FILE_READS))

    @classmethod
    def of(cls, parts: Components, wake: Callable[[], None], wake_at_once: Callable[[], None]) -> Context:
        """Make the context of a service."""
        settings = parts.settings
        return cls(
            settings=settings,
            store=parts.store,
            backend=parts.backend,
            world=parts.world,
            read_models=ReadModels(parts.world, parts.store, parts.clock, gate=parts.gate),
            leases=parts.leases,
            clock=parts.clock,
            wake=wake,
            wake_at_once=wake_at_once,
            gate=parts.gate,
            limits=UserLimits(
                parts.store,
                pending=settings.max_pending_jobs,
                submissions=settings.max_submissions_per_minute,
                followers=settings.max_log_followers,
            ),
            storage=StorageLimits(parts.store, settings),
            progress=parts.progress,
        )

    def close(self) -> None:
        """End the threads; calls under way finish on their own."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.what_if_executor.shutdown(wait=False, cancel_futures=True)
        self.preview_executor.shutdown(wait=False, cancel_futures=True)

    @property
    def document(self) -> Document:
        """Return the policy document in force."""
        return self.world.document

    def teams_of(self, caller: Caller) -> tuple[str, ...]:
        """Return the caller's own teams, in the order of the policy document."""
        return self.teams_of_user(caller.name, caller.groups)

    def teams_of_user(self, name: str, groups: Iterable[str]) -> tuple[str, ...]:
        """Return the teams of a user of the Hub, in the order of the policy document."""
        return self.world.people.teams_of(self.document, name, groups)

    async def find_person(self, typed: str) -> str:
        """Return the user whom an administrator types, for what cannot be undone: `BOSS` may be another than `boss`."""
        try:
            return await self.world.people.find(typed)
        except HubUnreachable as error:
            raise busy(
                f"The Hub does not answer whether it has a user {typed.strip()[:80]} ({error}), and this cannot be "
                "undone: type the name as the Hub writes it, or try again later.",
                "hub_unreachable",
                503,
                5,
            ) from None

    def visible_teams(self, caller: Caller) -> tuple[str, ...] | None:
        """Return the teams that a caller may see: its own and those that it leads; None means all."""
        if caller.manages_all:
            return None
        own, led = self.teams_of(caller), caller.groups_with("manage")
        if not led:
            return own
        facts = self.document.team_facts
        return tuple(p.name for p in self.document.policies if p.name in own or led.intersection(facts[p.name].groups))

    def managed_teams(self, caller: Caller) -> tuple[str, ...] | None:
        """Return the teams whose policy a caller may read: None (all) with `manage` without a filter."""
        return None if caller.manages_all else self.visible_teams(caller)

    def manages(self, caller: Caller, team: str | None) -> bool:
        """Whether the caller may manage the work of a team."""
        facts = self.document.team_facts.get(team or "")
        return caller.manages(facts.groups if facts else ())

    def title(self, team: str | None) -> str:
        """Return the title of a team."""
        policy = self.document.policy(team) if team else None
        return policy.label if policy else team or ""

    async def count_existing_jobs(self) -> None:
        """Count the jobs that existed before this process started against the limits of their owners, once."""
        if not self.limits.counted_existing:
            self.limits.count_existing((await self.world.rows()).values())

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking function of the store in a thread of the requests; 503 where the database is unavailable."""
        work = counting(partial(function, *args, **kwargs))
        with database_errors():
            return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def run_what_if(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the one thread for what-if plans. Waits while a cycle holds requests back."""
        await self.gate.wait_async()
        return await asyncio.get_running_loop().run_in_executor(
            self.what_if_executor, partial(function, *args, **kwargs)
        )

    async def preview(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that previews a policy in the one thread for that."""
        return await asyncio.get_running_loop().run_in_executor(
            self.preview_executor, partial(function, *args, **kwargs)
        )

    async def wait_for_change(
        self, id: str, fetch: Callable[[], Awaitable[Workload]], wait: float, version: int | None
    ) -> Workload:
        """Read a workload, waiting up to `wait` seconds until it is newer than `version`."""
        deadline = time.monotonic() + min(max(wait, 0.0), MAX_WAIT)
        with self.world.follow(id) as follower:
            while True:
                row = await fetch()
                remaining = deadline - time.monotonic()
                if version is None or row.version > version or remaining <= 0 or not row.live:
                    return row
                await follower.wait_for_change(remaining)
