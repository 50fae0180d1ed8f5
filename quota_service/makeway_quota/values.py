"""Define the values that the store and the backends share: where a worker is, a file, and a notice.

Below both, as neither knows the other. Times are Unix seconds; GPUs are thousandths of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .engine.snapshot import Placement

NoticeKind = Literal["evict", "move", "preempt_test", "cancel", "give_back", "machine_ends"]
"""`give_back`: it goes to another machine, so that its own can be given back; `machine_ends`: its machine is ended"""

CHECKPOINT_STORAGE = "checkpoint_storage"
"""The reason code of a job that did not start, as no checkpoint could be kept on its volume; an administrator has to
act. In the numbers of the reason of a job that failed for it, too, and why its pod waits."""


MAX_DEVICES = 4096
"""Devices of one node in one pool. Where a node is in several, the indices in each begin at a multiple of this."""


class Place(NamedTuple):
    """One worker's devices on one node, and the milli-GPUs held on each."""

    node: str
    devices: tuple[int, ...] = ()
    milli: tuple[int, ...] = ()
    backend: str = ""
    """where there are several: the one that the node belonged to when the worker was placed"""


def host_of(node: str) -> str:
    """Return the host that a node of the engine is, or is a part of."""
    return node.partition("/")[0]


def places(placement: Placement, backend_of: Callable[[str], str] = lambda node: "") -> tuple[Place, ...]:
    """Write a placement of the engine as the store keeps it, one entry a worker; `backend_of` tells that of a node."""
    ordered = sorted(placement, key=lambda placed: placed.worker)
    result = [(host_of(p.node), tuple(p.devices), (p.milli_per_device,) * len(p.devices)) for p in ordered]
    return tuple(Place(*place, backend_of(place[0])) for place in result)


def ordinal(device: int) -> int:
    """Return the number of a device among those of its node's pool, as people and programs are shown it."""
    return device % MAX_DEVICES


class File(NamedTuple):
    """One file of a submission, below the working directory of the job."""

    path: str
    data: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """The notice of an eviction: why, for whom, and until when the workload may save."""

    reason: str
    at: float
    deadline: float
    kind: NoticeKind = "evict"
    by_team: str | None = None
    by_owner: str | None = None
    by_workload: str | None = None

    def for_launcher(self) -> dict[str, Any]:
        """Return the fields of the notice as a launcher reads them, in its orders or from the service."""
        return {
            "reason": self.reason,
            "by_team": self.by_team,
            "by_owner": self.by_owner,
            "by_workload": self.by_workload,
            "at": self.at,
            "deadline": self.deadline,
            "preempt_test": self.kind == "preempt_test",
        }
