"""Start nominated workloads as soon as their GPUs are free (rule 5.8).

Called at the beginning of the rounds of a cycle, before any other workload is served: nothing else takes these GPUs.
"""

from __future__ import annotations

from ..index.cluster import Cluster
from ..index.groups import WorkloadGroup
from ..index.nodes import Allocation, WorkerPlacement
from ..placement.fit import may_have_enough_gpus
from ..plan_builder import PlanBuilder
from ..rules.order import GroupHeads
from ..snapshot import GPU, Workload
from .admission import is_still_free, start_beside_hold, try_start
from .serving import guaranteed, nomination_outlives_quota


def start_earlier_nominations(cluster: Cluster, builder: PlanBuilder, waiting: list[WorkloadGroup]) -> None:
    """Start the workloads that earlier plans nominated and whose GPUs are free by now."""
    nominated = [q for q in waiting if q.nominated and any(w.id in cluster.nominations for w in q.members())]
    if not nominated:
        return
    for group, workload, _ in GroupHeads(cluster, nominated, False):
        if _start_on_nominated(cluster, builder, group, workload):
            group.pop(workload)


def _start_on_nominated(cluster: Cluster, builder: PlanBuilder, group: WorkloadGroup, workload: Workload) -> bool:
    nominated = cluster.withdraw_nomination(workload)
    pool = nominated[0].node.pool
    in_quota = nomination_outlives_quota(group, nominated, pool) or guaranteed(cluster, group, pool, len(nominated))
    able = in_quota or group.may_borrow
    if able and is_still_free(nominated, group) and try_start(builder, group, workload, pool, nominated, in_quota):
        return True
    cluster.nominate(workload, group.need, nominated)
    return False


def _must_wait(group: WorkloadGroup, nomination: Allocation) -> bool:
    """Whether all devices of a nomination are in use and no pool has enough others; False is not certain."""
    if not group.need.whole_devices or any(may_have_enough_gpus(pool, group.need) for pool in group.pools):
        return False
    return all(part.node.unused[at] < GPU for part in nomination.parts for at in part.devices)


def start_nominated(cluster: Cluster, builder: PlanBuilder, over_quota: bool) -> None:
    """Start the workloads that this plan nominated and whose GPUs are free by now.

    A workload in quota nowhere may start on its nominated devices in either pass, as in the next plan (I7). On other
    devices it starts only in the over-quota pass (`over_quota`), and only if it does not delay the holder of a hold.
    """
    for workload, group in list(builder.nominated.values()):
        nomination = cluster.nominations.get(workload.id)
        if nomination is None or _must_wait(group, nomination):
            continue
        nominated = cluster.withdraw_nomination(workload)
        if _start(cluster, builder, group, workload, nominated, over_quota):
            del builder.nominated[workload.id]
        else:
            cluster.nominate(workload, group.need, nominated)


def _start(
    cluster: Cluster,
    builder: PlanBuilder,
    group: WorkloadGroup,
    workload: Workload,
    nominated: tuple[WorkerPlacement, ...],
    over_quota: bool,
) -> bool:
    in_quota = [
        pool
        for pool in group.pools
        if nomination_outlives_quota(group, nominated, pool) or guaranteed(cluster, group, pool)
    ]
    if in_quota:
        replaced = builder.preemptors_of_withdrawn
        contested = workload.id in replaced or any(workload.id in names for names in replaced.values())
        # over quota elsewhere, what it replaced, or what replaced it, would replace it (again)
        pools = group.pools if group.may_borrow and not (workload.nomination or contested) else in_quota
        return not over_quota and any(
            try_start(builder, group, workload, pool, nominated, pool in in_quota) for pool in pools
        )
    if not group.may_borrow:
        return False
    if over_quota:
        return any(start_beside_hold(builder, group, workload, pool, nominated, True) for pool in group.pools)
    own = nominated[0].node.pool
    return is_still_free(nominated, group) and try_start(builder, group, workload, own, nominated, False)
