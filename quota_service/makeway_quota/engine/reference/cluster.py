"""Hold one snapshot as plain allocations and nominations; every number is counted from them when it is needed.

Nothing is kept in step and nothing is remembered: a trial is a copy of the cluster, and an undo is forgetting the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from ..index.nodes import UNLIMITED, devices_of, hosts, pick
from ..request import Need, need_of
from ..snapshot import ADMITTED, GPU, LIVE, Node, Placed, Placement, Policy, Pool, Profile, Snapshot, Workload


class Part(NamedTuple):
    """One worker on one node; `devices` are positions on the node, each with `milli` of its GPU."""

    worker: int
    node: str
    devices: tuple[int, ...]
    milli: int


class Left(NamedTuple):
    """What is left on a node: milli-GPUs of each device, milli-cores, MiB."""

    devices: list[int]
    cpu: int
    memory: int

    @property
    def whole(self) -> int:
        """Count the untouched devices."""
        return self.devices.count(GPU)

    def workers(self, need: Need) -> int:
        """Count the workers of a need that fit."""
        return hosts(need, self.devices, self.whole, self.cpu, self.memory)


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a workload holds, or (as a nomination) will hold. `levels` names its policy and the departments above it.

    `fresh`: started by this very plan, so it can be withdrawn but not evicted.
    """

    workload: Workload
    need: Need
    pool: str
    parts: tuple[Part, ...]
    amount: int
    levels: tuple[str, ...]
    fresh: bool = False

    @property
    def id(self) -> str:
        """Return the id of the workload."""
        return self.workload.id

    def on(self, node: str) -> tuple[Part, ...]:
        """Return the parts on one node."""
        return tuple(part for part in self.parts if part.node == node)


class Blocked(NamedTuple):
    """Free resources of a node that a hold keeps free."""

    node: str
    devices: Mapping[int, int]
    cpu: int
    memory: int


LeftOn = Callable[[str], Left]
"""What is left on a node, by its name: `Cluster.open`, `.future` or `.free`."""


