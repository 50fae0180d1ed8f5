"""Return what an event makes of a machine: a pure function that has an outcome for each state and event.

`MACHINE_TRANSITIONS` declares which states can follow; a state that it does not name for an event stays as it is. The
tests enumerate every pair, and docs/reference/machines.md is made from the table. Nothing else sets a machine's state.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from .machine import (
    CANCELLABLE,
    STARTING,
    DrainReason,
    Machine,
    MachineEvent,
    MachineEventKind,
    MachineState,
    MachineTimeouts,
)

LISTS_THAT_PROVE = 2
"""Complete lists in a row without a machine that should be there, which prove that it is gone"""
DRAIN_STRENGTH: Mapping[DrainReason, int] = {
    "idle": 0,
    "move": 1,
    "age": 2,
    "removed": 3,
    "budget": 4,
    "pause": 5,
    "spot": 6,
}
"""A stronger reason to drain replaces a weaker one"""

NEEDED_EVERY = 10.0
"""How often, in seconds, the row of a machine that is needed is written again"""

NextStates = Mapping[MachineState, tuple[MachineState, ...]]


class MachineTransition(NamedTuple):
    """One kind of event: what it means, and the states that can follow; in others the state stays."""

    meaning: str
    next_states: NextStates


def _to(state: MachineState, *before: MachineState) -> dict[MachineState, tuple[MachineState, ...]]:
    return dict.fromkeys(before, (state,))


MACHINE_TRANSITIONS: Mapping[MachineEventKind, MachineTransition] = {
    "launch_called": MachineTransition("the provider is about to be called", {"requested": ("requested",)}),
    "listed": MachineTransition(
        "the provider answered with its instance, or a list has one with its tag",
        {"requested": ("booting",), "terminating": ("terminating",)},
    ),
    "refused": MachineTransition(
        "the provider refuses for certain; after an earlier call without an answer, an instance is looked for. Of a "
        "machine that boots: its launch failed after it was listed, or the cluster's autoscaler adds no node",
        {"requested": ("failed", "terminating"), "booting": ("booting", "terminating")},
    ),
    "throttled": MachineTransition(
        "the provider is busy and has certainly done nothing: it is called again later", {"requested": ("requested",)}
    ),
    "joined": MachineTransition("its agent redeems the one-time token", _to("joining", "requested", "booting")),
    "initialised": MachineTransition(
        "the init script of the boot that joined ended with 0: ready if it has the GPUs of its type, else ended",
        {"joining": ("joining", "ready", "terminating")},
    ),
    "init_failed": MachineTransition(
        "the init script of that boot failed", {"booting": ("terminating",), "joining": ("joining", "terminating")}
    ),
    "heard": MachineTransition("its agent reports, from the same boot", {"lost": ("lost", "ready", "draining")}),
    "needed": MachineTransition(
        "work runs there, is to start there or waits for it; a drain for idleness or a move is cancelled",
        {"draining": ("draining", "ready")},
    ),
    "moving": MachineTransition(
        "its jobs are still there that save and go to other machines; its drain goes on", _to("draining", "draining")
    ),
    "unneeded": MachineTransition(
        "no work waits for it, for longer than the window",
        {
            "requested": ("requested", "failed", "terminating"),
            "booting": ("booting", "terminating"),
            "joining": ("joining", "terminating"),
        },
    ),
    "withdrawn": MachineTransition(
        "it may not be launched any more: its deployment is paused, deleted or at its limits, or has not its type",
        {
            "requested": ("failed", "terminating"),
            **_to("terminating", "booting", "joining"),
        },
    ),
    "drain": MachineTransition(
        "it is cordoned: idle, moved, too old, paused, or for the budget", _to("draining", "ready")
    ),
    "spot_notice": MachineTransition(
        "the provider takes it back at a deadline",
        {**_to("terminating", "booting", "joining"), **_to("draining", "ready", "draining")},
    ),
    "vacant": MachineTransition(
        "no work is placed there; ended if a report since the drain and the last use has no attempt",
        {"draining": ("draining", "terminating")},
    ),
    "stopped": MachineTransition(
        "the provider stopped its instance, which is not deleted",
        _to("terminating", "requested", "booting", "joining", "ready", "draining", "lost"),
    ),
    "ended": MachineTransition(
        "the provider says that its instance is terminated",
        _to("gone", "requested", "booting", "joining", "ready", "draining", "lost", "terminating"),
    ),
    "not_found": MachineTransition(
        "the provider knows no such instance, though it had time to list it", {"terminating": ("terminating", "gone")}
    ),
    "absent": MachineTransition(
        "missing from a complete list; if it is live, from two in a row that are not empty, with no report in between",
        {
            "booting": ("booting", "gone"),
            "joining": ("joining", "gone"),
            "ready": ("ready", "gone"),
            "draining": ("draining", "gone"),
            "lost": ("lost", "gone"),
            "terminating": ("terminating", "gone"),
        },
    ),
    "fenced": MachineTransition("its attempts were fenced and requeued", _to("terminating", "lost")),
    "end_called": MachineTransition("the provider is about to be asked to end it", {"terminating": ("terminating",)}),
    "tick": MachineTransition(
        "time passes: no answer, no boot, no report, or the deadline of a drain",
        {
            "requested": ("requested", "terminating"),
            "booting": ("booting", "terminating"),
            "joining": ("joining", "terminating"),
            "ready": ("ready", "lost"),
            "draining": ("draining", "lost", "terminating"),
        },
    ),
}
"""Every kind of event, in the order of a machine's life"""


