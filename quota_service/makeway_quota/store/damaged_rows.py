"""Read what can be read of a workload's row that is damaged, so that it hides and stops no other.

`rows.workload` calls this where a row is not what the service writes: its database was edited or restored in part, or
its disk lost bytes. Each field that cannot be read counts as if it had never been set; the world reports such rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .records import ENDED, LIVE_STATES

Types = tuple[type, ...]
_TEXT: Types = (str,)
_WHOLE: Types = (int,)
_NUMBER: Types = (float, int)
_NONE = type(None)

KINDS, PRIORITIES, STATES = ("job", "session"), ("low", "normal", "high"), (*LIVE_STATES, *ENDED)

FIELDS: Mapping[str, tuple[Types, Any]] = {
    **dict.fromkeys(("id", "profile", "owner", "name", "signal", "reason_code", "reason_message"), (_TEXT, "")),
    **dict.fromkeys(("message", "server"), (_TEXT, "")),
    **dict.fromkeys(("team", "image", "failed_node", "evicted_for", "clone_of"), ((str, _NONE), None)),
    **dict.fromkeys(("attempt", "preemptions", "failures", "infra_failures", "max_failures"), (_WHOLE, 0)),
    **dict.fromkeys(("gpus", "cpu", "memory", "start_tries", "weight"), (_WHOLE, 0)),
    **dict.fromkeys(("workers", "min_workers", "version"), (_WHOLE, 1)),
    **dict.fromkeys(("submitted_at", "ran"), (_NUMBER, 0.0)),
    **dict.fromkeys(("started_at", "ended_at", "time_limit", "not_before"), ((*_NUMBER, _NONE), None)),
    **dict.fromkeys(("checkpoint_at", "expires_at", "launched_at"), ((*_NUMBER, _NONE), None)),
    **dict.fromkeys(("exit_code", "checkpoint_step"), ((*_WHOLE, _NONE), None)),
    **dict.fromkeys(("over_quota", "cancel_requested", "server_started"), ((bool,), False)),
    "preemptible": ((bool,), True),
    "grace": (_NUMBER, 30.0),
    "kind": (_TEXT, "job"),
    "priority": (_TEXT, "normal"),
    "state": (_TEXT, "pending"),
}
"""The types of each field that is no JSON, and what it is read as where it is damaged"""
EMPTY: Mapping[str, Any] = {
    "reason_numbers": {},
    "borrowed_from": (),
    "placement": (),
    "nomination": (),
    "notice": None,
    "lost_on": (),
    "avoids": (),
}
"""What a field of JSON is read as where it is damaged"""
CHOICES = {"kind": KINDS, "priority": PRIORITIES, "state": STATES}


def faults(names: Sequence[str], values: Sequence[Any]) -> list[str]:
    """Return the fields, JSON aside, whose values are none that the service writes."""
    result = []
    for name, value in zip(names, values, strict=False):
        if name in FIELDS and (type(value) not in FIELDS[name][0] or (name in CHOICES and value not in CHOICES[name])):
            result.append(name)
    return result


def repaired(
    names: Sequence[str], row: Sequence[Any], decoders: Mapping[str, Callable[[Any], Any]]
) -> tuple[list[Any], list[str]]:
    """Return the fields of a row, those that cannot be read as if they had never been set, and which those are."""
    values, damaged = list(row), faults(names, row)
    for at, name in enumerate(names):
        if name in damaged:
            values[at] = FIELDS[name][1]
        elif name in decoders:
            try:
                values[at] = decoders[name](row[at])
            except Exception:
                values[at] = EMPTY[name]
                damaged.append(name)
    return values, damaged
