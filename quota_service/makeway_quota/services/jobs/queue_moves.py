"""Move pending jobs to other queues: to another team, another profile, or both.

What a submission to that queue would need is needed here. A job keeps its id, its checkpoints and its submission time,
so that it has waited for its new queue as long as for the old one; what a profile fixes is that of the new profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from makeway_api.durations import duration
from makeway_api.models import Job, MoveRequest

from ...control import transitions
from ...control.change_set import decide
from ...engine.snapshot import Profile
from ...policy import Document
from ...store.errors import StorageLimitExceeded
from ...store.records import Change, NewDecision, Workload
from ..caller import Caller
from ..context import Context
from ..eligibility import offers_image, pick_profile, pick_team
from ..refusals import refuse
from .job_access import JobAccess
from .submission_check import check_workers, time_limit_note

MAX_TRIES = 20
"""How often a move is decided anew because the job changed meanwhile, which a waiting one does with each new reason"""
MOVED = "queue_changed"
"""The reason code of a job in a new queue until the next cycle, and the rule of the decision"""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was asked for a job beyond what its profile gives; None: nothing."""

    workers: int | None
    time_limit: int | None


@dataclass(frozen=True, slots=True)
class _Move:
    """What becomes of a job in its new queue."""

    change: Change
    env: Mapping[str, str] | None
    """None: as it was"""
    decisions: tuple[NewDecision, ...]
    notes: tuple[str, ...]


class QueueMoveService:
    """Moves jobs of their owner, or of anyone for an administrator, into queues that the owner may submit to."""

    def __init__(self, context: Context, access: JobAccess) -> None:
        self._context = context
        self._access = access

    async def move(self, caller: Caller, id: str, request: MoveRequest) -> Job:
        """Move a pending job to a queue; a repetition changes nothing.

        The owner has to be in the team. 409 where the job has started or ended; 507 where the bytes that are kept of
        it exceed the quota of the team.
        """
        if request.team is None and request.profile is None:
            raise refuse("Name the team, the profile or both that the job is to wait for.", "no_queue", 422)
        counted = False
        for _ in range(MAX_TRIES):
            row = await self._movable(caller, id)
            team, profile = request.team or row.team or "", request.profile or row.profile
            if (row.team, row.profile) == (team, profile):
                return await self._access.shown(caller, row, whole=True)
            _check_pending(row)
            whole = await self._context.call(self._context.store.whole_workloads, [id])
            if id not in whole:
                continue
            planned = await self._planned(caller, row, whole[id].env, team, profile)
            if not counted:
                self._context.limits.count_request(caller.name)
                counted = True
            if (moved := await self._written(row, planned, team)) is not None:
                self._context.wake()
                job = await self._access.shown(caller, moved, whole=True)
                return job.model_copy(update={"notes": list(planned.notes)})
        raise refuse(f"The job {id} changes all the time, so it was not moved: try again.", "changed", 409)

    async def queues(self, caller: Caller, job: Job) -> list[tuple[str, str]]:
        """Return the queues that a pending job may be moved to, as team and profile; none for other callers."""
        if job.state.value != "pending" or not _may_move(caller, job.owner):
            return []
        document = self._context.document
        queues = [
            (team, name) for team in self._teams(caller, job.owner) for name in document.profiles_for(team, "job")
        ]
        bound = self._is_bound(job.attempt)
        return [queue for queue in queues if queue != (job.team, job.profile) and (queue[0] == job.team or not bound)]

    async def _movable(self, caller: Caller, id: str) -> Workload:
        row = await self._access.visible(caller, id)
        if not _may_move(caller, row.owner):
            raise refuse(
                f"{row.name} belongs to {row.owner}: only they or an administrator can move it to another queue.",
                "not_yours",
                403,
            )
        return row

    def _teams(self, caller: Caller, owner: str) -> tuple[str, ...]:
        """Return the teams of a job's owner, as far as they are known of another person than the caller."""
        context, people = self._context, self._context.world.people
        if caller.name == owner:
            return context.teams_of(caller)
        person = people.person(owner)
        groups = person.groups if person is not None else ()
        return () if people.is_gone(owner) else context.teams_of_user(owner, groups)

    def _check_member(self, caller: Caller, row: Workload, team: str) -> None:
        """Refuse a team that the owner is not in; of a person that the Hub was not heard of only what is certain."""
        context = self._context
        if caller.name == row.owner:
            pick_team(context.teams_of(caller), row.owner, team)
        elif context.document.policy(team) is None or context.world.people.excludes(
            row._replace(team=team), context.document
        ):
            raise refuse(f"{row.owner} is not in the team “{team[:80]}”.", "foreign_team", 403)

    def _is_bound(self, attempt: int) -> bool:
        """Whether a job stays in its team: it has run, and each team keeps checkpoints on a volume of its own."""
        return attempt > 0 and "{team}" in self._context.settings.kubernetes.checkpoint_claim

    def _check_checkpoints(self, row: Workload, team: str) -> None:
        if team != row.team and self._is_bound(row.attempt):
            here, there = self._context.title(row.team), self._context.title(team)
            raise refuse(
                f"{row.name} has run, and its checkpoints are on the volume of {here}, which jobs of {there} do not "
                "see: move it to another profile, or clone it for that team, where it starts from the beginning.",
                "checkpoints_stay",
                409,
            )

    async def _planned(
        self, caller: Caller, row: Workload, env: Mapping[str, str], team: str, profile_name: str
    ) -> _Move:
        """Return what a move changes; MakewayError where a submission to the queue would be refused."""
        context, document = self._context, self._context.document
        self._check_member(caller, row, team)
        self._check_checkpoints(row, team)
        profile = pick_profile(document, row.owner, team, profile_name)
        asked = _asked(document, row)
        check_workers(document, asked.workers, profile)
        fields, new_env = _fields(document, row, asked, profile), _env(document, row, env, profile)
        limit = fields["time_limit"]
        if isinstance(limit, int | float) and row.ran >= limit:
            raise refuse(
                f"{row.name} has run for {duration(row.ran)}, and a job of {profile.name} may run for "
                f"{duration(limit)} in all: move it to a profile with a longer time limit.",
                "time_limit",
                409,
            )
        message = (
            f"{caller.name} moves {row.name} from {context.title(row.team)} ({row.profile}) "
            f"to {context.title(team)} ({profile.name})."
        )
        moved = transitions.move_queue(row, team, MOVED, message, fields)
        told = [decide(row._replace(team=team), "queue", MOVED, message, by=caller.name)]
        if row.team != team:  # for the log and the pages of the team that it leaves
            told.append(NewDecision("queue", None, row.team, row.owner, MOVED, message))
        notes = [*time_limit_note(asked.time_limit, profile), *await self._notes(row, fields["image"], team)]
        return _Move(moved, new_env if new_env != env else None, tuple(told), tuple(notes))

    async def _notes(self, row: Workload, image: object, team: str) -> list[str]:
        """Return what the owner has to know about the pods of the job in its new queue."""
        settings, backend = self._context.settings, self._context.backend
        notes = await backend.pod_notices(row.owner, team)
        if image != row.image:
            default = settings.kubernetes.image
            notes = [f"The job runs in the image {image or default} now, not in {row.image or default}.", *notes]
        return notes

    async def _written(self, row: Workload, planned: _Move, team: str) -> Workload | None:
        """Write a move; None where the job changed meanwhile."""
        context = self._context
        move, now, limits = context.store.move, context.clock(), context.storage.limits
        try:
            return await context.call(move, planned.change, planned.decisions, planned.env, limits, now=now)
        except StorageLimitExceeded as error:
            raise await context.call(context.storage.refusal, row.owner, team, error) from None


