"""Decide who may read what a job runs and wrote, and leave that out for all others.

By default it is its owner's, and that of the leads of its team and of administrators. `work: team` in the policy
document, in `settings` or of one team, opens it to the team; in system users mode nothing does, because the API shows
no more than the file system.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from makeway_api.models import Decision, Job

from ..store.records import Event
from .caller import Caller
from .context import Context

OWN_WORDS = re.compile(r"( failed)(?:: | \().*", re.DOTALL)
"""What follows is the last line of a job's output."""


def may_read(context: Context, caller: Caller, owner: str | None, team: str | None) -> bool:
    """Whether the caller may read code, environment, log and results of a job of this owner and team."""
    if owner == caller.name or context.manages(caller, team):
        return True
    return _opened(context, team) and team in context.teams_of(caller)


def all_may_read(context: Context, caller: Caller, team: str | None) -> bool:
    """Whether everyone who may see the same teams as the caller may read this of a job of the team, for shared parts.

    Who owns a job or leads its team shares parts of pages with those who may not read it.
    """
    return caller.manages_all or _opened(context, team)


def _opened(context: Context, team: str | None) -> bool:
    """Whether the policy opens the work of a team to its members."""
    return context.settings.mode != "system" and team is not None and context.document.shares_work(team)


def private_job(job: Job) -> Job:
    """Return a job without what is its owner's: what it runs, and what it says."""
    reason = job.reason
    if reason is not None:
        reason = reason.model_copy(update={"message": without_own_words(reason.message)})
    attempts = [attempt.model_copy(update={"message": ""}) for attempt in job.attempts]
    progress = job.progress and job.progress.model_copy(update={"stage": "", "metrics": {}, "curve": None})
    less = {"command": [], "source": "", "message": "", "warnings": [], "private": True}
    return job.model_copy(update={**less, "reason": reason, "attempts": attempts, "progress": progress})


def private_decision(decision: Decision) -> Decision:
    """Return a line of the decision log without the words of the job that it is about."""
    return decision.model_copy(update={"message": without_own_words(decision.message)})


def private_event(event: Event) -> Event:
    """Return an event without the words of the job that it is about; the event itself where it has none."""
    data = _private(event.data)
    return event if data == event.data else replace(event, data=data | {"private": True})


def _private(data: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(data)
    if "message" in result:
        result["message"] = without_own_words(str(result["message"])) if "verb" in result else ""
    if isinstance(reason := result.get("reason"), dict):
        result["reason"] = {**reason, "message": without_own_words(str(reason.get("message", "")))}
    return result


def without_own_words(message: str) -> str:
    """Return a sentence about a job's failure without the line that the job wrote."""
    return OWN_WORDS.sub(r"\1.", message)
