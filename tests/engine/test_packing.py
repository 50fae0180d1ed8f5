"""The packing score of a placement, compared with values computed by hand."""

from __future__ import annotations

import random

import pytest
from makeway_quota.engine import GPU, Node, Pool, Profile, Snapshot, TeamQuota, Workload
from makeway_quota.engine.index.capacity import NodeCapacity
from makeway_quota.engine.index.cluster import Cluster
from makeway_quota.engine.placement.fit import find_placement
from makeway_quota.engine.placement.packing import Packing
from makeway_quota.engine.request import Shape

FREE = 1 << 60
ONE, EIGHT = Shape(GPU), Shape(8 * GPU)


def room(*left: int, cpu: int = FREE, memory: int = FREE, model: str = "") -> NodeCapacity:
    return NodeCapacity(left, cpu, memory, model)


def whole(count: int, of: int = 8) -> NodeCapacity:
    return room(*([GPU] * count + [0] * (of - count)))


def incremental(mix: dict[Shape, int], *rooms: NodeCapacity) -> Packing:
    """Build a packing of nodes that were empty once and are as given now."""
    empty = [NodeCapacity([GPU] * len(r.devices), FREE if r.cpu == FREE else 96_000, FREE, r.model) for r in rooms]
    packing = Packing(empty, mix)
    for at, item in enumerate(rooms):
        packing.see(at, item)
    return packing


@pytest.mark.covers("F39")
def test_a_block_that_is_broken_already_is_used_first() -> None:
    packing = incremental({ONE: 1, EIGHT: 1}, whole(8), whole(3), whole(8))
    assert packing.best(ONE) == (1, 0)
    assert packing.best(EIGHT) == (0, 0)


def test_the_fullest_node_wins_among_equals_and_then_the_first() -> None:
    packing = incremental({ONE: 1}, whole(5), whole(2), whole(4), whole(2))
    assert packing.best(ONE) == (1, 0)


def test_a_share_goes_to_the_device_that_no_whole_job_could_use() -> None:
    half = Shape(500)
    packing = incremental({ONE: 1, half: 1}, room(GPU, GPU), room(GPU, 600))
    assert packing.best(half) == (1, 1)


def test_a_request_that_no_node_holds_has_no_best_node() -> None:
    packing = incremental({ONE: 1}, whole(3), whole(2))
    assert packing.best(Shape(4 * GPU)) is None
    assert packing.best(Shape(GPU, cpu=FREE * 2)) is None
    assert Packing([], {}).best(ONE) is None


def test_a_node_that_takes_nothing_is_left_alone() -> None:
    packing = incremental({ONE: 1}, whole(8))
    packing.see(0, room(*[GPU] * 8, cpu=-1))
    assert packing.best(ONE) is None


def test_cpu_that_runs_out_counts_as_lost_gpus() -> None:
    """Five cores less cost the first node half of one more job of the mix, and the second nothing."""
    job = Shape(GPU, cpu=10_000)
    packing = incremental({job: 1}, room(GPU, GPU, cpu=20_000), room(GPU, GPU, cpu=60_000))
    assert packing.best(Shape(0, cpu=5_000)) == (1, 0)
    packing = incremental({job: 1}, room(GPU, GPU, cpu=20_000), room(GPU, GPU, cpu=5_000))
    assert packing.best(Shape(0, cpu=5_000)) == (1, 0), "GPUs without CPU for them are useless anyway"


def test_work_that_may_run_anywhere_keeps_off_rare_models() -> None:
    rare = Shape(GPU, models=("rare",))
    rooms = [room(GPU, GPU, model="rare"), *[room(GPU, GPU, model="plenty")] * 4]
    packing = incremental({ONE: 10, rare: 1}, *rooms)
    assert packing.best(ONE) == (1, 0)
    assert packing.best(rare) == (0, 0)


def test_only_what_changed_is_scored_again_and_the_answer_is_the_same() -> None:
    chance = random.Random(7)
    shapes = [Shape(g * GPU, cpu=c * 1000) for g in (1, 2, 4) for c in (4, 12)] + [Shape(250, 2000), Shape(600, 1000)]
    mix = {shape: chance.randint(1, 9) for shape in shapes}
    rooms = [room(*[GPU] * 8, cpu=96_000) for _ in range(12)]
    lasting = incremental(mix, *rooms)
    for _ in range(300):
        at = chance.randrange(12)
        rooms[at] = room(*[chance.choice([0, 250, 400, GPU]) for _ in range(8)], cpu=chance.randrange(97) * 1000)
        lasting.see(at, rooms[at])
        ask = chance.choice(shapes)
        assert lasting.best(ask) == incremental(mix, *rooms).best(ask)


def test_a_long_list_of_changes_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("makeway_quota.engine.placement.packing._MAX_CHANGES", 3)
    monkeypatch.setattr("makeway_quota.engine.placement.packing._MAX_REQUESTS", 1)
    packing = incremental({ONE: 1, EIGHT: 1}, whole(8), whole(8))
    for remaining in (7, 6, 5, 4):
        packing.see(1, whole(remaining))
        assert packing.best(ONE) == (1, 0)
    assert packing.changed == []
    assert packing.best(EIGHT) == (0, 0)


def test_ties_may_be_given_an_order() -> None:
    packing = incremental({ONE: 1}, whole(8), whole(8), whole(8))
    packing.prefer([2, 0, 1])
    assert packing.best(ONE) == (1, 0)


def test_the_engine_places_by_it_within_cpu_and_model() -> None:
    profiles = (
        Profile("plain", GPU, cpu=8000, pools=("p",)),
        Profile("picky", GPU, cpu=8000, pools=("p",), models=("b",)),
        Profile("eight", 8 * GPU, pools=("p",)),
    )
    nodes = (
        Node("a1", "p", 8, 32_000, model="a"),
        Node("a2", "p", 8, 32_000, model="a"),
        Node("b1", "p", 8, model="b"),
    )
    cluster = Cluster(Snapshot(0.0, pools=(Pool("p"),), nodes=nodes, profiles=profiles, policies=(TeamQuota("t"),)))
    pool, went = cluster.pools["p"], []
    for at, name in enumerate(["picky", "plain", "plain", "plain", "plain", "plain", "eight"]):
        workload = Workload(f"w{at}", "t", name)
        parts = find_placement(pool, cluster.need(workload))
        cluster.start(workload, cluster.need(workload), parts)
        went.append(parts[0].node.node.name)
    assert went == ["b1", "b1", "b1", "b1", "b1", "b1", "a1"], "blocks of eight stay whole"
    assert [part.node.node.name for part in find_placement(pool, cluster.need(Workload("w", "t", "eight")))] == ["a2"]
