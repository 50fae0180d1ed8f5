"""Start, observe, notice and end work on nodes: the protocol between the control loop and what runs the work.

The loop reads what is there (`observe`) and gives orders (`start`, `notice`, `kill`, `forget`). Every order names a
workload and an attempt and may be given any number of times: a repetition does nothing. Sessions are started by the
Hub's spawner, never by a backend; a backend only reports which nodes and devices exist, and whose pods are on them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from ..engine.snapshot import Terminating
from ..policy import Document
from ..quarantine import Quarantine
from ..values import File, Notice, Place

if TYPE_CHECKING:
    from .machines.machine_source import MachineSource
    from .remote.channel import Channel

LOST_AFTER = 300.0
"""Seconds of silence after which a worker elsewhere is lost. Its launcher ends the work before, when it reaches no
service."""

Key = tuple[str, int]
"""The id of a workload and the number of one of its attempts."""


@dataclass(frozen=True, slots=True)
class WorkloadPod:
    """What a pod, or a process, of ours holds on its node, in the units of `NodeStatus`."""

    workload: str
    gpus: int = 0
    cpu: int = 0
    memory: int = 0
    attempt: int | None = None
    """of a job"""
    worker: int | None = None
    """of a job"""
    ends_at: float | None = None
    """when the kubelet kills it at the latest, in Unix seconds; None while it is not being deleted"""
    grace: float = 0.0
    """the seconds that it got when it was deleted"""
    devices: tuple[int, ...] = ()
    """that it holds, where the backend knows them"""
    milli: tuple[int, ...] = ()
    """on each of them"""
    pool: str = ""
    """whose GPUs it holds, where its node is in several"""


@dataclass(frozen=True, slots=True)
class NodePart:
    """The GPUs that a node offers to one of its pools, in the units of `NodeStatus`."""

    pool: str
    devices: tuple[int, ...]
    foreign_gpus: int = 0
    cordoned: bool = False
    """runs on, but takes no new work of this pool"""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as it is now. CPU in milli-cores, memory in MiB, GPUs in milli-GPUs; `cpu` and `memory` 0: unknown.

    `pool` "": the policy document says which pool the node, or each of its GPUs, is in (`pool_assignment.divide`).
    Foreign is what pods hold that Makeway does not manage.
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
    """milli-GPUs per device index, where the index is known"""
    foreign_gpus: int = 0
    """milli-GPUs on devices that are not known"""
    foreign_cpu: int = 0
    foreign_memory: int = 0
    max_pods: int = 0
    """how many pods it runs at most; 0: work runs as processes"""
    foreign_pods: int = 0
    """how many of these are not ours"""
    cordoned: bool = False
    """runs on, but takes no new work"""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[str, ...] = ()
    """opaque: compared and shown, never read"""
    anonymous_devices: bool = False
    """only the number of devices is known, as with a device plugin: free = allocatable − held"""
    pods: tuple[WorkloadPod, ...] = ()
    """the pods or processes of sessions and jobs that are here and have not ended, until `workload_pods` has looked at
    them"""
    terminating: tuple[Terminating, ...] = ()
    """what those of them hold that outlive their attempts"""
    down_since: float | None = None
    """since when it is not ready, in Unix seconds, where the backend knows it"""
    unassigned: tuple[tuple[str, int], ...] = ()
    """the resources of GPUs that no pool takes, and how many of each it offers"""
    parts: tuple[NodePart, ...] = ()
    """where it is in several pools: what it offers to each; `pool` is the first of them, and `devices` has all devices.
    They share its CPU, memory and pods."""
    backend: str = ""
    """where there are several: the one that it belongs to"""
    sessions: bool = True
    """whether notebooks may start on it"""
    observed: bool = True
    """whether it is as it is now; else its backend cannot be observed, and this is how it was seen last"""

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that it is in, "" for none that the backend knows."""
        return tuple(part.pool for part in self.parts) or (self.pool,)

    def by_pool(self) -> tuple[NodeStatus, ...]:
        """Return the node as it is in each of its pools; what terminates there is of all of them."""
        if not self.parts:
            return (self,)
        return tuple(
            replace(
                self,
                pool=part.pool,
                devices=part.devices,
                foreign_gpus=part.foreign_gpus,
                cordoned=self.cordoned or part.cordoned,
                parts=(),
            )
            for part in self.parts
        )


