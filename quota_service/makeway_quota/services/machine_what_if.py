"""Find what the deployments of machines would do for a request that could be made, and where no notebook can start.

Read from the database, so that every replica answers alike; nothing is launched. Used by offers, sessions and checks of
policies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..autoscale.demand import MachineDemand
from ..autoscale.deployment import Deployment
from ..autoscale.document import read_deployment
from ..autoscale.machine import Machine
from ..autoscale.placement.shared_pools import OtherDeployment
from ..autoscale.prospects import Prospect, WouldLaunch, launch_what_if, p90_boot_seconds
from ..autoscale.step import MachineRows
from ..backends.base import NodeStatus
from ..backends.machines.machine_source import BACKEND
from ..control.machines.cycle_demand import cycle_demand
from ..control.machines.deployment_driver import BOOTS
from ..control.machines.machine_offers import with_machines
from ..engine.plan import Offer
from ..policy import PolicyInvalid
from ..store.records import Workload
from .context import Context

FRESH = 2.0
"""Seconds for which the machines as they were read last will do"""
UNSTEADY: Mapping[str, Any] = {
    "heard_at": None,
    "attempts": None,
    "needed_at": 0.0,
    "version": 0,
    "term": 0,
    "launch_calls": 0,
    "launch_called_at": None,
    "end_called_at": None,
    "missed_lists": 0,
}
"""Fields of machines that change while nothing happens to them, with a value for comparisons"""


@dataclass(frozen=True, slots=True)
class KnownDeployment:
    """A deployment with its machines; `boot_seconds`: how long a boot takes, by type, where known."""

    deployment: Deployment
    deleting: bool
    rows: MachineRows
    boot_seconds: Mapping[str, float]

    def serves(self, pools: Iterable[str]) -> bool:
        """Whether it launches machines for one of some pools."""
        return any(machine_type.pool in pools for machine_type in self.deployment.types)


Known = Mapping[str, KnownDeployment]
"""The deployments by name, in that order"""


class MachineWhatIf:
    """The deployments and their machines as they were read last, for the event loop."""

    def __init__(self, context: Context, cluster_machines: Callable[[], Mapping[str, str]] = dict) -> None:
        """`cluster_machines`: the machines that are nodes of the cluster, by node."""
        self._context, self._cluster_machines = context, cluster_machines
        self._autoscaling_on = BACKEND in context.settings.backends
        self._known: Known = {}
        self._documents: dict[str, Deployment] = {}
        self._read_at = float("-inf")
        self._lock = asyncio.Lock()

    async def read(self) -> Known:
        """Return the deployments, at most FRESH seconds old; the same object while nothing changed but reports."""
        if self._autoscaling_on and time.monotonic() - self._read_at >= FRESH:
            async with self._lock:
                if time.monotonic() - self._read_at >= FRESH:
                    self._known = await self._context.call(self._read)
                    self._read_at = time.monotonic()
        return self._known

    async def without_sessions(self, pools: Iterable[str]) -> list[str]:
        """Return those of some pools in which no notebook can start.

        Either nodes of such a pool take no notebooks, or the pool has no node and its machines join by agents. A pool
        without nodes counts only where no other pool is left: no machine is launched in it for a notebook.
        """
        names, assignment = list(pools), self._context.world.assignment
        result = set(assignment.without_sessions(names))
        known = await self.read()
        empty = set(names).difference(node.pool for node in assignment.nodes)
        agents = set()
        for pool in empty:
            able = [one.deployment.runs_sessions for one in known.values() if one.serves((pool,))]
            if able and not any(able):
                agents.add(pool)
        if result or agents.issuperset(names):
            result |= agents
        return [name for name in names if name in result]

    async def with_machines(self, offer: Offer, now: float) -> tuple[Offer, float]:
        """Return an offer with what machines would do for the request, and the processor time that it took."""
        known, world = await self.read(), self._context.world
        if not self._autoscaling_on:
            return replace(offer, demand=()), 0.0
        rows, nodes = await world.placed(), dict(world.observed.nodes)
        machines = {name: name for name, node in nodes.items() if node.backend == BACKEND}
        machines |= self._cluster_machines()
        return await self._context.run_what_if(_size_for_offer, offer, known, rows, nodes, machines, now)

    def _read(self) -> Known:
        store, result = self._context.store, dict[str, KnownDeployment]()
        documents = self._documents
        self._documents = {}
        for stored in store.deployments.list():
            deployment = documents.get(stored.name)
            if deployment is None or deployment.revision != stored.version:
                try:
                    read = read_deployment(stored.document, stored.name, stored=True)
                except PolicyInvalid:
                    continue  # nothing is launched by it; the loop quarantines it
                deployment = replace(read, revision=stored.version)
            self._documents[stored.name] = deployment
            boot_seconds = _boots(store.machines.machines(stored.name, limit=BOOTS))
            rows = store.machines.read(stored.name)
            result[stored.name] = KnownDeployment(deployment, stored.deleting, rows, boot_seconds)
        return self._known if _compared(result) == _compared(self._known) else result


def _compared(known: Known) -> Mapping[str, KnownDeployment]:
    """Return the deployments without what reports, lists and calls change in rows all the time."""
    return {
        name: replace(one, rows=replace(one.rows, machines=tuple(map(_steady, one.rows.machines))))
        for name, one in known.items()
    }


def _steady(machine: Machine) -> Machine:
    return machine.with_fields(**UNSTEADY)


def _boots(machines: Iterable[Machine]) -> Mapping[str, float]:
    durations: dict[str, list[float]] = {}
    for machine in machines:
        if machine.ready_at is not None:
            durations.setdefault(machine.type, []).append(machine.ready_at - machine.requested_at)
    return p90_boot_seconds(durations)


def _prospects(
    able: Iterable[KnownDeployment], serving: Iterable[KnownDeployment], demand: MachineDemand, now: float
) -> list[Prospect | WouldLaunch | None]:
    """Return what the deployments would do for the request, up to the first one that would launch for it."""
    result: list[Prospect | WouldLaunch | None] = []
    for one in able:
        others = [
            OtherDeployment(other.deployment, other.rows.machines, other.boot_seconds)
            for other in serving
            if other is not one and not other.deleting
        ]
        prospect = launch_what_if(
            one.deployment, one.rows, demand, one.boot_seconds, now, deleting=one.deleting, others=others
        )
        result.append(prospect)
        if isinstance(prospect, WouldLaunch):
            break
    return result


def _size_for_offer(
    offer: Offer,
    known: Known,
    rows: Mapping[str, Workload],
    nodes: Mapping[str, NodeStatus],
    machines: Mapping[str, str],
    now: float,
) -> tuple[Offer, float]:
    """Size each deployment with the request's demand; return the offer and how long that took."""
    began = time.thread_time()
    asked = offer.demand[-1]
    serving = [one for one in known.values() if one.serves(asked.pools)]
    able = [one for one in serving if one.deployment.runs_sessions or not asked.session]
    if serving and not able:
        return replace(offer, demand=()), time.thread_time() - began
    submitted = {one.id: rows[one.id].submitted_at if one.id in rows else now for one in offer.demand}
    cycle = cycle_demand(0.0, offer.demand, nodes, rows.values(), machines, submitted)
    demand = cycle.of(()) or MachineDemand()
    prospects = _prospects(sorted(able, key=lambda one: one.deployment.preference), serving, demand, now)
    return with_machines(offer, asked.pools[0], prospects, now), time.thread_time() - began
