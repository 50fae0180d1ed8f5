"""Count the state of a snapshot before and after a plan by brute force, independently of both engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from makeway_quota.engine import GPU, Node, Placed, Plan, Profile, QuotaLine, Snapshot, TeamQuota, Workload
from makeway_quota.engine.reference.state.cluster import Cluster
from makeway_quota.engine.snapshot import ADMITTED, LIVE, Placement, Terminating

PLENTY = 10**15


@dataclass(slots=True)
class Remaining:
    """What is left on one node."""

    devices: list[int]
    cpu: int
    memory: int
    pods: int = PLENTY
    beside: list[Remaining] = field(default_factory=list)
    """What is left on the other nodes of its host, which lose the same CPU, memory and pods."""

    def fits(self, profile: Profile) -> bool:
        """Whether one more worker fits."""
        enough = self.cpu >= profile.cpu or not profile.cpu
        enough = enough and (self.memory >= profile.memory or not profile.memory) and self.pods > 0
        if profile.gpus >= GPU:
            return enough and self.devices.count(GPU) >= profile.gpus // GPU
        return enough and (not profile.gpus or max(self.devices, default=0) >= profile.gpus)

    def choices(self, profile: Profile) -> Iterator[tuple[int, ...]]:
        """Iterate over the devices that one more worker could take, leaving out what comes to the same."""
        if not self.fits(profile):
            return
        if profile.gpus >= GPU:
            whole = [at for at, milli in enumerate(self.devices) if milli == GPU]
            yield tuple(whole[: profile.gpus // GPU])
        elif profile.gpus:
            yield from {milli: (at,) for at, milli in enumerate(self.devices) if milli >= profile.gpus}.values()
        else:
            yield ()

    def take(self, profile: Profile, devices: Iterable[int], sign: int = 1, milli: int | None = None) -> None:
        """Take one worker's share (-1: return it); `milli`: where it holds more of each device than it requests."""
        for at in devices:
            self.devices[at] -= sign * (min(profile.gpus, GPU) if milli is None else milli)
        for room in (self, *self.beside):
            room.cpu -= sign * profile.cpu
            room.memory -= sign * profile.memory
            room.pods -= sign

    def hold(self, ended: Terminating, devices: Iterable[int]) -> None:
        """Take what an ended attempt still holds."""
        for at in devices:
            self.devices[at] -= ended.milli_per_device
        for room in (self, *self.beside):
            room.cpu -= ended.cpu
            room.memory -= ended.memory
            room.pods -= ended.pods


RemainingByNode = dict[str, Remaining]


