"""The request of a workload, and of one of its workers on one node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .snapshot import GPU, Node, Profile, Workload


class Shape(NamedTuple):
    """The request of one worker: milli-GPUs, milli-cores, MiB, and the GPU models that suit (none: all)."""

    gpus: int
    cpu: int = 0
    memory: int = 0
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """The request of one workload: `workers` times (`gpus`, `cpu`, `memory`), at least `min_workers` workers."""

    gpus: int
    workers: int
    min_workers: int
    cpu: int
    memory: int
    models: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    """Nodes that the workload must not be placed on."""
    only_spare: bool = False
    """Whether it takes no CPU and memory that free guaranteed GPUs need: it holds no GPUs, and is never evicted."""
    session: bool = False
    """Whether it is a session, which does not run on every node."""
    total: int = field(init=False, repr=False, compare=False)
    """The milli-GPUs that the workload needs to start."""
    whole_devices: int = field(init=False, repr=False, compare=False)
    """The number of whole devices per worker (0 for a share of one, or none)."""
    shape: Shape = field(init=False, repr=False, compare=False)
    """The request of one worker."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "total", self.gpus * self.min_workers)
        put(self, "whole_devices", self.gpus // GPU)
        put(self, "shape", Shape(self.gpus, self.cpu, self.memory, self.models))
        put(self, "_hash", hash((self.shape, self.workers, self.min_workers)))

    def __hash__(self) -> int:
        """Return the hash computed once: needs are dictionary keys in every decision."""
        return self._hash


def need_of(workload: Workload, profile: Profile | None) -> Need:
    """Return a workload's request: its own values, else those of its profile."""
    gpus = workload.gpus if workload.gpus is not None else profile.gpus if profile else 0
    workers = workload.workers if workload.workers is not None else profile.workers if profile else 1
    min_workers = workload.min_workers
    if min_workers is None:
        min_workers = profile.min_workers if profile and workload.workers is None else None
    cpu = workload.cpu if workload.cpu is not None else profile.cpu if profile else 0
    memory = workload.memory if workload.memory is not None else profile.memory if profile else 0
    models = profile.models if profile else ()
    min_workers = min(workers, min_workers) if min_workers else workers
    only_spare = not gpus and workload.non_preemptible
    session = workload.kind == "session"
    return Need(gpus, workers, min_workers, cpu, memory, models, workload.avoid, only_spare, session)


def may_run(need: Need, node: Node) -> bool:
    """Whether a node is of a kind that runs such a request, whatever its state and its size."""
    return (not need.models or node.model in need.models) and (node.sessions or not need.session)
