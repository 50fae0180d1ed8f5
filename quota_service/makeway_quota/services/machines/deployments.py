"""List, save, pause, duplicate and delete deployments of machines; for administrators.

Each change is checked against the version that the caller read, and is recorded in the decision log. Nothing here
launches or ends a machine: the control loop reads the stored documents, and acts on them.
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

from ...autoscale.budget import MICROS_PER_UNIT, count_money, gpu_cost
from ...autoscale.deployment import Deployment
from ...autoscale.document import read_deployment, static_pool_warnings
from ...autoscale.document_edits import differences, free_name, with_name, with_paused
from ...autoscale.machine import STATES, Machine
from ...backends.machines.machine_source import BACKEND as MACHINES
from ...control.machines.deployment_driver import DeploymentStatus
from ...policy import PolicyInvalid
from ...policy.issues import Issue
from ...store.errors import Conflict
from ...store.records import NewDecision, StoredDeployment
from ...wording.machines import CAN_LAUNCH, deployment_activity, static_pools
from ..caller import Caller
from ..context import Context
from ..refusals import invalid_document, refuse, wire_issues
from ..times import to_datetime, to_optional_datetime

DOCUMENT_NAME = "deployment.yaml"
MAX_HOLDS = 20
"""Launch holds, which say why nothing is launched, that an answer has"""
MAX_TRIES = 5
"""How often a change without an expected version is tried, each time on the newest version"""
MAX_MESSAGE = 2000
"""Characters of a line of the decision log"""

StatusOf = Callable[[str], DeploymentStatus | None]
"""Return the status of a deployment after its last scaling step; None where this replica ran none"""


class DeploymentService:
    """The documents of deployments, with counts of their machines by state and their spend. Administrators only."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._status_of: StatusOf = lambda name: None
        self._launches_machines = MACHINES in context.settings.backends

    def show_status_of(self, status_of: StatusOf) -> None:
        """Show the status that this function returns with each deployment."""
        self._status_of = status_of

    async def list_all(self, caller: Caller) -> list[DeploymentModel]:
        """Return all deployments by name, also those being deleted, without their documents."""
        require_administrator(caller)
        return await self._context.call(self._models)

    async def read(self, caller: Caller, name: str) -> DeploymentModel:
        """Return one deployment with its document."""
        require_administrator(caller)
        return await self._context.call(self._with_document, await self._read_stored(name))

    async def validate(self, caller: Caller, text: str) -> PolicyCheck:
        """Return everything that is wrong with a document, or what it would change."""
        require_administrator(caller)
        return await self._context.call(self._validate, text)

    async def save(self, caller: Caller, request: DeploymentRequest) -> DeploymentModel:
        """Create a deployment or replace its document; the refusal of a conflict has the stored version and document.

        Saving the same document again changes nothing, and its version stays.
        """
        require_administrator(caller)
        context = self._context
        try:
            new = await context.call(read_deployment, request.document, DOCUMENT_NAME, self._pools())
        except PolicyInvalid as invalid:
            raise _invalid_refusal(invalid) from None

        def new_text(existing: StoredDeployment | None) -> str:
            return request.document

        try:
            return await self._change(caller, new.name, request.version, new_text)
        except PolicyInvalid as invalid:
            raise _invalid_refusal(invalid) from None

    async def pause(self, caller: Caller, name: str, version: int | None = None) -> DeploymentModel:
        """Set `paused: true` in the document, whose comments stay: nothing is launched, machines end after a notice."""
        return await self._set_paused(caller, name, version, True)

    async def resume(self, caller: Caller, name: str, version: int | None = None) -> DeploymentModel:
        """Set `paused: false` in the document, whose comments stay: machines are launched again when work waits."""
        return await self._set_paused(caller, name, version, False)

    async def duplicate(self, caller: Caller, name: str) -> DeploymentDraft:
        """Return the document of a deployment under a free name; nothing is saved."""
        require_administrator(caller)
        stored = await self._read_stored(name)

        def draft() -> DeploymentDraft:
            free = free_name(name, {other.name for other in self._context.store.deployments.list()})
            return DeploymentDraft(name=free, document=with_name(stored.document, free))

        try:
            return await self._context.call(draft)
        except PolicyInvalid as invalid:
            raise _invalid_refusal(invalid) from None

    async def delete(self, caller: Caller, name: str, version: int | None = None) -> DeploymentModel:
        """Begin to delete a deployment: its machines end first. Repeating it is harmless."""
        require_administrator(caller)
        context = self._context

        def decision(marked: StoredDeployment) -> NewDecision:
            message = f"{marked.updated_by} deletes the deployment {name}: its machines are ended first."
            return _decision(marked, message)

        for remaining_tries in reversed(range(MAX_TRIES)):
            stored = await self._read_stored(name)
            expected = stored.version if version is None else version
            try:
                marked = await context.call(
                    context.store.deployments.delete, name, expected, caller.name, context.clock(), decision
                )
                return await context.call(self._with_document, marked)
            except Conflict as conflict:
                if version is not None or not remaining_tries:
                    raise _conflict_refusal(conflict) from None
        raise AssertionError("the last try returns or raises")

    async def _set_paused(self, caller: Caller, name: str, version: int | None, paused: bool) -> DeploymentModel:
        require_administrator(caller)
        await self._read_stored(name)

        def new_text(existing: StoredDeployment | None) -> str:
            if existing is None:
                raise unknown_deployment(name)
            return with_paused(existing.document, paused)

        try:
            return await self._change(caller, name, version, new_text)
        except PolicyInvalid as invalid:
            raise _invalid_refusal(invalid) from None

    async def _change(
        self,
        caller: Caller,
        name: str,
        version: int | None,
        new_text: Callable[[StoredDeployment | None], str],
    ) -> DeploymentModel:
        """Save the text that `new_text` makes of the stored document; without a version, retry after a conflict."""
        context = self._context

        def change() -> DeploymentModel:
            existing = context.store.deployments.read(name)
            current = 0 if existing is None else existing.version
            text = new_text(existing)
            if (
                existing is not None
                and existing.document == text
                and version in (None, current)
                and not existing.deleting
            ):
                return self._with_document(existing)
            new, old = read_deployment(text, DOCUMENT_NAME, stored=True), _parse_stored(existing)[0]
            _check_place(old, new)
            changes = " ".join(differences(old, new)) or "nothing changed."

            def decision(saved: StoredDeployment) -> NewDecision:
                message = f"{saved.updated_by} saved version {saved.version} of the deployment {name}: {changes}"
                return _decision(saved, message)

            expected = current if version is None else version
            saved = context.store.deployments.save(name, text, expected, caller.name, context.clock(), decision)
            return self._with_document(saved)

        for remaining_tries in reversed(range(MAX_TRIES)):
            try:
                return await context.call(change)
            except Conflict as conflict:
                existing = conflict.existing
                deleting = isinstance(existing, StoredDeployment) and existing.deleting
                if version is not None or deleting or not remaining_tries:
                    raise _conflict_refusal(conflict) from None
        raise AssertionError("the last try returns or raises")

    async def _read_stored(self, name: str) -> StoredDeployment:
        stored = await self._context.call(self._context.store.deployments.read, name)
        if stored is None:
            raise unknown_deployment(name)
        return stored

    def _pools(self, *kinds: str) -> Sequence[str]:
        """Return the names of all pools of the policy, or of those of some kinds."""
        return [pool.name for pool in self._context.document.pools if not kinds or pool.kind in kinds]

    def _validate(self, text: str) -> PolicyCheck:
        try:
            new = read_deployment(text, DOCUMENT_NAME, self._pools())
            old = _parse_stored(self._context.store.deployments.read(new.name))[0]
            _check_place(old, new)
        except PolicyInvalid as invalid:
            return PolicyCheck(ok=False, issues=wire_issues(invalid.issues))
        warnings = static_pool_warnings(text, DOCUMENT_NAME, self._pools("autoscaled"))
        return PolicyCheck(ok=True, warnings=wire_issues(warnings), changes=differences(old, new))

    def _models(self) -> list[DeploymentModel]:
        store = self._context.store
        machines: dict[str, list[Machine]] = {}
        for machine in store.machines.live():
            machines.setdefault(machine.deployment, []).append(machine)
        return [self._model(one, machines.get(one.name, [])) for one in store.deployments.list()]

    def _with_document(self, stored: StoredDeployment) -> DeploymentModel:
        machines = self._context.store.machines.read(stored.name).machines
        return self._model(stored, machines).model_copy(update={"document": stored.document})

    def _model(self, stored: StoredDeployment, machines: Sequence[Machine]) -> DeploymentModel:
        deployment, problem = _parse_stored(stored)
        by_state, status = Counter(machine.state for machine in machines), self._status_of(stored.name)
        result = DeploymentModel(
            name=stored.name,
            version=stored.version,
            deleting=stored.deleting,
            updated_at=to_datetime(stored.updated_at),
            updated_by=stored.updated_by,
            machines={state: by_state[state] for state in STATES if by_state[state]},
            problem=problem,
            step=_step(status),
        )
        paused = deployment is not None and deployment.paused
        result.message = deployment_activity(
            len(machines),
            paused=paused,
            deleting=stored.deleting,
            can_launch=self._launches_machines,
            unusable=status is not None and status.unusable,
        )
        if deployment is not None and result.message == CAN_LAUNCH:
            result.message = self._launching(deployment)
        if status is not None and status.problem:
            result.message += f" {status.problem.rstrip('.')}."
        if deployment is None:
            if not stored.deleting:
                result.message = "Its document cannot be read, so nothing is launched: correct it."
            return result
        result.title, result.provider, result.paused = deployment.title, deployment.provider, paused
        result.max_machines = deployment.max_machines
        result.spend = self._spend(deployment, machines)
        result.prices = _prices(deployment)
        return result

    def _launching(self, deployment: Deployment) -> str:
        """Return when a deployment launches machines; its document may be older than the kinds of its pools."""
        static = deployment.pools.intersection(self._pools("static"))
        if not static:
            return CAN_LAUNCH
        return static_pools(static) if static == deployment.pools else f"{CAN_LAUNCH} {static_pools(static)}"

    def _spend(self, deployment: Deployment, machines: Iterable[Machine]) -> DeploymentSpend:
        finished_cost = self._context.store.machines.spend(deployment.name)
        money = count_money(deployment, machines, finished_cost, self._context.clock())
        return DeploymentSpend(
            currency=deployment.currency,
            hour=money.hourly_cost / MICROS_PER_UNIT,
            max_hour=_in_currency(deployment.hourly_budget),
            month=money.spent_in_month / MICROS_PER_UNIT,
            max_month=_in_currency(deployment.monthly_budget),
            unpriced=money.unpriced_machines,
        )


