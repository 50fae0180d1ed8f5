"""Define the decision log and the event feed on the wire."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from .base import Wire


class Decision(Wire):
    """One line of the decision log: verb, code (the rule that decided, or an outcome), one sentence and its numbers."""

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
    """One message of the event stream.

    `kind` is job, session, usage, decision, policy, deployment, machines or reset (read everything again).
    """

    id: int
    at: datetime
    kind: str
    team: str | None = None
    owner: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)
