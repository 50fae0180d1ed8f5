"""What-if offers for the picker, and the usage of each team."""

from __future__ import annotations

from random import Random

import pytest
from engine.histories import happen, random_world
from makeway_quota.engine import GPU, WhatIf, usage_by_team
from worlds import World


def lab() -> World:
    """Ten GPUs; ana's team trains on nine of them."""
    world = World().pool("h100", gpus=10).team("rnd", 5, limit=9, title="R&D").team("devops", 5, limit=9)
    world.profile("gpu1", 1).profile("gpu2", 2).profile("gpu6", 6)
    world.jobs(" ".join(f"r{i}" for i in range(1, 10)), "rnd", "gpu1", owner="ana").reconcile()
    return world


@pytest.mark.covers("N03")
def test_an_offer_that_fits_is_ready_now() -> None:
    world = lab()
    offer = WhatIf(world.snapshot()).offer("devops", "gpu1", owner="bo")
    assert (offer.code, offer.reason, world.say(offer)) == ("ready_now", "starting", "Ready now.")


@pytest.mark.covers("N03", "F40")
def test_ready_after_reclaim_has_a_time_and_victims() -> None:
    world = lab()
    offer = WhatIf(world.snapshot()).offer("devops", "gpu2", owner="bo")
    assert offer.code == "ready_after_reclaim"
    assert offer.seconds == 30
    assert [(v.id, v.owner, v.team, v.gpus) for v in offer.victims] == [("r9", "ana", "rnd", GPU)]
    assert world.say(offer) == "Ready in 30 s or less: R&D's job r9 of ana (1 GPU) makes way."


def test_a_search_for_victims_pauses_at_every_node_and_finds_the_same() -> None:
    world = World().pool("h100", nodes=12, gpus=8).team("rnd", 0).team("ml", 0).team("devops", 48)
    world.profile("gpu1", 1).profile("gpu2", 2)
    for node in range(12):
        for at in range(8):
            world.submit(f"j{node}-{at}", ("rnd", "ml")[at % 2], "gpu1", owner="ana")
    world.reconcile()
    assert world.used() == 96
    pauses = [0]

    def pause() -> None:
        pauses[0] += 1

    offer = WhatIf(world.snapshot(), pause).offer("devops", "gpu2", owner="bo")
    assert offer.code == "ready_after_reclaim"
    assert pauses[0] >= 12
    assert offer == WhatIf(world.snapshot()).offer("devops", "gpu2", owner="bo")


@pytest.mark.covers("N03", "F25")
def test_a_session_beyond_the_reservation_is_refused_with_the_names_of_the_owners() -> None:
    world = lab()
    world.session("s1", "devops", "gpu2", owner="alice").session("s2", "devops", "gpu2", owner="bo").reconcile()
    offer = WhatIf(world.snapshot()).offer("devops", "gpu2", owner="carol")
    assert offer.code == "refused"
    assert world.say(offer) == "4 of your 5 guaranteed GPUs are in use: alice 2, bo 2; this notebook needs 2."
    assert (
        world.say(WhatIf(world.snapshot()).offer("devops", "gpu6"))
        == "This notebook needs 6 GPUs; devops has 5 guaranteed."
    )


@pytest.mark.covers("N03")
def test_a_preemptible_session_runs_over_quota() -> None:
    world = lab().end("r9", "r8")
    offer = WhatIf(world.snapshot()).offer("rnd", "gpu2", preemptible=True)
    assert offer.code == "ready_now"
    assert not offer.in_quota
    assert "over quota" in world.say(offer)


@pytest.mark.covers("N03")
def test_a_job_waits_for_the_limit() -> None:
    world = lab()
    offer = WhatIf(world.snapshot()).offer("rnd", "gpu1", kind="job")
    assert (offer.code, offer.reason) == ("wait", "limit")
    assert world.say(offer) == "R&D uses 9 of its limit of 9 GPUs; this job needs 1."


@pytest.mark.covers("F02", "N03")
def test_closed_and_too_large_are_refused() -> None:
    world = lab().profile("gpu16", 16).profile("closed", 1, policies=["devops"])
    assert WhatIf(world.snapshot()).offer("rnd", "gpu16", kind="job").reason == "too_large"
    offer = WhatIf(world.snapshot()).offer("rnd", "closed", kind="job")
    assert (offer.code, offer.reason) == ("refused", "queue_closed")


@pytest.mark.covers("F37", "N13")
def test_usage_lists_lenders_and_borrowers() -> None:
    world = lab().session("s", "rnd", "gpu1", owner="ana")
    world.reconcile()
    rnd, devops = sorted(usage_by_team(world.snapshot()), key=lambda t: t.team, reverse=True)
    assert (rnd.reserved, rnd.limit, rnd.guaranteed, rnd.in_quota, rnd.borrowed) == (5000, 9000, 1000, 4000, 4000)
    assert rnd.borrowed_from == (("devops", 4000),)
    assert (rnd.lent, rnd.free, rnd.total) == (0, 0, 10_000)
    assert (devops.guaranteed, devops.in_quota, devops.borrowed, devops.lent) == (0, 0, 0, 4000)
    assert devops.free == 1000


@pytest.mark.covers("N03")
@pytest.mark.parametrize("start", range(12))
def test_many_offers_of_one_what_if_are_those_of_many(start: int) -> None:
    random = Random(start)
    world = random_world(random)
    for _ in range(25):
        happen(world, random)
        world.step()
        world.now += random.choice([1, 600])
    snapshot = world.snapshot()
    asks = [(team, profile) for team in world.policies for profile in world.profiles]
    for kind in ("session", "job"):
        once = WhatIf(snapshot)
        for ask in asks:
            assert once.offer(*ask, kind, "x") == WhatIf(snapshot).offer(*ask, kind, "x")


@pytest.mark.parametrize("seed", range(12))
def test_a_renewed_what_if_answers_like_a_new_one(seed: int) -> None:
    random = Random(seed)
    world = random_world(random)
    kept = WhatIf(world.snapshot())
    for _ in range(25):
        happen(world, random)
        snapshot = world.snapshot()
        kept.renew(snapshot)
        team = random.choice(sorted(world.policies))
        profile = random.choice(sorted(world.profiles))
        kind = random.choice(("session", "job"))
        assert kept.offer(team, profile, kind, "ana") == WhatIf(snapshot).offer(team, profile, kind, "ana")
