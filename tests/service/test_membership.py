"""Who is in a team is looked at when work starts, not only when it is submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import cast

import pytest
from hub_fake import FakeHub, fake_hub
from makeway_api.errors import MakewayError
from makeway_quota.control.hub import people as module
from makeway_quota.control.hub.client import HubApi, HubUnreachable, HubUser
from makeway_quota.policy import read_policy
from makeway_quota.services import Caller, health
from makeway_quota.store.records import Person
from makeway_quota.store.store import open_store
from running import PEOPLE, READ, Running, running

POLICY = """
version: 1
pools: [{name: gpu, size: 4}]
profiles: [{name: gpu1, gpus: 1}, {name: gpu4, gpus: 4}]
policies:
  - {name: rnd, title: R&D, groups: [rnd], quotas: [{reserved: 2}]}
  - {name: devops, title: DevOps, groups: [devops], users: [cy], quotas: [{reserved: 2}]}
"""
ALL = PEOPLE | {"ada": Caller("ada", groups=frozenset({"rnd"}), scopes=READ)}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the Hub read again after a moment."""
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.1)


async def held(run: Running, id: str, code: str = "not_member") -> str:
    """Wait until a job is held; return the sentence."""

    async def there() -> str:
        job = await run.client("root").job(id)
        return job.reason.message if job.reason is not None and job.reason.code == code else ""

    return str(await run.until(there, f"{id} has the reason {code}"))


def site(hub: FakeHub) -> None:
    """The people of the tests, as users of the Hub."""
    for name in ("ana", "ada", "bo"):
        hub.add(name, *sorted(ALL[name].groups))


async def test_jobs_of_a_person_who_left_wait_until_they_are_back(tmp_path: Path) -> None:
    async with fake_hub() as hub:
        site(hub)
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=ALL) as run:
            runs = await run.submit("ana", "runs", profile="gpu4", team="rnd")
            await run.job(runs.id, "running")
            waits = await run.submit("ana", "waits", profile="gpu1", team="rnd")
            other = await run.submit("ada", "other", profile="gpu1", team="rnd")
            hub.leave("ana", "rnd")
            message = await held(run, waits.id)
            assert message == "Held: ana is not in the team R&D (any more); it is released when ana is in R&D again."
            assert (await run.client("root").job(runs.id)).state.value == "running"
            await run.client("root").cancel(runs.id)
            await run.job(other.id, "running")
            await run.converged()
            assert (await run.client("root").job(waits.id)).state.value == "pending"
            hub.join("ana", "rnd")
            await run.job(waits.id, "running")


async def test_what_another_replica_heard_of_a_person_is_read_before_their_work_is_held(tmp_path: Path) -> None:
    """Ana joined the team, and the replica that does not lead heard of it first; the Hub tells the leader nothing."""
    async with fake_hub() as hub:
        hub.status = 503
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=ALL) as run:
            made = "2020-01-01T00:00:00.000001Z"
            people = run.service.components.world.people
            assert await people.record_user(HubUser("ana", (), identity=made)) == "ana"
            await run.converged()
            run.service.components.store.people.keep([Person("ana", made, ("rnd",))])
            session = await run.granted((await run.session("ana", "gpu1", "rnd")).id)
            assert session.phase == "granted"
            job = await run.submit("ana", "fit", profile="gpu1", team="rnd")
            await run.job(job.id, "running")


async def test_a_preempted_job_of_a_person_who_left_returns_to_the_queue_and_stays_there(tmp_path: Path) -> None:
    async with fake_hub() as hub:
        site(hub)
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=ALL) as run:
            job = await run.submit("ana", "big", profile="gpu4", team="rnd")
            await run.job(job.id, "running")
            hub.leave("ana", "rnd")
            await run.until(lambda: run.service.components.world.people.person("ana").groups == (), "it is known")
            owner = await run.submit("bo", "owner", profile="gpu1", team="devops")
            await run.job(owner.id, "running")
            await held(run, job.id)
            await run.client("root").cancel(owner.id)
            await run.converged()
            assert (await run.client("root").job(job.id)).state.value == "pending"


