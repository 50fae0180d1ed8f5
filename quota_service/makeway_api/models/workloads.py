"""Define sessions and jobs on the wire: requests, states, attempts and logs."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from .base import Priority, Reason, RequestBody, State, UserName, Wire
from .progress import JobProgress
from .usage import Offer


class WorkerPlacement(Wire):
    """One worker's devices on one node."""

    node: str
    devices: list[int] = Field(default_factory=list)
    gpus: float = 0


class Checkpoint(Wire):
    """The newest checkpoint that a job reported."""

    step: int | None = None
    saved_at: datetime | None = None


class Notice(Wire):
    """The notice that a running workload has to make way; `preempt_test`: a test of preemption by its owner."""

    reason: str
    by_team: str | None = None
    by_owner: str | None = None
    by_workload: str | None = None
    at: datetime
    deadline: datetime
    preempt_test: bool = False


class SessionRequest(RequestBody):
    """A request for a lease, by the spawner on behalf of a user (scope `reserve`)."""

    user: UserName
    server: str = Field("", max_length=255)
    profile: str = Field(max_length=63)
    team: str | None = Field(None, max_length=63)
    preemptible: bool = False
    image: str | None = Field(None, max_length=1000, description="one of the profile's; default: its default one")


class Session(Wire):
    """A session and its lease. `phase` is admission, reclaim, node, granted, running or over."""

    id: str
    user: str
    server: str
    profile: str
    team: str | None
    gpus: float
    cpu: float = Field(0, description="cores; 0: the spawner's own setting")
    memory: int = Field(0, description="MiB; 0: the spawner's own setting")
    disk: int = Field(0, description="MiB of its node's disk on a cluster; 0: the spawner's own setting")
    profile_title: str = ""
    team_title: str = ""
    preemptible: bool = False
    state: State
    phase: str
    reason: Reason | None = None
    placement: list[WorkerPlacement] = Field(default_factory=list)
    resource: str | None = Field(None, description="what pods request for its GPUs on a cluster")
    tolerations: list[str] = Field(
        default_factory=list, description="taints that its pod tolerates on a cluster besides that of the resource"
    )
    claims: dict[str, str] = Field(
        default_factory=dict,
        description="on a cluster, the ResourceClaimTemplates that its GPUs are requested by instead of the resource, "
        "by name of the claim in its pod",
    )
    image: str | None = Field(None, description="of the notebook's pod; none: the spawner's own setting")
    env: dict[str, str] = Field(default_factory=dict)
    virtual: bool = False
    submitted_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    expires_at: datetime | None = Field(None, description="the lease ends then unless renewed")
    notice: Notice | None = None
    version: int = Field(0, description="grows with every change: pass it to wait for the next one")


class FileIn(RequestBody):
    """One file of a submission, written below the job's working directory."""

    path: str = Field(min_length=1, max_length=1024)
    data: str = Field(description="base64")
    executable: bool = False


class JobRequest(RequestBody):
    """A request for a training job."""

    name: str = Field("", max_length=200)
    team: str | None = Field(None, max_length=63, description="default: the caller's only team")
    profile: str | None = Field(None, max_length=63, description="default: the team's first job profile")
    command: list[str] = Field(min_length=1, max_length=1000)
    files: list[FileIn] = Field(default_factory=list, max_length=10_000)
    env: dict[str, str] = Field(default_factory=dict)
    workers: int | None = Field(None, ge=1, le=100_000)
    image: str | None = Field(
        None, max_length=1000, description="one of the profile's; default: that of `server`, else its default one"
    )
    server: str | None = Field(
        None,
        max_length=255,
        description="the caller's notebook server that it is submitted from: the job gets the same image if its "
        "profile offers it",
    )
    priority: Priority = Priority.NORMAL
    time_limit: int | None = Field(None, ge=1, le=366 * 86400)
    max_failures: int = Field(0, ge=0, le=1000, description="how often a failed attempt is retried")
    source: str = Field("", max_length=10_000_000, description="the cell as written, shown on the job's page")
    clone_of: str | None = Field(None, max_length=63)
    dry_run: bool = False


