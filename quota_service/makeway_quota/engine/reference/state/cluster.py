"""Hold one snapshot as plain allocations and nominations; every number is counted from them when it is needed.

Nothing is kept in step and nothing is remembered: a trial is a copy of the cluster, and an undo is forgetting the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from ...index.devices import UNLIMITED, devices_of, finds_devices, hosts, stand_in
from ...request import Need, may_run, need_of
from ...snapshot import ADMITTED, GPU, LIVE, Node, Placed, Placement, Pool, Profile, Snapshot, TeamQuota, Workload


class WorkerPlacement(NamedTuple):
    """One worker on one node; `devices` are positions on the node, of each of which it takes `milli_per_device`."""

    worker: int
    node: str
    devices: tuple[int, ...]
    milli_per_device: int


class FreeResources(NamedTuple):
    """What is left on a node: milli-GPUs of each device, milli-cores, MiB, pods."""

    devices: list[int]
    cpu: int
    memory: int
    pods: int = UNLIMITED

    @property
    def whole(self) -> int:
        """Count the untouched devices."""
        return self.devices.count(GPU)

    def workers(self, need: Need) -> int:
        """Count the workers of a need that fit."""
        return hosts(need, self.devices, self.whole, self.cpu, self.memory, self.pods)


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a workload holds, or (as a nomination) will hold. `chain` names its team and the departments above it.

    `fresh`: started by this very plan, so it can be withdrawn but not evicted.
    """

    workload: Workload
    need: Need
    pool: str
    parts: tuple[WorkerPlacement, ...]
    amount: int
    chain: tuple[str, ...]
    fresh: bool = False
    shares: tuple[tuple[str, int], ...] = ()
    """Each pool and the milli-GPUs that count there, where the nodes are in several pools."""
    fixed: bool = False
    """Whether it could not restart on its nodes: they are in several pools, or in one that does not serve it."""

    @property
    def pools(self) -> tuple[str, ...]:
        """Return the pools in which it counts."""
        return tuple(pool for pool, _ in self.shares) or (self.pool,)

    def nearest(self, pool: str) -> str:
        """Return the pool in which it stands in the way of a preemptor: the preemptor's, if it counts there."""
        return pool if pool in self.pools else self.pool

    def amount_in(self, pools: Container[str]) -> int:
        """Return the milli-GPUs that count in some pools."""
        return sum(amount for pool, amount in self.shares or ((self.pool, self.amount),) if pool in pools)

    @property
    def id(self) -> str:
        """Return the id of the workload."""
        return self.workload.id

    def on(self, node: str) -> tuple[WorkerPlacement, ...]:
        """Return the parts on one node."""
        return tuple(part for part in self.parts if part.node == node)


class Blocked(NamedTuple):
    """Free resources of a node that a hold keeps free."""

    node: str
    devices: Mapping[int, int]
    cpu: int
    memory: int


FreeResourcesOf = Callable[[str], FreeResources]
"""What is left on a node, by its name: `Cluster.unused`, `.free_later` or `.free`."""


