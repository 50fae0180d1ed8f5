"""What travels over the wire: every noun of the API as a pydantic model.

GPU quantities are numbers of whole devices (0.5 is half of one), times are ISO 8601 in UTC, durations are
seconds, memory is MiB. Additive changes only: a notebook of last year must still understand the answers.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
UserName = Annotated[str, StringConstraints(min_length=1, max_length=255)]


class Wire(BaseModel):
    """An answer: unknown fields are ignored, so that old notebooks read new services."""

    model_config = ConfigDict(extra="ignore")


class Ask(BaseModel):
    """A request body: unknown fields are an error that names them."""

    model_config = ConfigDict(extra="forbid")


class Kind(StrEnum):
    """What a workload is: an interactive session (build) or a job (training)."""

    SESSION = "session"
    JOB = "job"


class State(StrEnum):
    """The life of a workload (engine.md §1); a session ends in `stopped`, a refused one in `cancelled`."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        """True when the workload will never run again by itself."""
        return self in ENDED

    @property
    def holds_gpus(self) -> bool:
        """True while its placement counts as used."""
        return self in HOLDS_GPUS


ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.STOPPED})
HOLDS_GPUS = frozenset({State.STARTING, State.RUNNING, State.CHECKPOINTING})


class Priority(StrEnum):
    """A workload's own priority inside its team."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


class Reason(Wire):
    """Why something is as it is: a code of engine.md §7, one sentence, and the numbers in it."""

    code: str
    message: str
    not_before: datetime | None = None
    numbers: dict[str, Any] = Field(default_factory=dict)


# -- who -------------------------------------------------------------------------------------------------------


class Me(Wire):
    """Who the caller is for Makeway."""

    name: str
    admin: bool = False
    teams: list[str] = Field(default_factory=list)
    scopes: list[str] = Field(default_factory=list)


# -- the estate ------------------------------------------------------------------------------------------------


class Device(Wire):
    """One GPU of a node: who holds it, if anybody (`holder` is a workload id)."""

    index: int
    free: float
    holders: list[Holder] = Field(default_factory=list)


class Holder(Wire):
    """A workload's part of one device."""

    workload: str
    kind: Kind
    team: str
    owner: str
    name: str
    gpus: float
    over_quota: bool
    state: State


class Node(Wire):
    """A machine of a pool with its devices."""

    name: str
    pool: str
    model: str = ""
    virtual: bool = False
    ready: bool = True
    foreign: float = 0
    devices: list[Device] = Field(default_factory=list)


class Pool(Wire):
    """Like resources."""

    name: str
    kind: Literal["static", "autoscaled"] = "static"
    resource: str = "nvidia.com/gpu"
    strategy: Literal["pack", "spread"] = "pack"
    capacity: float | None = None
    virtual: bool = False
    total: float = 0
    used: float = 0
    free: float = 0
    profiles: list[str] = Field(default_factory=list)
    nodes: list[Node] = Field(default_factory=list)


class Profile(Wire):
    """What one workload needs."""

    name: str
    title: str
    description: str = ""
    gpus: float
    workers: int = 1
    min_workers: int = 1
    cpu: float = 0
    memory: int = 0
    pools: list[str] = Field(default_factory=list)
    policies: list[list[str]] = Field(default_factory=list, description="ranked; an inner list shares a rank")
    kinds: list[Kind] = Field(default_factory=lambda: [Kind.SESSION, Kind.JOB])
    grace: int = Field(30, description="seconds between checkpoint notice and SIGKILL")
    time_limit: int | None = None
    image: str | None = None


class QuotaLine(Wire):
    """One line of a policy; `pools` empty means all."""

    pools: list[str] = Field(default_factory=list)
    reserved: float = 0
    limit: float | None = None
    lend: float | None = None


class Policy(Wire):
    """The quota of one team, user or activity."""

    name: str
    title: str = ""
    groups: list[str] = Field(default_factory=list)
    users: list[str] = Field(default_factory=list)
    weight: Literal["None", "Lowest", "Low", "Medium", "High"] = "Medium"
    priority: int = 0
    parent: str | None = None
    quotas: list[QuotaLine] = Field(default_factory=list)


class PolicyVersion(Wire):
    """One stored version of the policy document."""

    version: int
    at: datetime
    author: str
    comment: str = ""
    document: str | None = Field(None, description="the YAML text; only where one version is asked for")


