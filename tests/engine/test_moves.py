"""Moves: counted once on the reservation, and only where they are enough (engine rule 5.6)."""

from __future__ import annotations

from dataclasses import replace

from makeway_quota.engine import Plan
from worlds import World


def scattered() -> World:
    """Return a world where six 3-GPU jobs of `a` run as 6, 6, 3, 3 and `b` requests 8 GPUs, so that one moves."""
    world = World().pool("p", nodes=4, gpus=10).team("a", reserved=20, weight="None").team("b", reserved=20)
    world.profile("gpu2", 2).profile("gpu3", 3).profile("gpu8", 8)
    for at, node in enumerate([1, 1, 2, 2, 3, 4]):
        world.run(f"a{at}", "a", "gpu3", f"p-{node}")
    return world.submit("b", "b", "gpu8")


def in_quota(plan: Plan) -> dict[str, bool]:
    return {start.id: start.in_quota for start in plan.start}


def test_a_job_that_moves_counts_once_on_its_reservation_in_the_same_plan() -> None:
    world = scattered().submit("more", "a", "gpu2")
    plan = world.step()
    assert len(plan.move) == 1
    assert in_quota(plan) == {"more": True}, "18 + 2 of the 20 reserved"


def test_a_job_that_moves_counts_once_on_its_reservation_until_it_has_moved() -> None:
    world = scattered()
    assert len(world.step().move) == 1
    world.submit("more", "a", "gpu2").submit("beyond", "a", "gpu2")
    plan = world.step()
    assert in_quota(plan) == {"more": True}
    assert {w.id: w.code for w in plan.pending}["beyond"] == "never_over_quota"
    plan = world.release().step()
    assert in_quota(plan)["b"]
    assert world.used("a") == 20
    assert world.reason("beyond")[0] == "never_over_quota"


def gangs(*sizes: int, **settings: bool) -> World:
    """Four nodes of 4 GPUs, on each a job of `a` of so many GPUs; `b` asks for two whole nodes."""
    world = World(**settings).pool("p", nodes=4, gpus=4).team("a", reserved=8).team("b", reserved=8)
    for size in (1, 2, 3, 4):
        world.profile(f"gpu{size}", size)
    world.profile("gang", 4, workers=2)
    for at, size in enumerate(sizes, 1):
        if size:
            world.run(f"a{at}", "a", f"gpu{size}", f"p-{at}")
    return world.submit("g", "b", "gang")


def test_jobs_move_for_a_gang_until_enough_nodes_are_free() -> None:
    world = gangs(1, 1, 2, 3)
    plan = world.step()
    assert sorted(move.id for move in plan.move) == ["a1", "a2"], "the fewest GPUs"
    assert not plan.evict
    assert {p.node for w in plan.pending for p in w.nomination} == {"p-1", "p-2"}
    assert not world.plan().acts
    world.release().reconcile()
    assert world.named() == ["a1", "a2", "a3", "a4", "g"]


def test_only_as_many_move_for_a_gang_as_have_to() -> None:
    assert [move.id for move in gangs(0, 1, 2, 1).step().move] == ["a4"], "one node is free already"
    assert not gangs(1, 1, 2, 3, consolidation=False).step().move


def test_another_node_is_cleared_for_a_gang_where_a_job_cannot_move() -> None:
    world = gangs(0, 1, 2, 0)
    world.run("a4", "a", "gpu3", "p-4").profile("odd", 2, models=("X",))
    world.nodes["p-2"] = replace(world.nodes["p-2"], model="X")
    world.end("a2").run("a2", "a", "odd", "p-2")
    world.end("a3").run("a3", "a", "gpu1", "p-3").run("a5", "a", "gpu2", "p-3")
    assert sorted(move.id for move in world.step().move) == ["a3", "a5"], "a2 may run on p-2 only"


def test_sessions_and_young_jobs_do_not_move_for_a_gang() -> None:
    world = gangs(1, 1, 2, 3).profile("gpu1", 1, min_runtime=600)
    assert [e.id for e in world.step().evict] == []
    world = gangs(1, 1, 2, 3)
    for name in ("a1", "a2", "a3", "a4"):
        world.change(name, kind="session")
    assert not world.step().move


def test_what_starts_in_the_same_plan_starts_elsewhere_rather_than_moving_later() -> None:
    world = World().pool("p", nodes=2, gpus=4, strategy="spread").team("a", reserved=8)
    world.profile("one", 1).profile("four", 4).jobs("j1 j2", "a", "one").submit("large", "a", "four")
    plan = world.step()
    assert {s.id: [p.node for p in s.placement] for s in plan.start} == {"j1": ["p-1"], "j2": ["p-1"], "large": ["p-2"]}
    assert not plan.move
    assert not world.plan().acts


def test_what_starts_in_the_same_plan_makes_room_beside_jobs_that_move() -> None:
    world = World().pool("p", nodes=2, gpus=4, strategy="spread").team("a", reserved=8)
    world.profile("one", 1).profile("four", 4).run("j0", "a", "one", "p-1").run("j1", "a", "one", "p-2")
    plan = world.submit("j2", "a", "one").submit("large", "a", "four").step()
    assert len(plan.move) == 1
    (start,) = plan.start
    assert start.placement[0].node == plan.move[0].to[0].node
    world.release()
    assert {s.id for s in world.step().start} == {"large", plan.move[0].id}


def test_a_node_that_turns_out_to_be_spare_is_left_alone() -> None:
    """Room for a worker costs less on p-1, but p-2 has to be cleared too, and then it is enough."""
    world = World().pool("p", nodes=3, gpus=4).team("a", reserved=8).team("b", reserved=8)
    for at, (cpu, model) in enumerate([(8000, "X"), (16_000, "X"), (64_000, "Y")], 1):
        world.nodes[f"p-{at}"] = replace(world.nodes[f"p-{at}"], cpu=cpu, model=model)
    world.profile("small", 1, cpu=8000).profile("large", 3, cpu=16_000)
    world.profile("gang", 1, workers=4, cpu=4000, models=("X",))
    world.run("a1", "a", "small", "p-1").run("a2", "a", "large", "p-2").submit("g", "b", "gang")
    assert [move.id for move in world.step().move] == ["a2"]
