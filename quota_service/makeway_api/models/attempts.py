"""Define the messages between the service and remote workers (`/attempts/…`).

The launcher reads and writes them as plain JSON, with the standard library. Unknown fields are ignored on both sides,
so that a service and a launcher of different releases understand each other.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from .base import Wire

MAX_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader and database keeps exactly"""
Time = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False, description="Unix seconds")]
Step = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]


class Claim(Wire):
    """The first request of a launcher."""

    instance: str = Field(
        pattern=r"^[A-Za-z0-9_-]{8,64}$",
        description="random name of the launcher; another one of this worker is refused",
    )


class WorkerFile(Wire):
    """A file to write below the working directory; its content is fetched by its digest."""

    path: str = Field(description="below the working directory")
    executable: bool
    digest: str = Field(description="SHA-256 of the content")


class WorkerStart(Wire):
    """The answer to a claim: everything that a launcher needs to start its worker."""

    workload: str
    attempt: int
    worker: int
    gang: int = Field(description="the number of workers of the job")
    name: str
    team: str
    profile: str
    gpus: float
    command: list[str]
    env: dict[str, str]
    files: list[WorkerFile]
    credentials: dict[str, str] = Field(
        default_factory=dict, description="files that only the job reads, while it runs: content by name"
    )
    grace: float = Field(description="seconds to save after a SIGTERM without a notice")
    signal: str = Field(description="sent to the job with a notice")
    time_limit: float | None = Field(description="seconds after which the launcher ends the job")
    log_limit: int = Field(description="bytes")
    step: int | None = Field(description="of the newest checkpoint of an earlier attempt")
    saved_at: float | None = Field(description="when that checkpoint was saved, in Unix seconds")
    heartbeat: float = Field(description="seconds between two reports")
    lost_after: float = Field(description="seconds of silence after which the work is started elsewhere: end it before")
    token: str = Field(description="replaces the token of the request")


class WorkerExit(Wire):
    """How a worker ended."""

    exit_code: int = Field(ge=-1000, le=1000, description="of the command; negative for a signal")
    ended_at: Time
    killed: bool = Field(False, description="it was killed at the deadline of its notice")
    acknowledged: bool = Field(False, description="it ended by itself after a notice: exit 75, or `checkpoint.stop()`")
    completed: bool = Field(False, description="it reported a result, or the end of its `checkpoint.loop()`")
    timed_out: bool = Field(False, description="its time limit ended it")
    storage_failed: bool = Field(False, description="it did not begin, as its folder of checkpoints takes no file")
    unheard: bool = Field(False, description="it was ended because the service was not reached for too long")
    result_unsent: bool = Field(
        False,
        description="its result was not taken whole: nothing of it is kept, and the worker counts as not completed",
    )
    result_refused: bool = Field(False, description="its result was not kept, for example as it is too large")
    message: str = Field("", max_length=4000, description="how it ended, in a sentence for its owner")


class WorkerReportIn(Wire):
    """The heartbeat of a worker, with its progress; the last one has `exit`."""

    started_at: Time | None = None
    step: Step | None = Field(None, description="of its newest checkpoint")
    saved_at: Time | None = Field(None, description="when that checkpoint was saved, in Unix seconds")
    progress: Any = Field(None, description="what its job wrote about its progress; what cannot be read is left out")
    noticed: bool = Field(False, description="it has got its notice")
    exit: WorkerExit | None = None


class ReportReceipt(Wire):
    """The answer to a report."""

    heartbeat: float = Field(description="seconds until the next report is due")
    pace: float = Field(description="seconds between two uploads of the log")
    token: str | None = Field(None, description="replaces the token of the request, if that expires soon")
    lost_after: float | None = Field(None, description="as at the start, where the service was restarted meanwhile")


class WorkerNotice(Wire):
    """Save and end: the content of the stop file. Times are Unix seconds."""

    reason: str
    by_team: str | None
    by_owner: str | None
    by_workload: str | None
    at: float
    deadline: float
    preempt_test: bool


class FailedWorker(Wire):
    """A worker of the same gang that has failed."""

    worker: int
    exit_code: int = Field(description="of its command; negative for a signal")


class WorkerOrders(Wire):
    """The orders for a worker, which its launcher polls."""

    known: str = Field(description="version of the orders: sent with the next request, which waits until they differ")
    notice: WorkerNotice | None = None
    stop: bool = Field(False, description="the worker has to end now, without saving")
    failed: FailedWorker | None = Field(
        None, description="after a notice: another worker of the gang, for which this one may wait in vain"
    )


class OutputReceipt(Wire):
    """How much of an output is stored."""

    end: int = Field(description="offset of the next byte to send")
