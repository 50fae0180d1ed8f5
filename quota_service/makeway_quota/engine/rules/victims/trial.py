"""Evict victims on trial: in the cluster, but not yet in the plan."""

from __future__ import annotations

from collections.abc import Iterable

from ...index.devices import hosts
from ...index.nodes import NodeState, WorkerPlacement, nodes_of
from ...placement.fit import find_placement, within_limits
from ...request import Need
from ...snapshot import GPU
from .preemptor import Preemptor
from .sets import Victim, Victims


def evict(preemptor: Preemptor, victim: Victim) -> None:
    """Evict a victim; a gang that shrinks is nominated to the part of its placement that it keeps."""
    cluster, allocation = preemptor.cluster, victim.allocation
    if allocation.is_shrunk_gang:
        cluster.withdraw_nomination(allocation.workload)
    else:
        cluster.evict(allocation)
    if victim.kept:
        cluster.shrink(allocation.workload, allocation.need, victim.kept)


def restore(preemptor: Preemptor, victim: Victim) -> None:
    """Undo `evict`."""
    preemptor.cluster.withdraw_nomination(victim.allocation.workload)
    if victim.allocation.is_shrunk_gang:
        preemptor.cluster.nominate_again(victim.allocation)
    else:
        preemptor.cluster.restore(victim.allocation)


def place(preemptor: Preemptor) -> tuple[WorkerPlacement, ...]:
    """Return the preemptor's placement once all terminating work is gone; empty if it has none."""
    if not within_limits(preemptor.cluster, preemptor.account, preemptor.pool, preemptor.milli_gpus, True):
        return ()
    return find_placement(preemptor.pool, preemptor.need, True)


def allowed_without(preemptor: Preemptor, victims: Victims) -> bool:
    """Whether limits, capacity and static quotas still let the preemptor in with these victims gone.

    Only a static quota can change that: of a team that falls below what is kept free for it.
    """
    cluster, pool = preemptor.cluster, preemptor.pool.pool.name
    for line in cluster.ledger.unlent_lines:
        if line.account in preemptor.account.chain and line.quota.covers(pool):
            continue
        gone = sum(
            v.counts_on(line.quota) for v in victims if line.account in cluster.account(v.allocation.workload).chain
        )
        if gone and line.future_usage - line.booting - gone < line.unlent:
            break
    else:
        return True
    for victim in victims:
        evict(preemptor, victim)
    admitted = within_limits(cluster, preemptor.account, preemptor.pool, preemptor.milli_gpus, True)
    for victim in victims:
        restore(preemptor, victim)
    return admitted


class PoolTrial:
    """A pool without some victims, on trial in the cluster itself."""

    booked = True

    def __init__(self, preemptor: Preemptor) -> None:
        self.preemptor = preemptor
        self.gone: dict[str, Victim] = {}
        self.workers = sum(map(self._hosted, preemptor.pool.nodes))
        """The workers of the preemptor that the pool hosts, on each node at most the least number."""

    def _hosted(self, node: NodeState) -> int:
        need = self.preemptor.need
        here = node.pool is self.preemptor.pool and node.suits(need)
        return min(need.min_workers, node.workers(need, True)) if here else 0

    def add(self, victim: Victim) -> None:
        """Evict a victim, in place of an earlier victim of the same allocation."""
        before = self.gone.pop(victim.allocation.workload.id, None)
        self._change(victim, before, victim)
        self.gone[victim.allocation.workload.id] = victim

    def remove(self, victim: Victim) -> None:
        """Undo the eviction of a victim."""
        self._change(victim, self.gone.pop(victim.allocation.workload.id), None)

    def _change(self, victim: Victim, old: Victim | None, new: Victim | None) -> None:
        there = [host_node for node in nodes_of(victim.allocation.parts) for host_node in node.host]
        nodes = list({node.position: node for node in there if node.pool is self.preemptor.pool}.values())
        self.workers -= sum(map(self._hosted, nodes))
        if old is not None:
            restore(self.preemptor, old)
        if new is not None:
            evict(self.preemptor, new)
        self.workers += sum(map(self._hosted, nodes))

    def fits(self) -> bool:
        """Whether the preemptor could start, by nodes, limits, capacity and static quotas."""
        preemptor = self.preemptor
        if self.workers < preemptor.need.min_workers:
            return False
        return within_limits(preemptor.cluster, preemptor.account, preemptor.pool, preemptor.milli_gpus, True)

    def surely_needs(self, victim: Victim) -> bool:
        """Whether the nodes have too little room with a victim kept; False is not certain."""
        need, rest = self.preemptor.need, self.workers
        for node in nodes_of(victim.gone):
            have = self._hosted(node)
            if have and node.pool is self.preemptor.pool:
                rest -= have - min(need.min_workers, _hosted_beside(node, need, victim))
        return rest < need.min_workers

    def fits_without(self, victims: Victims) -> bool:
        """Whether the preemptor could start without exactly these victims."""
        self.become(victims)
        return self.fits()

    def become(self, victims: Iterable[Victim] = ()) -> None:
        """Evict exactly these victims."""
        wanted = {victim.allocation.workload.id: victim for victim in victims}
        for name, victim in list(self.gone.items()):
            if name not in wanted:
                self.remove(victim)
        for name, victim in wanted.items():
            if self.gone.get(name) != victim:
                self.add(victim)


def _hosted_beside(node: NodeState, need: Need, victim: Victim) -> int:
    """Return how many workers a node hosts in the future beside the workers of a victim that is gone there."""
    devices, untouched, cpu, memory = (
        list(node.free_later),
        node.whole_free_later,
        node.cpu_free_later,
        node.memory_free_later,
    )
    pods = node.pods_free_later
    for part in victim.gone:
        if part.node is node:
            for at in part.devices:
                untouched -= devices[at] == GPU
                devices[at] -= part.milli_per_device
            cpu -= victim.allocation.need.cpu
            memory -= victim.allocation.need.memory
            pods -= 1
    return hosts(need, devices, untouched, cpu, memory, pods)