class Cluster:
    """One snapshot, and what a plan has changed in it so far."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, self.now, self.settings = snapshot, snapshot.now, snapshot.settings
        self.profiles: dict[str, Profile] = {p.name: p for p in snapshot.profiles}
        self.policies: dict[str, TeamQuota] = {p.name: p for p in sorted(snapshot.policies, key=lambda p: p.name)}
        self.pools: dict[str, Pool] = {p.name: p for p in sorted(snapshot.pools, key=lambda p: p.name)}
        self.nodes: dict[str, Node] = {n.name: n for n in sorted(snapshot.nodes, key=lambda n: (n.pool, n.name))}
        for node in self.nodes.values():
            self.pools.setdefault(node.pool, Pool(node.pool))
        self.live = {w.id: w for w in sorted(snapshot.workloads, key=lambda w: w.id) if w.state in LIVE}
        self.capacity = {n.name: [0 if d in n.foreign_devices else GPU for d in devices_of(n)] for n in snapshot.nodes}
        self.running: dict[str, Allocation] = {}
        self.terminating = {w.id for w in self.live.values() if w.state == "checkpointing" and not self.is_stuck(w)}
        self.nominations: dict[str, Allocation] = {}
        self.shrunk: set[str] = set()
        """Gangs that gave up workers in this plan: what they keep is in `nominations`, and can be evicted, too."""
        self.blocked: tuple[Blocked, ...] = ()
        self.protection_at: float | None = None
        """The time for which `min_runtime` is read; None: now."""
        self.overfull: set[str] = set()
        """The nodes that show fewer devices than workloads hold there."""
        self._place_running_workloads()
        self._place_foreign_pods()
        self.first = {name: self.unused(name) for name in self.nodes}
        self._keep_nominations()

    def copy(self) -> Cluster:
        """Return a cluster that can be changed without changing this one."""
        other = object.__new__(Cluster)
        other.__dict__.update(self.__dict__)
        other.running, other.nominations = dict(self.running), dict(self.nominations)
        other.terminating, other.shrunk = set(self.terminating), set(self.shrunk)
        return other

    # The snapshot

    def _place_running_workloads(self) -> None:
        """Count all that runs by its request, then place it on its nodes."""
        for workload in self.live.values():
            allocation = self._counted(workload) if workload.state in ADMITTED else None
            if allocation is not None:
                self.running[workload.id] = allocation
        for node in self.nodes.values():
            self._place_on(node)

    def _counted(self, workload: Workload) -> Allocation | None:
        """Return what a workload was started with, in the pools where its nodes are now; it has no parts yet.

        A worker whose node is gone counts with the first of the others, else in the first pool of the profile.
        """
        need, serving = self.need(workload), self.pools_of(workload)
        pools = [self.nodes[placed.node].pool for placed in workload.placement if placed.node in self.nodes]
        first = next(iter([*pools, *serving]), None)
        if first is None:
            return None
        amounts = dict.fromkeys(pools, 0)
        for placed in workload.placement:
            pool = self.nodes[placed.node].pool if placed.node in self.nodes else first
            named = placed.devices and placed.node in self.nodes
            held = placed.milli_per_device * len(placed.devices) if named else need.gpus
            amounts[pool] = amounts.get(pool, 0) + held
        amount = sum(amounts.values()) if workload.placement else need.total
        shares = tuple(amounts.items()) if len(amounts) > 1 else ()
        fixed = bool(shares) or first not in serving
        return Allocation(workload, need, first, (), amount, self.chain(workload.team), False, shares, fixed)

    def _place_on(self, node: Node) -> None:
        """Place what runs on a node: known devices first, then by age on the lowest free ones."""
        here: list[tuple[bool, float, str]] = []
        for allocation in self.running.values():
            placed = [p for p in allocation.workload.placement if p.node == node.name]
            known = all(finds_devices(node, p, allocation.need.gpus) for p in placed)
            if placed:
                here.append((not known, 0.0 if known else allocation.workload.started_at or 0.0, allocation.id))
        for _, _, name in sorted(here):
            allocation = self.running[name]
            mine = [placed for placed in allocation.workload.placement if placed.node == node.name]
            parts = {part.worker: part for part in (*allocation.parts, *self._read(mine, allocation.need))}
            order = [placed.worker for placed in allocation.workload.placement]
            self.running[name] = replace(allocation, parts=tuple(parts[at] for at in order if at in parts))
        if any(unknown for unknown, _, _ in here) and min(self.unused(node.name).devices, default=0) < 0:
            self.overfull.add(node.name)

    def _read(self, placement: Sequence[Placed], need: Need) -> tuple[WorkerPlacement, ...]:
        parts: list[WorkerPlacement] = []
        free_devices: dict[str, list[int]] = {}
        for placed in placement:
            node = self.nodes.get(placed.node)
            if node is None:
                continue
            if finds_devices(node, placed, need.gpus):
                names = list(devices_of(node))
                devices = tuple(names.index(d) for d in placed.devices if d in names)
                parts.append(WorkerPlacement(placed.worker, node.name, devices, placed.milli_per_device))
                continue
            free = free_devices.setdefault(node.name, self.free(node.name).devices)
            parts.append(WorkerPlacement(placed.worker, node.name, *stand_in(node, placed, need, free)))
        return tuple(parts)

    def _place_foreign_pods(self) -> None:
        """Take what foreign pods hold on unknown devices off the free ones, from the last device down."""
        for node in self.nodes.values():
            rest, opened = node.foreign_gpus, self.unused(node.name).devices
            for at in range(len(opened) - 1, -1, -1):
                taken = min(rest, max(0, opened[at]))
                if rest > 0 and (opened[at] == GPU or rest < GPU):
                    self.capacity[node.name][at] -= taken
                    rest -= taken

    def _keep_nominations(self) -> None:
        """Keep the nominations of the snapshot that can still be kept, the oldest workload first."""
        nominees = [w for w in self.live.values() if w.nomination and w.state in ("pending", "checkpointing")]
        nominees = [w for w in nominees if not self.is_stuck(w)]
        for workload in sorted(nominees, key=lambda w: (w.submitted_at, w.id)):
            need = self.need(workload)
            parts = self._read(workload.nomination, need)
            exact = all(len(part.devices) * part.milli_per_device == need.gpus for part in parts)
            up = all(self.usable(part.node) or self._is_back_soon(part) for part in parts)
            pools = {self.nodes[part.node].pool for part in parts}
            up = up and len(pools) == 1 and pools <= set(self.pools_of(workload))
            up = up and all(self.nodes[part.node].sessions or not need.session for part in parts)
            if (
                len(parts) >= max(1, need.min_workers)
                and up
                and exact
                and self.holds_parts(need, parts, self.free_later)
            ):
                self.nominate(workload, parts)

    def _is_back_soon(self, part: WorkerPlacement) -> bool:
        """Whether a node is not ready for less than `stuck_after`, or its devices are about to be free all the same."""
        node = self.nodes[part.node]
        if node.ready or node.cordoned:
            return False
        if node.down_since is not None:
            return self.now < node.down_since + self.settings.stuck_after
        unused, later = self.unused(part.node).devices, self.free_later_without_nominations(part.node).devices
        return any(unused[at] < later[at] for at in part.devices)

    # Facts about the snapshot

    def need(self, workload: Workload) -> Need:
        """Return what a workload requests."""
        return need_of(workload, self.profiles.get(workload.profile))

    def chain(self, team: str) -> tuple[str, ...]:
        """Return the team and its departments, nearest first."""
        result = [team]
        at = self.policies[team].parent if team in self.policies else None
        while at is not None and at in self.policies and at not in result:
            result.append(at)
            at = self.policies[at].parent
        return tuple(result)

    def team(self, name: str) -> TeamQuota:
        """Return a team; one that was deleted reserves nothing and never runs over quota."""
        return self.policies[name] if name in self.policies else TeamQuota(name, weight="None")

    def pools_of(self, workload: Workload) -> tuple[str, ...]:
        """Return the pools that a workload may use, first choice first."""
        return self.serving(workload.profile)

    def serving(self, profile: str) -> tuple[str, ...]:
        """Return the pools that a profile may use, first choice first."""
        known = self.profiles.get(profile)
        names = known.pools if known and known.pools else tuple(sorted(self.pools))
        return tuple(name for name in names if name in self.pools)

    def is_stuck(self, workload: Workload) -> bool:
        """Whether an evicted workload should have ended `stuck_after` ago (rule 5.2)."""
        evicted = workload.state == "checkpointing" and workload.deadline is not None
        return evicted and self.now >= (workload.deadline or 0.0) + self.settings.stuck_after

    def usable(self, node: str) -> bool:
        """Whether a node is ready and not cordoned."""
        return self.nodes[node].ready and not self.nodes[node].cordoned

    def suits(self, node: str, need: Need) -> bool:
        """Whether workers of a need may run on a node at all."""
        return self.usable(node) and may_run(need, self.nodes[node]) and node not in need.avoid

    def nodes_of(self, pool: str) -> list[str]:
        """Return the names of a pool's nodes, in order."""
        return [node.name for node in self.nodes.values() if node.pool == pool]

    def priority(self, workload: Workload) -> int:
        """Return the effective priority: one lower once the job ran for longer than `yields_after`."""
        return workload.priority - (self._yields_from(workload) <= self.now)

    def _yields_from(self, workload: Workload) -> float:
        after = self.settings.yields_after
        if not after or workload.non_preemptible or workload.kind != "job":
            return inf
        if workload.earlier_runtime >= after:
            return -inf
        started = workload.started_at if workload.state in ("starting", "running") else None
        return inf if started is None else started + after - workload.earlier_runtime

    def grace(self, workload: Workload) -> float:
        """Return the seconds that a workload may take to terminate."""
        profile = self.profiles.get(workload.profile)
        return profile.grace if profile and profile.grace is not None else self.settings.grace

    def time_limit(self, workload: Workload) -> float | None:
        """Return the longest time that one attempt may take; None where nothing limits it."""
        profile = self.profiles.get(workload.profile)
        return workload.time_limit if workload.time_limit is not None else profile.time_limit if profile else None

    # What is left on the nodes

    def unused(self, node: str) -> FreeResources:
        """Return what nothing holds now."""
        return self._without(node, self.running.values(), (), now=True)

    def free_later(self, node: str) -> FreeResources:
        """Return what nothing will hold once terminating workloads are gone and nominations and holds are used."""
        return self._without(node, [*self._staying(), *self.nominations.values()], self.blocked)

    def free_later_without_nominations(self, node: str) -> FreeResources:
        """Return what nothing holds once terminating workloads are gone, before it is given to others."""
        return self._without(node, self._staying(), ())

    def _staying(self) -> list[Allocation]:
        return [a for a in self.running.values() if a.id not in self.terminating]

    def free(self, node: str) -> FreeResources:
        """Return what a workload could start on now: unused, and not taken by a nomination or a hold."""
        now, later = self.unused(node), self.free_later(node)
        devices = [min(pair) for pair in zip(now.devices, later.devices, strict=True)]
        if node in self.overfull:
            devices = [max(0, milli) for milli in devices]
        return FreeResources(devices, min(now.cpu, later.cpu), min(now.memory, later.memory), min(now.pods, later.pods))

    def remaining(self, node: str, in_future: bool) -> FreeResources:
        """Return what is free now, or in the future."""
        return self.free_later(node) if in_future else self.free(node)

    def _without(
        self, name: str, allocations: Iterable[Allocation], blocked: Iterable[Blocked], now: bool = False
    ) -> FreeResources:
        """Return what is left of a node; what ended attempts hold is taken off `now`, or where it is stuck."""
        node, devices = self.nodes[name], list(self.capacity[name])
        cpu = node.cpu - node.foreign_cpu if node.cpu else UNLIMITED
        memory = node.memory - node.foreign_memory if node.memory else UNLIMITED
        pods = node.pods - node.foreign_pods if node.pods else UNLIMITED
        host = self.host_of(name)
        for allocation in allocations:
            for part in allocation.parts:
                if part.node in host:
                    pods -= 1
                    cpu -= allocation.need.cpu
                    memory -= allocation.need.memory
                    for at in part.devices if part.node == name else ():
                        devices[at] -= part.milli_per_device
        for on, ended in [(other, ended) for other in host for ended in self.nodes[other].terminating]:
            if now or self.now >= ended.deadline + self.settings.stuck_after:
                cpu, memory, pods = cpu - ended.cpu, memory - ended.memory, pods - ended.pods
                for at in [at for at, device in enumerate(devices_of(node)) if on == name and device in ended.devices]:
                    devices[at] -= ended.milli_per_device
        for block in blocked:
            if block.node in host:
                cpu, memory = cpu - block.cpu, memory - block.memory
                for at, milli in block.devices.items() if block.node == name else ():
                    devices[at] -= milli
        return FreeResources(devices, cpu, memory, pods)

    def host_of(self, node: str) -> tuple[str, ...]:
        """Return the names of the nodes that share a node's CPU, memory and pods, itself included."""
        host = self.nodes[node].host
        return tuple(other.name for other in self.nodes.values() if other.host == host) if host else (node,)

    def pools_beside(self, pool: str) -> tuple[str, ...]:
        """Return the pools with nodes on the hosts of a pool's nodes, other than itself."""
        names = {self.nodes[other].pool for name in self.nodes_of(pool) for other in self.host_of(name)}
        return tuple(sorted(names - {pool}))

    def free_gpus(self, pool: str, in_future: bool, need: Need | None = None) -> int:
        """Return the free milli-GPUs of a pool's usable nodes, now or in the future; of those for a need's kind.

        What an overfull node lacks is not taken off what the others have.
        """
        usable = [node for node in self.nodes_of(pool) if self.usable(node)]
        if need is not None and need.session:
            usable = [node for node in usable if self.nodes[node].sessions]
        devices = [
            (milli, node in self.overfull) for node in usable for milli in self.remaining(node, in_future).devices
        ]
        return sum(max(0, milli) if overfull else milli for milli, overfull in devices)

    def stuck_gpus(self, pool: str) -> int:
        """Return the milli-GPUs of a pool's usable nodes that are held by what does not end."""
        up = {node for node in self.nodes_of(pool) if self.usable(node)}
        late = [a for a in self.running.values() if self.is_stuck(a.workload)]
        evicted = sum(p.milli_per_device * len(p.devices) for a in late for p in a.parts if p.node in up)
        outliving = [pod for name in up for pod in self.nodes[name].terminating]
        return evicted + sum(
            pod.milli_per_device * len(pod.devices)
            for pod in outliving
            if self.now >= pod.deadline + self.settings.stuck_after
        )

    def total_gpus(self, pool: str) -> int:
        """Return the milli-GPUs of a pool's usable nodes, without what foreign pods hold."""
        nodes = [self.nodes[name] for name in self.nodes_of(pool) if self.usable(name)]
        own = [GPU * sum(d not in node.foreign_devices for d in devices_of(node)) for node in nodes]
        return sum(max(0, size - node.foreign_gpus) for size, node in zip(own, nodes, strict=True))

    def holds_parts(self, need: Need, parts: Sequence[WorkerPlacement], free_on: FreeResourcesOf) -> bool:
        """Whether all parts fit together into what is left on their nodes."""
        for name in {part.node for part in parts}:
            here, many = free_on(name), sum(part.node == name for part in parts)
            devices = list(here.devices)
            for part in parts:
                for at in part.devices if part.node == name else ():
                    devices[at] -= part.milli_per_device
            taken = {at for part in parts if part.node == name for at in part.devices}
            cpu, memory = many * need.cpu, many * need.memory
            if any(devices[at] < 0 for at in taken) or (cpu and here.cpu < cpu) or (memory and here.memory < memory):
                return False
            if here.pods < many:
                return False
        return True

    # The changes that a plan is made of

    def allocation(self, workload: Workload, parts: Sequence[WorkerPlacement], fresh: bool = False) -> Allocation:
        """Return the allocation of a workload on these parts."""
        need = self.need(workload)
        pool, chain = self.nodes[parts[0].node].pool, self.chain(workload.team)
        return Allocation(workload, need, pool, tuple(parts), need.gpus * len(parts), chain, fresh)

    def start(self, workload: Workload, parts: Sequence[WorkerPlacement]) -> Allocation:
        """Start a pending workload on these parts now; its workers are numbered from 0."""
        ordered = sorted(parts, key=lambda part: part.worker)
        numbered = [part._replace(worker=at) for at, part in enumerate(ordered)]
        self.running[workload.id] = allocation = self.allocation(workload, numbered, True)
        return allocation

    def widen(self, allocation: Allocation, part: WorkerPlacement) -> Allocation:
        """Add one more worker to a gang that this plan started."""
        amount = allocation.amount + part.milli_per_device * len(part.devices)
        self.running[allocation.id] = wider = replace(allocation, parts=(*allocation.parts, part), amount=amount)
        return wider

    def nominate(self, workload: Workload, parts: Sequence[WorkerPlacement]) -> None:
        """Nominate devices of the future for a workload."""
        self.nominations[workload.id] = self.allocation(workload, parts)

    def shrink(self, workload: Workload, parts: Sequence[WorkerPlacement]) -> None:
        """Nominate a gang that gives up workers to the parts that it keeps; none: it is stopped."""
        self.nominations.pop(workload.id, None)
        self.shrunk.discard(workload.id)
        if parts:
            self.nominate(workload, parts)
            self.shrunk.add(workload.id)

    def placement(self, parts: Iterable[WorkerPlacement]) -> Placement:
        """Return parts as the placement that a plan carries."""
        return tuple(
            Placed(p.worker, p.node, tuple(devices_of(self.nodes[p.node])[at] for at in p.devices), p.milli_per_device)
            for p in parts
        )

    def preemptible(self) -> Iterator[Allocation]:
        """Iterate over the running workloads that may be evicted and are not terminating yet.

        Of a gang that gave up workers in this plan, what it keeps.
        """
        for allocation in self.running.values():
            if allocation.workload.non_preemptible or (allocation.fresh and self._keeps_promise(allocation)):
                continue
            if allocation.id in self.shrunk:
                yield self.nominations[allocation.id]
            elif allocation.id not in self.terminating and allocation.workload.state != "checkpointing":
                yield allocation

    def _keeps_promise(self, start: Allocation) -> bool:
        """Whether a start keeps a nomination, so that no plan withdraws it (rule 5.8).

        A gang that restarts with more than its least number of workers may still give some up.
        """
        return 0 < len(start.workload.nomination) <= start.need.min_workers
