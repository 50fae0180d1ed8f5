"""The strategy `fill`: the fullest machine with room, so that others empty; and where it is the default."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.engines import ENGINES
from makeway_quota.policy import read_policy, write_policy
from makeway_quota.snapshot_file import read_snapshot, write_snapshot
from worlds import World

POOL = """
version: 1
pools:
  - {name: p, kind: KIND}
profiles: [{name: one, gpus: 1}]
policies: [{name: a, users: [mia]}]
"""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("strategy", "node"), [("fill", "p-2"), ("pack", "p-1"), ("spread", "p-3")])
def test_work_goes_to_the_fullest_machine_even_if_free_gpus_are_less_useful_then(
    engine: str, strategy: str, node: str
) -> None:
    """Three free GPUs on the first, two on the second, four on the third, and work of one or two GPUs."""
    world = World().pool("p", nodes=3, gpus=4, strategy=strategy).team("a", 12).profile("one", 1).profile("two", 2)
    world.engine = ENGINES[engine]
    world.run("r1", "a", "one", "p-1").run("r2", "a", "two", "p-2").submit("job", "a", "one")
    (start,) = world.plan().start
    assert start.placement[0].node == node


@pytest.mark.parametrize("engine", ENGINES)
def test_a_share_goes_to_a_device_that_is_shared_and_else_to_the_fullest_machine(engine: str) -> None:
    world = World().pool("p", nodes=2, gpus=2, strategy="fill").team("a", 4).profile("one", 1).profile("part", 0.4)
    world.engine = ENGINES[engine]
    world.run("r1", "a", "one", "p-2").jobs("j1 j2 j3", "a", "part")
    places = [(start.placement[0].node, start.placement[0].devices) for start in world.plan().start]
    assert places == [("p-2", (1,)), ("p-2", (1,)), ("p-1", (0,))]


@pytest.mark.covers("F72")
def test_pools_that_grow_fill_their_machines_unless_the_document_says_otherwise() -> None:
    def strategy(text: str) -> str:
        document = read_policy(text)
        assert read_policy(write_policy(document)).pools == document.pools, "it is written so that it is read alike"
        return document.pools[0].strategy

    assert strategy(POOL.replace("KIND", "static")) == "pack"
    assert strategy(POOL.replace("KIND", "autoscaled")) == "fill"
    assert strategy(POOL.replace("KIND", "autoscaled, strategy: pack")) == "pack"
    assert strategy(POOL.replace("KIND", "static, strategy: fill")) == "fill"


def test_a_pool_of_a_snapshot_file_without_a_strategy_packs_as_in_files_of_earlier_releases() -> None:
    text = "version: 1\nnow: 2026-01-01T12:00:00Z\npools: [{name: p, kind: autoscaled}]\n"
    [pool] = read_snapshot(text).pools
    assert pool.strategy == "pack"
    filled = replace(read_snapshot(text), pools=(replace(pool, strategy="fill"),))
    assert "strategy: fill" in write_snapshot(filled)
    assert read_snapshot(write_snapshot(filled)) == filled
