"""Show and delete what people leave: files, results, logs, jobs and their folders. `storage_limits` limits it.

Every deletion is a series of small transactions, which a full disk has room for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from makeway_api.models import (
    AttemptStorage,
    JobStorage,
    StorageAccount,
    StorageDelete,
    StorageDeleted,
    StorageJob,
    StorageReport,
    StorageTeam,
)

from ...engine.snapshot import ADMITTED
from ...quarantine import concerns_all
from ...store.accounts import KINDS, AccountLine
from ...store.records import NewDecision, Workload
from ...store.storage.job_sizes import OutputSize
from ..caller import Caller
from ..context import Context
from ..refusals import backend_errors, refuse, some_failed
from .job_access import JobAccess
from .storage_measurements import MeasuredStorage, StorageMeasurements

AT_ONCE = 50
"""Ended jobs that are deleted one after the other before others are looked for"""
PIECES_AT_ONCE = 200
"""Pieces of outputs that one transaction removes, some megabytes at most"""
MAX_ATTEMPTS = 100
LARGEST = 10
"""Ended jobs that a report names"""


class StorageService:
    """Shows what is kept and deletes it. Owners and team leads delete jobs, administrators what a person has left."""

    def __init__(self, context: Context, access: JobAccess) -> None:
        self._context = context
        self._access = access
        self._measurements = StorageMeasurements(self._measure, context.clock)

    async def report(self, caller: Caller) -> StorageReport:
        """Return what is kept for a caller, for an administrator of everybody."""
        return await self._context.call(self._report, caller)

    def _report(self, caller: Caller) -> StorageReport:
        store, settings = self._context.store, self._context.settings
        lines = store.accounts.list_lines(None if caller.admin else caller.name)
        mine = [line for line in lines if line.owner == caller.name]
        room = self._context.storage.disk_space()
        teams = self._teams(caller, mine)
        return StorageReport(
            accounts=_accounts(lines),
            mine=sum(line.bytes for line in mine),
            mine_kinds=_queue_apart(_by_kind(mine), store.job_sizes.queued(caller.name)),
            teams=teams[1:],
            largest=[
                StorageJob(
                    id=job.id,
                    name=job.name or job.id,
                    team=job.team,
                    ended_at=datetime.fromtimestamp(job.ended_at, UTC),
                    bytes=job.bytes,
                )
                for job in store.job_sizes.largest(caller.name, LARGEST)
            ],
            kinds=_by_kind(lines),
            whole=teams[0].bytes,
            person_limit=settings.max_kept_person_bytes or None,
            team_limit=settings.max_kept_team_bytes or None,
            limit=settings.max_kept_bytes or None,
            database_bytes=store.size() if caller.admin else 0,
            free_bytes=room.free if room else None,
            reserve_bytes=room.reserve if room else None,
        )

    def _teams(self, caller: Caller, mine: Sequence[AccountLine]) -> list[StorageTeam]:
        """Return all together under the name "", and then each team that the caller is in, or keeps bytes in."""
        context = self._context
        held: Counter[str] = Counter()
        for line in mine:
            held[line.team] += line.bytes
        names = [*dict.fromkeys([*context.teams_of(caller), *(team for team in sorted(held) if team)])]
        sums = context.store.accounts.of_teams(names)
        limit, share = context.settings.max_kept_team_bytes or None, context.settings.max_kept_share_bytes or None
        return [StorageTeam(team="", bytes=sums[""])] + [
            StorageTeam(
                team=name, title=context.title(name), mine=held[name], bytes=sums[name], limit=limit, share_limit=share
            )
            for name in names
        ]

    async def job(self, caller: Caller, id: str) -> JobStorage:
        """Return what is kept of a job that the caller may read, by kind and attempt."""
        return await self._measure(await self._access.readable(caller, id))

    async def measured(self, caller: Caller, id: str) -> MeasuredStorage:
        """Return the same as it was measured last, for pages: all that are open share one measurement."""
        return await self._measurements.latest(await self._access.readable(caller, id))

    async def _measure(self, row: Workload) -> JobStorage:
        attempts = await self._context.call(self._context.store.attempts, row.id)
        numbers = [attempt.number for attempt in attempts][-MAX_ATTEMPTS:]
        written = await self._outputs(row, numbers)
        kinds = await self._context.call(self._measured, row.id)
        return JobStorage(
            bytes=sum(kinds.values()),
            kinds={kind: kinds[kind] for kind in KINDS if kinds.get(kind)},
            attempts=[
                AttemptStorage(
                    attempt=number, log=written[number].log, result=written[number].result, ended=_is_over(row, number)
                )
                for number in numbers
            ],
        )

    async def _outputs(self, row: Workload, numbers: Sequence[int]) -> dict[int, OutputSize]:
        sent = await self._context.call(self._context.store.job_sizes.outputs, row.id)
        with backend_errors():
            kept = {number: await self._context.backend.output_bytes(row.id, number) for number in numbers}
        return {
            number: sent.get(number, OutputSize()) if size is None else OutputSize(*size)
            for number, size in kept.items()
        }

    def _measured(self, id: str) -> dict[str, int]:
        """Return the bytes of a job by kind, its folder as it is now."""
        store, backend = self._context.store, self._context.backend
        with suppress(OSError):  # such as too many open files: the newest known size is shown
            if (folder := backend.folder_bytes(id)) is not None:
                store.accounts.measured({id: folder}, self._context.clock())
        return store.job_sizes.of(id)

    async def delete_output(self, caller: Caller, id: str, attempt: int) -> StorageDeleted:
        """Delete the log, result and exception of an attempt for good; 409 while the attempt runs."""
        row = await self._access.changeable(caller, id, "delete the output of")
        if not any(known.number == attempt for known in await self._context.call(self._context.store.attempts, id)):
            raise refuse(f"{row.name} has no attempt {attempt:,}.", "not_found", 404)
        if not _is_over(row, attempt):
            message = (
                f"Attempt {attempt} of {row.name} has not ended ({row.state}): what it writes is deleted after that."
            )
            raise refuse(message, "not_ended", 409)
        before = sum((await self._outputs(row, [attempt]))[attempt])
        with backend_errors():
            await self._context.backend.remove_output(id, attempt)
        try:
            await self._context.call(self._delete_output, caller, row, attempt)
        finally:
            self._measurements.forget(row.id)
        return StorageDeleted(jobs=0, bytes=before)

    def _delete_output(self, caller: Caller, row: Workload, attempt: int) -> None:
        store, now = self._context.store, self._context.clock()
        while store.pruning.forget_outputs_of(row.id, PIECES_AT_ONCE, now, attempt):
            pass
        self._measured(row.id)
        message = f"{caller.name} deleted the log and the result of attempt {attempt} of {row.name}."
        store.commit([], [NewDecision("delete", row.id, row.team, row.owner, "deleted", message)], now=now)
        store.accounts.recount(row.owner)

    async def delete_job(self, caller: Caller, id: str) -> StorageDeleted:
        """Delete one ended job for good; 409 for one that has not ended."""
        row = await self._access.changeable(caller, id, "delete")
        if row.live:
            raise refuse(f"{row.name} has not ended ({row.state}): cancel it first.", "not_ended", 409)
        refused: dict[str, Exception] = {}
        deleted = await self._context.call(self._delete_all, caller, row.owner, [row.id], refused)
        if refused:
            raise some_failed("deleted", refused)
        return deleted

    async def delete_of_person(self, caller: Caller, request: StorageDelete) -> StorageDeleted:
        """Delete the ended jobs of a person for good."""
        now, owner = self._context.clock(), await self._context.find_person(request.owner)
        before = now + 1 if request.ended_before is None else request.ended_before.timestamp()

        def delete() -> StorageDeleted:
            store, jobs, size, refused = self._context.store, 0, 0, dict[str, Exception]()
            while ids := store.pruning.ended_jobs(owner, before, AT_ONCE, [(id,) for id in refused]):
                known = len(refused)
                done = self._delete_all(caller, owner, ids, refused)
                jobs, size = jobs + done.jobs, size + done.bytes
                if not done.jobs and len(refused) == known:
                    break
            if refused:
                raise some_failed("deleted", refused)
            return StorageDeleted(jobs=jobs, bytes=size)

        return await self._context.call(delete)

    def _delete_all(
        self, caller: Caller, owner: str, ids: Sequence[str], refused: dict[str, Exception]
    ) -> StorageDeleted:
        """Remove ended jobs of a person with everything of theirs, in small transactions.

        One that cannot be removed is added to `refused`, and keeps no other. The bytes are those of the jobs that this
        call removed, whatever others remove or add at the same time.
        """
        jobs = size = 0
        for id in ids:
            try:
                held = self._delete_one(caller, id)
            except Exception as error:
                if concerns_all(error):
                    raise
                refused[id] = error
                continue
            if held is not None:
                jobs, size = jobs + 1, size + held
        self._context.store.accounts.recount(owner)
        return StorageDeleted(jobs=jobs, bytes=size)

    def _delete_one(self, caller: Caller, id: str) -> int | None:
        """Remove an ended job with everything of it, and return its bytes; None if it is gone, or lives."""
        store, now = self._context.store, self._context.clock()
        held = sum(self._measured(id).values())
        while store.pruning.forget_outputs_of(id, PIECES_AT_ONCE, now):
            pass
        row = store.pruning.forget_ended(id, now)
        if row is None:
            return None
        if row.outside and caller.name == row.owner:  # who tidies up for others holds no one up
            self._context.storage.note_deleted(row.owner, row.outside)
        message = f"{caller.name} deleted {row.name or id} of {row.owner}, with its files, log, result and checkpoints."
        store.commit([], [NewDecision("delete", id, row.team, row.owner, "deleted", message)], now=now)
        return held


def _is_over(row: Workload, attempt: int) -> bool:
    """Whether an attempt of a job no longer writes."""
    return not (row.state in ADMITTED and row.attempt == attempt)


def _by_kind(lines: Sequence[AccountLine]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for line in lines:
        counted[line.kind] += line.bytes
    return {kind: counted[kind] for kind in KINDS if counted[kind]}


def _queue_apart(kinds: dict[str, int], queued: int) -> dict[str, int]:
    """Return bytes by kind with those of jobs that have not ended apart."""
    queue = min(queued, kinds.get("jobs", 0))
    apart = {"queue": queue, **kinds, "jobs": kinds.get("jobs", 0) - queue}
    return {kind: size for kind, size in apart.items() if size}


def _accounts(lines: Sequence[AccountLine]) -> list[StorageAccount]:
    """Return the accounts of each person in each team, the largest first, as many as fit into an answer."""
    by_account: dict[tuple[str, str], list[AccountLine]] = {}
    for line in lines:
        by_account.setdefault((line.owner, line.team), []).append(line)
    made = [
        StorageAccount(owner=owner, team=team, bytes=sum(line.bytes for line in of), kinds=_by_kind(of))
        for (owner, team), of in by_account.items()
    ]
    return sorted(made, key=lambda one: (-one.bytes, one.owner, one.team))[:5000]
