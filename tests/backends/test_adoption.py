"""A service that comes back finds what runs, and never takes an outsider's process for its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from makeway_quota.backends.base import Phase
from makeway_quota.backends.local import backend as local
from makeway_quota.backends.local import processes
from makeway_quota.backends.local.attempts import LocalAttempt
from makeway_quota.backends.local.launch import spawn
from makeway_quota.backends.local.processes import Mark, Process, Stat, boot_id, sweep
from workshop import Workshop, alive


@pytest.fixture
def outsider() -> Iterator[int]:
    """A process that has nothing to do with us."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    assert process.poll() is None, "an outsider was killed"
    process.kill()
    process.wait()


@pytest.mark.covers("F47")
async def test_a_restarted_service_adopts_what_runs(shop: Workshop) -> None:
    await shop.run("j-1", "sh", "-c", "echo up; sleep 60")
    await shop.run("j-2", "sh", "-c", "echo up; read x < ../go; exit 4")
    os.mkfifo(shop.path("j-2", "go"))
    for job in ("j-1", "j-2"):
        await shop.running(job, says="up")
    pid = shop.launcher("j-1")
    before = await shop.seen("j-1")
    await shop.again()
    assert await shop.seen("j-1") == before
    assert (alive(pid), shop.launcher("j-1")) == (True, pid)
    shop.path("j-2", "go").write_text("\n")
    assert (await shop.over("j-2")).exit_code == 4


async def test_what_ended_meanwhile_is_reported_after_a_restart(shop: Workshop) -> None:
    await shop.run("j-1", "sh", "-c", "exit 9")
    await shop.backend.close(stop_jobs=False)
    await shop.file("j-1", "attempt-1", "status.json")
    await shop.again()
    assert (await shop.over("j-1")).exit_code == 9


async def test_a_notice_survives_a_restart(shop: Workshop) -> None:
    await shop.run("j-1", "sh", "-c", "trap '' TERM; echo up; sleep 60")
    await shop.running("j-1", says="up")
    notice = await shop.ask("j-1", grace=0.8)
    await shop.again()
    seen = await shop.seen("j-1")
    assert seen is not None
    assert (seen.phase, seen.notice_received) == (Phase.STOPPING, True)
    await shop.backend.notice("j-1", 1, notice)
    assert (await shop.over("j-1")).killed


