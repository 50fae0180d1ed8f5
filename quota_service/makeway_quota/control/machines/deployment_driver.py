"""Drive one deployment: list its instances, make its steps, and make the provider's calls outside of them.

A list or a call that hangs holds up no other deployment, no step and no other call of this one. Whatever a call
answers is committed as an event; the calls of a leader that is gone are repeated by the next one from the rows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Container, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nlargest
from typing import Any, NamedTuple

from ...autoscale.budget import Money
from ...autoscale.demand import MachineDemand, PendingWork
from ...autoscale.deployment import Deployment
from ...autoscale.instances import Instance, InstanceList
from ...autoscale.machine import Machine, MachineEvent
from ...autoscale.placement.shared_pools import OtherDeployment
from ...autoscale.prospects import Prospect, WaitingDecision, p90_boot_seconds, prospects, same_prospects
from ...autoscale.provider import JoinData, Provider, ProviderError, UnusableProvider
from ...autoscale.sizing import LaunchRefusal
from ...autoscale.step import (
    ANSWER_TRIES,
    MachineRows,
    ProviderCall,
    StepInput,
    StepLeader,
    StepResult,
    answer,
    step,
)
from ...engine.snapshot import Node
from .booting_nodes import BootingMachines
from .cycle_demand import CycleDemand
from .measured_machines import MeasuredMachines
from .move_checks import MoveCheck

log = logging.getLogger("makeway.machines")

CALLS_AT_ONCE = 16
"""Launches of one deployment that are made at once, and as many ends; list and check have threads of their own"""
BOOTS = 100
"""The newest machines, of whose boots the usual duration is computed"""
CONSOLE_SECONDS = 10.0
"""Seconds that the console of a machine which does not join may take to be read, before it is ended"""
NOT_JOINED = frozenset({"spin_up_timeout", "init_failed", "wrong_gpus"})
"""The causes of ends for which people look at the console"""
CHECK_RETRY = 300.0
"""Seconds after which a provider is checked again that found something wrong; without, with the next document"""

Reports = Mapping[str, Sequence[MachineEvent]]
"""Events by machine, of all deployments"""


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """What the last step of a deployment said. `problem`: why its provider cannot be asked, "" where it can.

    `unusable`: whether no provider can be made for it.
    """

    at: float
    problem: str = ""
    listed_at: float | None = None
    unserved: tuple[PendingWork, ...] = ()
    refusals: tuple[LaunchRefusal, ...] = ()
    money: Money | None = None
    overdue: tuple[str, ...] = ()
    unusable: bool = False


class MachineIdentity(NamedTuple):
    """The source of ids of new machines, and what an instance gets so that it joins as its machine.

    `keep_console` stores what the console of a machine says, by its id.
    """

    new_id: Callable[[], str]
    join: Callable[[str], JoinData | None]
    keep_console: Callable[[str, str], object] = lambda machine, text: None


@dataclass(slots=True)
class _Term:
    """What a driver knows in one term of its leader."""

    number: int
    listening: float
    lists: list[InstanceList] = field(default_factory=list)
    reports: dict[str, Sequence[MachineEvent]] = field(default_factory=dict)
    """The newest of each machine, which has all that the ones before it had"""
    clock_step: float = 0.0
    moved_at: float = 0.0
    """when a machine was emptied last, in Unix seconds; before that, when the term began, as another leader may have"""
    asked_at: float = -math.inf
    """when a move was looked for last, on a clock that never jumps"""
    changed_at: float = 0.0
    """when machines were last committed in another state, on a clock that never jumps"""


class DeploymentDriver:
    """The steps and the calls of one deployment. For the event loop; the store and the provider work in threads."""

    def __init__(
        self,
        deployment: Deployment,
        provider: Provider,
        store: MeasuredMachines,
        identity: MachineIdentity,
        clock: Callable[[], float],
        wake: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.deployment, self.deleting = deployment, False
        self.status: DeploymentStatus | None = None
        self.prospects: Mapping[str, Prospect] = {}
        """what the pending workloads of the newest decision can expect, by id"""
        self._decision: WaitingDecision | None = None
        self._shared: tuple[Machine, ...] = ()
        """machines of other deployments, as that decision counted them"""
        self._boot_seconds: Mapping[str, float] | None = None
        self._booting = BootingMachines(deployment)
        self._sampled_machines: Sequence[Machine] = ()
        """the machines of whose boots the usual duration is computed"""
        self._sampled_ready: frozenset[str] = frozenset()
        """the machines that were ready when it was computed"""
        self._provider, self._store = provider, store
        self._identity, self._clock, self._wake, self._monotonic = identity, clock, wake, monotonic
        max_threads = {"launch": CALLS_AT_ONCE, "terminate": CALLS_AT_ONCE, "list": 1, "check": 1, "console": 4}
        self._threads = {
            kind: ThreadPoolExecutor(workers, thread_name_prefix=f"{kind}-{deployment.name}")
            for kind, workers in max_threads.items()
        }
        """By kind: launches that hang hold up neither ends nor lists"""
        self._term: _Term | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._consoles: set[str] = set()
        """The instances whose consoles were read before their end"""
        self._in_flight: dict[str, str] = {}
        """Machine whose launch is under way, or instance whose end is, to the kind of the call"""
        self._listing = False
        self._list_due = 0.0
        self._problem = self._check_problem = self._unusable = ""
        self._check_due: float | None = 0.0
        self._listed_at: float | None = None
        self._proved_at = -math.inf
        """when the newest complete list was started that a step has taken"""
        self._machines: tuple[Machine, ...] | None = None
        """as the newest step left them; None before the first one"""
        self._launched_at = -math.inf
        """when the last launch ended"""
        self.decided = False
        """whether the newest step knew what work there is, so that others may launch for what is left"""

    @property
    def provider(self) -> Provider:
        """Return the provider of the newest document."""
        return self._provider

    @property
    def can_close(self) -> bool:
        """Whether no launch is under way, and a list since the last one would have shown what it launched."""
        launching = "launch" in self._in_flight.values()
        return not launching and (self._proved_at - self.deployment.visibility >= self._launched_at)

    def replace(self, deployment: Deployment, provider: Provider, *, deleting: bool) -> None:
        """Continue with an edited document."""
        self.deployment = self._booting.deployment = deployment
        self.deleting, self._unusable = deleting, ""
        self._provider, self._check_due = provider, 0.0

    def replace_document(self, deployment: Deployment, problem: str, *, deleting: bool) -> None:
        """Continue with a document for which no provider can be made, by that of the one before; launch nothing."""
        self.deployment = self._booting.deployment = replace(deployment, can_launch=False)
        self.deleting, self._unusable = deleting, problem

    async def close(self) -> None:
        """Cancel what is under way; calls that were made and whose answers come later are found by the next leader."""
        self._term = None  # calls that have no thread yet are not made any more
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def lead(self, term: int, listening: float) -> None:
        """Begin a term. `listening`: since when its reports and the demand are known."""
        self._term = _Term(term, listening, moved_at=listening)
        self._list_due = 0.0
        self.prospects, self._decision, self._machines = {}, None, None

    def clock_was_set(self, seconds: float) -> None:
        """Move all times by so many seconds: the clock was set forward (back, if it is negative)."""
        if self._term is not None:
            self._term.clock_step += seconds
            self._term.listening += seconds
            self._term.moved_at += seconds
        self._launched_at += seconds
        self._proved_at += seconds
        self._booting.clock_was_set(seconds)

    @property
    def machines(self) -> list[Machine] | None:
        """Return the rows as the newest step left them, by the clock as it is now; None before the first step."""
        if self._machines is None or self._term is None:
            return None
        seconds, rows = self._term.clock_step, [row for row in self._machines if not row.finished]
        if not seconds:
            return rows
        return [row if row.deadline is None else row.with_fields(deadline=row.deadline + seconds) for row in rows]

    def booting(self, observed: Container[str]) -> Iterator[Node]:
        """Yield the machines that boot as nodes of the engine, each until it is observed as a node."""
        step = 0.0 if self._term is None else self._term.clock_step
        rows = self.machines or ()
        return self._booting.nodes([row.shifted(step) for row in rows] if step else rows, observed, self._clock())

    @property
    def knows_booting(self) -> bool:
        """Whether it is known in this term which machines boot."""
        return self.machines is not None and self._booting.learned

    def move_check(self, now: float) -> MoveCheck | None:
        """Return what the engine is to be asked about moves in this cycle, None for nothing."""
        term, rows = self._term, self.machines
        if term is None or rows is None or self.deleting:
            return None
        since_checked = self._monotonic() - term.asked_at
        check = MoveCheck.of(self.deployment, rows, term.moved_at, since_checked, now)
        if check is not None:
            term.asked_at = self._monotonic()
        return check

    def take(self, reports: Reports) -> None:
        """Keep what machines reported for the next step that is committed."""
        if self._term is not None:
            self._term.reports.update(reports)

    async def advance(self, demand: CycleDemand | None, others: Sequence[DeploymentDriver] = ()) -> bool:
        """Make one step and begin its calls; return whether a cycle would decide differently than before.

        Machines are in other states then, or pending workloads have other prospects. `others`: of the deployments that
        launch for the same pools.
        """
        term, self.decided = self._term, False
        if term is None:
            return False
        self._list(term)
        reports = dict(term.reports)
        observed = tuple((machine, one) for machine, events in reports.items() for one in events)
        step_input = StepInput(
            self._clock(),
            term.listening,
            None,
            tuple(term.lists),
            observed,
            frozenset(self._in_flight),
            term.clock_step,
            self._boot_seconds or {},
            term.moved_at,
            can_call=not isinstance(self._provider, UnusableProvider),
        )
        current_demand = None if demand is None or demand.began <= term.changed_at else demand
        beside = tuple(one for one in others if not one.deleting)
        result = await asyncio.to_thread(
            self._step, term.number, step_input, current_demand, self.deployment, self.deleting, beside
        )
        if not result.committed:
            self._wake()  # a report, an answer or an edit was faster
            return False
        del term.lists[: len(step_input.lists)]
        for machine, events in reports.items():
            if term.reports[machine] is events:
                del term.reports[machine]
        self._proved_at = max((one.at for one in step_input.lists if one.complete), default=self._proved_at)
        term.clock_step -= step_input.clock_step
        self._machines, self.decided = result.machines, result.served is not None
        if result.drained_for_move is not None:
            term.moved_at = step_input.now
        self._note(result)
        for call in result.calls:
            self._begin(term, call)
        if result.moved:  # what an earlier cycle knew of them may be wrong: wait for a new one
            term.changed_at = self._monotonic()
        return await asyncio.to_thread(self._update_prospects, result) or result.moved

    def _step(
        self,
        term: int,
        step_input: StepInput,
        demand: CycleDemand | None,
        deployment: Deployment,
        deleting: bool,
        others: Sequence[DeploymentDriver],
    ) -> StepResult:
        """Read the rows, once, and make the step with what `demand` says of them. Runs in a thread."""
        beside = tuple(one.counted() for one in others) if demand is not None and demand.pending else ()
        rows = self._store.read(deployment.name)  # after the lists were taken
        known = None if demand is None else demand.of(rows.machines, moves=_may_move(deployment, rows, demand))
        reports = (*step_input.reports, *_fenced(rows, known))
        step_input = replace(step_input, now=self._clock(), demand=known, reports=reports, others=beside)
        leader = StepLeader(term, self._identity.new_id, self._clock)
        return step(self._store, deployment, step_input, leader, rows, deleting=deleting)

    def _update_prospects(self, result: StepResult) -> bool:
        """Update the prospects of pending workloads; return whether they have changed."""
        if self._boot_seconds is None or result.moved:
            self._boot_seconds = self._booting.usual = self._measured_boot_seconds(result.machines)
        ended = () if self._booting.learned else self._sampled_machines
        self._booting.learn((*ended, *result.machines), self._clock())
        if result.served is not None:
            self._decision = WaitingDecision(result.served, result.unserved, result.refusals)
            self._shared = result.shared
        if self._decision is None:
            return False
        before, decided = self.prospects, (self.deployment, result.machines, self._decision, result.money)
        self.prospects = prospects(
            *decided, self._boot_seconds, self._clock(), deleting=self.deleting, shared=self._shared
        )
        return not same_prospects(before, self.prospects)

    def counted(self) -> OtherDeployment:
        """Return the machines as they are committed now, for the step of another deployment. Runs in a thread."""
        return OtherDeployment(self.deployment, self._store.peek(self.deployment.name), self._boot_seconds or {})

    def _measured_boot_seconds(self, machines: Sequence[Machine]) -> Mapping[str, float]:
        """Return how long a boot takes, by type: of boots that are stored, read once, and of those that ended since."""
        newest = self._sampled_machines
        if self._boot_seconds is None:
            newest = self._store.machines(self.deployment.name, limit=BOOTS)
        ended = [one for one in machines if one.ready_at is not None and one.id not in self._sampled_ready]
        if self._boot_seconds is not None and not ended:
            return self._boot_seconds
        self._sampled_ready = frozenset(one.id for one in machines if one.ready_at is not None)
        every = {one.id: one for one in (*newest, *ended)}
        self._sampled_machines = nlargest(BOOTS, every.values(), key=lambda one: one.requested_at)
        durations: dict[str, list[float]] = {}
        for machine in self._sampled_machines:
            if machine.ready_at is not None:
                durations.setdefault(machine.type, []).append(machine.ready_at - machine.requested_at)
        return p90_boot_seconds(durations)

    def _note(self, result: StepResult) -> None:
        self.status = DeploymentStatus(
            self._clock(),
            self._unusable or self._problem or self._check_problem,
            self._listed_at,
            result.unserved,
            result.refusals,
            result.money,
            result.overdue,
            bool(self._unusable),
        )

    # -- the provider

    def _list(self, term: _Term) -> None:
        """Begin to list the instances, if it is time and no list is under way."""
        if self._listing or self._monotonic() < self._list_due:
            return
        self._listing = True
        self._spawn(self._list_instances(term))

    async def _list_instances(self, term: _Term) -> None:
        try:
            result = await self._in_thread("list", lambda: self._provider.list(self.deployment.name, self._clock()))
            term.lists.append(result)
            self._booting.take_list(result)
            self._listed_at, self._problem = result.at, ""
        except ProviderError as error:
            self._set_problem(str(error) or type(error).__name__)
        except Exception as error:
            self._set_problem(f"{type(error).__name__}: {error}")
            log.exception("The instances of %s cannot be listed", self.deployment.name)
        finally:
            self._listing = False
            self._list_due = self._monotonic() + self.deployment.poll_interval
        self._wake()
        if not self._problem and self._check_due is not None and self._monotonic() >= self._check_due:
            await self._check()

    async def _check(self) -> None:
        """Note what the provider would refuse; a check that fails holds nothing up."""
        self._check_due, provider = None, self._provider
        try:
            await self._in_thread("check", provider.check)
            problem = ""
        except ProviderError as error:
            problem = str(error) or type(error).__name__
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            log.exception("The provider of %s cannot be checked", self.deployment.name)
        if provider is not self._provider:
            return  # that of an earlier document
        if problem:
            self._check_due = self._monotonic() + CHECK_RETRY
            if problem != self._check_problem:
                log.warning("The provider of %s refuses a part of its document: %s", self.deployment.name, problem)
        self._check_problem = problem

    def _set_problem(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("The provider of %s cannot be asked: %s", self.deployment.name, problem)
        self._problem = problem

    def _begin(self, term: _Term, call: ProviderCall) -> None:
        target = call.machine.id if call.kind == "launch" and call.machine is not None else call.instance
        if target in self._in_flight:
            return
        self._in_flight[target] = call.kind
        self._spawn(self._call(term, call, target))

    async def _call(self, term: _Term, call: ProviderCall, target: str) -> None:
        began = self._clock()
        try:
            await self._read_console(call)
            join = None if call.machine is None else self._identity.join(call.machine.id)
            result = await self._in_thread(call.kind, partial(self._make_call, term, call, began, join))
            if result is None:
                return
        except Exception:
            log.exception("%s of %s failed", call.kind, target)
            return  # no answer: the row's time-outs go on
        finally:
            del self._in_flight[target]
            if call.kind == "launch":
                self._launched_at = self._clock()
        await self._commit_answer(term, call, began, result)
        self._wake()

    async def _read_console(self, call: ProviderCall) -> None:
        """Keep what the console of a machine says that did not join, before its end, after which there may be none."""
        machine, instance = call.machine, call.instance
        if call.kind != "terminate" or machine is None or machine.reason not in NOT_JOINED:
            return
        if instance in self._consoles:
            return
        self._consoles.add(instance)
        try:
            async with asyncio.timeout(CONSOLE_SECONDS):
                text = await self._in_thread("console", partial(self._provider.console, instance))
            if text:
                await asyncio.to_thread(self._identity.keep_console, machine.id, text)
        except Exception as error:  # the end matters more
            log.warning("The console of %s cannot be read: %s", instance, str(error) or type(error).__name__)

    def _make_call(
        self, term: _Term, call: ProviderCall, began: float, join: JoinData | None
    ) -> Instance | bool | ProviderError | None:
        """Make a call in its thread, and return its answer; None where it waited so long that it is not made any more.

        A launch that began later might have no row any more that waits for its instance.
        """
        late = call.kind == "launch" and not 0 <= self._clock() - began < self.deployment.request_timeout
        return None if late or self._term is not term else call.make(self._provider, join)

    async def _commit_answer(
        self, term: _Term, call: ProviderCall, began: float, result: Instance | bool | ProviderError
    ) -> None:
        """Commit an answer; one that cannot be committed is found again in the next list."""
        if isinstance(result, ProviderError):
            log.warning("%s of a machine of %s: %s", call.kind, self.deployment.name, result)
        for _ in range(ANSWER_TRIES):
            if self._term is not term:
                return
            one = [(call, began, result)]
            if await asyncio.to_thread(answer, self._store, self.deployment, one, term.number, self._clock()):
                return

    async def _in_thread(self, kind: str, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads[kind], function)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _may_move(deployment: Deployment, rows: MachineRows, demand: CycleDemand) -> bool:
    """Whether a step may move jobs, or has to look after some that move."""
    may_begin = deployment.moves is not None and bool(demand.restartable)
    return may_begin or any(machine.drain == "move" for machine in rows.machines)


def _fenced(rows: MachineRows, demand: MachineDemand | None) -> Iterator[tuple[str, MachineEvent]]:
    """Yield that no work has a row any more on machines that are lost."""
    if demand is None:
        return
    for machine in rows.machines:
        if machine.state == "lost" and not demand.has_work(machine.id):
            yield machine.id, MachineEvent("fenced")
