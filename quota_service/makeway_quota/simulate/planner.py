"""Decide in a simulation with the engine: built anew every time, or kept between decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ..control.world.engine_view import as_workload
from ..engine.plan import Plan
from ..engine.schedule import schedule
from ..engine.snapshot import Node, Placed, Placement, Snapshot, TeamQuota
from ..history.durations import Durations
from ..store.records import Workload
from ..values import Place
from .cluster import SimulatedCluster


class ReplayPlanner(Protocol):
    """Turns the store into a plan. `changed` names the workloads that changed since the last call."""

    def show(self, policies: tuple[TeamQuota, ...]) -> None:
        """Take the policies as they are now: with their histories."""

    def show_nodes(self, changed: Sequence[Node], gone: Sequence[str]) -> None:
        """Take nodes that are new or different, and the names of those that are gone."""

    def plan(self, now: float, rows: Mapping[str, Workload], changed: Iterable[str]) -> Plan:
        """Decide once."""

    def snapshot(self, now: float, rows: Iterable[Workload]) -> Snapshot:
        """Return the cluster as it is now, with some workloads."""


class FullPlanner:
    """Builds a snapshot of everything for each decision.

    `durations` are what forecasts are made from: those that the replay learns from.
    """

    def __init__(self, cluster: SimulatedCluster, durations: Durations | None = None) -> None:
        self.cluster = cluster
        self.durations = durations or Durations()
        self.policies = cluster.policies
        self.nodes = {node.name: node for node in cluster.nodes}

    def show(self, policies: tuple[TeamQuota, ...]) -> None:
        """Take the policies as they are now: with their histories."""
        self.policies = policies

    def show_nodes(self, changed: Sequence[Node], gone: Sequence[str]) -> None:
        """Take nodes that are new or different, and the names of those that are gone."""
        self.nodes.update({node.name: node for node in changed})
        for name in gone:
            del self.nodes[name]

    def plan(self, now: float, rows: Mapping[str, Workload], changed: Iterable[str]) -> Plan:
        """Build a snapshot and schedule it."""
        return schedule(self.snapshot(now, rows.values()))

    def snapshot(self, now: float, rows: Iterable[Workload]) -> Snapshot:
        """Return the cluster as it is now, with some workloads."""
        return Snapshot(
            now,
            self.cluster.settings,
            self.cluster.pools,
            tuple(self.nodes.values()),
            self.cluster.profiles,
            self.policies,
            tuple(as_workload(row, placed, self.durations.remaining(row, now)) for row in rows),
        )


def placed(places: Sequence[Place]) -> Placement:
    """Read a placement of the store; the nodes of a simulation are all there."""
    return tuple(Placed(at, p.node, p.devices, p.milli[0] if p.milli else 0) for at, p in enumerate(places))
