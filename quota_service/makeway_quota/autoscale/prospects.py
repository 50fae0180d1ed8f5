"""Report for each pending workload which machines are starting for it, or why none is launched. Pure.

Computed from the last sizing decision and the present rows of machines. Where a machine of the decision has failed
since, its workload is left out until the next decision. `launch_what_if` reports the same for a workload that is not
submitted. A *prospect* is the report for one workload; `boot_seconds` is the usual boot time of each machine type.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .budget import Money, count_money
from .demand import MachineDemand, PendingWork
from .deployment import Deployment, MachineType
from .machine import CANCELLABLE, Machine
from .placement.rooms import fits_on
from .placement.shared_pools import OtherDeployment
from .sizing import LaunchRefusal, size
from .step import MachineRows


@dataclass(frozen=True, slots=True)
class WaitingDecision:
    """What a step decided for the pending workloads: `served` (with the ids of their machines), or `unserved`."""

    served: Mapping[str, tuple[str, ...]]
    unserved: tuple[PendingWork, ...] = ()
    refusals: tuple[LaunchRefusal, ...] = ()


class MachineCount(NamedTuple):
    """How many machines of a deployment exist for some pools, and how many may exist at most (`limit`)."""

    deployment: str
    machines: int
    limit: int


@dataclass(frozen=True, slots=True)
class MachinesStarting:
    """The machines that were launched for a workload: `booting` have an instance, `ready` ones take work now.

    `price`: the hourly price of all of them, None if one is unknown. `ready_at`: when they are probably ready, None if
    that is unknown or past; `overdue`: whether it is past.
    """

    count: MachineCount
    machines: int
    booting: int
    ready: int
    price: int | None
    currency: str
    ready_at: float | None = None
    overdue: bool = False


class Cause(NamedTuple):
    """Why no machine of a type is launched: a reason code and its parameters, such as the limit that is reached.

    For a workload of several `workers` the first cause says for how many of them it could launch (`placed`).
    """

    code: str
    values: Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class NoLaunch:
    """No machine is launched for a workload. `retry_at`: when a launch is tried again, None if that is unknown."""

    count: MachineCount
    causes: tuple[Cause, ...]
    retry_at: float | None = None


Prospect = MachinesStarting | NoLaunch


@dataclass(frozen=True, slots=True)
class WouldLaunch:
    """The machines that would be launched for a workload that is not submitted: `types` has an entry for each.

    `existing`: how many machines that exist would run its other workers. `price`: the hourly price of all of them, None
    if one is unknown. `seconds`: how long the new ones will probably take to be ready, None if that is unknown.
    """

    count: MachineCount
    types: tuple[str, ...]
    existing: int
    price: int | None
    currency: str
    seconds: float | None


def launch_what_if(
    deployment: Deployment,
    rows: MachineRows,
    demand: MachineDemand,
    boot_seconds: Mapping[str, float],
    now: float,
    *,
    deleting: bool = False,
    others: Sequence[OtherDeployment] = (),
) -> Prospect | WouldLaunch | None:
    """Return the prospect that the last workload of the demand would have after a step now; nothing is launched.

    None if no machine type suits it, or only other deployments would serve it. `boot_seconds`: as for `prospects`.
    """
    workload = demand.pending[-1]
    effective = replace(deployment, paused=True) if deleting else deployment
    money = count_money(deployment, rows.machines, rows.closed_spend, now)
    sizing = size(effective, rows.machines, demand, rows.backoffs, money, now, boot_seconds, others)
    shared = tuple(row for other in others for row in other.machines)
    serving = sizing.served.get(workload.workload, ())  # ids of machines, and indices of launches
    existing = tuple(machine for machine in serving if isinstance(machine, str))
    launches = [sizing.launches[index] for index in serving if isinstance(index, int)]
    if not launches:
        served = {workload.workload: existing} if existing else {}
        decision = WaitingDecision(served, sizing.unserved, sizing.refusals)
        result = prospects(
            deployment, rows.machines, decision, money, boot_seconds, now, deleting=deleting, shared=shared
        )
        return result.get(workload.workload)
    live = {row.id: row for row in rows.machines if not row.finished}
    all_machines = {row.id: row for row in shared} | live
    machine_prices = [*(launch.price for launch in launches), *(all_machines[id].price for id in existing)]
    prices = [price for price in machine_prices if price is not None]
    durations = [boot_seconds[launch.type] for launch in launches if launch.type in boot_seconds]
    return WouldLaunch(
        _MachineCounts(deployment, live).of(workload.pools),
        tuple(launch.type for launch in launches),
        len(existing),
        sum(prices) if len(prices) == len(serving) else None,
        deployment.currency,
        max(durations) if len(durations) == len(launches) else None,
    )


def prospects(
    deployment: Deployment,
    machines: Iterable[Machine],
    decision: WaitingDecision,
    money: Money | None,
    boot_seconds: Mapping[str, float],
    now: float,
    *,
    deleting: bool = False,
    shared: Iterable[Machine] = (),
) -> dict[str, Prospect]:
    """Return the prospect of each pending workload, by id. `boot_seconds`: by machine type, where that is known.

    `shared`: machines of other deployments that the decision counted. Left out are workloads that only such machines
    serve (the other deployment reports their prospect), and those that no machine type suits. Unserved workloads of one
    shape share one prospect object, except those that wait for GPUs that will be free soon.
    """
    rows = {row.id: row for row in machines if not row.finished}
    counts = _MachineCounts(deployment, rows)
    result: dict[str, Prospect] = {}
    all_machines = {row.id: row for row in shared if not row.finished} | rows
    for id, names in decision.served.items():
        serving = [all_machines[name] for name in names if name in all_machines]
        has_own_machine = any(name in rows for name in names)
        if has_own_machine and len(serving) == len(names) and all(map(_can_still_serve, serving)):
            result[id] = _machines_starting(serving, deployment, counts, boot_seconds, now)
    refusals: dict[str, list[LaunchRefusal]] = {}
    for refusal in decision.refusals:
        refusals.setdefault(refusal.workload, []).append(refusal)
    by_shape: dict[tuple[object, ...], Prospect | None] = {}
    causes = _Causes(deployment, rows, money, deleting, Counter(row.type for row in rows.values()))
    for work in decision.unserved:
        own_refusals = refusals.get(work.workload, ())
        key = work.shape, any(refusal.code == "soon_free" for refusal in own_refusals)
        if key not in by_shape:
            by_shape[key] = _no_launch(work, own_refusals, counts, causes)
        prospect = by_shape[key]
        if prospect is not None:
            result[work.workload] = prospect
    return result


def same_prospects(before: Mapping[str, Prospect], after: Mapping[str, Prospect]) -> bool:
    """Whether the prospects of all workloads in `after` are unchanged; those only in `before` do not count."""
    equal_pairs: set[tuple[int, int]] = set()
    """The pairs of objects that are known to be equal: thousands of workloads share one"""
    for id, prospect in after.items():
        pair = builtins.id(before.get(id)), builtins.id(prospect)
        if pair not in equal_pairs:
            if before.get(id) != prospect:
                return False
            equal_pairs.add(pair)
    return True


def p90_boot_seconds(measured: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the 90th percentile of the measured boot times, by machine type."""
    return {name: sorted(times)[(9 * len(times) - 1) // 10] for name, times in measured.items() if times}


def _can_still_serve(machine: Machine) -> bool:
    """Whether a machine takes work now, after its boot, or after its drain is cancelled."""
    return machine.starting or machine.state == "ready" or (machine.drain in CANCELLABLE and machine.deadline is None)


class _MachineCounts:
    """The machine counts of a deployment, by pools."""

    def __init__(self, deployment: Deployment, rows: Mapping[str, Machine]) -> None:
        self._deployment = deployment
        self._rows = rows
        self._by_pools: dict[tuple[str, ...], MachineCount] = {}

    def of(self, pools: tuple[str, ...]) -> MachineCount:
        if pools not in self._by_pools:
            types = {
                machine_type.name: machine_type.max_machines
                for machine_type in self._deployment.types
                if machine_type.pool in pools
            }
            machines = sum(row.type in types for row in self._rows.values())
            limit = min(self._deployment.max_machines, sum(types.values()))
            self._by_pools[pools] = MachineCount(self._deployment.title or self._deployment.name, machines, limit)
        return self._by_pools[pools]


def _machines_starting(
    machines: Sequence[Machine],
    deployment: Deployment,
    counts: _MachineCounts,
    boot_seconds: Mapping[str, float],
    now: float,
) -> MachinesStarting:
    prices = [row.price for row in machines if row.price is not None]
    starting = [row for row in machines if row.starting]
    own = [row for row in starting if row.deployment == deployment.name]
    boot_ends = [row.requested_at + boot_seconds[row.type] for row in own if row.type in boot_seconds]
    ready_at = max(boot_ends) if boot_ends and len(boot_ends) == len(starting) else None
    overdue = ready_at is not None and ready_at <= now
    return MachinesStarting(
        counts.of(tuple(dict.fromkeys(row.pool for row in machines))),
        len(machines),
        sum(row.state in ("booting", "joining") for row in machines),
        len(machines) - len(starting),
        sum(prices) if len(prices) == len(machines) else None,
        deployment.currency,
        None if overdue else ready_at,
        overdue,
    )


def _no_launch(
    work: PendingWork, refusals: Iterable[LaunchRefusal], counts: _MachineCounts, causes: _Causes
) -> NoLaunch | None:
    types = [machine_type for machine_type in causes.deployment.types if machine_type.pool in work.pools]
    if not types:
        return None
    if not any(fits_on(machine_type, work) for machine_type in types):
        return NoLaunch(counts.of(work.pools), (causes.too_small(types),))
    by_type = {(refusal.type, refusal.code): refusal for refusal in refusals if refusal.code != "too_small"}
    retries = [refusal.until for refusal in refusals if refusal.until is not None]
    result = _without_duplicates(causes.of(refusal) for refusal in by_type.values())
    if result and (placed := max(refusal.placed for refusal in by_type.values())):
        values: dict[str, float | str] = {"deployment": causes.name, "workers": work.workers, "placed": placed}
        result[0] = Cause(result[0].code, {**result[0].values, **values})
    return NoLaunch(counts.of(work.pools), tuple(result), min(retries, default=None))


def _without_duplicates(causes: Iterable[Cause]) -> list[Cause]:
    """Return each cause once, in order: a pause of the deployment is the same cause for every type."""
    result: list[Cause] = []
    for cause in causes:
        if cause not in result:
            result.append(cause)
    return result


@dataclass(slots=True)
class _Causes:
    """Makes causes of the refusals of launches: adds the parameters to their codes."""

    deployment: Deployment
    rows: Mapping[str, Machine]
    money: Money | None
    deleting: bool
    type_counts: Counter[str]
    """How many machines there are of each type"""

    def too_small(self, types: Sequence[MachineType]) -> Cause:
        largest = max(0 if machine_type.cpu_only else machine_type.gpus for machine_type in types)
        return Cause("too_small", {"deployment": self.name, "gpus": float(largest)})

    def of(self, refusal: LaunchRefusal) -> Cause:
        code, machine_type = refusal.code, self.deployment.type(refusal.type)
        if code == "paused":
            return Cause("deleting" if self.deleting else "paused", {"deployment": self.name})
        if code in ("throttled", "denied"):
            return Cause(code, {})
        if code == "no_provider":
            return Cause(code, {"deployment": self.name})
        if machine_type is None:
            return Cause(code, {"type": refusal.type})
        if code == "max_machines":
            return self._limit(machine_type)
        if code in ("hour_budget", "month_budget") and self.money is not None:
            return self._budget(code, machine_type, self.money)
        return Cause(code, {"type": machine_type.name, "deployment": self.name})

    @property
    def name(self) -> str:
        """Return the title of the deployment."""
        return self.deployment.title or self.deployment.name

    def _limit(self, machine_type: MachineType) -> Cause:
        machines = self.type_counts[machine_type.name]
        if machine_type.max_machines <= self.deployment.max_machines and machines >= min(
            machine_type.max_machines, len(self.rows)
        ):
            values: dict[str, float | str] = {
                "type": machine_type.name,
                "limit": machine_type.max_machines,
                "machines": machines,
            }
        else:
            values = {"type": "", "limit": self.deployment.max_machines, "machines": len(self.rows)}
        return Cause("max_machines", values | {"deployment": self.name})

    def _budget(self, code: str, machine_type: MachineType, money: Money) -> Cause:
        price = max((machine_type.price_in(market) or 0 for market in machine_type.markets()), default=0)
        if code == "hour_budget":
            used = sum(row.price or 0 for row in self.rows.values())
            limit = self.deployment.hourly_budget or 0
        else:
            used, limit = money.committed, self.deployment.monthly_budget or 0
        amounts: dict[str, float | str] = {"used": used, "limit": limit, "price": price}
        return Cause(code, amounts | {"type": machine_type.name, "currency": self.deployment.currency})
