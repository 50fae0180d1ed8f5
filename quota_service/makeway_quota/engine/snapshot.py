"""The engine's input: one snapshot of pools, nodes, profiles, teams and workloads.

All values are frozen. GPUs are milli-GPUs (1000 = one device), CPU is milli-cores, memory is MiB,
times are seconds since the epoch, durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GPU = 1000
"""Milli-GPUs in one whole device."""

Kind = Literal["session", "job"]
State = Literal["pending", "starting", "running", "checkpointing", "succeeded", "failed", "cancelled", "stopped"]
Weight = Literal["None", "Lowest", "Low", "Medium", "High"]

Strategy = Literal["pack", "spread", "fill"]
"""Where work goes among the nodes of a pool with room: where free GPUs stay useful, to the emptiest, to the fullest"""

WEIGHTS: Mapping[Weight, int] = {"None": 0, "Lowest": 0, "Low": 1, "Medium": 2, "High": 3}
PRIORITIES: Mapping[str, int] = {"low": -1, "normal": 0, "high": 1}
ADMITTED: frozenset[str] = frozenset({"starting", "running", "checkpointing"})
"""States in which a workload holds GPUs."""
STARTING: State = "starting"
"""The state of an attempt that has not run yet, so that an eviction loses nothing of it."""
NEVER_RAN = -(1 << 30)
"""Lower than the priority of every team."""
LIVE: frozenset[str] = ADMITTED | {"pending"}
"""States that count; finished workloads may be in a snapshot and are ignored."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The administrator's settings for all pools.

    A job that ran for `yields_after` in all counts one priority lower from then on (0: never).
    What terminates for `stuck_after` beyond its deadline is stuck: its GPUs count as gone until they are free.
    """

    consolidation: bool = True
    victim_order: Literal["newest", "cheapest"] = "newest"
    starvation_after: float = 86_400.0
    history_half_life: float = 0.0
    user_fairness: bool = True
    fair_share: Literal["order", "reclaim"] = "order"
    in_team_preemption: bool = True
    grace: float = 30.0
    yields_after: float = 0.0
    stuck_after: float = 60.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices of one kind, and the order of profiles on them.

    `profiles` is the rank in the pool, best first; a profile that is not named ranks after all that are.
    The `node_*` fields, `max_nodes` and `booting` only matter where `kind` is `autoscaled`; without `max_nodes`, the
    size of its machines is not known. `sessions` False: its new machines run jobs only.
    """

    name: str
    resource: str = "nvidia.com/gpu"
    capacity: int | None = None
    kind: Literal["static", "autoscaled"] = "static"
    strategy: Strategy = "pack"
    profiles: tuple[str, ...] = ()
    consolidation: bool = True
    max_nodes: int = 0
    booting: int = 0
    node_gpus: int = 0
    node_cpu: int = 0
    node_memory: int = 0
    sessions: bool = True


