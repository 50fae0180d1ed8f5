"""Whether a plan uses static quotas of others while a victim stays is known with few questions, and exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from engine.engines import differences
from makeway_quota.engine import QuotaLine, TeamQuota, reference, schedule
from makeway_quota.engine.cycle import sparing
from makeway_quota.engine.index.cluster import Cluster
from makeway_quota.engine.index.ledger import Account
from makeway_quota.engine.index.nodes import Allocation
from makeway_quota.engine.placement.fit import static_quota
from makeway_quota.engine.placement.static_quotas import StaticQuotas
from makeway_quota.engine.snapshot import Workload
from worlds import World

LINES: tuple[tuple[tuple[str, ...], ...], ...] = ((("p",),), (("q",),), ((),), (("p",), ("q",)), (("p",), ()))
"""The pools of each static quota of a team"""
PLACES = (("p",), ("q",), ("p", "q"), ("q", "p"))


def world_with_static_quotas(random: Random) -> World:
    """Return two pools full of borrowed GPUs, in which several teams reclaim their own beside static quotas."""
    world = World(consolidation=random.random() < 0.3)
    for pool in "pq":
        world.pool(pool, nodes=random.randint(1, 3), gpus=4)
    for name in "st":
        lines = [QuotaLine(pools, random.randint(1, 4) * 1000, lend=0) for pools in random.choice(LINES)]
        world.policies[name] = TeamQuota(name, tuple(lines))
    for name in "bc":
        world.team(name, reserved=random.choice([0, 0, 1]))
    for at in range(4):
        world.team(f"a{at}", reserved=random.randint(1, 4), parent=random.choice([None, None, "s", "t"]))
    for size in (1, 2, 3):
        world.profile(f"g{size}", size, pools=random.choice(PLACES))
    world.profile("gang", 1, workers=random.randint(2, 4), pools=random.choice(PLACES))
    world.profile("elastic", 1, workers=3, min_workers=1, pools=random.choice(PLACES))
    for node in world.nodes:
        free = 4
        while free and random.random() < 0.9:
            size = random.randint(1, min(3, free))
            free -= size
            world.run(f"w{len(world.workloads):02}", random.choice("bbbbccst"), f"g{size}", node)
    for at in range(random.randint(2, 7)):
        team, profile = random.choice(["a0", "a1", "a2", "a3", "s", "t"]), random.choice(list(world.profiles))
        world.submit(f"new{at}", team, profile, kind=random.choice(["job", "job", "session"]))
    return world


class Asked:
    """Each answer beside that of asking anew about all that the plan starts and nominates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[str] = Counter()
        self.started: Iterable[str] = ()
        read, are_used = StaticQuotas.read, StaticQuotas.are_used

        def noted(quotas: StaticQuotas, started: Iterable[str]) -> None:
            self.started = started
            read(quotas, started)

        def compared(quotas: StaticQuotas, victim: Allocation, placed: Iterable[str]) -> bool:
            cluster = quotas._cluster
            starts = [cluster.allocations[name] for name in self.started if name in cluster.allocations]
            planned = [one for one in (*starts, *cluster.nominations.values()) if one.milli_gpus]
            uses = {(cluster.account(one.workload), one.pool) for one in planned}
            expected = any(static_quota(cluster, *use, 0, True) is not None for use in uses)
            assert are_used(quotas, victim, placed) == expected
            self.seen["used" if expected else "not used"] += 1
            self.seen["several"] += len(uses) > 1
            return expected

        monkeypatch.setattr(StaticQuotas, "read", noted)
        monkeypatch.setattr(StaticQuotas, "are_used", compared)


@pytest.mark.covers("F06", "F14")
def test_static_quotas_are_used_as_if_everything_was_asked_about_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    for seed in range(100):
        snapshot = world_with_static_quotas(Random(seed)).snapshot()
        plan = schedule(snapshot)
        if seed % 4 == 0:
            differing = differences(plan, reference.schedule(snapshot))
            assert not differing, f"fast and reference differ in world {seed}: {differing}"
    assert min(asked.seen[kind] for kind in ("used", "not used", "several")) >= 10, asked.seen


@pytest.mark.covers("F06", "F14")
def test_what_a_plan_starts_and_nominates_is_not_read_again_for_each_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs stay free for `s`, beside the jobs of ten teams: none of the victims can stay."""
    world = World(consolidation=False).pool("p", nodes=6, gpus=8).team("s", reserved=8, lend=0).team("b")
    for at in range(10):
        world.team(f"a{at}", reserved=2)
    world.profile("one", 1)
    for at in range(48):
        world.run(f"b{at:02}", "b", "one", f"p-{at // 8 + 1}")
    for at in range(10):
        world.submit(f"new{at}", f"a{at}", "one")
    tries, accounts = 0, Counter[bool]()
    within = False
    exceeds, account = sparing._exceeds, Cluster.account

    def tried(*values: Any) -> bool:
        nonlocal within, tries
        within, tries = True, tries + 1
        result = exceeds(*values)
        within = False
        return result

    def counted(cluster: Cluster, workload: Workload) -> Account:
        accounts[within] += 1
        return account(cluster, workload)

    monkeypatch.setattr(sparing, "_exceeds", tried)
    monkeypatch.setattr(Cluster, "account", counted)
    plan = schedule(world.snapshot())
    assert len(plan.evict) == 18
    assert tries >= 8
    assert accounts[True] <= 4 * tries, "the victim's, and those of nominations with another place"
