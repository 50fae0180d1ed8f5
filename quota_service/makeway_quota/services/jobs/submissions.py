"""Submit jobs: check, limit, write, and wake the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from makeway_api.errors import MakewayError
from makeway_api.models import DryRun, Job, JobRequest, Kind, Priority
from pydantic import ValidationError

from ...control.world.followers import Follower
from ...control.world.world import World
from ...engine.snapshot import Profile
from ...policy import Document
from ...store.accounts import ROW_BYTES
from ...store.errors import Conflict, StorageLimitExceeded
from ...store.records import NewDecision, SharedFiles, SubmissionKey, Workload
from ...store.rows import payload_bytes_of
from ...wording import gpus, outcomes
from .. import views
from ..caller import Caller
from ..cluster.offers import OfferService
from ..context import Context
from ..eligibility import offers_image, pick_profile, pick_team
from ..idempotency import RequestsUnderWay, clone_key, key_of, submitted_before
from ..limits.user_limits import Reservation
from ..refusals import database_errors, refuse
from .job_access import JobAccess
from .job_image import ImageChoice, choose_image, image_note, submitting_session
from .submission_batches import Files, SubmissionBatcher
from .submission_check import Files as DecodedFiles
from .submission_check import bytes_of, check_process, check_workers, new_job, read_files, signal_note, time_limit_note

FIRST_DECISION = 0.15
"""Seconds that a submission waits for its first decision, so that the answer can say more than `pending`."""
RECENT_JOBS = 20
"""Newest jobs of its owner among which a submission looks for one of the same name"""
SHORT_QUEUE = 500
"""Pending jobs up to which the first decision is worth waiting for: with more of them it takes longer than writing."""


class SubmissionService:
    """Takes jobs into the queue. The cost of one does not depend on the number of jobs."""

    def __init__(self, context: Context, access: JobAccess, offers: OfferService) -> None:
        self._context = context
        self._access = access
        self._offers = offers
        self._batcher = SubmissionBatcher(context.store, context.clock)
        self._under_way = RequestsUnderWay()

    def close(self) -> None:
        """End the thread that writes."""
        self._batcher.close()

    async def submit(self, caller: Caller, request: JobRequest, key: str | None = None) -> Job | DryRun:
        """Take a job into the queue, or return what would happen (`dry_run`).

        A request that is repeated with the same `key` (Idempotency-Key) returns the job of the first one.
        """
        known = await key_of(self._context, caller, key, "submit", request)
        async with self._under_way.turn(known):
            try:
                return await self._submit(caller, request, known)
            except MakewayError as refused:
                before = await submitted_before(self._context, caller, [known] if known else [], refused)
                if before is None:
                    raise
                return await self._access.shown(caller, before[0], whole=True)

    async def _submit(self, caller: Caller, request: JobRequest, key: SubmissionKey | None) -> Job | DryRun:
        context = self._context
        team, profile = self._pick_queue(caller, request)
        check_process(request)
        check_workers(context.document, request.workers, profile)
        choice = await self._image(caller, request, profile)
        files = await self._files(request) if request.files else ()
        if request.clone_of is not None:
            await self._access.visible(caller, request.clone_of)
        if request.dry_run:
            answer = await self._dry_run(caller, request, team, profile.name, bytes_of(files))
            notes = [
                *time_limit_note(request.time_limit, profile),
                *await self._notes(caller, team, choice, choice.image),
                *await self._checkpoint_notes(caller, request, profile),
            ]
            return answer.model_copy(update={"image": choice.image, "notes": notes})
        await context.count_existing_jobs()
        size = payload_bytes_of(request.command, request.env, request.source)
        kept = size + ROW_BYTES + bytes_of(files)
        with context.limits.submitting(caller.name, 1, size, len(files)) as reservation:
            async with context.storage.room_for(caller.name, team, kept, context.call):
                await self._store_large_files(files)
                job = await self._add(caller, request, team, profile, files, reservation, key)
        notes = [
            *time_limit_note(request.time_limit, profile),
            *await self._notes(caller, team, choice, job.image),
            *await self._checkpoint_notes(caller, request, profile, job.id),
        ]
        return job.model_copy(update={"notes": notes})

    async def queues(self, caller: Caller) -> list[tuple[str, str]]:
        """Return the queues that a caller may submit jobs to, as team and profile."""
        context = self._context
        profiles_for = context.document.profiles_for
        return [(team, name) for team in context.teams_of(caller) for name in profiles_for(team, "job")]

    async def clone(
        self, caller: Caller, id: str, many: int, overrides: Mapping[str, Any], key: str | None = None
    ) -> list[Job]:
        """Submit copies of a job, changed by `overrides` (fields of a submission).

        Files are copied by digest. The environment is copied for the owner only: it may hold secrets. A request that
        is repeated with the same `key` submits the copies that are missing, and returns all.
        """
        known = await clone_key(self._context, caller, key, id, many, overrides)
        keys = [known and known._replace(number=number) for number in range(many)]
        async with self._under_way.turn(known):
            try:
                return await self._clone(caller, id, overrides, keys)
            except MakewayError as refused:
                before = await submitted_before(self._context, caller, [key for key in keys if key], refused)
                if before is None:
                    raise
                return [await self._access.shown(caller, row) for row in before]

    async def _clone(
        self, caller: Caller, id: str, overrides: Mapping[str, Any], keys: Sequence[SubmissionKey | None]
    ) -> list[Job]:
        context = self._context
        await self._access.readable(caller, id)
        original = await context.call(context.store.workload, id)
        if original is None:
            raise refuse(f"The job “{id[:80]}” was removed meanwhile.", "not_found", 404)
        request = _copy_of(context.document, original, caller, overrides)
        team, profile = self._pick_queue(caller, request)
        check_process(request)
        check_workers(context.document, request.workers, profile)
        files: Files
        if "files" in overrides:
            sent = await self._files(request)
            files, count = sent, len(sent)
        else:
            count = len(await context.call(context.store.contents.list_files, id))
            files = SharedFiles(id, count)
        await context.count_existing_jobs()
        size = payload_bytes_of(request.command, request.env, request.source)
        with context.limits.submitting(caller.name, len(keys), size, count) as reservation:
            kept = (size + ROW_BYTES) * len(keys) + (0 if isinstance(files, SharedFiles) else bytes_of(files))
            async with context.storage.room_for(caller.name, team, kept, context.call):
                await self._store_large_files(files)
                first = await self._add(caller, request, team, profile, files, reservation, keys[0])
                shared = SharedFiles(first.id, count)
                rest = [self._add(caller, request, team, profile, shared, reservation, key) for key in keys[1:]]
                jobs = [first, *await asyncio.gather(*rest)]
            return jobs if len(jobs) == 1 else [job.model_copy(update={"command": [], "source": ""}) for job in jobs]

    async def _files(self, request: JobRequest) -> DecodedFiles:
        context = self._context
        return await context.call(read_files, request, context.settings.max_files_bytes)

    async def _store_large_files(self, files: Files) -> None:
        """Write large files, once the limits allow the submission; here no other submission waits for them."""
        if files and not isinstance(files, SharedFiles):
            await self._context.call(self._context.store.contents.keep, files)

    def _pick_queue(self, caller: Caller, request: JobRequest) -> tuple[str, Profile]:
        document = self._context.document
        team = pick_team(self._context.teams_of(caller), caller.name, request.team)
        return team, pick_profile(document, caller.name, team, request.profile)

    async def _add(
        self,
        caller: Caller,
        request: JobRequest,
        team: str,
        profile: Profile,
        files: Files,
        reservation: Reservation,
        key: SubmissionKey | None,
    ) -> Job:
        context = self._context
        while True:
            image = (await self._image(caller, request, profile)).image
            new = new_job(context.document, request, caller.name, team, profile, image)
            size = new.gpus * new.workers
            message = f"{caller.name} submits {new.name}: {gpus(size)} for {context.title(team)}."
            decision = NewDecision("submit", new.id, team, caller.name, "job", message, {"gpus": size / 1000})
            reservation.expect(new.id)
            with context.world.follow(new.id) as follower:
                try:
                    with database_errors():
                        row = await self._batcher.submit(new, files, decision, key, context.storage.limits)
                except StorageLimitExceeded as error:  # others were taken since the check
                    raise await context.call(context.storage.refusal, caller.name, team, error) from None
                except Conflict:  # the id is taken, which another try mends, or the job whose files it shares is gone
                    if isinstance(files, SharedFiles):
                        await self._access.visible(caller, files.workload)
                    continue
                if row.id != new.id:
                    return await self._access.shown(caller, row, whole=True)
                context.wake()
                if context.limits.waiting <= SHORT_QUEUE:
                    now = await _first_decision(row, follower)
                    row = now._replace(command=row.command, env=row.env, source=row.source)
            return await self._access.shown(caller, row)

    async def _image(self, caller: Caller, request: JobRequest, profile: Profile) -> ImageChoice:
        """Return the image that a submission gets now."""
        rows = () if request.server is None else await self._context.world.rows_of((), caller.name)
        session = submitting_session(rows, caller.name, request)
        return choose_image(self._context.document, profile, request.image, session)

    async def _notes(self, caller: Caller, team: str, choice: ImageChoice, image: str | None) -> list[str]:
        """Return what the owner has to know about the pods of a job with this image, and about its checkpoints."""
        settings, backend = self._context.settings, self._context.backend
        notes = await backend.pod_notices(caller.name, team)
        if "kubernetes" in settings.backends:
            notes = [image_note(image, choice, settings.kubernetes.image), *notes]
        failure = self._context.world.checkpoint_failures.of(team, self._context.clock())
        return [*notes, outcomes.checkpoint_risk(self._context.title(team), failure)] if failure else notes

    async def _checkpoint_notes(self, caller: Caller, request: JobRequest, profile: Profile, id: str = "") -> list[str]:
        """Return why the job may not save in time: by its profile's signal, and by the last job of this name."""
        document = self._context.document
        grace = profile.grace or document.settings.grace
        notes = signal_note(document.profile_facts[profile.name].signal, request)
        if request.name.strip():
            notes += await self._context.call(self._slow_saves, caller.name, request.name.strip(), grace, id)
        return notes

    def _slow_saves(self, owner: str, name: str, grace: float, id: str) -> list[str]:
        store = self._context.store
        recent, _ = store.workloads("job", owner, limit=RECENT_JOBS)
        named = [row for row in recent if row.name == name and row.id != id]
        progress = store.progress.of([row.id for row in named])
        for row in named:
            saved = progress.get(row.id)
            if saved is not None and saved.report.get("save_seconds") is not None:
                slow = views.slow_save(saved, grace)
                return (
                    [f"Your previous job of this name, {row.id}, saved slowly: {slow}; {outcomes.FASTER_SAVES}."]
                    if slow
                    else []
                )
        return []

    async def _dry_run(self, caller: Caller, request: JobRequest, team: str, profile: str, size: int) -> DryRun:
        offer, in_quota = await self._offers.offer(team, profile, Kind.JOB, caller.name)
        known = self._context.document.profile(profile)
        durable = known is None or _keep_checkpoints(self._context.world, known.pools)
        risk = "" if in_quota else outcomes.over_quota_risk(None, durable)
        return DryRun(offer=offer, command=request.command, files=len(request.files), bytes=size, risk=risk)


