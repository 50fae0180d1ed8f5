"""Write and read durations, the same in pages, notebooks, commands and messages: `1 min 30 s`."""

from __future__ import annotations

import re

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
_SUFFIXES = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_WRITTEN = re.compile(r"(?:\d+[smhd])+|\d+")


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: `0.4 s`, `45 s`, `1 min 30 s`, `2 h 5 min`, `3 d 4 h`, `2 h`.

    Below one second it has one decimal; the second unit is left out where it is zero. Negative durations are `0 s`.
    The remainder below the second unit is dropped, so that a duration never reads longer than it is.
    """
    if 0.05 <= seconds < 0.95:
        return f"{seconds:.1f} s"
    whole = max(0, int(seconds + 0.5))
    for index, (unit, length) in enumerate(_UNITS[:-1]):
        if whole >= length:
            smaller, smaller_length = _UNITS[index + 1]
            rest = whole % length // smaller_length
            return f"{whole // length} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def parse_duration(text: str) -> int:
    """Return the seconds of `90`, `90s`, `30m`, `2h`, `1h30m` or `1d`; ValueError says what is accepted."""
    written = text.strip().lower().replace(" ", "")
    if not _WRITTEN.fullmatch(written):
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 30m, 2h, 1h30m or 1d.")
    if written.isdigit():
        return int(written)
    return sum(int(n) * _SUFFIXES[suffix] for n, suffix in re.findall(r"(\d+)([smhd])", written))
