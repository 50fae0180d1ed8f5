"""A rank that is lost ends the others soon, and the message of the job names it and its error."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from container import FOLDER, Container
from makeway.checkpointing.registration import HEARD, Registration
from makeway.launcher.causes import Ending, last_words
from makeway.launcher.listeners import Listeners

LIBRARY = Path(__file__).parents[2] / "widgets"
STUCK = """
import ctypes, os, signal, sys, time
from makeway import checkpoint

checkpoint.requested()
print("up", flush=True)
while sys.argv[1] == "notice" and not os.path.exists(os.environ["MAKEWAY_STOP_FILE"]):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("no more memory")
print("AfterError: stuck in a collective", flush=True)
while True:
    ctypes.CDLL(None).sleep(600)  # no Python code runs, as in a collective
"""


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


@pytest.mark.slow
@pytest.mark.covers("N12")
@pytest.mark.parametrize("when", ["notice", "early"])
@pytest.mark.parametrize(
    ("how", "code", "words"), [("raise", 1, "rank 1: RuntimeError: no more memory"), ("kill", -9, "rank 1")]
)
def test_a_lost_rank_ends_those_that_wait_for_it(
    container: Container, when: str, how: str, code: int, words: str
) -> None:
    script = container.root / "train.py"
    script.write_text(STUCK)
    workers = [{"env": {"RANK": str(rank), "WORLD_SIZE": "2"}} for rank in range(2)]
    command = [sys.executable, "-u", str(script), when, how]
    process = container.start(*command, env={"PYTHONPATH": str(LIBRARY)}, grace=24, workers=workers)
    if when == "notice":
        for rank in range(2):
            container.until("log", f"[{rank}] up")
        process.send_signal(signal.SIGTERM)
    process.wait(90)
    status = container.status()
    assert (status["exit_code"], status["killed"], status["acknowledged"]) == (code, False, False)
    assert words in status["message"]
    ended = "makeway: rank 1 failed" in container.file("log").read_text()
    assert ended is (when == "notice")


INDEPENDENT = """
import os, sys, time
from makeway import checkpoint

rank, way = os.environ["RANK"], sys.argv[1]
checkpoint.requested()
print("up", flush=True)
while not os.path.exists(os.environ["MAKEWAY_STOP_FILE"]):
    time.sleep(0.01)
if rank == "1":
    raise RuntimeError("a bad batch")
if way == "step":
    time.sleep(13)  # longer than the 10 s after which the others were ended
checkpoint.requested()
with checkpoint.saving(7) as folder:
    time.sleep(20 if way == "slow" and rank == "2" else 0)
    (folder / f"weights-{rank}").write_text("whole")
checkpoint.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["step", "slow"])
def test_workers_that_do_not_need_the_lost_one_save(container: Container, way: str) -> None:
    script = container.root / "train.py"
    script.write_text(INDEPENDENT)
    workers = [{"env": {"RANK": str(rank), "WORLD_SIZE": "3"}} for rank in range(3)]
    process = container.start(
        *(sys.executable, "-u", str(script), way), env={"PYTHONPATH": str(LIBRARY)}, grace=28, workers=workers
    )
    for rank in range(3):
        container.until("log", f"[{rank}] up")
    process.send_signal(signal.SIGTERM)
    process.wait(90)
    checkpoints = container.root / "job" / "checkpoints"
    assert {path.name for path in checkpoints.glob("step-*/weights*")} == {"weights-0", "weights-2"}
    assert "they are ended" not in container.file("log").read_text()


ELASTIC = """[rank0]: RuntimeError: Connection closed by peer
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]: ValueError: a bad batch
[rank1]: (see the manual)
E1127 15:27:14 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-27_15:27:14
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 10940)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_15:27:14
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 10939)
  error_file: <N/A>
============================================================
"""


@pytest.mark.parametrize(
    ("text", "rank", "words"),
    [
        (ELASTIC, "", "rank 1: ValueError: a bad batch"),
        (
            ELASTIC.replace("[rank1]: ", "").replace(": 1 (pid: 10939", ": -9 (pid: 10939"),
            "",
            "rank 1: killed by SIGKILL",
        ),
        ("".join(f"[2] {line}\n" for line in ELASTIC.splitlines()), "2", "rank 1: ValueError: a bad batch"),
        ("[1] KeyError: 'x'\n[0] ConnectionError: closed\n", "1", "rank 1: KeyError: 'x'"),
        ("[1] Segmentation fault\n[0] ConnectionError: closed\n", "1", "rank 1: Segmentation fault"),
        ("[0] ConnectionError: closed\n", "1", "rank 1"),
        ("epoch 1\nValueError: x\n", "", "ValueError: x"),
        ("", "", ""),
    ],
)
def test_the_message_is_of_the_rank_that_failed_first(text: str, rank: str, words: str) -> None:
    assert last_words(text.splitlines(), rank).startswith(words)


def test_ranks_that_hang_until_the_deadline_are_named(container: Container) -> None:
    """As in a collective without a timeout, which no agent ends."""
    (container.root / "train.py").write_text(STUCK.replace('RANK"] == "1"', 'RANK"] in "13"'))
    workers = [{"env": {"RANK": str(rank), "WORLD_SIZE": "4"}} for rank in range(4)]
    command = [sys.executable, "-u", str(container.root / "train.py"), "notice", "raise"]
    process = container.start(*command, env={"PYTHONPATH": str(LIBRARY)}, grace=2, workers=workers)
    for rank in range(4):
        container.until("log", f"[{rank}] up")
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    status = container.status()
    assert status["killed"]
    assert status["message"] == (
        "did not end within 2 s and was killed: ranks 1 and 3 had ended without an acknowledgement, ranks 0 and 2 did "
        "not call checkpoint.requested() in that time; no checkpoint"
    )


