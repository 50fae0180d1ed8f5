"""Whatever a job writes where the service reads, and whatever any process shows of itself, no other job is harmed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makeway_quota.backends.base import AttemptStatus, Phase
from makeway_quota.backends.local import processes
from makeway_quota.backends.local.attempts import LocalAttempt
from makeway_quota.backends.local.jobdir import AttemptFiles, Layout
from makeway_quota.backends.local.processes import Mark, Process, Stat, boot_id, sweep
from workshop import Workshop

DEEP = b"[" * 100_000
ODD: dict[str, bytes] = {
    "deep lists": DEEP,
    "deep tables": b'{"a":' * 50_000,
    "deep but whole": b'{"step": ' + b"[" * 900 + b"]" * 900 + b"}",
    "5,000 digits": b'{"step": 1' + b"0" * 5000 + b', "saved_at": 1' + b"0" * 5000 + b"}",
    "4,000 digits": b'{"step": %s, "saved_at": %s, "pid": %s}' % ((b"1" + b"0" * 4000,) * 3),
    "2**70": json.dumps(dict.fromkeys(("pid", "start_time", "step", "saved_at", "at", "deadline"), 2**70)).encode(),
    "no numbers": b'{"step": NaN, "saved_at": Infinity, "at": -Infinity, "deadline": NaN, "ended_at": 1e400}',
    "half a character": b'{"message": "\\ud800", "reason": "\\udfff\\u0000", "ended_at": 1, "exit_code": "\\ud800"}',
    "not UTF-8": b'{"message": "\xff\xfe\x80"}',
    "NUL": b"\0" * 4096,
    "a list": b"[1, 2]",
    "larger than a report": b'{"a": "' + b"x" * 2**20 + b'"}',
    "other types": b'{"pid": [], "boot": {}, "step": {}, "saved_at": "", "ended_at": {}, "kill": [], "deadline": [1]}',
    "empty": b"",
}
PLACES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a huge sparse file": lambda path: os.truncate(_touch(path), 2**40),
}
EVERYTHING = [*ODD, *PLACES]


def _touch(path: Path) -> Path:
    path.touch()
    return path


def put(path: Path, what: str) -> None:
    """Replace a file by something odd."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if what in ODD:
        path.write_bytes(ODD[what])
    else:
        PLACES[what](path)


@pytest.mark.parametrize("what", EVERYTHING)
async def test_an_odd_file_of_one_job_keeps_nothing_from_the_others(shop: Workshop, what: str) -> None:
    await shop.run("j-1", "sh", "-c", "echo up; sleep 60")
    await shop.running("j-1", says="up")
    for name in ("progress.json", "running.json", "status.json", "stop.json", "notice.json", "log.7"):
        put(shop.path("j-1", "attempt-1", name), what)
    await shop.run("j-2", "sh", "-c", "exit 3")
    assert (await shop.over("j-2")).exit_code == 3
    storable(await shop.until("j-1", lambda seen: True))
    await shop.backend.log("j-1", 1, 0, 1000)
    await shop.backend.kill("j-1", 1)
    storable(await shop.over("j-1"))
    assert shop.processes("j-1") == []


def storable(seen: AttemptStatus) -> AttemptStatus:
    """Assert that a database of any kind keeps what is reported."""
    orjson.dumps(seen)
    assert "\0" not in seen.message
    for value in (seen.started_at, seen.ended_at, seen.checkpoint_at):
        assert value is None or abs(value) < 1e11
    assert seen.step is None or abs(seen.step) < 2**53
    assert seen.exit_code is None or abs(seen.exit_code) < 2**31
    return seen


@pytest.mark.parametrize("what", EVERYTHING)
async def test_an_odd_claim_ends_its_attempt_at_a_restart_and_no_other(shop: Workshop, what: str) -> None:
    for job in ("j-1", "j-2"):
        await shop.run(job, "sh", "-c", "(setsid sleep 71 &); echo up; sleep 72")
        await shop.running(job, says="up")
    await shop.backend.close(stop_jobs=False)
    put(shop.path("j-1", "attempt-1", "launcher.json"), what)
    await shop.again()
    seen = storable(await shop.over("j-1"))
    assert (seen.phase, seen.exit_code) == (Phase.EXITED, None)
    assert "launcher.json" in seen.message
    assert shop.processes("j-1") == []
    other = await shop.seen("j-2")
    assert other is not None
    assert other.phase is Phase.RUNNING


