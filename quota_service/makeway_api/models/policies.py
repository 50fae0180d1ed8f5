"""Define the policy document on the wire: versions, issues, and the effects of a change."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from .base import RequestBody, Wire


class PolicyVersion(Wire):
    """One stored version of the policy document."""

    version: int
    at: datetime
    author: str
    comment: str = ""
    document: str | None = Field(None, description="the YAML text; only where one version is asked for")


class PolicyRequest(RequestBody):
    """A policy document to validate, preview or apply."""

    document: str = Field(max_length=1_000_000)
    comment: str = Field("", max_length=500)
    base: int | None = Field(None, ge=0, description="the version that was edited; 409 if another one is in force")


class PolicyIssue(Wire):
    """One error in a policy document."""

    file: str = ""
    line: int | None = None
    where: str = ""
    message: str


class PolicyCheck(Wire):
    """The result of a validation; `ok` means that the document can be applied."""

    ok: bool
    issues: list[PolicyIssue] = Field(default_factory=list)
    warnings: list[PolicyIssue] = Field(
        default_factory=list, description="what is valid and has no effect, or not as it is written"
    )
    changes: list[str] = Field(
        default_factory=list, description="one sentence for each difference to the current version"
    )


class WorkloadEffect(Wire):
    """One workload that a change affects."""

    id: str
    name: str
    team: str
    owner: str
    message: str


class Preview(Wire):
    """The effects of a policy change beyond what happens anyway, after every victim has made way."""

    starts: list[WorkloadEffect] = Field(default_factory=list, description="pending workloads that would run")
    evicts: list[WorkloadEffect] = Field(
        default_factory=list, description="running workloads that would be stopped or moved"
    )
    waits: list[WorkloadEffect] = Field(
        default_factory=list, description="workloads that would wait, and did not or for another reason"
    )
    refused: list[WorkloadEffect] = Field(default_factory=list, description="sessions that would be refused")
    outside: list[WorkloadEffect] = Field(
        default_factory=list, description="workloads that would go on on GPUs which are in no pool then"
    )
