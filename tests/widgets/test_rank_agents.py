"""Ranks that an agent such as torchrun starts: it ends them all, and with code 1, as soon as one ends with another."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from container import Container

LIBRARY = Path(__file__).parents[2] / "widgets"
AGENT = """
import os, signal, subprocess, sys, time

def start(rank):
    env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return subprocess.Popen([sys.executable, "-u", sys.argv[1], *sys.argv[3:]], env=env, start_new_session=True)

for _ in range(int(sys.argv[2])):
    ranks = [start(rank) for rank in range(2)]
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.005)
    first = next((number for number, rank in enumerate(ranks) if rank.poll()), 0)
    open("found", "w").close()
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGTERM)
            rank.wait()
    if not any(rank.returncode for rank in ranks):
        open("over", "w").close()
        while "late" in sys.argv and not os.path.exists(os.environ["MAKEWAY_STOP_FILE"]):
            time.sleep(0.005)
        time.sleep(0.3)  # as torchrun takes to end
        sys.exit(0)
print("=" * 60)
print("FAILED", [rank.returncode for rank in ranks])
if "report" in sys.argv:
    time.sleep(1)  # as torchrun takes to end
    print("Root Cause (first observed failure):\\n[0]:\\n  rank      : %d (local_rank: 0)" % first)
    print("  exitcode  : %d (pid: 1)" % ranks[first].returncode)
sys.exit(1)
"""
RANK = """
import multiprocessing, os, signal, sys, time
from makeway import checkpoint

first, end = sys.argv[1:]
rank = os.environ["RANK"]

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.005)

def load(batches):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as torch's workers do, in C
    while True:
        batches.put(1)

def a_loader_ended(*_):
    raise RuntimeError("a loader is killed by signal")

if __name__ == "__main__":
    batches = multiprocessing.get_context("fork").Queue(4)
    loader = multiprocessing.get_context("fork").Process(target=load, args=(batches,), daemon=True)
    checkpoint.requested()
    loader.start()
    signal.signal(signal.SIGCHLD, a_loader_ended)
    open("up-" + rank, "w").close()
    while not checkpoint.requested():
        batches.get()
    open("heard-" + rank, "w").close()
    wait_for("heard-" + str(1 - int(rank)))
    if rank == first:
        if end == "error":
            raise RuntimeError("no more memory")
        if end == "left":
            os._exit(75)
        if end == "abort":
            import atexit
            atexit.register(os.abort)
    else:
        for _ in range(300):  # the first one has ended long before, but for waiting
            batches.get()
            time.sleep(0.001)
        with checkpoint.saving(7) as folder:
            (folder / "weights").write_text("whole")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    checkpoint.stop()
"""


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def start(
    container: Container, *words: str, code: str = RANK, agent: str = AGENT, starts: int = 1, grace: float = 60
) -> subprocess.Popen[bytes]:
    """Start an agent with two ranks, and wait until both train."""
    for name, text in (("agent.py", agent), ("rank.py", code)):
        (container.root / name).write_text(text)
    command = [sys.executable, "-u", str(container.root / "agent.py"), str(container.root / "rank.py"), str(starts)]
    process = container.start(*command, *words, env={"PYTHONPATH": str(LIBRARY)}, grace=grace)
    for rank in "01":
        while not (container.root / "job" / "work" / f"up-{rank}").exists():
            assert process.poll() is None, container.file("log").read_text()
    return process


def end(container: Container, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    process.send_signal(signal.SIGTERM)
    process.wait(90)
    return container.status()


@pytest.mark.covers("N12")
@pytest.mark.parametrize("first", "01")
@pytest.mark.parametrize("way", ["stop", "abort"])
def test_ranks_that_have_saved_made_way_whatever_their_agent_ends_with(
    container: Container, first: str, way: str
) -> None:
    status = end(container, start(container, first, way))
    assert (status["exit_code"], status["acknowledged"], status["message"]) == (75, True, "saved at step 7")
    assert (container.root / "job" / "checkpoints" / "step-000007" / "weights").read_text() == "whole"


@pytest.mark.parametrize("first", "01")
def test_a_rank_that_fails_after_the_notice_is_no_save_of_the_others(container: Container, first: str) -> None:
    status = end(container, start(container, first, "error"))
    assert (status["exit_code"], status["acknowledged"]) == (1, False)
    assert status["message"].startswith("exit code 1 after the notice: ")


def test_a_code_75_without_an_acknowledgement_is_that_of_the_agent(container: Container) -> None:
    status = end(container, start(container, "0", "left"))
    assert (status["exit_code"], status["acknowledged"]) == (1, False)


ALONE = """
import os, time
from makeway import checkpoint

rank = os.environ["RANK"]
checkpoint.requested()
open("ranks-" + rank, "w").write(str(os.getpid()))
while not os.path.exists("ranks-0"):
    pass
open("up-" + rank, "w").close()
while not checkpoint.requested():
    pass
if rank == "1":
    other = open("ranks-0").read()
    while open(f"/proc/{other}/stat").read().rpartition(")")[2].split()[0] != "Z":  # a collective without it
        time.sleep(0.01)
    raise ConnectionError("closed by peer")
with checkpoint.saving(7) as folder:
    (folder / "weights").write_text("whole")
checkpoint.stop()
"""


@pytest.mark.slow
def test_a_rank_that_alone_saves_does_not_wait_for_those_that_hang_without_it(container: Container) -> None:
    """They end of it, as their connection does."""
    process = start(container, code=ALONE)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(25)  # of 30 s that it waited, half of the grace
    finally:
        process.kill()
        process.wait()


RESTARTED = """
import os
from makeway import checkpoint
started = len([name for name in os.listdir() if name.startswith(os.environ["RANK"])])
open(os.environ["RANK"] + "-" + str(started), "w").close()
for step in checkpoint.loop(10_000_000, save=lambda folder: None):
    if step == 1:
        open("up-" + os.environ["RANK"], "w").close()
