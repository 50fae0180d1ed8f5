"""Define the API's models of the decision log and the event feed."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from .base import Wire


class Decision(Wire):
    """One line of the decision log.

    `verb`: what was done. `code`: the rule that decided, or the outcome. `message`: one sentence, with its `numbers`.
    """

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

    `kind` is job, session, usage, decision, policy, deployment, machines or reset (events were lost: read everything
    again).
    """

    id: int
    at: datetime
    kind: str
    team: str | None = None
    owner: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)
