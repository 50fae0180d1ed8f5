"""One leader ends a machine while another cycle would assign work to it: no job on it, and none that is ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from makeway_quota.store import Store, open_store
from makeway_quota.store.errors import LeadershipLost
from makeway_quota.store.records import Attempt, Change, NewWorkload
from makeway_quota.values import Place

from .test_machine_loop import DOCUMENT, World

Event = Callable[[World], Awaitable[None]]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    yield World(store)
    store.close()


def assignment(store: Store, machine: str, job: str = "job-1") -> Change:
    """Return the decision of a cycle to start a job on a machine, by the rows as they are now."""
    if store.workload(job) is None:
        store.add_workload(NewWorkload(job, "job", "rnd", "gpu2", "ana", gpus=2000), now=1.0)
    row = store.workload(job)
    assert row is not None
    placement = (Place(machine, (0, 1), (1000, 1000), "machines"),)
    opened = Attempt(job, row.attempt + 1, 2.0, placement=placement)
    fields = {"state": "starting", "attempt": opened.number, "placement": placement}
    return Change(job, fields, row.version, open_attempt=opened)


def commit(world: World, change: Change, term: int) -> bool:
    """Commit as a cycle does; return whether the job was placed."""
    try:
        return bool(world.store.commit([change], now=world.now, term=term))
    except LeadershipLost:
        return False


def busy(world: World) -> tuple[str, ...]:
    """Return the machines on which a job is placed, as a cycle reads it."""
    return tuple(place.node for row in world.store.active() for place in row.placement)


async def idles(world: World) -> None:
    """Pass the idle timeout, with a cycle that observes the machine as it is."""
    world.needs(busy=busy(world))
    await world.turn(100)


async def reports(world: World) -> None:
    """Have its agent report, which runs nothing, as it has had no order yet."""
    world.now += 1
    for row in world.rows:
        world.report(row)
    await world.turn(1)


async def is_seen(world: World) -> None:
    """Have a new cycle observe what was committed so far."""
    world.needs(busy=busy(world), accepting_machines=tuple(row.id for row in world.rows if row.state == "ready"))
    await world.turn(1)


async def is_paused(world: World) -> None:
    [stored] = world.store.deployments.list()
    text = DOCUMENT.format(name="cloud", machines=3) + "paused: true\n"
    world.store.deployments.save("cloud", text, stored.version, "admin", world.now)
    await world.turn(1)


async def passes_its_deadline(world: World) -> None:
    await world.turn(70)


async def loses_its_instance(world: World) -> None:
    for instance in world.providers["cloud"].running():
        world.providers["cloud"].interrupt(instance)
    for seconds in (61, 1):  # the list of one step is taken by the next
        await world.turn(seconds)


IDLE: tuple[Event, ...] = (idles, reports, is_seen, is_seen)
PAUSE: tuple[Event, ...] = (is_paused, reports, is_seen, is_seen)
DEADLINE: tuple[Event, ...] = (is_paused, passes_its_deadline)
LOSS: tuple[Event, ...] = (loses_its_instance,)
HISTORIES = {"idle": IDLE, "pause": PAUSE, "deadline": DEADLINE, "loss": LOSS}
EVERY_MOMENT = [(name, at) for name, events in HISTORIES.items() for at in range(len(events) + 1)]


@pytest.mark.parametrize("deposed", [False, True], ids=["same leader", "two leaders"])
@pytest.mark.parametrize(("name", "at"), EVERY_MOMENT)
async def test_a_stale_assignment_is_refused_or_keeps_its_machine(
    world: World, name: str, at: int, deposed: bool
) -> None:
    """The assignment was decided while the machine was ready, and is committed after each of the events in turn."""
    world.deploy()
    [machine] = await world.grown("job-0")
    decided, term = assignment(world.store, machine.id), world.leader.term or 0
    if deposed:
        world.lead()
        world.loop = world.new_loop()
        await world.turn()
    placed, forced = False, name in ("deadline", "loss")
    for number, happens in enumerate((*HISTORIES[name], None)):
        before = world.store.machines.machine(machine.id)
        assert before is not None
        if number == at:
            placed = commit(world, decided, term)
            assert placed is (before.state == "ready" and not deposed), before.state
        if happens is not None:
            await happens(world)
        row = world.store.machines.machine(machine.id)
        assert row is not None
        ends = row.state in ("terminating", "gone")
        assert not (placed and ends) or forced, f"{row.state} after {happens}, with a job"
    assert placed or ends or name == "pause", "each of these histories ends a machine without work"


async def test_what_a_cycle_knew_in_an_earlier_term_ends_no_machine(world: World) -> None:
    """Another leader has assigned work since, which the agent does not report yet."""
    world.deploy()
    [machine] = await world.grown("job-0")
    await idles(world)
    assert world.states() == ["draining"]
    slow, term = world.known(accepting_machines=()), world.leader.term  # a cycle that hangs
    other = World(world.store, world.now, providers=world.providers)
    await other.turn()
    other.needs("job-1", accepting_machines=())
    await other.turn()
    assert other.states() == ["ready"], "needed again"
    assert commit(other, assignment(other.store, machine.id), other.leader.term or 0)
    await is_seen(other)
    await is_paused(other)
    world.lead()
    world.now = other.now
    await reports(world)
    assert world.states() == ["draining"]
    world.loop.planned(slow, term)
    await world.turn()
    assert world.states() == ["draining"], "with the job of the other leader"
    world.needs(busy=busy(world))
    await world.turn()
    assert world.states() == ["draining"]
    assert busy(world) == (machine.id,)
