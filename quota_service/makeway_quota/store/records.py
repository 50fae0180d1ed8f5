"""Define the records of the store: workloads, attempts, decisions, events and policy versions.

Plain frozen values. Times are Unix seconds; GPUs are thousandths of a device, CPU thousandths of a core, memory MiB.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from ..engine.snapshot import LIVE, Kind, State
from ..values import Notice, Place

Priority = Literal["low", "normal", "high"]
LIVE_STATES: tuple[State, ...] = tuple(state for state in get_args(State) if state in LIVE)
"""LIVE as a row has it, in the order of a workload's life"""
ENDED: tuple[State, ...] = ("succeeded", "failed", "cancelled", "stopped")
Numbers = Mapping[str, Any]
"""Names with plain JSON values; a tuple comes back as a list."""


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """The files of another workload, which a new one shares with it."""

    workload: str
    count: int = 0
    """how many they are, as far as its caller knows: each is a row of the new one"""


@dataclass(frozen=True, slots=True)
class NewWorkload:
    """A workload as it is submitted; the id is the caller's choice and is never used again."""

    id: str
    kind: Kind
    team: str | None
    profile: str
    owner: str
    name: str = ""
    priority: Priority = "normal"
    preemptible: bool = True
    gpus: int = 0
    workers: int = 1
    min_workers: int | None = None
    """default: as many as `workers`"""
    cpu: int = 0
    memory: int = 0
    time_limit: float | None = None
    grace: float = 30.0
    signal: str = "SIGTERM"
    image: str | None = None
    max_failures: int = 0
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    clone_of: str | None = None
    server: str = ""
    expires_at: float | None = None
    state: State = "pending"
    reason_code: str = ""
    reason_message: str = ""
    reason_numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cap:
    """The most workloads of a kind and in these states that an owner may have; counted in the inserting transaction."""

    limit: int
    kind: Kind
    states: tuple[State, ...] = LIVE_STATES
    with_gpus: bool = False
    """count only workloads that ask for GPUs"""


class ByteLimits(NamedTuple):
    """The most bytes that may be kept, checked in the transaction that adds some; 0 is no limit."""

    person: int = 0
    team: int = 0
    whole: int = 0
    share: int = 0
    """of one person in one team"""


class SubmissionKey(NamedTuple):
    """The key of a request that may be repeated: one key with one digest submits its workloads once."""

    key: str
    sender: str
    digest: str
    """SHA-256 of what is requested"""
    number: int = 0
    """which of the workloads that the request submits"""


class Submission(NamedTuple):
    """A workload to add, with its files (path, content, executable) and its line for the decision log."""

    new: NewWorkload
    files: Sequence[tuple[str, bytes, bool]] | SharedFiles = ()
    decision: NewDecision | None = None
    cap: Cap | None = None
    key: SubmissionKey | None = None
    kept: ByteLimits | None = None


class Workload(NamedTuple):
    """A session or a job as it is now. `attempt` is 0 before the first start; `gpus` is per worker.

    A tuple, because one is made at every change. `version` grows by one with every change. `command`, `env` and
    `source` may be large: they are empty but where one workload is read (`Store.workload`).
    """

    id: str
    kind: Kind
    team: str | None
    profile: str
    owner: str
    name: str
    priority: Priority
    preemptible: bool
    state: State
    attempt: int
    preemptions: int
    failures: int
    infra_failures: int
    max_failures: int
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    gpus: int
    workers: int
    min_workers: int
    cpu: int
    memory: int
    time_limit: float | None
    grace: float
    signal: str
    image: str | None
    reason_code: str
    reason_message: str
    reason_numbers: Numbers
    not_before: float | None
    over_quota: bool
    borrowed_from: tuple[str, ...]
    placement: tuple[Place, ...]
    nomination: tuple[Place, ...]
    """the placement that it will get once its victims have terminated"""
    failed_node: str | None
    """the node that it was lost on, if that is why it is pending again"""
    exit_code: int | None
    message: str
    checkpoint_step: int | None
    checkpoint_at: float | None
    notice: Notice | None
    evicted_for: str | None
    cancel_requested: bool
    server: str
    expires_at: float | None
    server_started: bool
    clone_of: str | None
    ran: float
    """seconds that its attempts held their GPUs, those that are over"""
    launched_at: float | None
    """when the present attempt was ordered to start, where it was not running soon after"""
    lost_on: tuple[str, ...]
    """the nodes on which attempts were lost without a cause that is known, one entry a loss, the last few"""
    start_tries: int
    """how often in a row it was not started, or nothing of it ran; 0 once it ran"""
    avoids: tuple[tuple[str, float], ...]
    """nodes that it avoids, each until a time"""
    version: int
    weight: int = 0
    """the payload: bytes of its command, environment and source, which count on its owner's storage"""
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = MappingProxyType({})
    source: str = ""

    @property
    def live(self) -> bool:
        """Whether the workload has not ended."""
        return self.state in LIVE

    @property
    def size(self) -> int:
        """Milli-GPUs that it holds (a gang may run with fewer workers than requested), else that it requests."""
        return self.gpus * (len(self.placement) or self.workers)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a workload. `outcome`: succeeded, failed, preempted, moved, cancelled or lost; None while it runs."""

    workload: str
    number: int
    started_at: float
    ended_at: float | None = None
    placement: tuple[Place, ...] = ()
    outcome: str | None = None
    exit_code: int | None = None
    message: str = ""
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None
    lost_seconds: float | None = None
    evicted_for: str | None = None
    over_quota: bool = False


class PastRun(NamedTuple):
    """How many seconds a job that is over ran, all its attempts together."""

    team: str | None
    owner: str
    profile: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Change:
    """Set some fields of one workload, if it is still as expected.

    `expect_version` and `expect_states` must both hold, where given. `close_attempt` sets fields of the newest
    attempt that has not ended (nothing if there is none), before `open_attempt` is added. `drop_attempt` removes that
    attempt instead, which then was none: nothing of it was ever started.
    """

    workload: str
    fields: Mapping[str, object] = field(default_factory=dict)
    expect_version: int | None = None
    expect_states: Collection[str] | None = None
    open_attempt: Attempt | None = None
    close_attempt: Mapping[str, object] | None = None
    drop_attempt: bool = False


@dataclass(frozen=True, slots=True)
class NewDecision:
    """One line for the decision log: what was decided, by which rule, in a sentence with its numbers."""

    verb: str
    workload: str | None
    team: str | None
    owner: str | None
    code: str
    message: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the decision log."""

    id: int
    at: float
    verb: str
    workload: str | None
    team: str | None
    owner: str | None
    code: str
    message: str
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Event:
    """One message of the live stream; ids only grow and are never used twice."""

    id: int
    at: float
    kind: str
    team: str | None
    owner: str | None
    workload: str | None
    data: Mapping[str, Any]


class Person(NamedTuple):
    """A user of the Hub, or one who was deleted; `identity` stays when they are renamed ("": not known)."""

    name: str
    identity: str
    groups: tuple[str, ...] = ()
    present: bool = True

    @property
    def since(self) -> float | None:
        """Unix seconds of when the Hub made this user, where its identity tells."""
        try:
            made = datetime.fromisoformat(self.identity)
        except ValueError:
            return None
        return (made if made.tzinfo else made.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One version of the policy document, as text."""

    version: int
    at: float
    author: str
    comment: str
    document: str


@dataclass(frozen=True, slots=True)
class StoredDeployment:
    """The document of a deployment of machines, as text. `version` grows with every change."""

    name: str
    document: str
    version: int
    deleting: bool
    """its machines are being ended"""
    updated_at: float
    updated_by: str
