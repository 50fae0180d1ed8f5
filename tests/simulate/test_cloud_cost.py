"""The benchmark of machines that come and go: its bound by hand, and a small workload through the same code."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from typing import Literal

import pytest
from makeway_quota.autoscale.deployment import MoveRules
from makeway_quota.engine.snapshot import GPU, Profile
from makeway_quota.simulate.trace import Arrival

from benchmarks.cloud_cost import POOL, TEAM, Case, CloudRun, Point, bound, picture, play


def task(name: str, gpus: int, submit: float, seconds: float) -> tuple[Arrival, Profile]:
    profile = Profile(f"g{gpus}", gpus * GPU, pools=(POOL,), policies=((TEAM,),), grace=60.0)
    return Arrival(name, TEAM, gpus * GPU, submit, seconds, TEAM, profile.name), profile


def small(seed: int = 7, count: int = 300) -> list[tuple[Arrival, Profile]]:
    """Return tasks of one to eight GPUs, a few at a time, whose durations differ as much as those of the trace."""
    chance = random.Random(seed)
    sizes = (1, 1, 1, 1, 1, 1, 2, 2, 4, 8)
    return [
        task(f"t{at:03}", chance.choice(sizes), 600.0 * at + chance.uniform(0, 600), chance.lognormvariate(8, 1.2))
        for at in range(count)
    ]


def test_the_bound_is_what_is_worked_out_by_hand() -> None:
    """Eight GPUs for an hour, and one more from half of it on: one machine, two of them, one again."""
    work = [task("a", 8, 0, 3600), task("b", 1, 1800, 3600)]
    assert bound(arrival for arrival, _ in work) == 2.0


@pytest.mark.slow
def test_filling_machines_costs_less_than_packing_for_large_work_and_a_longer_idle_timeout_more() -> None:
    work = small()
    least = bound(arrival for arrival, _ in work)

    def cost(strategy: Literal["pack", "fill"], idle: float) -> CloudRun:
        run = play(work, Case(strategy, idle))
        assert run.hours > least
        return run

    short, usual, packed = cost("fill", 0.0), cost("fill", 600.0), cost("pack", 600.0)
    assert short.hours < usual.hours < packed.hours
    assert short.wait_mean > usual.wait_mean
    drawing = ET.fromstring(picture([Point(Case("fill", 0.0), least, short), Point(Case("fill", 600.0), least, usual)]))
    assert "10 min" in [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.slow
def test_moves_save_money_and_every_task_ends_and_each_is_moved_with_a_pause_in_between() -> None:
    work = small(count=200)
    still = play(work, Case("fill", 600.0))
    moved = play(work, Case("fill", 600.0, MoveRules(600.0, 0, 3)))
    assert moved.moves > 0
    assert moved.hours < still.hours
    assert moved.lost == pytest.approx(sum_of_moves(moved), rel=1.0), "two minutes of each GPU of a moved task"


def sum_of_moves(run: CloudRun) -> float:
    """Return the GPU-hours that so many moves of tasks with one GPU would cost."""
    return run.moves * 120 / 3600


def test_ends_that_are_known_save_launches() -> None:
    """A task that comes a minute before another one ends waits for that, if the end is known; else for a boot."""
    long = [task(f"long-{n}", 1, 0, 3600 + 100 * n) for n in range(8)]  # they begin after a boot of 180 s
    late = [task(f"late-{n}", 1, 3720 + 100 * n, 1800) for n in range(4)]
    known, unknown = (play([*long, *late], Case("fill", 600.0, limits=limits)) for limits in (True, False))
    assert (known.machines, unknown.machines) == (1, 2)
    assert known.hours < unknown.hours
