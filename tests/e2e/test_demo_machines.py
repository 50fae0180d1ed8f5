"""The demo with machines (a new `make run`): it grows for a job, shrinks, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from makeway_api.client import Client
from makeway_api.models import Job, JobRequest, State

from benchmarks.portal import EMBEDDED, Started

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def portal(tmp_path: Path) -> Iterator[Started]:
    portal = Started(tmp_path, command=EMBEDDED, env={})
    try:
        yield portal
    finally:
        portal.stop()
        for pid in processes(portal):
            os.kill(pid, signal.SIGKILL)


def processes(portal: Started) -> list[int]:
    """Return the processes of the demo's machines."""
    mark = f"LOCAL_MACHINE_FOLDER={portal.state.root}/machines/".encode()
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes():
                    result.append(int(entry.name))
            except OSError:
                continue
    return result


def until(holds: Callable[[], object], what: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.2)


def submitted(client: Client, code: str, profile: str = "cloud1") -> Job:
    return client.submit(JobRequest(profile=profile, team="rnd", name="hello", command=[sys.executable, "-c", code]))


@pytest.mark.covers("F49", "F54", "F60", "F61", "F70")
def test_a_job_of_the_demo_waits_for_a_machine_runs_on_it_and_the_machine_ends(portal: Started) -> None:
    portal.start()
    with Client(f"{portal.base}/services/makeway", portal.user_token("ana")) as ana:
        assert [one.total for one in ana.pools() if one.name == "gpu"] == [10]
        assert (ana.usage().used, ana.usage().free) == (0, 10), "what launches machines was started and holds no GPU"
        job = submitted(ana, "print('hello from a machine')")
        told: list[str] = []

        def ended() -> bool:
            now = ana.job(job.id)
            if now.reason is not None and now.state is State.PENDING and now.reason.message not in told:
                told.append(now.reason.message)
            return now.state.ended

        until(ended, "the job ends")
        print(*told, sep="\n")
        assert ana.job(job.id).state is State.SUCCEEDED
        has = "Demo cloud has 1 of at most 3 machines."
        assert f"Waiting for a machine: booting, about 1.20 EUR/h. {has}" in told
        assert processes(portal)
        until(lambda: not processes(portal), "the machine ends when it idles")


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_of_the_demo_is_left_after_ctrl_c_or_a_kill(portal: Started, killed: bool) -> None:
    portal.start()
    with Client(f"{portal.base}/services/makeway", portal.user_token("ana")) as ana:
        job = submitted(ana, "import time; time.sleep(600)")
        until(lambda: ana.job(job.id).state is State.RUNNING, "the job runs")
    assert processes(portal)
    if killed:
        assert portal.process is not None
        portal.send(signal.SIGKILL)
        portal.process.wait()
    else:
        portal.stop()
    until(lambda: not processes(portal), "all processes of the machine have ended", 260 if killed else 20)


def test_a_job_on_a_machine_runs_again_after_the_next_plain_start(portal: Started) -> None:
    portal.start()
    with Client(f"{portal.base}/services/makeway", portal.user_token("ana")) as ana:
        job = submitted(ana, "import time; time.sleep(600)")
        until(lambda: ana.job(job.id).state is State.RUNNING, "the job runs")
    portal.stop()
    until(lambda: not processes(portal), "its machine has ended", 20)
    portal.start()
    with Client(f"{portal.base}/services/makeway", portal.user_token("ana")) as ana:
        until(lambda: ana.job(job.id).attempt == 2, "it starts again")
        until(lambda: ana.job(job.id).state is State.RUNNING, "it runs again")
        assert processes(portal)
