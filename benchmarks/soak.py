"""Show that nothing grows for ever: 90 days and 200,000 jobs through the real store, loop, services and retention.

`python -m benchmarks.soak [--page docs/how-to/keep-and-remove.md] [--json FILE]`; a shorter one by `--days`, `--jobs`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from makeway_quota.application import Application
from makeway_quota.backends.base import NodeStatus, StartOrder
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.history.retention import DAY, Retention, keep_of
from makeway_quota.metrics import REGISTRY
from makeway_quota.settings import load

from .measure import Measured
from .numbers import insert, markdown, page_for
from .soak_users import PEOPLE, TEAMS, Readers, Users

DAYS = 90
JOBS = 200_000
KEPT_DAYS = 30
EVENT_DAYS = 7
STEP = 3600.0
"""Seconds of the fake clock from one hour's jobs to the next."""
LATER = 60.0
"""Seconds from the start of the jobs to that of the notebooks, which evict some of them."""

NODES = 52
"""Nodes of 8 GPUs: enough for a day's jobs, too few in the afternoon, when jobs wait and are evicted for sessions"""


@dataclass(frozen=True, slots=True)
class Day:
    """What there is at the end of a day: rows, bytes, and seconds of the longest transaction of the retention.

    `jobs` and `evictions` are counted from the first day on.
    """

    day: int
    jobs: int
    evictions: int
    waiting: int
    workloads: int
    decisions: int
    events: int
    database: int
    resident: int
    folders: int
    slowest: float


def policy(nodes: int) -> str:
    """Return a policy document that divides the nodes among the teams."""
    teams = [
        f"  - {{name: {team}, users: [{', '.join(f'{team}{number}' for number in range(PEOPLE))}], "
        f"quotas: [{{pools: [main], reserved: {nodes * 8 // len(TEAMS)}}}]}}"
        for team in TEAMS
    ]
    return "\n".join(
        [
            "version: 1",
            "pools:",
            f"  - {{name: main, size: {nodes * 8}}}",
            "profiles:",
            "  - {name: gpu1, gpus: 1, grace: 30, pools: [main]}",
            "  - {name: gpu4, gpus: 4, grace: 30, pools: [main]}",
            "policies:",
            *teams,
            "",
        ]
    )


class FolderBackend(MemoryBackend):
    """A backend in memory whose jobs leave a real folder with a log and a checkpoint, until it is purged."""

    def __init__(self, folder: Path, nodes: list[NodeStatus], rng: random.Random) -> None:
        super().__init__(nodes, clock=lambda: self.now, lasts=lambda _: rng.uniform(300.0, 9000.0))
        self.folder = folder
        self.now = 0.0

    async def start(self, order: StartOrder) -> None:
        """Start an attempt in its folder."""
        await super().start(order)
        folder = self.folder / order.workload
        folder.mkdir(exist_ok=True)
        (folder / f"{order.attempt}.log").write_bytes(b"step\n" * 200)
        (folder / "checkpoint").write_bytes(b"x" * 1000)

    async def forget(self, workload: str, attempt: int) -> None:
        """Keep nothing of an attempt in memory: its folder is what it left."""
        await super().forget(workload, attempt)
        self.forgotten.pop((workload, attempt), None)

    async def purge(self, workload: str, team: str = "") -> bool:
        """Remove the folder."""
        shutil.rmtree(self.folder / workload, ignore_errors=True)
        return await super().purge(workload, team)


async def live(
    folder: Path, days: int, jobs: int, kept_days: float, step: float = STEP, nodes: int = NODES
) -> list[Day]:
    """Run a service through so many days; one entry for each of them."""
    rng = random.Random(1)
    (folder / "jobs").mkdir()
    (folder / "policy.yaml").write_text(policy(nodes), encoding="utf-8")
    settings = {
        "MAKEWAY_STATE_DIR": str(folder),
        "MAKEWAY_POLICY_FILE": str(folder / "policy.yaml"),
        "MAKEWAY_KEEP_WORKLOADS_DAYS": str(kept_days),
        "MAKEWAY_KEEP_DECISIONS_DAYS": str(kept_days),
        "MAKEWAY_KEEP_EVENTS_DAYS": str(min(EVENT_DAYS, kept_days)),
    }
    backend = FolderBackend(folder / "jobs", [NodeStatus(f"n{n}", "main", tuple(range(8))) for n in range(nodes)], rng)
    service = await Application.open(load(environ=settings), backend, clock=lambda: backend.now)
    retention = Retention(
        service.components.store,
        keep_of(service.components.settings),
        backend.purge,
        lambda: service.loop.term,
        clock=lambda: backend.now,
        monotonic=lambda: backend.now,
        rest=0.0,
    )
    assert service.components.leader.term is not None, "on SQLite a service leads from the moment it is opened"
    await service.services.context.count_existing_jobs()
    await service.loop.take_over(service.components.leader.term)
    users, readers = Users(service, rng), Readers(service)
    result = []
    steps = round(DAY / step)
    for day in range(1, days + 1):
        for number in range(steps):
            backend.now += step - LATER
            users.submit(round(jobs * (day - 1 + share_of_day((number + 1) / steps)) / days))
            await converge(service)
            backend.now += LATER
            await users.use_sessions()
            await converge(service)
            await readers.read()
            if number % 12 == 11 or number + 1 == steps:
                await retention.sweep()
        result.append(measured(day, users.submitted, service, folder, retention.slowest))
        print(result[-1], file=sys.stderr, flush=True)
    await readers.close()
    await service.stop(stop_jobs=True)
    return result