def _prices(deployment: Deployment) -> list[MachinePrice]:
    """Return the hourly price of a machine of each type in each of its markets, and of one of its GPUs."""
    result = []
    for machine_type in deployment.types:
        gpus = 0 if machine_type.cpu_only else machine_type.gpus
        for market in machine_type.markets():
            price = machine_type.price_in(market)
            one = MachinePrice(
                type=machine_type.name, pool=machine_type.pool, market=market, gpus=gpus, price=_in_currency(price)
            )
            one.gpu_price = None if price is None else _in_currency(gpu_cost(price, gpus))
            result.append(one)
    return result


def _in_currency(millionths: int | None) -> float | None:
    return None if millionths is None else millionths / MICROS_PER_UNIT


def _parse_stored(stored: StoredDeployment | None) -> tuple[Deployment | None, str]:
    """Return the deployment of a stored document, or why it cannot be read: a later release may have written it."""
    if stored is None:
        return None, ""
    try:
        return read_deployment(stored.document, DOCUMENT_NAME, stored=True), ""
    except PolicyInvalid as invalid:
        return None, str(invalid.issues[0])


def _check_place(old: Deployment | None, new: Deployment) -> None:
    """Raise PolicyInvalid where the provider or region changes: the machines at the old one would be forgotten."""
    if old is None or old.location == new.location:
        return
    key = "provider" if old.provider != new.provider else "settings"
    message = (
        f"the machines of this deployment are at {' in '.join(old.location)}, and would be forgotten there; "
        "save the document under another name, and delete this deployment"
    )
    raise PolicyInvalid([Issue(DOCUMENT_NAME, 1, key, message)])


