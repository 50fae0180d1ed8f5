"""Sets of victims that count on different lines are put in a legal order, with few questions for many victims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
from engine.mixed_worlds import contended_world, with_relabelled_nodes
from engine.pooled_worlds import pooled_world
from makeway_quota.engine import QuotaLine
from makeway_quota.engine.index.cluster import Cluster
from makeway_quota.engine.index.nodes import Allocation
from makeway_quota.engine.rules.victims import sets
from makeway_quota.engine.rules.victims.preemptor import Preemptor, Rights
from makeway_quota.engine.rules.victims.sets import SHRINK, WITHDRAW, Victim, Victims
from worlds import World

RIGHTS: tuple[Rights, ...] = (
    ("reservation",),
    ("fair_share",),
    ("reservation", "own_team"),
    ("reservation", "own_team_any_priority"),
    ("own_team", "fair_share"),
)


def plainly(preemptor: Preemptor, victims: Victims) -> Victims | None:
    """Return what `in_legal_order` does: smallest first, else from the end on, with each unit asked about each time."""
    items = sorted(item for victim in victims for item in sets.items_of(preemptor, victim))
    if all(may_follow(preemptor, item, items[:at]) for at, item in enumerate(items)):
        return sets._by_last(items)
    rest, ordered = list(items), list[sets._Item]()
    while rest:
        for item in reversed(rest):
            others = [other for other in rest if other is not item]
            early = any(o.evicted > item.evicted or (o.block and o.victim is item.victim) for o in others)
            if not early and may_follow(preemptor, item, others):
                rest, ordered = others, [item, *ordered]
                break
        else:
            return None
    return sets._by_last(ordered)


def may_follow(preemptor: Preemptor, item: sets._Item, others: Sequence[sets._Item]) -> bool:
    before = preemptor.gone, preemptor.gone_on
    preemptor.choose_again((dict(before[0]), dict(before[1])))
    for other in others:
        preemptor.choose(other.victim.allocation, other.amount)
    may = preemptor.may_evict_now(item.victim.allocation)
    preemptor.choose_again(before)
    return may


def questions(random: Random) -> Iterator[tuple[Preemptor, Victims]]:
    """Iterate over sets of victims of one preemptor after the other, some after others were chosen."""
    world = pooled_world(random) if random.random() < 0.5 else with_relabelled_nodes(contended_world(random), random)
    if random.random() < 0.7:
        for name in "abc":
            pool = random.choice("pq")
            lines = QuotaLine((pool,), random.choice([0, 500, 1000])), QuotaLine((), random.randint(1, 6) * 1000)
            world.policies[name] = replace(world.policies[name], quotas=lines)
    cluster = Cluster(world.snapshot())
    held = list(cluster.allocations.values())
    for workload in [w for w in cluster.workloads.values() if w.state == "pending"]:
        for pool in cluster.pools.values():
            account, need = cluster.account(workload), cluster.need(workload)
            preemptor = Preemptor(cluster, workload, need, account, pool, random.choice(RIGHTS))
            able = [allocation for allocation in held if preemptor.may_evict_now(allocation)]
            for _ in range(6):
                among = able if able and random.random() < 0.8 else held
                chosen = random.sample(among, min(len(among), random.randint(1, 6)))
                victims = tuple(victim_of(allocation, random) for allocation in chosen)
                before = [allocation for allocation in held if allocation not in chosen and random.random() < 0.1]
                preemptor.chosen_so_far()
                for allocation in before:
                    preemptor.choose(allocation, allocation.milli_gpus)
                yield preemptor, victims


def victim_of(allocation: Allocation, random: Random) -> Victim:
    """Return a victim that gives up some of its extra workers, or stops; or as if it were withdrawn."""
    extra = sets.extra_workers(allocation)
    if extra and random.random() < 0.5:
        return Victim(allocation, SHRINK, allocation.parts[: random.randint(1, extra)])
    victim = sets.whole(allocation)
    return victim._replace(kind=WITHDRAW) if random.random() < 0.2 else victim


@pytest.mark.covers("F14", "F15")
def test_the_order_of_victims_is_that_of_asking_about_each_unit_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    from_the_end = sets._from_the_end

    def counted(preemptor: Preemptor, items: Sequence[sets._Item]) -> list[sets._Item]:
        seen["from the end"] += 1
        return from_the_end(preemptor, items)

    monkeypatch.setattr(sets, "_from_the_end", counted)
    for seed in range(300):
        for preemptor, victims in questions(Random(seed)):
            known = dict(preemptor.gone), dict(preemptor.gone_on)
            before = seen["from the end"]
            result = sets.in_legal_order(preemptor, victims)
            assert (preemptor.gone, preemptor.gone_on) == known
            assert result == plainly(preemptor, victims), seed
            if seen["from the end"] > before:
                seen["legal from the end" if result else "illegal from the end"] += 1
            elif result is None:
                seen["illegal at once"] += 1
            seen["several pools"] += any(victim.allocation.shares for victim in victims)
    assert min(seen[kind] for kind in ("legal from the end", "illegal from the end", "illegal at once")) > 20, seen
    assert seen["several pools"] > 20, seen


def asked_about(preemptor: Preemptor, kept: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Victims | None, int]:
    """Return the order of all victims but one, and the number of questions and changes of what is gone it takes."""
    calls, allocations = 0, preemptor.cluster.allocations.values()
    victims = tuple(sets.whole(allocation) for allocation in allocations if allocation.workload.id != kept)
    may, choose = Preemptor.may_evict_now, Preemptor.choose

    def counted_may(of: Preemptor, allocation: Allocation) -> bool:
        nonlocal calls
        calls += 1
        return may(of, allocation)

    def counted_choose(of: Preemptor, allocation: Allocation, amount: int) -> None:
        nonlocal calls
        calls += 1
        choose(of, allocation, amount)

    with monkeypatch.context() as patch:
        patch.setattr(Preemptor, "may_evict_now", counted_may)
        patch.setattr(Preemptor, "choose", counted_choose)
        return sets.in_legal_order(preemptor, victims), calls


def preemptor_in(world: World) -> Preemptor:
    cluster = Cluster(world.submit("new", "a", "one").snapshot())
    workload = cluster.workloads["new"]
    account, pool = cluster.account(workload), cluster.pools["p"]
    return Preemptor(cluster, workload, cluster.need(workload), account, pool, ("reservation",))


@pytest.mark.covers("F14", "F15")
@pytest.mark.parametrize(("reserved", "legal"), [(27, True), (52, True), (53, False)])
def test_many_victims_on_different_lines_cost_a_few_questions_each(
    reserved: int, legal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs of two GPUs are above the line over both pools only before most of the others leave.

    These have a line of their own that lets all of them go. Of 53 GPUs, the last large one would be within the line.
    """
    world = World().pool("p", nodes=7, gpus=8).pool("q", nodes=13, gpus=8).team("a", reserved=3).team("b")
    world.profile("one", 1, pools=("p",)).profile("two", 2, pools=("q",))
    lines = QuotaLine(("p",), 1000), QuotaLine(("p", "q"), reserved * 1000)
    world.policies["b"] = replace(world.policies["b"], quotas=lines)
    world.run("kept", "b", "one", "p-7", preemptible=False)
    for at in range(50):
        world.run(f"small{at:02}", "b", "one", f"p-{at // 8 + 1}").run(f"large{at:02}", "b", "two", f"q-{at // 4 + 1}")
    ordered, calls = asked_about(preemptor_in(world), "kept", monkeypatch)
    assert (ordered is not None) is legal
    assert calls < 1000, "ten for each victim"


@pytest.mark.covers("F14", "F15")
def test_no_other_order_is_tried_where_only_other_teams_count_on_different_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last jobs of `b` are within its reservation, whatever happens to the job of `c` in the other pool."""
    world = World().pool("p", nodes=13, gpus=8).pool("q", nodes=1, gpus=8).team("a", reserved=3).team("b", reserved=9)
    world.team("c").profile("one", 1).run("other", "c", "one", "q-1")
    for at in range(100):
        world.run(f"job{at:02}", "b", "one", f"p-{at // 8 + 1}")
    ordered, calls = asked_about(preemptor_in(world), "", monkeypatch)
    assert ordered is None
    assert calls < 300, "three for each victim"
