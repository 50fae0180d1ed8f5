"""The golden scenarios of the engine, G1 to G13."""

from __future__ import annotations

import pytest
from worlds import World


def greedy() -> World:
    return (
        World()
        .pool("h100", nodes=1, gpus=10)
        .team("rnd", reserved=5, limit=9, title="R&D")
        .team("devops", reserved=5, limit=9, title="DevOps")
        .profile("gpu3", 3)
        .profile("gpu2", 2)
    )


@pytest.mark.covers("F13", "F15", "F16", "F17", "F19", "F20", "F21", "F35")
def test_g1_greedy() -> None:
    world = greedy().jobs("r1 r2 r3 r4 r5", "rnd", "gpu3")
    plan = world.step()
    assert [s.id for s in plan.start] == ["r1", "r2", "r3"]
    assert world.used() == 9
    assert [(w.id, w.code) for w in plan.pending] == [("r4", "limit"), ("r5", "limit")]
    assert world.say(plan.pending[0]) == "R&D uses 9 of its limit of 9 GPUs; this job needs 3."

    world.submit("d1", "devops", "gpu3")
    plan = world.step()
    assert [(e.id, e.preemptor) for e in plan.evict] == [("r3", "d1")]
    assert not plan.start
    assert "R&D uses 9 GPUs, 4 more than its 5 reserved" in world.say(plan.evict[0])
    assert [w.code for w in plan.pending if w.id == "d1"] == ["reclaiming"]
    assert not world.plan().acts
    world.release().reconcile()
    assert world.named() == ["d1", "r1", "r2"]
    assert (world.used("rnd"), world.used("devops"), world.used()) == (6, 3, 9)
    assert world.workloads["r3"].attempt == 2

    world.submit("d2", "devops", "gpu2")
    plan = world.step()
    assert [e.id for e in plan.evict] == ["r2"]
    world.release().reconcile()
    assert (world.used("rnd"), world.used("devops"), world.used()) == (3, 5, 8)
    assert world.named("pending") == ["r2", "r3", "r4", "r5"]
    assert not world.plan().acts


@pytest.mark.covers("F06", "F07", "F22")
def test_g2_two_pools() -> None:
    world = World().pool("h100").pool("metal")
    world.team("dev", reserved=8, limit=16).team("research", reserved=8, limit=16)
    world.profile("gpu4", 4, policies=["dev", "research"], pools=("metal", "h100"))
    world.jobs("d1 d2 d3 d4", "dev", "gpu4").jobs("s1 s2 s3 s4", "research", "gpu4")
    plan = world.step()
    where = {s.id: s.pool for s in plan.start}
    assert where == {"d1": "metal", "d2": "metal", "s1": "h100", "s2": "h100"}
    assert len(plan.pending) == 4
    assert not world.plan().acts


@pytest.mark.covers("F39", "F43", "F46")
def test_g3_fair_share_back() -> None:
    world = World().pool("p", nodes=4, gpus=10).team("a", reserved=20).team("b", reserved=20).profile("gpu2", 2)
    world.jobs(" ".join(f"a{i:02}" for i in range(15)), "a", "gpu2").reconcile()
    assert world.used("a") == 30
    world.jobs(" ".join(f"b{i:02}" for i in range(10)), "b", "gpu2")
    plan = world.step()
    assert sorted(e.id for e in plan.evict) == ["a10", "a11", "a12", "a13", "a14"]
    world.release().reconcile()
    assert (world.used("a"), world.used("b")) == (20, 20)
    assert world.named("running", "a") == [f"a{i:02}" for i in range(10)]


@pytest.mark.covers("F41", "F42", "F46")
def test_g4_fragmentation() -> None:
    world = World().pool("p", nodes=4, gpus=10).team("a", reserved=20).team("b", reserved=20)
    world.profile("gpu3", 3).profile("gpu8", 8)
    for at in range(6):
        world.submit(f"a{at}", "a", "gpu3").step()
    assert [world.used(node=f"p-{i}") for i in range(1, 5)] == [9, 9, 0, 0]
    plan = world.submit("b", "b", "gpu8").step()
    assert [s.id for s in plan.start] == ["b"]
    assert not plan.evict
    assert not plan.move


