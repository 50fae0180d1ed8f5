"""Two deployments that launch for one pool: a need is served once, by the first one in order that can."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from makeway_quota.autoscale.demand import PendingWork
from makeway_quota.autoscale.prospects import MachinesStarting
from makeway_quota.control.machines.cycle_demand import CycleDemand
from makeway_quota.store import open_store
from service.test_machine_loop import World

DOCUMENT = """
version: 1
name: {name}
provider: memory
max_machines: 5
drain_timeout: 60
machine_types:
  - {{name: g2, pool: gpu, instance: big-2, gpus: 2, idle_timeout: 60, max_machines: {machines}, price: {price}}}
"""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    yield World(store)
    store.close()


def deploy(world: World, name: str, price: float, machines: int = 3, **fields: object) -> None:
    more = "".join(f"{key}: {value}\n" for key, value in fields.items())
    text = DOCUMENT.format(name=name, machines=machines, price=price) + more
    known = world.store.deployments.read(name)
    world.store.deployments.save(name, text, 0 if known is None else known.version, "admin", world.now)


async def two(world: World, **dear: object) -> None:
    """Deploy a dear deployment whose name comes first, and a cheap one; take their first steps."""
    deploy(world, "a-dear", 6, **dear)
    deploy(world, "b-cheap", 3)
    await world.turn()


def launched(world: World) -> Counter[str]:
    """Return how many machines each deployment has that are not being ended."""
    return Counter(row.deployment for row in world.rows if row.state != "terminating")


async def pass_cycles(world: World, *jobs: str) -> None:
    """Pass some cycles in which the same work waits."""
    for _ in range(4):
        world.needs(*jobs)
        await world.turn()


@pytest.mark.covers("F49")
async def test_a_need_is_served_by_one_of_two_deployments_the_cheaper_one(world: World) -> None:
    await two(world)
    await pass_cycles(world, "job-1", "job-2")
    assert launched(world) == {"b-cheap": 2}
    assert {name: len(one.running()) for name, one in world.providers.items()} == {"a-dear": 0, "b-cheap": 2}
    for row in world.rows:
        world.report(row)
    world.needs("job-1", "job-2")
    for _ in range(3):
        await world.turn()  # always the same cycle
    assert world.states() == ["ready", "ready"]
    assert launched(world) == {"b-cheap": 2}, "the work was counted before they were nodes"


async def test_a_higher_priority_comes_before_a_lower_price(world: World) -> None:
    await two(world, priority=1)
    await pass_cycles(world, "job-1")
    assert launched(world) == {"a-dear": 1}


async def test_a_machine_counts_from_its_request_though_no_call_for_it_has_an_answer(world: World) -> None:
    await two(world)
    world.providers["b-cheap"].lost_before = 100
    await pass_cycles(world, "job-1")
    assert launched(world) == {"b-cheap": 1}
    assert world.states() == ["requested"]


async def test_where_the_first_is_out_of_stock_the_other_launches_in_the_same_cycle(world: World) -> None:
    await two(world)
    world.providers["b-cheap"].stock_out.add(("big-2", "", "on_demand"))
    world.needs("job-1")
    await world.turn()  # the first launches, and is refused
    world.needs("job-1")  # the cycle that this has woken
    await world.turn(0.1)
    assert launched(world) == {"a-dear": 1}
    world.providers["b-cheap"].stock_out.clear()
    world.now += 400  # the back-off is over
    await pass_cycles(world, "job-1")
    assert launched(world) == {"a-dear": 1}, "which is on its way"


async def test_where_the_first_is_at_its_budget_the_other_launches_in_the_same_step(world: World) -> None:
    deploy(world, "a-dear", 6)
    deploy(world, "b-cheap", 3, hour=4)
    await world.turn()
    world.needs("job-1", "job-2")
    await world.turn()
    assert launched(world) == {"b-cheap": 1, "a-dear": 1}
    await pass_cycles(world, "job-1", "job-2")
    assert launched(world) == {"b-cheap": 1, "a-dear": 1}


async def test_a_deployment_that_is_paused_or_deleted_keeps_no_other_from_launching(world: World) -> None:
    await two(world)
    await pass_cycles(world, "job-1")
    deploy(world, "b-cheap", 3, paused="true")
    await pass_cycles(world, "job-1")
    assert launched(world) == {"a-dear": 1}


async def test_a_gang_gets_its_machines_of_both_deployments(world: World) -> None:
    """The cheap one has a machine that is idle, and may launch no further one."""
    deploy(world, "a-dear", 6)
    deploy(world, "b-cheap", 3, 1)
    await world.turn()
    await pass_cycles(world, "job-1")
    [first] = world.rows
    world.report(first)
    await world.turn()

    def gang() -> CycleDemand:
        known = world.known()
        work = PendingWork("gang", ("gpu",), workers=2, gpus=2000)
        return CycleDemand(known.began, (work,), known.nodes, frozenset(), known.busy, frozenset())

    for _ in range(10):
        world.loop.planned(gang(), world.leader.term)
        await world.turn(20)
        world.report(first)
    assert launched(world) == {"b-cheap": 1, "a-dear": 1}
    assert "ready" in world.states(), "it is for the gang that it is kept"
    told = [item["gang"] for _, item in world.loop.prospects or () if "gang" in item]
    assert told
    assert all(isinstance(one, MachinesStarting) and (one.machines, one.ready) == (2, 1) for one in told)


async def test_only_the_deployment_that_launches_says_that_a_machine_is_coming(world: World) -> None:
    await two(world)
    await pass_cycles(world, "job-1")
    told = world.loop.prospects
    assert told is not None
    [prospect] = [item["job-1"] for _, item in told if "job-1" in item]
    assert isinstance(prospect, MachinesStarting)
    assert prospect.count.deployment == "b-cheap"


async def test_the_next_leader_launches_nothing_for_what_the_other_deployment_has_requested(world: World) -> None:
    await two(world)
    world.providers["b-cheap"].lost_before = 100
    await pass_cycles(world, "job-1")
    world.lead()
    world.loop = world.new_loop()
    await world.turn()
    await pass_cycles(world, "job-1")
    assert launched(world) == {"b-cheap": 1}


@pytest.mark.parametrize("seed", range(5))
async def test_no_history_of_two_deployments_has_more_machines_than_need(world: World, seed: int) -> None:
    """Work comes and goes, clouds run out, budgets change: of what is on its way, none is without its work."""
    chance = random.Random(seed)
    await two(world)
    waiting, busy, launches = list[str](), set[str](), 0
    for at in range(60):
        if chance.random() < 0.5:
            waiting.append(f"job-{at}")
        for name, one in world.providers.items():
            one.stock_out.clear()
            if chance.random() < 0.3:
                one.stock_out.add(("big-2", "", "on_demand"))
            if chance.random() < 0.05:
                price, hour = (3, 3 * chance.randint(0, 4)) if name == "b-cheap" else (6, 6 * chance.randint(0, 4))
                deploy(world, name, price, hour=hour)
        busy = {row.id for row in world.rows if row.id in busy and chance.random() > 0.1}
        for row in world.rows:
            if row.state == "ready" and row.id not in busy and waiting:
                waiting.pop(0)  # a cycle starts what there is room for before it says what waits
                busy.add(row.id)
        before = {row.id for row in world.rows}
        starting = sum(row.starting for row in world.rows)
        world.needs(*waiting, busy=tuple(busy))
        await world.turn(chance.choice((1, 1, 20, 100)))
        new = sum(row.id not in before for row in world.rows)
        launches += new
        assert new <= max(0, len(waiting) - starting), (at, waiting, world.rows)
        for row in world.rows:
            if row.boot or (row.state == "booting" and chance.random() < 0.2):
                world.report(row)
    assert launches > 1
