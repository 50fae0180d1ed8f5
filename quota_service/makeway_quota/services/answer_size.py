"""Bound the bytes of answers: a list ends before the item that would make it too large, a text is cut."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from ..store.pages import first_that_fit
from ..store.records import Attempt, Decision, Workload

MAX_LIST = 3_000_000
"""Bytes of the items of one list; the next page goes on"""
MAX_ATTEMPTS = 1_000_000
"""Bytes of the attempts in the answer about one job: the newest ones"""
MAX_SHOWN = 1_000_000
"""Bytes of a command or a source in the answer about one job; older versions took longer ones"""
MAX_PLACEMENTS = 10_000
"""Workers whose places are shown of one job"""

JOB = 1300
PLACE = 120
ATTEMPT = 400
DECISION = 300
"""Bytes of an item as JSON without what may be long, at least"""


def text_bytes(text: str) -> int:
    """Return the bytes of a text in JSON, in which a control character takes six."""
    return (
        len(text)
        if text.isascii() and text.isprintable()
        else len(orjson.dumps(text.encode("utf-8", "replace").decode()))
    )


def job_bytes(row: Workload) -> int:
    """Return the bytes that a job has in a list, at least."""
    texts = (row.name, row.owner, row.message, row.reason_message, row.image or "")
    numbers = len(orjson.dumps(dict(row.reason_numbers))) if row.reason_numbers else 0
    return JOB + sum(map(text_bytes, texts)) + numbers + PLACE * min(len(row.placement), MAX_PLACEMENTS)


def attempt_bytes(row: Attempt) -> int:
    """Return the bytes that an attempt has in the answer about its job, at least."""
    return ATTEMPT + text_bytes(row.message) + PLACE * min(len(row.placement), MAX_PLACEMENTS)


def decision_bytes(row: Decision) -> int:
    """Return the bytes that a line of the decision log has in a list, at least."""
    return DECISION + text_bytes(row.message) + len(orjson.dumps(dict(row.numbers)))


def newest_attempts(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the newest attempts that fit into the answer about their job, first one first."""
    return first_that_fit(reversed(attempts), attempt_bytes, MAX_ATTEMPTS)[::-1]


def shown_text(text: str, limit: int = MAX_SHOWN) -> str:
    """Return a text that has at most so many bytes in JSON, with a note where its end is left out."""
    if (size := text_bytes(text)) <= limit:
        return text
    kept = text[: limit // 6]
    return f"{kept}\n… ({size - text_bytes(kept):,} more bytes are not shown)"


def shown_words(words: Sequence[str], limit: int = MAX_SHOWN) -> list[str]:
    """Return a command with at most so many bytes, its last word cut."""
    remaining, result = limit, list[str]()
    for word in words:
        result.append(shown_text(word, max(0, remaining)))
        remaining -= text_bytes(word) + 3
        if remaining < 0:
            break
    return result
