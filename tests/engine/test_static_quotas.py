"""Whether a plan uses static quotas of others while a victim stays is known with few questions, and exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

import pytest
from engine.engines import differences
from engine.mixed_worlds import contended_world, in_two_pools, keep_more_back
from engine.pooled_worlds import pooled_world
from engine.tight_worlds import tight_world
from makeway_quota.engine import reference, schedule
from makeway_quota.engine.cycle import sparing
from makeway_quota.engine.index.nodes import Allocation
from makeway_quota.engine.placement import static_quotas
from makeway_quota.engine.placement.fit import static_quota
from makeway_quota.engine.placement.static_quotas import StaticQuotas
from worlds import World

KINDS: dict[str, Callable[[Random], World]] = {
    "pooled": pooled_world,
    "in two pools": lambda random: in_two_pools(contended_world(random), random),
    "tight": tight_world,
}
WORLDS = 12
"""Worlds of each kind"""


def world_with_static_quotas(kind: str, seed: int) -> World:
    return keep_more_back(KINDS[kind](Random(seed)), Random(seed + 1))


class Asked:
    """Each answer beside that of asking anew about all that the plan starts and nominates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[str] = Counter()
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
    for kind in KINDS:
        for seed in range(WORLDS):
            snapshot = world_with_static_quotas(kind, seed).snapshot()
            differing = differences(schedule(snapshot), reference.schedule(snapshot))
            assert not differing, f"fast and reference differ in world {seed} ({kind}): {differing}"
    assert min(asked.seen[kind] for kind in ("used", "not used", "several")) > 0, asked.seen


@pytest.mark.covers("F06", "F14")
def test_a_static_quota_is_asked_about_once_for_each_victim_not_for_each_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any victim too few GPUs would be free for `s`, beside the jobs of ten teams."""
    world = World(consolidation=False).pool("p", nodes=6, gpus=8).team("s", reserved=8, lend=0).team("b")
    world.profile("one", 1)
    for at in range(48):
        world.run(f"b{at:02}", "b", "one", f"p-{at // 8 + 1}")
    for at in range(10):
        world.team(f"a{at}", reserved=2).submit(f"new{at}", f"a{at}", "one")
    questions = tries = 0
    exceeds = sparing._exceeds

    def counted(*values: object) -> object:
        nonlocal questions
        questions += 1
        return static_quota(*values)  # type: ignore[arg-type]

    def tried(*values: object) -> bool:
        nonlocal tries
        tries += 1
        return exceeds(*values)  # type: ignore[arg-type]

    monkeypatch.setattr(static_quotas, "static_quota", counted)
    monkeypatch.setattr(sparing, "_exceeds", tried)
    plan = schedule(world.snapshot())
    assert len(plan.evict) == 18
    assert tries >= 18
    assert 0 < questions <= tries
