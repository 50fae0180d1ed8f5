"""Keep CPU and memory for free guaranteed GPUs from work that is never evicted (engine rule 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ...index.devices import UNLIMITED
from ...request import Need, need_of
from ...snapshot import GPU, Workload
from .cluster import Cluster, FreeResources, WorkerPlacement
from .quota import unused

Limit = Callable[[str, int], int]
"""How many of at most so many workers a node may host."""


def spares(cluster: Cluster, pool: str, need: Need, parts: Sequence[WorkerPlacement], in_future: bool) -> bool:
    """Whether the guaranteed GPUs of a pool keep what they need beside workers, now and later, or only `in_future`.

    So do those of the pools with nodes on the same hosts.
    """
    many, cluster = Counter(part.node for part in parts), _without_holds(cluster)
    pools = (pool, *cluster.pools_beside(pool))
    return all(_can_lose(cluster, p, _loss(cluster, p, many, need, at), at) for p in pools for at in {True, in_future})


def limit_of(cluster: Cluster, pool: str, need: Need, in_future: bool) -> Limit:
    """Return the workers that each node may host; those of a gang only where no useful GPU is lost."""
    cluster = _without_holds(cluster)

    def limit(name: str, limit: int) -> int:
        for many in range(min(limit, need.min_workers), 0, -1):
            pools = (pool, *cluster.pools_beside(pool))
            losses = [(p, _loss(cluster, p, {name: many}, need, at), at) for p in pools for at in {True, in_future}]
            if not any(loss for _, loss, _ in losses):
                return many
            if need.min_workers == 1 and all(_can_lose(cluster, *loss) for loss in losses):
                return many
        return 0

    return limit


def room_on_a_new_node(cluster: Cluster, pool: str, need: Need) -> bool:
    """Whether a worker on a new node of an autoscaled pool would leave guaranteed GPUs what they need.

    Where the size of new nodes is not known, the GPUs of the present ones have to be enough.
    """
    known, smallest = cluster.pools[pool], _smallest(cluster, pool, "")
    if smallest is None:
        return True
    if not known.max_nodes:
        return _surplus(cluster, pool, True) >= 0
    node = FreeResources([GPU] * known.node_gpus, known.node_cpu or UNLIMITED, known.node_memory or UNLIMITED)
    before = node.workers(smallest) * smallest.gpus
    after = node._replace(cpu=node.cpu - need.cpu, memory=node.memory - need.memory).workers(smallest) * smallest.gpus
    return before == after or _surplus(cluster, pool, True) + after >= 0


def _without_holds(cluster: Cluster) -> Cluster:
    trial = cluster.copy()
    trial.blocked = ()
    return trial


def _can_lose(cluster: Cluster, pool: str, loss: int, in_future: bool) -> bool:
    return not loss or loss <= _surplus(cluster, pool, in_future)


def _surplus(cluster: Cluster, pool: str, in_future: bool) -> int:
    """Return the useful free milli-GPUs beyond the guaranteed ones."""
    useful = sum(_useful(cluster, name, cluster.remaining(name, in_future)) for name in cluster.nodes_of(pool))
    return useful - unused(cluster, pool)


def _loss(cluster: Cluster, pool: str, many: dict[str, int], need: Need, in_future: bool) -> int:
    """Return the useful milli-GPUs of a pool that are lost with so many workers more on each node."""
    lost = 0
    on_hosts = [(other, count) for node, count in many.items() for other in cluster.host_of(node)]
    for name, count in [(name, count) for name, count in on_hosts if cluster.nodes[name].pool == pool]:
        free = cluster.remaining(name, in_future)
        beside = FreeResources(
            free.devices,
            free.cpu - count * need.cpu,
            free.memory - count * need.memory,
            free.pods - count,
        )
        lost += _useful(cluster, name, free) - _useful(cluster, name, beside)
    return lost


def _useful(cluster: Cluster, name: str, free: FreeResources) -> int:
    """Return the free milli-GPUs of a node that the smallest profile of its pool could use."""
    smallest = _smallest(cluster, cluster.nodes[name].pool, cluster.nodes[name].model)
    return free.workers(smallest) * smallest.gpus if smallest and cluster.usable(name) else 0


def _smallest(cluster: Cluster, pool: str, model: str) -> Need | None:
    """Return the request of the smallest profile with GPUs that runs on a model in a pool."""
    requests = []
    for name, profile in cluster.profiles.items():
        need = need_of(Workload("", "", name), profile)
        if need.gpus and pool in cluster.serving(name) and (not need.models or model in need.models):
            requests.append(((need.total, need.gpus, need.cpu, need.memory, name), need))
    return min(requests, key=lambda item: item[0])[1] if requests else None
