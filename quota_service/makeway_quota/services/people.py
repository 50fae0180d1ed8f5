"""Act on everything of one person, for administrators: cancel all their jobs, give their work to another name."""

from __future__ import annotations

from collections.abc import Sequence

from makeway_api.models import PersonWork

from ..control.hub.client import HubUnreachable
from ..quarantine import concerns_all
from ..store.people import is_retired
from ..store.records import Workload
from .caller import Caller
from .context import Context
from .jobs.jobs import cancellation
from .refusals import busy, refuse, some_failed

AT_ONCE = 200
"""Jobs that are cancelled in one transaction."""


class PeopleService:
    """Work of people who left, were deleted, or come back. Only administrators call it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def cancel_all(self, caller: Caller, name: str) -> PersonWork:
        """Cancel every job of a person that has not ended; notebooks are stopped at the Hub, where they are its."""
        context, cancelled, refused = self._context, 0, dict[str, Exception]()
        name = await context.find_person(name)
        if context.world.people.person(name) is None and not await self._live(name):
            await self._check_user(name, "whose jobs could be cancelled")
        while rows := [row for row in await self._cancellable(name) if row.id not in refused][:AT_ONCE]:
            cancelled += await self._cancel(caller, rows, refused)
            context.wake()
        if refused:
            raise some_failed("cancelled", refused)
        return PersonWork(name=name, workloads=cancelled)

    async def _cancellable(self, name: str) -> list[Workload]:
        return [row for row in await self._live(name) if row.kind == "job" and not row.cancel_requested]

    async def _cancel(self, caller: Caller, rows: Sequence[Workload], refused: dict[str, Exception]) -> int:
        """Cancel jobs together; where that fails by one of them, all others; return how many."""
        context, now = self._context, self._context.clock()
        try:
            ends = [cancellation(row, caller.name, now) for row in rows]
            changes, decisions = [end.change for end in ends], [decision for end in ends for decision in end.decisions]
            return len(await context.call(context.store.commit, changes, decisions, now=now))
        except Exception as error:
            if concerns_all(error.__cause__ or error):
                raise
            if len(rows) < 2:
                refused |= {row.id: error for row in rows}
                return 0
        middle = len(rows) // 2
        return await self._cancel(caller, rows[:middle], refused) + await self._cancel(caller, rows[middle:], refused)

    async def give(self, caller: Caller, name: str, to: str) -> PersonWork:
        """File the work of a deleted person under another name: theirs again, or a colleague's who goes on with it."""
        context, people = self._context, self._context.world.people
        name, to = await context.find_person(name), await context.find_person(to)
        if not is_retired(name):
            raise refuse(
                f"Only the work of a deleted person can be given away, such as “ana/deleted-1”; {name[:80]} is no such "
                "name. Who is renamed at the Hub keeps their work without this.",
                "not_deleted",
                409,
            )
        if people.person(name) is None and not await self._live(name):
            raise refuse(
                f"There is no work of {name[:80]}: the panel's list of workloads shows the names of those who were "
                "deleted.",
                "not_found",
                404,
            )
        await self._check_user(to, "who could have this work")
        moved = await context.call(context.store.people.give, name, to, caller.name, context.clock())
        await context.world.people.load()
        context.wake()
        return PersonWork(name=to, workloads=moved)

    async def _check_user(self, name: str, what: str) -> None:
        """Refuse a name that is no user of the Hub, which is asked where nothing was heard of them."""
        try:
            there = await self._context.world.people.exists(name)
        except HubUnreachable as error:
            raise busy(
                f"The Hub does not answer whether it has a user {name[:80]} ({error}): try again later.",
                "hub_unreachable",
                503,
                5,
            ) from None
        if not there:
            raise refuse(
                f"The Hub has no user {name[:80]}, {what}: check the name, or add the user at the Hub.",
                "unknown_user",
                404,
            )

    async def _live(self, name: str) -> list[Workload]:
        return await self._context.world.rows_of((), name)
