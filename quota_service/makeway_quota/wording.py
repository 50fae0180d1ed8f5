"""Numbers as people say them: GPUs, durations, lists of names."""

from __future__ import annotations

from collections.abc import Sequence

from .engine.phrases import count, gpus, number

__all__ = ["count", "duration", "gpus", "gpus_are", "names", "number"]


def gpus_are(milli: int) -> str:
    """Return an amount of GPUs with its verb: `0.5 GPU is`, `1 GPU is`, `2 GPUs are`."""
    return f"{gpus(milli)} {'is' if 0 < milli <= 1000 else 'are'}"


def duration(seconds: float) -> str:
    """Say a duration in its two largest units: 45 s, 4 min, 2 h 5 min, 3 d."""
    if 0.05 <= seconds < 0.95:
        return f"{seconds:.1f} s"
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
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
