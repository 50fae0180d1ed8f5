"""Hold measurements: samples, their summary, the goal, and a baseline from the same run to compare with."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

STEPS = 2_000_000
"""How many steps of a loop are timed to say how fast a machine is."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the report. `value` is the median of `samples`; a goal is an upper bound in the same unit.

    The goal is one for the median or, with `at_95`, for 95 of 100 samples.
    """

    name: str
    unit: str
    samples: Sequence[float]
    baseline_name: str
    baseline: float
    goal: float | None = None
    note: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    at_95: bool = False

    @property
    def value(self) -> float:
        """The median."""
        return median(self.samples)

    @property
    def worst(self) -> float:
        """The value that 95 of 100 samples stay below (the largest of fewer than 20)."""
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]

    @property
    def ratio(self) -> float:
        """How many times the baseline."""
        return self.value / self.baseline if self.baseline else math.inf

    @property
    def met(self) -> bool | None:
        """Whether the goal holds; None without one."""
        return None if self.goal is None else (self.worst if self.at_95 else self.value) <= self.goal

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.value,
            "p95": self.worst,
            "samples": list(self.samples),
            "goal": self.goal,
            "met": self.met,
            "baseline": {"name": self.baseline_name, "value": self.baseline, "ratio": self.ratio},
            "note": self.note,
            **self.facts,
        }


HEAD = ("what", "median", "95 %", "goal", "met", "baseline of the same run", "ratio")


def row(item: Measured) -> tuple[str, ...]:
    """One measurement as the cells of a table."""
    met = {True: "yes", False: "NO", None: "–"}[item.met]
    goal = f"< {number(item.goal)} {item.unit}{' (95 %)' if item.at_95 else ''}" if item.goal is not None else "–"
    base = f"{item.baseline_name}: {number(item.baseline)} {item.unit}"
    value, worst = f"{number(item.value)} {item.unit}", f"{number(item.worst)} {item.unit}"
    return (item.name, value, worst, goal, met, base, f"{number(item.ratio)}×")


def report(measurements: Sequence[Measured]) -> str:
    """Return the measurements as a table for a terminal."""
    rows = [HEAD, *map(row, measurements)]
    widths = [max(len(cells[at]) for cells in rows) for at in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in rows]
    notes = [f"  {one.name}: {one.note}" for one in measurements if one.note]
    return "\n".join([machine(), "", *lines, "", *notes])


def with_section(page: str, title: str, measurements: Sequence[Measured]) -> str:
    """Return docs/benchmarks.md with this section made anew, or added at the end."""
    head, *sections = page.split("\n## ")
    made = {text.partition("\n")[0]: text.rstrip("\n") + "\n" for text in sections}
    lines = [
        f"{title}\n",
        f"Measured on: {machine()}.\n",
        f"| {' | '.join(HEAD)} |",
        f"|{'---|' * len(HEAD)}",
        *(f"| {' | '.join(row(one))} |" for one in measurements),
        "",
        *(f"- **{one.name}**: {one.note}" for one in measurements if one.note),
        "",
    ]
    made[title] = "\n".join(lines)
    return "\n## ".join([head.rstrip("\n") + "\n", *made.values()])


def number(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine() -> str:
    """Return the machine in generic words: cores, memory, processor, and how fast it is at the moment."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    python = (
        f"Python {platform.python_version()} (speed of a plain Python loop: {pace() / 1e6:.0f} million steps a second)"
    )
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {processor()}, {python}"


def pace() -> float:
    """Measure steps of a plain loop a second, the best of five: a shared machine is not always as fast."""
    tries = []
    for _ in range(5):
        began, total = time.perf_counter(), 0
        for step in range(STEPS):
            total += step
        tries.append(time.perf_counter() - began)
    return STEPS / min(tries)


def processor() -> str:
    """Return the processor's model, as Linux names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