async def test_a_deleted_persons_jobs_are_held_and_filed_away(tmp_path: Path) -> None:
    async with fake_hub() as hub:
        site(hub)
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=ALL) as run:
            runs = await run.submit("ana", "runs", profile="gpu4", team="rnd")
            await run.job(runs.id, "running")
            waits = await run.submit("ana", "waits", profile="gpu1", team="rnd")
            await run.until(lambda: run.service.components.world.people.person("ana"), "ana is known")
            hub.delete("ana")
            message = await held(run, waits.id)
            assert message == ("Held: the Hub has no user ana/deleted-1 any more; an administrator can cancel it.")
            assert {j.owner for j in (await run.client("root").jobs()).jobs} == {"ana/deleted-1"}
            hub.add("ana", "rnd")
            user = HubUser("ana", ("rnd",), identity=hub.made["ana"])
            assert await run.service.components.world.people.record_user(user) == "ana"
            page = await run.client("ana").jobs(mine=True)
            assert not page.jobs


async def test_a_renamed_persons_jobs_go_on_under_the_new_name(tmp_path: Path) -> None:
    async with fake_hub() as hub:
        site(hub)
        people = ALL | {"anna": Caller("anna", groups=frozenset({"rnd"}), scopes=READ)}
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=people) as run:
            runs = await run.submit("ana", "runs", profile="gpu4", team="rnd")
            waits = await run.submit("ana", "waits", profile="gpu1", team="rnd")
            await run.job(runs.id, "running")
            await run.until(lambda: run.service.components.world.people.person("ana"), "ana is known")
            hub.rename("ana", "anna")

            async def there() -> bool:
                return (await run.client("root").job(waits.id)).owner == "anna"

            await run.until(there, "the jobs are anna's")
            await run.client("anna").cancel(runs.id)
            await run.job(waits.id, "running")
            assert {j.name for j in (await run.client("anna").jobs(mine=True)).jobs} == {"runs", "waits"}


async def test_a_hub_that_is_away_concludes_nothing_not_even_after_a_restart(tmp_path: Path) -> None:
    async with fake_hub() as hub:
        site(hub)
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=ALL) as run:
            block = await run.submit("ada", "block", profile="gpu4", team="rnd")
            await run.job(block.id, "running")
            remaining = await run.submit("ana", "left", profile="gpu1", team="rnd")
            stays = await run.submit("ada", "stays", profile="gpu1", team="rnd")
            await run.until(lambda: run.service.components.world.people.person("ada"), "ada is known")
            hub.leave("ana", "rnd")
            await held(run, remaining.id)
            hub.status = 503
            hub.delete("ada")
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=ALL) as run:
            await run.client("root").cancel(block.id)
            await run.job(stays.id, "running")
            await run.converged()
            assert (await run.client("root").job(remaining.id)).state.value == "pending"


async def test_a_session_that_waits_is_refused_and_one_that_runs_goes_on(tmp_path: Path) -> None:
    async with fake_hub() as hub:
        site(hub)
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=ALL) as run:
            first = await run.session("ana", "gpu1", "rnd", server="one")
            await run.granted(first.id)
            waits = await run.session("ana", "gpu4", "rnd", server="two", preemptible=True)
            hub.leave("ana", "rnd")

            async def over() -> str:
                session = await run.client("spawner").session(waits.id)
                return session.reason.message if session.phase == "over" else ""

            message = await run.until(over, "the session is refused")
            assert (
                message
                == "Not started: ana is not in the team R&D (any more), and the GPUs of this notebook are R&D's."
            )
            assert (await run.client("spawner").renew(first.id)).phase != "over"


async def test_a_person_named_in_the_policy_needs_no_group(tmp_path: Path) -> None:
    async with fake_hub() as hub:
        hub.add("cy")
        async with running(
            tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=ALL | {"cy": Caller("cy", scopes=READ)}
        ) as run:
            job = await run.submit("cy", "j", profile="gpu1", team="devops")
            await run.job(job.id, "running")


async def test_many_owners_are_read_from_the_list_of_users(tmp_path: Path) -> None:
    names = [f"p{n}" for n in range(module.MAX_SINGLE_REQUESTS + 2)]
    crowd = {name: Caller(name, groups=frozenset({"rnd"}), scopes=READ) for name in names}
    async with fake_hub(page_limit=5) as hub:
        for name in names:
            hub.add(name, "rnd")
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=PEOPLE | crowd) as run:
            hub.status = 503
            jobs = [await run.submit(name, name, profile="gpu4", team="rnd") for name in names]
            hub.status = None
            hub.leave(names[-1], "rnd")
            await held(run, jobs[-1].id)
            assert hub.count("GET /hub/api/users?") >= 3