def apply_event(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    """Return the machine after an event: the same object where it has no effect."""
    if machine.finished:
        return machine
    return _RULES[event.kind](machine, event, now, timeouts)


def _enter(machine: Machine, state: MachineState, now: float, reason: str, **fields: Any) -> Machine:
    return machine.with_fields(state=state, state_since=now, reason=reason, missed_lists=0, **fields)


def _not_after(at: float | None, now: float, otherwise: float) -> float:
    """Return a time; one that is not known, or later than now as the clock was set back, is `otherwise`."""
    return otherwise if at is None or at > now else at


# ── The launch ──────────────────────────────────────────────────────────────


def _launch_called(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    if machine.state != "requested":
        return machine
    return machine.with_fields(launch_calls=machine.launch_calls + 1, launch_called_at=now)


def _listed(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    if machine.state == "requested":
        return _enter(machine, "booting", now, "launched", instance=event.instance, launched_at=now)
    if machine.instance is None:
        return machine.with_fields(instance=event.instance, launched_at=machine.launched_at or now, missed_lists=0)
    if machine.instance == event.instance and machine.missed_lists:
        return machine.with_fields(missed_lists=0)
    return machine


def _refused(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    if machine.state == "booting" and event.instance == machine.instance:  # most refused calls name none
        return _enter(machine, "terminating", now, event.reason)
    if machine.state != "requested":
        return machine
    certain = machine.launch_calls <= 1  # an earlier call may have launched one, though this one is refused
    return _enter(machine, "failed" if certain else "terminating", now, event.reason)


def _throttled(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    return (
        machine.with_fields(launch_calls=max(0, machine.launch_calls - 1)) if machine.state == "requested" else machine
    )


def _joined(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    if machine.state not in ("requested", "booting"):
        return machine
    instance = machine.instance or event.instance or None
    launched = machine.launched_at or now
    return _enter(
        machine, "joining", now, "joined", boot=event.boot, heard_at=now, instance=instance, launched_at=launched
    )


def _initialised(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    if machine.state != "joining" or event.boot != machine.boot:
        return machine
    if event.gpus != machine.gpus:
        return _enter(machine, "terminating", now, "wrong_gpus")
    return _enter(machine, "ready", now, "ready", ready_at=now, heard_at=now, needed_at=max(machine.needed_at, now))


def _init_failed(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    of_this_boot = machine.state == "booting" or (machine.state == "joining" and event.boot == machine.boot)
    return _enter(machine, "terminating", now, "init_failed") if of_this_boot else machine


# ── The life ────────────────────────────────────────────────────────────────


def _heard(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    """Note a report; one that is older than what is known says nothing, however late it arrives."""
    if event.boot != machine.boot or machine.state not in ("joining", "ready", "draining", "lost"):
        return machine
    at = min(event.at, now)
    if at < _not_after(machine.heard_at, now, at):
        return machine
    cordoned = machine.state == "draining" or machine.drain is not None
    early = cordoned and at <= _not_after(machine.state_since, now, at - 1)  # work may have started there since
    heard = machine.with_fields(heard_at=at, attempts=machine.attempts if early else event.attempts, missed_lists=0)
    if machine.state != "lost":
        return heard
    if now - at > timeouts.lost_after:
        return machine
    return _enter(heard, "draining" if machine.drain else "ready", now, "heard_again")


def _needed(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    if machine.state not in (*STARTING, "ready", "draining"):
        return machine
    if machine.state != "draining" and now >= machine.needed_at and not _due_again(machine, now):
        return machine
    needed = machine.with_fields(needed_at=now)
    if machine.state == "draining" and machine.drain in CANCELLABLE and machine.deadline is None:
        return _enter(needed, "ready", now, "needed", drain=None)
    return needed


def _moving(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    if machine.state != "draining" or (machine.needed_at <= now and not _due_again(machine, now)):
        return machine
    return machine.with_fields(needed_at=now)


def _due_again(machine: Machine, now: float) -> bool:
    """Whether it is time to note anew that a machine is needed; each has its own moments, as thousands are needed."""
    offset = zlib.crc32(machine.id.encode()) % 1000 / 1000 * NEEDED_EVERY
    return (now + offset) // NEEDED_EVERY > (machine.needed_at + offset) // NEEDED_EVERY


def _unneeded(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    waited = now - _not_after(machine.needed_at, now, event.at)
    if machine.state not in STARTING or waited <= timeouts.unneeded:
        return machine
    return _give_up(machine, now, "not_needed")


def _give_up(machine: Machine, now: float, reason: str) -> Machine:
    """Return a machine that is not ready with its end: without a call, which is committed before, there is none."""
    never_called = machine.state == "requested" and not machine.launch_calls
    return _enter(machine, "failed" if never_called else "terminating", now, reason)


def _withdrawn(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    return _give_up(machine, now, event.reason) if machine.state in STARTING else machine


def _drain(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    if machine.state == "ready":
        fields = {"drain": event.drain, "deadline": event.deadline, "attempts": None}  # a report has to come first
        return _enter(machine, "draining", now, event.drain, **fields)
    if machine.state != "draining" or DRAIN_STRENGTH[event.drain] <= DRAIN_STRENGTH[machine.drain or "idle"]:
        return machine
    return machine.with_fields(
        drain=event.drain, reason=event.drain, deadline=_earlier(machine.deadline, event.deadline)
    )


def _spot_notice(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    if machine.state in ("booting", "joining"):
        return _enter(machine, "terminating", now, "spot")
    return _drain(machine, replace(event, drain="spot"), now, timeouts)


def _earlier(one: float | None, other: float | None) -> float | None:
    return min((at for at in (one, other) if at is not None), default=None)


def _vacant(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    used_at = _not_after(machine.needed_at, now, 0.0)  # what was placed there until then may have started since
    reported = machine.attempts == 0 and machine.heard_at is not None and machine.heard_at > used_at
    if machine.state != "draining" or not reported:
        return machine
    return _enter(machine, "terminating", now, machine.drain or "idle")


# ── The end ─────────────────────────────────────────────────────────────────


def _stopped(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    if machine.state == "terminating":
        return machine
    return _enter(machine, "terminating", now, "stopped", instance=machine.instance or event.instance or None)


def _ended(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    return _enter(machine, "gone", now, machine.reason if machine.state == "terminating" else "ended_by_provider")


def _not_found(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    if machine.state != "terminating" or event.at <= _visible_from(machine, timeouts):
        return machine
    return _enter(machine, "gone", now, machine.reason)


def _absent(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    """Count a complete list without the machine; one of before the machine had to be visible proves nothing."""
    if machine.state == "requested" or event.at <= _visible_from(machine, timeouts):
        return machine
    if machine.state == "terminating":
        if machine.instance and event.empty:  # the provider answers for a known one when it is asked to end it again
            return machine
        needed = 1 if machine.instance else LISTS_THAT_PROVE
        if machine.missed_lists + 1 >= needed:
            return _enter(machine, "gone", now, machine.reason)
        return machine.with_fields(missed_lists=machine.missed_lists + 1)
    if event.empty or (machine.heard_at is not None and machine.heard_at > event.at - timeouts.lost_after):
        return machine
    if machine.missed_lists + 1 >= LISTS_THAT_PROVE:
        return _enter(machine, "gone", now, "not_listed")
    return machine.with_fields(missed_lists=machine.missed_lists + 1)


def _visible_from(machine: Machine, timeouts: MachineTimeouts) -> float:
    """Return the time from which every list must have the machine's instance, if there is one."""
    last = max(machine.launch_called_at or machine.requested_at, machine.launched_at or 0.0)
    return last + timeouts.listed_after


def _fenced(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    return _enter(machine, "terminating", now, "lost") if machine.state == "lost" else machine


def _end_called(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    return machine.with_fields(end_called_at=now) if machine.state == "terminating" else machine


def _tick(machine: Machine, event: MachineEvent, now: float, timeouts: MachineTimeouts) -> Machine:
    """Apply the time-outs. `seen.at` is since when reports could arrive: before, silence proves nothing."""
    if machine.state == "requested":
        waited = now - _not_after(machine.state_since, now, event.at)  # a repeated call begins no new wait
        late = machine.launch_calls > 0 and waited > timeouts.request_timeout
        return _enter(machine, "terminating", now, "no_answer") if late else machine
    if machine.state in ("booting", "joining"):
        waited = now - _not_after(machine.launched_at, now, event.at)
        late = waited > timeouts.spin_up_timeout and now - event.at > timeouts.lost_after
        return _enter(machine, "terminating", now, "spin_up_timeout") if late else machine
    if machine.state == "draining" and machine.deadline is not None and now >= machine.deadline:
        return _enter(machine, "terminating", now, machine.drain or "idle")
    heard = max(event.at, _not_after(machine.heard_at, now, event.at))
    silent = machine.state in ("ready", "draining") and now - heard > timeouts.lost_after
    return _enter(machine, "lost", now, "silent") if silent else machine


Rule = Callable[[Machine, MachineEvent, float, MachineTimeouts], Machine]
_RULES: Mapping[MachineEventKind, Rule] = {
    "launch_called": _launch_called,
    "listed": _listed,
    "refused": _refused,
    "throttled": _throttled,
    "joined": _joined,
    "initialised": _initialised,
    "init_failed": _init_failed,
    "heard": _heard,
    "needed": _needed,
    "moving": _moving,
    "unneeded": _unneeded,
    "withdrawn": _withdrawn,
    "drain": _drain,
    "spot_notice": _spot_notice,
    "vacant": _vacant,
    "stopped": _stopped,
    "ended": _ended,
    "not_found": _not_found,
    "absent": _absent,
    "fenced": _fenced,
    "end_called": _end_called,
    "tick": _tick,
}