class CloneOverrides(RequestBody):
    """Fields that differ in the copies; all others are those of the original."""

    name: str | None = Field(None, max_length=200)
    team: str | None = Field(None, max_length=63)
    profile: str | None = Field(None, max_length=63)
    image: str | None = Field(None, max_length=1000)
    command: list[str] | None = Field(None, min_length=1, max_length=1000)
    files: list[FileIn] | None = Field(None, max_length=10_000)
    env: dict[str, str] | None = None
    workers: int | None = Field(None, ge=1, le=100_000)
    priority: Priority | None = None
    time_limit: int | None = Field(None, ge=1, le=366 * 86400)
    max_failures: int | None = Field(None, ge=0, le=1000)


class CloneRequest(RequestBody):
    """The number of copies, and the fields that differ in them."""

    n: int = Field(1, ge=1, le=100)
    overrides: CloneOverrides = Field(default_factory=CloneOverrides)


class MoveRequest(RequestBody):
    """The queue that a pending job is to be moved to: another team, another profile, or both."""

    team: str | None = Field(None, max_length=63, description="default: the job's")
    profile: str | None = Field(None, max_length=63, description="default: the job's")


class Attempt(Wire):
    """One run of a job; `outcome` is succeeded, failed, preempted, moved, cancelled or lost."""

    number: int
    started_at: datetime
    ended_at: datetime | None = None
    placement: list[WorkerPlacement] = Field(default_factory=list)
    outcome: str | None = None
    exit_code: int | None = None
    message: str = ""
    checkpoint: Checkpoint | None = None
    lost_seconds: float | None = Field(None, description="work done since the last checkpoint, when it was preempted")
    evicted_for: str | None = None


class Job(Wire):
    """A training job."""

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
    progress: JobProgress | None = Field(None, description="null: it reported none")
    warnings: list[str] = Field(
        default_factory=list,
        description="while it has not ended: sentences about what its owner should change, such as saves that take "
        "more than half of its grace",
    )
    notice: Notice | None = None
    placement: list[WorkerPlacement] = Field(default_factory=list)
    attempts: list[Attempt] = Field(default_factory=list)
    command: list[str] = Field(default_factory=list)
    source: str = ""
    private: bool = Field(False, description="the caller may not read its log, result, files and code")
    clone_of: str | None = None
    image: str | None = Field(
        None,
        description="container image of its pods or containers, that of its machine's deployment included once it runs "
        "there; null: the default image of jobs (`MAKEWAY_KUBE_IMAGE`), or none",
    )
    notes: list[str] = Field(
        default_factory=list,
        description="in the answer to a submission: sentences for the owner: which image its pods use and why, and why "
        "they have no home",
    )
    virtual: bool = False
    durable_checkpoints: bool = Field(True, description="whether an attempt finds the checkpoints of the one before")
    titles: dict[str, str] = Field(
        default_factory=dict, description="titles of the teams that are named in this job by their ids"
    )
    version: int = 0

    def title(self, team: str | None) -> str:
        """Return the title of a team that this job names, or its id where the service sent no title."""
        return self.titles.get(team or "") or team or ""

    @property
    def lenders(self) -> list[str]:
        """Return the titles of the teams whose GPUs it borrows."""
        return [self.title(team) for team in self.borrowed_from]


class DryRun(Wire):
    """The effects that submitting a job would have now."""

    offer: Offer
    command: list[str]
    files: int
    bytes: int
    risk: str = Field("", description="what running over quota would mean for it; empty in quota")
    image: str | None = Field(
        None, description="container image of its pods; null: the default image of jobs (`MAKEWAY_KUBE_IMAGE`)"
    )
    notes: list[str] = Field(
        default_factory=list,
        description="sentences for the owner: which image its pods would use and why, and why they would have no home",
    )


class JobPage(Wire):
    """A page of jobs, newest first; `next` is the cursor of the next page."""

    jobs: list[Job]
    next: str | None = None


class LogChunk(Wire):
    """Part of a job's log; the next part starts at `next_offset`, and after `eof` there is none."""

    attempt: int
    offset: int
    next_offset: int
    text: str
    eof: bool = False
    truncated: bool = False
