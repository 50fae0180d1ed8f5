"""Define a deployment: the machine types that it may launch, in order, and the money that they may cost.

The values that `document` reads; every part of `autoscale` works on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Literal
from zoneinfo import ZoneInfo

from .machine import MachineTimeouts, Market

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Markets = Literal["on_demand", "spot", "spot_first"]
DAY_MINUTES = 24 * 60
CLUSTER = "kubernetes"
"""The provider whose machines are nodes that the cluster's autoscaler adds"""
REQUEST, PLACEHOLDER = "request", "placeholder"
"""How a cluster is asked for nodes: the setting `provisioning`"""
ATOMIC = "best-effort-atomic-scale-up.autoscaling.x-k8s.io"
"""The class of ProvisioningRequests that any Cluster Autoscaler adds nodes for"""
SCALE_DOWN = 3600.0
"""Seconds that a cluster may take to remove a node that nothing keeps, before an administrator is told"""


@dataclass(frozen=True, slots=True)
class IdleSchedule:
    """Machines that are kept without work on some days, from `start` to `end` in minutes; past midnight if it is
    less."""

    machines: int
    days: tuple[Day, ...] = DAYS
    start: int = 0
    end: int = DAY_MINUTES

    def covers(self, moment: datetime) -> bool:
        """Whether the schedule applies at a local time."""
        minute, today = moment.hour * 60 + moment.minute, moment.weekday()
        if self.start < self.end:
            return DAYS[today] in self.days and self.start <= minute < self.end
        if minute >= self.start:
            return DAYS[today] in self.days
        return minute < self.end and DAYS[today - 1] in self.days


@dataclass(frozen=True, slots=True)
class MachineType:
    """One type of machines of one pool. `gpus` are whole devices, `cpu` thousandths of a core, `memory` MiB.

    Prices are millionths of the currency for an hour, None where they are not known. A spot machine counts at its
    `spot_price`, which is the most that is paid only where its provider has such a limit.
    """

    name: str
    pool: str
    instance_type: str
    gpus: int = 0
    cpu: int = 0
    memory: int = 0
    model: str = ""
    zones: tuple[str, ...] = ("",)
    market: Markets = "on_demand"
    price: int | None = None
    spot_price: int | None = None
    max_machines: int = 1
    min_idle: int = 0
    schedule: tuple[IdleSchedule, ...] = ()
    idle_timeout: float = 600.0
    spin_up_timeout: float = 1200.0
    max_age: float | None = None
    image: str | None = None
    init_script: str = ""
    cpu_only: bool = False
    machine_image: str = ""
    disk: int = 0
    """MiB of the first disk; 0: as large as its machine image says"""
    subnets: Mapping[str, str] = field(default_factory=dict)
    """by zone"""
    security_groups: tuple[str, ...] = ()
    accelerator: str = ""
    """the GPUs that are added to an instance type without any"""

    def price_in(self, market: Market) -> int | None:
        """Return the price of a machine in a market for an hour; None where it is not known."""
        return self.spot_price if market == "spot" else self.price

    def markets(self) -> tuple[Market, ...]:
        """Return the markets to try, in order."""
        if self.market == "spot_first":
            return ("spot", "on_demand")
        return (self.market,)

    def idle_machines(self, now: float, zone: ZoneInfo) -> int:
        """Return how many machines are kept without work at a time in Unix seconds."""
        moment = datetime.fromtimestamp(now, zone)
        return max([self.min_idle, *(one.machines for one in self.schedule if one.covers(moment))])


@dataclass(frozen=True, slots=True)
class MoveRules:
    """When jobs are moved to other machines, so that theirs can be given back; seconds, whole GPUs, and jobs."""

    interval: float = 3600.0
    free_gpus: int = 3
    max_jobs: int = 2