def _keep_checkpoints(world: World, pools: Collection[str]) -> bool:
    """Whether all backends with nodes in these pools leave the checkpoints of an attempt to the next one."""
    named = {node.backend for name, node in world.observed.nodes.items() if _in_any_pool(world, name, pools)}
    return all(world.durable_checkpoints(backend) for backend in named or {""})


def _in_any_pool(world: World, host: str, pools: Collection[str]) -> bool:
    return any(pool in pools for pool, _ in world.assignment.pools_of(host))


async def _first_decision(row: Workload, follower: Follower) -> Workload:
    deadline = time.monotonic() + FIRST_DECISION
    while row.version <= 1 and not row.reason_code and (remaining := deadline - time.monotonic()) > 0:
        await follower.wait_for_change(remaining)
        row = follower.row or row
    return row


def _copy_of(document: Document, original: Workload, caller: Caller, overrides: Mapping[str, Any]) -> JobRequest:
    """Return the submission that a clone stands for; without files, unless `overrides` has some.

    It has the image of the original while its profile offers that, else the profile's default one; and its number of
    workers in the same profile, where that is not the profile's own.
    """
    profile = overrides.get("profile") or original.profile
    known = document.profile(profile)
    same = known is not None and profile == original.profile and known.workers != original.workers
    env = original.env if original.owner == caller.name else {}
    base: dict[str, Any] = {
        "name": original.name,
        "team": original.team,
        "profile": original.profile,
        "command": list(original.command),
        "env": {name: value for name, value in env.items() if not name.startswith("MAKEWAY_")},
        "priority": Priority(original.priority),
        "max_failures": original.max_failures,
        "time_limit": None if original.time_limit is None else round(original.time_limit),
        "source": original.source,
        "workers": original.workers if same else None,
        "image": original.image if offers_image(document, profile, original.image) else None,
    }
    try:
        return JobRequest.model_validate({**base, **overrides, "clone_of": original.id, "dry_run": False})
    except ValidationError as error:
        first = error.errors()[0]
        raise refuse(
            f"The clone cannot be made: {'.'.join(map(str, first['loc']))}: {first['msg']}.", "bad_override", 422
        ) from None
