"""Define what the backend knows of machines, and the protocol through which it reads that.

`control/machines/channel.py` implements it: the rows of machines, the newest reports of their agents, and the attempts
that are placed on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from ...values import Place
from ..base import Key

BACKEND = "machines"
"""The name of the backend, in settings and in places"""
Condition = Literal["starting", "ready", "draining", "lost", "ending"]
"""Of a machine: `lost` it is not heard of, `ending` its provider is asked to end it, and its agent ends its work"""
WorkerState = Literal["starting", "running", "exited"]
NODES: frozenset[Condition] = frozenset({"ready", "draining", "lost"})
"""The conditions in which a machine is a node"""


class HostedWorker(NamedTuple):
    """A worker of an attempt, as the agent of its machine reported it."""

    job: str
    attempt: int
    worker: int
    state: WorkerState = "running"
    exit_code: int | None = None
    """of its launcher, where that has ended"""
    devices: tuple[int, ...] = ()
    """that it was ordered to have"""
    milli: tuple[int, ...] = ()
    """milli-GPUs on each of them"""
    message: str = ""
    """why it did not start"""

    @property
    def key(self) -> Key:
        """Return the attempt."""
        return self.job, self.attempt


class PlacedAttempt(NamedTuple):
    """Where the workers of an attempt are placed, and whether it is to run there."""

    places: tuple[Place, ...]
    wanted: bool = True
    """False: it is cancelled or over its time, and its agents end what still runs"""


@dataclass(frozen=True, slots=True)
class MachineStatus:
    """A machine as it was reported last. CPU in thousandths of a core, memory in MiB; 0: not known."""

    name: str
    pool: str
    condition: Condition
    gpus: int = 0
    cpu: int = 0
    memory: int = 0
    model: str = ""
    virtual: bool = False
    address: str = ""
    """at which other machines reach it; "" where it is not known"""
    image: str | None = None
    """the container image of jobs that name none; None: they run without containers"""
    cpu_only: bool = False
    """whether jobs see no GPU"""
    lost_after: float = 120.0
    """seconds of silence after which its workers are lost with it"""
    down_since: float | None = None
    """since when it is lost, in Unix seconds"""
    of_cluster: bool = False
    """whether it is, or will be, a node of the cluster that its backend shows, without an agent"""
    node: str = ""
    """its node there; "" while it has none"""
    provisioning_class: str = ""
    """of the ProvisioningRequest for it; "" where a placeholder alone asked for its node"""
    requested_at: float = 0.0
    workers: tuple[HostedWorker, ...] = ()
    """that its agent has started and not forgotten"""


class MachineSource(Protocol):
    """The machines, and what is placed on them."""

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a machine, or what it runs, changes."""

    async def refresh(self) -> None:
        """Read what agents reported to any replica, and the rows that changed."""

    @property
    def synced(self) -> bool:
        """Whether all machines were read once: absence means something."""

    @property
    def version(self) -> int:
        """Grow with every change of `machines` and `placed`."""

    def machines(self) -> Mapping[str, MachineStatus]:
        """Return the machines by name; one that is missing certainly runs nothing."""

    def placed(self) -> Mapping[Key, PlacedAttempt]:
        """Return the attempts that hold GPUs of machines."""
