"""Act on everything of one person, for administrators: cancel all their jobs, give their work to another name."""

from __future__ import annotations

from makeway_api.models import PersonWork

from ..store.people import is_retired
from ..store.records import Workload
from .caller import Caller
from .context import Context
from .jobs import cancellation
from .refusals import refuse

AT_ONCE = 200
"""Jobs that are cancelled in one transaction."""


class PeopleService:
    """Work of people who left, were deleted, or come back. Only administrators call it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def cancel_all(self, caller: Caller, name: str) -> PersonWork:
        """Cancel every job of a person that has not ended; notebooks are stopped at the Hub, where they are its."""
        context, cancelled = self._context, 0
        while rows := [row for row in await self._live(name) if row.kind == "job" and not row.cancel_requested]:
            now = context.clock()
            pairs = [cancellation(row, caller.name, now) for row in rows[:AT_ONCE]]
            changes, decisions = [change for change, _ in pairs], [decision for _, decision in pairs]
            cancelled += len(await context.call(context.store.commit, changes, decisions, now=now))
            context.wake()
        return PersonWork(name=name, workloads=cancelled)

    async def give(self, caller: Caller, name: str, to: str) -> PersonWork:
        """File the work of a deleted person under another name: theirs again, or a colleague's who goes on with it."""
        context = self._context
        if not is_retired(name):
            raise refuse(
                f"Only the work of a deleted person can be given away, such as “ana/deleted-1”; {name[:80]} is no such "
                "name. Who is renamed at the Hub keeps their work without this.",
                "not_deleted",
                409,
            )
        person = context.world.people.person(to)
        if is_retired(to) or "/" in to or (person is not None and not person.present):
            raise refuse(
                f"The Hub has no user {to[:80]}, who could have this work: check the name, or add the user at the Hub.",
                "unknown_user",
                404,
            )
        moved = await context.call(context.store.people.give, name, to, caller.name, context.clock())
        await context.world.people.load()
        context.wake()
        return PersonWork(name=to, workloads=moved)

    async def _live(self, name: str) -> list[Workload]:
        return await self._context.world.rows_of((), name)
