"""Show that nothing grows for ever: 90 days and 200,000 jobs through the real store, loop and retention."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from makeway_quota.application import Application
from makeway_quota.backends.base import NodeSeen, StartOrder
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.history.retention import DAY, Retention, keep_of
from makeway_quota.settings import load
from makeway_quota.store.records import NewDecision, NewWorkload, Submission

from .measure import Measured

ROOT = Path(__file__).resolve().parent.parent
DAYS = 90
JOBS = 200_000
KEPT_DAYS = 30
EVENT_DAYS = 7
STEP = 3600.0
"""Seconds of the fake clock from one look of the loop to the next."""

TEAMS = ("rnd", "devops", "vision", "speech", "search")
PEOPLE = 40
NODES = 24
POLICY = "\n".join(
    [
        "version: 1",
        "pools:",
        f"  - {{name: main, size: {NODES * 8}}}",
        "profiles:",
        "  - {name: gpu1, gpus: 1, grace: 30, pools: [main]}",
        "  - {name: gpu4, gpus: 4, grace: 30, pools: [main]}",
        "policies:",
        *(
            f"  - {{name: {team}, users: [{team}0], quotas: [{{pools: [main], reserved: {NODES * 8 // len(TEAMS)}}}]}}"
            for team in TEAMS
        ),
        "",
    ]
)


@dataclass(frozen=True, slots=True)
class Day:
    """What there is at the end of a day. `longest`: seconds of the longest transaction of the retention."""

    day: int
    jobs: int
    ended: int
    database: int
    resident: int
    folders: int
    longest: float


class FolderBackend(MemoryBackend):
    """A backend in memory whose jobs leave a real folder with a log and a checkpoint, until it is purged."""

    def __init__(self, folder: Path, nodes: list[NodeSeen], rng: random.Random) -> None:
        super().__init__(nodes, clock=lambda: self.now, lasts=lambda _: rng.uniform(300.0, 3600.0))
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

    async def purge(self, workload: str) -> None:
        """Remove the folder."""
        await super().purge(workload)
        shutil.rmtree(self.folder / workload, ignore_errors=True)


async def live(folder: Path, days: int, jobs: int, kept_days: float, step: float = STEP) -> list[Day]:
    """Run a service through so many days; one entry for each of them."""
    rng = random.Random(1)
    (folder / "jobs").mkdir()
    (folder / "policy.yaml").write_text(POLICY, encoding="utf-8")
    settings = {
        "MAKEWAY_STATE_DIR": str(folder),
        "MAKEWAY_POLICY_FILE": str(folder / "policy.yaml"),
        "MAKEWAY_KEEP_WORKLOADS_DAYS": str(kept_days),
        "MAKEWAY_KEEP_DECISIONS_DAYS": str(kept_days),
        "MAKEWAY_KEEP_EVENTS_DAYS": str(min(EVENT_DAYS, kept_days)),
    }
    backend = FolderBackend(folder / "jobs", [NodeSeen(f"n{n}", "main", tuple(range(8))) for n in range(NODES)], rng)
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
    await service.loop.take_over(service.components.leader.term)
    found = []
    steps = round(DAY / step)
    submitted = 0
    for day in range(1, days + 1):
        for number in range(steps):
            backend.now += step
            due = round(jobs * ((day - 1) * steps + number + 1) / (days * steps))
            submit(service, range(submitted, due), rng)
            submitted = due
            for _ in range(4):
                if not await service.loop.cycle():
                    break
            if number % 12 == 11 or number + 1 == steps:
                await retention.sweep()
        found.append(measured(day, submitted, service, folder, retention.longest))
    await service.stop(stop_jobs=True)
    return found


def submit(service: Application, numbers: range, rng: random.Random) -> None:
    """Submit some jobs of any user, with a source and a file."""
    given = []
    for number in numbers:
        team = rng.choice(TEAMS)
        owner, profile, gpus = f"{team}{rng.randrange(PEOPLE // len(TEAMS))}", *rng.choice((("gpu1", 1), ("gpu4", 4)))
        new = NewWorkload(
            f"j-{number:08x}",
            "job",
            team,
            profile,
            owner,
            f"train {number}",
            gpus=1000 * gpus,
            command=("python", "train.py"),
            env={"SEED": str(number)},
            source="print('a cell')\n" * 20,
        )
        said = NewDecision("submit", new.id, team, owner, "job", f"{owner} submits {new.name}.", {"gpus": gpus})
        given.append(Submission(new, [("train.py", b"# a script\n" * 50 + str(number % 5000).encode(), False)], said))
    if given:
        service.components.store.add_workloads(given, now=service.components.clock())


def measured(day: int, jobs: int, service: Application, folder: Path, longest: float) -> Day:
    """Return what there is now."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    held = service.components.store.pruning.holdings()
    folders = sum(1 for _ in os.scandir(folder / "jobs"))
    ended = int(held["workloads"]["count"] or 0)
    return Day(day, jobs, ended, service.components.store.size(), resident, folders, longest)


def run(days: int, jobs: int, kept_days: float, step: float = STEP) -> list[Day]:
    """Run the soak in a process of its own, whose memory is only the service's."""
    with tempfile.TemporaryDirectory(prefix="makeway-soak-") as folder:
        said = Path(folder) / "said.json"
        arguments = [folder, str(days), str(jobs), str(kept_days), str(step), str(said)]
        subprocess.run([sys.executable, "-m", "benchmarks.soak", *arguments], check=True, cwd=ROOT)
        return [Day(**each) for each in json.loads(said.read_text(encoding="utf-8"))]


def measure() -> Iterator[Measured]:
    """Compare the last day with the day on which the oldest jobs were removed for the first time."""
    found = run(DAYS, JOBS, KEPT_DAYS)
    full, end = found[KEPT_DAYS], found[-1]
    name = f"after {DAYS} days and {JOBS:,} jobs on a fake clock"
    longest = max(day.longest for day in found)
    base = f"on day {full.day}, when {KEPT_DAYS} days of jobs were kept"
    note = (
        f"Ended workloads and decisions are kept for {KEPT_DAYS} days here, events for {EVENT_DAYS}; real store, loop, "
        f"retention and job folders, machines in memory. The longest transaction of the retention took "
        f"{1000 * longest:.0f} ms."
    )
    facts = {"days": [asdict(day) for day in found]}
    yield Measured(
        f"database {name}",
        "MiB",
        [end.database / 2**20],
        base,
        full.database / 2**20,
        goal=1.2 * full.database / 2**20,
        note=note,
        facts=facts,
    )
    yield Measured(f"memory {name}", "MiB", [end.resident / 2**20], base, full.resident / 2**20)
    yield Measured(f"job folders {name}", "folders", [end.folders], base, full.folders)


def main(folder: str, days: str, jobs: str, kept_days: str, step: str, file: str) -> None:
    """Run and write down what every day ended with."""
    found = asyncio.run(live(Path(folder), int(days), int(jobs), float(kept_days), float(step)))
    Path(file).write_text(json.dumps([asdict(day) for day in found]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
