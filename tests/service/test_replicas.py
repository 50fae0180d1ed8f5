"""Two replicas in one process, on one PostgreSQL and one backend: one leads, both show the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.fernet import Fernet
from makeway_api.models import CredentialRequest, Event, Job, JobRequest, PolicyRequest, SessionRequest
from makeway_quota.application import AlreadyRunning, Application
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.hub.leases import Leases
from makeway_quota.settings import load
from postgres import Network, empty_database, network
from pydantic import SecretStr
from replicas import LEADER_SECONDS, SharedBackend, opened, settings, shared_backend
from running import IDLE, PEOPLE

ANA, BO, ROOT = PEOPLE["ana"], PEOPLE["bo"], PEOPLE["root"]


@dataclass(slots=True)
class Pair:
    """A leader and a follower; `behind` is how many seconds later the follower heard of each version."""

    leader: Application
    follower: Application
    backend: SharedBackend
    networks: dict[str, Network]
    behind: list[float]


def lags(first: Application, second: Application) -> list[float]:
    """Note, from now on, how long after one replica the other hears of each version of each workload."""
    heard: dict[tuple[str, int], float] = {}
    result: list[float] = []

    def note(rows: Any) -> None:
        now = time.monotonic()
        for row in rows:
            at = heard.setdefault((row.id, row.version), now)
            if at is not now:
                result.append(now - at)

    first.components.store.on_change(note)
    second.components.store.on_change(note)
    return result


@asynccontextmanager
async def pair(postgres: str, tmp_path: Path, **more: object) -> AsyncIterator[Pair]:
    empty_database(postgres)
    async with shared_backend(tmp_path) as backend, network(postgres) as one, network(postgres) as two:
        leader = await opened(backend, one.url(), "one", tmp_path, **more)
        await until(lambda: leader.loop.term, "the first leads")
        follower = await opened(backend, two.url(), "two", tmp_path, **more)
        both = Pair(leader, follower, backend, {"one": one, "two": two}, lags(leader, follower))
        try:
            yield both
        finally:
            one.mend()
            two.mend()
            await both.follower.stop(stop_jobs=False)
            await both.leader.stop(stop_jobs=False)


async def until(found: Callable[..., Any], what: str, seconds: float = 90.0) -> Any:
    ends = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < ends, f"waited {seconds:g} s in vain: {what}"
        await asyncio.sleep(0.02)
    return answer


async def submitted(service: Application, name: str, profile: str = "gpu1") -> Job:
    job = await service.services.submissions.submit(ANA, JobRequest(name=name, profile=profile, command=IDLE))
    assert isinstance(job, Job)
    return job


async def state(service: Application, id: str, *states: str) -> Job:
    """Wait for a state by long polls, as a notebook does."""
    job = await service.services.jobs.job(ROOT, id)
    async with asyncio.timeout(90):
        while job.state.value not in states:
            job = await service.services.jobs.job(ROOT, id, wait=10.0, version=job.version)
    return job


@pytest.mark.covers("N24")
async def test_a_follower_shows_the_leaders_changes_and_the_leader_sees_its_requests(
    postgres: str, tmp_path: Path
) -> None:
    async with pair(postgres, tmp_path) as two:
        leader, follower = two.leader, two.follower
        events: list[Event] = []
        _, newest = await follower.services.feed.range()

        async def listen() -> None:
            async for event in follower.services.audit.events(ROOT, newest):
                events.append(event)

        listening = asyncio.create_task(listen())
        at_follower = await submitted(follower, "from the follower")
        at_leader = await submitted(leader, "from the leader")
        for job in (at_follower, at_leader):
            for service in (leader, follower):
                await state(service, job.id, "running")
        await follower.services.jobs.cancel(ANA, at_leader.id)
        for service in (leader, follower):
            assert (await state(service, at_leader.id, "cancelled")).attempt == 1
        two.backend.breaches.clear()  # that job was killed because its owner cancelled it
        await until(lambda: [e for e in events if e.data.get("state") == "cancelled"], "the stream shows it")
        told = {(e.data["id"], e.data["state"]) for e in events if e.kind == "job"}
        assert {(at_follower.id, "running"), (at_leader.id, "running"), (at_leader.id, "cancelled")} <= told
        decisions = await follower.services.audit.decisions(ROOT)
        assert {("start", at_follower.id), ("start", at_leader.id)} <= {(d.verb, d.workload) for d in decisions}
        listening.cancel()
        assert two.backend.actors() == {"one"}, "a follower gives no order"
        assert max(two.behind) < 15.0  # a machine that runs other tests beside; `make faults` asks for 1 s
        assert not two.backend.breaches


async def test_a_policy_that_is_applied_on_a_follower_is_used_by_the_leader(postgres: str, tmp_path: Path) -> None:
    async with pair(postgres, tmp_path) as two:
        current = await two.follower.services.policies.current(ROOT)
        assert current.document is not None
        text = current.document.replace("reserved: 5, limit: 9", "reserved: 5, limit: 6")
        assert text != current.document
        applied = await two.follower.services.policies.apply(
            ROOT, PolicyRequest(document=text, base=current.version, comment="less")
        )
        await until(lambda: two.leader.components.world.policy_version == applied.version, "the leader uses it")
        jobs = [await submitted(two.follower, f"t{number}") for number in range(7)]
        for job in jobs[:6]:
            await state(two.follower, job.id, "running")
        await until(lambda: two.leader.loop.cycles > 2, "it has decided")
        assert (await two.follower.services.jobs.job(ROOT, jobs[6].id)).state.value == "pending", "the new limit"


async def test_a_team_that_is_removed_on_one_replica_gets_its_credentials_from_no_other(
    postgres: str, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_bytes(Fernet.generate_key())
    async with pair(postgres, tmp_path, MAKEWAY_CREDENTIALS_KEY_FILE=str(tmp_path / "keys")) as two:
        leader, follower = two.leader.services, two.follower.services
        current = await leader.policies.current(ROOT)
        whole = yaml.safe_load(current.document or "")
        for profile in whole["profiles"]:
            profile.pop("policies", None)
        text, without = (
            yaml.safe_dump({**whole, "policies": [team for team in whole["policies"] if team["name"] != gone]})
            for gone in ("", "rnd")
        )
        asked = CredentialRequest(kind="file", team="rnd", values={"content": SecretStr("old")})
        await leader.credentials.save(ROOT, "git", asked)
        assert await follower.credentials.files("rnd") == {"git": "old"}
        await follower.policies.apply(ROOT, PolicyRequest(document=without))
        assert await leader.credentials.files("rnd") == {}, "at once, whatever this replica has read of the policy"
        back = await follower.policies.apply(ROOT, PolicyRequest(document=text))
        assert [await one.credentials.files("rnd") for one in (leader, follower)] == [{}, {}]
        await until(lambda: two.leader.components.world.policy_version == back.version, "the leader uses it")
        await leader.credentials.enable(ROOT, "git", "rnd")
        assert await follower.credentials.files("rnd") == {"git": "old"}


async def test_a_lease_that_is_renewed_on_a_follower_lives(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the leases moves in this test only, so that no renewal comes too late on a busy machine."""
    now = 0.0
    heard: dict[str, list[float | None]] = {}

    class TestedLeases(Leases):
        def written(self, times: Mapping[str, float | None]) -> None:
            super().written(times)
            for id, at in times.items():
                heard.setdefault(id, []).append(at)

    monkeypatch.setattr("makeway_quota.application.Leases", partial(TestedLeases, clock=lambda: now))
    async with pair(postgres, tmp_path, MAKEWAY_LEASE_SECONDS=4) as two:
        ask = SessionRequest(user="bo", profile="gpu1", team="devops")
        session = await two.follower.services.sessions.request(PEOPLE["spawner"], ask, ["devops"])
        kept = await two.follower.services.sessions.session(session.id, wait=10.0, version=session.version)
        lost_ask = SessionRequest(user="ana", profile="gpu1", team="rnd")
        lost = await two.follower.services.sessions.request(PEOPLE["spawner"], lost_ask, ["rnd"])
        for one in (kept, lost):
            await state_of_session(two.follower, one.id, "starting")
        await until(lambda: {kept.id, lost.id} <= heard.keys(), "the leader knows both")
        # Longer than the lease: the other session is given up.
        while await two.leader.components.world.row(lost.id) is not None:
            before = heard[kept.id][-1]
            assert (await two.follower.services.sessions.renew(kept.id)).phase == "granted"
            await until(lambda old=before: heard[kept.id][-1] != old, "the leader hears of the renewal")
            now += 1.0
        assert now > 4.0
        assert (await two.leader.services.sessions.renew(kept.id)).phase == "granted"
        assert (await two.leader.services.sessions.session(lost.id)).reason.code == "lease_expired"


