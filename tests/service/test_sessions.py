"""Guaranteed notebooks: instant, never taken, never given out twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from running import SAMPLE, Running, running

ONE_GPU = SAMPLE.read_text(encoding="utf-8").replace("reserved: 5, limit: 9", "reserved: 1, limit: 2")


@pytest.mark.covers("F25", "F26")
async def test_session_in_quota_starts_on_a_full_cluster_and_its_reason_names_the_victim(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        jobs = [await run.submit("ana", f"t{i}", profile="gpu1") for i in range(9)]
        for job in jobs:
            await run.job(job.id, "running")
        table = await run.client("spawner").offers(user="bo")
        offers = {offer.profile: offer for offer in table.offers}
        assert offers["gpu1"].code == "ready_now"
        assert offers["gpu2"].code == "ready_after_reclaim"
        assert [(v.name, v.team, v.owner, v.gpus) for v in offers["gpu2"].victims] == [("", "rnd", "", 1)]
        assert offers["gpu2"].seconds == 30
        asked = await run.session("bo", "gpu2", "devops")
        session = await run.granted(asked.id)
        assert session.phase == "granted"
        assert sorted(session.env["CUDA_VISIBLE_DEVICES"].split(",")) == ["8", "9"]
        assert session.virtual
        assert session.env["MAKEWAY_VIRTUAL_GPUS"] == "1"
        assert await run.states() == {f"t{i}": "running" for i in range(8)} | {"t8": "pending"}
        # Whatever is submitted now, the session stays.
        for i in range(4):
            await run.submit("lea", f"more{i}", profile="gpu3", team="devops")
        await run.converged()
        kept = await run.client("spawner").session(asked.id)
        assert (kept.state, kept.notice) == ("starting", None)


@pytest.mark.covers("F25", "N02", "N03")
async def test_session_beyond_the_reservation_is_refused_with_names(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        first = await run.granted((await run.session("ana", "gpu3", "rnd")).id)
        assert first.phase == "granted"
        second = await run.granted((await run.session("lea", "gpu3", "rnd")).id)
        assert (second.state, second.phase) == ("cancelled", "over")
        assert "3 of your 5 guaranteed GPUs are in use: ana 3; this notebook needs 3." in second.reason.message
        assert second.reason.code == "not_in_quota"


async def test_one_person_holds_at_most_two_gpu_sessions(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        for server in ("", "two"):
            await run.granted((await run.session("ana", "gpu1", "rnd", server)).id)
        with pytest.raises(MakewayError, match="already has 2 GPU sessions, and 2 is the most") as refused:
            await run.session("ana", "gpu1", "rnd", "three")
        assert refused.value.status == 409
        assert (await run.granted((await run.session("ana", "cpu", None, "three")).id)).phase == "granted"


@pytest.mark.covers("F25")
async def test_five_requests_at_once_get_two_gpu_sessions(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        asked = [run.session("ana", "gpu1", "rnd", f"server{number}") for number in range(5)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, MakewayError)]
        assert len(refused) == 3
        assert {error.code for error in refused} == {"too_many_sessions"}


async def test_a_new_server_of_the_same_name_replaces_a_lease_that_was_left_behind(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        first = await run.granted((await run.session("ana", "gpu3", "rnd")).id)
        second = await run.granted((await run.session("ana", "gpu3", "rnd")).id)
        assert second.id != first.id
        assert (await run.client("spawner").session(first.id)).phase == "over"
        assert (await run.used())["rnd"] == 3
        with pytest.raises(MakewayError) as over:
            await run.client("spawner").renew(first.id)
        assert over.value.status == 410


async def test_lease_that_is_not_renewed_ends(tmp_path: Path) -> None:
    async with running(tmp_path, MAKEWAY_LEASE_SECONDS=3, MAKEWAY_TICK_SECONDS=0.2) as run:
        session = await run.granted((await run.session("ana", "gpu3", "rnd")).id)
        gone = run.client("spawner").session(session.id, wait=10, version=session.version)
        after = await gone
        assert (after.phase, after.reason.code) == ("over", "lease_expired")

        async def freed() -> bool:
            return await run.used() == {"rnd": 0, "devops": 0, "idle": 10}

        await run.until(freed, "the read model shows the GPUs as free")


@pytest.mark.covers("N01", "N02", "F11")
@pytest.mark.parametrize(
    ("person", "profile", "team", "status", "words"),
    [
        ("ana", "gpu9", "rnd", 404, "There is no profile “gpu9”. Did you mean “gpu"),
        ("ana", "gpu1", "devops", 403, "ana is not in the team “devops”: your team is rnd."),
        ("ana", "gpu1", "<b>\"'</b>", 403, "ana is not in the team"),
        ("guest", "gpu1", None, 403, "guest is in no team, so only profiles without GPUs can be used"),
        ("lea", "gpu1", None, 403, "choose one of rnd and devops"),
    ],
)
async def test_refusals_say_what_to_do(
    tmp_path: Path, person: str, profile: str, team: str | None, status: int, words: str
) -> None:
    async with running(tmp_path) as run:
        with pytest.raises(MakewayError) as refused:
            await run.session(person, profile, team)
        assert refused.value.status == status
        assert words in refused.value.message
        assert not await run.service.components.world.rows(), "nothing half done"


async def both_click(run: Running, round: int) -> tuple[str, str]:
    """Two people of a team ask for its last guaranteed GPU at once; who got it, and what the other read."""
    asked = await asyncio.gather(run.session("ana", "gpu1", "rnd", "a"), run.session("lea", "gpu1", "rnd", "b"))
    first, second = [await run.granted(session.id) for session in asked]
    winner, loser = (first, second) if first.phase == "granted" else (second, first)
    assert winner.phase == "granted", round
    assert (loser.phase, loser.state) == ("over", "cancelled"), round
    for session in asked:
        await run.client("spawner").release(session.id)
    return winner.user, loser.reason.message


@pytest.mark.slow
@pytest.mark.covers("F25", "N03")
@pytest.mark.timeout(600)
async def test_two_users_click_the_last_gpu_200_times(tmp_path: Path) -> None:
    async with running(tmp_path, ONE_GPU, gpus=10) as run:
        for round in range(200):
            winner, message = await both_click(run, round)
            assert message == f"1 of your 1 guaranteed GPUs is in use: {winner} 1.", message
        rows = await run.service.components.world.rows()
        assert not rows
