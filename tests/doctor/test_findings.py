"""Checks are apart from each other: one that raises or hangs is a finding, and the worst findings come first."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable

import pytest
from makeway_quota.doctor.command import as_json, as_text
from makeway_quota.doctor.findings import Check, Finding, find_all, in_thread


async def note() -> Iterable[Finding]:
    return [Finding("note", "N.", "n", "-"), Finding("error", "E.", "b", "-"), Finding("error", "E.", "a", "-")]


async def warning() -> Iterable[Finding]:
    return [Finding("warning", "W.", "w", "-")]


async def raising() -> Iterable[Finding]:
    raise KeyError("spec")


async def hanging() -> Iterable[Finding]:
    await asyncio.sleep(60)
    return []


async def nothing_in_a_thread() -> Iterable[Finding]:
    await in_thread(time.sleep, 20)
    return []


async def test_the_worst_come_first_and_a_check_that_fails_is_one_of_them() -> None:
    checks = [Check("first", note), Check("second", warning), Check("third", raising), Check("last", hanging)]
    result = await find_all(checks, 0.05)
    assert [(one.severity, one.check, one.where) for one in result] == [
        ("error", "first", "a"),
        ("error", "first", "b"),
        ("error", "third", "check third"),
        ("error", "last", "check last"),
        ("warning", "second", "w"),
        ("note", "first", "n"),
    ]
    assert result[2].what == "The check failed: 'spec'."
    assert result[3].what == "The check did not end within 0.05 s."


async def test_a_thread_that_hangs_is_not_waited_for() -> None:
    (result,) = await find_all([Check("slow", nothing_in_a_thread)], 0.05)
    assert "did not end" in result.what


async def test_what_a_thread_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


def test_text_and_json_say_the_same() -> None:
    result = [Finding("error", "It is full.", "disk", "Make room.", "folders")]
    assert as_text(result).splitlines()[:3] == ["ERROR  It is full.", "  where: disk", "  do:    Make room."]
    (one,) = json.loads(as_json(result))["findings"]
    assert one == {
        "severity": "error",
        "what": "It is full.",
        "where": "disk",
        "remedy": "Make room.",
        "check": "folders",
    }
    assert as_text([]) == "No problems found."
    assert as_text(result).endswith("\n1 error, 0 warnings.")
    notes = [Finding("note", "Not checked.", "n", "-")]
    assert as_text(notes).splitlines()[0::4] == ["NOTE  Not checked.", "0 errors, 0 warnings, 1 note."]
