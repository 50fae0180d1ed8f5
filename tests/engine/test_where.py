"""Placement and reclaim by pool (engine rules 4 and 5): pools in order, few nodes, no needless eviction."""

from __future__ import annotations

from dataclasses import replace

from worlds import World


def two_pools() -> World:
    world = World().pool("fast", gpus=4).pool("slow", gpus=4).team("a", reserved=4).team("b")
    return world.profile("two", 2, pools=("fast", "slow")).profile("one", 1, pools=("fast", "slow"))


def test_the_first_pool_with_room_wins_before_reclaim_in_a_better_one() -> None:
    world = two_pools().jobs("b1 b2", "b", "two")
    world.reconcile()
    plan = world.submit("a1", "a", "two").step()
    assert [s.pool for s in plan.start] == ["slow"]
    assert not plan.evict


def test_reclaim_is_tried_in_the_order_of_the_pools() -> None:
    world = two_pools().jobs("b1 b2 b3 b4", "b", "two")
    world.reconcile()
    plan = world.submit("a1", "a", "two").step()
    assert [e.id for e in plan.evict] == ["b2"], "b4 started last, but in the second pool"
    world = two_pools().team("c", reserved=4)
    world.profile("non_preemptible", 2, pools=("fast",)).profile("two", 2, pools=("fast", "slow"))
    world.session("c1", "c", "non_preemptible").session("c2", "c", "non_preemptible").step()
    world.jobs("b1 b2", "b", "two").reconcile()
    assert [e.id for e in world.submit("a1", "a", "two").step().evict] == ["b2"], "the first pool has no candidate"


def test_a_gang_gets_as_few_nodes_as_possible() -> None:
    world = World().pool("p", nodes=4, gpus=4).team("a").profile("one", 1).profile("gang", 1, workers=4)
    world.profile("large", 1, workers=7)
    for at, size in enumerate((1, 2, 3), 1):
        for one in range(size):
            world.run(f"x{at}{one}", "a", "one", f"p-{at}")
    (start,) = world.submit("g", "a", "gang").plan().start
    assert {p.node for p in start.placement} == {"p-4"}
    (start,) = world.end("g").submit("h", "a", "large").plan().start
    assert {p.node for p in start.placement} == {"p-1", "p-4"}


def test_an_unschedulable_workload_blocks_none_behind_it() -> None:
    world = World().pool("p", gpus=4).team("a", reserved=4).profile("one", 1).profile("four", 4)
    world.submit("a1", "a", "one").reconcile()
    plan = world.submit("first", "a", "four").submit("second", "a", "one").step()
    assert [s.id for s in plan.start] == ["second"]


def test_policies_in_one_inner_list_share_a_rank() -> None:
    world = World().pool("p", gpus=1).team("a").team("b").profile("one", 1, policies=[("b", "a")])
    plan = world.submit("a1", "a", "one").submit("b1", "b", "one").step()
    assert [s.id for s in plan.start] == ["a1"], "the oldest"


def test_nothing_more_is_evicted_while_enough_is_terminating() -> None:
    world = World().pool("p", gpus=8).team("a", reserved=4).team("b").profile("two", 2).profile("four", 4)
    world.jobs("b1 b2", "b", "four").reconcile()
    world.submit("a1", "a", "two").step()
    assert len(world.named("checkpointing")) == 1
    plan = world.submit("a2", "a", "two").step()
    assert not plan.evict
    assert world.reason("a2")[0] == "reclaiming", "b2 gives up four GPUs, two of them for a2"
    world.release()
    assert sorted(s.id for s in world.step().start) == ["a1", "a2"]


def test_a_pool_may_keep_its_jobs_where_they_are() -> None:
    world = World().pool("p", nodes=2, gpus=4, consolidation=False).team("a", reserved=4).team("b", reserved=4)
    world.profile("two", 2).profile("four", 4).run("a1", "a", "two", "p-1").run("a2", "a", "two", "p-2")
    plan = world.submit("b1", "b", "four").step()
    assert not plan.move
    assert world.reason("b1")[0] == "fragmented"


def test_a_better_rank_is_not_preempted_by_a_higher_priority() -> None:
    world = World().pool("p", gpus=2, profiles=("first", "second")).team("a").profile("first", 2).profile("second", 2)
    world.submit("low", "a", "first", priority=-1).reconcile()
    assert not world.submit("high", "a", "second", priority=1).step().evict, "it would come back at once"


def test_no_workload_is_preempted_for_a_job_of_another_team() -> None:
    world = World().pool("p", gpus=2).team("a").team("b").profile("two", 2)
    world.submit("low", "a", "two", priority=-1).reconcile()
    assert not world.submit("high", "b", "two", priority=1).step().evict


def test_min_runtime_protects_from_moving_too() -> None:
    world = World().pool("p", nodes=2, gpus=4).team("a", reserved=4).team("b", reserved=4)
    world.profile("two", 2, min_runtime=100).profile("four", 4)
    world.run("a1", "a", "two", "p-1").run("a2", "a", "two", "p-2").submit("b1", "b", "four")
    assert not world.step().move
    world.now += 200
    assert len(world.step().move) == 1


def test_nodes_that_boot_are_counted_and_too_large_ones_not_asked_for() -> None:
    world = World().pool("cloud", nodes=0, kind="autoscaled", max_nodes=3, node_gpus=4, node_cpu=8000)
    world.team("a").profile("four", 4, cpu=8000).profile("busy", 1, cpu=6000).profile("eight", 8)
    world.pools["cloud"] = replace(world.pools["cloud"], booting=1)
    world.jobs("j1 j2", "a", "busy").submit("j3", "a", "four").submit("j4", "a", "eight")
    (scale,) = world.step().scale
    assert (scale.nodes, scale.workloads) == (3, ("j1", "j2", "j3")), "the CPU of a node is enough for one"
    assert world.reason("j1") == ("waiting_for_node", "Waits for a node of pool cloud: 1 of 3 booting.")
    assert world.reason("j4")[0] == "over_budget"


def test_nodes_that_exist_use_up_the_budget() -> None:
    world = World().pool("cloud", nodes=2, gpus=1, kind="autoscaled", max_nodes=3, node_gpus=1).team("a")
    world.profile("one", 1).jobs("j1 j2 j3 j4", "a", "one")
    plan = world.step()
    assert [s.id for s in plan.start] == ["j1", "j2"]
    assert [(s.nodes, s.workloads) for s in plan.scale] == [(1, ("j3",))]
    assert world.reason("j4")[0] == "over_budget"


def test_a_gang_is_all_or_nothing_where_the_cpu_is_short() -> None:
    world = World().pool("p", nodes=2, gpus=2, cpu=1000).team("a", reserved=4).profile("gang", 1, workers=3, cpu=800)
    assert not world.submit("g", "a", "gang").plan().start, "four GPUs, but CPU for two workers only"
    world.nodes["p-1"] = replace(world.nodes["p-1"], cpu=1600)
    (start,) = world.plan().start
    assert len(start.placement) == 3
