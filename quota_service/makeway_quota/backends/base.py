"""What runs the work: the border between decisions and the machines.

The loop asks a backend what is there (`observe`) and tells it what should be (`start`, `notice`, `kill`, `forget`).
Every order names a workload and an attempt and may be given any number of times: the second time does nothing.
Sessions are started by the Hub's spawner, never by a backend; a backend only tells which devices exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A machine as it is now. cpu in thousandths of a core, memory in MiB, 0 = unknown (not checked).

    `pool` "": a machine of this host, whose GPUs the policy document gives to pools (`machines.divide`).
    """

    name: str
    pool: str
    devices: tuple[int, ...]
    model: str = ""
    cpu: int = 0
    memory: int = 0
    ready: bool = True
    virtual: bool = False
    foreign: Mapping[int, int] = field(default_factory=dict)
    """milli-GPUs per device index that work of others holds"""


class Phase(StrEnum):
    """Where an attempt is: starting, running, stopping (noticed), exited (with a report) or lost (gone without one)."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class AttemptSeen:
    """One attempt of a job as the backend sees it; times are Unix seconds."""

    workload: str
    attempt: int
    phase: Phase
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    """the command's exit code, negative for a signal; None while it runs or when nobody knows"""
    killed: bool = False
    """it did not leave by the deadline and was killed"""
    acknowledged: bool = False
    """it left by itself after a notice: exit 75, or `checkpoint.stop()`"""
    noticed: bool = False
    completed: bool = False
    """it said that its work is done: it left a result, or its `checkpoint.loop()` ran to the end"""
    timed_out: bool = False
    """its time limit ended it"""
    step: int | None = None
    """the step of the newest complete checkpoint"""
    checkpoint_at: float | None = None
    message: str = ""
    """last words: an error line, 'saved at step 12', 'could not start: …'"""


@dataclass(frozen=True, slots=True)
class Seen:
    """The world at one moment."""

    nodes: tuple[NodeSeen, ...]
    attempts: tuple[AttemptSeen, ...]


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where one worker runs: devices by index, milli-GPUs on each."""

    node: str
    devices: tuple[int, ...]
    milli: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobFile:
    """A file to lay out below the working directory."""

    path: str
    data: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Everything that a backend must know to start one attempt."""

    workload: str
    attempt: int
    name: str
    owner: str
    team: str
    profile: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    workers: tuple[WorkerPlace, ...]
    grace: float
    """seconds from notice to SIGKILL"""
    signal: str = "SIGTERM"
    time_limit: float | None = None
    image: str | None = None
    files: Callable[[], tuple[JobFile, ...]] = tuple
    """read only when they are needed"""


@dataclass(frozen=True, slots=True)
class NoticeOrder:
    """Make way: what the stop file will say. Times are Unix seconds."""

    reason: str
    by_team: str | None
    by_owner: str | None
    by_workload: str | None
    at: float
    deadline: float
    rehearsal: bool = False


class BackendError(Exception):
    """A backend could not do as told; the sentence is shown to the owner of the job."""


class Backend(Protocol):
    """What the service needs of the machines. All methods may be repeated; none blocks the event loop for long."""

    name: str
    shared: bool
    """whether every replica's backend shows the same attempts, and observing them changes nothing"""

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` (thread-safe, cheap) whenever `observe` would answer something new."""

    async def open(self) -> None:
        """Adopt what already runs; raise BackendError where the machines cannot be reached."""

    async def close(self, *, stop_jobs: bool) -> None:
        """Let go; with `stop_jobs` notice everything that runs, wait up to its grace, then kill."""

    async def observe(self) -> Seen:
        """Tell every node, and every attempt that was started and not yet forgotten."""

    async def start(self, order: StartOrder) -> None:
        """Start an attempt exactly once, however often it is told; BackendError when it never can."""

    async def notice(self, workload: str, attempt: int, notice: NoticeOrder) -> None:
        """Ask an attempt to save and leave; the backend kills it at the deadline. Unknown attempts: nothing."""

    async def kill(self, workload: str, attempt: int) -> None:
        """Stop an attempt now, with everything it started (cancel). Unknown attempts: nothing."""

    async def forget(self, workload: str, attempt: int) -> None:
        """The end of this attempt is recorded: stop reporting it. Logs, results and checkpoints stay."""

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        """Bytes of an attempt's log from `offset`, at most `size`, and the log's length now."""

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Which bytes of a very long log were dropped (from, to): `log` has nothing there, go on at the second.
        None while the log is whole."""

    async def result(self, workload: str, attempt: int) -> bytes | None:
        """What the job left as its result ($MAKEWAY_RESULT_FILE), or None."""

    async def error(self, workload: str, attempt: int) -> bytes | None:
        """The JSON that the job left about its exception ($MAKEWAY_ERROR_FILE), or None."""

    async def purge(self, workload: str) -> None:
        """Remove everything kept for a workload: logs, results, checkpoints, files."""