async def state_of_session(service: Application, id: str, wanted: str) -> None:
    async with asyncio.timeout(90):
        while (session := await service.services.sessions.session(id)).state != wanted:
            await service.services.sessions.session(id, wait=5.0, version=session.version)


@pytest.mark.covers("N24")
async def test_a_leader_without_its_database_acts_no_more_and_is_a_candidate_again(
    postgres: str, tmp_path: Path
) -> None:
    async with pair(postgres, tmp_path) as two:
        running = [await submitted(two.leader, f"t{number}") for number in range(3)]
        for job in running:
            await state(two.leader, job.id, "running")
        two.networks["one"].cut()
        cut_at = time.monotonic()
        late = await submitted(two.follower, "late")
        await state(two.follower, late.id, "running")
        took = time.monotonic() - cut_at
        assert took < 30, f"the takeover took {took:.1f} s"
        assert two.follower.loop.term == 2
        assert two.leader.components.leader.term is None
        assert all(order.at < cut_at + LEADER_SECONDS for order in two.backend.orders if order.replica == "one")
        two.networks["one"].mend()
        await until(lambda: two.leader.loop.term is None, "it follows")
        for job in [*running, late]:
            assert (await state(two.leader, job.id, "running")).attempt == 1
        await two.follower.stop(stop_jobs=False)
        await until(lambda: two.leader.loop.term == 3, "it leads again")
        again = await submitted(two.leader, "again")
        await state(two.leader, again.id, "running")
        assert not two.backend.breaches
        assert {id for id, attempt in two.backend.memory.attempts} == {j.id for j in [*running, late, again]}
        two.follower = await opened(two.backend, two.networks["two"].url(), "two", tmp_path)  # for the end of the test