async def converge(service: Application) -> None:
    """Run cycles until nothing changes, four at most."""
    for _ in range(4):
        if not await service.loop.cycle():
            break


def share_of_day(time: float) -> float:
    """Return the part of a day's jobs that are submitted by a time of the day (0 to 1): most around noon."""
    return time - 0.6 * math.sin(2 * math.pi * time) / (2 * math.pi)


def measured(day: int, jobs: int, service: Application, folder: Path, slowest: float) -> Day:
    """Return what there is now."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    held = service.components.store.pruning.holdings()
    workloads, decisions, events = (int(held[what]["count"] or 0) for what in ("workloads", "decisions", "events"))
    folders = sum(1 for _ in os.scandir(folder / "jobs"))
    waiting = service.services.context.limits.waiting
    size = service.components.store.size()
    evictions = sum(
        REGISTRY.get_sample_value("makeway_decisions_total", {"verb": verb, "team": team}) or 0
        for verb in ("evict", "move")
        for team in TEAMS
    )
    return Day(day, jobs, round(evictions), waiting, workloads, decisions, events, size, resident, folders, slowest)


def run(days: int, jobs: int, kept_days: float, step: float = STEP, nodes: int = NODES) -> list[Day]:
    """Run the soak in a process of its own, whose memory is only the service's."""
    with (
        tempfile.TemporaryDirectory(prefix="makeway-soak-") as folder,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process,
    ):
        return process.submit(_live, Path(folder), days, jobs, kept_days, step, nodes).result()


def _live(folder: Path, days: int, jobs: int, kept_days: float, step: float, nodes: int) -> list[Day]:
    return asyncio.run(live(folder, days, jobs, kept_days, step, nodes))


def measure() -> Iterator[Measured]:
    """Run the whole soak."""
    yield from report(run(DAYS, JOBS, KEPT_DAYS))


def read(file: Path) -> list[Day]:
    """Return the days that `--json` wrote."""
    return [Day(**day) for day in json.loads(file.read_text(encoding="utf-8"))]


def report(days: Sequence[Day]) -> Iterator[Measured]:
    """Compare the last day with the day on which the oldest jobs were removed for the first time."""
    full, end = days[KEPT_DAYS], days[-1]
    name = f"after {end.day} days and {end.jobs:,} jobs on a fake clock"
    slowest = max(day.slowest for day in days)
    base = f"on day {full.day}, when {KEPT_DAYS} days of jobs were kept"
    note = (
        f"Ended workloads and decisions are kept for {KEPT_DAYS} days here, events for {EVENT_DAYS}; real store, loop, "
        f"services, retention and job folders, machines in memory; {end.evictions:,} evictions. The longest "
        f"transaction of the retention took {1000 * slowest:.0f} ms."
    )
    facts = {"days": [asdict(day) for day in days]}
    for what, attribute, unit, size in (
        ("database", "database", "MiB", 2**20),
        ("memory", "resident", "MiB", 2**20),
        ("job folders", "folders", "folders", 1),
    ):
        before, after = getattr(full, attribute) / size, getattr(end, attribute) / size
        more = (note, facts) if what == "database" else ("", {})
        yield Measured(f"{what} {name}", unit, [after], base, before, 1.2 * before, *more)


HEAD = ("day", "jobs so far", "workloads", "decisions", "events", "database (MiB)", "memory (MiB)", "job folders")


def table(days: Sequence[Day]) -> str:
    """Return the first day and every tenth as a table for a page."""
    rows = [
        (
            str(day.day),
            *(f"{count:,}" for count in (day.jobs, day.workloads, day.decisions, day.events)),
            *(f"{size / 2**20:.0f}" for size in (day.database, day.resident)),
            f"{day.folders:,}",
        )
        for day in days
        if day.day == 1 or day.day % 10 == 0
    ]
    return markdown(HEAD, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak, print the table; exit status 1 if something did not level off."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--days", type=int, default=DAYS, help=f"more than {KEPT_DAYS} ({DAYS})")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"({JOBS:,})")
    parser.add_argument("--page", type=page_for("soak"), metavar="FILE", help="write the table into this page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every day as JSON")
    wanted = parser.parse_args(arguments)
    if wanted.days <= KEPT_DAYS:
        parser.error(f"--days must be more than {KEPT_DAYS}, the days for which jobs are kept")
    result = run(wanted.days, wanted.jobs, KEPT_DAYS)
    print(table(result))
    if wanted.json:
        wanted.json.write_text(json.dumps([asdict(day) for day in result], indent=1) + "\n", encoding="utf-8")
    if wanted.page:
        insert(wanted.page, "soak", table(result))
    missed = [one for one in report(result) if not one.met]
    for one in missed:
        print(f"{one.name}: {one.value:.0f} {one.unit}, {one.baseline:.0f} {one.baseline_name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