async def test_a_launcher_whose_files_are_removed_runs_once_after_a_restart(shop: Workshop) -> None:
    await shop.run("j-1", "sh", "-c", "echo started >> ../ran; echo up; sleep 72")
    await shop.running("j-1", says="up")
    before = shop.launcher("j-1")
    await shop.backend.close(stop_jobs=False)
    shutil.rmtree(shop.path("j-1", "attempt-1"))
    await shop.again()
    await shop.until("j-1", lambda _: shop.path("j-1", "attempt-1", "launcher.json").exists())
    assert shop.launcher("j-1") != before
    await shop.running("j-1", says="up")
    assert before not in shop.processes("j-1"), "two launchers of one attempt would share its GPUs"
    assert len(shop.processes("j-1")) <= 3


@pytest.mark.parametrize("what", EVERYTHING)
async def test_a_report_that_cannot_be_read_is_the_end_of_its_attempt_in_words(shop: Workshop, what: str) -> None:
    await shop.run("j-1", "sh", "-c", "echo up; sleep 60")
    await shop.running("j-1", says="up")
    put(shop.path("j-1", "attempt-1", "status.json"), what)
    os.kill(shop.launcher("j-1"), 9)
    seen = storable(await shop.over("j-1"))
    assert (seen.phase, seen.exit_code) == (Phase.EXITED, None), seen
    assert "status.json" in seen.message or what == "half a character"  # a report, of which some fields are none


@pytest.mark.parametrize("what", EVERYTHING)
async def test_what_runs_goes_on_where_its_order_was_damaged_and_what_does_not_is_lost(
    shop: Workshop, what: str
) -> None:
    await shop.run("j-1", "sh", "-c", "echo up; read x < ../go; exit 4")
    os.mkfifo(shop.path("j-1", "go"))
    await shop.running("j-1", says="up")
    shop.backend._prepare(shop.order("j-2", "true"))
    await shop.backend.close(stop_jobs=False)
    put(shop.root / "spool" / "j-1@1", what)
    put(shop.root / "spool" / "j-2@1", what)
    await shop.again()
    lost = storable(await shop.over("j-2"))
    assert (lost.phase, lost.node_lost) == (Phase.LOST, True)
    assert "order" in lost.message
    assert (await shop.running("j-1")).phase is Phase.RUNNING
    shop.path("j-1", "go").write_text("\n")
    assert (await shop.over("j-1")).exit_code == 4
    for job in ("j-1", "j-2"):
        await shop.backend.forget(job, 1)
    await shop.again()
    assert not (await shop.backend.observe()).attempts


