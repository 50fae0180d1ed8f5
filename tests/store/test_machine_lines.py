"""The lines of machines by state: from the log, what they were at any time of the last hour."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from autoscale.fleet import machine
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.services.machines import machines as service
from makeway_quota.services.machines.machines import LINES, WINDOW, timeline
from makeway_quota.store import Store
from makeway_quota.store.machines import log

NOW = 1_000_000.0
LIFE = ("requested", "booting", "joining", "ready", "draining", "ready", "lost", "ready", "terminating", "gone")


def lives(store: Store, seed: int, machines: int = 12) -> list[tuple[float, str, str]]:
    """Commit random lives of machines in order of time, some of which began long ago, and return all changes."""
    random, term = Random(seed), store.take_term("test", 0.0)
    changes = []
    for n in range(machines):
        at = NOW - random.uniform(60, 3 * WINDOW)
        for state in LIFE[: random.randint(1, len(LIFE))]:
            changes.append((at, f"m-{n}", state))
            at += random.uniform(1, WINDOW / 2)
    changes = sorted(change for change in changes if change[0] <= NOW)
    for at, id, state in changes:
        known = {row.id: row for row in store.machines.live()}
        row = known[id] if id in known else machine(id=id, requested_at=at)
        row = replace(row, state=state if id in known else row.state, state_since=at)  # type: ignore[arg-type]
        new = MachineChanges(changed=(row,)) if id in known else MachineChanges((row,))
        assert store.machines.commit("cloud", term, new)
    return changes


def counted(changes: list[tuple[float, str, str]], at: float) -> Counter[str]:
    states = {machine: state for when, machine, state in changes if when <= at}
    return Counter(LINES[state] for state in states.values() if state in LINES)


@pytest.mark.covers("F56")
@pytest.mark.parametrize("most", [2000, 25])
@pytest.mark.parametrize("seed", range(4))
def test_the_lines_are_what_the_machines_were_at_each_time(
    store: Store, monkeypatch: pytest.MonkeyPatch, seed: int, most: int
) -> None:
    monkeypatch.setattr(log, "MAX_CHANGES", most)
    changes = lives(store, seed)
    history = store.machine_log.states("cloud", NOW - WINDOW)
    coarse = timeline(history, store.machines.live())
    monkeypatch.setattr(service, "STEP", 1e-6)
    lines = timeline(history, store.machines.live())
    assert 1 < len(history.changes) <= most
    assert len(lines["at"]) == len(history.changes) + 1
    for n, at in enumerate(lines["at"]):
        shown = {name: lines[name][n] for name in lines if name != "at" and lines[name][n]}
        assert shown == dict(counted(changes, at + 0.05 if n else history.since)), (n, at)
    assert {name: values[-1] for name, values in coarse.items()} == {name: values[-1] for name, values in lines.items()}
    points = Counter(at // 10 for at in coarse["at"][1:])
    assert max(points.values()) <= 2, "the last change in ten seconds, and the one with the most machines"
    totals, coarse_totals = (
        [sum(one[name][n] for name in one if name != "at") for n in range(len(one["at"]))] for one in (lines, coarse)
    )
    assert max(coarse_totals) == max(totals), "no machine lives too shortly to be counted"


def test_machines_that_live_for_seconds_only_are_in_the_lines(store: Store) -> None:
    term, begin = store.take_term("test", 0.0), NOW - 600
    for n in range(3):
        row = machine(id=f"m-{n}", requested_at=begin + n, state_since=begin + n)
        assert store.machines.commit("cloud", term, MachineChanges((row,)))
    for n in range(3):
        known = {row.id: row for row in store.machines.live()}
        gone = replace(known[f"m-{n}"], state="gone", state_since=begin + 4 + n)
        assert store.machines.commit("cloud", term, MachineChanges(changed=(gone,)))
    lines = timeline(store.machine_log.states("cloud", NOW - WINDOW), store.machines.live())
    assert max(lines["starting"]) == 3
    assert lines["starting"][-1] == 0
    assert len(lines["at"]) == 3
