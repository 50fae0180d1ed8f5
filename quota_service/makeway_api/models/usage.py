"""Define usage and offers on the wire: what teams use, and what a user can have now."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from .base import Kind, Reason, Wire
from .inventory import Profile


class Lending(Wire):
    """GPUs of one team that run another team's jobs."""

    team: str
    title: str = ""
    gpus: float


class TeamUsage(Wire):
    """A team's GPUs now. guaranteed + in_quota + borrowed = used; free and lent are parts of the reservation."""

    team: str
    title: str = ""
    reserved: float
    limit: float | None = None
    used: float
    guaranteed: float = Field(description="held by non-preemptible sessions and jobs")
    in_quota: float = Field(description="held by preemptible jobs and sessions within the reservation")
    borrowed: float = Field(description="over quota")
    lent: float = Field(description="of the reservation, now held by other teams' work")
    free: float = Field(description="of the reservation, idle")
    mine: float = 0
    removed: bool = Field(False, description="the policy has no such team any more; its work goes on until it ends")
    waiting: int = 0
    running: int = 0
    borrowed_from: list[Lending] = Field(default_factory=list)
    lent_to: list[Lending] = Field(default_factory=list)


class Usage(Wire):
    """All teams that the caller may see, and the cluster as a whole."""

    at: datetime
    teams: list[TeamUsage]
    total: float
    used: float
    free: float
    virtual: bool = False
    problem: str | None = Field(None, description="the sentence about a cluster that cannot be read at the moment")


class Victim(Wire):
    """A job that would make way."""

    id: str
    name: str
    team: str
    team_title: str = ""
    owner: str
    gpus: float


class Offer(Wire):
    """What a user can have now with one profile in one team: how soon, which jobs make way, and why not (row N03)."""

    profile: str
    team: str | None
    team_title: str = ""
    kind: Kind = Kind.SESSION
    code: str = Field(description="ready_now, ready_after_reclaim, ready_after_launch (of machines), waits or refused")
    message: str
    seconds: int | None = Field(
        None, description="until it is ready: at most, about for ready_after_launch; null where it cannot be known"
    )
    victims: list[Victim] = Field(default_factory=list)
    reason: Reason | None = None


class OfferTable(Wire):
    """Everything that the picker shows one user."""

    user: str
    teams: list[str]
    profiles: list[Profile]
    offers: list[Offer]
    usage: list[TeamUsage]
    virtual: bool
    problem: str | None = Field(None, description="the sentence about a cluster that cannot be read at the moment")
    ticket: str | None = Field(None, description="signed, for live updates of this table: ?ticket=…, valid for minutes")
    at: datetime = Field(
        description="when the offers were true; under load they may be 2 s old, or older while more is asked than can "
        "be computed"
    )