async def test_descriptors_that_are_used_up_end_no_job(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    await shop.run("j-1", "sh", "-c", "echo up; sleep 60")
    await shop.running("j-1", says="up")
    put(shop.path("j-1", "attempt-1", "progress.json"), "2**70")
    real = os.open

    def full(path: Any, *args: Any, **more: Any) -> int:
        if "attempt-1" in str(path) or "j-1" in str(path):
            raise OSError(24, "Too many open files")
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", full)
    seen = await shop.seen("j-1")
    assert seen is not None
    assert seen.phase is Phase.RUNNING
    monkeypatch.undo()
    assert (await shop.running("j-1")).phase is Phase.RUNNING


@pytest.fixture
def shouting(tmp_path: Path) -> Iterator[int]:
    """A process of some account whose environment has an attempt of 5,000 digits."""
    env = {"MAKEWAY_JOB_DIR": str(tmp_path), "MAKEWAY_ATTEMPT": "1" * 5000}
    with subprocess.Popen(["sleep", "600"], env=env) as process:
        yield process.pid
        assert process.poll() is None
        process.kill()


def test_no_environment_of_any_process_breaks_a_sweep(shouting: int, tmp_path: Path) -> None:
    marked = subprocess.Popen(["sleep", "600"], env={"MAKEWAY_JOB_DIR": str(tmp_path), "MAKEWAY_ATTEMPT": "1"})
    mark = Mark(str(tmp_path), 1)
    while Mark.of(marked.pid) != mark:
        time.sleep(0.005)
    assert Mark.of(shouting) is None
    assert sweep({mark: os.geteuid()}) == set()
    assert marked.wait() == -9


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.sampled_from([2**31, 2**53, 2**63, 2**70, -(2**70), 10**400])
    | st.floats() | st.text(st.characters(exclude_categories=()), max_size=20)
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner), max_leaves=8
)
FIELDS = (
    *("pid", "start_time", "boot", "at", "pids", "step", "saved_at", "acknowledged_at", "reason", "by_team"),
    "by_owner",
    *("by_workload", "deadline", "preempt_test", "kill", "started_at", "ended_at", "exit_code", "killed", "completed"),
    *("acknowledged", "noticed", "timed_out", "checkpoint_at", "message"),
)
REPORTS = st.dictionaries(st.sampled_from(FIELDS), VALUES).map(lambda table: json.dumps(table).encode())
CONTENTS = REPORTS | st.binary(max_size=200) | st.sampled_from(list(ODD.values()))
NAMES = ("launcher.json", "running.json", "progress.json", "stop.json", "notice.json", "status.json")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=st.dictionaries(st.sampled_from(NAMES), CONTENTS, min_size=1))
def test_whatever_is_written_is_read_as_something_that_can_be_stored(tmp_path: Path, written: dict[str, bytes]) -> None:
    layout = Layout(tmp_path / "state", shared=False)
    layout.make()
    shutil.rmtree(layout.jobs / "j-1", ignore_errors=True)
    home = layout.jobs / "j-1" / "attempt-1"
    home.mkdir(parents=True)
    for name, data in written.items():
        (home / name).write_bytes(data)
    header = {"workload": "j-1", "attempt": 1, "owner": "ana", "uid": os.geteuid(), "grace": 5.0}
    attempt = LocalAttempt(header, AttemptFiles(layout, "j-1", 1, os.geteuid(), -1))
    attempt.refresh(time.time())
    storable(attempt.status)
    attempt.conclude(time.time())
    storable(attempt.status)
    if "launcher.json" in written:
        assert attempt.ended


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stat=st.binary(max_size=200) | st.builds(lambda n: b"7 (a) S " + b" ".join([n] * 40), st.sampled_from(
        [b"1", b"-1", b"9" * 30, b"9" * 5000, b"x", b""])),
    environ=st.binary(max_size=200) | st.builds(
        lambda job, number: b"MAKEWAY_JOB_DIR=" + job + b"\0MAKEWAY_ATTEMPT=" + number, st.binary(max_size=20),
        st.sampled_from([b"1", b"9" * 5000, b"-1", b"", b"\xd9\xa1", b"1\0MAKEWAY_ATTEMPT=x", b"0" * 100])),
)  # fmt: skip
def test_whatever_a_process_shows_of_itself_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stat: bytes, environ: bytes
) -> None:
    home = tmp_path / "4000000"
    home.mkdir(exist_ok=True)
    (home / "stat").write_bytes(stat)
    (home / "environ").write_bytes(environ)
    monkeypatch.setattr(processes, "PROC", tmp_path)
    Stat.of(4000000)
    Mark.of(4000000)
    list(processes._carriers({Mark("/nowhere", 1): os.geteuid()}))


@given(pid=VALUES, start_time=VALUES)
def test_no_claim_breaks_the_search_for_its_process(pid: object, start_time: object) -> None:
    claim = {"pid": pid, "start_time": start_time, "boot": boot_id()}
    assert Process.find(claim, os.geteuid(), Mark("/nowhere", 1)) is None
