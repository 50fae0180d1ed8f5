"""A pending job is moved to another queue as if it had been submitted there, with its id and its submission time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import FileIn, Job
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.services import Caller
from makeway_quota.store.records import Change, Person, Workload
from running import PEOPLE, READ, Running, running

POLICY = """
version: 1
pools: [{name: gpu, size: 4}]
profiles:
  - {name: gpu1, gpus: 1, env: {SIZE: one, SHARED: same}, image: 'site/one:1', time_limit: 1h}
  - {name: gpu4, gpus: 4, image: 'site/four:1', time_limit: 30m, policies: [rnd, devops]}
  - name: gang
    gpus: 1
    workers: 3
    min_workers: 2
    max_workers: 4
    env: {SIZE: gang}
    images: [{name: a, image: 'site/one:1'}, {name: b, image: 'site/two:1', default: true}]
    signal: SIGUSR1
    policies: [devops]
policies:
  - {name: rnd, title: R&D, groups: [rnd], quotas: [{reserved: 1, limit: 1}]}
  - {name: devops, title: DevOps, groups: [devops], quotas: [{reserved: 2}]}
  - {name: idle, title: Idle, groups: [idle], quotas: [{reserved: 0, limit: 0}]}
"""
LEAD = Caller("lead", groups=frozenset({"rnd"}), scopes=READ | {"custom:makeway:manage!group=rnd"})
ALL = PEOPLE | {"lead": LEAD, "lea": Caller("lea", groups=frozenset({"rnd", "devops", "idle"}), scopes=READ)}


@asynccontextmanager
async def site(folder: Path, policy: str = POLICY, **settings: Any) -> AsyncIterator[Running]:
    """Run a service whose jobs are in memory."""
    backend = MemoryBackend([NodeStatus("n", "gpu", (0, 1, 2, 3))], real_time=True)
    async with running(folder, policy, backend=backend, people=ALL, **settings) as run:
        yield run


async def waiting(run: Running, name: str = "waits", profile: str = "gpu1", **ask: Any) -> Job:
    """Submit a job of lea for R&D that waits there behind another one."""
    first = await run.submit("lea", "first", team="rnd", profile="gpu1")
    await run.job(first.id, "running")
    job = await run.submit("lea", name, team="rnd", profile=profile, **ask)
    await run.converged()
    assert (await run.client("lea").job(job.id)).state.value == "pending"
    return job


def row_of(run: Running, id: str) -> Workload:
    row = run.service.components.store.workload(id)
    assert row is not None
    return row


async def refused(call: Any) -> MakewayError:
    with pytest.raises(MakewayError) as result:
        await call
    return result.value


@pytest.mark.covers("F11")
async def test_a_job_that_waits_for_one_team_starts_for_another(tmp_path: Path) -> None:
    async with site(tmp_path) as run:
        lea, store = run.client("lea"), run.service.components.store
        job = await waiting(run)
        kept = {team: bytes for team, bytes in store.accounts.of_teams(["rnd", "devops"]).items() if team}
        moved = await lea.move(job.id, team="devops")
        assert (moved.id, moved.team, moved.profile, moved.submitted_at) == (
            job.id, "devops", "gpu1", job.submitted_at,
        )  # fmt: skip
        assert (await run.job(job.id, "running")).team == "devops"
        used = await run.used()
        assert (used["rnd"], used["devops"]) == (1.0, 1.0)
        told = await lea.job_events(job.id)
        [line] = [line for line in told if line.code == "queue_changed"]
        assert line.message == "lea moves waits from R&D (gpu1) to DevOps (gpu1)."
        assert (line.verb, line.team) == ("queue", "devops")
        assert line.message in [line.message for line in await lea.decisions(team="rnd")], "told where it was"
        now = store.accounts.of_teams(["rnd", "devops"])
        assert now["rnd"] < kept["rnd"]
        assert now["rnd"] + now["devops"] >= sum(kept.values()), "its bytes are the new team's"
        assert (await lea.jobs(team="rnd")).jobs[0].name == "first"


@pytest.mark.covers("F11")
async def test_a_repeated_move_changes_nothing_even_when_the_job_has_started(tmp_path: Path) -> None:
    async with site(tmp_path) as run:
        lea = run.client("lea")
        job = await waiting(run)
        await lea.move(job.id, team="devops")
        await run.job(job.id, "running")
        again = await lea.move(job.id, team="devops", profile="gpu1")
        assert (again.state.value, again.team) == ("running", "devops")
        assert len([line for line in await lea.job_events(job.id) if line.code == "queue_changed"]) == 1


async def test_what_a_profile_fixes_is_that_of_the_new_one_and_what_was_asked_for_stays(tmp_path: Path) -> None:
    async with site(tmp_path) as run:
        lea = run.client("lea")
        job = await waiting(run, env={"OWN": "1", "SHARED": "mine"}, time_limit=600, priority="low")
        await lea.move(job.id, team="devops", profile="gang")
        row = row_of(run, job.id)
        assert (row.gpus, row.workers, row.min_workers, row.signal) == (1000, 3, 2, "SIGUSR1")
        assert (row.time_limit, row.priority) == (600.0, "low")
        assert row.image == "site/one:1", "it is offered there"
        assert dict(row.env) == {"SIZE": "gang", "SHARED": "mine", "OWN": "1"}
        assert row.weight == len("".join([*row.command, "SIZE", "gang", "SHARED", "mine", "OWN", "1"]))


async def test_a_shorter_time_limit_and_another_image_are_said(tmp_path: Path) -> None:
    async with site(tmp_path) as run:
        job = await waiting(run, time_limit=2400)
        moved = await run.client("lea").move(job.id, profile="gpu4")
        row = row_of(run, job.id)
        assert (row.gpus, row.time_limit, row.image) == (4000, 1800.0, "site/four:1")
        assert moved.notes[0] == ("Its time limit is 30 min, the most that its profile allows; 40 min was asked for.")
        assert moved.notes[1] == "The job runs in the image site/four:1 now, not in site/one:1."


@pytest.mark.parametrize(
    ("who", "where", "code", "words"),
    [
        ("ana", {"team": "devops"}, "not_yours", "only they or an administrator can move it to another queue"),
        ("lead", {"team": "devops"}, "not_yours", "belongs to lea"),
        ("bo", {"team": "devops"}, "not_found", "that you may see"),
        ("lea", {"team": "nowhere"}, "foreign_team", "lea is not in the team “nowhere”"),
        ("lea", {"team": "x" * 63}, "foreign_team", "is not in the team"),
        ("lea", {"profile": "gang"}, "queue_closed", "R&D cannot use gang"),
        ("lea", {"profile": "gpu9"}, "unknown_profile", "There is no profile “gpu9”"),
        ("lea", {}, "no_queue", "Name the team, the profile or both"),
        ("root", {"team": "nowhere"}, "foreign_team", "lea is not in the team “nowhere”"),
    ],
)  # fmt: skip
async def test_a_move_that_a_submission_there_would_not_be_is_refused(
    tmp_path: Path, who: str, where: dict[str, str], code: str, words: str
) -> None:
    async with site(tmp_path) as run:
        job = await waiting(run)
        before = row_of(run, job.id)
        error = await refused(run.client(who).move(job.id, **where))
        assert error.code == code
        assert words in error.message
        assert row_of(run, job.id) == before


async def test_more_workers_than_the_profile_allows_are_refused(tmp_path: Path) -> None:
    async with site(tmp_path) as run:
        job = await waiting(run, workers=8)
        error = await refused(run.client("lea").move(job.id, team="devops", profile="gang"))
        assert (error.code, error.numbers["limit"]) == ("too_many_workers", 4)


async def test_a_job_that_has_run_longer_than_the_new_limit_is_refused(tmp_path: Path) -> None:
    async with site(tmp_path) as run:
        job = await waiting(run)
        run.service.components.store.commit([Change(job.id, {"ran": 1900.0})], now=job.submitted_at.timestamp())
        error = await refused(run.client("lea").move(job.id, profile="gpu4"))
        assert (error.code, error.status) == ("time_limit", 409)
        assert error.message.startswith("waits has run for 31 min 40 s, and a job of gpu4 may run for 30 min in all")


async def test_an_administrator_moves_jobs_into_teams_of_their_owner_only(tmp_path: Path) -> None:
    async with site(tmp_path) as run:
        parts = run.service.components
        parts.store.people.keep([Person("lea", "x", ("rnd", "devops"))])
        await parts.world.people.load()
        job = await waiting(run)
        error = await refused(run.client("root").move(job.id, team="idle"))
        assert (error.code, error.message) == ("foreign_team", "lea is not in the team “idle”.")
        moved = await run.client("root").move(job.id, team="devops")
        assert (moved.owner, moved.team) == ("lea", "devops")
        told = [line.message for line in await run.client("lea").job_events(job.id)]
        assert "root moves waits from R&D (gpu1) to DevOps (gpu1)." in told


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"state": "starting", "attempt": 1}, "waits is starting, and only a pending job can be moved"),
        ({"state": "running", "attempt": 1}, "waits is running, and only a pending job can be moved"),
        ({"state": "checkpointing", "attempt": 1}, "waits saves its checkpoint to make way, and only a pending job"),
        ({"state": "failed"}, "waits has ended (failed): clone it"),
        ({"state": "cancelled"}, "waits has ended (cancelled): clone it"),
        ({"state": "succeeded"}, "waits has ended (succeeded): clone it"),
    ],
)
async def test_only_a_pending_job_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], words: str
) -> None:
    async with site(tmp_path) as run:
        job = await waiting(run)
        row = row_of(run, job.id)

        async def visible(caller: Caller, id: str) -> Workload:
            return row._replace(**fields)

        monkeypatch.setattr(run.service.services.moves._access, "visible", visible)
        error = await refused(run.client("lea").move(job.id, team="devops"))
        assert (error.code, error.status) == ("not_pending", 409)
        assert error.message.startswith(words)
        assert row_of(run, job.id).team == "rnd"


async def test_a_job_that_starts_between_the_look_and_the_write_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(tmp_path) as run:
        job = await waiting(run)
        store = run.service.components.store
        move = store.move

        def late(change: Change, *given: Any, **named: Any) -> Workload | None:
            monkeypatch.setattr(store, "move", move)
            store.commit([Change(job.id, {"state": "failed"})], now=1.9e9)
            return move(change, *given, **named)

        monkeypatch.setattr(store, "move", late)
        error = await refused(run.client("lea").move(job.id, team="devops"))
        assert error.code == "not_pending"
        assert row_of(run, job.id).team == "rnd"
        assert not [line for line in await run.client("lea").job_events(job.id) if line.code == "queue_changed"]


async def test_of_two_who_move_a_job_at_once_both_are_answered_with_what_holds_then(tmp_path: Path) -> None:
    async with site(tmp_path) as run:
        job = await waiting(run, "large", env={"OWN": "1"})
        lea = run.client("lea")
        wanted = [{"team": "idle"}, {"team": "devops", "profile": "gang"}, {"team": "idle"}, {"profile": "gpu4"}] * 3
        result = await asyncio.gather(*(lea.move(job.id, **where) for where in wanted), return_exceptions=True)
        row = row_of(run, job.id)
        told = [line for line in await lea.job_events(job.id) if line.code == "queue_changed"]
        places = [line.message.partition(" from ")[2].rstrip(".").split(" to ") for line in told]
        assert places[0][0] == "R&D (gpu1)"
        assert all(before[1] == after[0] for before, after in itertools.pairwise(places)), "one after another"
        assert f"({row.profile})" in places[-1][1]
        assert dict(row.env)["OWN"] == "1"
        for answer in result:
            if isinstance(answer, MakewayError):
                assert answer.code in ("queue_closed", "not_pending"), answer


async def test_a_full_quota_of_bytes_of_the_new_team_refuses_a_move(tmp_path: Path) -> None:
    limits = {"MAKEWAY_MAX_KEPT_TEAM_MB": 1, "MAKEWAY_MAX_KEPT_SHARE_PERCENT": 100}
    async with site(tmp_path, **limits) as run:
        big = [FileIn(path="a", data="YWFh" * 200_000)]
        job = await waiting(run, files=big)
        await run.submit("bo", "theirs", team="devops", profile="gang", files=[FileIn(path="b", data="YmJi" * 200_000)])
        store = run.service.components.store
        before, kept = row_of(run, job.id), store.accounts.of_teams(["rnd", "devops"])
        error = await refused(run.client("lea").move(job.id, team="devops"))
        assert (error.code, error.status) == ("storage_quota", 507)
        assert error.message.startswith("The team devops keeps ")
        assert row_of(run, job.id) == before
        assert store.accounts.of_teams(["rnd", "devops"]) == kept
        assert (await run.client("lea").move(job.id, profile="gpu4")).profile == "gpu4", "the team stays"


async def test_a_job_of_a_closed_queue_is_moved_and_starts(tmp_path: Path) -> None:
    async with site(tmp_path) as run:
        root, lea = run.client("root"), run.client("lea")
        job = await waiting(run, profile="gpu4")
        await root.policy_apply(POLICY.replace("policies: [rnd, devops]", "policies: [devops]"))
        await run.converged()

        async def closed() -> bool:
            reason = (await lea.job(job.id)).reason
            return reason is not None and reason.code == "queue_closed"

        await run.until(closed, "it waits in a closed queue")
        await root.cancel((await lea.jobs(team="rnd")).jobs[-1].id)
        await lea.move(job.id, team="devops")
        assert (await run.job(job.id, "running")).team == "devops"


async def test_moves_count_as_submissions_of_a_minute(tmp_path: Path) -> None:
    async with site(tmp_path, MAKEWAY_MAX_SUBMISSIONS_PER_MINUTE=4) as run:
        job = await waiting(run)
        lea = run.client("lea")
        for team in ("idle", "rnd"):
            await lea.move(job.id, team=team)
        error = await refused(lea.move(job.id, team="idle"))
        assert (error.code, error.status) == ("too_many_submissions", 429)


@pytest.mark.parametrize(("claim", "moves"), [("", True), ("checkpoints", True), ("checkpoints-{team}", False)])
async def test_a_job_that_has_run_stays_with_the_volume_of_its_checkpoints(
    tmp_path: Path, claim: str, moves: bool
) -> None:
    """It would start from the beginning without a word, and its folder would never be removed."""
    async with site(tmp_path, MAKEWAY_KUBE_CHECKPOINT_CLAIM=claim) as run:
        lea, store = run.client("lea"), run.service.components.store
        job = await waiting(run)
        now = run.service.components.clock()
        store.commit([Change(job.id, {"attempt": 1})], [], now=now)
        if moves:
            assert (await lea.move(job.id, team="devops")).team == "devops"
        else:
            result = await refused(lea.move(job.id, team="devops"))
            assert (result.code, result.status) == ("checkpoints_stay", 409)
            assert "on the volume of R&D" in str(result)
            assert (await lea.move(job.id, profile="gpu4")).profile == "gpu4"
        never_ran = await run.submit("lea", "new", team="rnd", profile="gpu1")
        assert (await lea.move(never_ran.id, team="devops")).team == "devops"
