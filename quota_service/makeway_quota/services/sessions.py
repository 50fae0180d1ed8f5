"""Request, renew and release the leases of interactive sessions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from makeway_api.errors import MakewayError
from makeway_api.models import Session, SessionRequest

from ..control import transitions
from ..engine.snapshot import Profile
from ..policy.pod_template import claim_templates_of
from ..store.errors import Conflict, TooMany
from ..store.records import Cap, NewDecision, NewWorkload, Workload
from ..values import ordinal
from ..wording import count, names, outcomes
from . import views
from .caller import Caller
from .context import Context
from .eligibility import check_queue, find_image, find_profile, title_of
from .idempotency import key_of
from .machine_what_if import MachineWhatIf
from .refusals import refuse


class SessionService:
    """Sessions are requested by the Hub's spawner and seen by their owners."""

    def __init__(self, context: Context, machines: MachineWhatIf) -> None:
        self._context = context
        self._machines = machines

    async def request(
        self, caller: Caller, request: SessionRequest, groups: Sequence[str], key: str | None = None
    ) -> Session:
        """Queue a session; the lease of an earlier server of the same name ends.

        A request that is repeated with the same `key` (Idempotency-Key) returns the session of the first one.
        """
        context = self._context
        known = await key_of(context, caller, key, "session", request)
        live = await self._live()  # before the key: what the same request has queued is found by its key then
        if known is not None and (before := await context.call(context.store.submitted, [known])) is not None:
            return await self._queued(before[0])
        profile = await self._session_profile(request, groups)
        if profile.gpus and (why := await context.backend.notebook_problem(profile.name)):
            raise refuse(outcomes.no_claims(title_of(context.document, profile), why), "no_claims", 409)
        await self._end_earlier(live, request)
        new = self._new_session(request, profile)
        team = context.title(request.team) if request.team else None
        message = outcomes.session_requested(request.user, title_of(context.document, profile), team)
        decision = NewDecision("submit", new.id, request.team, request.user, "session", message)
        cap = Cap(context.document.sessions_per_user, "session", with_gpus=True) if profile.gpus else None
        try:
            row = await context.call(context.store.add_workload, new, (), decision, cap, known, now=context.clock())
        except TooMany as full:
            raise _beyond_cap(request.user, full) from full
        except Conflict as conflict:
            raise refuse(
                f"A server of {request.user} with this name is being started by another request; wait for that one.",
                "already_starting",
                409,
            ) from conflict
        return await self._queued(row)

    async def _queued(self, row: Workload) -> Session:
        """Return a session that was requested just now, or before by the same request; one without a team starts."""
        context = self._context
        if not row.live:
            return self._session(row)
        if row.team is None:
            row = await self._grant_without_gpus(row)
        context.leases.renew(row.id)
        context.wake_at_once()
        return self._session(row)

    async def _end_earlier(self, live: Sequence[Workload], request: SessionRequest) -> None:
        for row in live:
            if (row.owner, row.server) == (request.user, request.server):
                await self.release(row.id, "a new server of the same name was requested")

    async def _session_profile(self, request: SessionRequest, groups: Sequence[str]) -> Profile:
        context = self._context
        profile = find_profile(context.document, request.profile)
        if "session" not in context.document.profile_facts[profile.name].kinds:
            raise refuse(
                f"{title_of(context.document, profile)} is for training jobs, not for notebooks.",
                "wrong_kind",
                409,
            )
        teams = context.teams_of_user(request.user, groups)
        if request.team is None:
            if context.document.queue_open(None, profile.name):
                return profile
            what = title_of(context.document, profile)
            message = f"{what} has GPUs, and GPUs belong to teams: choose one of {names(teams)}."
            if not teams:
                message = (
                    f"{request.user} is in no team, so only profiles without GPUs can be used: ask an administrator."
                )
            raise refuse(message, "no_team", 403)
        check_queue(context.document, request.user, teams, request.team, profile)
        if pools := await self._machines.without_sessions(profile.pools):
            raise refuse(outcomes.no_sessions(title_of(context.document, profile), pools), "no_sessions", 409)
        return profile

    def _new_session(self, request: SessionRequest, profile: Profile) -> NewWorkload:
        context = self._context
        return NewWorkload(
            id=f"s-{secrets.token_hex(5)}",
            kind="session",
            team=request.team,
            profile=profile.name,
            owner=request.user,
            name=request.server or "notebook",
            preemptible=request.preemptible,
            gpus=profile.gpus,
            workers=1,
            cpu=profile.cpu,
            memory=profile.memory,
            grace=profile.grace or context.document.settings.grace,
            image=find_image(context.document, profile, request.image),
            server=request.server,
            expires_at=context.clock() + context.leases.seconds,
        )

    async def _grant_without_gpus(self, row: Workload) -> Workload:
        """Start a session without GPUs and without a team: no other workload can need what it holds."""
        context = self._context
        now = context.clock()
        message = f"{row.owner}'s notebook without GPUs starts at once."
        changed = transitions.start_without_gpus(row, message, now)
        await context.call(context.store.commit, [changed.change], changed.decisions, now=now)
        return await self._row(row.id)

    async def session(self, id: str, wait: float = 0, version: int | None = None) -> Session:
        """Return one session; with `wait`, as soon as it is newer than `version`."""

        async def fetch() -> Workload:
            return await self._row(id)

        return self._session(await self._context.wait_for_change(id, fetch, wait, version))

    async def sessions(self, caller: Caller, all: bool = False) -> list[Session]:
        """Return the caller's live sessions without their environment; with `all` those of their teams too."""
        teams = self._context.visible_teams(caller)
        mine = [r for r in await self._live() if r.owner == caller.name or (all and (teams is None or r.team in teams))]
        sessions = [self._session(row) for row in sorted(mine, key=lambda row: (row.submitted_at, row.id))]
        return [one.model_copy(update={"env": {}}) for one in sessions]  # thousands of them are one answer

    async def started(self, id: str) -> Session:
        """Record that the notebook server is up, and renew the lease."""
        context = self._context
        row = await self._row(id)
        if row.state == "starting" or (row.state == "running" and not row.server_started):
            message = outcomes.session_runs(row.owner, *_where(row))
            changed = transitions.open_server(row, message)
            await context.call(context.store.commit, [changed.change], now=context.clock())
        return await self.renew(id)

    async def renew(self, id: str) -> Session:
        """Renew a lease; one that ended is 410, and its server must stop."""
        row = await self._row(id)
        if not row.live:
            raise refuse(f"This notebook is over: {row.reason_message}", "session_over", 410)
        self._context.leases.renew(id)
        return self._session(row)

    async def release(self, id: str, why: str) -> None:
        """End a session and free its GPUs; a repetition changes nothing."""
        context = self._context
        row = await context.call(context.store.workload, id)
        if row is None or row.kind != "session" or not row.live:
            return
        message = outcomes.session_ended(row.owner, why, *_where(row if row.gpus else None))
        now = context.clock()
        changed = transitions.release(row, "release", "released", message, now)
        await context.call(context.store.commit, [changed.change], changed.decisions, now=now)
        context.wake()

    async def _live(self) -> tuple[Workload, ...]:
        return tuple((await self._context.read_models.current()).sessions.values())

    async def _row(self, id: str) -> Workload:
        context = self._context
        row = await context.world.row(id) or await context.call(context.store.workload, id)
        removal = await context.call(context.store.pruning.removed, id) if row is None else None
        if removal is not None and removal.kind == "session":
            raise refuse(f"The session “{id}” is over, and its record was removed since.", "removed", 410)
        if row is None or row.kind != "session":
            raise refuse(f"There is no session “{id}”.", "not_found", 404)
        return row

    def _session(self, row: Workload) -> Session:
        context = self._context
        facts = context.document.profile_facts.get(row.profile)
        titles = (facts.title if facts else row.profile, context.title(row.team))
        virtual = context.world.virtual and row.gpus > 0
        settings, problem = context.settings, context.world.problem_of(row)
        session = views.session(row, virtual=virtual, url=settings.public_url, titles=titles, problem=problem)
        on_cluster = settings.backends[0] == "kubernetes"
        more = {
            "resource": self._resource(row),
            "tolerations": list(settings.kubernetes.tolerations) if on_cluster else [],
            "disk": facts.disk if facts else 0,
            "claims": claim_templates_of(facts.pod) if facts and row.gpus and on_cluster else {},
        }
        return session.model_copy(update=more)

    def _resource(self, row: Workload) -> str | None:
        """Return what a session's GPUs are called on a cluster, by the pool that they are in; None without GPUs."""
        context = self._context
        profile = context.document.profile(row.profile)
        served = profile.pools if profile else ()
        pools = [context.world.assignment.pool_of(place, served) for place in row.placement if place.devices]
        pool = context.document.pool(pools[0]) if pools and pools[0] is not None else None
        return pool.resource if pool else None


def _beyond_cap(user: str, full: TooMany) -> MakewayError:
    """Return the refusal of one GPU session more than one person may have (F25)."""
    servers = names([f"“{row.server or 'default'}” ({row.profile})" for row in full.existing])
    return refuse(
        f"{user} already has {count(full.limit, 'GPU session')}, and {full.limit} is the most for one person: "
        f"{servers}. Stop one of them first.",
        "too_many_sessions",
        409,
        sessions=full.limit,
        most=full.limit,
    )


def _where(row: Workload | None) -> tuple[tuple[int, ...], str | None]:
    """Return the devices and the node of a session; no node where it holds nothing."""
    place = row.placement[0] if row is not None and row.placement else None
    return (tuple(map(ordinal, place.devices)), place.node) if place else ((), None)
