"""Read the last line that a notebook server wrote: it says why the server ended."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL = 64 * 1024
"""Bytes at the end of a log in which the last line is looked for."""
_MAX_CHARACTERS = 300
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def last_line(text: str) -> str:
    """Return the last line that is not empty, without colours and control characters, 300 characters at most."""
    lines = (_CONTROL.sub("", line).strip() for line in reversed(text.splitlines()))
    result = next((line for line in lines if line), "")
    return result if len(result) <= _MAX_CHARACTERS else f"{result[: _MAX_CHARACTERS - 1]}…"


def last_line_of(path: Path) -> str:
    """Return the last line of a log file; empty where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            return last_line(file.read().decode("utf-8", "replace"))
    except OSError:
        return ""


def quoted(line: str) -> str:
    """Return a sentence with the last line, with a space before it; empty where there is none."""
    return f" The last line of its log: {line.rstrip('.')}." if line else ""