class Facts:
    """One snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.nodes = {n.name: n for n in snapshot.nodes}
        self.pools = {p.name: p for p in snapshot.pools}
        self.profiles = {p.name: p for p in snapshot.profiles}
        self.policies = {p.name: p for p in snapshot.policies}
        self.live = {w.id: w for w in snapshot.workloads if w.state in LIVE}
        self.static = any(line.lend is not None for team in snapshot.policies for line in team.quotas)
        reading = Cluster(snapshot)
        self.parts = {(name, p.worker): p for name, held in reading.running.items() for p in held.parts}
        """What each worker holds on its node, as the reference reads it where the node does not show its devices."""
        self.kept = {name: reading.placement(item.parts) for name, item in reading.nominations.items()}
        """The nominations of the snapshot that can be kept."""

    def profile(self, w: Workload) -> Profile:
        return self.profiles[w.profile]

    def least(self, w: Workload) -> int:
        profile = self.profile(w)
        return profile.min_workers or profile.workers

    def request(self, w: Workload) -> int:
        return self.profile(w).gpus * self.least(w)

    def pools_of(self, w: Workload) -> tuple[str, ...]:
        return self.profile(w).pools or tuple(sorted(self.pools))

    def pool(self, placement: Placement) -> str:
        """Return the pool of a placement; of several, the first."""
        return self.nodes[placement[0].node].pool

    def shares(self, w: Workload, placement: Placement) -> dict[str, int]:
        """Return the milli-GPUs of a placement in each pool where its nodes are now."""
        result: dict[str, int] = {}
        for placed in placement:
            pool = self.nodes[placed.node].pool
            item = placed.milli_per_device * len(placed.devices) if placed.devices else self.profile(w).gpus
            result[pool] = result.get(pool, 0) + item
        return result

    def is_fixed(self, w: Workload, placement: Placement) -> bool:
        """Whether a workload could not restart on its nodes, in several pools or in one that does not serve it."""
        pools = {self.nodes[placed.node].pool for placed in placement}
        return len(pools) > 1 or not pools <= set(self.pools_of(w))

    def devices(self, w: Workload, placed: Placed) -> tuple[Sequence[int], int | None]:
        """Return the positions that a worker holds on its node; and the milli-GPUs of each, where it holds more."""
        part = self.parts.get((w.id, placed.worker))
        if part is not None and placed in self.live[w.id].placement:
            return part.devices, part.milli_per_device
        return _positions(self.nodes[placed.node], placed.devices), None

    def family(self, team: str) -> list[TeamQuota]:
        result: list[TeamQuota] = []
        at: str | None = team
        while at is not None:
            result.append(self.policies[at])
            at = self.policies[at].parent
        return result

    def promised(self, team: str, line: QuotaLine) -> int:
        """Return what the nearest lines below a department reserve within one of its lines."""
        total = 0
        for child in self.snapshot.policies:
            if child.parent == team:
                pools = set(line.pools)
                own = [
                    q.reserved
                    for q in child.quotas
                    if q.reserved and (not pools or (q.pools and set(q.pools) <= pools))
                ]
                total += sum(own) if own else self.promised(child.name, line)
        return total

    def may_start(self, w: Workload) -> bool:
        queue = f"{w.team}/{w.profile}"
        return not w.paused and queue not in self.snapshot.paused

    def usable(self, node: str) -> bool:
        return self.nodes[node].ready and not self.nodes[node].cordoned

    def is_late(self, deadline: float) -> bool:
        """Whether what terminates with this deadline is stuck."""
        return self.snapshot.now >= deadline + self.snapshot.settings.stuck_after

    def is_stuck(self, w: Workload) -> bool:
        """Whether an evicted workload is stuck."""
        return w.state == "checkpointing" and w.deadline is not None and self.is_late(w.deadline)

    def rooms(self, held: Iterable[tuple[Workload, Placement]], now: bool = False) -> RemainingByNode:
        """Return what is left on every node beside foreign pods, what these hold, and what is stuck there.

        `now`: also beside what else ended attempts still hold.
        """
        rooms = {
            n.name: Remaining(
                [GPU * (device not in n.foreign_devices) for device in _devices_of(n)],
                n.cpu - n.foreign_cpu if n.cpu else PLENTY,
                n.memory - n.foreign_memory if n.memory else PLENTY,
                n.pods - n.foreign_pods if n.pods else PLENTY,
            )
            for n in self.snapshot.nodes
        }
        for node in self.snapshot.nodes:
            others = [n.name for n in self.snapshot.nodes if node.host and n.host == node.host and n is not node]
            rooms[node.name].beside = [rooms[name] for name in others]
        for w, placement in held:
            for placed in placement:
                devices, milli = self.devices(w, placed)
                rooms[placed.node].take(self.profile(w), devices, milli=milli)
        for node in self.snapshot.nodes:
            for pod in node.terminating:
                if now or self.is_late(pod.deadline):
                    rooms[node.name].hold(pod, _positions(node, pod.devices))
        for node in self.snapshot.nodes:
            rest = node.foreign_gpus
            for at in reversed(range(len(rooms[node.name].devices))):
                taken = min(rest, max(0, rooms[node.name].devices[at]))
                if rest > 0 and (rooms[node.name].devices[at] == GPU or rest < GPU):
                    rooms[node.name].devices[at] -= taken
                    rest -= taken
        return rooms

    def able(self, rooms: RemainingByNode, w: Workload, pool: str) -> list[str]:
        """Return the nodes of a pool where a workload may run."""
        models = self.profile(w).models
        return [
            name
            for name in rooms
            if self.nodes[name].pool == pool
            and self.usable(name)
            and name not in w.avoid
            and (w.kind != "session" or self.nodes[name].sessions)
            and (not models or self.nodes[name].model in models)
        ]

    def workers(self, rooms: RemainingByNode, w: Workload, pool: str) -> int:
        """Return how many workers fit into a pool, all of one kind."""
        profile, count = self.profile(w), 0
        for name in self.able(rooms, w, pool):
            room = Remaining(list(rooms[name].devices), rooms[name].cpu, rooms[name].memory, rooms[name].pods)
            while count < 100 and room.fits(profile):
                remaining = room.devices
                best = [at for at, milli in enumerate(remaining) if milli >= min(profile.gpus, GPU)]
                best.sort(key=lambda at: remaining[at])
                many = profile.gpus // GPU if profile.gpus >= GPU else bool(profile.gpus)
                whole = [at for at in best if remaining[at] == GPU] if profile.gpus >= GPU else best
                room.take(profile, whole[:many])
                count += 1
        return count

    def all_fit(self, rooms: RemainingByNode, asking: list[tuple[Workload, str]], steps: int = 20_000) -> bool:
        """Whether all of these fit at once, by exhaustive search; False if that takes too long."""
        workers = [(w, self.profile(w), pool) for w, pool in asking for _ in range(self.least(w))]
        workers.sort(key=lambda each: -each[1].gpus)
        budget = [steps]

        def place(at: int) -> bool:
            if at == len(workers):
                return True
            w, profile, pool = workers[at]
            for name in self.able(rooms, w, pool):
                for devices in rooms[name].choices(profile):
                    budget[0] -= 1
                    if budget[0] < 0:
                        return False
                    rooms[name].take(profile, devices)
                    if place(at + 1):
                        return True
                    rooms[name].take(profile, devices, -1)
            return False

        return place(0)


def _devices_of(node: Node) -> Sequence[int]:
    return node.devices or range(node.first_device, node.first_device + node.gpus)


def _positions(node: Node, devices: Iterable[int]) -> list[int]:
    """Return the positions of those devices that a node shows."""
    shown = list(_devices_of(node))
    return [shown.index(device) for device in devices if device in shown]


def amount(facts: Facts, w: Workload, placement: Placement) -> int:
    """Return the milli-GPUs of a placement."""
    return sum(facts.shares(w, placement).values())


@dataclass(slots=True)
class State:
    """The allocations once a plan is applied and all terminating work is gone; `now`: before it is."""

    facts: Facts
    held: dict[str, tuple[Workload, Placement]] = field(default_factory=dict)
    now: bool = False
    leaves: dict[str, Placement] = field(default_factory=dict)
    """Where these hold GPUs until they move; what a line covers of both places counts once."""

    def covered(self, name: str, line: QuotaLine) -> int:
        """Count what a line covers of one workload."""
        w, placement = self.held[name]
        places = [self.facts.shares(w, item) for item in (placement, self.leaves.get(name)) if item]
        return max((sum(n for pool, n in item.items() if line.covers(pool)) for item in places), default=0)

    def usage(self, team: str, line: QuotaLine, guaranteed: bool = False) -> int:
        """Count what a line covers."""
        result = 0
        for name, (w, _) in self.held.items():
            names = {team.name for team in self.facts.family(w.team)}
            if team in names and (w.non_preemptible or not guaranteed):
                result += self.covered(name, line)
        return result

    def usage_beyond(self, team: str, line: QuotaLine, guaranteed: bool = False) -> int:
        """Count what a line covers of work without a reserving line of its own below that."""
        result = 0
        for name, (w, placement) in self.held.items():
            names = [team.name for team in self.facts.family(w.team)]
            pools = self.facts.shares(w, placement)
            if team in names and (w.non_preemptible or not guaranteed):
                below = self.facts.family(w.team)[: names.index(team)]
                if not any(q.reserved and q.covers(pool) for team in below for q in team.quotas for pool in pools):
                    result += self.covered(name, line)
        return result

    def in_pool(self, pool: str) -> int:
        """Count what runs in a pool."""
        return sum(self.facts.shares(w, place).get(pool, 0) for w, place in self.held.values())

    def without_awaiting(self) -> State:
        """Return the state without work that waits for nodes which boot: it makes no work a candidate."""
        nodes = self.facts.nodes
        held = {
            name: (w, place)
            for name, (w, place) in self.held.items()
            if w.placement or not any(placed.node in nodes and nodes[placed.node].boots for placed in place)
        }
        return State(self.facts, held, self.now, leaves=self.leaves)

    def unplanned(self) -> State:
        """Return the state without starts, moves and nominations: what held its devices before the plan, too."""
        held = {}
        for name, (w, placement) in self.held.items():
            before = {(placed.node, placed.devices) for placed in w.placement}
            if kept := tuple(placed for placed in placement if (placed.node, placed.devices) in before):
                held[name] = w, kept
        return State(self.facts, held, self.now)

    def rooms(self, without: Iterable[str] = ()) -> RemainingByNode:
        """Return what is left on the nodes."""
        gone = set(without)
        return self.facts.rooms((item for name, item in self.held.items() if name not in gone), self.now)

    def admits(self, w: Workload, pool: str, request: int) -> bool:
        """Whether limits and the pool's capacity have room for a request."""
        for team in self.facts.family(w.team):
            for line in team.quotas:
                limit = line.limit if request and line.covers(pool) else None
                if limit is not None and self.usage(team.name, line) + request > limit:
                    return False
        capacity = self.facts.pools[pool].capacity
        return capacity is None or not request or self.in_pool(pool) + request <= capacity

    def guarantor(self, team: str, pool: str) -> str | None:
        """Return the nearest level that reserves in a pool."""
        for item in self.facts.family(team):
            if any(line.reserved and line.covers(pool) for line in item.quotas):
                return item.name
        return None


def future(snapshot: Snapshot, plan: Plan) -> State:
    """Return the state after a plan, once all terminating work is gone and every nomination has started."""
    facts = Facts(snapshot)
    state = State(facts)
    ending = {id for id in plan.terminating if not facts.is_stuck(facts.live[id])}
    gone = {e.id for e in plan.evict} | {m.id for m in plan.move} | ending
    for w in facts.live.values():
        if w.state in ADMITTED and w.id not in gone and w.placement:
            state.held[w.id] = w, w.placement
        elif w.state == "checkpointing" and w.id in facts.kept:
            state.held[w.id] = w, facts.kept[w.id]
    for start in plan.start:
        state.held[start.id] = facts.live[start.id], start.placement
    for move in plan.move:
        state.held[move.id] = facts.live[move.id], move.to
    for waiting in plan.pending:
        if place := waiting.nomination or waiting.awaits:
            state.held[waiting.id] = facts.live[waiting.id], place
    return state