async def test_a_person_is_met_under_their_own_name_before_they_are_answered(tmp_path: Path) -> None:
    """A login shows the rename before the Hub was asked about anybody."""
    async with fake_hub() as hub:
        site(hub)
        people = ALL | {"anna": Caller("anna", groups=frozenset({"rnd"}), scopes=READ)}
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=people) as run:
            known = run.service.components.world.people
            made = hub.made["ana"]
            await known.record_user(HubUser("ana", ("rnd",), identity=made))
            job = await run.submit("ana", "j", profile="gpu1", team="rnd")
            hub.rename("ana", "anna")
            assert await known.record_user(HubUser("anna", ("rnd",), identity=made)) == "anna"
            assert (await run.client("anna").job(job.id)).owner == "anna"
            assert await known.record_user(HubUser("ana", ("rnd",), identity=made)) == "anna"  # from a cache


async def test_an_administrator_cancels_everything_of_a_person(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY, gpus=4, people=ALL) as run:
        runs = await run.submit("ana", "runs", profile="gpu4", team="rnd")
        await run.job(runs.id, "running")
        waits = [await run.submit("ana", f"w{n}", profile="gpu4", team="rnd") for n in range(3)]
        other = await run.submit("ada", "other", profile="gpu1", team="rnd")
        assert (await run.client("root").cancel_all_of("ana")).workloads == 4
        for job in (runs, *waits):
            await run.job(job.id, "cancelled")
        await run.job(other.id, "running")
        for person in ("ana", "bo"):
            with pytest.raises(MakewayError, match="custom:makeway:admin"):
                await run.client(person).cancel_all_of("ada")


async def test_an_administrator_gives_the_work_of_a_deleted_person_to_a_user(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY, gpus=4, people=ALL) as run:
        people = run.service.components.world.people
        await people.record_user(HubUser("ana", ("rnd",), identity="2026-01-01T00:00:00Z"))
        job = await run.submit("ana", "j", profile="gpu1", team="rnd")
        await people.record_user(HubUser("ana", ("rnd",), identity="2026-01-02T00:00:00Z"))
        assert (await run.client("root").job(job.id)).owner == "ana/deleted-1"
        with pytest.raises(MakewayError, match="Only the work of a deleted person"):
            await run.client("root").give_work("ana", "ada")
        await run.client("root").give_work("ana/deleted-1", "ada")
        assert (await run.client("ada").job(job.id)).owner == "ada"


async def test_a_stream_shows_a_new_person_nothing_of_their_namesake(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY, gpus=4, people=ALL) as run:
        people, services = run.service.components.world.people, run.service.services
        await people.record_user(HubUser("ana", ("rnd",), identity="2026-01-01T00:00:00Z"))
        job = await run.submit("ana", "secret", profile="gpu1", team="rnd")
        await run.job(job.id, "running")
        await services.feed.newest()
        await people.record_user(HubUser("ana", (), identity="2026-01-02T00:00:00Z"))
        await services.feed.newest()
        assert "ana" not in {event.owner for event in await services.feed.after(0)}


async def test_names_of_people_are_normalized_as_the_hub_does(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY, gpus=4, people=ALL) as run:
        job = await run.submit("ana", "runs", profile="gpu4", team="rnd")
        assert (await run.client("root").cancel_all_of(" Ana ")).name == "ana"
        await run.job(job.id, "cancelled")