class PolicyAsk(Ask):
    """A policy document to validate, preview or apply."""

    document: str = Field(max_length=1_000_000)
    comment: str = Field("", max_length=500)
    base: int | None = Field(None, ge=0, description="the version that was edited; another one current is a conflict")


class PolicyIssue(Wire):
    """One thing that is wrong in a policy document."""

    file: str = ""
    line: int | None = None
    where: str = ""
    message: str


class PolicyCheck(Wire):
    """What validation found; `ok` means that it can be applied."""

    ok: bool
    issues: list[PolicyIssue] = Field(default_factory=list)
    changes: list[str] = Field(
        default_factory=list, description="one sentence for each difference to the current version"
    )


class Preview(Wire):
    """What a policy change would do now."""

    starts: list[WorkloadEffect] = Field(default_factory=list)
    leaves: list[WorkloadEffect] = Field(default_factory=list)
    waits: list[WorkloadEffect] = Field(default_factory=list)


class WorkloadEffect(Wire):
    """One workload that a change touches."""

    id: str
    name: str
    team: str
    owner: str
    message: str


# -- what can I have now ---------------------------------------------------------------------------------------


class Victim(Wire):
    """A job that would have to make way."""

    id: str
    name: str
    team: str
    owner: str
    gpus: float


class Offer(Wire):
    """What a user can have now with one profile in one team, from whom, and why not (row N03)."""

    profile: str
    team: str | None
    kind: Kind = Kind.SESSION
    code: str = Field(description="ready_now, ready_after_reclaim, waits or refused")
    message: str
    seconds: int | None = Field(None, description="at most this long until it is there, where it can be known")
    victims: list[Victim] = Field(default_factory=list)
    reason: Reason | None = None


class OfferTable(Wire):
    """Everything the picker shows one user."""

    user: str
    teams: list[str]
    profiles: list[Profile]
    offers: list[Offer]
    usage: list[TeamUsage]
    virtual: bool
    ticket: str | None = Field(None, description="signed, for live updates of this table: ?ticket=… (minutes)")
    at: datetime


# -- sessions --------------------------------------------------------------------------------------------------


class SessionAsk(Ask):
    """A lease, asked for by the spawner on behalf of a user (scope `reserve`)."""

    user: UserName
    server: str = Field("", max_length=255)
    profile: str = Field(max_length=63)
    team: str | None = Field(None, max_length=63)
    preemptible: bool = False


class Grant(Wire):
    """One worker's devices on one node."""

    node: str
    devices: list[int] = Field(default_factory=list)
    gpus: float = 0


class Session(Wire):
    """A session and its lease. `phase` is admission, reclaim, node, granted, running or over."""

    id: str
    user: str
    server: str
    profile: str
    team: str | None
    gpus: float
    preemptible: bool = False
    state: State
    phase: str
    reason: Reason | None = None
    placement: list[Grant] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    virtual: bool = False
    submitted_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    expires_at: datetime | None = Field(None, description="the lease ends then unless renewed")
    notice: Notice | None = None
    version: int = Field(0, description="grows with every change: pass it to wait for the next one")


# -- jobs ------------------------------------------------------------------------------------------------------


class FileIn(Ask):
    """One file of a submission, laid out below the job's working directory."""

    path: str = Field(min_length=1, max_length=1024)
    data: str = Field(description="base64")
    executable: bool = False


class JobAsk(Ask):
    """A training job."""

    name: str = Field("", max_length=200)
    team: str | None = Field(None, max_length=63, description="default: the caller's only team")
    profile: str | None = Field(None, max_length=63, description="default: the team's first job profile")
    command: list[str] = Field(min_length=1, max_length=1000)
    files: list[FileIn] = Field(default_factory=list, max_length=10_000)
    env: dict[str, str] = Field(default_factory=dict)
    workers: int | None = Field(None, ge=1, le=100_000)
    priority: Priority = Priority.NORMAL
    time_limit: int | None = Field(None, ge=1, le=366 * 86400)
    max_failures: int = Field(0, ge=0, le=1000, description="how often a failed attempt is tried again")
    source: str = Field("", max_length=10_000_000, description="the cell as written, shown on the job's page")
    clone_of: str | None = Field(None, max_length=63)
    dry_run: bool = False


class Checkpoint(Wire):
    """The newest checkpoint that a job reported."""

    step: int | None = None
    saved_at: datetime | None = None


