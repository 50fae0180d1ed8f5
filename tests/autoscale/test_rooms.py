"""The index of free room finds what a plain search over all rooms finds, also after undone attempts."""

from __future__ import annotations

from copy import deepcopy
from random import Random

import pytest
from makeway_quota.autoscale.demand import PendingWork
from makeway_quota.autoscale.deployment import MachineType
from makeway_quota.autoscale.placement.rooms import GPU, UNLIMITED, MachineRoom, Rooms, TakenRoom, fits_on


def some_work(random: Random) -> PendingWork:
    pools = random.choice((("a",), ("b",), ("a", "b"), ("b", "a"), ("c",)))
    gpus = random.choice((0, 250, 500, 700, 1000, 2000, 3000))
    return PendingWork("w", pools, gpus=gpus, cpu=random.randint(0, 8), memory=random.randint(0, 8))


def some_room(random: Random, number: int) -> MachineRoom:
    cpu, memory = random.choice((8, 16, UNLIMITED)), random.choice((8, 24, UNLIMITED))
    return MachineRoom(random.choice("ab"), [GPU] * random.randint(0, 4), cpu, memory, f"m-{number}")


def plain_search(rooms: list[MachineRoom], work: PendingWork) -> str | None:
    """Return the first machine of the first pool that the work fits on, by trying all."""
    for pool in work.pools:
        for room in rooms:
            if room.pool == pool and deepcopy(room).take(work) is not None:
                return room.machine
    return None


@pytest.mark.parametrize("seed", range(12))
def test_the_first_room_is_that_of_a_plain_search(seed: int) -> None:
    random = Random(seed)
    rooms = Rooms(some_room(random, number) for number in range(40))
    for step in range(120):
        work = some_work(random)
        before = deepcopy([(room.free, room.cpu, room.memory) for room in rooms.all])
        misses, taken, added = rooms.misses(work.pools), list[TakenRoom](), 0
        for _ in range(random.choice((1, 1, 2, 3))):
            expected = plain_search(rooms.all, work)
            result = rooms.take(work)
            assert (result and result.room.machine) == expected
            if result is None and random.random() < 0.3 and not added:
                rooms.add(some_room(random, 1000 + step))
                added = 1
            elif result is not None:
                taken.append(result)
        if random.random() < 0.4:
            rooms.undo(taken, added, misses)
            assert [(room.free, room.cpu, room.memory) for room in rooms.all] == before


def test_what_fits_on_a_type_is_what_its_empty_room_takes() -> None:
    random = Random(1)
    for _ in range(500):
        machine_type = MachineType(
            "t", "a", "i", gpus=random.randint(0, 3), cpu=random.randint(0, 8), memory=random.randint(0, 8),
            cpu_only=random.random() < 0.2,
        )  # fmt: skip
        work = some_work(random)
        assert fits_on(machine_type, work) == (MachineRoom.of(machine_type).take(work) is not None)


def test_a_machine_of_another_model_is_neither_room_nor_a_miss_for_others() -> None:
    old = MachineType("old", "gpu", "o", gpus=2, model="T4")
    new = MachineType("new", "gpu", "n", gpus=2, model="H100")
    rooms = Rooms([MachineRoom.of(old)])
    choosy = PendingWork("job-1", ("gpu",), gpus=1000, models=("H100",))
    assert rooms.take(choosy) is None
    assert not fits_on(old, choosy)
    assert fits_on(new, choosy)
    assert fits_on(MachineType("any", "gpu", "a", gpus=1), choosy)
    assert rooms.take(PendingWork("job-2", ("gpu",), gpus=1000)) is not None