SLOW_SAVE = """
import os, time
from makeway import checkpoint

rank = os.environ["RANK"]
checkpoint.requested()
print("up", flush=True)
while not checkpoint.requested():
    time.sleep(0.01)
if rank == "1":
    raise RuntimeError("a bad batch")
with checkpoint.saving(7) as folder:
    time.sleep(16)  # beyond three quarters of the grace
    (folder / "weights").write_text("whole")
time.sleep(2)  # as on a machine under load
checkpoint.stop()
"""


def patched(folder: Path, copy: Path, file: str, new: str, before: str) -> Path:
    """Copy a package with one expression as it was in an earlier release."""
    shutil.copytree(folder, copy)
    text = (copy / file).read_text()
    assert text.count(new) == 1
    (copy / file).write_text(text.replace(new, before))
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("earlier", ["launcher", "library"])
def test_a_save_is_seen_where_launcher_or_library_know_no_file_of_it(tmp_path: Path, earlier: str) -> None:
    """An image may have another release than the service: then what the library writes of its progress counts."""
    launcher, library = FOLDER, LIBRARY
    if earlier == "launcher":
        launcher = patched(FOLDER, tmp_path / "launcher", "listeners.py", r"|\.saving|\.exited)?", ")?")
    else:
        has_file = 'if (folder := os.environ.get("MAKEWAY_LISTENERS")) and not self._saves:'
        file = "makeway/checkpointing/registration.py"
        library = patched(LIBRARY, tmp_path / "library", file, has_file, "if folder := '':")
    container = Container(tmp_path, launcher)
    (tmp_path / "train.py").write_text(SLOW_SAVE)
    workers = [{"env": {"RANK": str(rank), "WORLD_SIZE": "2"}} for rank in range(2)]
    command = [sys.executable, "-u", str(tmp_path / "train.py")]
    process = container.start(*command, env={"PYTHONPATH": str(library)}, grace=20, workers=workers)
    for rank in range(2):
        container.until("log", f"[{rank}] up")
    process.send_signal(signal.SIGTERM)
    process.wait(90)
    assert (tmp_path / "job" / "checkpoints" / "step-000007" / "weights").read_text() == "whole"
    assert "they are ended" not in container.file("log").read_text()
    assert "rank 1: RuntimeError: a bad batch" in container.status()["message"]


@pytest.mark.parametrize(
    ("last_line", "exited", "why"),
    [
        (
            "rank 0: RuntimeError: [/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer",
            ("1",),
            "rank 1 had exited while others waited; rank 0: ",
        ),
        (
            "rank 2: RuntimeError: [/gloo/gloo/transport/tcp/pair.cc:81] writev: Broken pipe",
            ("3", "1", "10"),
            "ranks 1, 3 and 10 had exited while others waited; rank 2: ",
        ),
        (
            "rank 0: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
            "prematurely.",
            ("1",),
            "rank 1 had exited while others waited; rank 0: ",
        ),
        (
            "rank 0: torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /worker_count",
            ("1",),
            "rank 1 had exited while others waited; rank 0: ",
        ),
        ("rank 0: requests.exceptions.ReadTimeout: Read timed out. (read timeout=5)", ("1",), "rank 0: requests"),
        ("rank 0: ConnectionResetError: [Errno 104] Connection reset by peer", ("1",), "rank 0: ConnectionReset"),
        ("rank 1: ConnectionError: closed", ("1",), "rank 1: ConnectionError: closed"),  # of something else
        ("rank 0: ValueError: a bad batch", ("1",), "rank 0: ValueError"),
        ("rank 0: RuntimeError: Connection closed by peer", (), "rank 0: RuntimeError"),
    ],
)
def test_ranks_that_had_exited_are_named_where_another_lost_its_connection(
    last_line: str, exited: tuple[str, ...], why: str
) -> None:
    assert Ending(1, last_line=last_line, exited=exited).unasked().startswith(f"exit code 1: {why}")


@pytest.mark.parametrize("kind", ["folder", "pipe", "text", "gone"])
def test_what_a_job_puts_in_the_place_of_an_exit_names_no_rank(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "1.1.1.exited"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "text":
        path.write_text("all of them")
    else:
        path.symlink_to(tmp_path / "nothing")
    (tmp_path / "2.1.1.exited").write_text("7")
    assert Listeners(str(tmp_path)).exited() == ["7"]


@pytest.mark.parametrize(("later", "exited"), [("1", []), ("0", ["1"]), ("", ["1"])])
def test_a_rank_that_was_started_again_has_not_exited(tmp_path: Path, later: str, exited: list[str]) -> None:
    """As by torchrun --max-restarts; a library of an earlier release writes no rank before the exit."""
    for name, rank in (("8.100.1", "1"), ("8.100.1.exited", "1"), ("9.100.1", "0"), ("20.200.1", later)):
        (tmp_path / name).write_text(rank)
    assert Listeners(str(tmp_path)).exited() == exited


def test_a_process_that_listens_says_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEWAY_LISTENERS", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    Registration().note()
    Registration().note(HEARD)
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["", "3"]
