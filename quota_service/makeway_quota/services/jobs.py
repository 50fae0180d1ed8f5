"""Training jobs: submit, look, cancel, resume, clone and rehearse a preemption."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from makeway_api.models import Decision, DryRun, FileIn, Job, JobAsk, JobPage, Kind, LogChunk, Priority, State
from pydantic import ValidationError

from ..control.followers import Follower
from ..control.reconcile import HOLDS, decide
from ..engine.rules.what_if import WhatIf
from ..store.errors import Conflict
from ..store.records import Change, NewDecision, Notice, Workload
from ..wording import gpus
from . import views
from .audit import decision_model
from .caller import Caller
from .core import LONGEST_WAIT, refuse
from .inventory import Inventory
from .submissions import check_words, new_job, pick_profile, pick_team, read_files

FIRST_ANSWER = 0.15
"""Seconds that a submission waits for its first decision, so that the answer can say more than `pending`."""
LOG_POLL = 0.1
MOST_LOG = 1_000_000


class Jobs(Inventory):
    """Everything about training jobs."""

    async def submit(self, caller: Caller, ask: JobAsk) -> Job | DryRun:
        """Take a job into the queue, or tell what would happen (`dry_run`)."""
        groups = sorted(caller.groups)
        team = pick_team(self.document, caller.name, groups, ask.team)
        profile = pick_profile(self.document, caller.name, groups, team, ask.profile)
        check_words(ask)
        files = await asyncio.to_thread(read_files, ask, self.config.max_files_bytes) if ask.files else ()
        if ask.clone_of is not None:
            await self._seen_by(caller, ask.clone_of)
        if ask.dry_run:
            return await self._dry_run(caller, ask, team, profile.name, sum(len(f[1]) for f in files))
        while True:
            new = new_job(self.document, ask, caller.name, team, profile)
            said = f"{caller.name} submits {new.name}: {gpus(new.gpus * new.workers)} for {self.title(team)}."
            decision = NewDecision(
                "submit", new.id, team, caller.name, "job", said, {"gpus": new.gpus * new.workers / 1000}
            )
            with suppress(Conflict), self.world.follow(new.id) as follower:  # whose id is taken gets another
                row = await self.batcher.take(new, files, decision)
                self.wake()
                return await self._job(await self._after_first_decision(row, follower))

    async def _after_first_decision(self, row: Workload, follower: Follower) -> Workload:
        deadline = time.monotonic() + FIRST_ANSWER
        while row.version <= 1 and not row.reason_code and (left := deadline - time.monotonic()) > 0:
            await follower.heard(left)
            row = follower.row or row
        return row

    async def _dry_run(self, caller: Caller, ask: JobAsk, team: str, profile: str, size: int) -> DryRun:
        rows = await self.world.rows()
        snapshot = self.world.snapshot(rows, self.clock())
        found = await asyncio.to_thread(WhatIf(snapshot).offer, team, profile, "job", caller.name)
        answer = self._offer(found, rows, Kind.JOB)
        risk = ""
        if not found.in_quota:
            risk = "It would run over quota: it makes way when the owners need their GPUs, so save checkpoints often."
        return DryRun(offer=answer, command=ask.command, files=len(ask.files), bytes=size, risk=risk)

    async def job(self, caller: Caller, id: str, wait: float = 0, version: int | None = None) -> Job:
        """One job with its attempts; with `wait`, as soon as it is newer than `version`."""

        async def fetch() -> Workload:
            return await self._seen_by(caller, id)

        row = await self.wait_for_change(id, fetch, wait, version)
        return self._view(caller, row, await self._job(row, whole=True))

    async def jobs(
        self,
        caller: Caller,
        team: str | None = None,
        state: str | None = None,
        mine: bool = False,
        limit: int = 100,
        cursor: str | None = None,
    ) -> JobPage:
        """Jobs that the caller may see, newest first. `state`: one, several by comma, or `live`."""
        teams = self.visible_teams(caller)
        if team is not None:
            if teams is not None and team not in teams:
                raise refuse(f"You are not in the team “{team[:80]}”, so its jobs are not shown.", "foreign_team", 403)
            teams = (team,)
        states = _states(state)
        owner = caller.name if mine else None
        shown = None if mine else teams
        try:
            rows, following = await self.read(self.store.workloads, "job", owner, shown, states, limit, cursor)
        except ValueError:
            raise refuse("That cursor is not one that this service gave out.", "bad_cursor", 422) from None
        return JobPage(jobs=[self._view(caller, row, await self._job(row)) for row in rows], next=following)

    async def cancel(self, caller: Caller, id: str) -> Job:
        """End a job: a waiting one at once, a running one as soon as its processes are gone."""
        row = await self._owned_by(caller, id, "cancel")
        if not row.live:
            return await self._job(row, whole=True)
        now = self.clock()
        message = f"{caller.name} cancelled {row.name}."
        said = decide(row, "cancel", "cancelled", message, by=caller.name)
        if row.state == "pending":
            fields: dict[str, object] = {
                "state": "cancelled",
                "ended_at": now,
                "nomination": (),
                "reason_code": "cancelled",
                "reason_message": message,
                "message": message,
                "not_before": None,
            }
            change = Change(id, fields, expect_states=("pending",))
        else:
            change = Change(id, {"cancel_requested": True}, expect_states=HOLDS)
        if not row.cancel_requested:
            applied = await self.read(self.store.commit, [change], [said], now=now)
            if id not in applied:
                return await self.cancel(caller, id)
        self.wake()
        return await self.job(caller, id, wait=2.0, version=row.version)

    async def resume(self, caller: Caller, id: str) -> Job:
        """Put an ended job back into its queue: same id, next attempt, from its last checkpoint."""
        row = await self._owned_by(caller, id, "resume")
        if row.live:
            raise refuse(f"{row.name} has not ended ({row.state}), so there is nothing to resume.", "not_ended", 409)
        pick_profile(
            self.document,
            caller.name,
            sorted(caller.groups),
            pick_team(self.document, caller.name, sorted(caller.groups), row.team),
            row.profile,
        )
        message = f"{caller.name} resumes {row.name}."
        fields: dict[str, object] = {
            "state": "pending",
            "submitted_at": self.clock(),
            "ended_at": None,
            "cancel_requested": False,
            "failures": 0,
            "infra_failures": 0,
            "exit_code": None,
            "message": "",
            "reason_code": "resumed",
            "reason_message": message,
        }
        change = Change(id, fields, row.version)
        await self.read(self.store.commit, [change], [decide(row, "submit", "resumed", message)], now=self.clock())
        self.wake()
        return await self.job(caller, id)

    async def clone(self, caller: Caller, id: str, n: int, overrides: Mapping[str, Any]) -> list[Job]:
        """Submit n copies of a job, changed by `overrides` (fields of a submission)."""
        row = await self._read_by(caller, id)
        whole = await self.read(self.store.workload, id) or row
        files = await self.read(self.store.files, id)
        base: dict[str, Any] = {
            "name": row.name,
            "team": row.team,
            "profile": row.profile,
            "command": list(row.command),
            "env": {k: v for k, v in row.env.items() if not k.startswith("MAKEWAY_")},
            "priority": Priority(row.priority),
            "max_failures": row.max_failures,
            "time_limit": None if row.time_limit is None else round(row.time_limit),
            "source": whole.source,
        }
        try:
            ask = JobAsk.model_validate({**base, **overrides, "clone_of": id, "dry_run": False})
        except ValidationError as error:
            first = error.errors()[0]
            raise refuse(
                f"The clone cannot be made: {'.'.join(map(str, first['loc']))}: {first['msg']}.", "bad_override", 422
            ) from None
        if "files" not in overrides:
            ask.files = [
                FileIn(path=f.path, data=base64.b64encode(f.data).decode(), executable=f.executable) for f in files
            ]
        made = [await self.submit(caller, ask) for _ in range(n)]
        return [job for job in made if isinstance(job, Job)]

    async def preempt_test(self, caller: Caller, id: str) -> Job:
        """Rehearse: the job gets its notice, saves, leaves and comes back, as it would for an owner (N12)."""
        row = await self._owned_by(caller, id, "rehearse a preemption of")
        if row.state != "running":
            raise refuse(f"{row.name} is {row.state}; a preemption can be rehearsed while it runs.", "not_running", 409)
        now = self.clock()
        message = f"{caller.name} rehearses a preemption of {row.name}: it saves, leaves and comes back."
        notice = Notice(message, now, now + row.grace, "rehearsal", row.team, caller.name, None)
        fields = {"state": "checkpointing", "notice": notice, "reason_code": "rehearsal", "reason_message": message}
        change = Change(id, fields, expect_states=("running",))
        await self.read(self.store.commit, [change], [decide(row, "evict", "rehearsal", message)], now=now)
        self.wake()
        return await self.job(caller, id)

    async def job_events(self, caller: Caller, id: str) -> list[Decision]:
        """Everything that was decided about a job, oldest first."""
        await self._seen_by(caller, id)
        rows = await self.read(self.store.decisions, id, None, 1000, None)
        return [decision_model(row) for row in reversed(rows)]

    async def log(self, caller: Caller, id: str, attempt: int | None, offset: int, limit: int, wait: float) -> LogChunk:
        """Part of a job's log; `wait` seconds for something new; a negative offset counts from the end."""
        row = await self._read_by(caller, id)
        number = attempt or max(1, row.attempt)
        limit = min(max(1, limit), MOST_LOG)
        deadline = time.monotonic() + min(max(0.0, wait), LONGEST_WAIT)
        while True:
            over = not (row.state in HOLDS and row.attempt == number) and not (row.live and number > row.attempt)
            data, size = await self.backend.log(id, number, max(0, offset), limit)
            if offset < 0:
                offset = max(0, size + offset)
                data, size = await self.backend.log(id, number, offset, limit)
            if data or over or time.monotonic() >= deadline:
                break
            await asyncio.sleep(LOG_POLL)
            row = await self._seen_by(caller, id)
        skipped = False
        if not data and offset < size and (gap := await self.backend.log_gap(id, number)) and gap[0] <= offset < gap[1]:
            offset, skipped = gap[1], True
            data, size = await self.backend.log(id, number, offset, limit)
        text, used = _decode(data, final=over and offset + len(data) >= size)
        following = min(offset, size) + used if data else min(offset, size)
        return LogChunk(
            attempt=number,
            offset=offset,
            next_offset=following,
            text=text,
            eof=over and following >= size,
            truncated=skipped,
        )

    async def result(self, caller: Caller, id: str) -> bytes | None:
        """What the job left as its result, or None."""
        row = await self._read_by(caller, id)
        return await self.backend.result(id, row.attempt) if row.attempt else None

    async def error(self, caller: Caller, id: str) -> dict[str, Any] | None:
        """The exception that ended the job, or None."""
        row = await self._read_by(caller, id)
        data = await self.backend.error(id, row.attempt) if row.attempt else None
        try:
            found = json.loads(data) if data else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    async def _seen_by(self, caller: Caller, id: str) -> Workload:
        row = (await self.world.rows()).get(id) or await self.read(self.store.workload, id)
        teams = self.visible_teams(caller)
        visible = row is not None and (teams is None or row.owner == caller.name or row.team in teams)
        if row is None or row.kind != "job" or not visible:
            raise refuse(f"There is no job “{id[:80]}” that you may see.", "not_found", 404)
        return row

    async def _read_by(self, caller: Caller, id: str) -> Workload:
        """A job whose log, result and files the caller may read."""
        row = await self._seen_by(caller, id)
        if not self._may_read(caller, row):
            raise refuse(
                f"{row.name} belongs to {row.owner}, and on this machine everybody's files are their own: "
                f"ask {row.owner} for its log, result or files.",
                "not_yours",
                403,
            )
        return row

    def _view(self, caller: Caller, row: Workload, job: Job) -> Job:
        """The job without what it runs, where that is not for the caller."""
        hidden = {"command": [], "source": "", "private": True}
        return job if self._may_read(caller, row) else job.model_copy(update=hidden)

    def _may_read(self, caller: Caller, row: Workload) -> bool:
        """A demo's team shares its work; in system users mode the API tells no more than the file system does."""
        if self.config.mode != "system" or row.owner == caller.name:
            return True
        facts = self.document.policy_facts.get(row.team or "")
        return caller.manages(facts.groups if facts else ())

    async def _owned_by(self, caller: Caller, id: str, what: str) -> Workload:
        row = await self._seen_by(caller, id)
        facts = self.document.policy_facts.get(row.team or "")
        if row.owner != caller.name and not caller.manages(facts.groups if facts else ()):
            raise refuse(
                f"{row.name} belongs to {row.owner}: only they or a team lead can {what} it.", "not_yours", 403
            )
        return row

    async def _job(self, row: Workload, *, whole: bool = False) -> Job:
        attempts = await self.read(self.store.attempts, row.id) if whole and row.attempt else []
        if whole and not row.source:
            whole_row: Workload | None = await self.read(self.store.workload, row.id)
            row = whole_row or row
        return views.job(row, virtual=self.world.virtual, attempts=attempts, now=self.clock())


def _states(text: str | None) -> tuple[str, ...] | None:
    if not text:
        return None
    if text == "live":
        return ("pending", *HOLDS)
    wanted = tuple(part.strip() for part in text.split(","))
    known = [state.value for state in State]
    for state in wanted:
        if state not in known:
            raise refuse(f"“{state[:40]}” is no state; there are live, {', '.join(known)}.", "bad_state", 422)
    return wanted


def _decode(data: bytes, *, final: bool) -> tuple[str, int]:
    """Decode what can be decoded: a character cut in half at the end stays for the next chunk."""
    if not final:
        for cut in range(min(3, len(data))):
            byte = data[len(data) - 1 - cut]
            if byte < 0x80:
                break
            if byte >= 0xC0:
                need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
                if need > cut + 1 and len(data) > cut + 1:
                    data = data[: len(data) - 1 - cut]
                break
    return data.decode("utf-8", "replace"), len(data)