async def test_a_name_that_was_never_heard_of_gets_no_work(tmp_path: Path) -> None:
    """A user who did not come to Makeway yet is asked for at the Hub, which decides."""
    async with fake_hub() as hub:
        site(hub)
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=ALL) as run:
            people = run.service.components.world.people
            await people.record_user(HubUser("ana", ("rnd",), identity=hub.made["ana"]))
            job = await run.submit("ana", "j", profile="gpu1", team="rnd")
            hub.delete("ana")
            hub.add("ana", "rnd")
            await people.record_user(HubUser("ana", ("rnd",), identity=hub.made["ana"]))
            root = run.client("root")
            assert (await root.job(job.id)).owner == "ana/deleted-1"
            with pytest.raises(MakewayError, match="The Hub has no user carla, who could have this work") as told:
                await root.give_work("ana/deleted-1", "carla")
            assert told.value.status == 404
            with pytest.raises(MakewayError, match="There is no work of zoe/deleted-1"):
                await root.give_work("zoe/deleted-1", "bo")
            with pytest.raises(MakewayError, match="The Hub has no user zoe, whose jobs could be cancelled"):
                await root.cancel_all_of("zoe")
            hub.status = 500
            with pytest.raises(MakewayError, match="does not answer whether it has a user carla") as told:
                await root.give_work("ana/deleted-1", "carla")
            assert told.value.status == 503
            hub.status = None
            assert (await root.job(job.id)).owner == "ana/deleted-1"
            hub.add("carla")
            await root.give_work("ana/deleted-1", "Carla")
            assert (await root.job(job.id)).owner == "carla"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_hub_that_lost_its_users_changes_nothing_and_is_named(tmp_path: Path) -> None:
    """Its database was lost: it lists only new users. One made anew is another person, and reads nothing of the old."""
    crowd = {name: Caller(name, groups=frozenset({"rnd"}), scopes=READ) for name in ("ana", "ada", "bo", "cy")}
    async with fake_hub() as hub:
        for name in crowd:
            hub.add(name, "rnd")
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=PEOPLE | crowd) as run:
            people = run.service.components.world.people
            clock = Clock()
            people._monotonic = clock
            jobs = {name: await run.submit(name, name, profile="gpu4", team="rnd") for name in crowd}
            for name in crowd:
                await people.record_user(HubUser(name, ("rnd",), identity=hub.made[name]))
            for name in crowd:
                hub.delete(name)
            hub.add("first", "rnd")
            for _ in range(3):
                clock.now += 20
                await people.refresh(crowd)
            assert {name: people.is_gone(name) for name in crowd} == dict.fromkeys(crowd, False)
            assert {(await run.client("root").job(job.id)).owner for job in jobs.values()} == set(crowd)
            assert people.problem is not None
            assert people.problem.startswith("JupyterHub lacks 4 of the 4 users that Makeway knows")
            assert health.checks(run.service.services.context)["people"] == "the Hub lacks most of its users"
            for anew in ("ana", "ada", "bo"):
                hub.add(anew, "rnd", "new")
                assert await people.record_user(HubUser(anew, ("rnd", "new"), identity=hub.made[anew])) == anew
                assert people.person(anew).groups == ("new", "rnd"), "groups are as the Hub has them"
                assert (await run.client("root").job(jobs[anew].id)).owner == f"{anew}/deleted-1"
                assert not people.is_gone("cy"), "the others are doubted as before"
            later = await run.submit("ana", "later", profile="gpu4", team="rnd")
            clock.now += module.MAX_DOUBT_SECONDS
            await people.refresh(crowd)
            assert people.problem is None
            owners = {(await run.client("root").job(job.id)).owner for job in jobs.values()}
            assert owners == {f"{name}/deleted-1" for name in crowd}
            assert (await run.client("root").job(later.id)).owner == "ana", "what was submitted since is theirs"


async def test_a_hub_that_makes_its_users_anew_gives_them_nothing_of_the_old_ones(tmp_path: Path) -> None:
    """As after a course: most users are deleted and made once more for other people."""
    crowd = {name: Caller(name, groups=frozenset({"rnd"}), scopes=READ) for name in ("ana", "ada", "bo")}
    async with fake_hub() as hub:
        for name in crowd:
            hub.add(name, "rnd")
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=PEOPLE | crowd) as run:
            people = run.service.components.world.people
            jobs = {name: await run.submit(name, name, profile="gpu4", team="rnd") for name in crowd}
            for name in crowd:
                await people.record_user(HubUser(name, ("rnd",), identity=hub.made[name]))
            for name in crowd:
                hub.delete(name)
                hub.add(name, "rnd")
            for name in crowd:
                assert await people.record_user(HubUser(name, ("rnd",), identity=hub.made[name])) == name
                assert (await run.client("root").job(jobs[name].id)).owner == f"{name}/deleted-1"
            assert people.problem is None


async def test_a_hub_that_has_its_users_again_is_believed_again(tmp_path: Path) -> None:
    async with fake_hub() as hub:
        site(hub)
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=ALL) as run:
            people = run.service.components.world.people
            clock = Clock()
            people._monotonic = clock
            for name in ("ana", "ada", "bo"):
                await people.record_user(HubUser(name, tuple(ALL[name].groups), identity=hub.made[name]))
            kept = (dict(hub.servers), dict(hub.groups), dict(hub.made))
            for name in ("ana", "ada"):
                hub.delete(name)
            clock.now += 20
            await people.refresh(["ana", "ada"])
            assert people.problem is not None
            hub.servers, hub.groups, hub.made = kept
            clock.now += 200
            hub.delete("ada")  # one of three was deleted
            await people.refresh(["ana", "ada"])
            assert people.problem is None
            assert people.is_gone("ada")
            assert not people.is_gone("ana")


