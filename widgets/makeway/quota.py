"""Show what is kept for a person as text and as HTML: bytes of the quotas, and which ended jobs to delete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from makeway_api.models import StorageDeleted, StorageReport, StorageTeam
from makeway_api.quantities import count, size
from makeway_api.tables import plain

from .blocks import bundle, line
from .connection import client, explained
from .words import day_clock, typed

MAX_NAMED_JOBS = 5
"""Ended jobs that are named"""


@dataclass(frozen=True)
class Quota:
    """The answer of `%quota`."""

    report: StorageReport

    @property
    def lines(self) -> list[str]:
        """Return one line with every quota, and then one for each ended job that keeps much."""
        return [quota_line(self.report), *_deletion_hints(self.report)]

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return bundle([line(text) for text in self.lines])


def quota_now() -> Quota:
    """Return what is kept for me, for my teams and for all."""
    return Quota(explained(client().storage))


def delete(id: str, attempt: int | None = None) -> str:
    """Delete an ended job for good, or only what one of its attempts wrote; return what was deleted, in a sentence."""
    if attempt is None:
        done: StorageDeleted = explained(client().delete_job, id)
        return f"Deleted: {id} with {size(done.bytes)}."
    done = explained(client().delete_output, id, attempt)
    return f"Deleted: the log and the result of attempt {attempt} of {id}, {size(done.bytes)}."


def quota_line(report: StorageReport) -> str:
    """Return what I keep, by kind, what my teams keep, and all, each with its quota, in one line."""
    mine = f"You keep {_of_limit(report.mine, report.person_limit)}{_by_kind(report.mine_kinds)}"
    parts = [mine, *(_team(team) for team in report.teams), f"all keep {_of_limit(report.whole, report.limit)}"]
    return "; ".join(parts) + "."


def _team(team: StorageTeam) -> str:
    mine = f", {size(team.mine)} of it yours"
    share = f" (at most {size(team.share_limit)})" if team.share_limit is not None else ""
    return f"{plain(team.title or team.team)} keeps {_of_limit(team.bytes, team.limit)}{mine}{share}"


def _of_limit(bytes: int, limit: int | None) -> str:
    return size(bytes) if limit is None else f"{size(bytes)} of {size(limit)}"


def _by_kind(kinds: Mapping[str, int]) -> str:
    named = ", ".join(f"{kind} {size(bytes)}" for kind, bytes in kinds.items())
    return f" ({named})" if named else ""


def _deletion_hints(report: StorageReport) -> list[str]:
    if not report.largest:
        return ["None of your jobs has ended: there is nothing to delete."]
    lines = ["To keep less, delete ended jobs for good, with their files, logs, results and checkpoints:"]
    for job in report.largest[:MAX_NAMED_JOBS]:
        ended = day_clock(job.ended_at)
        lines.append(typed(f"`%delete {job.id}` frees {size(job.bytes)}: {plain(job.name)}, ended {ended}."))
    if (more := len(report.largest) - MAX_NAMED_JOBS) > 0:
        lines.append(f"… and {count(more, 'more job', 'more jobs')} on the page Storage.")
    return lines
