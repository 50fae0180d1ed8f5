"""The users of the soak: what they submit, start and stop, and the pages that they have open."""

from __future__ import annotations

import math
import random

import httpx2
from makeway_api.errors import MakewayError
from makeway_api.models import SessionRequest
from makeway_quota.application import Application
from makeway_quota.services import Caller
from makeway_quota.services.jobs.listing import ListQuery
from makeway_quota.store.records import NewDecision, NewWorkload, Submission
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import SCOPE, TokenAuth
from makeway_quota.web.pages.figures.sharing import SharedParts
from makeway_quota.web.settings import WebSettings

TEAMS = ("rnd", "devops", "vision", "speech", "search")
PEOPLE = 8
"""Users of a team"""
SHAPES = (("gpu1", 1), ("gpu1", 1), ("gpu1", 1), ("gpu4", 1), ("gpu1", 6))
"""Profile of a job and its most workers, equally frequent"""
ODD = 0.1
"""The part of the jobs whose request is like no other's"""
SESSION_STEPS = 6
"""Steps that a session lasts, at most"""
ADMIN = Caller("root", admin=True)
READ = frozenset({f"{SCOPE}read"})
PAGE_READERS = (Caller("root", admin=True, scopes=READ), *(Caller(f"{team}0", scopes=READ) for team in TEAMS))
"""Users with the panel open: each sees other teams"""


class Users:
    """What the users do: they submit jobs of many shapes, and start and stop notebooks."""

    def __init__(self, service: Application, rng: random.Random) -> None:
        self._service = service
        self._rng = rng
        self._sessions: dict[str, tuple[str, int]] = {}
        """User to the id of the session and the steps that it still lasts"""
        self.submitted = 0

    def submit(self, until: int) -> None:
        """Submit the jobs up to a number, with a source and a file."""
        given = [self._job(number) for number in range(self.submitted, until)]
        self.submitted = until
        if given:
            self._service.components.store.add_workloads(given, now=self._service.components.clock())

    def _job(self, number: int) -> Submission:
        rng = self._rng
        team = rng.choice(TEAMS)
        owner = f"{team}{rng.randrange(PEOPLE)}"
        profile, maximum = rng.choice(SHAPES)
        gpus, workers = int(profile.removeprefix("gpu")), rng.randint(1, maximum)
        odd = rng.random() < ODD
        new = NewWorkload(
            f"j-{number:08x}",
            "job",
            team,
            profile,
            owner,
            f"train {number}",
            priority=rng.choice(("low", "normal", "high")),
            gpus=1000 * gpus,
            workers=workers,
            min_workers=rng.randrange(1, workers + 1),
            cpu=rng.randrange(4000) if odd else 0,
            memory=rng.randrange(64_000) if odd else 0,
            time_limit=3600.0 * rng.randrange(3, 24),
            command=("python", "train.py"),
            env={"SEED": str(number)},
            source="print('a cell')\n" * 20,
        )
        message = NewDecision("submit", new.id, team, owner, "job", f"{owner} submits {new.name}.", {"gpus": gpus})
        return Submission(new, [("train.py", b"# a script\n" * 50 + str(number % 5000).encode(), False)], message)

    async def use_sessions(self) -> None:
        """Stop the notebooks that have lasted, renew the others, and start one in each team."""
        sessions, rng = self._service.services.sessions, self._rng
        for user, (id, remaining) in list(self._sessions.items()):
            if remaining and await self._goes_on(id):
                self._sessions[user] = id, remaining - 1
            else:
                await sessions.release(id, "the notebook was stopped")
                del self._sessions[user]
        for team in TEAMS:
            user = f"{team}{rng.randrange(PEOPLE)}"
            if user not in self._sessions:
                wanted = SessionRequest(user=user, profile=rng.choice(("gpu1", "gpu4")), team=team)
                session = await sessions.request(ADMIN, wanted, ())
                self._sessions[user] = session.id, rng.randrange(SESSION_STEPS)

    async def _goes_on(self, id: str) -> bool:
        """Whether a session is not over; a team that uses all it is guaranteed gets no further one."""
        try:
            await self._service.services.sessions.started(id)
        except MakewayError as error:
            if error.code != "session_over":
                raise
            return False
        return True


class Readers:
    """What pickers and Prometheus read, from the same services, and the panel as the web renders it."""

    def __init__(self, service: Application) -> None:
        self._service = service
        self._event = 0
        settings = WebSettings(secret=b"soak" * 8)
        app = create_app(service.services, settings, TokenAuth({reader.name: reader for reader in PAGE_READERS}))
        app.state.parts = SharedParts(interval=0.0, share=math.inf)  # their pace is of the real clock
        transport = httpx2.ASGITransport(app=app)
        self._browser = httpx2.AsyncClient(transport=transport, base_url=f"http://soak.test{settings.prefix}")

    async def read(self) -> None:
        """Read usage, metrics, pools, lists, one user's offers, panels, and all events since the last time."""
        services = self._service.services
        await services.usage.metrics()
        await services.inventory.pools_json(ADMIN)
        for state in ("waiting", "running"):
            await services.listings.listing(ADMIN, ListQuery(state=state))
        await services.offers.offers(ADMIN, f"{TEAMS[0]}0", (), "job")
        for reader in PAGE_READERS:
            answer = await self._browser.get("", headers={"Authorization": f"Bearer {reader.name}"})
            answer.raise_for_status()
        while events := await services.feed.after(self._event):
            self._event = events[-1].id

    async def close(self) -> None:
        """Close the browser."""
        await self._browser.aclose()
