"""Define deployments of machines on the wire: their documents, what they cost, their machines and their log."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from .base import RequestBody, Wire


class DeploymentSpend(Wire):
    """What a deployment costs beside its budget, in units of its currency."""

    currency: str
    hour: float = Field(description="of all machines that are not gone, for an hour")
    max_hour: float | None = Field(None, description="the budget of an hour; null: unlimited")
    month: float = Field(description="spent in this calendar month so far")
    max_month: float | None = Field(None, description="the budget of a month; null: unlimited")
    unpriced: int = Field(0, description="machines whose price is not known: they are not part of the amounts")


class MachinePrice(Wire):
    """What a machine of a type costs in a market where it may be launched, in units of the deployment's currency."""

    type: str
    pool: str
    market: str
    gpus: int = Field(description="GPUs of a machine for jobs")
    price: float | None = Field(None, description="of an hour, on the spot market the `spot_price`; null: not known")
    gpu_price: float | None = Field(
        None, description="of an hour of one of its GPUs; null: not known, or it has no GPUs for jobs"
    )


class LaunchHold(Wire):
    """Why no machine of a type is launched for a workload (empty: for spare machines)."""

    workload: str = ""
    type: str = ""
    code: str
    until: datetime | None = Field(None, description="when it is tried again")


class DeploymentStep(Wire):
    """What the last step of a deployment said, of which only the leading replica knows."""

    at: datetime
    problem: str = Field("", description="why its provider cannot be asked")
    listed_at: datetime | None = Field(None, description="the provider's last complete list")
    unserved: int = Field(0, description="workloads that wait and get no machine")
    holds: list[LaunchHold] = Field(default_factory=list)
    overdue: list[str] = Field(default_factory=list, description="machines that do not end")


class Deployment(Wire):
    """A deployment of machines: its document, its machines that are not over by state, and its spend."""

    name: str
    title: str = ""
    provider: str = ""
    version: int = Field(description="grows with each change of the document")
    paused: bool = False
    deleting: bool = Field(False, description="its machines are being ended, then it is gone")
    updated_at: datetime
    updated_by: str
    message: str = Field("", description="what it does now, in a sentence")
    machines: dict[str, int] = Field(default_factory=dict, description="machines that are not over, by state")
    max_machines: int = 0
    spend: DeploymentSpend | None = Field(None, description="null where the document cannot be read")
    prices: list[MachinePrice] = Field(
        default_factory=list, description="what its machine types cost, in the order in which they are preferred"
    )
    problem: str = Field("", description="why its document cannot be read by this release")
    step: DeploymentStep | None = None
    document: str | None = Field(None, description="the YAML text; only where one deployment is asked for")


class DeploymentRequest(RequestBody):
    """The document of a deployment to validate or save; its name is in the document."""

    document: str = Field(max_length=500_000)
    version: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="the version that was edited, 0 for a new deployment; 409 if another one is there. "
        "Null replaces whatever is there",
    )


class DeploymentDraft(Wire):
    """A document that is not saved yet, under a name that is free."""

    name: str
    document: str


class Machine(Wire):
    """One machine of a deployment."""

    id: str
    deployment: str
    type: str
    pool: str
    zone: str = ""
    market: str
    state: str
    reason: str = Field("", description="the code of the cause of its state")
    message: str = Field("", description="the cause of its state in a sentence")
    since: datetime = Field(description="when its state began")
    requested_at: datetime
    ready_at: datetime | None = None
    heard_at: datetime | None = Field(None, description="the newest report of its agent")
    instance: str | None = Field(None, description="what the provider calls it")
    gpus: int
    attempts: int | None = Field(None, description="attempts in the newest report")
    price: float | None = Field(None, description="of an hour; null: not known")
    deadline: datetime | None = Field(None, description="when a drain ends what still runs")


class MachinePage(Wire):
    """A page of machines, those that are over too, newest first; `next` is the cursor of the next page."""

    machines: list[Machine]
    next: str | None = None


class MachineLogEntry(Wire):
    """One line of the log of machines; without a machine it is about the whole deployment."""

    id: int
    at: datetime
    deployment: str
    machine: str = ""
    state: str = ""
    reason: str = ""
    message: str = ""


class MachineOutput(Wire):
    """What the console or the init script of a machine wrote."""

    kind: Literal["console", "init"]
    at: datetime
    exit_code: int | None = None
    text: str
    omitted: int = Field(0, description="characters in the middle that were not kept")


class MachineDetail(Machine):
    """A machine with its history, newest first, and its outputs."""

    events: list[MachineLogEntry] = Field(default_factory=list)
    outputs: list[MachineOutput] = Field(default_factory=list)