CAPITALS = POLICY.replace("users: [cy]", "users: [cy, BOSS]")
BOSSES = ALL | {name: Caller(name, scopes=READ) for name in ("boss", "BOSS")}


async def test_names_that_differ_in_capitals_only_are_two_people(tmp_path: Path) -> None:
    """A Hub has both where its API made one of them, or its authenticator keeps capitals."""
    async with fake_hub() as hub:
        for name in ("boss", "BOSS"):
            hub.add(name)
        async with running(tmp_path, CAPITALS, gpus=4, hub=HubApi(hub.url, "t"), people=BOSSES) as run:
            small, capitals, root = run.client("boss"), run.client("BOSS"), run.client("root")
            await run.until(lambda: "BOSS" in run.service.components.world.people, "BOSS is known")
            with pytest.raises(MakewayError, match="boss is in no team"):
                await run.submit("boss", "j", profile="gpu1")
            job = await run.submit("BOSS", "j", profile="gpu4")
            assert ((await small.me()).teams, (await capitals.me()).teams) == ([], ["devops"])
            with pytest.raises(MakewayError) as hidden:
                await small.job(job.id)
            assert hidden.value.status == 404
            assert {account.owner for account in (await root.storage()).accounts} == {"BOSS"}
            assert ((await small.storage()).mine, (await capitals.storage()).mine > 0) == (0, True)
            await run.job(job.id, "running")
            waits = await run.submit("BOSS", "waits", profile="gpu4")
            assert (await root.cancel_all_of("boss")).workloads == 0
            hub.delete("BOSS")
            await held(run, waits.id)
            assert (await root.job(job.id)).owner == "BOSS/deleted-1"
            await run.until(lambda: "BOSS" not in run.service.components.world.people, "BOSS is gone")
            assert (await small.me()).teams == ["devops"], "the entry means boss, as JupyterHub writes it"


async def test_what_cannot_be_undone_is_done_to_the_person_who_was_typed(tmp_path: Path) -> None:
    async with fake_hub() as hub:
        hub.add("boss", "rnd")
        people = BOSSES | {"boss": Caller("boss", groups=frozenset({"rnd"}), scopes=READ)}
        async with running(tmp_path, POLICY, gpus=4, hub=HubApi(hub.url, "t"), people=people) as run:
            job, root = await run.submit("boss", "j", profile="gpu4"), run.client("root")
            await run.job(job.id, "running")
            hub.add("BOSS")  # unknown to Makeway
            assert (await root.cancel_all_of("BOSS")).model_dump() == {"name": "BOSS", "workloads": 0}
            hub.delete("BOSS")
            run.service.components.world.people._heard_at.clear()
            hub.status = 500
            with pytest.raises(MakewayError, match="does not answer whether it has a user BoSS") as told:
                await root.cancel_all_of("BoSS")
            assert told.value.status == 503
            assert (await root.job(job.id)).state.value == "running"
            hub.status = None
            assert (await root.cancel_all_of("BoSS")).name == "boss"
            await run.job(job.id, "cancelled")


async def test_a_user_of_a_policy_whom_the_hub_cannot_look_up_keeps_no_departure_unnoticed(tmp_path: Path) -> None:
    class Hub:
        async def user(self, name: str, *, fresh: bool) -> HubUser:
            if name == "BOSS":
                raise HubUnreachable("an error of its own")
            return HubUser(name, (), identity="2026-01-01T00:00:00Z")

    store = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}")
    people = module.People(store, cast(HubApi, Hub()))
    await people.refresh(["ana"], ["BOSS"])
    known = people.person("ana")
    assert known is not None
    assert known.groups == ()
    store.close()


async def test_a_replica_that_does_not_lead_learns_of_a_user_with_capitals(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}")
    leader, other, learned = module.People(store), module.People(store), asyncio.Event()

    async def owners() -> Collection[str]:
        return ()

    other.on_change(learned.set)
    follows = module.refresh_forever(other, owners, lambda: ("BOSS",), lambda: False)
    task = asyncio.create_task(follows)
    document = read_policy(CAPITALS)
    assert other.teams_of(document, "boss", ()) == ("devops",)
    await leader.record_user(HubUser("BOSS", (), identity="2026-01-01T00:00:00Z"))
    async with asyncio.timeout(60):
        await learned.wait()
    assert other.teams_of(document, "boss", ()) == ()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    store.close()
