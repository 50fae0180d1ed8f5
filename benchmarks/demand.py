"""Measure how long the demand for nodes of an autoscaled pool takes to compute, for many pending jobs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from makeway_quota.engine import GPU, Pool, Profile, QuotaLine, Snapshot, TeamQuota, Workload
from makeway_quota.engine.cycle.demand import find_demand
from makeway_quota.engine.cycle.scaling import scale
from makeway_quota.engine.index.cluster import Cluster
from makeway_quota.engine.index.groups import PendingWorkloads
from makeway_quota.engine.plan_builder import PlanBuilder

from .measure import Measured
from .worlds_at_scale import NOW

JOBS = 6_000
PENDING = 10_000
MAX_NODES = 600
TIMES = 7


def measure() -> Iterator[Measured]:
    """Measure the demand for nodes; one pass over as many workloads is the baseline."""
    world = growing_pool()
    cluster = Cluster(world)
    groups = PendingWorkloads(cluster).begin()

    def demand() -> float:
        builder = PlanBuilder(cluster)
        gc.collect()
        began = time.perf_counter()
        scale(cluster, builder, groups, why=True)
        took = time.perf_counter() - began
        (result,) = builder.scaled
        assert result.nodes == MAX_NODES
        return took

    yield Measured(
        f"the demand of {JOBS} pending jobs for at most {MAX_NODES} nodes",
        "ms",
        [1000 * demand() for _ in range(TIMES)],
        "building the engine's state from a snapshot of the same",
        1000 * min(_timed(lambda: Cluster(world)) for _ in range(3)),
        goal=50.0,
        note="Of a whole cycle this is the part that imagines nodes; trying every one for every job took 3.5 s.",
    )
    yield _work_for_machines()


def _work_for_machines() -> Measured:
    """Measure which of many jobs machines of unknown size could run, with room under every limit."""
    world = growing_pool(PENDING)
    world = replace(world, pools=(Pool("cloud", kind="autoscaled"),))
    cluster = Cluster(world)
    groups = PendingWorkloads(cluster).begin()

    def demand() -> float:
        gc.collect()
        began = time.perf_counter()
        result = find_demand(cluster, groups, True, {})
        took = time.perf_counter() - began
        assert len(result) == PENDING
        return took

    return Measured(
        f"finding which of {PENDING} pending jobs new machines could run",
        "ms",
        [1000 * demand() for _ in range(TIMES)],
        "building the engine's state from a snapshot of the same",
        1000 * min(_timed(lambda: Cluster(world)) for _ in range(3)),
        goal=100.0,
        note="It is part of each cycle where a pool is autoscaled, with and without reasons.",
    )


def growing_pool(jobs: int = JOBS) -> Snapshot:
    """Return an autoscaled pool without nodes, and jobs of 50 teams that would fill more nodes than it may have."""
    names = tuple(f"team{at:02}" for at in range(50))
    policies = tuple(TeamQuota(name, (QuotaLine((), 40 * GPU),)) for name in names)
    sizes = (1, 1, 2, 4, 0.5)
    profiles = tuple(
        Profile(f"f{at}", int(size * GPU), pools=("cloud",), policies=(names,)) for at, size in enumerate(sizes)
    )
    pool = Pool("cloud", kind="autoscaled", max_nodes=MAX_NODES, node_gpus=8)
    work = tuple(
        Workload(f"j{at:05}", names[at % 50], f"f{at % 5}", owner=f"user{at % 7}", submitted_at=NOW - jobs + at)
        for at in range(jobs)
    )
    return Snapshot(NOW, pools=(pool,), profiles=profiles, policies=policies, workloads=work)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
