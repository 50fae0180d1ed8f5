"""Convert machines to rows and back; what cannot be read of a damaged row is read as what is safest.

A machine whose row is damaged stays a machine: without it its instance would belong to no row, and be ended with the
work on it. Its price is unknown then, which is never zero; a state that cannot be read is `lost` where an agent has
joined, which its next report ends, and else `terminating`, as nothing runs there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from ...autoscale.machine import STATES, DrainReason, Machine, Market
from .. import rows

MACHINE_FIELDS = tuple(one.name for one in fields(Machine))
ROW_FIELDS = tuple(name for name in MACHINE_FIELDS if name != "request")
"""The fields in the row itself; the request, which never changes, is in a table of its own"""
COLUMN_OF: Mapping[str, str] = {
    **{name: name for name in MACHINE_FIELDS},
    **{"state_since": "since", "launch_calls": "calls", "launch_called_at": "called_at", "missed_lists": "absences"},
}
"""The column of each field"""
COLUMNS = tuple(COLUMN_OF[name] for name in ROW_FIELDS)

_NONE = type(None)
_TIMES = ("requested_at", "state_since", "needed_at")
TYPES: Mapping[str, tuple[tuple[type, ...], Any]] = {
    **dict.fromkeys(("deployment", "pool", "type", "zone", "request", "reason"), ((str,), "")),
    "market": ((str,), "on_demand"),
    "state": ((str,), ""),
    **dict.fromkeys(("instance", "boot", "drain"), ((str, _NONE), None)),
    **dict.fromkeys(("gpus", "version", "term", "launch_calls", "missed_lists"), ((int,), 0)),
    **dict.fromkeys(("price", "attempts"), ((int, _NONE), None)),
    **dict.fromkeys(_TIMES, ((float,), 0.0)),
    **dict.fromkeys(("launch_called_at", "end_called_at", "launched_at", "ready_at"), ((float, _NONE), None)),
    **dict.fromkeys(("heard_at", "deadline"), ((float, _NONE), None)),
}
"""The types of each field, and what it is read as where it is damaged"""
CHOICES: Mapping[str, frozenset[str | None]] = {
    "state": frozenset(STATES),
    "market": frozenset(get_args(Market)),
    "drain": frozenset((*get_args(DrainReason), None)),
}


def machines(selected: Iterable[Any], damaged: dict[str, Sequence[str]] | None = None) -> list[Machine]:
    """Return the machines of rows; one whose id is no text, which nothing can name, is left out."""
    result = []
    for row in selected:
        if type(row.id) is str:
            result.append(machine(row, damaged))
        elif damaged is not None:
            damaged[repr(row.id)] = ["id"]
    return result


def machine(row: Any, damaged: dict[str, Sequence[str]] | None = None) -> Machine:
    """Return the machine of a row with all of MACHINE_FIELDS; `damaged` gets the columns that could not be read."""
    columns = row._mapping
    values: dict[str, Any] = {**columns, **{name: columns[COLUMN_OF[name]] for name in MACHINE_FIELDS}}
    broken = [name for name in MACHINE_FIELDS if name != "id" and not readable(name, values[name])]
    if broken:
        _repair(values, broken)
        if damaged is not None:
            damaged[values["id"]] = [COLUMN_OF[name] for name in broken]
    return Machine(**{name: values[name] for name in MACHINE_FIELDS})


def readable(name: str, value: object) -> bool:
    """Whether a value of a row is one that the service writes."""
    kinds, _ = TYPES[name]
    if type(value) not in kinds or (type(value) is float and not math.isfinite(value)):
        return False
    return name not in CHOICES or value in CHOICES[name]


def repaired(row: Any, kinds: Mapping[str, tuple[type, Any]]) -> dict[str, Any] | None:
    """Return the columns of a row of another table; one of another type is its default, None: the row has no use."""
    values = dict(row._mapping)
    for name, (kind, default) in kinds.items():
        if type(values[name]) is not kind:
            if default is None:
                return None
            values[name] = default
    return values


def _repair(values: dict[str, Any], broken: Sequence[str], clock: Callable[[], float] = time.time) -> None:
    for name in broken:
        values[name] = TYPES[name][1]
    times = [at for name, at in values.items() if name.endswith("_at") and type(at) is float and at > 0]
    times += [values["state_since"]] if values["state_since"] > 0 else []
    for name in _TIMES:
        if name in broken:  # a time of long ago would cost the money of years, and end every wait
            values[name] = min(times, default=clock()) if name == "requested_at" else max(times, default=clock())
    if "state" in broken:
        over = values.get("over_at") is not None
        values["state"] = "gone" if over else "lost" if values["boot"] is not None else "terminating"


def row_of(machine: Machine) -> dict[str, Any]:
    """Return the columns of a machine, its request aside."""
    values: dict[str, Any] = {COLUMN_OF[name]: rows.clean(getattr(machine, name)) for name in ROW_FIELDS}
    return {**values, "over_at": machine.state_since if machine.finished else None}
