"""Measure what machines that come and go cost on the public openb trace, beside the least that any could cost (A1).

`python -m benchmarks.cloud_cost [TRACES] [--page FILE] [--picture FILE]`; TRACES is the folder with openb_gpu_v2023/.
The real engine, sizing and retirement play the tasks through the simulator. The bound is the integral over time of the
GPUs that run, divided by eight and rounded up: no boot, no idle machine, and any packing possible.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from makeway_api.quantities import count
from makeway_quota.autoscale.deployment import Deployment, MachineType, MoveRules
from makeway_quota.engine.snapshot import GPU, Pool, Profile, TeamQuota
from makeway_quota.simulate.cluster import SimulatedCluster
from makeway_quota.simulate.incremental import IncrementalPlanner
from makeway_quota.simulate.replay import replay
from makeway_quota.simulate.report import percentile
from makeway_quota.simulate.trace import Arrival

from . import openb
from .measure import machine
from .numbers import insert, markdown, page_for

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
PAGE = "docs/explanation/autoscaling.md"
IDLE = (0.0, 180.0, 600.0, 1800.0, 3600.0, 7200.0)
"""Seconds without work after which a machine is ended, for each point of the curve; the goal is one for GOAL_IDLE"""
GOAL_IDLE = 600.0
SELDOM, OFTEN = MoveRules(3600.0, 5, 2), MoveRules(300.0, 1, 4)
"""Moves that let tasks wait as seldom as without them, and moves that save more"""


class Goal(NamedTuple):
    """What a run has to reach: cost as a multiple of the bound, seconds of waiting, and moves, each at most."""

    ratio: float
    p95: float
    moves: int | None = None

    def __str__(self) -> str:
        moves = "" if self.moves is None else f", {self.moves} moves"
        return f"<= {self.ratio:.2f}, p95 wait {self.p95:.0f} s{moves}"


class Case(NamedTuple):
    """How tasks are placed, when an idle machine ends, which jobs move, and whether the ends of tasks are known."""

    strategy: Literal["pack", "fill"]
    idle: float
    moves: MoveRules | None = None
    limits: bool = False

    @property
    def rule(self) -> str:
        """What the table says of the moves."""
        if self.moves is None:
            return "–"
        free, most = count(self.moves.free_gpus, "GPU"), count(self.moves.max_jobs, "task")
        return f"every {self.moves.interval / 60:.0f} min, {free} free, at most {most}"


GOALS: Mapping[Case, Goal] = {
    Case("fill", GOAL_IDLE): Goal(1.13, 0.0),
    Case("fill", GOAL_IDLE, SELDOM): Goal(1.10, 0.0, 50),
    Case("fill", GOAL_IDLE, OFTEN): Goal(1.05, 120.0),
}
CASES = (
    *(Case("fill", idle) for idle in IDLE),
    Case("pack", GOAL_IDLE),
    Case("fill", GOAL_IDLE, limits=True),
    Case("fill", GOAL_IDLE, SELDOM),
    Case("fill", GOAL_IDLE, OFTEN),
    Case("fill", GOAL_IDLE, OFTEN, limits=True),
)

DAY = 86_400.0
FROM_DAY = 115
POOL, TEAM = "cloud", "all"
BOOT = 180.0
"""Seconds from a launch until the machine is ready"""
MACHINE = MachineType(
    "gpu-8", POOL, "gpu-8", gpus=8, cpu=128_000, memory=786_432, price=1_000_000, max_machines=100, idle_timeout=600.0
)
"""A machine costs 1 an hour, so that its cost is its hours"""


@dataclass(frozen=True, slots=True)
class CloudRun:
    """What one simulation cost: hours of machines, how many were launched, and how long tasks waited, in seconds."""

    hours: float
    machines: int
    wait_mean: float
    wait_p95: float
    waited: float
    """share of the tasks that waited at all"""
    moves: int = 0
    lost: float = 0.0
    """GPU-hours that moved tasks spent on saving and loading"""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of the report, beside the bound."""

    case: Case
    bound: float
    run: CloudRun

    @property
    def ratio(self) -> float:
        """The cost as a multiple of the bound."""
        return self.run.hours / self.bound

    @property
    def met(self) -> bool | None:
        """Whether the goal holds, None where there is none."""
        goal = GOALS.get(self.case)
        if goal is None:
            return None
        moves = goal.moves is None or self.run.moves <= goal.moves
        return self.ratio <= goal.ratio and self.run.wait_p95 <= goal.p95 and moves

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table row."""
        run, case, met = self.run, self.case, {True: "yes", False: "NO", None: "–"}[self.met]
        goal = str(GOALS[case]) if case in GOALS else "–"
        waits = f"{run.wait_mean:.1f}", f"{run.wait_p95:.0f}", f"{100 * run.waited:.1f}"
        moves = (f"{run.moves}", f"{run.lost:.1f}") if case.moves else ("–", "–")
        how = case.strategy, f"{case.idle:.0f}", case.rule, "yes" if case.limits else "no"
        return *how, f"{run.hours:,.0f}", f"{self.ratio:.3f}", *waits, *moves, goal, met


HEAD = (
    "strategy", "idle timeout s", "moves", "ends known", "machine-hours", "× bound", "mean wait s", "p95 wait s",
    "% that wait", "tasks moved", "GPU-hours lost", "goal", "met",
)  # fmt: skip


def tasks(traces: Path) -> list[tuple[Arrival, Profile]]:
    """Read the tasks with GPUs of the last weeks of the trace, with the profile of each."""
    result = []
    for row in openb.rows(openb.folder(traces) / "openb_pod_list_default.csv.gz"):
        devices = int(row["num_gpu"])
        if not devices or not row["scheduled_time"] or not row["deletion_time"]:
            continue
        created, began, ended = (float(row[f"{name}_time"]) for name in ("creation", "scheduled", "deletion"))
        if created < FROM_DAY * DAY or ended <= began:
            continue
        milli = int(row["gpu_milli"]) if devices == 1 else devices * GPU
        cpu, memory = int(row["cpu_milli"]), int(row["memory_mib"])
        profile = Profile(f"g{milli}-c{cpu}-m{memory}", milli, cpu=cpu, memory=memory, pools=(POOL,))
        profile = replace(profile, policies=((TEAM,),), grace=60.0)
        task = Arrival(row["name"], TEAM, milli, created, ended - began, TEAM, profile.name)
        result.append((task, profile))
    return result


def bound(arrivals: Iterable[Arrival], gpus: int = 8) -> float:
    """Return the hours of machines without boots and idle time, if every task began at once and any packing fitted."""
    changes: Counter[float] = Counter()
    for one in arrivals:
        changes[one.submit] += one.gpus
        changes[one.submit + one.duration] -= one.gpus
    total, running, last = 0.0, 0, 0.0
    for at in sorted(changes):
        total += math.ceil(running / (gpus * GPU)) * (at - last)
        running, last = running + changes[at], at
    return total / 3600


def play(work: Sequence[tuple[Arrival, Profile]], case: Case) -> CloudRun:
    """Play the tasks on machines of one type."""
    pool = Pool(POOL, kind="autoscaled", strategy=case.strategy)
    machine = replace(MACHINE, idle_timeout=case.idle)
    profiles = {profile.name: profile for _, profile in work}
    deployment = Deployment("cloud", "memory", (machine,), max_machines=100, moves=case.moves)
    cluster = SimulatedCluster(
        "openb", (pool,), (), tuple(profiles.values()), (TeamQuota(TEAM),), deployments=(deployment,)
    )
    mix = Counter(profile.name for _, profile in work)
    arrivals = [replace(one, time_limit=one.duration) if case.limits else one for one, _ in work]
    outcome = replay(cluster, arrivals, IncrementalPlanner(cluster, mix), boot=BOOT)
    waits = [done.started - done.submit for done in outcome.meter.finished]
    if len(waits) < len(work):
        raise AssertionError(f"only {len(waits)} of {len(work)} tasks ended")
    (use,) = outcome.machines
    waited = sum(wait > 1 for wait in waits) / len(waits)
    lost = outcome.meter.lost / GPU / 3600
    mean, p95 = sum(waits) / len(waits), percentile(waits, 0.95)
    return CloudRun(use.seconds / 3600, use.machines, mean, p95, waited, outcome.meter.moves, lost)


def measure(traces: Path, case: Case) -> Point:
    """Play the whole trace in one way."""
    work = tasks(traces)
    return Point(case, bound(arrival for arrival, _ in work), play(work, case))


STYLE = """
.back{fill:#ffffff}
text{font:13px system-ui,sans-serif;fill:#1f2328}.line{fill:none;stroke:#0969da;stroke-width:2}.point{fill:#0969da}
.moved{fill:#bc4c00}
.axis{stroke:#59636e;stroke-width:1}.grid{stroke:#59636e;stroke-opacity:.25}
@media(prefers-color-scheme:dark){.back{fill:#0d1117}text{fill:#e6edf3}.line{stroke:#4493f8}.point{fill:#4493f8}.moved{fill:#f0883e}.axis,.grid{stroke:#9198a1}}
"""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 380, 70, 30, 40, 60


def picture(points: Sequence[Point]) -> str:
    """Draw the cost over the part of the tasks that wait for a boot, a point for each idle timeout and rule."""
    points = [one for one in points if one.case.strategy == "fill" and not one.case.limits]
    curve = sorted((one for one in points if one.case.moves is None), key=lambda one: one.case.idle)
    right = math.ceil(max(100 * one.run.waited for one in points)) or 1
    low = math.floor(20 * min(one.ratio for one in points)) / 20
    high = math.ceil(20 * max(one.ratio for one in points)) / 20

    def x(percent: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * percent / right

    def y(ratio: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (ratio - low) / (high - low)

    parts = []
    for percent in range(right + 1):
        parts.append(f'<text x="{x(percent):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{percent} %</text>')
    for step in range(round((high - low) / 0.05) + 1):
        at = low + 0.05 * step
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y(at):.1f}" x2="{WIDTH - RIGHT}" y2="{y(at):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{at:.2f}</text>')
    places = [(x(100 * one.run.waited), y(one.ratio), one) for one in curve]
    parts.append(f'<polyline class="line" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b, _ in places)}"/>')
    for across, up, one in places:
        label = f"{one.case.idle / 60:.0f} min" if one.case.idle else "0"
        parts.append(f'<circle class="point" cx="{across:.1f}" cy="{up:.1f}" r="4"/>')
        parts.append(f'<text x="{across + 6:.1f}" y="{up - 8 if one.case.idle else up + 18:.1f}">{label}</text>')
    for one in (one for one in points if one.case.moves is not None):
        across, up = x(100 * one.run.waited), y(one.ratio)
        parts.append(f'<circle class="moved" cx="{across:.1f}" cy="{up:.1f}" r="5"/>')
        label = f"every {one.case.moves.interval / 60:.0f} min: {one.run.moves} moves" if one.case.moves else ""
        parts.append(f'<text x="{across - 8:.1f}" y="{up + 18:.1f}" text-anchor="end">{label}</text>')
    middle, bottom = (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 15
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>Cost and waiting by idle timeout, and with moves</title><style>{STYLE}</style>"
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>{"".join(parts)}'
        f'<line class="axis" x1="{LEFT}" y1="{HEIGHT - BOTTOM}" x2="{WIDTH - RIGHT}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text x="{middle}" y="{bottom}" text-anchor="middle">tasks that wait for a machine to boot</text>'
        f'<text x="{LEFT - 50}" y="20">cost, as a multiple of the bound; blue: idle timeouts, orange: moves</text>'
        "</svg>\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print, and write the page and the picture; exit status 1 if a goal is missed, 2 without the traces."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cloud_cost", description=__doc__)
    beside = f"default: {TRACES.name} beside the project"
    parser.add_argument("traces", nargs="?", type=Path, default=TRACES, help=beside)
    into = f"write the table into this page (e.g. {PAGE})"
    parser.add_argument("--page", type=page_for("cloud-cost"), metavar="FILE", help=into)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the curve as an SVG picture")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    wanted = parser.parse_args(arguments)
    try:
        openb.folder(wanted.traces)
    except openb.NoTraces as missing:
        print(missing, file=sys.stderr)
        return 2
    with ProcessPoolExecutor(wanted.workers) as pool:
        points = list(pool.map(measure, [wanted.traces] * len(CASES), CASES))
    rows = [one.cells for one in points]
    print("\n".join([machine(), " | ".join(HEAD), *(" | ".join(row) for row in rows)]))
    if wanted.page:
        insert(wanted.page, "cloud-cost", markdown(HEAD, rows))
    if wanted.picture:
        wanted.picture.write_text(picture(points), encoding="utf-8")
    return 1 if any(one.met is False for one in points) else 0


if __name__ == "__main__":
    sys.exit(main())