class Cluster:
    """One snapshot, and what a plan has changed in it so far."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, self.now, self.settings = snapshot, snapshot.now, snapshot.settings
        self.profiles: dict[str, Profile] = {p.name: p for p in snapshot.profiles}
        self.policies: dict[str, Policy] = {p.name: p for p in sorted(snapshot.policies, key=lambda p: p.name)}
        self.pools: dict[str, Pool] = {p.name: p for p in sorted(snapshot.pools, key=lambda p: p.name)}
        self.nodes: dict[str, Node] = {n.name: n for n in sorted(snapshot.nodes, key=lambda n: (n.pool, n.name))}
        for node in self.nodes.values():
            self.pools.setdefault(node.pool, Pool(node.pool))
        self.live = {w.id: w for w in sorted(snapshot.workloads, key=lambda w: w.id) if w.state in LIVE}
        self.capacity = {n.name: [0 if d in n.foreign_devices else GPU for d in devices_of(n)] for n in snapshot.nodes}
        self.running: dict[str, Allocation] = {}
        self.terminating = {w.id for w in self.live.values() if w.state == "checkpointing" and not self.is_stuck(w)}
        self.nominations: dict[str, Allocation] = {}
        self.blocked: tuple[Blocked, ...] = ()
        self._place_running_workloads()
        self._place_foreign_pods()
        self.first = {name: self.open(name) for name in self.nodes}
        self._keep_nominations()

    def copy(self) -> Cluster:
        """Return a cluster that can be changed without changing this one."""
        other = object.__new__(Cluster)
        other.__dict__.update(self.__dict__)
        other.running, other.nominations = dict(self.running), dict(self.nominations)
        other.terminating = set(self.terminating)
        return other

    # The snapshot

    def _place_running_workloads(self) -> None:
        """Place known devices first, then by age on the lowest free devices where only the node is known."""
        admitted = [w for w in self.live.values() if w.state in ADMITTED]
        vague = {w.id for w in admitted if not all(placed.devices for placed in w.placement)}
        order = sorted(admitted, key=lambda w: (w.id in vague, (w.started_at or 0.0) if w.id in vague else 0.0, w.id))
        for workload in order:
            need, pools = self.need(workload), self.pools_of(workload)
            parts = self._read(workload.placement, need)
            amount = sum(part.milli * len(part.devices) for part in parts) if parts else need.total
            if parts or pools:  # a workload whose node is gone counts in the first pool of its profile
                pool = self.nodes[parts[0].node].pool if parts else pools[0]
                found = Allocation(workload, need, pool, parts, amount, self.levels(workload.policy))
                self.running[workload.id] = found
        self.running = dict(sorted(self.running.items()))

    def _read(self, placement: Placement, need: Need) -> tuple[Part, ...]:
        parts: list[Part] = []
        left: dict[str, list[int]] = {}
        for placed in placement:
            node = self.nodes.get(placed.node)
            if node is None:
                continue
            if placed.devices or not need.gpus:
                names = list(devices_of(node))
                devices = tuple(names.index(d) for d in placed.devices if d in names)
                parts.append(Part(placed.worker, node.name, devices, placed.milli))
                continue
            free = left.setdefault(node.name, self.free(node.name).devices)
            if any(each >= min(need.gpus, GPU) for each in free):
                parts.append(Part(placed.worker, node.name, *pick(need, free)))
        return tuple(parts)

    def _place_foreign_pods(self) -> None:
        """Take what foreign pods hold on unknown devices off the free ones, from the last device down."""
        for node in self.nodes.values():
            rest, opened = node.foreign_gpus, self.open(node.name).devices
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
            exact = all(len(part.devices) * part.milli == need.gpus for part in parts)
            up = all(self.usable(part.node) or self._is_back_soon(part) for part in parts)
            if len(parts) >= max(1, need.least) and up and exact and self.holds_parts(need, parts, self.future):
                self.nominate(workload, parts)

    def _is_back_soon(self, part: Part) -> bool:
        """Whether a node is not ready for less than `stuck_after`, or its devices are about to be free all the same."""
        node = self.nodes[part.node]
        if node.ready or node.cordoned:
            return False
        if node.down_since is not None:
            return self.now < node.down_since + self.settings.stuck_after
        opened, later = self.open(part.node).devices, self.future_without_nominations(part.node).devices
        return any(opened[at] < later[at] for at in part.devices)

    # Facts about the snapshot

    def need(self, workload: Workload) -> Need:
        """Return what a workload requests."""
        return need_of(workload, self.profiles.get(workload.profile))

    def levels(self, policy: str) -> tuple[str, ...]:
        """Return the policy and its departments, nearest first."""
        found = [policy]
        at = self.policies[policy].parent if policy in self.policies else None
        while at is not None and at in self.policies and at not in found:
            found.append(at)
            at = self.policies[at].parent
        return tuple(found)

    def policy(self, name: str) -> Policy:
        """Return a policy; one that was deleted reserves nothing and never runs over quota."""
        return self.policies[name] if name in self.policies else Policy(name, weight="None")

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
        suited = self.usable(node) and (not need.models or self.nodes[node].model in need.models)
        return suited and node not in need.avoid

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
        if workload.ran >= after:
            return -inf
        started = workload.started_at if workload.state in ("starting", "running") else None
        return inf if started is None else started + after - workload.ran

    def grace(self, workload: Workload) -> float:
        """Return the seconds that a workload may take to terminate."""
        profile = self.profiles.get(workload.profile)
        return profile.grace if profile and profile.grace is not None else self.settings.grace

    def time_limit(self, workload: Workload) -> float | None:
        """Return the longest time that one attempt may take; None where nothing limits it."""
        profile = self.profiles.get(workload.profile)
        return workload.time_limit if workload.time_limit is not None else profile.time_limit if profile else None

    # What is left on the nodes

    def open(self, node: str) -> Left:
        """Return what nothing holds now."""
        return self._without(node, self.running.values(), (), now=True)

    def future(self, node: str) -> Left:
        """Return what nothing will hold once terminating workloads are gone and nominations and holds are used."""
        return self._without(node, [*self._staying(), *self.nominations.values()], self.blocked)

    def future_without_nominations(self, node: str) -> Left:
        """Return what nothing holds once terminating workloads are gone, before it is given to others."""
        return self._without(node, self._staying(), ())

    def _staying(self) -> list[Allocation]:
        return [a for a in self.running.values() if a.id not in self.terminating]

    def free(self, node: str) -> Left:
        """Return what a workload could start on now: open, and not spoken for in the future."""
        now, later = self.open(node), self.future(node)
        devices = [min(pair) for pair in zip(now.devices, later.devices, strict=True)]
        return Left(devices, min(now.cpu, later.cpu), min(now.memory, later.memory))

    def left(self, node: str, later: bool) -> Left:
        """Return what is free now, or in the future."""
        return self.future(node) if later else self.free(node)

    def _without(
        self, name: str, allocations: Iterable[Allocation], blocked: Iterable[Blocked], now: bool = False
    ) -> Left:
        """Return what is left of a node; what ended attempts hold is taken off `now`, or where it is stuck."""
        node, devices = self.nodes[name], list(self.capacity[name])
        cpu = node.cpu - node.foreign_cpu if node.cpu else UNLIMITED
        memory = node.memory - node.foreign_memory if node.memory else UNLIMITED
        for allocation in allocations:
            for part in allocation.parts:
                if part.node == name:
                    cpu -= allocation.need.cpu
                    memory -= allocation.need.memory
                    for at in part.devices:
                        devices[at] -= part.milli
        for ended in node.terminating:
            if now or self.now >= ended.deadline + self.settings.stuck_after:
                cpu, memory = cpu - ended.cpu, memory - ended.memory
                for at in [at for at, device in enumerate(devices_of(node)) if device in ended.devices]:
                    devices[at] -= ended.milli
        for each in blocked:
            if each.node == name:
                cpu, memory = cpu - each.cpu, memory - each.memory
                for at, milli in each.devices.items():
                    devices[at] -= milli
        return Left(devices, cpu, memory)

    def free_gpus(self, pool: str, later: bool) -> int:
        """Return the free milli-GPUs of a pool's usable nodes, now or in the future."""
        return sum(sum(self.left(node, later).devices) for node in self.nodes_of(pool) if self.usable(node))

    def total_gpus(self, pool: str) -> int:
        """Return the milli-GPUs of a pool's usable nodes, without what foreign pods hold."""
        nodes = [self.nodes[name] for name in self.nodes_of(pool) if self.usable(name)]
        own = [GPU * sum(d not in node.foreign_devices for d in devices_of(node)) for node in nodes]
        return sum(max(0, size - node.foreign_gpus) for size, node in zip(own, nodes, strict=True))

    def holds_parts(self, need: Need, parts: Sequence[Part], left: LeftOn) -> bool:
        """Whether all parts fit together into what is left on their nodes."""
        for name in {part.node for part in parts}:
            here, many = left(name), sum(part.node == name for part in parts)
            devices = list(here.devices)
            for part in parts:
                for at in part.devices if part.node == name else ():
                    devices[at] -= part.milli
            taken = {at for part in parts if part.node == name for at in part.devices}
            cpu, memory = many * need.cpu, many * need.memory
            if any(devices[at] < 0 for at in taken) or (cpu and here.cpu < cpu) or (memory and here.memory < memory):
                return False
        return True

    # The changes that a plan is made of

    def allocation(self, workload: Workload, parts: Sequence[Part], fresh: bool = False) -> Allocation:
        """Return the allocation of a workload on these parts."""
        need = self.need(workload)
        pool, levels = self.nodes[parts[0].node].pool, self.levels(workload.policy)
        return Allocation(workload, need, pool, tuple(parts), need.gpus * len(parts), levels, fresh)

    def start(self, workload: Workload, parts: Sequence[Part]) -> Allocation:
        """Start a pending workload on these parts now."""
        self.running[workload.id] = found = self.allocation(workload, parts, True)
        return found

    def widen(self, allocation: Allocation, part: Part) -> Allocation:
        """Add one more worker to a gang that this plan started."""
        amount = allocation.amount + part.milli * len(part.devices)
        self.running[allocation.id] = found = replace(allocation, parts=(*allocation.parts, part), amount=amount)
        return found

    def nominate(self, workload: Workload, parts: Sequence[Part]) -> None:
        """Nominate devices of the future for a workload."""
        self.nominations[workload.id] = self.allocation(workload, parts)

    def placement(self, parts: Iterable[Part]) -> Placement:
        """Return parts as the placement that a plan carries."""
        return tuple(
            Placed(p.worker, p.node, tuple(devices_of(self.nodes[p.node])[at] for at in p.devices), p.milli)
            for p in parts
        )

    def preemptible(self, pool: str) -> Iterator[Allocation]:
        """Iterate over the running workloads of a pool that may be evicted and are not terminating yet."""
        for allocation in self.running.values():
            if (
                allocation.pool == pool
                and not allocation.workload.non_preemptible
                and allocation.id not in self.terminating
                and allocation.workload.state != "checkpointing"
            ):
                yield allocation
