"""Make the steps of all deployments while this replica leads: after each cycle, report, list and answer, and in time.

A deployment that fails is tried again, and holds up no other one. Each begins a term with nothing in memory: rows,
lists and reports say all that is to be known.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ...autoscale.deployment import Deployment
from ...autoscale.document import read_deployment
from ...autoscale.machine import Machine, MachineEvent
from ...autoscale.prospects import Prospect
from ...autoscale.provider import JoinData, Provider, ProviderError, UnusableProvider
from ...backends.base import NodeStatus
from ...backends.machines.machine_source import BACKEND
from ...engine.plan import Demand, Plan
from ...engine.restarts import Restarts
from ...engine.snapshot import Node, Pool
from ...quarantine import Quarantine, concerns_all
from ...store.records import StoredDeployment
from ...store.storage.sealed_secrets import SecretsLocked
from ...store.store import Store
from ..change_set import ChangeSet
from ..replicas.leader import Leader
from ..restarting_tasks import is_cancelled
from ..world.clock_steps import ClockSteps
from ..world.world import World
from .agent_reports import events
from .cycle_demand import CycleDemand, known_demand
from .deployment_driver import DeploymentDriver, DeploymentStatus, MachineIdentity
from .machine_notices import NOTICING, moving, notices
from .machine_reasons import MachineReasons
from .measured_machines import MeasuredMachines
from .move_checks import MoveCheck, drain_candidates, restartable

log = logging.getLogger("makeway.machines")

TICK = 2.0
"""Seconds from one step to the next where nothing happens: time-outs are kept within them"""
MIN_PAUSE = 0.1
"""Seconds between two steps: what happens within them is decided together"""
CONSOLES_AT_ONCE = 2
"""Consoles that are read at once for people"""
BOOTING = "showing which machines boot"
EXPLAINING = "putting into words which machines are coming"
FIRST_STEPS_SECONDS = 10.0
"""Seconds for which the plans of a new leader wait for the first steps, at most: what hangs here holds up no work"""
ANSWER_SECONDS = 5.0
"""Seconds for which the steps may use what the engine answered about moves"""
STEPPING, READING = "deciding about its machines", "reading its document"
ASKING = "asking whether jobs can be moved"


class MachineLoop:
    """Drives the deployments. `planned` is called by the control loop after each cycle."""

    def __init__(
        self,
        store: Store,
        leader: Leader,
        make_provider: Callable[[Deployment], Provider],
        wake_cycle: Callable[[], None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        join: Callable[[str], JoinData | None] = lambda machine: None,
        cluster_machines: Callable[[], Mapping[str, str]] = dict,
        live_machines: Callable[[], Iterable[Machine]] = tuple,
    ) -> None:
        """`join` returns what the instance of a machine is told so that it joins, always the same.

        `cluster_machines`: the machines that are nodes of the cluster, by node; `live_machines`: all that are not over,
        as they were read last.
        """
        self._join = join
        self._cluster_machines, self._live_machines = cluster_machines, live_machines
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self._store, self._leader, self._make_provider = store, leader, make_provider
        self._wake_cycle, self._clock, self._monotonic = wake_cycle, clock, monotonic
        self._drivers: dict[str, DeploymentDriver] = {}
        self._documents: dict[str, tuple[StoredDeployment, float | None]] = {}
        """what each driver was made of: the document, and when the credential of its cloud was set"""
        self._failed: dict[str, tuple[StoredDeployment, float | None]] = {}
        """of what the last try failed: the same is tried again after a back-off, anything else at once"""
        self._demand: CycleDemand | None = None
        self._term: int | None = None
        self._read_in: int | None = None
        """the term in which the documents have been read"""
        self._serial = 0
        self._answer: tuple[frozenset[str], float] = frozenset(), -math.inf
        """the machines that can be emptied, and when the engine was asked"""
        self._planned_in: int | None = None
        """the term in which plans are made"""
        self._asked_for_plans: tuple[int, float] | None = None
        """the term in which a plan waits for the first steps, and since when"""
        self._reasons = MachineReasons()
        self._steps = ClockSteps(clock, monotonic)
        self._wake = asyncio.Event()
        self._consoles = ThreadPoolExecutor(CONSOLES_AT_ONCE, thread_name_prefix="console")

    @property
    def active(self) -> bool:
        """Whether there are deployments, so that cycles have to tell what they know."""
        return bool(self._drivers)

    def asks(self, pools: Iterable[Pool]) -> bool:
        """Whether plans have to say what machines are for: there are deployments, or pools that wait for one."""
        return self.active or any(pool.kind == "autoscaled" for pool in pools)

    def may_plan(self, world: World) -> bool:
        """Whether plans may be made in this term: the first one only once it is known which machines boot.

        Else it would give others what the plans of the leader before kept for work that waits for them.
        """
        term = self._leader.term
        if term is None or term == self._planned_in or not _growing(world):
            self._asked_for_plans = None
            return True
        if self._asked_for_plans is None or self._asked_for_plans[0] != term:
            self._asked_for_plans = term, self._monotonic()
        if self._knows_booting(term) or self._monotonic() - self._asked_for_plans[1] >= FIRST_STEPS_SECONDS:
            self._planned_in, self._asked_for_plans = term, None
            return True
        self.wake()
        return False

    def _knows_booting(self, term: int) -> bool:
        """Whether every deployment that can be driven has made its first step in a term."""
        return term == self._term == self._read_in and all(
            driver.knows_booting or self.quarantine.is_backing_off(STEPPING, "deployment", name)
            for name, driver in self._drivers.items()
        )

    def prepare(self, world: World) -> bool:
        """Show the machines that boot to the next plan; return whether it has to say what machines are for.

        Only those in pools that still grow: nothing is demand in another pool.
        """
        nodes, growing = list[Node](), _growing(world)
        with self.quarantine.step(BOOTING):
            drivers = [driver for _, driver in sorted(self._drivers.items())]
            nodes = [node for driver in drivers for node in driver.booting(world.observed.nodes)]
        world.show_booting([node for node in nodes if node.pool in growing])
        return self.asks(world.document.pools)

    def status(self, name: str) -> DeploymentStatus | None:
        """Return what the last step of a deployment said; None where this replica made none."""
        driver = self._drivers.get(name)
        return None if driver is None else driver.status

    @property
    def prospects(self) -> list[tuple[Collection[str], Mapping[str, Prospect]]] | None:
        """For each deployment the pools of its machines, and what pending workloads can expect of it; by its name.

        None until the documents have been read in this term.
        """
        if self._term is None or self._term != self._read_in:
            return None
        drivers = [driver for _, driver in sorted(self._drivers.items())]
        return [({machine_type.pool for machine_type in item.deployment.types}, item.prospects) for item in drivers]

    def explained(self, plan: Plan) -> Plan:
        """Return a plan with what work that waits for machines can expect of them as its reason."""
        with self.quarantine.step(EXPLAINING):
            plan = self._reasons.refined(self._without_sessions(plan), self.prospects)
        return plan

    def _without_sessions(self, plan: Plan) -> Plan:
        """Return a plan whose demand has no notebooks that would need machines which run none."""
        able, others = set[str](), set[str]()
        for driver in self._drivers.values():
            pools = able if driver.deployment.runs_sessions else others
            pools.update(machine_type.pool for machine_type in driver.deployment.types)
        jobs_only = others - able
        if not jobs_only.intersection(pool for one in plan.demand if one.session for pool in one.pools):
            return plan
        return replace(plan, demand=tuple(one for one in plan.demand if not _only_in(one, jobs_only)))

    def machines_on(self, nodes: Mapping[str, NodeStatus]) -> Mapping[str, str]:
        """Return the machines by node: those that agents joined are named alike."""
        result = {name: name for name, node in nodes.items() if node.backend == BACKEND}
        return {**result, **self._cluster_machines()}

    async def known(self, world: World, demand: Iterable[Demand], began: float, now: float) -> CycleDemand:
        """Return what a cycle knows at its end, which observed the nodes at `began`."""
        self._observe_clock()
        checks = [one for driver in self._drivers.values() if (one := driver.move_check(now)) is not None]
        machines = self.machines_on(world.observed.nodes)
        known = await known_demand(world, demand, machines, began, now, moves=bool(checks))
        if checks:
            self._answer = frozenset(), -math.inf
            with self.quarantine.step(ASKING):
                known = await self._asked(known, checks, world, now)
                self._answer = known.restartable, self._monotonic()
        elif self._monotonic() - self._answer[1] < ANSWER_SECONDS:
            known = known.with_answers(restartable=self._answer[0])
        return known

    async def _asked(self, known: CycleDemand, checks: Sequence[MoveCheck], world: World, now: float) -> CycleDemand:
        """Return what is known, with the machines that can be emptied and those whose jobs get their notices now.

        The engine is asked with the commits of this cycle: what its plan has started takes room.
        """
        machines = await asyncio.to_thread(drain_candidates, known, checks, now)
        if any(machines.values()):
            asked = partial(Restarts, world.snapshot(await world.rows_as_of_now(), now))
            leaves = partial(world.people.excludes, document=world.document)
            known = await asyncio.to_thread(restartable, known, machines, asked, leaves)
        return await asyncio.to_thread(_with_notices, known, checks)

    def notices(self, demand: CycleDemand, now: float) -> ChangeSet:
        """Return the notices of jobs whose machines are to go, by what a cycle knows at its end."""
        change_set = ChangeSet()
        with self.quarantine.step(NOTICING):
            machines = self._current_machines()
            change_set = notices(machines, demand.rows, demand.machines, demand.moved, now, self.quarantine)
        return change_set

    def _current_machines(self) -> list[Machine]:
        """Return the machines that are not over, with deadlines by the clock as it is now.

        Where a deployment has made no step in this term, they are as they were read last.
        """
        self._observe_clock()
        stepped = {name: rows for name, driver in self._drivers.items() if (rows := driver.machines) is not None}
        others = [row for row in self._live_machines() if row.deployment not in stepped]
        return [*others, *(row for rows in stepped.values() for row in rows)]

    def _observe_clock(self) -> None:
        """Move what deployments know of times, if the clock was set."""
        if seconds := self._steps.observe():
            for driver in self._drivers.values():
                driver.clock_was_set(seconds)

    def planned(self, demand: CycleDemand, term: int | None) -> None:
        """Take what a cycle of a term knows of the work, and make the steps.

        What a cycle knows that outlasts its term is too old: another leader may have started work since.
        """
        if term == self._leader.term:
            self._demand = demand
            self.wake()

    async def console(self, deployment: str, instance: str) -> str:
        """Return the newest output of the console of an instance, on every replica; may raise a ProviderError."""
        return await asyncio.get_running_loop().run_in_executor(self._consoles, self._console, deployment, instance)

    def _console(self, deployment: str, instance: str) -> str:
        driver = self._drivers.get(deployment)
        if driver is not None:
            return driver.provider.console(instance)
        stored = self._store.deployments.read(deployment)
        if stored is None:
            return ""
        return self._make_provider(read_deployment(stored.document, deployment, stored=True)).console(instance)

    def _keep_console(self, machine: str, text: str) -> None:
        self._store.machine_log.write_output(machine, "console", text, None, self._clock())

    def wake(self) -> None:
        """Request the steps soon; for the event loop."""
        self._wake.set()

    async def run(self) -> None:
        """Make the steps until cancelled."""
        try:
            while True:
                await self.turn()
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK):
                        await self._wake.wait()
                await asyncio.sleep(MIN_PAUSE)
                self._wake.clear()
        finally:
            self._consoles.shutdown(wait=False, cancel_futures=True)
            await self._stop()

    async def turn(self) -> None:
        """Make one step of each deployment, if this replica leads."""
        term = self._leader.term
        if term is None:
            await self._stop()
            return
        if term != self._term:
            await self._stop()
            self._term, self._serial, self._demand = term, 0, None
            self._steps.observe()  # while another replica led, it moved the times
        await self._read_documents()
        self._read_in = term
        reports = await self._new_reports()
        self._observe_clock()
        undecided = set[str]()
        """the pools for which a deployment that comes first has not decided yet what it launches"""
        for name, driver in sorted(self._drivers.items(), key=lambda item: item[1].deployment.preference):
            pools = driver.deployment.pools
            await self._step(name, driver, reports, self._demand if undecided.isdisjoint(pools) else None)
            if not (driver.decided or driver.deleting or self.quarantine.is_backing_off(STEPPING, "deployment", name)):
                undecided |= pools
        if self._asked_for_plans is not None:
            self._wake_cycle()

    async def _step(
        self,
        name: str,
        driver: DeploymentDriver,
        reports: Mapping[str, list[MachineEvent]],
        demand: CycleDemand | None,
    ) -> None:
        driver.take(reports)
        if self.quarantine.is_backing_off(STEPPING, "deployment", name):
            return
        pools = driver.deployment.pools
        beside = [one for one in self._drivers.values() if one is not driver and one.deployment.pools & pools]
        with self.quarantine.guard(STEPPING, "deployment", name):
            if await driver.advance(demand, beside):
                self._wake_cycle()  # which machines accept work has changed, or why work waits
            if (
                driver.deleting
                and driver.can_close
                and await asyncio.to_thread(
                    self._store.deployments.close, name, self._leader.check(self._term), self._clock()
                )
            ):
                self._documents.pop(name, None)
                self._failed.pop(name, None)
                del self._drivers[name]
                await driver.close()

    async def _read_documents(self) -> None:
        """Begin, change and end drivers as the documents say, which are read where one has another version."""
        versions, secrets_at = await asyncio.to_thread(self._versions)
        waiting = {name: made_of for name, made_of in self._failed.items() if self._is_waiting(name)}
        known = {name: (one.version, set_at) for name, (one, set_at) in (self._documents | waiting).items()}
        if known == {name: (version, secrets_at.get(name)) for name, version in versions.items()}:
            return
        stored = {one.name: one for one in await asyncio.to_thread(self._store.deployments.list)}
        for name in self._drivers.keys() - stored.keys():
            await self._drivers.pop(name).close()
        self._documents = {name: made_of for name, made_of in self._documents.items() if name in stored}
        self._failed = {name: made_of for name, made_of in self._failed.items() if name in stored}
        for name, one in stored.items():
            made_of = one, secrets_at.get(name)
            if self._documents.get(name) == made_of or (self._failed.get(name) == made_of and self._is_waiting(name)):
                continue
            self._failed.pop(name, None)
            with self.quarantine.guard(READING, "deployment", name):
                await self._drive(one, made_of[1])
                self._documents[name] = made_of
            if self._documents.get(name) != made_of:
                self._documents.pop(name, None)
                self._failed[name] = made_of

    def _is_waiting(self, name: str) -> bool:
        """Whether what failed with a document, or its provider, is not tried again yet."""
        return self.quarantine.is_backing_off(READING, "deployment", name)

    def _versions(self) -> tuple[dict[str, int], dict[str, float]]:
        """Return the versions of the documents, and when each credential of a cloud was set."""
        return self._store.deployments.versions(), self._store.secrets.cloud_times()

    async def _drive(self, stored: StoredDeployment, credential_set_at: float | None) -> None:
        read = read_deployment(stored.document, stored.name, stored=True)
        deployment = replace(read, revision=stored.version, credential_set_at=credential_set_at)
        try:
            provider = await asyncio.to_thread(self._make_provider, deployment)
        except Exception as error:  # a pause holds, and machines end, by what it logs in with so far, if it does
            if concerns_all(error):
                raise
            problem = _problem_of(error)
            driver = self._driver_of(deployment, UnusableProvider(problem))
            driver.replace_document(deployment, problem, deleting=stored.deleting)
            raise
        self._driver_of(deployment, provider).replace(deployment, provider, deleting=stored.deleting)

    def _driver_of(self, deployment: Deployment, provider: Provider) -> DeploymentDriver:
        """Return the driver of a deployment; where there is none yet, one with this provider."""
        driver = self._drivers.get(deployment.name)
        if driver is None:
            calls = MachineIdentity(new_machine_id, self._join, self._keep_console)
            driver = DeploymentDriver(
                deployment,
                provider,
                MeasuredMachines(self._store.machines),
                calls,
                self._clock,
                self.wake,
                self._monotonic,
            )
            driver.lead(self._leader.check(self._term), self._clock())
            self._drivers[deployment.name] = driver
        return driver

    async def _new_reports(self) -> Mapping[str, list[MachineEvent]]:
        """Return what machines reported since the last turn; in a new term all that is known."""
        result = await asyncio.to_thread(self._store.machine_reports.after, self._serial)
        if result:
            self._serial = result[-1].serial
        return {report.machine: list(events(report)) for report in result}

    async def _stop(self) -> None:
        self._term = None
        drivers, self._drivers, self._documents, self._failed = list(self._drivers.values()), {}, {}, {}
        for driver in drivers:
            try:
                await driver.close()
            except (Exception, asyncio.CancelledError):
                if is_cancelled():
                    raise
                log.exception("A deployment could not be left")


def _problem_of(error: Exception) -> str:
    """Return why a provider cannot be made, with the class of an error whose text is for no people."""
    plain = isinstance(error, ProviderError | SecretsLocked | ValueError) and str(error)
    return str(error) if plain else f"{type(error).__name__}: {error}"


def _growing(world: World) -> set[str]:
    """Return the pools whose machines come and go."""
    return {pool.name for pool in world.document.pools if pool.kind == "autoscaled"}


def new_machine_id() -> str:
    """Return the id of a new machine, which is also the name of its node."""
    return f"m-{uuid.uuid4().hex[:12]}"


def _with_notices(known: CycleDemand, checks: Iterable[MoveCheck]) -> CycleDemand:
    """Return what is known, with the machines that drain for a move and whose jobs get their notices now."""
    demands = {one.deployment.name: known.of(one.machines, moves=True) for one in checks if _empties(one)}
    rows = [row for one in checks for row in one.machines]
    deployments = [one.deployment for one in checks]
    return known.with_answers(moved=moving(deployments, rows, {name: one for name, one in demands.items() if one}))


def _empties(check: MoveCheck) -> bool:
    """Whether a machine of a deployment drains so that its jobs are moved."""
    return any(row.drain == "move" for row in check.machines)


def _only_in(one: Demand, pools: Collection[str]) -> bool:
    """Whether a pending workload is a notebook that new machines of no other pools would help."""
    return one.session and all(pool in pools for pool in one.pools)
