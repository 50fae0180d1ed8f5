"""Numbers as people say them: GPUs, durations, lists of names."""

from __future__ import annotations

from collections.abc import Sequence


def number(milli: int) -> str:
    """Say milli-GPUs as GPUs: 1000 → 1, 500 → 0.5."""
    return f"{milli / 1000:g}"


def gpus(milli: int) -> str:
    """Say a quantity of GPUs with its noun: 1 GPU, 2 GPUs, 0.5 GPUs."""
    return f"{number(milli)} GPU{'' if milli == 1000 else 's'}"


def count(n: int, noun: str) -> str:
    """Say a count with its noun: 1 job, 2 jobs."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    """Say a duration in its two largest units: 45 s, 4 min, 2 h 5 min, 3 d."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s" if seconds >= 1 or whole else f"{max(0.0, seconds):.1f} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172_800:
        hours, minutes = divmod(whole // 60, 60)
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(whole // 3600, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def names(all_names: Sequence[str], most: int = 5) -> str:
    """Say a list of names: a, b and c; and how many more beyond `most`."""
    shown = list(all_names[:most])
    if len(all_names) > most:
        shown.append(f"{len(all_names) - most} more")
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1] if shown else ""
