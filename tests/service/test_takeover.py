"""The database and the jobs of earlier code are taken over: what a killed service of it left ends right with this code.

`takeovers/` holds what services of some commits left, each recorded by `scripts/record_takeover.py`. Launchers of that
code, which outlive their service, are started here again: a record holds no processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from makeway_api.models import Job
from makeway_quota.backends.local.processes import boot_id
from running import Running, running
from service.takeover_scenario import POLICY, SETTINGS

RECORDS = sorted((Path(__file__).parent / "takeovers").glob("*.tar.gz"))


@dataclass(frozen=True)
class Left:
    """What a service left, unpacked."""

    root: Path
    jobs: dict[str, str]
    session: str
    launcher: Path

    def folder(self, name: str) -> Path:
        return self.root / "jobs" / self.jobs[name]

    def start_launcher(self, name: str, attempt: int = 1) -> None:
        """Start an attempt's launcher by its order, as the service that left it did."""
        order = self.root / "spool" / f"{self.jobs[name]}@{attempt}"
        marks = {
            "MAKEWAY_JOB_ID": self.jobs[name],
            "MAKEWAY_ATTEMPT": str(attempt),
            "MAKEWAY_JOB_DIR": str(self.folder(name)),
        }
        with order.open("rb") as stream:
            subprocess.run(
                [sys.executable, "-I", "-S", str(self.launcher), "-", "--detach"],
                stdin=stream,
                env={"PATH": os.environ["PATH"], **marks},
                cwd="/",
                start_new_session=True,
                timeout=60,
                check=True,
            )


@pytest.fixture(params=RECORDS, ids=lambda record: record.name.partition(".")[0])
def left(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Left]:
    """Unpack a record as if it had been left here: in this folder, by this account, since this machine began."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="tar")
    root = tmp_path / "var"
    result: dict[str, Any] = json.loads((root / "scenario.json").read_text())
    for order in (root / "spool").iterdir():
        line, _, files = order.read_bytes().partition(b"\n")
        header = json.loads(line.replace(result["root"].encode(), str(root).encode()))
        header |= {"uid": os.getuid(), "boot": boot_id()}
        order.write_bytes(json.dumps(header).encode() + b"\n" + files)
    yield Left(root, result["jobs"], result["session"], root / result["launcher"])
    end_processes_of(root)


def end_processes_of(root: Path) -> None:
    """Kill what is left of jobs in a state directory: launchers outlive a test that fails."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"MAKEWAY_JOB_DIR={root}/".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


async def logged(run: Running, job: str, attempt: int) -> str:
    page = await run.client("root").logs(job, attempt=attempt, offset=0, limit=1000)
    return str(page.text)


def test_there_is_a_record() -> None:
    assert RECORDS, "run scripts/record_takeover.py"


@pytest.mark.slow
async def test_what_a_killed_service_of_earlier_code_left_ends_right(left: Left, tmp_path: Path) -> None:
    attempt = left.folder("runs") / "attempt-1"
    attempt.rename(tmp_path / "of the recorded process")
    left.start_launcher("runs")
    pid = json.loads((attempt / "launcher.json").read_text())["pid"]
    async with running(left.root, POLICY, gpus=3, **SETTINGS) as run:
        ids = left.jobs
        before = {name: await run.client("root").job(id) for name, id in ids.items()}
        states = {name: (job.state.value, job.attempt, job.preemptions) for name, job in before.items()}
        assert states == {
            "succeeded": ("succeeded", 1, 0),
            "failed": ("failed", 1, 0),
            "runs": ("running", 1, 0),
            "makes_way": ("pending", 1, 1),
            "waits": ("pending", 0, 0),
        }
        session = await run.client("spawner").session(left.session)
        assert session.phase not in ("admission", "reclaim", "ended")
        assert "over" in await logged(run, ids["succeeded"], 1)

        assert json.loads((attempt / "launcher.json").read_text())["pid"] == pid  # adopted, not started again
        (left.folder("runs") / "go").touch()
        runs = await run.job(ids["runs"], "succeeded")
        assert (runs.attempt, "done" in await logged(run, runs.id, 1)) == (1, True)

        await run.client("spawner").release(left.session)
        made_way = await run.job(ids["makes_way"], "succeeded")
        assert (made_way.attempt, made_way.preemptions) == (2, 1)
        assert "resumed" in await logged(run, made_way.id, 2)
        late = await run.job(ids["waits"], "succeeded")
        assert "late" in await logged(run, late.id, 1)

        ended: dict[str, Job] = {name: await run.client("root").job(id) for name, id in ids.items()}
        assert [outcomes(job) for job in ended.values()] == [
            ["succeeded"],
            ["failed"],
            ["succeeded"],
            ["preempted", "succeeded"],
            ["succeeded"],
        ]
        assert ended["failed"].exit_code == 3
        assert {name: ended[name] for name in ("succeeded", "failed")} == {
            name: before[name] for name in ("succeeded", "failed")
        }
        for job in ended.values():
            assert all(one.ended_at is not None and one.placement for one in job.attempts), job
        assert await run.used() == {"rnd": 0.0, "devops": 0.0, "idle": 3.0}


def outcomes(job: Job) -> list[str]:
    return [attempt.outcome or "" for attempt in job.attempts]
