"""Read JSON that other people's programs wrote, whatever it is: deep, huge, cut off, or no JSON at all.

Every reader of such bytes uses this one: files of a job, messages of pods, answers of the Hub. What it returns can be
stored, compared, rendered and sent: it is nested `MAX_DEPTH` deep at most, its numbers are finite and fit 64 bits (what
is not counts as null), and its texts are valid Unicode without NUL.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 32
"""Levels of lists and tables; a report has one, the metadata of an object of Kubernetes has five"""
MAX_INT = 2**63
FOREVER = 1e11
"""Seconds since the epoch that no clock shows; NaN and infinity are not below it."""
MAX_STEP = 2**53
"""The first integer that not every JSON reader and database keeps exactly"""
NOT_JSON = "it is not valid JSON"


class UnreadableJson(Exception):
    """The bytes are nothing that can be used; the sentence says why, without a capital and a full stop."""


def read_value(data: bytes | str, limit: int) -> Any:
    """Return the value of JSON of at most `limit` bytes; UnreadableJson for anything else."""
    if len(data) > limit:
        raise UnreadableJson(f"it is larger than {limit // 1024} KiB")
    try:
        return _plain(json.loads(data, parse_constant=lambda name: None), 0)
    except RecursionError:
        raise UnreadableJson("it is nested too deeply") from None
    except ValueError:  # also what is not UTF-8, and integers of thousands of digits
        raise UnreadableJson(NOT_JSON) from None


def read_table(data: bytes | str, limit: int) -> dict[str, Any]:
    """Return the object of JSON of at most `limit` bytes; UnreadableJson for anything else."""
    value = read_value(data, limit)
    if not isinstance(value, dict):
        raise UnreadableJson("it is not a JSON object")
    return value


def number(value: object) -> float | None:
    """Return a time in Unix seconds or a duration; None for what is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if -FOREVER < value < FOREVER else None


def whole(value: object, limit: int = MAX_STEP - 1) -> int | None:
    """Return an integer from -`limit` to `limit`; None for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if -limit <= value <= limit else None


def text(value: object, limit: int) -> str:
    """Return at most `limit` characters of a text that can be stored and sent; "" for what is no text."""
    return _clean(value[:limit]) if isinstance(value, str) else ""


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, dict | list) and depth >= MAX_DEPTH:
        return None
    if isinstance(value, dict):
        return {_clean(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -MAX_INT <= value < MAX_INT else None
    return value


def _clean(given: str) -> str:
    if given.isascii() and "\0" not in given:
        return given
    return given.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
