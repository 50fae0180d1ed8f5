"""Build answers of the service for drawing: jobs, teams and offers in a line each."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from makeway_api.models import (
    Attempt,
    Checkpoint,
    Job,
    Lending,
    Notice,
    Offer,
    OfferTable,
    Reason,
    State,
    WorkerPlacement,
)
from makeway_api.models import TeamUsage as Team

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
EVIL = "<img src=x onerror=alert(1)>\"'&\n\x1b[31m"


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def job(state: State = State.RUNNING, **changes: Any) -> Job:
    """Return a job of ana, submitted five minutes ago."""
    facts: dict[str, Any] = {
        "id": "j-1", "name": "mnist", "owner": "ana", "team": "rnd", "profile": "gpu3", "gpus": 3, "state": state,
        "attempt": 1, "submitted_at": ago(300), "started_at": ago(240),
        "placement": [WorkerPlacement(node="n1", devices=[0, 1, 2])], "titles": {"rnd": "R&D", "devops": "DevOps"},
    }  # fmt: skip
    return Job(**facts | changes)


def team(name: str = "rnd", **changes: Any) -> Team:
    """Return a team with 5 reserved and limit 9 that runs a 1-GPU session, 3 in quota, and lends 1."""
    facts: dict[str, Any] = {
        "team": name, "title": name.upper(), "reserved": 5, "limit": 9, "used": 4, "guaranteed": 1, "in_quota": 3,
        "borrowed": 0, "lent": 1, "free": 0, "mine": 1, "lent_to": [Lending(team="devops", gpus=1)],
    }  # fmt: skip
    return Team(**facts | changes)


def greedy() -> Team:
    """Return rnd at its limit: with 3-GPU jobs 3 GPUs are in quota and 6 borrowed."""
    return team(used=9, guaranteed=0, in_quota=3, borrowed=6, lent=0, free=0, lent_to=[], mine=9, running=3, waiting=2)


def noticed() -> Job:
    return job(
        State.CHECKPOINTING,
        notice=Notice(reason="reclaim", by_team="devops", by_owner="bo", at=NOW, deadline=NOW + timedelta(seconds=30)),
    )


def preempted() -> Job:
    first = Attempt(
        number=1, started_at=ago(240), ended_at=ago(60), outcome="preempted",
        checkpoint=Checkpoint(step=12, saved_at=ago(61)), evicted_for="devops", lost_seconds=0.4,
    )  # fmt: skip
    return job(
        State.PENDING, attempt=1, preemptions=1, attempts=[first], checkpoint=first.checkpoint, placement=[],
        reason=Reason(code="limit", message="rnd uses 9 of its limit of 9 GPUs; this job needs 3."),
    )  # fmt: skip


def offers(*found: Offer, teams: tuple[str, ...] = ("rnd",), usage: tuple[Team, ...] | None = None) -> OfferTable:
    return OfferTable(
        user="ana", teams=list(teams), profiles=[], offers=list(found), usage=list(usage or (team(),)),
        virtual=True, at=NOW,
    )  # fmt: skip
