"""How numbers and names are put into sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .state import GPU, Workload


def number(milli: int) -> int | float:
    """Write milli-GPUs as GPUs: 3, 0.5."""
    return milli // GPU if milli % GPU == 0 else milli / GPU


def gpus(milli: int) -> str:
    """Write an amount with its noun: `1 GPU`, `3 GPUs`, `0.5 GPU`."""
    return f"{number(milli)} GPU" if milli <= GPU and milli > 0 else f"{number(milli)} GPUs"


def count(many: int, noun: str, nouns: str = "") -> str:
    """Write a count with its noun in the right form."""
    return f"{many} {noun}" if many == 1 else f"{many} {nouns or noun + 's'}"


def listed(words: Sequence[str], most: int = 4) -> str:
    """Join names: `a`, `a and b`, `a, b and 3 more`."""
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def amounts(per_name: Iterable[tuple[str, int]]) -> str:
    """Write who has how much: `alice 2, bob 2`."""
    return ", ".join(f"{name} {number(milli)}" for name, milli in per_name)


def seconds(duration: float) -> str:
    """Write a duration as people say it: `30 s`, `5 min`, `2 h`."""
    if duration < 120:
        return f"{round(duration)} s"
    return f"{round(duration / 60)} min" if duration < 7200 else f"{round(duration / 3600)} h"


def who(workload: Workload, team: str) -> str:
    """Name a workload with its team and owner."""
    owner = f" of {workload.owner}" if workload.owner else ""
    return f"{team}'s {workload.kind} {workload.id}{owner}"


def this(workload: Workload) -> str:
    """Point at a workload: `this session`, `this job`."""
    return f"this {workload.kind}"
