"""Measure the store with 1,000 running jobs: reading them all, and writing one change with its decision."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from makeway_quota.store import Store, open_store
from makeway_quota.store.records import Change, NewDecision, NewWorkload
from makeway_quota.values import Place

from .measure import Measured
from .portal import timed

JOBS = 1000
READS = 20
WRITES = 100
RUNNING = {"state": "running", "placement": (Place("n1", (0,), (1000,)),), "reason_numbers": {"gpus": 1}}


def measure() -> Iterator[Measured]:
    """Fill a database on disk and read and write it; the baseline is SQLite itself, without records and checks."""
    with tempfile.TemporaryDirectory(prefix="makeway-bench-") as folder:
        path = Path(folder) / "makeway.sqlite"
        store = open_store(f"sqlite:///{path}")
        _fill(store)
        bare = sqlite3.connect(path)
        yield _row(
            f"the store: read {JOBS} active jobs", store.active, READS, "the same rows by sqlite3 alone", _read(bare)
        )
        decision = NewDecision("start", "j1", "rnd", "ana", "starting", "because", {})
        yield _row(
            "the store: commit a change and its decision",
            lambda: store.commit([Change("j1", RUNNING)], [decision], now=3.0),
            WRITES,
            "one UPDATE of the row by sqlite3 alone",
            _write(bare),
        )
        bare.close()
        store.close()


def _fill(store: Store) -> None:
    for number in range(JOBS):
        job = NewWorkload(
            f"j{number}", "job", "rnd", "gpu1", "ana", command=("python", "t.py"), env={"A": "b"}, source="x" * 5000
        )
        store.add_workload(job, now=1.0)
    store.commit([Change(f"j{number}", RUNNING) for number in range(JOBS)], now=2.0)


def _row(name: str, action: Callable[[], object], times: int, baseline_name: str, baseline: float) -> Measured:
    return Measured(name, "ms", [1000 * timed(action) for _ in range(times)], baseline_name, baseline)


def _read(bare: sqlite3.Connection) -> float:
    return median(
        1000 * timed(lambda: bare.execute("select * from workloads where state = 'running'").fetchall())
        for _ in range(READS)
    )


def _write(bare: sqlite3.Connection) -> float:
    def write() -> None:
        with bare:
            bare.execute("update workloads set message = '' where id = 'j1'")

    return median(1000 * timed(write) for _ in range(WRITES))
