"""Make one step of a deployment: what was observed and decided, committed, and the provider's calls that follow.

Each step reads the rows, applies every event, decides, and commits all of it with the leader's term before the
first call is made. Calls follow from the rows alone, so that a leader that is killed after the commit leaves them to
the next one. `control.machines` makes steps and their calls side by side; `cycle` makes them one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol
from zoneinfo import ZoneInfo

from .backoff import ANY, WHOLE_DEPLOYMENT, FailureClass, LaunchBackoff, backoff_after_failure, unexpired_backoffs
from .budget import Money, count_money, spent_by_month
from .demand import MachineDemand, PendingWork
from .deployment import Deployment
from .instances import Instance, InstanceList, match_instances
from .machine import NO_NODE, Machine, MachineEvent, MachineTimeouts
from .placement.moves import find_move
from .placement.shared_pools import OtherDeployment
from .provider import JoinData, Provider, ProviderError
from .retirement import StepTime, enforce, retire
from .sizing import Launch, LaunchRefusal, size
from .transitions import apply_event

FAILURE_OF_REASON: Mapping[str, FailureClass] = {
    "spin_up_timeout": "boot_failed",
    "init_failed": "boot_failed",
    "wrong_gpus": "boot_failed",
    "no_answer": "no_answer",
    NO_NODE: "stock_out",
}
"""Causes of a machine's end that hold back further launches"""
ANSWER_TRIES = 3
"""Times that the answers of calls are committed, as a report may change a row meanwhile"""
SPOT_LOSSES = frozenset({"ended_by_provider", "stopped", "spot"})


@dataclass(frozen=True, slots=True)
class MachineRows:
    """What the store has of a deployment: machines that are not over, back-offs, and what those that are over cost.

    `first_seen`: when each instance without a row was seen first.
    """

    machines: tuple[Machine, ...] = ()
    backoffs: tuple[LaunchBackoff, ...] = ()
    closed_spend: Mapping[str, int] = field(default_factory=dict)
    first_seen: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MachineChanges:
    """What one step writes in one transaction.

    `changed` have the version that they were read with: the store refuses all of it if one has another. `spent` is
    added to the closed spend of each month. `backoffs` and `first_seen` replace all of the deployment, None nothing.
    `revision`: of the document that it was decided by, compared as the versions are; None for what holds with any.
    `credential_set_at`: when the credential was set with which machines are launched, compared where there are any.
    """

    launched: tuple[Machine, ...] = ()
    changed: tuple[Machine, ...] = ()
    backoffs: tuple[LaunchBackoff, ...] | None = None
    spent: Mapping[str, int] = field(default_factory=dict)
    first_seen: Mapping[str, float] | None = None
    revision: int | None = None
    credential_set_at: float | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        replaced = self.backoffs is not None or self.first_seen is not None
        return bool(self.launched or self.changed or self.spent or replaced)


class MachineStore(Protocol):
    """The rows of the machines."""

    def read(self, deployment: str) -> MachineRows:
        """Return the rows of a deployment as they are committed."""

    def commit(self, deployment: str, term: int, changes: MachineChanges) -> bool:
        """Write all changes or none; False if the term is over, or a row or the document has changed meanwhile."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a leader knows besides the rows. `demand` None: not known, so that nothing is launched, or idle.

    `observing_since`: since when this leader has received reports and known the demand. `clock_step`: by how many
    seconds the clock was set forward since the last step that was committed; rows are moved with it. `reports`: events
    by machine. `in_flight`: machines whose launch is under way, and instances whose end is. `boot_seconds`: usual
    boot times by type, where known. `moved_at`: when a machine was emptied last, or since when its leader can know;
    None: no job is moved. `others`: the deployments that launch for the same pools. `can_call`: whether there is a
    provider to call.
    """

    now: float
    observing_since: float
    demand: MachineDemand | None = None
    lists: tuple[InstanceList, ...] = ()
    reports: tuple[tuple[str, MachineEvent], ...] = ()
    in_flight: frozenset[str] = frozenset()
    clock_step: float = 0.0
    boot_seconds: Mapping[str, float] = field(default_factory=dict)
    moved_at: float | None = None
    others: tuple[OtherDeployment, ...] = ()
    can_call: bool = True