def _step(status: DeploymentStatus | None) -> DeploymentStep | None:
    if status is None:
        return None
    holds = [
        LaunchHold(workload=one.workload, type=one.type, code=one.code, until=to_optional_datetime(one.until))
        for one in status.refusals[:MAX_HOLDS]
    ]
    return DeploymentStep(
        at=to_datetime(status.at),
        problem=status.problem,
        listed_at=to_optional_datetime(status.listed_at),
        unserved=len(status.unserved),
        holds=holds,
        overdue=list(status.overdue),
    )


def require_administrator(caller: Caller) -> None:
    """Raise the refusal (403) for a caller who is no administrator."""
    if not caller.is_administrator:
        raise refuse("Only administrators see and change deployments of machines.", "forbidden", 403)


def _decision(stored: StoredDeployment, message: str) -> NewDecision:
    facts = {"deployment": stored.name, "version": stored.version}
    return NewDecision("deployment", None, None, stored.updated_by, "deployment", message[:MAX_MESSAGE], facts)


def unknown_deployment(name: str) -> MakewayError:
    """Return the refusal (404) for a deployment that does not exist."""
    return refuse(f"There is no deployment {name}.", "not_found", 404)


def _conflict_refusal(conflict: Conflict) -> MakewayError:
    """Return the refusal (409) of a change to an outdated version, with the stored version and document."""
    existing, message = conflict.existing, str(conflict)
    now: dict[str, object] = {"current": 0, "document": None}
    if isinstance(existing, StoredDeployment):
        now = {"current": existing.version, "document": existing.document}
    return refuse(f"{message[:1].upper()}{message[1:]}.", "conflict", 409, **now)


def _invalid_refusal(invalid: PolicyInvalid) -> MakewayError:
    return invalid_document(invalid, "The document", "deployment_invalid", "makeway autoscaler validate")
