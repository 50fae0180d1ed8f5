"""What happened: the decision log, the live stream, and whether the service is well."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from makeway_api.models import Decision, Event, Health, RetentionReport

from ..store.records import Decision as DecisionRow
from ..store.records import Event as EventRow
from .caller import Caller
from .core import Core, at, refuse
from .retention import retention_report

HEARTBEAT = 15.0


class Journal(Core):
    """Reading what was decided and said."""

    async def decisions(
        self,
        caller: Caller,
        workload: str | None = None,
        team: str | None = None,
        limit: int = 100,
        before: int | None = None,
    ) -> list[Decision]:
        """The decision log, newest first; people see their own teams' lines."""
        teams = self.visible_teams(caller)
        if team is not None:
            if teams is not None and team not in teams:
                raise refuse(f"You are not in the team “{team}”, so its decisions are not shown.", "foreign_team", 403)
            teams = (team,)
        owner = None if team is not None or teams is None else caller.name
        rows = await self.read(self.store.decisions, workload, teams, limit, before, owner=owner)
        return [decision_model(row) for row in rows]

    async def events(self, caller: Caller, after: int | None = None) -> AsyncIterator[Event]:
        """Follow what happens, from event `after` on (None: from now on); ends only when the reader stops."""
        seen = await self.feed.last_id() if after is None else after
        while True:
            mark = self.feed.mark()
            batch = await self.feed.after(seen)
            for row in batch:
                seen = row.id
                if self._shows(caller, row):
                    yield Event(
                        id=row.id, at=at(row.at), kind=row.kind, team=row.team, owner=row.owner, data=dict(row.data)
                    )
            if not batch:
                await self.feed.changed(mark, HEARTBEAT)

    def _shows(self, caller: Caller, event: EventRow) -> bool:
        if caller.sees_all or event.owner == caller.name or event.kind == "policy":
            return True
        return event.team is not None and event.team in self.teams_of(caller)

    async def retention(self) -> RetentionReport:
        """Return what is kept, for how long, and what the last pass removed."""
        return await retention_report(self.store, self.config)

    async def health(self) -> Health:
        """Alive: the process answers."""
        return Health(ok=True, checks={"process": "answers"})

    async def ready(self) -> Health:
        """Return whether the last write succeeded and the loop cycles; it asks neither the database nor the loop."""
        broken = self.store.failure()
        age = self.world.age()
        cycles = age is not None and age < 10 * self.config.tick_seconds
        failure = self.world.failure
        loop = f"last look {age:.0f} s ago" if age is not None else "has not looked yet"
        return Health(
            ok=bool(cycles and not broken and not failure),
            checks={
                "database": "cannot be written" if broken else "writes",
                "loop": failure or loop,
                "policy": f"version {self.world.policy_version}",
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        )


def decision_model(row: DecisionRow) -> Decision:
    """Put a line of the log on the wire."""
    return Decision(
        id=row.id,
        at=at(row.at),
        verb=row.verb,
        workload=row.workload,
        team=row.team,
        owner=row.owner,
        code=row.code,
        message=row.message,
        numbers=dict(row.numbers),
    )
