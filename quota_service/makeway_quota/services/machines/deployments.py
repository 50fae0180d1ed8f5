"""List, save, pause, duplicate and delete deployments of machines; for administrators.

Each change is made to the version that was read, is a line of the decision log, and is followed by the loop that drives
the deployments. Nothing here launches or ends a machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from makeway_api.errors import MakewayError
from makeway_api.models import Deployment as DeploymentModel
from makeway_api.models import (
    DeploymentDraft,
    DeploymentRequest,
    DeploymentSpend,
    DeploymentStep,
    LaunchHold,
    MachinePrice,
    PolicyCheck,
)

from ...autoscale.budget import UNIT, count_money, gpu_cost
from ...autoscale.deployment import Deployment
from ...autoscale.document import read_deployment
from ...autoscale.document_edits import differences, free_name, with_name, with_paused
from ...autoscale.machine import STATES, Machine
from ...backends.machines.machine_source import BACKEND as MACHINES
from ...control.machines.deployment_driver import DeploymentStatus
from ...policy import PolicyInvalid
from ...policy.issues import Issue
from ...store.errors import Conflict
from ...store.records import NewDecision, StoredDeployment
from ...wording.machines import deployment_does
from ..caller import Caller
from ..context import Context
from ..refusals import invalid_document, refuse, wire_issues
from ..times import at, when

FILE = "deployment.yaml"
MAX_HOLDS = 20
"""Reasons for which nothing is launched that an answer has"""
TRIES = 5
"""Times that a change which fits any version is made to the newest one"""
MAX_MESSAGE = 2000
"""Characters of a line of the decision log"""

StatusOf = Callable[[str], DeploymentStatus | None]
"""Return what the last step of a deployment said; None where this replica made none"""


class DeploymentService:
    """The documents of deployments, with their machines by state and their spend. Administrators only."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._status_of: StatusOf = lambda name: None
        self._driven = MACHINES in context.settings.backends

    def follow(self, status_of: StatusOf) -> None:
        """Show what the last step of each deployment said."""
        self._status_of = status_of

    async def every(self, caller: Caller) -> list[DeploymentModel]:
        """Return all deployments by name, those that are being deleted too, without their documents."""
        only_administrators(caller)
        return await self._context.call(self._every)

    async def read(self, caller: Caller, name: str) -> DeploymentModel:
        """Return one deployment with its document."""
        only_administrators(caller)
        return await self._context.call(self._whole, await self._stored(name))

    async def validate(self, caller: Caller, text: str) -> PolicyCheck:
        """Return everything that is wrong with a document, or what it would change."""
        only_administrators(caller)
        return await self._context.call(self._check, text)

    async def save(self, caller: Caller, request: DeploymentRequest) -> DeploymentModel:
        """Create a deployment or replace its document; a conflict tells what is there now.

        A document that is the same as the one that is there changes nothing, and its version stays.
        """
        only_administrators(caller)
        context = self._context
        try:
            new = await context.call(read_deployment, request.document, FILE, self._pools())
        except PolicyInvalid as invalid:
            raise _invalid(invalid) from None

        def changed(there: StoredDeployment | None) -> str:
            return request.document

        try:
            return await self._change(caller, new.name, request.version, changed)
        except PolicyInvalid as invalid:
            raise _invalid(invalid) from None

    async def pause(self, caller: Caller, name: str, version: int | None = None) -> DeploymentModel:
        """Launch nothing any more, and end what runs after a notice; its comments stay."""
        return await self._set_paused(caller, name, version, True)

    async def resume(self, caller: Caller, name: str, version: int | None = None) -> DeploymentModel:
        """Launch machines again when work waits; its comments stay."""
        return await self._set_paused(caller, name, version, False)

    async def duplicate(self, caller: Caller, name: str) -> DeploymentDraft:
        """Return the document of a deployment under a free name; nothing is saved."""
        only_administrators(caller)
        stored = await self._stored(name)

        def draft() -> DeploymentDraft:
            free = free_name(name, {one.name for one in self._context.store.deployments.list()})
            return DeploymentDraft(name=free, document=with_name(stored.document, free))

        try:
            return await self._context.call(draft)
        except PolicyInvalid as invalid:
            raise _invalid(invalid) from None

    async def delete(self, caller: Caller, name: str, version: int | None = None) -> DeploymentModel:
        """Begin to delete a deployment: its machines end first. Repeating it is harmless."""
        only_administrators(caller)
        context = self._context

        def decision(marked: StoredDeployment) -> NewDecision:
            message = f"{marked.updated_by} deletes the deployment {name}: its machines are ended first."
            return _decision(marked, message)

        for remaining in reversed(range(TRIES)):
            stored = await self._stored(name)
            wanted = stored.version if version is None else version
            try:
                marked = await context.call(
                    context.store.deployments.delete, name, wanted, caller.name, context.clock(), decision
                )
                return await context.call(self._whole, marked)
            except Conflict as conflict:
                if version is not None or not remaining:
                    raise _conflict(conflict) from None
        raise AssertionError("the last try returns or raises")

    async def _set_paused(self, caller: Caller, name: str, version: int | None, paused: bool) -> DeploymentModel:
        only_administrators(caller)
        await self._stored(name)

        def changed(there: StoredDeployment | None) -> str:
            if there is None:
                raise no_deployment(name)
            return with_paused(there.document, paused)

        try:
            return await self._change(caller, name, version, changed)
        except PolicyInvalid as invalid:
            raise _invalid(invalid) from None

    async def _change(
        self,
        caller: Caller,
        name: str,
        version: int | None,
        changed: Callable[[StoredDeployment | None], str],
    ) -> DeploymentModel:
        """Save what `changed` makes of the document that is there; without a version again if another was faster."""
        context = self._context

        def change() -> DeploymentModel:
            there = context.store.deployments.read(name)
            current = 0 if there is None else there.version
            text = changed(there)
            if there is not None and there.document == text and version in (None, current) and not there.deleting:
                return self._whole(there)
            new, old = read_deployment(text, FILE, stored=True), _readable(there)[0]
            _check_place(old, new)
            told = " ".join(differences(old, new)) or "nothing changed."

            def decision(saved: StoredDeployment) -> NewDecision:
                message = f"{saved.updated_by} saved version {saved.version} of the deployment {name}: {told}"
                return _decision(saved, message)

            wanted = current if version is None else version
            saved = context.store.deployments.save(name, text, wanted, caller.name, context.clock(), decision)
            return self._whole(saved)

        for remaining in reversed(range(TRIES)):
            try:
                return await context.call(change)
            except Conflict as conflict:
                there = conflict.existing
                deleting = isinstance(there, StoredDeployment) and there.deleting
                if version is not None or deleting or not remaining:
                    raise _conflict(conflict) from None
        raise AssertionError("the last try returns or raises")

    async def _stored(self, name: str) -> StoredDeployment:
        stored = await self._context.call(self._context.store.deployments.read, name)
        if stored is None:
            raise no_deployment(name)
        return stored

    def _pools(self) -> Sequence[str]:
        return [pool.name for pool in self._context.document.pools]

    def _check(self, text: str) -> PolicyCheck:
        try:
            new = read_deployment(text, FILE, self._pools())
            old = _readable(self._context.store.deployments.read(new.name))[0]
            _check_place(old, new)
        except PolicyInvalid as invalid:
            return PolicyCheck(ok=False, issues=wire_issues(invalid.issues))
        return PolicyCheck(ok=True, changes=differences(old, new))

    def _every(self) -> list[DeploymentModel]:
        store = self._context.store
        machines: dict[str, list[Machine]] = {}
        for machine in store.machines.live():
            machines.setdefault(machine.deployment, []).append(machine)
        return [self._model(one, machines.get(one.name, [])) for one in store.deployments.list()]

    def _whole(self, stored: StoredDeployment) -> DeploymentModel:
        machines = self._context.store.machines.read(stored.name).machines
        return self._model(stored, machines).model_copy(update={"document": stored.document})

    def _model(self, stored: StoredDeployment, machines: Sequence[Machine]) -> DeploymentModel:
        deployment, problem = _readable(stored)
        by_state = Counter(machine.state for machine in machines)
        result = DeploymentModel(
            name=stored.name,
            version=stored.version,
            deleting=stored.deleting,
            updated_at=at(stored.updated_at),
            updated_by=stored.updated_by,
            machines={state: by_state[state] for state in STATES if by_state[state]},
            problem=problem,
            step=_step(self._status_of(stored.name)),
        )
        paused = deployment is not None and deployment.paused
        result.message = deployment_does(len(machines), paused=paused, deleting=stored.deleting, driven=self._driven)
        if deployment is None:
            if not stored.deleting:
                result.message = "Its document cannot be read, so nothing is launched: correct it."
            return result
        result.title, result.provider, result.paused = deployment.title, deployment.provider, paused
        result.max_machines = deployment.max_machines
        result.spend = self._spend(deployment, machines)
        result.prices = _prices(deployment)
        return result

    def _spend(self, deployment: Deployment, machines: Iterable[Machine]) -> DeploymentSpend:
        closed = self._context.store.machines.spend(deployment.name)
        money = count_money(deployment, machines, closed, self._context.clock())
        return DeploymentSpend(
            currency=deployment.currency,
            hour=money.hourly_cost / UNIT,
            max_hour=_units(deployment.hourly_budget),
            month=money.spent_in_month / UNIT,
            max_month=_units(deployment.monthly_budget),
            unpriced=money.unpriced_machines,
        )