class Phase(StrEnum):
    """The phase of an attempt: stopping has its notice, exited is over with a report, lost is gone without one."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """One attempt of a job as the backend reports it; times are Unix seconds."""

    workload: str
    attempt: int
    phase: Phase
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    """the command's exit code, negative for a signal; None while it runs or when it is not known"""
    killed: bool = False
    """it was killed at the deadline of its notice"""
    acknowledged: bool = False
    """it ended by itself after a notice: exit 75, or `checkpoint.stop()`"""
    notice_received: bool = False
    """its launcher has the notice, which the job's command gets as a signal"""
    completed: bool = False
    """it reported that its work is done: a result, or the end of its `checkpoint.loop()`"""
    result_lost: bool = False
    """its result was not received as a whole, and nothing of it is kept"""
    timed_out: bool = False
    """its time limit ended it"""
    storage_failed: bool = False
    """it did not begin, as no checkpoint could be kept; `worker` is the one that could not"""
    step: int | None = None
    """the step of the newest complete checkpoint"""
    checkpoint_at: float | None = None
    message: str = ""
    """how it ended: an error line, 'saved at step 12', 'could not start: …'"""
    waiting_reason: str = ""
    """while it is starting: the code of the cause, such as `unschedulable`, `image_pull`, `container` or `init`"""
    since: float | None = None
    """when the present phase, or the cause for waiting, began"""
    node_lost: bool = False
    """its node is gone, drained or down, so that a loss, or an end that others asked for, says nothing about the job"""
    evicted: bool = False
    """with `node_lost`: it was told to leave the node, by an eviction through the API of Kubernetes"""
    node_returned: bool = False
    """with `node_lost`: its node is back already, and as good for it as before"""
    start_broke_off: bool = False
    """its start broke off before anything ran, and is to be ordered again"""
    never_ran: bool = False
    """with a loss: its workers did not all begin, through no fault of the job"""
    refused: bool = False
    """with `never_ran`: a node refused one of them for a reason that passes in seconds as a rule"""
    worker: int = 0
    """the worker that the message and `node_lost` are about, where it has several"""
    cpu: int = 0
    """milli-cores that the largest of its pods requests, whatever was added to them; 0: not known"""
    memory: int = 0
    """MiB that the largest of its pods requests; 0: not known"""

    @property
    def key(self) -> Key:
        """Return the workload and the number of the attempt."""
        return self.workload, self.attempt


@dataclass(frozen=True, slots=True)
class BackendState:
    """How one of several backends was observed last."""

    name: str
    synced: bool = False
    """whether its lists are complete: absence from them means something"""
    problem: str = ""
    """why its nodes and attempts may be out of date; they are shown as they were seen last, and nothing starts there"""
    name_conflicts: tuple[str, ...] = ()
    """its nodes that are not offered, as another backend has nodes of these names"""


@dataclass(frozen=True, slots=True)
class Observation:
    """The nodes and attempts of a backend: all of them (`whole`), or those that changed or are gone since a version.

    While a backend is not `synced` its lists are not complete: absence from them means nothing.
    """

    nodes: tuple[NodeStatus, ...] = ()
    attempts: tuple[AttemptStatus, ...] = ()
    version: int = 0
    """ask for what changed after this version next time"""
    whole: bool = True
    synced: bool = True
    gone_nodes: tuple[str, ...] = ()
    gone_attempts: tuple[Key, ...] = ()
    problem: str = ""
    """why what is shown may be out of date: the cluster cannot be read at the moment"""
    backends: tuple[BackendState, ...] = ()
    """where there are several: each of them"""


