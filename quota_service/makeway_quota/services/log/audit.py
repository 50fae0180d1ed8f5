"""Show the decision log, the event stream, what is removed when, and the health of the service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from makeway_api.models import Decision, Event, Health, RecordRetention, RetentionReport

from ...store.pages import first_that_fit
from ...store.records import Decision as DecisionRow
from ...store.records import Event as EventRow
from ..answer_size import MAX_LIST, decision_bytes
from ..caller import Caller
from ..context import Context
from ..health import checks, serves
from ..privacy import all_may_read, may_read, private_decision, private_event
from ..refusals import refuse
from ..times import to_datetime, to_optional_datetime
from .event_feed import KEPT, EventFeed

__all__ = ["POSITION", "AuditService", "Batch", "EventRow", "Renew", "decision_model", "event_model"]

HEARTBEAT = 15.0
RECHECK = 10.0
"""Seconds after which a stream checks its caller's rights again, and sends its position where it shows nothing"""
POSITION = "position"
"""Kind of an event with nothing but an id: its reader has everything up to there that it may see"""
PACE = 0.2
"""Seconds from one batch of a stream to the next: events that are committed meanwhile go together"""

Renew = Callable[[], Awaitable[Caller | None]]
"""Return the caller with its rights of now; None once it has none."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a reader may see of the events that were committed since its last batch."""

    caller: Caller
    """with its rights of now"""
    rows: Sequence[EventRow]
    last: int
    """id of the newest event that was looked at"""
    notice: Event | None = None
    """what follows them: a `reset` or a `POSITION`"""