def _prices(deployment: Deployment) -> list[MachinePrice]:
    """Return what a machine of each type costs in each of its markets, and one of its GPUs that jobs may use."""
    result = []
    for machine_type in deployment.types:
        gpus = 0 if machine_type.cpu_only else machine_type.gpus
        for market in machine_type.markets():
            price = machine_type.price_in(market)
            one = MachinePrice(
                type=machine_type.name, pool=machine_type.pool, market=market, gpus=gpus, price=_units(price)
            )
            one.gpu_price = None if price is None else _units(gpu_cost(price, gpus))
            result.append(one)
    return result


def _units(millionths: int | None) -> float | None:
    return None if millionths is None else millionths / UNIT


def _readable(stored: StoredDeployment | None) -> tuple[Deployment | None, str]:
    """Return a stored document, or why it cannot be read: it may be one of a later release."""
    if stored is None:
        return None, ""
    try:
        return read_deployment(stored.document, FILE, stored=True), ""
    except PolicyInvalid as invalid:
        return None, str(invalid.issues[0])


def _check_place(old: Deployment | None, new: Deployment) -> None:
    """Raise PolicyInvalid where the machines of a deployment would be elsewhere: those that it has would be missed."""
    if old is None or old.place == new.place:
        return
    key = "provider" if old.provider != new.provider else "settings"
    message = (
        f"the machines of this deployment are at {' in '.join(old.place)}, and would be forgotten there; "
        "save the document under another name, and delete this deployment"
    )
    raise PolicyInvalid([Issue(FILE, 1, key, message)])