@dataclass(frozen=True, slots=True)
class Deployment:
    """What an administrator lets Makeway launch. Budgets are millionths of the currency, None unlimited."""

    name: str
    provider: str
    types: tuple[MachineType, ...]
    title: str = ""
    currency: str = "EUR"
    hourly_budget: int | None = None
    monthly_budget: int | None = None
    max_machines: int = 10
    paused: bool = False
    timezone: str = "UTC"
    drain_timeout: float = 300.0
    orphan_after: float = 900.0
    poll_interval: float = 15.0
    request_timeout: float = 120.0
    lost_after: float = 120.0
    visibility: float = 300.0
    priority: int = 0
    """before others that launch for the same pools where it is higher"""
    moves: MoveRules | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """what the provider needs besides, such as a region"""
    revision: int = 0
    """the version of its document in the store"""
    credential_set_at: float | None = None
    """when the stored credential was set that its provider logs in with; None without one"""
    can_launch: bool = True
    """whether the service can use its provider; else nothing is launched"""

    @property
    def limited(self) -> bool:
        """Whether money is limited."""
        return self.hourly_budget is not None or self.monthly_budget is not None

    @property
    def runs_sessions(self) -> bool:
        """Whether notebooks start on its machines: those that agents join run jobs only."""
        return self.provider == CLUSTER

    @property
    def location(self) -> tuple[str, ...]:
        """Return where its machines are: the provider, and the region or project in which it lists them."""
        within = {"aws": "region", "gcp": "project"}.get(self.provider)
        value = self.settings.get(within) if within else None
        return (self.provider, value) if value else (self.provider,)

    def type(self, name: str) -> MachineType | None:
        """Return a machine type, None if the document does not name it any more."""
        return next((one for one in self.types if one.name == name), None)

    @property
    def pools(self) -> frozenset[str]:
        """Return the pools that it launches machines for."""
        return frozenset(machine_type.pool for machine_type in self.types)

    @property
    def preference(self) -> tuple[int, float, str]:
        """Return by what deployments for one pool are sorted, the preferred ones first.

        That is `priority`, then the price of a GPU (of a machine, where none has GPUs) of its cheapest type, and last
        the name. A price that is not known comes after all others.
        """
        types = [machine_type for machine_type in self.types if machine_type.gpus] or self.types
        known = [
            (machine_type.price_in(market), max(1, machine_type.gpus))
            for machine_type in types
            for market in machine_type.markets()
        ]
        prices = [price / gpus for price, gpus in known if price is not None]
        return -self.priority, min(prices, default=inf), self.name

    def types_of(self, pool: str) -> tuple[MachineType, ...]:
        """Return the machine types of a pool, the preferred ones first."""
        return tuple(one for one in self.types if one.pool == pool)

    def timeouts(self, name: str) -> MachineTimeouts:
        """Return the time-outs of machines of a type; of one that is not there any more, those of the deployment."""
        result = self.type(name)
        spin_up = result.spin_up_timeout if result else MachineTimeouts().spin_up_timeout
        alarm = SCALE_DOWN if self.provider == CLUSTER else MachineTimeouts().alarm
        return MachineTimeouts(self.request_timeout, spin_up, self.lost_after, self.visibility, alarm=alarm)

    def request(self, machine_type: MachineType, zone: str, market: Market, price: int | None, machine: str) -> str:
        """Return what a provider is asked for to launch a machine: JSON with sorted keys, without a secret.

        It is kept in the row: a document that changes between two calls for one machine changes nothing of them.
        """
        request = {
            "deployment": self.name,
            "machine": machine,
            "provider": self.provider,
            "pool": machine_type.pool,
            "instance": machine_type.instance_type,
            "zone": zone,
            "market": market,
            "max_price": price if market == "spot" else None,
            "gpus": machine_type.gpus,
            "cpu": machine_type.cpu,
            "memory": machine_type.memory,
            "image": machine_type.image,
            "init_script": machine_type.init_script,
            "cpu_only": machine_type.cpu_only,
            "orphan_after": self.orphan_after,
            "machine_image": machine_type.machine_image,
            "disk": machine_type.disk,
            "subnet": machine_type.subnets.get(zone, ""),
            "security_groups": list(machine_type.security_groups),
            "accelerator": machine_type.accelerator,
            "settings": dict(self.settings),
        }
        return json.dumps(request, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def provisioning_class(settings: Mapping[str, str]) -> str:
    """Return the class of the ProvisioningRequests by which a cluster is asked for nodes; "" for placeholders alone."""
    if settings.get("provisioning") != REQUEST:
        return ""
    return settings.get("provisioning_class") or ATOMIC


def provisioning_parameters(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of ProvisioningRequests, which a document writes as NAME=VALUE, NAME=VALUE."""
    pairs = (pair.partition("=") for pair in settings.get("provisioning_parameters", "").split(",") if pair.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}
