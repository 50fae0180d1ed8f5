"""Leases: who gets an interactive session, who keeps it, and when it is free again."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from makeway_api.errors import MakewayError
from makeway_api.models import Session, SessionAsk

from ..control.leases import SESSION_LIVE, end_session
from ..control.reconcile import decide
from ..engine.state import Profile
from ..policy import Document, closest
from ..store.errors import Conflict, TooMany
from ..store.records import Cap, Change, NewDecision, NewWorkload, Workload
from ..wording import count, names
from . import views
from .caller import Caller
from .core import Core, refuse


class Sessions(Core):
    """Asked for by the Hub's spawner, seen by their owners."""

    async def ask_session(self, caller: Caller, ask: SessionAsk, groups: Sequence[str]) -> Session:
        """Put a session into the queue; a lease that an earlier server of the same name left behind ends."""
        profile = self._session_profile(ask, groups)
        rows = await self.world.rows()
        await self._end_earlier(rows, ask)
        new = self._new_session(ask, profile)
        said = f"{ask.user} asks for a session with {title_of(self.document, profile)}" + (
            f" for {self.title(ask.team)}." if ask.team else "."
        )
        decision = NewDecision("submit", new.id, ask.team, ask.user, "session", said)
        cap = Cap(self.document.sessions_per_user, "session", with_gpus=True) if profile.gpus else None
        try:
            row = await self.read(self.store.add_workload, new, (), decision, cap, now=self.clock())
        except TooMany as full:
            raise _beyond_cap(ask.user, full) from full
        except Conflict as conflict:
            raise refuse(
                f"A server of {ask.user} with this name is being started by another request; wait for that one.",
                "already_starting",
                409,
            ) from conflict
        if row.team is None:
            row = await self._grant_without_gpus(row)
        self.leases.renew(row.id)
        self.wake()
        return self._session(row)

    async def _end_earlier(self, rows: dict[str, Workload], ask: SessionAsk) -> None:
        for row in rows.values():
            if row.kind == "session" and (row.owner, row.server) == (ask.user, ask.server):
                await self.release(row.id, "a new server of the same name was asked for")

    def _session_profile(self, ask: SessionAsk, groups: Sequence[str]) -> Profile:
        profile = find_profile(self.document, ask.profile)
        if "session" not in self.document.profile_facts[profile.name].kinds:
            raise refuse(
                f"{title_of(self.document, profile)} is for training jobs, not for notebooks.", "wrong_kind", 409
            )
        teams = self.document.teams_of(ask.user, groups)
        if ask.team is None:
            if self.document.queue_open(None, profile.name):
                return profile
            what = title_of(self.document, profile)
            message = f"{what} has GPUs, and GPUs belong to teams: choose one of {names(teams)}."
            if not teams:
                message = f"{ask.user} is in no team, so only profiles without GPUs can be used: ask an administrator."
            raise refuse(message, "no_team", 403)
        check_queue(self.document, ask.user, teams, ask.team, profile)
        return profile

    def _new_session(self, ask: SessionAsk, profile: Profile) -> NewWorkload:
        facts = self.document.profile_facts[profile.name]
        return NewWorkload(
            id=f"s-{secrets.token_hex(5)}",
            kind="session",
            team=ask.team,
            profile=profile.name,
            owner=ask.user,
            name=ask.server or "notebook",
            preemptible=ask.preemptible,
            gpus=profile.gpus,
            workers=1,
            cpu=profile.cpu,
            memory=profile.memory,
            grace=profile.grace or self.document.settings.grace,
            image=facts.image,
            server=ask.server,
            expires_at=self.clock() + self.leases.seconds,
        )

    async def _grant_without_gpus(self, row: Workload) -> Workload:
        """A session without GPUs and without a team holds nothing that anybody could miss."""
        now = self.clock()
        message = f"{row.owner}'s session without GPUs starts at once."
        fields = {
            "state": "starting",
            "attempt": 1,
            "started_at": now,
            "reason_code": "starting",
            "reason_message": message,
        }
        change = Change(row.id, fields, expect_states=("pending",))
        await self.read(self.store.commit, [change], [decide(row, "start", "no_gpus", message)], now=now)
        return await self._row(row.id)

    async def session(self, id: str, wait: float = 0, version: int | None = None) -> Session:
        """One session; with `wait`, as soon as it is newer than `version`."""

        async def fetch() -> Workload:
            return await self._row(id)

        return self._session(await self.wait_for_change(id, fetch, wait, version))

    async def sessions(self, caller: Caller, all: bool = False) -> list[Session]:
        """The caller's live sessions; `all` those of their teams too."""
        teams = self.visible_teams(caller)
        rows = [row for row in (await self.world.rows()).values() if row.kind == "session"]
        mine = [r for r in rows if r.owner == caller.name or (all and (teams is None or r.team in teams))]
        return [self._session(row) for row in sorted(mine, key=lambda row: (row.submitted_at, row.id))]

    async def session_started(self, id: str) -> Session:
        """The notebook server is up."""
        row = await self._row(id)
        if row.state == "starting" or (row.state == "running" and not row.server_started):
            message = f"{row.owner}'s notebook runs" + (f" on {_where(row)}." if row.placement else ".")
            fields = {"state": "running", "server_started": True, "reason_code": "running", "reason_message": message}
            await self.read(
                self.store.commit, [Change(id, fields, expect_states=("starting", "running"))], now=self.clock()
            )
        return await self.renew(id)

    async def renew(self, id: str) -> Session:
        """Keep a lease; one that ended is 410, and its server must stop."""
        row = await self._row(id)
        if not row.live:
            raise refuse(f"This session is over: {row.reason_message}", "session_over", 410)
        self.leases.renew(id)
        return self._session(row)

    async def release(self, id: str, why: str) -> None:
        """Give the GPUs of a session back; again is fine."""
        row = await self.read(self.store.workload, id)
        if row is None or row.kind != "session" or row.state not in SESSION_LIVE:
            return
        held = row.placement and row.gpus
        message = f"{row.owner}'s session ended ({why})" + (
            f"; {_where(row)} {'is' if len(row.placement[0].devices) == 1 else 'are'} free again." if held else "."
        )
        now = self.clock()
        change = end_session(row, now, "released", message)
        await self.read(self.store.commit, [change], [decide(row, "release", "released", message)], now=now)
        self.wake()

    async def _row(self, id: str) -> Workload:
        row = (await self.world.rows()).get(id) or await self.read(self.store.workload, id)
        if row is None or row.kind != "session":
            raise refuse(f"There is no session “{id}”.", "not_found", 404)
        return row

    def _session(self, row: Workload) -> Session:
        return views.session(row, virtual=self.world.virtual and row.gpus > 0, url=self.config.public_url)


