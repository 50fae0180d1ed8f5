"""A sweep of Optuna runs over quota, makes way for an owner, and goes on after its program was killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import training_jobs as jobs
from makeway_api.client import Client
from makeway_api.models import Job, JobRequest
from widgets.conftest import Portal

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.long,  # only in `make test-frameworks`
    pytest.mark.timeout(1200),
    pytest.mark.covers("N12", "F20"),
]

TRIALS = 3
SECONDS = 200.0
RESULTS = """
import json, optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
study = optuna.load_study(study_name="sweep", storage=JournalStorage(JournalFileBackend("sweep/journal")))
print(json.dumps([[t.number, t.state.name, t.value, t.params] for t in study.trials]))
"""
ALONE = """
import json, sys
from pathlib import Path
source = Path("sweep.py").read_text().split('TRAIN = \"\"\"')[1].split('\"\"\"')[0]
*body, last = source.strip().splitlines()
names = {**json.loads(sys.argv[1]), "__name__": "__main__"}
exec("\\n".join([*body, f"value = {last}"]), names)
print(names["value"])
"""
"""Runs what a trial runs, without a job"""


@pytest.fixture
def portal(tmp_path: Path) -> Iterator[Portal]:
    made = Portal(tmp_path / "service")
    yield made
    made.stop()


def until(found: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait for something of the service, which tells it only when asked."""
    deadline = time.monotonic() + SECONDS
    while not found():
        if time.monotonic() > deadline:
            raise TimeoutError(what())
        time.sleep(0.1)


def trials(ana: Client) -> list[Job]:
    """Return the jobs of the sweep."""
    return [job for job in ana.jobs(mine=True, limit=100).jobs if job.name.startswith("sweep-")]


def shown(ana: Client) -> str:
    """Return what a failure has to say about all jobs."""
    return str([(job.name, job.state, job.preemptions, job.message, job.reason) for job in ana.jobs(limit=100).jobs])


def test_a_sweep_makes_way_and_survives_the_end_of_its_program(portal: Portal, tmp_path: Path) -> None:
    folder = tmp_path / "notebook"
    folder.mkdir()
    for name in ("sweep.py", "data.py"):
        shutil.copy(jobs.ROOT / "examples" / name, folder)
    paths = [jobs.ROOT / "widgets", jobs.ROOT / "quota_service", sysconfig.get_path("purelib")]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKEWAY_", "PYTEST_"))} | {
        "PYTHONPATH": ":".join(map(str, paths)), "MAKEWAY_URL": portal.url, "MAKEWAY_TOKEN": "ana",
        "TRIALS": str(TRIALS), "AT_ONCE": str(TRIALS), "EPOCHS": "200", **jobs.QUIET,
    }  # fmt: skip
    command = [str(jobs.PYTHON), "sweep.py"]
    with portal.client("ana") as ana, portal.client("bo") as bo:
        for profile in ("gpu3", "gpu2"):
            ana.submit(JobRequest(name="notebook", command=["sleep", "900"], profile=profile))
        first = subprocess.Popen(command, cwd=folder, env=env)
        try:
            until(
                lambda: sum(bool(job.progress and job.progress.step) for job in trials(ana)) == TRIALS,
                lambda: shown(ana),
            )
        finally:
            first.kill()
            first.wait()
        owned = [bo.submit(JobRequest(command=["sleep", "900"], profile=profile)) for profile in ("gpu3", "gpu2")]
        until(lambda: any(job.preemptions for job in trials(ana)), lambda: shown(ana))
        for job in owned:
            bo.cancel(job.id)
        again = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=2 * SECONDS)
        assert again.returncode == 0, again.stdout + again.stderr
        assert f"best of {TRIALS}: " in again.stdout
        assert "made way 1 times" in again.stdout
        assert sorted(job.name for job in trials(ana)) == [f"sweep-{n}" for n in range(TRIALS)], "none twice"
    seen = subprocess.run([str(jobs.PYTHON), "-c", RESULTS], cwd=folder, env=env, capture_output=True, text=True)
    result = json.loads(seen.stdout)
    assert [state for _, state, *_ in result] == ["COMPLETE"] * TRIALS
    number, _, value, params = result[-1]  # the newest makes way first
    alone = subprocess.run(
        [str(jobs.PYTHON), "-c", ALONE, json.dumps(params)], cwd=folder, env=env, capture_output=True, text=True
    )
    assert float(alone.stdout.splitlines()[-1]) == value, (number, params, alone.stderr)
