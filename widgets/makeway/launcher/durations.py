"""Write durations as the service does, from which the launcher imports nothing: `1 min 30 s`."""

from __future__ import annotations

UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def duration(seconds: float) -> str:
    """Return a duration in its two largest units, as `makeway_api.durations.duration` does."""
    if 0.05 <= seconds < 0.95:
        return f"{seconds:.1f} s"
    whole = max(0, int(seconds + 0.5))
    for at, (unit, length) in enumerate(UNITS[:-1]):
        if whole >= length:
            smaller, part = UNITS[at + 1]
            rest = whole % length // part
            return f"{whole // length} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"
