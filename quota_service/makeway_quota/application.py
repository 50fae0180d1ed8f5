"""Assemble the parts (store, world, leader, leases, backend, loop, services), start and stop them in order."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from makeway_api import installations

from .artifacts.choice import make_artifacts
from .autoscale.deployment import CLUSTER, Deployment
from .autoscale.document import read_deployment
from .autoscale.provider import JoinData, Provider
from .autoscale.providers.choice import provider_of
from .backends.base import Backend, BackendError
from .backends.choice import with_removed
from .backends.kubernetes.settings import machine_provider
from .backends.machines.machine_source import BACKEND as MACHINES
from .control.components import Components
from .control.hub.client import HubApi
from .control.hub.leases import Leases
from .control.hub.people import People, refresh_forever
from .control.hub.servers import HubServers
from .control.loop import Loop
from .control.machines.channel import MachineChannel
from .control.machines.machine_loop import MachineLoop
from .control.machines.placements import MachinePlacements
from .control.machines.tokens import MachineTokens
from .control.replicas.change_feed import ChangeFeed
from .control.replicas.leader import Leader
from .control.restarting_tasks import restarting
from .control.workers.channel import WorkerChannel
from .control.workers.progress_keeper import ProgressKeeper
from .control.workers.tokens import AttemptTokens
from .control.world.observation import backend_of
from .control.world.pool_assignment import sizes
from .control.world.world import World
from .history.retention import Retention, keep_of
from .policy import Document, PolicyInvalid, Sizes, read_policy, rescale_text
from .services import Services
from .settings import ServiceSettings
from .store.errors import Conflict
from .store.records import Workload
from .store.storage.sealed_secrets import SecretKeys
from .store.store import Store, open_store

log = logging.getLogger("makeway.service")

TAKEOVER_SECONDS = 20.0
"""Seconds that a service which must be the only one waits for another that is just stopping."""


class AlreadyRunning(Exception):
    """Another service uses the same state directory, or the same database."""


class Application:
    """One running replica of the quota service; `start` makes it lead or follow, `stop` ends it."""

    def __init__(self, components: Components, locks: Sequence[IO[str]] = ()) -> None:
        self.components = components
        self.loop = Loop(components)
        self.retention = Retention(
            components.store,
            keep_of(components.settings),
            self.loop.actuator.purge,
            lambda: components.leader.term,
            clock=components.clock,
            threads=components.threads,
            measure=components.backend.folder_bytes if components.backend.keeps_outputs else None,
            room=lambda: self.services.context.storage.writable_bytes(),
        )
        self.retention.quarantine = components.world.quarantine
        self.machine_loop = machine_loop(components, self.loop.wake)
        self.loop.machine_loop = self.machine_loop
        self.services = Services.of(components, self.loop.wake, self.loop.wake_at_once)
        if self.machine_loop is not None:
            self.services.deployments.show_status_of(self.machine_loop.status)
            self.services.machines.read_consoles_with(self.machine_loop.console)
        self._locks = locks
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls,
        settings: ServiceSettings,
        backend: Backend,
        hub: HubApi | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] | None = None,
    ) -> Application:
        """Open the database, adopt what runs, and read (or seed) the policy.

        `monotonic` never jumps; without it, only steps of the system's own clock are noticed.

        Where the database or the backend serves one replica only, the leader's lock is taken here: AlreadyRunning if
        another service has it.
        """
        locks: list[IO[str]] = [] if backend.shared else [lock_state_dir(settings.state_dir)]
        store: Store | None = None
        leader: Leader | None = None
        try:
            store = await asyncio.to_thread(open_service_store, settings)
            rows = await asyncio.to_thread(store.active)
            backend = with_removed(backend, {backend_of(row) for row in rows})
            leader = Leader(store.leader_lock(settings.leader_seconds), settings.leader_seconds, can_lead_with(backend))
            if not (store.shared and backend.shared):
                await _lead_alone(leader, settings)
            if not backend.shared:
                locks.append(await asyncio.to_thread(lock_installation, store, settings.state_dir))
            await asyncio.to_thread(check_jobs_are_here, rows, backend, settings.state_dir)
            placed = {(row.id, row.attempt): name for row in rows if (name := backend_of(row))}
            backend.use_backend_lookup(lambda id, attempt: placed.get((id, attempt), ""))
            components = await _components(settings, store, backend, leader, hub, clock, monotonic)
            world = components.world
            backend.use_backend_lookup(
                lambda id, attempt: world.backend_of_attempt(id, attempt) or placed.get((id, attempt), "")
            )
            backend.use_ended_backend_lookup(partial(ended_placements, store))
        except BaseException:
            if leader is not None:
                await leader.close()
            if store is not None:
                store.close()
            for item in locks:
                item.close()
            raise
        return cls(components, locks)

    async def start(self) -> None:
        """Lead, or follow until the leader is gone."""
        components = self.components
        await self.services.context.count_existing_jobs()
        wake = self.loop.wake
        components.leader.on_change(wake)
        if components.feed is not None:
            components.feed.on_change(wake)
            self._tasks.append(
                asyncio.create_task(restarting("The feed of the database's changes", components.feed.run))
            )
        if components.servers is not None:
            components.servers.on_change(wake)
        if components.leader.term is None and not components.store.shared:
            await components.leader.acquire()
        self._tasks += [
            asyncio.create_task(restarting("Following who is in which team", self._follow_people)),
            asyncio.create_task(restarting("Standing as leader", components.leader.run)),
            asyncio.create_task(restarting("Retention", self.retention.run)),
            asyncio.create_task(restarting("The progress of jobs", components.progress.run)),
            *self._machine_tasks(),
            asyncio.create_task(restarting("The control loop", self.loop.run)),
        ]

    def _machine_tasks(self) -> list[asyncio.Task[None]]:
        if self.machine_loop is None:
            return []
        return [asyncio.create_task(restarting("Deployments of machines", self.machine_loop.run))]

    async def _follow_people(self) -> None:
        components, world = self.components, self.components.world
        world.people.on_change(self.loop.wake)

        def entries() -> tuple[str, ...]:
            return world.document.users_with_capitals

        def leads() -> bool:
            return components.leader.term is not None

        await refresh_forever(world.people, world.owners, entries, leads)

    async def stop(self, *, stop_jobs: bool) -> None:
        """Stop leading or following; with `stop_jobs` a leader first lets all jobs save and return to the queue."""
        components = self.components
        self.loop.stop()
        await asyncio.gather(*self._tasks[-1:], return_exceptions=True)  # the loop ends its cycle first
        await self.loop.close(stop_jobs=stop_jobs)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if components.servers is not None:
            await components.servers.close()
        self.services.close()
        await components.leader.close()
        if components.feed is not None:
            await components.feed.close()
        components.threads.shutdown(wait=False)
        await asyncio.to_thread(components.store.close)
        for item in self._locks:
            item.close()


def machine_loop(components: Components, wake_cycle: Callable[[], None]) -> MachineLoop | None:
    """Return what drives deployments of machines; None without the backend of that name."""
    channel, settings = components.machines, components.settings
    if channel is None:
        return None

    def join(machine: str) -> JoinData:
        return JoinData(settings.machines.url, channel.tokens.join_token(machine))

    store, leader = components.store, components.leader
    keys = SecretKeys.of(settings.credentials_key_file, settings.state_dir, shared=store.shared)

    def providers(deployment: Deployment) -> Provider:
        if deployment.provider == CLUSTER:
            if CLUSTER not in components.backend.names:
                raise ValueError("The provider kubernetes needs the backend of that name in MAKEWAY_BACKEND.")
            return machine_provider(settings.kubernetes, lambda: components.world.document, deployment.settings)
        secrets = store.secrets.cloud(keys, deployment.name)
        return provider_of(deployment, settings.state_dir, store.contents.installation, secrets)

    result = MachineLoop(
        store,
        leader,
        providers,
        wake_cycle,
        components.clock,
        join=join,
        cluster_machines=channel.cluster_machines,
        live_machines=channel.live_machines,
    )
    result.quarantine = components.world.quarantine
    return result


async def ended_placements(store: Store, id: str) -> dict[int, str]:
    """Return the backends that the ended attempts of a workload were placed on, by their numbers."""
    attempts = await asyncio.to_thread(store.attempts, id)
    return {one.number: one.placement[0].backend if one.placement else "" for one in attempts if one.ended_at}


def can_lead_with(backend: Backend) -> Callable[[], bool]:
    """Return whether a replica with this backend is able to lead."""
    return lambda: backend.reachable


def open_service_store(settings: ServiceSettings) -> Store:
    """Open the database and the storage of large files that the settings name."""
    artifacts = make_artifacts(settings.artifacts_dir, settings.artifacts_s3)
    elsewhere = "local" not in settings.backends  # a power cut of this machine does not take the jobs
    return open_store(settings.db_url, artifacts, settings.large_file_bytes, durable=elsewhere)


async def _lead_alone(leader: Leader, settings: ServiceSettings) -> None:
    """Take the leader's lock for a service that cannot share its database or its backend with another."""
    deadline = time.monotonic() + TAKEOVER_SECONDS
    while not await leader.acquire():
        if time.monotonic() > deadline:
            raise AlreadyRunning(
                "Another quota service works on this database, and this one cannot share it: SQLite and the jobs of "
                "one machine belong to a single service. Stop the other one first, or choose another MAKEWAY_DB_URL."
            )
        await asyncio.sleep(0.1)


