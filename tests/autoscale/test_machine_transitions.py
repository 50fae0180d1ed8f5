"""Every state and event of a machine has one outcome, and the declared table is what happens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from autoscale.fleet import START
from autoscale.fleet import machine as new_machine
from makeway_quota.autoscale.machine import (
    FINISHED,
    MACHINE_EVENT_KINDS,
    STATES,
    DrainReason,
    Machine,
    MachineEvent,
    MachineEventKind,
    MachineState,
    MachineTimeouts,
)
from makeway_quota.autoscale.transitions import DRAIN_STRENGTH, MACHINE_TRANSITIONS, apply_event

WINDOWS = MachineTimeouts()
NOW = START + 100_000


def variants(state: MachineState) -> list[Machine]:
    """Return machines of a state that differ in everything that a rule asks for."""
    result = []
    facts = itertools.product(
        (0, 1, 2), (None, "i-1"), (0, 1), (None, "idle", "spot"), (None, NOW - 1, NOW - 1000), (None, 0, 2), (1, 50_000)
    )
    for calls, instance, absences, drain, heard, attempts, old in Random(1).sample(list(facts), 60):
        since = NOW - old
        result.append(
            new_machine(
                market="spot", price=3, requested_at=since, state_since=since, state=state,
                launch_calls=calls, launch_called_at=since if calls else None, instance=instance, launched_at=since,
                boot="boot-1", heard_at=heard, attempts=attempts, needed_at=since, drain=drain,
                deadline=NOW - 1 if drain == "spot" and old > 1 else None, missed_lists=absences,
            )
        )  # fmt: skip
    return result


def events(kind: MachineEventKind) -> list[MachineEvent]:
    return [
        MachineEvent(kind, at=at, instance=instance, boot=boot, gpus=gpus, attempts=gpus, empty=empty, drain=drain)
        for at, instance, boot, gpus, empty, drain in itertools.product(
            (NOW, NOW - 5000), ("i-1",), ("boot-1", "boot-2"), (0, 2), (False, True), ("idle", "pause")
        )
    ]


@pytest.mark.parametrize("kind", MACHINE_EVENT_KINDS)
def test_every_state_and_event_has_the_declared_outcomes(kind: MachineEventKind) -> None:
    for state in STATES:
        declared = set(MACHINE_TRANSITIONS[kind].next_states.get(state, (state,)))
        result: set[str] = set()
        for machine in variants(state):
            for event in events(kind):
                after = apply_event(machine, event, NOW, WINDOWS)
                result.add(after.state)
        assert result <= declared, (state, kind)
        assert declared <= result | {state}, f"{kind} never makes {state} {declared - result}"


def test_the_table_names_every_event_and_no_ended_machine() -> None:
    assert list(MACHINE_TRANSITIONS) == list(MACHINE_EVENT_KINDS)
    assert not {state for event in MACHINE_TRANSITIONS.values() for state in event.next_states} & FINISHED


def test_every_state_but_the_ended_ones_can_be_left_and_reached() -> None:
    arrows = {
        (state, after)
        for event in MACHINE_TRANSITIONS.values()
        for state, ends in event.next_states.items()
        for after in ends
    }
    for state in set(STATES) - FINISHED:
        assert any(before == state != after for before, after in arrows), f"{state} is a trap"
    for state in set(STATES) - {"requested"}:
        assert any(before != state == after for before, after in arrows), f"{state} is never reached"


@pytest.mark.parametrize("kind", ["initialised", "init_failed", "heard"])
@pytest.mark.parametrize("state", ["joining", "ready", "draining", "lost"])
def test_a_report_of_another_boot_does_not_count(kind: MachineEventKind, state: MachineState) -> None:
    for machine in variants(state):
        report = MachineEvent(kind, at=NOW, boot="boot-0", gpus=machine.gpus)
        assert apply_event(machine, report, NOW, WINDOWS) is machine


def test_terminating_is_final() -> None:
    for kind in MACHINE_EVENT_KINDS:
        assert set(MACHINE_TRANSITIONS[kind].next_states.get("terminating", ())) <= {"terminating", "gone"}


def test_every_time_that_a_row_has_is_moved_with_the_clock() -> None:
    machine = replace(
        variants("draining")[0],
        launch_called_at=START,
        end_called_at=START,
        ready_at=START,
        heard_at=START,
        deadline=START,
    )
    moved = machine.shifted(60)
    times = {name for name in Machine.__slots__ if name.endswith("_at") or name in ("state_since", "deadline")}
    assert {name for name in times if getattr(moved, name) == getattr(machine, name) + 60} == times


def test_a_stronger_reason_to_drain_replaces_a_weaker_one_and_only_that() -> None:
    reasons: list[DrainReason] = list(DRAIN_STRENGTH)
    for first, second in itertools.product(reasons, reasons):
        machine = replace(variants("draining")[0], drain=first, deadline=None)
        after = apply_event(machine, MachineEvent("drain", drain=second, deadline=NOW + 9), NOW, WINDOWS)
        assert after.drain == (second if DRAIN_STRENGTH[second] > DRAIN_STRENGTH[first] else first)