class Notice(Wire):
    """A running job was asked to make way."""

    reason: str
    by_team: str | None = None
    by_owner: str | None = None
    by_workload: str | None = None
    at: datetime
    deadline: datetime
    rehearsal: bool = False


class Attempt(Wire):
    """One run of a job; `outcome` is succeeded, failed, preempted, moved, cancelled or lost."""

    number: int
    started_at: datetime
    ended_at: datetime | None = None
    placement: list[Grant] = Field(default_factory=list)
    outcome: str | None = None
    exit_code: int | None = None
    message: str = ""
    checkpoint: Checkpoint | None = None
    lost_seconds: float | None = Field(None, description="work done since the last checkpoint, when it was preempted")
    evicted_for: str | None = None


class Job(Wire):
    """A training job as everybody sees it."""

    id: str
    name: str
    owner: str
    team: str
    profile: str
    gpus: float = Field(description="in all, over the workers")
    workers: int = 1
    priority: Priority = Priority.NORMAL
    state: State
    reason: Reason | None = None
    over_quota: bool = False
    borrowed_from: list[str] = Field(default_factory=list)
    attempt: int = 0
    preemptions: int = 0
    failures: int = 0
    submitted_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    time_limit: int | None = None
    exit_code: int | None = None
    message: str = ""
    checkpoint: Checkpoint | None = None
    notice: Notice | None = None
    placement: list[Grant] = Field(default_factory=list)
    attempts: list[Attempt] = Field(default_factory=list)
    command: list[str] = Field(default_factory=list)
    source: str = ""
    clone_of: str | None = None
    virtual: bool = False
    version: int = 0


class DryRun(Wire):
    """What submitting would do now."""

    offer: Offer
    command: list[str]
    files: int
    bytes: int
    risk: str = Field("", description="what running over quota means, where it would")


class JobPage(Wire):
    """Some jobs, newest first; `next` is the cursor of the page after."""

    jobs: list[Job]
    next: str | None = None


class LogChunk(Wire):
    """Part of a job's log. Ask again from `next_offset`; `eof` means that nothing will follow."""

    attempt: int
    offset: int
    next_offset: int
    text: str
    eof: bool = False
    truncated: bool = False


# -- usage, decisions, events ----------------------------------------------------------------------------------


class Lending(Wire):
    """GPUs of one team that run another team's work."""

    team: str
    gpus: float


class TeamUsage(Wire):
    """A team's GPUs now. guaranteed + in_quota + borrowed = used; free and lent are parts of the reservation."""

    team: str
    title: str = ""
    reserved: float
    limit: float | None = None
    used: float
    guaranteed: float = Field(description="held by sessions")
    in_quota: float = Field(description="jobs within the reservation")
    borrowed: float = Field(description="over quota")
    lent: float = Field(description="of the reservation, now running other teams' work")
    free: float = Field(description="of the reservation, idle")
    mine: float = 0
    waiting: int = 0
    running: int = 0
    borrowed_from: list[Lending] = Field(default_factory=list)
    lent_to: list[Lending] = Field(default_factory=list)


class Usage(Wire):
    """All teams that the caller may see, and the cluster as a whole."""

    at: datetime
    teams: list[TeamUsage]
    total: float
    used: float
    free: float
    virtual: bool = False


class Decision(Wire):
    """One line of the decision log: what was decided, by which rule, in one sentence with its numbers (row F23)."""

    id: int
    at: datetime
    verb: str
    workload: str | None = None
    team: str | None = None
    owner: str | None = None
    code: str = ""
    message: str
    numbers: dict[str, Any] = Field(default_factory=dict)


class Event(Wire):
    """One message of the live stream. `kind` is job, session, usage, decision or policy."""

    id: int
    at: datetime
    kind: str
    team: str | None = None
    owner: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)


class Problem(Wire):
    """An error as application/problem+json (RFC 9457) with a code and the numbers."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    numbers: dict[str, Any] = Field(default_factory=dict)
    errors: list[dict[str, Any]] = Field(default_factory=list)


class Health(Wire):
    """Is the service alive (`/healthz`), and does it decide (`/readyz`)."""

    ok: bool
    checks: dict[str, str] = Field(default_factory=dict)


for _model in (Device, Preview, OfferTable, Session):
    _model.model_rebuild()
