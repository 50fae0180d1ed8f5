"""The simulated cluster: its nodes, pools, profiles and policies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..autoscale.deployment import Deployment
from ..engine.snapshot import GPU, Node, Pool, Profile, QuotaLine, Settings, TeamQuota
from ..policy import Document
from .trace import Arrival


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Pools, nodes, profiles and policies, named for the report; `deployments` launch machines for autoscaled pools."""

    name: str
    pools: tuple[Pool, ...]
    nodes: tuple[Node, ...]
    profiles: tuple[Profile, ...]
    policies: tuple[TeamQuota, ...]
    settings: Settings = field(default_factory=Settings)
    deployments: tuple[Deployment, ...] = ()

    @property
    def gpus(self) -> int:
        """Return the milli-GPUs of all nodes that are there from the beginning."""
        return sum(node.gpus for node in self.nodes) * GPU

    def reserved(self) -> dict[str, int]:
        """Return each policy's reservation, in milli-GPUs."""
        return {p.name: sum(line.reserved for line in p.quotas) for p in self.policies}


def of_quotas(
    name: str,
    quotas: Mapping[str, int],
    sizes: Iterable[int],
    *,
    node_gpus: int = 8,
    nodes: int | None = None,
    settings: Settings | None = None,
    grace: float = 60.0,
    starts_with: Sequence[TeamQuota] = (),
    small_first: bool = False,
    reclaim_after: float = 0.0,
) -> SimulatedCluster:
    """Build one pool of equal nodes, a policy with a reservation (in GPUs) per team, and a profile per size (milli).

    `small_first`: smaller profiles rank before larger ones in the pool; else they are all alike. `reclaim_after`:
    seconds that every job waits for free GPUs before any other is evicted for it.
    """
    count = nodes if nodes is not None else math.ceil(sum(quotas.values()) / node_gpus)
    teams = starts_with or tuple(TeamQuota(team, (QuotaLine((), gpus * GPU),)) for team, gpus in sorted(quotas.items()))
    ranks = (tuple(p.name for p in teams),)
    profiles = tuple(
        _profile(size, node_gpus, ranks, grace, reclaim_after) for size in sorted(set(sizes), reverse=True)
    )
    machines = tuple(Node(f"n{at:05}", "gpus", node_gpus) for at in range(count))
    ranked = tuple(profile.name for profile in reversed(profiles)) if small_first else ()
    return SimulatedCluster(
        name, (Pool("gpus", profiles=ranked),), machines, profiles, tuple(teams), settings or Settings()
    )


def profile_name(milli: int) -> str:
    """Return the name of the profile for so many milli-GPUs."""
    return f"gpu{milli / GPU:g}"


def _profile(
    milli: int, node_gpus: int, ranks: tuple[tuple[str, ...], ...], grace: float, reclaim_after: float = 0.0
) -> Profile:
    """Up to a node's GPUs: one worker; more: whole nodes."""
    gpus, workers = milli, 1
    if milli > node_gpus * GPU:
        gpus, workers = node_gpus * GPU, math.ceil(milli / (node_gpus * GPU))
    name = profile_name(milli)
    return Profile(name, gpus, workers, pools=("gpus",), policies=ranks, grace=grace, reclaim_after=reclaim_after)


def of_document(
    name: str,
    document: Document,
    arrivals: Iterable[Arrival],
    *,
    node_gpus: int,
    gpus: int,
    deployments: Sequence[Deployment] = (),
) -> SimulatedCluster:
    """Build a cluster of equal nodes for a policy document; `gpus` is how many all pools together have.

    The pools of `deployments` have no nodes but their machines. Jobs that name no profile get one of the document that
    has their number of GPUs, else one is made for them.
    """
    pools = document.pools or (Pool("gpus"),)
    growing = {machine_type.pool for one in deployments for machine_type in one.types}
    static = [pool for pool in pools if pool.name not in growing]
    sizes = [max(1, round(gpus * part / node_gpus)) for part in _parts(document, static)]
    machines = tuple(
        Node(f"{pool.name}-{at:05}", pool.name, node_gpus)
        for pool, count in zip(static, sizes, strict=True)
        for at in range(count)
    )
    largest = max(
        [node_gpus if static else 0, *(machine_type.gpus for one in deployments for machine_type in one.types)]
    )
    ranks = (tuple(p.name for p in document.policies),)
    known = {p.gpus * p.workers for p in document.profiles}
    wanted = sorted({a.gpus for a in arrivals if not a.profile} - known)
    made = tuple(_profile(milli, max(1, largest), ranks, document.settings.grace) for milli in wanted)
    anywhere = tuple(pool.name for pool in pools)
    made = tuple(Profile(p.name, p.gpus, p.workers, pools=anywhere, policies=p.policies, grace=p.grace) for p in made)
    profiles = (*document.profiles, *made)
    return SimulatedCluster(name, pools, machines, profiles, document.policies, document.settings, tuple(deployments))


def _parts(document: Document, pools: Sequence[Pool]) -> list[float]:
    """Share the GPUs between pools as their sizes in the document say, else evenly."""
    facts = [document.pool_facts[pool.name] for pool in pools if pool.name in document.pool_facts]
    sizes = [one.size or 0 for one in facts]
    total = sum(sizes)
    if len(sizes) != len(pools) or not total:
        return [1 / max(1, len(pools))] * len(pools)
    return [size / total for size in sizes]