@dataclass(frozen=True, slots=True)
class Terminating:
    """What a pod or process holds on its node that outlives its workload's attempt, until `deadline` as planned.

    `devices` are those that the attempt was planned on, with `milli_per_device`; `pods` is how many pods it counts as.
    """

    workload: str
    devices: tuple[int, ...] = ()
    milli_per_device: int = GPU
    cpu: int = 0
    memory: int = 0
    deadline: float = 0.0
    pods: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `gpus` counts devices; `foreign_*` is what pods outside Makeway hold.

    `devices` names the indices a backend hands out; without it only their number counts, from `first_device` on.
    `foreign_devices` are those that are known to be taken, `foreign_gpus` (milli) what is taken on top of them, on
    unknown devices.
    A node with `cpu` or `memory` 0 does not limit it. `model` names its kind of GPU.
    `pods` is how many pods it runs at most (0: they are not limited), `foreign_pods` how many of these are not workers.
    `terminating` is what ended attempts still hold there; `down_since` when the node was last ready, if that is known.
    Nodes with the same `host` ("": none) are one machine, with a node for each kind of its devices, each in another
    pool. They share its CPU, memory and pods: each gives all that the machine has, and foreign pods hold there, and its
    own `terminating`.
    `sessions` False: it runs jobs only, as the nodes of a second backend do.
    `ready_at` when one that is not ready yet will probably be, as its machine boots: work in quota waits for it. It is
    shown for no longer than a boot may take.
    """

    name: str
    pool: str
    gpus: int
    cpu: int = 0
    memory: int = 0
    ready: bool = True
    cordoned: bool = False
    devices: tuple[int, ...] = ()
    foreign_devices: tuple[int, ...] = ()
    foreign_gpus: int = 0
    foreign_cpu: int = 0
    foreign_memory: int = 0
    model: str = ""
    terminating: tuple[Terminating, ...] = ()
    down_since: float | None = None
    pods: int = 0
    foreign_pods: int = 0
    host: str = ""
    first_device: int = 0
    sessions: bool = True
    ready_at: float | None = None

    @property
    def boots(self) -> bool:
        """Whether it will be ready at a known time, and takes work then."""
        return self.ready_at is not None and not self.ready and not self.cordoned


@dataclass(frozen=True, slots=True)
class Profile:
    """The request of one workload. `gpus` is per worker; below 1000 it is a share of one device.

    `pools` is the pool precedence; `policies` the policy rank: each inner tuple shares one rank.
    `models` names the GPU models that suit (none: all).
    """

    name: str
    gpus: int
    workers: int = 1
    min_workers: int | None = None
    cpu: int = 0
    memory: int = 0
    pools: tuple[str, ...] = ()
    policies: tuple[tuple[str, ...], ...] = ()
    min_runtime: float = 0.0
    reclaim_after: float = 0.0
    grace: float | None = None
    time_limit: float | None = None
    models: tuple[str, ...] = ()

    def reclaim_delay(self, kind: Kind) -> float:
        """Return how long work waits for free GPUs before it evicts others (rule 5.8); sessions do not."""
        return 0.0 if kind == "session" else self.reclaim_after


@dataclass(frozen=True, slots=True)
class QuotaLine:
    """A reservation and a limit over some pools (none named: all). `lend` None: all may be lent."""

    pools: tuple[str, ...] = ()
    reserved: int = 0
    limit: int | None = None
    lend: int | None = None

    def covers(self, pool: str) -> bool:
        """Whether the line counts what runs in `pool`."""
        return not self.pools or pool in self.pools


@dataclass(frozen=True, slots=True)
class TeamQuota:
    """The quota of one team, user or activity: an entry of `policies` in the policy document.

    `history` is its past over-quota use, in milli-GPUs: the average, in which use halves in weight every
    `history_half_life`. Constant use gives a history equal to it.
    """

    name: str
    quotas: tuple[QuotaLine, ...] = ()
    weight: Weight = "Medium"
    priority: int = 0
    parent: str | None = None
    history: int = 0
    title: str = ""

    @property
    def label(self) -> str:
        """Return the title, else the name."""
        return self.title or self.name


@dataclass(frozen=True, slots=True)
class Placed:
    """One worker on one node: `devices` are indices, of each of which the worker holds `milli_per_device`.

    Empty `devices` for a worker with GPUs means that the backend does not know them; the engine then counts
    it on the lowest devices that are free.
    """

    worker: int
    node: str
    devices: tuple[int, ...] = ()
    milli_per_device: int = GPU


Placement = tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A session or a job.

    `evicted_for` is set while `checkpointing`: the workload that it was evicted for.
    `nomination` is where a `pending` workload will start (from `Waiting.nomination`), or where a
    `checkpointing` one will restart (from `Move.to`): those GPUs are held for it.
    `gpus`, `workers`, `min_workers`, `cpu`, `memory` and `time_limit` override the profile's.
    `failed_node` is the node it was lost on, if that is why it is pending again.
    `expected` is how many seconds its present attempt takes, a low estimate from what such work took
    before; it only serves forecasts.
    `earlier_runtime` is how many seconds its earlier attempts took together.
    `avoid` names nodes that it is not placed on, because it was lost there repeatedly.
    `preemptible` None means the default of its kind: jobs are, sessions are not.
    """

    id: str
    team: str
    profile: str
    owner: str = ""
    kind: Kind = "job"
    priority: int = 0
    preemptible: bool | None = None
    submitted_at: float = 0.0
    state: State = "pending"
    started_at: float | None = None
    placement: Placement = ()
    attempt: int = 1
    last_checkpoint_at: float | None = None
    evicted_for: str | None = None
    deadline: float | None = None
    nomination: Placement = ()
    paused: bool = False
    failed_node: str | None = None
    gpus: int | None = None
    workers: int | None = None
    min_workers: int | None = None
    cpu: int | None = None
    memory: int | None = None
    time_limit: float | None = None
    expected: float | None = None
    earlier_runtime: float = 0.0
    avoid: tuple[str, ...] = ()

    @property
    def running_since(self) -> float | None:
        """Return when its present attempt started; None while it is pending, whenever an earlier one started."""
        return None if self.state == "pending" else self.started_at

    @property
    def has_run(self) -> bool:
        """Whether an eviction could lose anything of its present attempt."""
        return self.state != STARTING

    def protected_with(self, priority: int) -> int:
        """Return its team's `priority` as it protects it (rule 5.3): what has not run yet loses nothing."""
        return NEVER_RAN if self.state == STARTING else priority

    @property
    def non_preemptible(self) -> bool:
        """Whether the workload is never a victim, and so only runs within the reservation."""
        return not self.preemptible if self.preemptible is not None else self.kind == "session"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The input of one decision. `paused` names queues (`team/profile`) that start nothing for now."""

    now: float
    settings: Settings = field(default_factory=Settings)
    pools: tuple[Pool, ...] = ()
    nodes: tuple[Node, ...] = ()
    profiles: tuple[Profile, ...] = ()
    policies: tuple[TeamQuota, ...] = ()
    workloads: tuple[Workload, ...] = ()
    paused: tuple[str, ...] = ()


def from_milli(milli: int) -> int | float:
    """Return milli-GPUs as GPUs, or milli-cores as cores: 3, 0.5."""
    return milli // GPU if milli % GPU == 0 else milli / GPU
