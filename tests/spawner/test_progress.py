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


async def test_a_page_is_told_times_that_need_no_right_clock() -> None:
    """Whenever it is opened: how long after the request something was said, and how long it takes from now on."""
    clock = Clock()
    progress = Progress(clock)
    clock.now += 4
    progress.add("reclaim", "Waiting", within=30.0)
    clock.now += 0.4
    progress.add("reclaim", "Waiting", within=29.6)  # the same time
    clock.now += 10
    progress.add("reclaim", "Waiting", within=60.0)  # another one
    clock.now += 5
    progress.add("node", "Granted")
    progress.close()
    events = [event async for event in progress.follow()]
    assert [(event["after"], event.get("within")) for event in events] == [(4.0, 14.6), (14.4, 55.0), (19.4, None)]
    assert not any("until" in event for event in events)


async def test_a_page_is_told_how_long_nothing_makes_way_at_the_soonest() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.add("admission", "r0 is protected", earliest=600.0, wait="nothing makes way for it in the next")
    clock.now += 60
    progress.add("admission", "r0 is protected", earliest=540.2, wait="nothing makes way for it in the next")
    progress.add("admission", "r0 is protected", earliest=900.0, wait="nothing makes way for it in the next")
    progress.close()
    events = [event async for event in progress.follow()]
    assert [(event["earliest"], event["after"]) for event in events] == [(540.0, 0.0), (900.0, 60.0)]
    assert not any("within" in event for event in events)