class AuditService:
    """Reads decisions and events; nothing is decided here."""

    def __init__(self, context: Context, feed: EventFeed, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._feed = feed
        self._clock = clock

    async def decisions(
        self,
        caller: Caller,
        workload: str | None = None,
        team: str | None = None,
        limit: int = 100,
        before: int | None = None,
        own: bool = True,
    ) -> list[Decision]:
        """Return the decision log, newest first: the lines of the caller's teams and (`own`) of its own work.

        Without `own` they are the same for everyone who may see these teams. A page ends early, with at least one line,
        where it would be too large.
        """
        context = self._context
        teams = context.visible_teams(caller)
        if team is not None:
            if teams is not None and team not in teams:
                raise refuse(f"You are not in the team “{team}”, so its decisions are not shown.", "foreign_team", 403)
            teams = (team,)
        owner = None if team is not None or teams is None or not own else caller.name

        def read() -> list[Decision]:  # a thousand lines take tens of milliseconds: not in the event loop
            rows = context.store.decisions(workload, teams, limit, before, owner=owner)
            return [self._line(caller, row, own) for row in first_that_fit(rows, decision_bytes, MAX_LIST)]

        return await context.call(read)

    def _line(self, caller: Caller, row: DecisionRow, own: bool) -> Decision:
        line, context = decision_model(row), self._context
        whole = may_read(context, caller, row.owner, row.team) if own else all_may_read(context, caller, row.team)
        return line if whole else private_decision(line)

    def _event(self, caller: Caller, row: EventRow) -> EventRow:
        whole = row.kind not in ("job", "decision") or may_read(self._context, caller, row.owner, row.team)
        return row if whole else private_event(row)

    async def events(
        self, caller: Caller, after: int | None = None, renew: Renew | None = None
    ) -> AsyncIterator[Event]:
        """Yield what happens one by one: see `batches`."""
        async for batch in self.batches(caller, after, renew):
            for row in batch.rows:
                yield event_model(row)
            if batch.notice is not None:
                yield batch.notice

    async def batches(
        self, caller: Caller, after: int | None = None, renew: Renew | None = None, pace: float = PACE
    ) -> AsyncIterator[Batch]:
        """Follow what happens, from event `after` on (None: from now on), until the caller loses its rights.

        `renew` is called at least every `RECHECK` seconds while there are events. A reader whose `after` is too old,
        more than `KEPT` events back or from another database gets one event of kind `reset`: read everything again,
        then follow from there. So does a reader that takes nothing for so long: nothing is kept for it. Where events
        pass that the caller may not see, an event of kind `POSITION` has the id of the last one, at most every
        `RECHECK` seconds: a reader that comes back does not begin before them.
        """
        feed, checked = self._feed, self._clock()
        told_at = checked
        oldest, newest = await feed.range()
        told = seen = newest if after is None else after
        while True:
            if seen < max(oldest - 1, newest - KEPT) or seen > newest:
                yield Batch(caller, (), newest, self._notice("reset", newest, {"oldest": oldest, "after": seen}))
                told = seen = newest
            mark = feed.mark()
            rows = await feed.after(seen)
            if renew is not None and self._clock() - checked > RECHECK:
                renewed = await renew()
                if renewed is None:
                    return
                caller, checked = renewed, self._clock()
            teams, seen = self._context.visible_teams(caller), rows[-1].id if rows else seen
            shown = [self._event(caller, row) for row in rows if _shows(caller, teams, row)]
            if shown:
                told, told_at = shown[-1].id, self._clock()
            silent = seen != told and self._clock() - told_at > RECHECK
            if silent:
                told, told_at = seen, self._clock()
            if rows or silent:
                yield Batch(caller, shown, seen, self._notice(POSITION, seen) if silent else None)
            if rows:
                await asyncio.sleep(pace)
                newest = max(seen, await feed.newest())  # further ahead where the reader was slow
            else:
                await feed.changed(mark, HEARTBEAT)
                await self._context.gate.wait_async()

    def _notice(self, kind: str, id: int, data: Mapping[str, int] = MappingProxyType({})) -> Event:
        return Event(id=id, at=to_datetime(self._context.clock()), kind=kind, data=dict(data))

    async def retention(self) -> RetentionReport:
        """Return what is kept, for how long, and what the last pass removed."""
        return await retention_report(self._context)

    async def health(self) -> Health:
        """Return that the process answers."""
        return Health(ok=True, checks={"process": "answers"})

    async def ready(self, named: bool = False) -> Health:
        """Return whether this replica may get requests, and the state of each part of it; it waits for nothing."""
        parts = checks(self._context, named)
        return Health(ok=serves(parts), checks=parts)


def _shows(caller: Caller, teams: Collection[str] | None, event: EventRow) -> bool:
    """Whether a caller who may see `teams` (None: all) may see an event."""
    if teams is None or event.owner == caller.name or event.kind == "policy":
        return True
    return event.team is not None and event.team in teams


def event_model(row: EventRow) -> Event:
    """Return an event as the API shows it."""
    return Event(id=row.id, at=to_datetime(row.at), kind=row.kind, team=row.team, owner=row.owner, data=dict(row.data))


def decision_model(row: DecisionRow) -> Decision:
    """Return a line of the decision log as the API shows it."""
    return Decision(
        id=row.id,
        at=to_datetime(row.at),
        verb=row.verb,
        workload=row.workload,
        team=row.team,
        owner=row.owner,
        code=row.code,
        message=row.message,
        numbers=dict(row.numbers),
    )


async def retention_report(context: Context) -> RetentionReport:
    """Return the settings with the figures of the last pass; before the first pass without figures."""
    settings = context.settings
    last = await context.call(context.store.pruning.last)
    report: dict[str, Any] = last.report if last else {}
    holdings: dict[str, Any] = report.get("holdings", {})
    days = {
        "workloads": settings.keep_workloads_days,
        "decisions": settings.keep_decisions_days,
        "events": settings.keep_events_days,
    }
    kept = [
        RecordRetention(
            kind=kind,
            days=kept_days or None,
            most=settings.keep_events if kind == "events" else None,
            count=holdings.get(kind, {}).get("count", 0),
            oldest=to_optional_datetime(holdings.get(kind, {}).get("oldest")),
        )
        for kind, kept_days in days.items()
    ]
    return RetentionReport(
        at=to_optional_datetime(last.at if last else None),
        kept=kept,
        removed=report.get("removed", {}),
        folders_failed=report.get("folders_failed", 0),
        database_bytes=report.get("bytes", 0),
        free_bytes=report.get("free_bytes", 0),
        artifacts=report.get("artifacts", 0),
        artifact_bytes=report.get("artifact_bytes", 0),
    )