async def _components(
    settings: ServiceSettings,
    store: Store,
    backend: Backend,
    leader: Leader,
    hub: HubApi | None,
    clock: Callable[[], float],
    monotonic: Callable[[], float] | None,
) -> Components:
    """Open the backend, read the policy and make the parts."""
    last_event_id = await asyncio.to_thread(store.last_event_id)  # before anything is read that later events change
    secret = settings.ticket_secret.encode() or os.urandom(32)
    channel = WorkerChannel(store, AttemptTokens(secret, clock), clock, lost_after=backend.lost_after)
    if backend.remote:
        if not settings.ticket_secret:
            raise ValueError(
                "The tokens of remote workers are signed with a secret that all replicas share and that outlives "
                "the service: set MAKEWAY_TICKET_SECRET."
            )
        backend.connect(channel)
        backend.act_for_database(await asyncio.to_thread(store.identity))
    machines = await _machines(store, backend, secret, clock)
    await backend.open()
    observation = await backend.observe()
    sizes_now = partial(sizes, observation.nodes)
    document, version = await asyncio.to_thread(current_policy, store, settings, clock(), sizes_now)
    people = People(store, hub, clock=clock)
    await people.load()
    deadline, durable = settings.start_deadline_seconds, backend.has_durable_checkpoints
    world = World(store, document, version, clock, deadline, durable, people, monotonic)
    backend.follow_policy(lambda: world.document)
    world.observe(observation)
    servers = None if hub is None else HubServers(hub)
    leases = Leases(settings.lease_seconds, servers)
    feed = ChangeFeed(store, world, leases, leader, channel, last_event_id, clock) if store.shared else None
    if not backend.durable_checkpoints:
        log.warning(
            "Checkpoints of some or all jobs end with their pods or machines: such a job that makes way starts from "
            "the beginning: name a PersistentVolumeClaim for them in MAKEWAY_KUBE_CHECKPOINT_CLAIM, or a folder that "
            "all machines share in MAKEWAY_MACHINE_CHECKPOINT_DIR"
        )
    if not store.shared:
        log.info("SQLite: this is the only replica; PostgreSQL serves several (MAKEWAY_DB_URL)")
    progress = ProgressKeeper(store, clock)
    backend.on_progress(progress.note)
    return Components(
        settings, store, backend, world, leases, leader, channel, progress, servers, feed, machines, clock
    )


