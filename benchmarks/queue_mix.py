"""Measure how long 15,000 jobs in 30 queues take through the real service, compared with the work alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from makeway_api.client import Client
from makeway_api.models import Decision

from .idle import TICKS, ticks
from .measure import Measured

ROOT = Path(__file__).resolve().parent.parent
GROUPS = 5
QUEUES = 6
"""in each group, which share a pool and borrow from each other there"""
RESERVED = 20
MAY_BORROW = 100
UNITS = QUEUES * RESERVED
PUBLISHED = 351.0
"""seconds that the best-known queueing system published for this mix, its own test"""
GOAL = 80.0


@dataclass(frozen=True, slots=True)
class Class:
    """One kind of job: how many of them each queue submits, and how often.

    `patience`: seconds that a job waits for free units before others are evicted for it (`reclaim_after`): slightly
    longer than a job of the next smaller class runs, so that its work ends instead of being done twice.
    """

    name: str
    count: int
    units: int
    seconds: float
    priority: str
    every: float
    patience: float = 0.0


CLASSES = (
    Class("small", 350, 1, 0.2, "low", 0.1),
    Class("medium", 100, 5, 0.5, "normal", 0.5, 0.4),
    Class("large", 50, 20, 1.0, "high", 1.2, 0.7),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the decision log says about one run. `admission`: mean seconds from when a job was due to its start."""

    wall: float
    admission: Mapping[str, float]
    evictions: int
    wasted: float
    """unit-seconds of attempts that were stopped"""
    finished: int


def queues() -> list[tuple[str, str]]:
    """Every queue's pool and team; the team's one member has its name, and a token of the same name."""
    return [(f"group{g + 1}", f"group{g + 1}-queue{q + 1}") for g in range(GROUPS) for q in range(QUEUES)]


def classes(share: float) -> list[Class]:
    """Return the classes, with fewer jobs where only a share of the mix is wanted."""
    return [replace(c, count=max(1, round(c.count * share))) for c in CLASSES]


def bound(share: float = 1.0) -> float:
    """Seconds that the work takes if no unit ever idles and no work is done twice."""
    return sum(c.count * c.units * c.seconds for c in classes(share)) / RESERVED


def policy() -> str:
    """Return the policy document: a pool for each group, a team for each queue."""
    pools, profiles, teams = [], [], []
    for group in sorted({group for group, _ in queues()}):
        members = [team for pool, team in queues() if pool == group]
        pools.append(f"  - {{name: {group}, size: {UNITS}}}")
        profiles += [
            f"  - {{name: {group}-{c.name}, gpus: {c.units}, grace: 5, reclaim_after: {c.patience}, "
            f"pools: [{group}], policies: [{members}]}}"
            for c in CLASSES
        ]
        quota = f"{{pools: [{group}], reserved: {RESERVED}, limit: {RESERVED + MAY_BORROW}}}"
        teams += [f"  - {{name: {team}, users: [{team}], quotas: [{quota}]}}" for team in members]
    return "\n".join(["version: 1", "pools:", *pools, "profiles:", *profiles, "policies:", *teams, ""])


