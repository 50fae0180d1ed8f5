"""Show, cancel, resume and test training jobs."""

from __future__ import annotations

import asyncio

from makeway_api.models import Decision, Job, JobPage, State

from ...control import transitions
from ...control.transitions import TIME_LIMIT, Transition
from ...engine.snapshot import LIVE
from ...store.pages import cursor_after, first_that_fit
from ...store.records import Workload
from ..answer_size import MAX_LIST, decision_bytes, job_bytes
from ..caller import Caller
from ..context import Context
from ..eligibility import pick_profile, pick_team
from ..log.audit import decision_model
from ..privacy import private_decision
from ..refusals import refuse
from .job_access import JobAccess

MAX_TRIES = 5
"""Times that a change is tried of a job that changes at the same moment"""
PAUSE = 0.1
"""Seconds before the second try; one more of them before each later one"""


class JobService:
    """Everything about training jobs but their submission and what they write."""

    def __init__(self, context: Context, access: JobAccess) -> None:
        self._context = context
        self._access = access

    async def job(self, caller: Caller, id: str, wait: float = 0, version: int | None = None) -> Job:
        """Return one job with its attempts; with `wait`, as soon as it is newer than `version`."""

        async def fetch() -> Workload:
            return await self._access.visible(caller, id)

        row = await self._context.wait_for_change(id, fetch, wait, version)
        return await self._access.shown(caller, row, whole=True)

    async def jobs(
        self,
        caller: Caller,
        team: str | None = None,
        state: str | None = None,
        mine: bool = False,
        limit: int = 100,
        cursor: str | None = None,
    ) -> JobPage:
        """Return jobs that the caller may see, newest first. `state`: one, several by comma, or `live`.

        They come without command, source and attempts. A page ends early, with at least one job, where it would be
        too large.
        """
        context = self._context
        teams = context.visible_teams(caller)
        if team is not None:
            if teams is not None and team not in teams:
                raise refuse(f"You are not in the team “{team[:80]}”, so its jobs are not shown.", "foreign_team", 403)
            teams = (team,)
        states = _states(state)
        owner = caller.name if mine else None
        within = None if mine else teams
        model = await context.read_models.current()

        def read() -> JobPage:  # a thousand jobs take tens of milliseconds: not in the event loop
            try:
                rows, following = context.store.workloads("job", owner, within, states, limit, cursor)
            except ValueError:
                raise refuse("That cursor does not come from this service.", "bad_cursor", 422) from None
            shown = first_that_fit(rows, job_bytes, MAX_LIST)
            if len(shown) < len(rows):
                following = cursor_after(shown[-1])
            progress = context.store.progress.of([row.id for row in shown])
            return JobPage(
                jobs=[self._access.view(caller, row, model, progress=progress.get(row.id)) for row in shown],
                next=following,
            )

        return await context.call(read)

    async def cancel(self, caller: Caller, id: str) -> Job:
        """End a job: a waiting one at once, a running one as soon as its processes are gone."""
        context = self._context
        row = await self._access.changeable(caller, id, "cancel")
        if not row.live:
            return await self._access.shown(caller, row, whole=True)
        now = context.clock()
        cancelled = cancellation(row, caller.name, now)
        if not row.cancel_requested or row.state == "pending":
            applied = await context.call(context.store.commit, [cancelled.change], cancelled.decisions, now=now)
            if id not in applied:
                return await self.cancel(caller, id)
        context.wake()
        return await self.job(caller, id, wait=2.0, version=row.version)

    async def resume(self, caller: Caller, id: str) -> Job:
        """Requeue an ended job: same id, next attempt, from its last checkpoint."""
        context = self._context
        row = await self._access.changeable(caller, id, "resume")
        if row.live:
            raise refuse(f"{row.name} has not ended ({row.state}), so there is nothing to resume.", "not_ended", 409)
        team = pick_team(context.teams_of(caller), caller.name, row.team)
        pick_profile(context.document, caller.name, team, row.profile)
        message = f"{caller.name} resumes {row.name}."
        now = context.clock()
        changed = transitions.resume(row, message, now)
        await context.count_existing_jobs()
        await context.call(context.storage.check, row.owner, team)
        with context.limits.submitting(row.owner, 1, row.weight) as reservation:
            reservation.expect(id)
            applied = await context.call(context.store.commit, [changed.change], changed.decisions, now=now)
        if id not in applied:
            raise refuse(f"{row.name} changed meanwhile, so it was not resumed: look at it again.", "changed", 409)
        context.wake()
        return await self.job(caller, id)

    async def preempt_test(self, caller: Caller, id: str) -> Job:
        """Test the preemption of a job: it gets its notice, saves, ends and is requeued, as in a reclaim (N12)."""
        context = self._context
        for attempt in range(MAX_TRIES):
            await asyncio.sleep(PAUSE * attempt)
            row = await self._access.changeable(caller, id, "test the preemption of")
            if row.state != "running":
                raise refuse(
                    f"{row.name} is {row.state}; a preemption can be tested while it runs.", "not_running", 409
                )
            if row.reason_code == TIME_LIMIT:
                raise refuse(f"{row.name} is ended at its time limit, so it does not resume.", "not_running", 409)
            now = context.clock()
            message = f"{caller.name} tests the preemption of {row.name}: it saves, makes way and resumes."
            changed = transitions.preempt_test(row, caller.name, message, now)
            if id in await context.call(context.store.commit, [changed.change], changed.decisions, now=now):
                context.wake()
                return await self.job(caller, id)
        raise refuse(f"{row.name} has just changed: test its preemption again.", "not_running", 409)

    async def events(self, caller: Caller, id: str) -> list[Decision]:
        """Return what was decided about a job, oldest first: the newest 1,000 lines, or fewer if they are long."""
        job = await self._access.visible(caller, id)
        store = self._context.store

        def read() -> list[Decision]:
            newest = first_that_fit(store.decisions(id, None, 1000, None), decision_bytes, MAX_LIST)
            lines = [decision_model(row) for row in reversed(newest)]
            return lines if self._access.may_read(caller, job) else [private_decision(line) for line in lines]

        return await self._context.call(read)


def cancellation(row: Workload, by: str, now: float) -> Transition:
    """Return the change that ends a job, at once while it is pending, and the decision about it."""
    return transitions.cancel(row, by, f"{by} cancelled {row.name}.", now)


def _states(text: str | None) -> tuple[str, ...] | None:
    if not text:
        return None
    if text == "live":
        return tuple(sorted(LIVE))
    wanted = tuple(part.strip() for part in text.split(","))
    known = [state.value for state in State]
    for state in wanted:
        if state not in known:
            raise refuse(f"Unknown state “{state[:40]}”. Valid states: live, {', '.join(known)}.", "bad_state", 422)
    return wanted
