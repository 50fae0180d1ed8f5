"""Define what administrators do with everything of one person, on the wire."""

from __future__ import annotations

from pydantic import Field

from .base import RequestBody, UserName, Wire


class PersonRequest(RequestBody):
    """A person, by the name that their work is filed under."""

    name: UserName


class GiveRequest(PersonRequest):
    """Whose work a deleted person's becomes."""

    to: UserName


class PersonWork(Wire):
    """How much was changed of a person's work."""

    name: str
    workloads: int = Field(description="workloads that have not ended")