async def test_a_service_that_closes_starts_nothing_more_and_the_next_one_does(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned, go = [], threading.Event()

    def slowly(attempt: LocalAttempt, *rest: Any) -> str | None:
        spawned.append(attempt.workload)
        go.wait(60)
        return spawn(attempt, *rest)

    monkeypatch.setattr(local, "spawn", slowly)
    await shop.run("j-1", "sh", "-c", "sleep 60")
    shop.backend._prepare(shop.order("j-2", "sh", "-c", "exit 5"))
    closing = asyncio.create_task(shop.backend.close(stop_jobs=False))
    await asyncio.sleep(0)
    go.set()
    await closing
    assert (spawned, shop.backend._tasks) == (["j-1"], set())
    assert shop.path("j-1", "attempt-1", "launcher.json").exists(), "a launcher on its way is waited for"
    await shop.again()
    assert (await shop.over("j-2")).exit_code == 5


async def test_an_order_that_was_written_but_not_started_is_started(shop: Workshop) -> None:
    shop.backend._prepare(shop.order("j-1", "sh", "-c", "echo started", files={"a.txt": "x"}))
    assert not shop.path("j-1", "attempt-1").exists()
    await shop.again()
    assert (await shop.over("j-1")).exit_code == 0
    assert shop.log("j-1") == "started\n"
    assert shop.path("j-1", "work", "a.txt").exists()


SERVICE = """
    import asyncio, sys
    from makeway_quota.backends.base import StartOrder
    from makeway_quota.backends.local.backend import LocalBackend

    async def main():
        backend = LocalBackend(sys.argv[1], virtual_gpus=8, virtual_nodes=2)
        await backend.open()
        for number in range(5):
            place = Place("virtual-1", (0,), (1000,))
            command = ("sh", "-c", "echo started >> ../ran; sleep 0.2; exit 7")
            await backend.start(StartOrder(f"j-{number}", 1, "", "ana", "", "", command, {}, (place,), 5.0))
            print(number, flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
"""


@pytest.mark.covers("F47", "N07")
@pytest.mark.parametrize("after", [0.0, 0.005, 0.02, 0.04, 0.08])
@pytest.mark.no_repeat
async def test_a_service_killed_at_any_moment_starts_everything_once(tmp_path: Path, after: float) -> None:
    kill_a_service(tmp_path, after)
    shop = Workshop(tmp_path)
    await shop.backend.open()
    for number in range(5):
        await shop.run(f"j-{number}", "sh", "-c", "echo started >> ../ran; sleep 0.2; exit 7")
    for number in range(5):
        assert (await shop.over(f"j-{number}")).exit_code == 7
        assert shop.path(f"j-{number}", "ran").read_text() == "started\n"
    await shop.backend.close(stop_jobs=False)


def kill_a_service(root: Path, after: float) -> None:
    """Start a service that starts jobs, and kill it some seconds after the first one."""
    script = [sys.executable, "-c", textwrap.dedent(SERVICE), str(root)]
    service = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    service.stdout.readline()
    time.sleep(after)
    service.kill()
    service.wait()
    service.stdout.close()


def test_a_process_of_another_job_that_ends_during_a_sweep_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = {"MAKEWAY_JOB_DIR": str(tmp_path / "j-1"), "MAKEWAY_ATTEMPT": "1"}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **mark}) as other:
        monkeypatch.setattr(processes, "_owner", lambda pid: None)  # as of a process that is gone
        try:
            assert processes.sweep({processes.Mark(str(tmp_path / "j-2"), 1): os.getuid()}) == set()
            assert other.poll() is None
        finally:
            other.kill()


async def test_a_launcher_that_dies_takes_its_job_with_it(shop: Workshop) -> None:
    await shop.run("j-1", "sh", "-c", "(setsid sleep 81 &); echo up; sleep 82")
    await shop.running("j-1", says="up")
    await shop.until("j-1", lambda _: len(shop.processes("j-1")) == 4)
    os.kill(shop.launcher("j-1"), signal.SIGKILL)
    seen = await shop.over("j-1")
    assert (seen.phase, seen.exit_code) == (Phase.LOST, None)
    assert "without a report" in seen.message
    assert shop.processes("j-1") == []


async def test_what_a_dead_launcher_left_is_killed_by_the_next_service(shop: Workshop) -> None:
    await shop.run("j-1", "sh", "-c", "(setsid sleep 83 &); echo up; sleep 84")
    await shop.running("j-1", says="up")
    await shop.backend.close(stop_jobs=False)
    os.kill(shop.launcher("j-1"), signal.SIGKILL)
    await shop.again()
    assert (await shop.over("j-1")).phase is Phase.LOST
    assert shop.processes("j-1") == []


async def test_a_reused_pid_is_neither_adopted_nor_killed(shop: Workshop, outsider: int) -> None:
    await forge(shop, {"pid": outsider, "start_time": 1, "boot": boot_id()})
    seen = await shop.over("j-1")
    assert seen.phase is Phase.LOST
    await shop.backend.kill("j-1", 1)
    assert alive(outsider)


async def test_a_claim_on_a_foreign_process_is_not_believed(shop: Workshop, outsider: int) -> None:
    stat = Stat.of(outsider)
    assert stat is not None
    await forge(shop, {"pid": outsider, "start_time": stat.start_time, "boot": boot_id()})
    assert (await shop.over("j-1")).phase is Phase.LOST
    await shop.ask("j-1")
    assert alive(outsider)


async def test_claims_of_an_earlier_boot_are_void(shop: Workshop, outsider: int) -> None:
    stat = Stat.of(outsider)
    assert stat is not None
    await forge(shop, {"pid": outsider, "start_time": stat.start_time, "boot": "another"})
    seen = await shop.over("j-1")
    assert (seen.phase, seen.message) == (Phase.LOST, "the machine was restarted")


