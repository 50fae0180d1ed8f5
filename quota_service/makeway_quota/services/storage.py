"""Show and delete what people leave: files, results, logs, jobs and their folders. `storage_limits` limits it.

Every deletion is a series of small transactions, which a full disk has room for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from makeway_api.models import StorageAccount, StorageDelete, StorageDeleted, StorageReport

from ..store.accounts import KINDS, AccountLine
from ..store.records import NewDecision
from .caller import Caller
from .context import Context
from .job_access import JobAccess
from .refusals import refuse

AT_ONCE = 50
"""Ended jobs that are deleted one after the other before others are looked for"""
PIECES_AT_ONCE = 200
"""Pieces of outputs that one transaction removes, some megabytes at most"""


class StorageService:
    """Shows what is kept and deletes it. Owners and team leads delete jobs, administrators what a person has left."""

    def __init__(self, context: Context, access: JobAccess) -> None:
        self._context = context
        self._access = access

    async def report(self, caller: Caller) -> StorageReport:
        """Return what is kept for a caller, for an administrator of everybody."""
        return await self._context.call(self._report, caller)

    def _report(self, caller: Caller) -> StorageReport:
        store, settings = self._context.store, self._context.settings
        lines = store.accounts.listed(None if caller.admin else caller.name)
        room = self._context.storage.room()
        return StorageReport(
            accounts=_accounts(lines),
            mine=sum(line.bytes for line in lines if line.owner == caller.name),
            kinds=_by_kind(lines),
            person_limit=settings.max_kept_person_bytes or None,
            team_limit=settings.max_kept_team_bytes or None,
            limit=settings.max_kept_bytes or None,
            database_bytes=store.size() if caller.admin else 0,
            free_bytes=room.free if room else None,
            reserve_bytes=room.reserve if room else None,
        )

    async def delete_job(self, caller: Caller, id: str) -> StorageDeleted:
        """Delete one ended job for good; 409 for one that has not ended."""
        row = await self._access.changeable(caller, id, "delete")
        if row.live:
            raise refuse(f"{row.name} has not ended ({row.state}): cancel it first.", "not_ended", 409)

        def delete() -> StorageDeleted:
            before, _, _ = self._context.store.accounts.of(row.owner, "")
            gone = self._delete([row.id], caller)
            return StorageDeleted(jobs=gone, bytes=self._counted(row.owner, before))

        return await self._context.call(delete)

    async def delete_of_person(self, caller: Caller, request: StorageDelete) -> StorageDeleted:
        """Delete the ended jobs of a person for good."""
        now = self._context.clock()
        before = now + 1 if request.ended_before is None else request.ended_before.timestamp()

        def delete() -> StorageDeleted:
            store, owner, gone = self._context.store, self._context.world.people.named(request.owner), 0
            there, _, _ = store.accounts.of(owner, "")
            while ids := store.pruning.ended_jobs(owner, before, AT_ONCE):
                deleted = self._delete(ids, caller)
                gone += deleted
                if not deleted:
                    break
            return StorageDeleted(jobs=gone, bytes=self._counted(owner, there))

        return await self._context.call(delete)

    def _delete(self, ids: Sequence[str], caller: Caller) -> int:
        """Remove ended jobs with everything of theirs, in small transactions; return how many were removed."""
        store, now, gone = self._context.store, self._context.clock(), 0
        for id in ids:
            while store.pruning.forget_outputs_of([id], PIECES_AT_ONCE):
                pass
            if (row := store.pruning.forget_ended(id, now)) is not None:
                gone += 1
                name = row.name or id
                message = f"{caller.name} deleted {name} of {row.owner}, with its files, log, result and checkpoints."
                store.commit([], [NewDecision("delete", id, row.team, row.owner, "deleted", message)], now=now)
        store.pruning.ask_for_sweep()
        return gone

    def _counted(self, owner: str, before: int) -> int:
        """Count a person's account anew and return by how much it is smaller."""
        store = self._context.store
        store.accounts.recount(owner)
        after, _, _ = store.accounts.of(owner, "")
        return max(0, before - after)


def _by_kind(lines: Sequence[AccountLine]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for line in lines:
        counted[line.kind] += line.bytes
    return {kind: counted[kind] for kind in KINDS if counted[kind]}


def _accounts(lines: Sequence[AccountLine]) -> list[StorageAccount]:
    """Return the accounts of each person in each team, the largest first, as many as fit into an answer."""
    found: dict[tuple[str, str], list[AccountLine]] = {}
    for line in lines:
        found.setdefault((line.owner, line.team), []).append(line)
    made = [
        StorageAccount(owner=owner, team=team, bytes=sum(each.bytes for each in of), kinds=_by_kind(of))
        for (owner, team), of in found.items()
    ]
    return sorted(made, key=lambda one: (-one.bytes, one.owner, one.team))[:5000]
