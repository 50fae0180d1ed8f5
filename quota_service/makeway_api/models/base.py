"""Define the base of all messages: requests, answers, states, reasons and problems."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
UserName = Annotated[str, StringConstraints(min_length=1, max_length=255)]


class Wire(BaseModel):
    """A message: unknown fields are ignored, so that old notebooks read new services, and old launchers, too."""

    model_config = ConfigDict(extra="ignore")


class RequestBody(BaseModel):
    """A request body: unknown fields are an error that names them."""

    model_config = ConfigDict(extra="forbid")


class Kind(StrEnum):
    """The kind of a workload: an interactive session (build) or a job (training)."""

    SESSION = "session"
    JOB = "job"


class State(StrEnum):
    """The states of a workload; a session ends in `stopped`, a refused one in `cancelled`."""

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
        """Whether the workload never runs again by itself."""
        return self in ENDED

    @property
    def holds_gpus(self) -> bool:
        """Whether its placement counts as used."""
        return self in HOLDS_GPUS


ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.STOPPED})
HOLDS_GPUS = frozenset({State.STARTING, State.RUNNING, State.CHECKPOINTING})


class Priority(StrEnum):
    """A workload's own priority inside its team."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


BEFORE = {
    **dict.fromkeys(("protected", "patience"), "Nothing makes way for it before"),
    "waiting_for_node": "Ready at about",
    "no_machine": "The next try is at",
}
"""Words in front of the time of a reason, by its code"""


class Reason(Wire):
    """The reason of a state: a code for programs, one sentence, and the numbers in it."""

    code: str
    message: str
    not_before: datetime | None = Field(
        None,
        description=(
            "the earliest start, next try of a start, or eviction for it (`protected`, `patience`); "
            "when its machine is probably ready (`waiting_for_node`), or the next try to launch one (`no_machine`)"
        ),
    )
    ready_by: datetime | None = Field(None, description="the latest start: its victims are gone by then")
    numbers: dict[str, Any] = Field(default_factory=dict)

    @property
    def before(self) -> str:
        """Return the words in front of the time `not_before`."""
        return BEFORE.get(self.code, "Not before")


class Me(Wire):
    """The caller as Makeway knows them."""

    name: str
    admin: bool = False
    teams: list[str] = Field(default_factory=list)
    scopes: list[str] = Field(default_factory=list)


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
    """Whether the service is alive (`/healthz`) and decides (`/readyz`)."""

    ok: bool
    checks: dict[str, str] = Field(default_factory=dict)
