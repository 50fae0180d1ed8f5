"""Fake the lease routes of the quota service, with scripted answers.

For unit tests of the spawner only: what the real service decides is tested with the real service.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from makeway_api.models import Offer, OfferTable, Profile, Reason, Session, State, TeamUsage, Victim, WorkerPlacement

URL = "http://quota.test/services/makeway"
"""Where spawners of the tests find it."""

PROFILES = [
    Profile(name="cpu", title="CPU only", description="A notebook without a GPU.", gpus=0, cpu=2, memory=4096),
    Profile(name="gpu1", title="One GPU", description="For building and debugging.", gpus=1, cpu=4, memory=16384),
    Profile(name="gpu2", title="Two GPUs", description="For more than one device.", gpus=2, cpu=8, memory=32768),
]
MEMBERS = {"ana": ["rnd"], "bo": ["devops"], "lea": ["devops", "rnd"], "guest": [], "admin": []}
TITLES = {"rnd": "Research & Development", "devops": "DevOps"}


class QuotaFake:
    """Sessions in a dict. `steps` is the list of (phase, reason) that each new session walks through.

    A step named "hold" waits until `go` is set; the walk ends with "granted" unless the last step says "over".
    """

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.released: list[str] = []
        self.why = ""
        """why the last lease was released"""
        self.renewals = 0
        self.started: list[str] = []
        self.down = False
        self.refusal: tuple[int, str, str] | None = None
        self.steps: list[tuple[str, Reason | None]] = []
        self.go = asyncio.Event()
        self.ask_delay = 0.0
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Condition()

    @property
    def live(self) -> list[str]:
        """The ids of the leases that were not released."""
        return [id for id, session in self.sessions.items() if not session.state.ended]

    async def end(self, id: str) -> None:
        """End a session from the service's side."""
        await self._change(id, state=State.STOPPED, phase="over")

    async def ask(self, body: dict[str, Any]) -> Session:
        await asyncio.sleep(self.ask_delay)
        profile = next(p for p in PROFILES if p.name == body["profile"])
        id = f"s{next(self._ids)}"
        now = datetime.now(UTC)
        self.sessions[id] = Session(
            id=id,
            user=body["user"],
            server=body.get("server", ""),
            profile=profile.name,
            team=body.get("team"),
            gpus=profile.gpus,
            cpu=profile.cpu,
            memory=profile.memory,
            profile_title=profile.title,
            team_title=TITLES.get(body.get("team") or "", ""),
            preemptible=body.get("preemptible", False),
            state=State.PENDING,
            phase="admission",
            submitted_at=now,
            expires_at=now + timedelta(seconds=15),
            virtual=True,
            version=1,
        )
        if self.steps:
            task = asyncio.ensure_future(self._walk(id, list(self.steps)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            await self._grant(id)
        return self.sessions[id]

    async def _walk(self, id: str, steps: list[tuple[str, Reason | None]]) -> None:
        for phase, reason in steps:
            if phase == "hold":
                await self.go.wait()
            elif phase == "over":
                await self._change(id, phase="over", state=State.CANCELLED, reason=reason)
                return
            else:
                await self._change(id, phase=phase, reason=reason)
        await self._grant(id)

    async def _grant(self, id: str) -> None:
        gpus = self.sessions[id].gpus
        place = [WorkerPlacement(node="node-1", devices=list(range(int(gpus))), gpus=gpus)] if gpus else []
        await self._change(id, phase="granted", state=State.STARTING, placement=place, reason=None)

    async def _change(self, id: str, **fields: Any) -> None:
        session = self.sessions[id]
        if not session.state.ended:
            self.sessions[id] = session.model_copy(update={**fields, "version": session.version + 1})
        async with self._news:
            self._news.notify_all()

    async def wait(self, id: str, version: int, seconds: float) -> Session:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(lambda: self.sessions[id].version > version)
        return self.sessions[id]

    def offers(self, user: str) -> OfferTable:
        teams = MEMBERS.get(user, [])
        offers = [Offer(profile="cpu", team=None, code="ready_now", message="Needs no GPU.")]
        for team in teams:
            offers.append(Offer(profile="gpu1", team=team, code="ready_now", message="1 of 10 GPUs is idle."))
            offers.append(_second(team))
        return OfferTable(
            user=user,
            teams=teams,
            profiles=PROFILES if teams else PROFILES[:1],
            offers=offers,
            usage=[usage(team) for team in teams],
            virtual=True,
            ticket="fake.ticket",
            at=datetime.now(UTC),
        )


def _second(team: str) -> Offer:
    if team == "devops":
        victim = Victim(id="j3", name="resnet", team="rnd", owner="ana", gpus=3)
        text = "1 of 10 GPUs is idle; job resnet of ana (rnd, 3 GPUs) will be asked to make way."
        return Offer(profile="gpu2", team=team, code="ready_after_reclaim", message=text, seconds=30, victims=[victim])
    text = "4 of your 5 guaranteed GPUs are in use: lea 3, mia 1; 2 more would be 6."
    reason = Reason(code="not_in_quota", message=text)
    return Offer(profile="gpu2", team=team, code="refused", message=text, reason=reason)


def usage(team: str) -> TeamUsage:
    used = {"rnd": (4.0, 1.0, 4.0), "devops": (0.0, 0.0, 0.0)}[team]
    return TeamUsage(
        team=team,
        title=TITLES[team],
        reserved=5,
        limit=9,
        used=sum(used),
        guaranteed=used[0],
        in_quota=used[1],
        borrowed=used[2],
        lent=4 if team == "devops" else 0,
        free=1 if team == "devops" else 0,
    )


def app(fake: QuotaFake, prefix: str = "/services/makeway") -> FastAPI:
    """Return the fake as an application."""
    api = FastAPI()
    base = f"{prefix}/api/v1"

    def problem(status: int, code: str, detail: str) -> JSONResponse:
        return JSONResponse({"title": code, "status": status, "code": code, "detail": detail}, status)

    def known(id: str) -> JSONResponse | None:
        if fake.down:
            return problem(503, "unreachable", "The fake is down.")
        if id not in fake.sessions or fake.sessions[id].state.ended:
            return problem(410, "gone", f"The lease {id} is over.")
        return None

    @api.get(base + "/offers")
    @api.get(base + "/offers/live")
    async def offers(user: str = "lea") -> Any:
        return problem(503, "unreachable", "The fake is down.") if fake.down else fake.offers(user)

    @api.post(base + "/sessions", status_code=201)
    async def ask(request: Request) -> Any:
        if fake.down:
            return problem(503, "unreachable", "The fake is down.")
        return problem(*fake.refusal) if fake.refusal else await fake.ask(await request.json())

    @api.get(base + "/sessions/{id}")
    async def session(id: str, wait: float = 0, version: int = 0) -> Any:
        if fake.down:
            return problem(503, "unreachable", "The fake is down.")
        return await fake.wait(id, version, wait)

    @api.post(base + "/sessions/{id}/started")
    async def started(id: str) -> Any:
        fake.started.append(id)
        return known(id) or fake.sessions[id]

    @api.post(base + "/sessions/{id}/renew")
    async def renew(id: str) -> Any:
        fake.renewals += 1
        return known(id) or fake.sessions[id]

    @api.delete(base + "/sessions/{id}")
    async def release(id: str, why: str = "") -> Any:
        if fake.down:
            return problem(503, "unreachable", "The fake is down.")
        fake.released.append(id)
        fake.why = why
        if id in fake.sessions:
            await fake.end(id)
        return Response(status_code=204)

    @api.get(prefix + "/healthz")
    async def healthz() -> dict[str, bool]:
        return {"ok": True}

    @api.get(prefix + "/")
    async def index() -> dict[str, bool]:
        return {"ok": True}

    return api


if __name__ == "__main__":
    from urllib.parse import urlparse

    import uvicorn

    server = QuotaFake()
    if os.environ.get("FAKE_STEPS"):
        text = "Job resnet of ana (rnd, 3 GPUs) saves and leaves by 12:00:30; then 2 GPUs on node-1 are yours."
        until = datetime.now(UTC) + timedelta(seconds=45)
        server.steps = [
            ("reclaim", Reason(code="reclaiming", message=text, ready_by=until)),
            ("hold", None),
        ]
    url = urlparse(os.environ["JUPYTERHUB_SERVICE_URL"])
    uvicorn.run(app(server), host="127.0.0.1", port=url.port or 8765, log_level="warning")
