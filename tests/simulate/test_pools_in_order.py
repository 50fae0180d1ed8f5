"""A recorded trace on two pools, fast machines before slow ones: who gets which, and that none is idle meanwhile."""

from __future__ import annotations

import pytest
from makeway_quota import policy
from makeway_quota.engine import GPU, Plan, Snapshot, reference, schedule
from makeway_quota.simulate import planner
from makeway_quota.simulate.cluster import SimulatedCluster, of_document
from makeway_quota.simulate.planner import FullPlanner
from makeway_quota.simulate.replay import replay
from makeway_quota.simulate.trace import Arrival

HOUR = 3600.0
ENGINES = {"fast": schedule, "reference": reference.schedule}
POLICY = """\
version: 1
pools: [{name: metal, size: 8}, {name: cloud, size: 8}]
profiles:
  - {name: train, gpus: 4, pools: [POOLS], policies: [RANKS]}
policies:
  - {name: product, groups: [product], quotas: [{pools: [metal, cloud], reserved: 8, limit: 16}]}
  - {name: research, groups: [research], quotas: [{pools: [metal, cloud], reserved: 8, limit: 16}]}
"""
TRACE = [
    *(Arrival(f"research-{n}", "research", 4 * GPU, 10.0 * n, 3 * HOUR, profile="train") for n in range(4)),
    *(Arrival(f"product-{n}", "product", 4 * GPU, 60.0, 2 * HOUR, profile="train") for n in range(2)),
]
"""Work of research comes first and takes everything; that of product, which ranks before it, a moment later"""


def cluster(pools: str, ranks: str) -> SimulatedCluster:
    document = policy.read_policy(POLICY.replace("POOLS", pools).replace("RANKS", ranks), "policy.yaml")
    return of_document("two pools", document, TRACE, node_gpus=4, gpus=16)


def starts(
    monkeypatch: pytest.MonkeyPatch, engine: str, world: SimulatedCluster, trace: list[Arrival]
) -> dict[str, list[str]]:
    """Replay a trace; return the pools in which each job started, one after the other."""
    result: dict[str, list[str]] = {}

    def recorded(snapshot: Snapshot) -> Plan:
        plan: Plan = ENGINES[engine](snapshot)
        for start in plan.start:
            result.setdefault(start.id, []).append(start.pool)
        return plan

    monkeypatch.setattr(planner, "schedule", recorded)
    outcome = replay(world, trace, FullPlanner(world))
    assert sorted(done.id for done in outcome.meter.finished) == sorted(one.id for one in trace)
    return result


@pytest.mark.covers("F22")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pools", ["metal, cloud", "cloud, metal"])
@pytest.mark.parametrize("ranks", ["product, research", "research, product"])
def test_the_highest_priority_gets_the_first_pool_and_the_rest_is_spread_over_the_other(
    monkeypatch: pytest.MonkeyPatch, engine: str, pools: str, ranks: str
) -> None:
    """All are submitted at once, the lowest rank first: the order of ranks and of the profile's pools decides."""
    trace = [Arrival(f"{team}-{n}", team, 4 * GPU, 0, HOUR, profile="train") for n in range(2) for team in TEAMS]
    first, last = pools.split(", ")
    high, low = ranks.split(", ")
    assert starts(monkeypatch, engine, cluster(pools, ranks), trace) == {
        f"{high}-0": [first], f"{high}-1": [first], f"{low}-0": [last], f"{low}-1": [last],
    }  # fmt: skip


TEAMS = ("research", "product")


@pytest.mark.covers("F22")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_replayed_day_leaves_no_pool_idle_and_each_team_its_share(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    world = cluster("metal, cloud", "product, research")
    began = starts(monkeypatch, engine, world, TRACE)
    assert sorted(pool for pool, *_ in (began[f"research-{n}"] for n in range(4))) == [
        "cloud", "cloud", "metal", "metal",
    ]  # fmt: skip
    assert {began["research-0"][0], began["research-1"][0]} == {"metal"}, "fast machines are taken first"
    outcome = replay(world, TRACE, FullPlanner(world))
    delays = {done.id: round(done.started - done.submit) for done in outcome.meter.finished}
    assert delays["product-0"] == delays["product-1"] == 30, "the grace of what borrowed its GPUs"
