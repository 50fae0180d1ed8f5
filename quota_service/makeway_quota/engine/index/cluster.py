"""The cluster that a plan is made for, built from a snapshot."""

from __future__ import annotations

from typing import Any

from ..snapshot import Snapshot
from .allocations import build
from .cluster_state import ClusterState
from .nominations import restore_nominations


class Cluster(ClusterState):
    """The state of one cluster, with the allocations and nominations of a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(snapshot)
        self.demand_order: Any = None
        """The pending workloads as the last decision sorted them for the demand, kept for the next one."""
        build(self, snapshot.nodes, snapshot.workloads)
        self.begin()

    def begin(self) -> None:
        """Start a decision: drop what was cached in the last one, and restore the nominations."""
        self.rankings.clear()
        self.answers.clear()
        self.ledger.begin()
        self.capacities.begin()
        for pool in self.pools.values():
            if not self.keeps_bounds:
                pool.bounds.clear()
            pool.begin()
        restore_nominations(self)
