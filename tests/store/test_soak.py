"""Twelve days of jobs: the database, the memory and the job folders level off; `python -m benchmarks.soak` plays 90."""

from __future__ import annotations

import pytest

from benchmarks.soak import run

KEPT = 3
DAYS = 12
JOBS_A_DAY = 120


@pytest.mark.slow
@pytest.mark.covers("N25")
def test_sizes_level_off_once_the_oldest_jobs_are_removed() -> None:
    days = run(days=DAYS, jobs=DAYS * JOBS_A_DAY, kept_days=KEPT, step=3 * 3600.0, nodes=8)
    full, end = days[KEPT + 1], days[-1]
    assert days[0].jobs == JOBS_A_DAY
    assert end.jobs == DAYS * JOBS_A_DAY
    assert full.folders >= 0.8 * KEPT * days[0].jobs, "jobs ran"
    assert end.evictions, "there were more jobs than GPUs"
    assert end.folders <= 1.1 * full.folders < 0.4 * end.jobs
    assert end.workloads <= 1.1 * full.workloads
    # The kept days differ in how many jobs waited and made way, and each of them writes more rows: quiet ones compare.
    rows = [day.workloads + day.decisions + day.events for day in days]
    middle = (KEPT + 1 + len(days)) // 2
    assert min(rows[middle:]) <= 1.4 * min(rows[KEPT + 1 : middle])
    assert end.database <= 1.15 * full.database * max(1.0, max(rows[middle:]) / rows[KEPT + 1])
    assert end.resident <= 1.1 * full.resident