async def forge(shop: Workshop, claim: dict[str, object]) -> None:
    """Write an order as if it had been started, with a claim that is not a launcher's."""
    shop.backend._prepare(shop.order("j-1", "true"))
    home = shop.path("j-1", "attempt-1")
    home.mkdir()
    (home / "launcher.json").write_text(json.dumps(claim))
    await shop.again()


async def test_a_stopped_launcher_is_ended_after_the_deadline(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("makeway_quota.backends.local.attempts.LAUNCHER_GRACE", 0.3)
    monkeypatch.setattr("makeway_quota.backends.local.attempts.KILL_GRACE", 0.3)
    for job in ("j-1", "j-2"):
        await shop.run(job, "sh", "-c", "echo up; sleep 85")
        await shop.running(job, says="up")
        os.kill(shop.launcher(job), signal.SIGSTOP)
    await shop.ask("j-1", grace=0.2)
    await shop.backend.kill("j-2", 1)
    for job in ("j-1", "j-2"):
        seen = await shop.over(job)
        assert (seen.phase, seen.killed) == (Phase.EXITED, True)
        assert shop.processes(job) == []


def test_processes_without_the_mark_are_left_alone(outsider: int, tmp_path: Path) -> None:
    other = Mark(str(tmp_path), 1)
    marked = subprocess.Popen(["sleep", "600"], env={"MAKEWAY_JOB_DIR": str(tmp_path), "MAKEWAY_ATTEMPT": "1"})
    while Mark.of(marked.pid) != other:
        time.sleep(0.005)
    assert sweep({Mark(str(tmp_path), 2): os.geteuid(), Mark("/elsewhere", 1): os.geteuid()}) == set()
    assert sweep({other: os.geteuid() + 1}) == set()
    assert alive(marked.pid)
    assert sweep({other: os.geteuid()}) == set()
    assert marked.wait() == -signal.SIGKILL


def test_a_process_is_held_without_a_pidfd_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("makeway_quota.backends.local.processes._pidfd", lambda pid: None)
    child = subprocess.Popen(["sleep", "600"], env={"MAKEWAY_JOB_DIR": str(tmp_path), "MAKEWAY_ATTEMPT": "1"})
    mark = Mark(str(tmp_path), 1)
    while Mark.of(child.pid) != mark:
        time.sleep(0.005)
    stat = Stat.of(child.pid)
    assert stat is not None
    claim = {"pid": child.pid, "start_time": stat.start_time, "boot": boot_id()}
    process = Process.find(claim, os.geteuid(), mark)
    assert process is not None
    assert process.alive()
    process.send(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert not process.alive()
    process.send(signal.SIGTERM)
    assert Process.find(claim, os.geteuid(), mark) is None


async def test_all_launchers_that_vanish_at_once_are_lost_with_their_machine(shop: Workshop) -> None:
    for job in ("j-1", "j-2", "j-3"):
        await shop.run(job, "sh", "-c", "echo up; sleep 60")
        await shop.running(job, says="up")
    pids = [shop.launcher(job) for job in ("j-1", "j-2", "j-3")]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        await shop.seen("j-1")
    for job in ("j-1", "j-2", "j-3"):
        seen = await shop.over(job)
        assert (seen.phase, seen.node_lost) == (Phase.LOST, True)


async def test_one_launcher_of_several_that_vanishes_is_lost_by_itself(shop: Workshop) -> None:
    for job in ("j-1", "j-2", "j-3"):
        await shop.run(job, "sh", "-c", "echo up; sleep 60")
        await shop.running(job, says="up")
    for job in ("j-1", "j-2"):
        os.kill(shop.launcher(job), signal.SIGKILL)
    for job in ("j-1", "j-2"):
        seen = await shop.over(job)
        assert (seen.phase, seen.node_lost) == (Phase.LOST, False)
    other = await shop.seen("j-3")
    assert other is not None
    assert other.phase is Phase.RUNNING