@pytest.mark.covers("F41")
def test_g5_scattered() -> None:
    world = World().pool("p", nodes=4, gpus=10).team("a", reserved=20).team("b", reserved=20)
    world.profile("gpu3", 3).profile("gpu8", 8)
    for at, node in enumerate([1, 1, 2, 2, 3, 4]):
        world.run(f"a{at}", "a", "gpu3", f"p-{node}")
    plan = world.submit("b", "b", "gpu8").step()
    assert len(plan.move) == 1
    assert not plan.evict
    assert not world.plan().acts
    moved = plan.move[0].id
    world.release(moved)
    plan = world.step()
    assert sorted(s.id for s in plan.start) == sorted(["b", moved])
    assert len(world.named()) == 7
    assert not world.plan().acts


@pytest.mark.covers("F14", "F28", "F34", "F37", "F43")
def test_g6_idle_is_lent() -> None:
    world = World().pool("p", nodes=4, gpus=10).team("a", reserved=20).team("b", reserved=20).profile("gpu5", 5)
    world.jobs("a1 a2 a3 a4 a5 a6 a7 a8", "a", "gpu5")
    plan = world.step()
    assert world.used("a") == 40
    assert [s.in_quota for s in plan.start] == [True] * 4 + [False] * 4
    world.jobs("b1 b2", "b", "gpu5")
    plan = world.step()
    assert [e.id for e in plan.evict] == ["a8", "a7"]
    world.release().reconcile()
    assert (world.used("a"), world.used("b")) == (30, 10)
    world.end("b1", "b2").reconcile()
    assert world.used("a") == 40
    assert world.workloads["a8"].attempt == 2


@pytest.mark.covers("F09", "F25", "F26")
def test_g7_build() -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a", reserved=2).team("b", reserved=2).profile("one", 1)
    world.jobs("a1 a2 a3 a4 a5 a6 a7 a8", "a", "one").reconcile()
    plan = world.session("s1", "b", "one", owner="bo").step()
    assert [e.id for e in plan.evict] == ["a8"]
    world.release().step()
    world.session("s2", "b", "one", owner="alice").reconcile()
    plan = world.session("s3", "b", "one", owner="carol").step()
    assert world.say(plan.refused[0]) == "2 of your 2 guaranteed GPUs are in use: alice 1, bo 1."
    assert not plan.evict
    assert {"s1", "s2"} <= set(world.named())


@pytest.mark.covers("F32")
def test_g8_static_quota() -> None:
    world = World().pool("p", gpus=4).team("a", reserved=1, lend=0).team("b", reserved=3).profile("one", 1)
    plan = world.jobs("b1 b2 b3 b4 b5", "b", "one").step()
    assert world.used() == 3
    assert [(w.id, w.code) for w in plan.pending] == [("b4", "static_quota"), ("b5", "static_quota")]
    assert (
        world.say(plan.pending[0]) == "1 GPU of pool p is kept free for a, which lends none of them; this job needs 1."
    )
    plan = world.session("s", "a", "one").step()
    assert [s.id for s in plan.start] == ["s"]


@pytest.mark.covers("F26")
def test_g9_own_team() -> None:
    world = World().pool("p", gpus=8).team("a", reserved=4).team("b", reserved=4).profile("one", 1)
    world.jobs("a1 a2 a3 a4", "a", "one").jobs("b1 b2 b3 b4", "b", "one").reconcile()
    plan = world.session("s", "a", "one").step()
    assert [e.id for e in plan.evict] == ["a4"]
    world.release().reconcile()
    assert "s" in world.named()


@pytest.mark.covers("F05")
@pytest.mark.parametrize("ranks", [("gpu8", "gpu4"), ("gpu4", "gpu8")])
def test_g12_rank_in_pool(ranks: tuple[str, str]) -> None:
    world = World().pool("p", gpus=8, profiles=ranks).team("a", reserved=8).team("b", reserved=8)
    world.profile("gpu8", 8).profile("gpu4", 4)
    plan = world.submit("four", "a", "gpu4").submit("eight", "b", "gpu8").step()
    assert [s.id for s in plan.start] == ["eight" if ranks[0] == "gpu8" else "four"]
    assert [(w.id, w.code) for w in plan.pending] == [("four" if ranks[0] == "gpu8" else "eight", "outranked")]