@dataclass(frozen=True, slots=True)
class TerminationProgress:
    """What was done so far to end what is left of a workload, by this process; times are Unix seconds."""

    targets: tuple[str, ...] = ()
    """the pods, processes or servers that are left, in words"""
    tries: int = 0
    next_at: float | None = None
    """when it is tried again, where that is known"""
    problem: str = ""
    """why the last try was refused, or is not done yet"""
    namespace: str = ""
    """of pods"""


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Everything that a backend needs to start one attempt."""

    workload: str
    attempt: int
    name: str
    owner: str
    team: str
    profile: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    workers: tuple[Place, ...]
    grace: float
    """seconds from notice to SIGKILL"""
    signal: str = "SIGTERM"
    time_limit: float | None = None
    image: str | None = None
    cpu: int = 0
    """milli-cores of each worker, as it was planned; 0: none are requested"""
    memory: int = 0
    """MiB of each worker, as it was planned; 0: none are requested"""
    admitted_at: float | None = None
    """when the attempt got its GPUs, in Unix seconds"""
    preemptible: bool = True
    files: Callable[[], tuple[File, ...]] = tuple
    """called only when they are needed"""


class AttemptElsewhere(NamedTuple):
    """An attempt that runs in a folder of another state directory."""

    workload: str
    folder: str
    pid: int


class BackendError(Exception):
    """An order could not be carried out; the sentence is shown to the owner of the job."""


class BackendUnavailable(BackendError):
    """An order cannot be carried out now, which says nothing about the job: the next cycle tries again."""


class BackendRejected(BackendUnavailable):
    """The backend answers, and refuses an order for a reason that may pass: it is tried again less and less often."""


class BackendFull(BackendUnavailable):
    """The backend does not take an attempt at the moment, for a reason that is in no plan: others get its GPUs."""


class Backend(Protocol):
    """The methods that the service needs of a backend. All may be repeated; none blocks the event loop for long.

    Backends inherit from it: what only some of them can do does nothing by default.
    """

    name: str
    shared: bool
    """whether every replica's backend shows the same attempts, and observing them changes nothing"""
    durable_checkpoints: bool
    """whether an attempt finds the checkpoints of the one before"""
    worker_kind: Literal["pod", "process"] = "process"
    """what a worker is to an administrator"""
    keeps_outputs: bool = False
    """whether logs, results and folders of jobs are files of this machine; else workers send them to the store"""
    remote: bool = False
    """whether its workers report by HTTP, through a channel, with tokens that outlive this process"""
    lost_after: float = LOST_AFTER
    """seconds of silence after which a worker that reports by HTTP is lost"""
    reports_begin: bool = False
    """whether it tells when the command of an attempt began, which may be long after it was ordered to start"""

    def has_durable_checkpoints(self, backend: str) -> bool:
        """Whether an attempt that was placed on a backend of this name leaves its checkpoints to the next one.

        `backend`: "" where there is one only, or the attempt has no place yet.
        """
        return self.durable_checkpoints

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` (thread-safe, cheap) whenever `observe` would return something new."""

    async def open(self) -> None:
        """Adopt what already runs; raise BackendError where the nodes cannot be reached."""

    async def close(self, *, stop_jobs: bool) -> None:
        """Stop observing; with `stop_jobs` notice everything that runs, wait up to its grace, then kill."""

    async def observe(self, since: int | None = None) -> Observation:
        """Return every node, and every attempt that was started and not yet forgotten.

        With `since`, the version of an earlier answer, only what changed after it is returned; a backend that does
        not remember so far returns everything.
        """

    async def start(self, order: StartOrder) -> None:
        """Start an attempt exactly once, however often it is ordered; BackendError when it never can."""

    async def notice(self, workload: str, attempt: int, notice: Notice) -> None:
        """Order an attempt to save and end; the backend kills it at the deadline. Unknown attempts: nothing."""

    async def kill(self, workload: str, attempt: int) -> None:
        """Stop an attempt now, with everything it started (cancel). Unknown attempts: nothing."""

    async def forget(self, workload: str, attempt: int) -> None:
        """Stop reporting an attempt whose end is recorded. Logs, results and checkpoints stay."""

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        """Return bytes of an attempt's log from `offset`, at most `size`, and the log's length now."""

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Return where the dropped bytes of a very long log begin and end; None while the log is whole.

        `log` returns nothing between the two.
        """

    async def result(self, workload: str, attempt: int) -> bytes | None:
        """Return the job's result ($MAKEWAY_RESULT_FILE), or None."""

    async def result_part(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int] | None:
        """Return at most `size` bytes of the job's result from `offset`, and its whole size; None without a result."""

    async def error(self, workload: str, attempt: int) -> bytes | None:
        """Return the JSON about the job's exception ($MAKEWAY_ERROR_FILE), or None."""

    async def purge(self, workload: str, team: str) -> bool:
        """Remove everything kept for a workload: logs, results, checkpoints, files; return whether all is gone.

        False where that takes longer, or could not be done by now: it is to be ordered again later.
        """

    # -- what only some backends do

    def connect(self, channel: Channel) -> None:
        """Read what workers report, and get their credentials, from this channel; called once, before `open`."""
        return None

    def follow_machines(self, machines: MachineSource) -> None:
        """Read the machines of deployments, and what is placed there, from this; called once, before `open`."""
        return None

    def lost_after_of(self, workload: str, attempt: int) -> float:
        """Return the seconds of silence after which a worker of an attempt is lost, as its launcher is told."""
        return self.lost_after

    def act_for_database(self, database: str) -> None:
        """Act for this database from now on; called once, before `open`."""
        return None

    async def open_for_reading(self) -> None:
        """Make `observe` possible without adopting or starting anything, for a process that decides nothing."""
        await self.open()

    def use_backend_lookup(self, backend_of: Callable[[str, int], str]) -> None:
        """Use this function to look up on which of several backends an attempt was placed; "" if not known."""
        return None

    def use_ended_backend_lookup(self, ended: Callable[[str], Awaitable[Mapping[int, str]]]) -> None:
        """Use this function to read on which of several backends the ended attempts of a workload were placed."""
        return None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the backends behind it, by default its own."""
        return (self.name,)

    def running_elsewhere(self, workloads: Collection[str]) -> list[AttemptElsewhere]:
        """Return which of these workloads run by the order of a service with another state directory. Blocking."""
        return []

    @property
    def reachable(self) -> bool:
        """Whether attempts can be started and ended from here; a leader that cannot hands over."""
        return True

    def quarantine_in(self, quarantine: Quarantine) -> None:
        """Add what an observation fails with to this quarantine."""
        return None

    def fence_with(self, may_act: Callable[[], bool]) -> None:
        """Act without an order, as at a deadline, only while `may_act` returns True: this replica leads."""
        return None

    def begin_term(self) -> None:
        """Begin a term as leader: drop what an earlier term concluded and ordered, and look at those attempts again."""
        return None

    def follow_policy(self, document: Callable[[], Document]) -> None:
        """Use the policy document that this returns, from now on and whenever it has changed."""
        return None

    def on_progress(self, note: Callable[[str, int, object], None]) -> None:
        """Pass what attempts report of their progress to `note`, with the workload and the attempt."""
        return None

    def termination_progress(self, workload: str) -> TerminationProgress | None:
        """Return what was done to end what is left of a workload; None where nothing was ordered by this process."""
        return None

    def publish_event(self, key: Key, code: str, message: str) -> None:
        """Show a decision about an attempt beside its workers; never fails, and what is shown twice is shown once."""
        return None

    async def pod_notices(self, owner: str, team: str) -> list[str]:
        """Return what the owner of a job has to know about its pods, in sentences; within seconds, never fails."""
        return []

    async def policy_notices(self, document: Document) -> list[tuple[str, str]]:
        """Return profiles of a document that will not work here, each with the reason; within seconds, never fails."""
        return []

    async def notebook_problem(self, profile: str) -> str:
        """Return why no notebook of a profile of the policy in force would get its GPUs; "" where it would.

        Also "" where that is not known; within seconds, never fails.
        """
        return ""

    def folder_bytes(self, workload: str) -> int | None:
        """Return the bytes of a job's folder on this machine; None where there is none."""
        return None

    async def output_bytes(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Return the bytes of an attempt's log and result; None where the backend does not keep them."""
        return None

    async def remove_output(self, workload: str, attempt: int) -> None:
        """Remove what an attempt wrote, where the backend keeps it."""
        return None