"""


def test_an_agent_that_starts_its_ranks_again_leaves_with_what_they_saved(container: Container) -> None:
    status = end(container, start(container, code=RESTARTED, starts=3))
    assert (status["exit_code"], status["acknowledged"], status["message"]) == (
        75,
        True,
        f"saved at step {status['step']}",
    )
    assert len(list((container.root / "job" / "work").glob("[01]-*"))) == 6, "that its ranks end is a failure to it"


ONE_IS_DONE = """
import os, time
from makeway import checkpoint
checkpoint.requested()
open("up-" + os.environ["RANK"], "w").close()
while not checkpoint.requested():
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    checkpoint.done()
    open("done", "w").close()
while not os.path.exists("done"):
    time.sleep(0.01)
checkpoint.stop()
"""


@pytest.mark.no_repeat
def test_work_that_one_rank_has_reported_as_done_is_done_for_all(container: Container) -> None:
    status = end(container, start(container, code=ONE_IS_DONE))
    assert (status["exit_code"], status["completed"], status["acknowledged"]) == (0, True, False)


SHORT = """
import os
from makeway import checkpoint
open("up-" + os.environ["RANK"], "w").close()
list(checkpoint.loop(3, save=lambda folder: None))
"""


@pytest.mark.no_repeat
@pytest.mark.covers("N12")
def test_a_notice_while_an_agent_ends_whose_ranks_are_done_does_not_run_the_job_again(container: Container) -> None:
    process = start(container, "late", code=SHORT)
    while not (container.root / "job" / "work" / "over").exists():
        assert process.poll() is None, container.file("log").read_text()
    status = end(container, process)
    assert (status["exit_code"], status["completed"]) == (0, True)


def test_a_command_after_a_training_that_is_done_gets_the_signal(container: Container) -> None:
    """It may be an evaluation, which the next attempt has to repeat."""
    script = container.root / "train.py"
    script.write_text("from makeway import checkpoint\nlist(checkpoint.loop(3))\n")
    env = {"PYTHONPATH": str(LIBRARY)}
    process = container.start("sh", "-c", f"{sys.executable} {script}; echo up; sleep 60", env=env, grace=1)
    container.until("log", "up")
    status = end(container, process)
    assert (status["exit_code"], status["completed"]) == (-signal.SIGTERM, False)


STUCK = """
import ctypes, os, time
from makeway import checkpoint

rank = os.environ["RANK"]
checkpoint.requested()
open("up-" + rank, "w").close()
while not checkpoint.requested():
    time.sleep(0.005)
if rank == "1":
    with checkpoint.saving(7) as folder:  # without asking whether the others have notice, too
        (folder / "weights").write_text("whole")
    checkpoint.stop()
while True:
    ctypes.CDLL(None).sleep(600)  # no Python code runs, as in a collective with a rank that has left
"""


@pytest.mark.slow
@pytest.mark.covers("N12")
def test_a_rank_that_is_stuck_without_one_that_has_left_is_named(container: Container) -> None:
    """Its agent sends it SIGTERM, for which it has a handler that never runs."""
    process = start(container, code=STUCK, grace=8)
    status = end(container, process)
    assert (status["killed"], status["acknowledged"], status["step"]) == (True, False, 7)
    assert status["message"] == ("did not end within 8 s and was killed: rank 0 had seen the notice; saved at step 7")


LOST = """
import os, signal, sys, time
from makeway import checkpoint

rank, hears, how = os.environ["RANK"], *sys.argv[1:3]
checkpoint.requested()
open("up-" + rank, "w").close()
while not (checkpoint.requested() if hears == "hears" else os.path.exists(os.environ["MAKEWAY_STOP_FILE"])):
    time.sleep(0.005)
if rank == "1":
    with open("pid-", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid-", "pid")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "error":
        sys.exit("[rank1]: RuntimeError: a bad batch")
    sys.exit(0)
while not os.path.exists("found" if how != "leave" else "pid"):
    time.sleep(0.005)
while os.path.exists("/proc/" + open("pid").read()):
    time.sleep(0.005)
print("[rank0]: RuntimeError: pair.cc: Connection closed by peer", flush=True)
os._exit(1)
"""


@pytest.mark.slow
@pytest.mark.covers("N12")
@pytest.mark.parametrize("hears", ["hears", "deaf"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", "rank 1: killed by SIGKILL (out of memory?)"),
        ("error", "rank 1: RuntimeError: a bad batch"),
        ("leave", "rank 1 had exited while others waited; rank 0: RuntimeError: pair.cc: Connection closed by peer"),
    ],
)
def test_an_agent_has_the_time_to_say_which_rank_was_lost_after_the_notice(
    container: Container, hears: str, how: str, words: str
) -> None:
    """The signal of the notice, which is for what does not listen, would end it before."""
    status = end(container, start(container, hears, how, "report", code=LOST))
    assert (status["exit_code"], status["acknowledged"]) == (1, False)
    assert status["message"] == f"exit code 1 after the notice: {words}; no checkpoint"


def test_what_an_agent_still_does_when_its_ranks_have_long_ended_gets_the_signal(container: Container) -> None:
    """As an evaluation after them, which does not listen."""
    agent = AGENT.replace("time.sleep(1)", "time.sleep(600)")
    status = end(container, start(container, "deaf", "error", "report", code=LOST, agent=agent, grace=4))
    assert (status["exit_code"], status["killed"]) == (-signal.SIGTERM, False)
