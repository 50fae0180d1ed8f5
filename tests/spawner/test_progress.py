"""Each phase of a start has its own clock."""

from __future__ import annotations

import pytest
from makeway_spawner.progress import Progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.covers("N05")
async def test_only_the_clock_of_the_present_phase_runs() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.add("admission", "Requesting")
    clock.now += 3
    progress.add("admission", "Waiting")
    clock.now += 2
    progress.add("node", "Granted")
    clock.now += 0.5
    assert progress.clocks() == {"admission": 5.0, "node": 0.5}
    progress.add("server", "Starting")
    clock.now += 9
    progress.close()
    events = [event async for event in progress.follow()]
    assert [event["phase"] for event in events] == ["admission", "admission", "node", "server"]
    assert events[-1]["clocks"] == {"admission": 5.0, "node": 0.5, "server": 9.0}


def test_a_phase_that_comes_again_goes_on_with_its_clock() -> None:
    clock = Clock()
    progress = Progress(clock)
    for phase, seconds in (("admission", 1), ("reclaim", 10), ("admission", 2), ("reclaim", 20)):
        progress.add(phase, f"{phase} for {seconds} s")
        clock.now += seconds
    assert progress.clocks() == {"admission": 3.0, "reclaim": 30.0}
    assert progress.events[-1]["progress"] == 20