def _step(status: DeploymentStatus | None) -> DeploymentStep | None:
    if status is None:
        return None
    holds = [
        LaunchHold(workload=one.workload, type=one.type, code=one.code, until=when(one.until))
        for one in status.refusals[:MAX_HOLDS]
    ]
    return DeploymentStep(
        at=at(status.at),
        problem=status.problem,
        listed_at=when(status.listed_at),
        unserved=len(status.unserved),
        holds=holds,
        overdue=list(status.overdue),
    )


def only_administrators(caller: Caller) -> None:
    """Raise the refusal for everybody else."""
    if not caller.is_administrator:
        raise refuse("Only administrators see and change deployments of machines.", "forbidden", 403)


def _decision(stored: StoredDeployment, message: str) -> NewDecision:
    numbers = {"deployment": stored.name, "version": stored.version}
    return NewDecision("deployment", None, None, stored.updated_by, "deployment", message[:MAX_MESSAGE], numbers)


def no_deployment(name: str) -> MakewayError:
    """Return the refusal of a question for a deployment that is not there."""
    return refuse(f"There is no deployment {name}.", "not_found", 404)


def _conflict(conflict: Conflict) -> MakewayError:
    """Return the refusal of a change to a version that is not there any more, with what is there now."""
    there, message = conflict.existing, str(conflict)
    now: dict[str, object] = {"current": 0, "document": None}
    if isinstance(there, StoredDeployment):
        now = {"current": there.version, "document": there.document}
    return refuse(f"{message[:1].upper()}{message[1:]}.", "conflict", 409, **now)


def _invalid(invalid: PolicyInvalid) -> MakewayError:
    return invalid_document(invalid, "The document", "deployment_invalid", "makeway autoscaler validate")
