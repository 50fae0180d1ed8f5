"""Define the messages between the service and the workers that are no processes of it (`/attempts/…`).

The launcher reads and writes them as plain JSON, with the standard library. Unknown fields are ignored on both sides,
so that a service and a launcher of different releases understand each other.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import Wire

MOST = 2**53 - 1
"""The largest integer that every JSON reader and database keeps exactly"""
Time = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False, description="Unix seconds")]
Step = Annotated[int, Field(ge=-MOST, le=MOST)]


class Claim(Wire):
    """The first request of a launcher: its own random name."""

    instance: str = Field(pattern=r"^[A-Za-z0-9_-]{8,64}$")


class WorkerFile(Wire):
    """A file to lay out below the working directory; its content is fetched by its digest."""

    path: str
    executable: bool
    digest: str


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
    grace: float
    signal: str
    time_limit: float | None
    log_limit: int = Field(description="bytes")
    step: int | None = Field(description="of the newest checkpoint of an earlier attempt")
    saved_at: float | None
    heartbeat: float = Field(description="seconds between two reports")
    token: str = Field(description="replaces the token of the request")


class WorkerExit(Wire):
    """How a worker ended."""

    exit_code: int = Field(ge=-1000, le=1000)
    ended_at: Time
    killed: bool = False
    acknowledged: bool = False
    completed: bool = False
    timed_out: bool = False
    message: str = Field("", max_length=4000)


class WorkerReportIn(Wire):
    """How far a worker is. Sent every few seconds, and last with `exit`."""

    started_at: Time | None = None
    step: Step | None = None
    saved_at: Time | None = None
    noticed: bool = False
    exit: WorkerExit | None = None


class ReportReceipt(Wire):
    """The answer to a report."""

    heartbeat: float = Field(description="seconds until the next report is due")
    pace: float = Field(description="seconds between two pieces of the log")
    token: str | None = Field(None, description="replaces the token of the request, where that ends soon")


class WorkerNotice(Wire):
    """Save and end: the content of the stop file. Times are Unix seconds."""

    reason: str
    by_team: str | None
    by_owner: str | None
    by_workload: str | None
    at: float
    deadline: float
    preempt_test: bool


class WorkerOrders(Wire):
    """The orders for a worker; `known` is sent along with the next request, which is answered when they differ."""

    known: str
    notice: WorkerNotice | None = None
    stop: bool = False


class OutputReceipt(Wire):
    """How far an output is known."""

    end: int