async def _machines(store: Store, backend: Backend, secret: bytes, clock: Callable[[], float]) -> MachineChannel | None:
    """Connect the backend of machines with their rows and what is placed there; None without one.

    Commits are followed before the rows are read, so that none falls in between.
    """
    if MACHINES not in backend.names:
        return None
    placements = MachinePlacements()
    store.on_change(placements.committed)
    placements.committed(await asyncio.to_thread(store.active))
    channel = MachineChannel(store, MachineTokens(secret, clock), placements, clock)
    backend.follow_machines(channel)
    return channel


async def read_world(settings: ServiceSettings, store: Store, backend: Backend, now: float) -> World:
    """Return the world as it is at the moment, without starting or adopting anything."""
    backend.fence_with(lambda: False)
    secret = os.urandom(32)
    backend.connect(WorkerChannel(store, AttemptTokens(secret)))
    await _machines(store, backend, secret, time.time)
    await backend.open_for_reading()
    try:
        observation = await backend.observe()
        document, version = current_policy(store, settings, now, partial(sizes, observation.nodes))
        backend.follow_policy(lambda: document)
        observation = await backend.observe()
        if not observation.synced:
            raise BackendError(f"The nodes cannot be read: {observation.problem or 'no answer'}.")
    finally:
        await backend.close(stop_jobs=False)
    world = World(store, document, version, durable_checkpoints=backend.has_durable_checkpoints)
    world.observe(observation)
    return world