@pytest.mark.covers("F10", "F26")
def test_g13_own_limit() -> None:
    world = World().pool("p", gpus=10).team("a", reserved=5, limit=9).team("b", reserved=5).profile("one", 1)
    world.jobs("a1 a2 a3 a4 a5 a6 a7 a8 a9", "a", "one").reconcile()
    assert world.used("a") == 9
    plan = world.session("s", "a", "one").step()
    assert [e.id for e in plan.evict] == ["a9"]
    assert world.used("a") <= 9
    world.release().reconcile()
    assert "s" in world.named()
    assert world.used("a") == 9


@pytest.mark.covers("F42", "F17")
def test_g10_gang() -> None:
    world = World().pool("p", nodes=4, gpus=8).team("a", reserved=16).team("b", reserved=16)
    world.profile("gpu8", 8).profile("gpu4", 4).profile("gang", 8, workers=2)
    world.jobs("b1 b2 b3", "b", "gpu8").reconcile()
    plan = world.submit("g1", "b", "gang").step()
    assert not plan.start, "one whole node is free: all or nothing"
    plan = world.submit("g2", "a", "gang").step()
    assert [e.id for e in plan.evict] == ["b3"], "one node is free, so one node's worth has to leave"
    world.release().reconcile()
    assert {p.node for p in world.workloads["g2"].placement} == {"p-3", "p-4"}
    assert len(world.workloads["g2"].placement) == 2
    assert not world.plan().acts


@pytest.mark.covers("F17", "F42")
def test_g10_gang_takes_the_cheapest_nodes() -> None:
    world = World(consolidation=False).pool("p", nodes=4, gpus=8).team("a", reserved=16).team("b", reserved=4)
    world.profile("gpu8", 8).profile("gpu2", 2).profile("gang", 8, workers=2)
    world.run("w1", "b", "gpu8", "p-1").run("w2", "b", "gpu2", "p-2").run("w3", "b", "gpu8", "p-3")
    world.run("w4", "b", "gpu2", "p-4").submit("g", "a", "gang")
    plan = world.step()
    assert sorted(e.id for e in plan.evict) == ["w2", "w4"]


def cloud() -> World:
    world = World().pool("local", gpus=8).pool("cloud", nodes=0, kind="autoscaled", max_nodes=2, node_gpus=8)
    return world.team("a", reserved=0).profile("gpu4", 4, pools=("local", "cloud"))


@pytest.mark.covers("F02", "F06", "F49", "F54", "F72")
def test_g11_cloud_last() -> None:
    world = cloud().jobs("j1 j2", "a", "gpu4")
    plan = world.step()
    assert [s.pool for s in plan.start] == ["local", "local"]
    assert not plan.scale
    plan = world.submit("j3", "a", "gpu4").step()
    assert [(s.pool, s.nodes, s.workloads) for s in plan.scale] == [("cloud", 1, ("j3",))]
    assert world.reason("j3") == ("waiting_for_node", "Waits for a node of pool cloud: 0 of 1 booting.")
    plan = world.end("j1").step()
    assert [(s.id, s.pool) for s in plan.start] == [("j3", "local")]
    assert not plan.scale


@pytest.mark.covers("F50", "F72")
def test_g11_stays_within_the_budget() -> None:
    world = cloud().jobs("j1 j2 j3 j4 j5 j6 j7", "a", "gpu4")
    plan = world.step()
    assert [(s.pool, s.nodes) for s in plan.scale] == [("cloud", 2)]
    codes = {w.id: w.code for w in plan.pending}
    assert codes == dict.fromkeys(["j3", "j4", "j5", "j6"], "waiting_for_node") | {"j7": "over_budget"}


def test_g10_elastic_gang_starts_with_what_there_is() -> None:
    world = World().pool("p", nodes=3, gpus=8).team("a").team("b", reserved=8)
    world.profile("gang", 8, workers=4, min_workers=2).profile("gpu8", 8)
    plan = world.submit("g", "a", "gang").step()
    assert [p.node for p in plan.start[0].placement] == ["p-1", "p-2", "p-3"]
    assert world.say(plan.start[0]).endswith("It starts with 3 of 4 workers.")
    assert not world.plan().acts
    plan = world.submit("b", "b", "gpu8").step()
    assert [(m.id, m.rule, [p.node for p in m.to]) for m in plan.move] == [("g", "shrink", ["p-1", "p-2"])]
    assert not plan.evict
