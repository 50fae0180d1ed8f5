"""Parse the orders of the service: which workers the machine has to run, and whether it drains or stops."""

from __future__ import annotations

from ..launcher.files import exact_integer
from ..launcher.record import Record
from ..launcher.removal import JOB_ID

MAX_JOB_ID_LENGTH = 128
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
if TYPE_CHECKING:  # Python 3.8 cannot evaluate it
    WorkerKey = tuple[str, int, int]
    """A worker: the id of its job, the number of its attempt, and its own number"""


class WorkerOrder(Record):
    """One worker that has to run; its launcher gets these fields as JSON.

    `url` and `token`: where its launcher reports to the service, and by which token. `image`: "" runs it without a
    container. `devices`: the indexes of its GPUs on this machine. `checkpoints`: the folder of its checkpoints, which
    machines share; "": a folder of the attempt on this machine. `cpu` (thousandths of a core) and `memory` (MiB) limit
    its container, 0: no limit. `virtual`: its GPUs are simulated, there are no devices.
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
        """Return the job, attempt and number that identify the worker."""
        return (self.job, self.attempt, self.worker)


class MachineOrders(Record):
    """All orders of a machine. `drain`: no further workers will be ordered. `stop`: the machine has to power off.

    `unreadable`: workers whose key can be read, but not the rest of their order. `complete`: every key could be read,
    so that a worker that is missing has to end.
    """

    revision: str
    drain: bool
    stop: bool
    workers: dict[WorkerKey, WorkerOrder]
    unreadable: frozenset[WorkerKey]
    complete: bool

    def may_run(self, key: WorkerKey) -> bool:
        """Whether a worker that runs may go on: unless it is certain that the service does not order it any more."""
        return key in self.workers or key in self.unreadable or not self.complete


def read_orders(response: dict[str, Any]) -> MachineOrders:
    """Return the orders in a response of the service; an entry that cannot be read neither starts nor ends a worker."""
    entries = response.get("attempts")
    workers: dict[WorkerKey, WorkerOrder] = {}
    unreadable = set()
    complete = isinstance(entries, list)
    for entry in entries if isinstance(entries, list) else ():
        key = _parse_key(entry)
        if key is None:
            complete = False
            continue
        try:
            workers[key] = _parse_order(key, entry)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            unreadable.add(key)
    return MachineOrders(
        revision=str(response.get("revision", "")),
        drain=response.get("drain") is True,
        stop=response.get("stop") is True,
        workers=workers,
        unreadable=frozenset(unreadable),
        complete=complete,
    )


def _parse_key(entry: Any) -> WorkerKey | None:
    if not isinstance(entry, dict):
        return None
    job, attempt, worker = entry.get("job"), exact_integer(entry.get("attempt")), exact_integer(entry.get("worker"))
    if not isinstance(job, str) or attempt is None or worker is None or not valid_key(job, attempt, worker):
        return None
    return (job, attempt, worker)


def valid_key(job: str, attempt: int, worker: int) -> bool:
    """Whether these identify a worker, and are safe as names of its folders."""
    return len(job) <= MAX_JOB_ID_LENGTH and JOB_ID.fullmatch(job) is not None and attempt >= 0 and worker >= 0


def _parse_order(key: WorkerKey, entry: dict[str, Any]) -> WorkerOrder:
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
