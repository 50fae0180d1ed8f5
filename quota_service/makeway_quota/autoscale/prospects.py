"""Find for each pending workload whether a machine is coming for it, or why none is launched. Pure.

Made of one step's decision and the machines as they are: what the decision counted on and failed since is left out, so
that nothing is said of that work until the next decision. `outlook` answers the same for work that could be submitted.
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
    """What a step decided for the work that waits: `served`, each with its machines, and what no machine is for."""

    served: Mapping[str, tuple[str, ...]]
    unserved: tuple[PendingWork, ...] = ()
    refusals: tuple[LaunchRefusal, ...] = ()


class MachineCount(NamedTuple):
    """The machines of a deployment for some pools that are not over, of at most `limit`."""

    deployment: str
    machines: int
    limit: int


@dataclass(frozen=True, slots=True)
class Coming:
    """Machines are on their way to a workload: `booting` of them have an instance, `ready` ones take work at once.

    `price`: of an hour of all of them, None where one is not known; `at`: when they are probably ready, None where that
    is not known; `late`: that time is over.
    """

    count: MachineCount
    machines: int
    booting: int
    ready: int
    price: int | None
    currency: str
    at: float | None = None
    late: bool = False


class Cause(NamedTuple):
    """Why no machine of a type is launched: a code, with the amounts of it."""

    code: str
    values: Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class NotComing:
    """No machine is launched for a workload. `until`: when it is tried again, None where that is not known."""

    count: MachineCount
    causes: tuple[Cause, ...]
    until: float | None = None


Prospect = Coming | NotComing


@dataclass(frozen=True, slots=True)
class WouldLaunch:
    """Machines would be launched for a workload: their types, one for each; `existing` ones have room for it besides.

    `price`: of an hour of all of them, None where one is not known; `seconds`: until the new ones are probably ready,
    None where that is not known.
    """

    count: MachineCount
    types: tuple[str, ...]
    existing: int
    price: int | None
    currency: str
    seconds: float | None


def outlook(
    deployment: Deployment,
    rows: MachineRows,
    demand: MachineDemand,
    boots: Mapping[str, float],
    now: float,
    *,
    deleting: bool = False,
    others: Sequence[OtherDeployment] = (),
) -> Prospect | WouldLaunch | None:
    """Return what the last workload of the demand can expect of a step that is made now; nothing is launched.

    None where no type is for it, or only other deployments have room for it. `boots` as for `prospects`.
    """
    asked = demand.pending[-1]
    sized = replace(deployment, paused=True) if deleting else deployment
    money = count_money(deployment, rows.machines, rows.closed_spend, now)
    sizing = size(sized, rows.machines, demand, rows.backoffs, money, now, boots, others)
    shared = tuple(row for one in others for row in one.machines)
    places = sizing.served.get(asked.workload, ())
    existing = tuple(one for one in places if isinstance(one, str))
    launches = [sizing.launches[one] for one in places if isinstance(one, int)]
    if not launches:
        served = {asked.workload: existing} if existing else {}
        decision = WaitingDecision(served, sizing.unserved, sizing.refusals)
        told = prospects(deployment, rows.machines, decision, money, boots, now, deleting=deleting, shared=shared)
        return told.get(asked.workload)
    live = {row.id: row for row in rows.machines if not row.finished}
    there = {row.id: row for row in shared} | live
    known = [*(one.price for one in launches), *(there[name].price for name in existing)]
    prices = [price for price in known if price is not None]
    took = [boots[one.type] for one in launches if one.type in boots]
    return WouldLaunch(
        _Counts(deployment, live).of(asked.pools),
        tuple(one.type for one in launches),
        len(existing),
        sum(prices) if len(prices) == len(places) else None,
        deployment.currency,
        max(took) if len(took) == len(launches) else None,
    )


def prospects(
    deployment: Deployment,
    machines: Iterable[Machine],
    decision: WaitingDecision,
    money: Money | None,
    boots: Mapping[str, float],
    now: float,
    *,
    deleting: bool = False,
    shared: Iterable[Machine] = (),
) -> dict[str, Prospect]:
    """Return what is known of each pending workload, by id. `boots`: how long a boot takes, by type, where known.

    `shared`: machines of other deployments that the decision counted; work that only they are for is left out, as its
    prospects are those of the others. Workloads of one shape without a machine share one prospect, but for those whose
    room will be free soon. Work that no type is for is left out.
    """
    rows = {row.id: row for row in machines if not row.finished}
    counts = _Counts(deployment, rows)
    result: dict[str, Prospect] = {}
    every = {row.id: row for row in shared if not row.finished} | rows
    for id, names in decision.served.items():
        own = [every[name] for name in names if name in every]
        mine = any(name in rows for name in names)
        if mine and len(own) == len(names) and all(map(_comes, own)):
            result[id] = _coming(own, deployment, counts, boots, now)
    refused: dict[str, list[LaunchRefusal]] = {}
    for one in decision.refusals:
        refused.setdefault(one.workload, []).append(one)
    alike: dict[tuple[object, ...], Prospect | None] = {}
    causes = _Causes(deployment, rows, money, deleting, Counter(row.type for row in rows.values()))
    for work in decision.unserved:
        own_refusals = refused.get(work.workload, ())
        key = work.shape, any(one.code == "soon_free" for one in own_refusals)
        if key not in alike:
            alike[key] = _not_coming(work, own_refusals, counts, causes)
        prospect = alike[key]
        if prospect is not None:
            result[work.workload] = prospect
    return result


def same_prospects(before: Mapping[str, Prospect], after: Mapping[str, Prospect]) -> bool:
    """Whether all workloads can still expect the same; those that do not wait any more do not count."""
    same: set[tuple[int, int]] = set()
    """The pairs of objects that are known to be equal: thousands of workloads share one"""
    for id, item in after.items():
        pair = builtins.id(before.get(id)), builtins.id(item)
        if pair not in same:
            if before.get(id) != item:
                return False
            same.add(pair)
    return True


def usual_boots(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the time within which nine of ten boots ended, by type. `seconds`: how long each of them took."""
    return {name: sorted(item)[(9 * len(item) - 1) // 10] for name, item in seconds.items() if item}


def _comes(machine: Machine) -> bool:
    return machine.starting or machine.state == "ready" or (machine.drain in CANCELLABLE and machine.deadline is None)


class _Counts:
    """How many machines there are for some pools, and may be."""

    def __init__(self, deployment: Deployment, rows: Mapping[str, Machine]) -> None:
        self._deployment = deployment
        self._rows = rows
        self._known: dict[tuple[str, ...], MachineCount] = {}

    def of(self, pools: tuple[str, ...]) -> MachineCount:
        if pools not in self._known:
            types = {
                machine_type.name: machine_type.max_machines
                for machine_type in self._deployment.types
                if machine_type.pool in pools
            }
            many = sum(row.type in types for row in self._rows.values())
            maximum = min(self._deployment.max_machines, sum(types.values()))
            self._known[pools] = MachineCount(self._deployment.title or self._deployment.name, many, maximum)
        return self._known[pools]


def _coming(
    own: Sequence[Machine], deployment: Deployment, counts: _Counts, boots: Mapping[str, float], now: float
) -> Coming:
    prices = [row.price for row in own if row.price is not None]
    starting = [row for row in own if row.starting]
    ours = [row for row in starting if row.deployment == deployment.name]
    ends = [row.requested_at + boots[row.type] for row in ours if row.type in boots]
    at = max(ends) if ends and len(ends) == len(starting) else None
    late = at is not None and at <= now
    return Coming(
        counts.of(tuple(dict.fromkeys(row.pool for row in own))),
        len(own),
        sum(row.state in ("booting", "joining") for row in own),
        len(own) - len(starting),
        sum(prices) if len(prices) == len(own) else None,
        deployment.currency,
        None if late else at,
        late,
    )


def _not_coming(
    work: PendingWork, refusals: Iterable[LaunchRefusal], counts: _Counts, causes: _Causes
) -> NotComing | None:
    types = [machine_type for machine_type in causes.deployment.types if machine_type.pool in work.pools]
    if not types:
        return None
    if not any(fits_on(machine_type, work) for machine_type in types):
        return NotComing(counts.of(work.pools), (causes.too_small(types),))
    told = {(one.type, one.code): one for one in refusals if one.code != "too_small"}
    ends = [one.until for one in refusals if one.until is not None]
    result = tuple(causes.of(one, work) for one in told.values())
    return NotComing(counts.of(work.pools), tuple(_different(result)), min(ends, default=None))


def _different(causes: Iterable[Cause]) -> list[Cause]:
    """Return causes without those that are said already, such as the pause of the deployment for each type."""
    result: list[Cause] = []
    for cause in causes:
        if cause not in result:
            result.append(cause)
    return result


@dataclass(slots=True)
class _Causes:
    """Adds the amounts to the code of a refusal."""

    deployment: Deployment
    rows: Mapping[str, Machine]
    money: Money | None
    deleting: bool
    of_type: Counter[str]
    """How many of the machines there are of each type"""

    def too_small(self, types: Sequence[MachineType]) -> Cause:
        largest = max(0 if machine_type.cpu_only else machine_type.gpus for machine_type in types)
        return Cause("too_small", {"deployment": self._name, "gpus": float(largest)})

    def of(self, refusal: LaunchRefusal, work: PendingWork) -> Cause:
        code, machine_type = refusal.code, self.deployment.type(refusal.type)
        if code == "paused":
            return Cause("deleting" if self.deleting else "paused", {"deployment": self._name})
        if code in ("throttled", "denied"):
            return Cause(code, {})
        if machine_type is None:
            return Cause(code, {"type": refusal.type})
        if code == "max_machines":
            return self._limit(machine_type, work)
        if code in ("hour_budget", "month_budget") and self.money is not None:
            return self._budget(code, machine_type, self.money)
        return Cause(code, {"type": machine_type.name, "deployment": self._name})

    @property
    def _name(self) -> str:
        return self.deployment.title or self.deployment.name

    def _limit(self, machine_type: MachineType, work: PendingWork) -> Cause:
        of_type = self.of_type[machine_type.name]
        if machine_type.max_machines <= self.deployment.max_machines and of_type >= min(
            machine_type.max_machines, len(self.rows)
        ):
            values: dict[str, float | str] = {
                "type": machine_type.name,
                "limit": machine_type.max_machines,
                "machines": of_type,
            }
        else:
            values = {"type": "", "limit": self.deployment.max_machines, "machines": len(self.rows)}
        return Cause("max_machines", values | {"deployment": self._name, "workers": work.workers})

    def _budget(self, code: str, machine_type: MachineType, money: Money) -> Cause:
        price = max((machine_type.price_in(market) or 0 for market in machine_type.markets()), default=0)
        if code == "hour_budget":
            used = sum(row.price or 0 for row in self.rows.values())
            limit = self.deployment.hourly_budget or 0
        else:
            used, limit = money.committed, self.deployment.monthly_budget or 0
        amounts: dict[str, float | str] = {"used": used, "limit": limit, "price": price}
        return Cause(code, amounts | {"type": machine_type.name, "currency": self.deployment.currency})