def lock_state_dir(state_dir: Path) -> IO[str]:
    """Lock the state directory until the file is closed; AlreadyRunning when another service has it."""
    state_dir.mkdir(parents=True, exist_ok=True)
    file = open(state_dir / "service.lock", "a")  # noqa: SIM115 (held as long as the service lives)
    for _ in range(round(TAKEOVER_SECONDS / 0.1)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            time.sleep(0.1)
    file.close()
    raise AlreadyRunning(
        f"Another quota service already uses {state_dir}. Stop it first, or choose another MAKEWAY_STATE_DIR."
    )


def lock_installation(store: Store, state_dir: Path) -> IO[str]:
    """Hold the installation's name on this machine; AlreadyRunning where a service has it whose data is the same."""
    name = store.contents.installation()
    for _ in range(round(TAKEOVER_SECONDS / 0.1)):
        if (lock := installations.lock(name)) is not None:
            return lock
        time.sleep(0.1)
    other = installations.running_service(name) or installations.RunningService(0, "")
    raise AlreadyRunning(installations.copy_problem(other, str(state_dir.absolute())))


def check_jobs_are_here(rows: Sequence[Workload], backend: Backend, state_dir: Path) -> None:
    """Raise AlreadyRunning where jobs run on this machine in another folder: the state directory is a copy."""
    result = backend.running_elsewhere({row.id for row in rows if row.kind == "job"})
    if result:
        jobs = ", ".join(f"{item.workload} in {item.folder} (process {item.pid})" for item in result[:5])
        more = f", and {len(result) - 5} more" if len(result) > 5 else ""
        raise AlreadyRunning(
            f"Jobs of {state_dir.absolute()} run on this machine in another folder: {jobs}{more}. It is a copy, and "
            "would start them a second time. Start the portal from that folder instead, or end these processes first."
        )


def current_policy(store: Store, settings: ServiceSettings, now: float, sizes: Sizes) -> tuple[Document, int]:
    """Return the document in force; an empty database gets the policy file, scaled to the machine's `sizes`."""
    current = store.policies.current()
    if current is None:
        text, source = seed_text(settings)
        comment = f"seeded from {Path(source).name}"
        rescaled = _seed(text, source, sizes)
        if rescaled != text:
            text, comment = rescaled, f"{comment}, scaled to the GPUs of this machine"
        _seed_deployment(store, settings.deployment_file, now)  # first: a start that is cut off in between repeats both
        try:
            current = store.policies.add(text, "makeway", comment, 0, now)
        except Conflict:  # another replica started at the same time
            return current_policy(store, settings, now, sizes)
    try:
        document = read_policy(current.document, f"policy version {current.version}", stored=True)
    except PolicyInvalid:
        log.error("Policy version %s is not valid for this service", current.version)
        raise
    store.secrets.disable_absent(document.teams, current.version, "makeway", now)  # of an earlier release
    return document, current.version


def _seed(text: str, source: str, sizes: Sizes) -> str:
    """Return the first document, scaled to the machine; ValueError lists its mistakes, line by line."""
    try:
        rescaled = rescale_text(text, source, sizes)
        read_policy(rescaled, source, sizes)
    except PolicyInvalid as invalid:
        mistakes = len(invalid.issues)
        result = f"{mistakes} mistakes: correct them" if mistakes > 1 else "a mistake: correct it"
        raise ValueError(
            f"The policy file of the first start has {result}, or set MAKEWAY_POLICY_FILE to another one:\n{invalid}"
        ) from None
    return rescaled


def _seed_deployment(store: Store, file: Path | None, now: float) -> None:
    """Save the deployment that an empty database is seeded with, unless there is one of its name."""
    if file is None:
        return
    try:
        text = file.read_text(encoding="utf-8")
        name = read_deployment(text, str(file)).name
    except (OSError, UnicodeDecodeError, PolicyInvalid) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"The deployment file {file} that Makeway starts with cannot be used: {why}\n"
            "Mend it, or name another one in MAKEWAY_DEPLOYMENT_FILE."
        ) from None
    with suppress(Conflict):
        store.deployments.save(name, text, 0, "makeway", now)


def seed_text(settings: ServiceSettings) -> tuple[str, str]:
    """Return the text that an empty database is seeded with, and its source."""
    if settings.policy_file is None:
        raise ValueError(
            "The database has no policy document yet: name one to start with in MAKEWAY_POLICY_FILE "
            "(hub_config/policy.yaml is a sample)."
        )
    try:
        return settings.policy_file.read_text(encoding="utf-8"), str(settings.policy_file)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"The policy file {settings.policy_file} that Makeway starts with cannot be read: {why}. "
            "Mend it, or name another one in MAKEWAY_POLICY_FILE."
        ) from None
