"""Define the messages between the service and the agents of machines (`/agents/…`).

Agents read and write them as plain JSON, with the standard library. Unknown fields are ignored on both sides, so that a
service and an agent of different releases understand each other.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .attempts import Time
from .base import Wire

MAX_OUTPUT = 65_536
"""Characters of the output of an init script"""
MAX_ATTEMPTS = 4096
"""Workers of one machine"""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Boot = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{8,64}$", description="random name of this boot of the machine")]
Gpus = Annotated[int, Field(ge=0, le=1024, description="GPUs that the machine has")]
Cpu = Annotated[int, Field(ge=0, le=10_000_000, description="thousandths of a core; 0: not known")]
Memory = Annotated[int, Field(ge=0, le=2**31, description="MiB; 0: not known")]


class AgentJoin(Wire):
    """The first request of an agent; its token names the same machine."""

    machine: Name
    boot: Boot
    gpus: Gpus = 0
    cpu: Cpu = 0
    memory: Memory = 0
    model: str = Field("", max_length=200, description="of its GPUs")
    virtual: bool = Field(False, description="its GPUs are virtual")
    address: str = Field("", max_length=200, description="at which other machines reach it; empty: as the service does")


class AgentJoined(Wire):
    """The answer to a join: what an agent has to know of its machine."""

    token: str = Field(description="for all other requests; reports renew it")
    report_seconds: float = Field(description="seconds between two reports of an unchanged machine")
    init_script: str = Field(description="runs once before any job; empty: there is none")
    cpu_only: bool = Field(description="jobs see no GPU")
    image: str | None = Field(description="container image of jobs that name none; null: they run without containers")
    orphan_after: float = Field(description="seconds without the service and without work after which it powers off")
    lost_after: float = Field(description="seconds of silence after which its work is started elsewhere")
    checkpoints: str | None = Field(description="folder of checkpoints that all machines share; null: there is none")


class InitExit(Wire):
    """How the init script ended."""

    exit_code: int = Field(ge=-1000, le=1000, description="negative for a signal")
    output: str = Field("", max_length=MAX_OUTPUT, description="its last lines")


class AgentWorker(Wire):
    """One worker that an agent has started: reported until its end is known and no order is for it any more."""

    job: Name
    attempt: int = Field(ge=1, le=1_000_000)
    worker: int = Field(ge=0, le=1_000_000)
    state: Literal["starting", "running", "exited"]
    exit_code: int | None = Field(None, ge=-1000, le=1000, description="of its launcher; negative for a signal")
    devices: list[Annotated[int, Field(ge=0, le=4095)]] = Field(
        default_factory=list, max_length=1024, description="as in its order"
    )
    milli: list[Annotated[int, Field(ge=0, le=1000)]] = Field(
        default_factory=list, max_length=1024, description="as in its order"
    )
    message: str = Field("", max_length=1000, description="why it did not start, such as an image that was not pulled")


class AgentReportIn(Wire):
    """What a machine is and runs; sent at once when that changes, and as a heartbeat."""

    boot: Boot
    gpus: Gpus = 0
    cpu: Cpu = 0
    memory: Memory = 0
    model: str = Field("", max_length=200, description="of its GPUs")
    virtual: bool = Field(False, description="its GPUs are virtual")
    address: str = Field("", max_length=200, description="at which other machines reach it")
    number: int = Field(0, ge=0, le=2**53 - 1, description="counts the reports of a boot: an older one is ignored")
    init: InitExit | None = Field(None, description="null while the init script runs")
    spot_deadline: Time | None = Field(None, description="when the provider takes the machine back")
    attempts: list[AgentWorker] = Field(default_factory=list, max_length=MAX_ATTEMPTS)


class AgentReceipt(Wire):
    """The answer to a report."""

    token: str | None = Field(description="replaces the token of the request, if that expires soon")
    report_seconds: float = Field(description="seconds until the next report is due")


class WorkerOrder(Wire):
    """A worker that is to run on a machine; only its launcher gets what it runs."""

    job: str
    attempt: int
    worker: int
    url: str = Field(description="of the worker at the service, for its launcher")
    token: str = Field(description="the first token of its launcher; another one in each answer")
    image: str | None = Field(description="container image; null: it runs without a container")
    devices: list[int] = Field(description="numbers of its GPUs")
    milli: list[int] = Field(description="thousandths of each that it may use")
    cpu_only: bool = Field(description="it sees no GPU")
    cpu: int = Field(description="thousandths of a core that its container may use; 0: no limit")
    memory: int = Field(description="MiB that its container may use; 0: no limit")
    env: dict[str, str] = Field(description="variables of the worker, such as its rank")
    checkpoints: str | None = Field(description="folder of its checkpoints; null: one on this machine, of this attempt")


class MachineOrders(Wire):
    """Everything that a machine has to do: what it runs and is not named ends."""

    revision: str = Field(description="sent with the next request, which waits until it differs")
    drain: bool = Field(description="nothing more starts there; what runs goes on")
    stop: bool = Field(description="the machine is over: its work ends, and it powers off")
    attempts: list[WorkerOrder]