async def test_a_clean_end_of_the_leader_hands_over_at_once(postgres: str, tmp_path: Path) -> None:
    async with pair(postgres, tmp_path, MAKEWAY_LEADER_SECONDS=60) as two:
        job = await submitted(two.leader, "goes on")
        await state(two.follower, job.id, "running")
        await two.leader.stop(stop_jobs=True)
        began = time.monotonic()
        await until(lambda: two.follower.loop.term == 2, "the other leads")
        assert time.monotonic() - began < 15, "a deadline of 60 s is not waited for"
        two.leader = await opened(two.backend, two.networks["one"].url(), "one", tmp_path)


@pytest.fixture
def alone(postgres: str) -> str:
    return empty_database(postgres)


async def test_a_backend_that_is_not_shared_has_one_service(
    alone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makeway_quota.application.TAKEOVER_SECONDS", 0.5)
    first = await Application.open(load(environ=settings(tmp_path / "one", alone)), MemoryBackend())
    await first.start()
    with pytest.raises(AlreadyRunning, match="Another quota service works on this database"):
        await Application.open(load(environ=settings(tmp_path / "two", alone)), MemoryBackend())
    with pytest.raises(AlreadyRunning, match="already uses"):
        await Application.open(load(environ=settings(tmp_path / "one", alone)), MemoryBackend())
    await first.stop(stop_jobs=False)
    again = await Application.open(load(environ=settings(tmp_path / "two", alone)), MemoryBackend())
    await again.start()
    await again.stop(stop_jobs=False)
