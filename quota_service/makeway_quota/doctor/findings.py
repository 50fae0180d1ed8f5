"""Run checks apart from each other, bounded in time, and order what they find, worst first.

A check that raises, or takes too long, is itself a finding, and the others go on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")
Severity = Literal["error", "warning", "note"]
SEVERITIES: Sequence[Severity] = ("error", "warning", "note")
"""Worst first: it will not work; it may not, or in part; it was not checked"""
SECONDS = 30.0
"""Seconds that one check may take"""


@dataclass(frozen=True, slots=True)
class Finding:
    """What will not work, where, and what to do about it: a sentence each for `what` and `remedy`."""

    severity: Severity
    what: str
    where: str
    remedy: str
    check: str = ""
    """the name of the check"""


class Check(NamedTuple):
    """One look at one thing; the order of checks is that of their importance."""

    name: str
    run: Callable[[], Awaitable[Iterable[Finding]]]


async def find_all(checks: Sequence[Check], seconds: float = SECONDS) -> list[Finding]:
    """Return what all checks find, worst first, then in the order of the checks, then by place and words."""
    result = await asyncio.gather(*(_findings_of(check, seconds) for check in checks))
    ranked = [
        (SEVERITIES.index(finding.severity), number, finding.where, finding.what, finding)
        for number, findings in enumerate(result)
        for finding in findings
    ]
    return [item[-1] for item in sorted(ranked, key=lambda item: item[:-1])]


async def _findings_of(check: Check, seconds: float) -> list[Finding]:
    try:
        async with asyncio.timeout(seconds):
            result = list(await check.run())
    except TimeoutError:
        result = [
            Finding(
                "error",
                f"The check did not end within {seconds:g} s.",
                f"check {check.name}",
                "What it looks at may hang: look at it by hand.",
            )
        ]
    except Exception as error:
        result = [
            Finding(
                "error",
                f"The check failed: {str(error).strip() or type(error).__name__}.".replace("..", "."),
                f"check {check.name}",
                "Fix what it names; if that is nothing of yours, it is a bug in Makeway: report it.",
            )
        ]
    return [Finding(one.severity, one.what, one.where, one.remedy, check.name) for one in result]


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Return what a blocking function returns, called in a thread that the end of the process does not wait for."""
    loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def take(result: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_exception(error) if error is not None else answer.set_result(result)

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except Exception as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(take, result, failure)

    threading.Thread(target=work, daemon=True).start()
    value: T = await answer
    return value
