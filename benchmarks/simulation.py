"""Simulate Makeway on public cluster traces: Helios Earth (Q1), Microsoft ITP (Q2), and how small it may be (Q3).

`python -m benchmarks.simulation [TRACES] [--only Q1] [--json FILE]`; TRACES holds helios_earth_2020_05/ and itp_2021/.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from makeway_quota.control.reason_throttle import NOT_BEFORE_SLACK
from makeway_quota.engine.snapshot import GPU, Settings
from makeway_quota.history.durations import Durations
from makeway_quota.simulate.baselines import baseline
from makeway_quota.simulate.cluster import SimulatedCluster, of_quotas, profile_name
from makeway_quota.simulate.incremental import Forecasts, IncrementalPlanner
from makeway_quota.simulate.meter import HOUR
from makeway_quota.simulate.replay import Outcome, replay
from makeway_quota.simulate.report import percentile, summary
from makeway_quota.simulate.trace import Arrival, read_trace

from .measure import machine
from .numbers import insert, markdown, page_for

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
PAGE = "docs/reference/simulator.md"
DAYS = 60 * 86_400
YIELDS_AFTER = 40 * 3600.0
"""A quarter of the ITP jobs of 8 GPUs or more run for more than 16 hours and do three quarters of their work."""
RECLAIM_AFTER = {0.8: 0.0, 0.9: 450.0}
"""Seconds that jobs wait for free GPUs before a job is preempted: on the fuller cluster saving costs more."""
STATIC_RHO = 0.5
"""Static partitions at this load take 2,336 GPUs for the ITP jobs."""


@dataclass(frozen=True, slots=True)
class Line:
    """One number with its goal."""

    check: str
    what: str
    value: float
    goal: str
    met: bool


def helios(traces: Path) -> tuple[dict[str, int], list[Arrival]]:
    """Read demand by the minute as one-GPU jobs that come when it rises and go, newest first, when it falls."""
    quotas: dict[str, int] = {}
    result: list[Arrival] = []
    open_: dict[str, list[tuple[str, float]]] = defaultdict(list)
    last = 0.0
    with gzip.open(traces / "helios_earth_2020_05" / "earth_vc_minutes.csv.gz", "rt", newline="") as text:
        for row in csv.DictReader(text):
            team, at = row["vc"], 60.0 * int(row["minute"])
            quotas[team] = int(row["quota_gpu"])
            demand, units, last = int(row["running_gpu"]) + int(row["pending_gpu"]), open_[team], at
            while len(units) > demand:
                id, since = units.pop()
                result.append(Arrival(id, team, GPU, since, 0.0, team, until=at))
            while len(units) < demand:
                units.append((f"{team}-{int(at):07}-{len(units):04}", at))
    for team, units in open_.items():
        result += [Arrival(id, team, GPU, since, 0.0, team, until=last + 60.0) for id, since in units]
    return quotas, result


def itp(traces: Path, rho: float) -> tuple[dict[str, int], list[Arrival]]:
    """Read the jobs; a team's quota is its mean demand / rho or its largest gang, in whole nodes."""
    arrivals = read_trace(traces / "itp_2021" / "itp_jobs.csv.gz")
    hours: dict[str, float] = defaultdict(float)
    gang: dict[str, int] = defaultdict(int)
    for a in arrivals:
        hours[a.team] += a.gpus / GPU * a.duration
        gang[a.team] = max(gang[a.team], a.gpus // GPU)
    return {team: 8 * math.ceil(max(hours[team] / DAYS / rho, gang[team]) / 8) for team in hours}, arrivals


def played(
    inventory: SimulatedCluster, arrivals: Sequence[Arrival], restart: float = 60.0, forecasts: Forecasts | None = None
) -> Outcome:
    """Play a trace through the engine, with a word on how far it is."""
    planner = IncrementalPlanner(inventory, Counter(profile_name(a.gpus) for a in arrivals), forecasts)
    learns = forecasts.durations if forecasts else None
    return replay(inventory, arrivals, planner, restart=restart, durations=learns, progress=_progress(inventory.name))


def as_configured(rho: float, quotas: Mapping[str, int], arrivals: Sequence[Arrival]) -> SimulatedCluster:
    """Return the policy for the ITP jobs: small ones first in the pool, long-running ones yield, reclaim is patient."""
    sizes, settings, patience = {a.gpus for a in arrivals}, Settings(yields_after=YIELDS_AFTER), RECLAIM_AFTER[rho]
    return of_quotas(f"ITP rho {rho}", quotas, sizes, settings=settings, small_first=True, reclaim_after=patience)


def _progress(name: str) -> Callable[[float], None]:
    began, last = time.monotonic(), [-1]

    def show(part: float) -> None:
        if int(100 * part) > last[0]:
            last[0] = int(100 * part)
            print(f"\r{name}: {last[0]} %, {time.monotonic() - began:.0f} s ", end="", file=sys.stderr, flush=True)

    return show


def earth(traces: Path) -> list[Line]:
    """Q1: demand that is not met, and guarantees that are not served."""
    quotas, arrivals = helios(traces)
    inventory = of_quotas("Helios Earth", quotas, {a.gpus for a in arrivals}, grace=0.0)
    outcome = played(inventory, arrivals, restart=0.0)
    unmet = outcome.meter.waited / GPU / (outcome.ended - outcome.began)
    guarantee = outcome.meter.unserved_gpu_hours
    return [
        Line("Q1", "GPUs not met, mean", unmet, "<= 0.27", unmet <= 0.27),
        Line("Q1", "GPU-h below min(quota, demand)", guarantee, "0", guarantee == 0),
    ]


GOALS = {0.8: (295.0, 0.16, 0.57, 0.81), 0.9: (1757.0, 0.93, 3.82, 2.86)}
"""rho to (unserved GPU-h, mean delay, 95 %, mean of >= 8 GPUs), in hours."""


@cache
def replayed(traces: Path, rho: float) -> tuple[dict[str, Any], float]:
    """Return the report of the ITP jobs, as `makeway-quota simulate` plays them, and the seconds it took."""
    quotas, arrivals = itp(traces, rho)
    began = time.perf_counter()
    got = summary(played(as_configured(rho, quotas, arrivals), arrivals))
    return got, time.perf_counter() - began


def lateness(traces: Path, rho: float, expected: dict[str, Any]) -> list[float]:
    """Play the jobs again with forecasts, which change no decision; return the seconds from forecast to start."""
    quotas, arrivals = itp(traces, rho)
    forecasts = Forecasts(Durations())
    assert summary(played(as_configured(rho, quotas, arrivals), arrivals, forecasts=forecasts)) == expected
    return forecasts.early


def clusters(traces: Path, rho: float) -> list[Line]:
    """Q2: delays, guarantees, waste and speed on the ITP jobs."""
    got, took = replayed(traces, rho)
    unserved, mean, p95, big = GOALS[rho]
    asked = [
        ("unserved GPU-h", got["unserved_guarantee_gpu_h"], unserved),
        ("waste %", got["waste_percent"], 0.05),
        ("mean delay h", got["delay_mean_h"], mean),
        ("p95 delay h", got["delay_p95_h"], p95),
        (">= 8 GPUs mean delay h", got["delay_big_mean_h"], big),
        ("seconds for all 69,351 jobs", took, 60.0),
    ]
    lines = [Line("Q2", f"rho {rho}: {what}", value, f"< {goal:g}", value < goal) for what, value, goal in asked]
    return lines + _forecast_lines(rho, lateness(traces, rho, got))


def _forecast_lines(rho: float, early: Sequence[float]) -> list[Line]:
    """Return how often a job started before its forecast, and how long after it the others started."""
    held = 100 * sum(seconds >= -NOT_BEFORE_SLACK for seconds in early) / max(1, len(early))
    lines = [Line("Q2", f"rho {rho}: forecasts that hold, % of {len(early)}", held, ">= 90", held >= 90)]
    for name, part in (("half", 0.5), ("nine of ten", 0.9)):
        hours = percentile(early, part) / HOUR
        lines.append(Line("Q2", f"rho {rho}: {name} start no later after it than h", hours, "-", True))
    return lines


def smallest(traces: Path) -> list[Line]:
    """Q3: Makeway on 1,344 GPUs beside static partitions on 2,336."""
    quotas, arrivals = itp(traces, STATIC_RHO)
    sizes = {a.gpus for a in arrivals}
    static = summary(baseline("static", of_quotas("static", quotas, sizes), arrivals))
    ours, _ = replayed(traces, 0.9)
    lines = [Line("Q3", f"GPUs (static has {sum(quotas.values())})", ours["gpus"], "<= 1344", ours["gpus"] <= 1344)]
    for key in ("delay_mean_h", "delay_p95_h", "delay_big_mean_h", "unserved_guarantee_gpu_h"):
        lines.append(Line("Q3", key, ours[key], f"<= {static[key]:g}", ours[key] <= static[key]))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print, write JSON; exit status 1 where a goal is missed, 2 without the traces."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("traces", nargs="?", type=Path, default=TRACES, help="the folder of public traces")
    parser.add_argument("--only", action="append", choices=["Q1", "Q2", "Q3"], help="may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers")
    into = f"write the table into this page (e.g. {PAGE})"
    parser.add_argument("--page", type=page_for("simulation"), metavar="FILE", help=into)
    wanted = parser.parse_args(arguments)
    if not (wanted.traces / "itp_2021").is_dir():
        print(f"There are no traces at {wanted.traces}: give the folder that holds itp_2021/.", file=sys.stderr)
        return 2
    checks = wanted.only or ["Q1", "Q2", "Q3"]
    lines = earth(wanted.traces) if "Q1" in checks else []
    for rho in GOALS if "Q2" in checks else ():
        lines += clusters(wanted.traces, rho)
    lines += smallest(wanted.traces) if "Q3" in checks else []
    print(f"\n{machine()}\n", file=sys.stderr)
    for line in lines:
        print(f"{line.check}  {line.what:<40} {line.value:>10.4g}  {line.goal:<10} {'yes' if line.met else 'NO'}")
    if wanted.json:
        rows = [{"check": x.check, "what": x.what, "value": x.value, "goal": x.goal, "met": x.met} for x in lines]
        wanted.json.write_text(json.dumps({"machine": machine(), "checks": rows}, indent=1) + "\n", encoding="utf-8")
    if wanted.page:
        cells = [(x.check, x.what, f"{x.value:.4g}", x.goal, "yes" if x.met else "NO") for x in lines]
        insert(wanted.page, "simulation", markdown(("check", "what", "value", "goal", "met"), cells))
    return 0 if all(line.met for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