def _may_move(caller: Caller, owner: str) -> bool:
    return caller.name == owner or caller.manages_all


def _check_pending(row: Workload) -> None:
    """Refuse a job that does not wait (any more), with what can be done instead."""
    if row.state == "pending":
        return
    if row.live:
        state = "saves its checkpoint to make way" if row.state == "checkpointing" else f"is {row.state}"
        raise refuse(
            f"{row.name} {state}, and only a pending job can be moved to another queue: cancel it and clone it into "
            "that queue, or move it when it waits again.",
            "not_pending",
            409,
        )
    raise refuse(f"{row.name} has ended ({row.state}): clone it into the other queue instead.", "not_pending", 409)


def _asked(document: Document, row: Workload) -> _Asked:
    """Return what was asked for a job, as far as its row tells: what its profile would have given it was not."""
    profile = document.profile(row.profile)
    if profile is None:
        default_gang, default_limit = row.min_workers < row.workers, False
    else:
        default_gang, default_limit = row.workers == profile.workers, row.time_limit == profile.time_limit
    return _Asked(
        workers=None if default_gang else row.workers,
        time_limit=None if row.time_limit is None or default_limit else round(row.time_limit),
    )


def _env(document: Document, row: Workload, env: Mapping[str, str], profile: Profile) -> dict[str, str]:
    """Return the environment of a job in its new queue: that of the profile, and what was given with the job."""
    facts = document.profile_facts.get(row.profile)
    before = facts.env if facts is not None else {}
    own = {name: value for name, value in env.items() if before.get(name) != value}
    return {**document.profile_facts[profile.name].env, **own}


def _fields(document: Document, row: Workload, asked: _Asked, profile: Profile) -> dict[str, object]:
    """Return the columns that a profile fixes, as at a submission."""
    facts = document.profile_facts[profile.name]
    limits = [limit for limit in (asked.time_limit, profile.time_limit) if limit is not None]
    return {
        "profile": profile.name,
        "gpus": profile.gpus,
        "workers": asked.workers or profile.workers,
        "min_workers": asked.workers or profile.min_workers or profile.workers,
        "cpu": profile.cpu,
        "memory": profile.memory,
        "time_limit": min(limits) if limits else None,
        "grace": profile.grace or document.settings.grace,
        "signal": facts.signal,
        "image": _image(document, row, profile),
        "nomination": (),
        "not_before": None,
    }


def _image(document: Document, row: Workload, profile: Profile) -> str | None:
    """Return the image of a job in its new queue: its own where the profile offers it, else the profile's default one.

    A profile that names no image takes that of the notebook which submitted the job, so it stays with that profile.
    """
    default = document.profile_facts[profile.name].default_image
    keeps = offers_image(document, profile.name, row.image) or (default is None and profile.name == row.profile)
    return row.image if keeps else default