def _beyond_cap(user: str, full: TooMany) -> MakewayError:
    """Return the refusal of one GPU session more than one person may have (F25)."""
    servers = names([f"“{row.server or 'default'}” ({row.profile})" for row in full.existing])
    return refuse(
        f"{user} already has {count(full.most, 'GPU session')}, and {full.most} is the most for one person: "
        f"{servers}. Stop one of them first.",
        "too_many_sessions",
        409,
        sessions=full.most,
        most=full.most,
    )


def _where(row: Workload) -> str:
    place = row.placement[0]
    devices = names([str(index) for index in place.devices], 8)
    return f"GPU{'' if len(place.devices) == 1 else 's'} {devices} of {place.node}" if devices else place.node


def title_of(document: Document, profile: Profile) -> str:
    """How people call a profile."""
    return document.profile_facts[profile.name].title


def find_profile(document: Document, name: str) -> Profile:
    """Find a profile by name, or say which ones there are."""
    profile = document.profile(name)
    if profile is None:
        known = [p.name for p in document.profiles]
        meant = closest(name, known)
        raise refuse(
            f"There is no profile “{name[:80]}”."
            + (f" Did you mean “{meant}”?" if meant else f" There are {names(known, 20)}."),
            "unknown_profile",
            404,
        )
    return profile


def check_queue(document: Document, user: str, teams: Sequence[str], team: str, profile: Profile) -> None:
    """Refuse a team that is not the user's, and a profile that the team has no queue for (F11)."""
    if team not in teams:
        yours = (
            f"your teams are {names(teams)}"
            if len(teams) > 1
            else f"your team is {teams[0]}"
            if teams
            else "you are in no team"
        )
        raise refuse(f"{user} is not in the team “{team[:80]}”: {yours}.", "foreign_team", 403)
    if not document.queue_open(team, profile.name):
        open_to = [p.name for p in document.profiles if document.queue_open(team, p.name)]
        raise refuse(
            f"The team “{team}” cannot use {title_of(document, profile)}; "
            f"it can use {names(open_to, 20) or 'no profile at all'}.",
            "queue_closed",
            403,
        )