def measure(share: float = 1.0) -> Iterator[Measured]:
    """Start the service and the load, each a process of its own; takes about 80 seconds."""
    with tempfile.TemporaryDirectory(prefix="makeway-mix-") as folder:
        command = [sys.executable, "-m", "benchmarks.queue_service", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as service:
            try:
                yield measured(service, Path(folder) / "said.json", share)
            finally:
                service.terminate()


def measured(service: subprocess.Popen[bytes], file: Path, share: float) -> Measured:
    """Run the load against the service until its end and read the log; the load writes its figures into `file`."""
    assert service.stdout is not None
    url = service.stdout.readline().decode().strip()
    begin = ticks(service.pid)
    subprocess.run([sys.executable, "-m", "benchmarks.queue_load", url, str(share), str(file)], check=True, cwd=ROOT)
    record = json.loads(file.read_text(encoding="utf-8"))
    with Client(url, "root") as root:
        wait_for_end(root)
        cpu = (ticks(service.pid) - begin) / TICKS
        return row(outcome(read_log(root), record, share), record, share, cpu, cycle_facts(root))


def wait_for_end(client: Client) -> None:
    """Wait until nothing waits or runs."""
    while client.jobs(state="live", limit=1).jobs:
        time.sleep(0.5)


def read_log(client: Client) -> list[Decision]:
    """Return the whole decision log, oldest first."""
    result: list[Decision] = []
    while True:
        page = client.decisions(limit=1000, before=result[-1].id if result else None)
        result += page
        if len(page) < 1000:
            return result[::-1]


def outcome(log: Sequence[Decision], record: Mapping[str, Any], share: float) -> Outcome:
    """Work out from the log what happened; every job must have finished once, after as many starts as it took."""
    kind = {c.name: c for c in classes(share)}
    due: Mapping[str, float] = record["due"]
    of: Mapping[str, str] = record["class"]
    started_now: dict[str, float] = {}
    first: dict[str, float] = {}
    ends: dict[str, float] = {}
    wasted, evictions = 0.0, 0
    for line in log:
        id, at = line.workload or "", line.at.timestamp()
        if line.verb == "start":
            assert id not in started_now, f"{id} was started twice"
            started_now[id] = at
            first.setdefault(id, at)
        elif line.verb in ("finish", "requeue"):
            units = kind[of[id]].units
            took = at - started_now.pop(id)
            if line.verb == "finish":
                assert id not in ends, f"{id} ended twice"
                ends[id] = at
            else:
                wasted += units * took
        elif line.verb == "evict":
            evictions += 1
    assert set(ends) == set(due), f"{len(due) - len(ends)} jobs did not finish"
    waits: dict[str, list[float]] = {name: [] for name in kind}
    for id, at in first.items():
        waits[of[id]].append(at - due[id])
    wall = max(ends.values()) - record["began"]
    return Outcome(wall, {name: fmean(result) for name, result in waits.items()}, evictions, wasted, len(ends))


def cycle_facts(client: Client) -> tuple[int, float]:
    """How many cycles the loop made, and how long one took in the mean."""
    text = client.http.get(f"{client.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("makeway_cycle_seconds_"))
    count = float(values["makeway_cycle_seconds_count"])
    return round(count), float(values["makeway_cycle_seconds_sum"]) / max(1.0, count)


def row(outcome: Outcome, record: Mapping[str, Any], share: float, cpu: float, cycles: tuple[int, float]) -> Measured:
    """Return the row of the report."""
    work = bound(share) * UNITS * GROUPS
    waits = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in outcome.admission.items())
    lag = max(0.0, record["late"])
    patience = " and ".join(f"{c.name} ones {c.patience:g} s" for c in CLASSES if c.patience)
    return Measured(
        f"queue mix, {outcome.finished:,} jobs in {GROUPS * QUEUES} queues, until the last one ended",
        "s",
        [outcome.wall],
        "the work alone",
        bound(share),
        goal=GOAL if share == 1 else None,
        note=(
            f"{100 * bound(share) / outcome.wall:.1f} % of what is possible (published elsewhere: "
            f"{100 * bound() / PUBLISHED:.0f} %, {PUBLISHED:.0f} s); {outcome.finished / outcome.wall:.1f} jobs/s. "
            f"Jobs are evicted only for jobs that waited for a moment ({patience}). "
            f"Mean time to admission: {waits}. {outcome.evictions} evictions, {outcome.wasted:,.0f} unit-seconds lost "
            f"({100 * outcome.wasted / work:.1f} % of the work). Service CPU {cpu:.1f} s "
            f"({1000 * cpu / outcome.finished:.2f} ms a job), {cycles[0]} cycles of {1000 * cycles[1]:.0f} ms; "
            f"submitting took {1000 * record['median']:.0f} ms (95 %: {1000 * record['p95']:.0f} ms), at most "
            f"{lag:.1f} s late. Jobs exist in memory only; everything else is real."
        ),
        facts={
            "admission": dict(outcome.admission),
            "evictions": outcome.evictions,
            "wasted_unit_seconds": outcome.wasted,
            "service_cpu_seconds": cpu,
            "load_cpu_seconds": record["cpu"],
            "cycles": cycles[0],
            "published": PUBLISHED,
        },
    )
