"""Read what the service orders: which workers the machine has to run, and whether it may stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..launcher.files import exact_integer
from ..launcher.removal import NAME

MAX_NAME = 128
if TYPE_CHECKING:  # no expression of Python 3.8
    WorkerKey = tuple[str, int, int]
    """A worker: the id of its job, the number of its attempt, and its own number"""


class WorkerOrder(NamedTuple):
    """One worker that has to run. `checkpoints`: a folder that the machines share; "": one of the attempt.

    `image`: "" runs it without a container. `cpu` in thousandths of a core and `memory` in MiB are limits of its
    container, 0: none. `virtual`: its GPUs are no devices.
    """

    job: str
    attempt: int
    worker: int
    url: str
    token: str
    image: str
    devices: tuple[int, ...]
    cpu_only: bool
    env: dict[str, str]
    checkpoints: str
    cpu: int
    memory: int
    virtual: bool

    @property
    def key(self) -> WorkerKey:
        """Return what identifies the worker."""
        return (self.job, self.attempt, self.worker)


class MachineOrders(NamedTuple):
    """All orders of a machine. `unreadable`: workers of which no more than their names can be understood.

    `whole`: every worker is at least named, so that one that is missing is not wanted any more.
    """

    revision: str
    drain: bool
    stop: bool
    workers: dict[WorkerKey, WorkerOrder]
    unreadable: frozenset[WorkerKey]
    whole: bool

    def wants(self, key: WorkerKey) -> bool:
        """Whether a worker may go on."""
        return key in self.workers or key in self.unreadable or not self.whole


def read_orders(answer: dict[str, Any]) -> MachineOrders:
    """Return the orders in an answer: what cannot be read in it ends nothing, and starts nothing."""
    entries = answer.get("attempts")
    workers: dict[WorkerKey, WorkerOrder] = {}
    unreadable = set()
    complete = isinstance(entries, list)
    for entry in entries if isinstance(entries, list) else ():
        key = _key(entry)
        if key is None:
            complete = False
            continue
        try:
            workers[key] = _order(key, entry)
        except (KeyError, TypeError, ValueError, AttributeError):
            unreadable.add(key)
    return MachineOrders(
        revision=str(answer.get("revision", "")),
        drain=answer.get("drain") is True,
        stop=answer.get("stop") is True,
        workers=workers,
        unreadable=frozenset(unreadable),
        whole=complete,
    )


def _key(entry: Any) -> WorkerKey | None:
    if not isinstance(entry, dict):
        return None
    job, attempt, worker = entry.get("job"), exact_integer(entry.get("attempt")), exact_integer(entry.get("worker"))
    if not isinstance(job, str) or attempt is None or worker is None or not valid_key(job, attempt, worker):
        return None
    return (job, attempt, worker)


def valid_key(job: str, attempt: int, worker: int) -> bool:
    """Whether these name a worker, and folders can be named by them."""
    return len(job) <= MAX_NAME and NAME.fullmatch(job) is not None and attempt >= 0 and worker >= 0


def _order(key: WorkerKey, entry: dict[str, Any]) -> WorkerOrder:
    if not isinstance(entry["url"], str) or not isinstance(entry["token"], str):
        raise TypeError("url and token are strings")
    return WorkerOrder(
        *key,
        url=entry["url"],
        token=entry["token"],
        image=str(entry.get("image") or ""),
        devices=tuple(int(device) for device in entry.get("devices") or ()),
        cpu_only=entry.get("cpu_only") is True,
        env={str(name): str(value) for name, value in (entry.get("env") or {}).items()},
        checkpoints=str(entry.get("checkpoints") or ""),
        cpu=max(0, exact_integer(entry.get("cpu")) or 0),
        memory=max(0, exact_integer(entry.get("memory")) or 0),
        virtual=(entry.get("env") or {}).get("MAKEWAY_VIRTUAL_GPUS") == "1",
    )