class StepLeader(NamedTuple):
    """The process that makes the steps: the term in which it leads, the source of ids for new machines, its clock."""

    term: int
    new_id: Callable[[], str]
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """One call: a launch of a machine, or the end of an instance (`machine` None: one that no row expects)."""

    kind: str
    machine: Machine | None
    instance: str = ""

    def make(self, provider: Provider, join: JoinData | None = None) -> Instance | bool | ProviderError:
        """Make the call and return its answer; a ProviderError is one, too. `join`: of the machine of a launch."""
        try:
            if self.kind == "launch" and self.machine is not None:
                return provider.launch(self.machine.request, self.machine.id, join)
            return provider.terminate(self.instance)
        except ProviderError as error:
            return error


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step. `committed` False: nothing was written, and no call may be made."""

    committed: bool
    calls: tuple[ProviderCall, ...] = ()
    unserved: tuple[PendingWork, ...] = ()
    refusals: tuple[LaunchRefusal, ...] = ()
    money: Money | None = None
    overdue: tuple[str, ...] = ()
    """machines that are terminating for longer than an administrator has to be told"""
    moved: bool = False
    """whether machines were launched or are in another state than before"""
    served: Mapping[str, tuple[str, ...]] | None = None
    """the machines that are on their way for each workload; None where the demand was not known"""
    machines: tuple[Machine, ...] = ()
    """as they are after the step"""
    drained_for_move: str | None = None
    """the machine that drains from now on so that its jobs are moved"""
    shared: tuple[Machine, ...] = ()
    """those of other deployments that were counted"""


class _StepState:
    """The rows while a step changes them."""

    def __init__(
        self, deployment: Deployment, rows: MachineRows, term: int, now: float, clock_step: float = 0.0
    ) -> None:
        self.deployment = deployment
        self.now = now
        self._term = term
        self._timeouts: dict[str, MachineTimeouts] = {}
        self._read = {machine.id: machine for machine in rows.machines}
        self.machines = dict(self._read)
        backoffs = list(rows.backoffs)
        if clock_step:
            self.machines = {machine.id: machine.shifted(clock_step) for machine in rows.machines}
            backoffs = [one.shifted(clock_step) for one in backoffs]
        self.backoffs: list[LaunchBackoff] = [
            one
            for one in unexpired_backoffs(backoffs, now)
            if one.type == ANY or deployment.type(one.type) is not None  # else its type was removed
        ]
        self._backoffs = list(rows.backoffs)
        self._first_seen = dict(rows.first_seen)
        self.first_seen: Mapping[str, float] = {name: at + clock_step for name, at in rows.first_seen.items()}
        self.spent: dict[str, int] = {}
        self.launched: list[Machine] = []

    def timeouts(self, type_name: str) -> MachineTimeouts:
        """Return the time-outs of machines of a type."""
        if type_name not in self._timeouts:
            self._timeouts[type_name] = self.deployment.timeouts(type_name)
        return self._timeouts[type_name]

    def apply_event(self, machine_id: str, event: MachineEvent) -> None:
        """Apply an event, with what follows from it for later launches and for the money."""
        before = self.machines.get(machine_id)
        if before is None:
            return
        after = apply_event(before, event, self.now, self.timeouts(before.type))
        if after is before:
            return
        self.machines[machine_id] = after
        if after.state != before.state:
            self._update_backoffs(before, after)
        if after.finished:
            cost = {} if after.state == "failed" else self._cost(after)
            for month, amount in cost.items():
                self.spent[month] = self.spent.get(month, 0) + amount

    def _cost(self, machine: Machine) -> dict[str, int]:
        return spent_by_month(machine, self.now, ZoneInfo(self.deployment.timezone))

    def _update_backoffs(self, before: Machine, after: Machine) -> None:
        failure = FAILURE_OF_REASON.get(after.reason) if after.state == "terminating" else None
        if after.market == "spot" and after.reason in SPOT_LOSSES and before.state != "terminating":
            failure = "spot_lost"
        if failure is not None:
            self.back_off(after, failure)
        if after.state in ("joining", "ready"):  # one that boots may be listed only until its launch fails
            over: FailureClass = "stock_out" if after.state == "joining" else "boot_failed"
            self.backoffs = [
                one
                for one in self.backoffs
                if one.failure != over or not one.covers(after.type, after.zone, after.market)
            ]

    def back_off(self, machine: Machine, failure: FailureClass) -> None:
        """Hold back launches like that of a machine."""
        back = backoff_after_failure(self.backoffs, machine.type, machine.zone, machine.market, failure, self.now)
        self.backoffs = [*(one for one in self.backoffs if one.key != back.key), back]

    def money(self, closed: Mapping[str, int]) -> Money:
        """Return the money of the deployment. `closed`: what the machines that were over before have cost, by month."""
        spent = {month: closed.get(month, 0) + self.spent.get(month, 0) for month in {*closed, *self.spent}}
        return count_money(self.deployment, self.machines.values(), spent, self.now)

    def launch(self, launch: Launch, machine_id: str) -> str:
        """Add the row of a machine to launch; return its id."""
        machine_type = self.deployment.type(launch.type)
        if machine_type is None:
            raise ValueError(f"{self.deployment.name} has no type {launch.type}")
        machine = Machine(
            id=machine_id,
            deployment=self.deployment.name,
            pool=machine_type.pool,
            type=machine_type.name,
            zone=launch.zone,
            market=launch.market,
            price=launch.price,
            gpus=machine_type.gpus,
            request=self.deployment.request(machine_type, launch.zone, launch.market, launch.price, machine_id),
            requested_at=self.now,
            state_since=self.now,
            needed_at=self.now,
        )
        self.machines[machine.id] = machine
        self.launched.append(machine)
        return machine.id

    @property
    def moved(self) -> bool:
        """Whether machines were launched or are in another state than they were read in."""
        return any(id not in self._read or row.state != self._read[id].state for id, row in self.machines.items())

    def changes(self) -> MachineChanges:
        """Return what is to be written, every row with the term of the leader."""
        new = {machine.id for machine in self.launched}
        changed = [row for row in self.machines.values() if row.id not in new and row is not self._read[row.id]]
        backoffs = tuple(self.backoffs) if self.backoffs != self._backoffs else None
        return MachineChanges(
            tuple(self.machines[one.id].with_fields(term=self._term) for one in self.launched),
            tuple(row.with_fields(term=self._term) for row in changed),
            backoffs,
            dict(self.spent),
            dict(self.first_seen) if self.first_seen != self._first_seen else None,
        )


def step(
    store: MachineStore,
    deployment: Deployment,
    seen: StepInput,
    leader: StepLeader,
    rows: MachineRows | None = None,
    *,
    deleting: bool = False,
) -> StepResult:
    """Make one step: observe, decide, commit. The calls of the result may be made only if it was committed.

    `rows`: as they were read after the lists were taken; None: they are read here. `deleting`: the deployment is ended,
    so that nothing is launched and every machine drains.
    """
    deployment = replace(deployment, paused=True) if deleting else deployment
    rows = store.read(deployment.name) if rows is None else rows
    work = _StepState(deployment, rows, leader.term, seen.now, seen.clock_step)
    for machine_id, report in seen.reports:
        work.apply_event(machine_id, report)
    orphans = _take_lists(work, seen)
    for machine_id in list(work.machines):
        work.apply_event(machine_id, MachineEvent("tick", at=seen.observing_since))
    money = work.money(rows.closed_spend)
    enforced = list(enforce(deployment, work.machines.values(), money, seen.now))
    for machine, decided in enforced:
        work.apply_event(machine.id, decided)
    money = work.money(rows.closed_spend) if enforced else money
    unserved: tuple[PendingWork, ...] = ()
    refusals: tuple[LaunchRefusal, ...] = ()
    served: Mapping[str, tuple[str, ...]] | None = None
    emptied: Machine | None = None
    if seen.demand is not None:
        known = work.backoffs, money, seen.now, seen.boot_seconds, seen.others
        sizing = size(deployment, work.machines.values(), seen.demand, *known)
        unserved, refusals = sizing.unserved, sizing.refusals
        moment = StepTime(seen.now, seen.observing_since)
        for machine, decided in retire(deployment, work.machines.values(), seen.demand, sizing.needed, moment):
            work.apply_event(machine.id, decided)
        new = [work.launch(launch, leader.new_id()) for launch in sizing.launches]
        emptied = find_move(deployment, work.machines.values(), seen.demand, seen.now, seen.moved_at)
        if emptied is not None:
            work.apply_event(emptied.id, MachineEvent("drain", drain="move"))
        served = {
            id: tuple(new[one] if isinstance(one, int) else one for one in places)
            for id, places in sizing.served.items()
        }
    calls = _calls(work, seen, orphans)
    set_at = deployment.credential_set_at
    changes = replace(work.changes(), revision=deployment.revision, credential_set_at=set_at)
    if changes and not store.commit(deployment.name, leader.term, changes):
        return StepResult(False)
    overdue, rows_after = tuple(_overdue(work)), tuple(work.machines.values())
    moved_off = None if emptied is None else emptied.id
    shared = tuple(row for one in seen.others for row in one.machines)
    return StepResult(
        True, tuple(calls), unserved, refusals, money, overdue, work.moved, served, rows_after, moved_off, shared
    )


def _take_lists(work: _StepState, seen: StepInput) -> list[Instance]:
    orphans: dict[str, Instance] = {}
    for listed in seen.lists:
        result = match_instances(work.deployment, work.machines.values(), listed, work.first_seen)
        work.first_seen = result.first_seen
        for machine, event in result.events:
            work.apply_event(machine.id, event)
        orphans.update((orphan.id, orphan) for orphan in result.orphans)
    return list(orphans.values())


def _calls(work: _StepState, seen: StepInput, orphans: Iterable[Instance]) -> list[ProviderCall]:
    """Return the calls that the rows ask for, each noted in its row before, and those that end orphans."""
    if not seen.can_call:
        return []
    calls = []
    waiting = any(one.active(seen.now) and one.type == "*" for one in work.backoffs)
    for machine in sorted(work.machines.values(), key=lambda row: row.id):
        retry = work.timeouts(machine.type).retry
        if machine.state == "requested" and not waiting and _due(machine.launch_called_at, retry, seen.now):
            if machine.id in seen.in_flight:
                continue
            work.apply_event(machine.id, MachineEvent("launch_called"))
            calls.append(ProviderCall("launch", work.machines[machine.id]))
        elif machine.state == "terminating" and machine.instance and _due(machine.end_called_at, retry, seen.now):
            if machine.instance in seen.in_flight:  # a launch that hangs holds up no end
                continue
            work.apply_event(machine.id, MachineEvent("end_called"))
            calls.append(ProviderCall("terminate", machine, machine.instance))
    return [*calls, *(ProviderCall("terminate", None, orphan.id) for orphan in orphans)]


def _due(called: float | None, retry: float, now: float) -> bool:
    return called is None or not 0 <= now - called < retry


def _overdue(work: _StepState) -> Iterable[str]:
    for machine in work.machines.values():
        if machine.overdue(work.now, work.timeouts(machine.type)):
            yield machine.id


def answer(
    store: MachineStore,
    deployment: Deployment,
    answers: Sequence[tuple[ProviderCall, float, Instance | bool | ProviderError]],
    term: int,
    now: float,
) -> bool:
    """Commit the answers of calls, each with the time when it was started; False if nothing was written."""
    rows = store.read(deployment.name)
    work = _StepState(deployment, rows, term, now)
    for call, started, result in answers:
        if call.machine is None:
            continue
        row = work.machines.get(call.machine.id)
        if row is None:
            continue
        for event in _meaning(call, min(started, now), result):
            work.apply_event(row.id, event)
        if isinstance(result, ProviderError) and (call.kind == "launch" or result.failure in WHOLE_DEPLOYMENT):
            work.back_off(row, result.failure)
    changes = work.changes()
    return not changes or store.commit(deployment.name, term, changes)


def _meaning(call: ProviderCall, started: float, result: Instance | bool | ProviderError) -> Iterable[MachineEvent]:
    """Return what the answer of a call says of its machine."""
    if isinstance(result, Instance):
        if result.state == "terminated":
            return [MachineEvent("ended", at=started, instance=result.id)]
        return [MachineEvent("listed", at=started, instance=result.id)]
    if call.kind == "terminate":
        return [MachineEvent("not_found", at=started)] if result is False else []
    if isinstance(result, ProviderError) and result.certain:
        busy = result.failure == "throttled"
        return [MachineEvent("throttled" if busy else "refused", instance=result.instance, reason=result.failure)]
    return []


def cycle(
    store: MachineStore,
    provider: Provider,
    deployment: Deployment,
    seen: StepInput,
    leader: StepLeader,
    *,
    deleting: bool = False,
) -> StepResult:
    """Make steps and their calls until no launch is refused: a stock-out goes on to the next zone or type at once.

    Ends with the step that could not be committed, whose calls are not made.
    """
    while True:
        result = step(store, deployment, seen, leader, deleting=deleting)
        answers = [(call, leader.clock(), call.make(provider)) for call in result.calls]
        if not any(answer(store, deployment, answers, leader.term, leader.clock()) for _ in range(ANSWER_TRIES)):
            return replace(result, committed=False)
        if not any(isinstance(results, ProviderError) and results.certain for _, _, results in answers):
            return result
        seen = replace(seen, now=leader.clock(), lists=(), reports=(), clock_step=0.0)
