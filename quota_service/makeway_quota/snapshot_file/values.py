"""How single values of a snapshot file are read, and what is said when they are wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from ..engine import GPU
from ..engine.state import PRIORITIES

Reader = Callable[[Any, str], Any]


class SnapshotError(ValueError):
    """What is wrong with a snapshot file, in one line that names the place."""


def fail(place: str, wanted: str, value: object) -> SnapshotError:
    return SnapshotError(f"{place}: expected {wanted}, found {json.dumps(value, default=str)[:60]}")


def name(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise fail(place, "a name", value)
    return value


def maybe_text(value: Any, place: str) -> str:
    return "" if value is None else str(value)


def yes_no(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise fail(place, "true or false", value)
    return value


def number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise fail(place, "a number", value)
    return float(value)


def not_negative(value: Any, place: str) -> float:
    found = number(value, place)
    if found < 0:
        raise fail(place, "a number that is not negative", value)
    return found


def whole(value: Any, place: str) -> int:
    found = not_negative(value, place)
    if found != int(found):
        raise fail(place, "a whole number", value)
    return int(found)


def integer(value: Any, place: str) -> int:
    found = number(value, place)
    if found != int(found):
        raise fail(place, "a whole number", value)
    return int(found)


def thousandths(value: Any, place: str) -> int:
    return round(not_negative(value, place) * 1000)


def gpus_each(value: Any, place: str) -> int:
    milli = thousandths(value, place)
    if milli > GPU and milli % GPU:
        raise fail(place, "whole GPUs, or a share of one", value)
    return milli


def moment(value: Any, place: str) -> float:
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise fail(place, "a time such as 2026-01-01T12:00:00Z, or seconds", value) from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return number(value, place)


def one_of(*names: str) -> Reader:
    def read(value: Any, place: str) -> str:
        if value is None and "None" in names:
            return "None"
        if value not in names:
            raise fail(place, f"one of {', '.join(names)}", value)
        return str(value)

    return read


def priority(value: Any, place: str) -> int:
    if isinstance(value, str):
        if value not in PRIORITIES:
            raise fail(place, f"one of {', '.join(PRIORITIES)}, or a number", value)
        return PRIORITIES[value]
    return integer(value, place)


def maybe(read: Reader) -> Reader:
    return lambda value, place: None if value is None else read(value, place)


def listed(read: Reader) -> Reader:
    def many(value: Any, place: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise fail(place, "a list", value)
        return tuple(read(each, f"{place}[{at}]") for at, each in enumerate(value))

    return many


def ranks(value: Any, place: str) -> tuple[tuple[str, ...], ...]:
    return tuple(
        listed(name)(each, f"{place}[{at}]") if isinstance(each, list) else (name(each, f"{place}[{at}]"),)
        for at, each in enumerate(listed(lambda each, _: each)(value, place))
    )
