"""The notice by file first: what a job started lives through it, and signals reach only what does not listen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from container import Container
from makeway.launcher.notice_delivery import NoticeDelivery

LIBRARY = Path(__file__).parents[2] / "widgets"
LOADERS = """
import multiprocessing, os, signal, sys
from makeway import checkpoint

def load(batches):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as torch's workers do, in C
    number = 0
    while True:
        batches.put(number)
        number += 1

def a_loader_ended(*_):
    raise RuntimeError("a loader is killed by signal")

def main():
    context = multiprocessing.get_context(sys.argv[1])
    batches = context.Queue(4)
    loaders = [context.Process(target=load, args=(batches,), daemon=True) for _ in range(2)]
    for loader in loaders:
        loader.start()
    signal.signal(signal.SIGCHLD, a_loader_ended)
    for step in range(10_000_000):
        batches.get()
        if checkpoint.requested():
            with checkpoint.saving(step + 1) as folder:
                (folder / "w").write_text(str([batches.get() for _ in range(50)]))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            checkpoint.stop()
        if step == 3:
            print("up", flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def job(container: Container, code: str, *words: str, **order: Any) -> subprocess.Popen[bytes]:
    """Start a script of this name that runs with the library of this checkout, and wait until it says that it is up."""
    script = container.root / "train.py"
    script.write_text(textwrap.dedent(code))
    env = {"PYTHONPATH": str(LIBRARY), **order.pop("env", {})}
    attempt = order.get("attempt", 1)
    process = container.start(sys.executable, "-u", str(script), *words, env=env, **{"grace": 60, **order})
    container.until("log", "up", attempt)
    return process


def end(container: Container, process: subprocess.Popen[bytes], attempt: int = 1) -> dict[str, Any]:
    """Notify the job; return the status at its end."""
    process.send_signal(signal.SIGTERM)
    process.wait(90)
    return container.status(attempt)


@pytest.mark.covers("N12")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_job_whose_loaders_die_of_the_signal_saves(container: Container, method: str) -> None:
    status = end(container, job(container, LOADERS, method))
    assert (status["exit_code"], status["acknowledged"], status["killed"]) == (75, True, False)
    assert status["message"] == f"saved at step {status['step']}"


@pytest.mark.slow
@pytest.mark.no_repeat
@pytest.mark.covers("N12")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_twenty_of_twenty_notices_with_loaders_are_saved(container: Container, method: str) -> None:
    ends = [end(container, job(container, LOADERS, method, attempt=n), n) for n in range(1, 21)]
    assert [(status["exit_code"], status["acknowledged"]) for status in ends] == [(75, True)] * 20


@pytest.mark.slow
def test_loaders_of_several_workers_of_a_job_live_through_the_notice(container: Container) -> None:
    workers = [{"env": {"RANK": "0"}}, {"env": {"RANK": "1"}}]
    process = job(container, LOADERS, "fork", workers=workers)
    container.until("log", "[0] up")
    container.until("log", "[1] up")
    status = end(container, process)
    assert (status["exit_code"], status["acknowledged"]) == (75, True)


LISTENS = """
import os, signal, subprocess, sys, time
from makeway import checkpoint
signal.signal(signal.SIGTERM, lambda *_: print("main got it", flush=True))
checkpoint.requested()
child = "import signal, time; signal.signal(15, lambda *_: print('child got it', flush=True)); print('up', flush=True)"
child += "; time.sleep(90)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(90)
"""


@pytest.mark.slow
def test_a_listening_process_that_does_not_react_gets_the_signal_before_what_it_started(container: Container) -> None:
    status = end(container, job(container, LISTENS, grace=4))
    got = [line for line in container.file("log").read_text().splitlines() if line.endswith("got it")]
    assert got[0] == "main got it", "at half the grace, the listening process alone"
    assert sorted(got[1:]) == ["child got it", "main got it"], "later its group"
    assert status["message"] == (
        "did not end within 4 s and was killed: it did not call checkpoint.requested() in that time; no checkpoint"
    )


SLOW = """
import os, signal, time
from makeway import checkpoint
signal.signal(signal.SIGTERM, lambda *_: print("signal", flush=True))
print("up", flush=True)
while not checkpoint.requested():
    time.sleep(0.01)
time.sleep(2.0)
with checkpoint.saving(7):
    pass
checkpoint.stop()
"""


@pytest.mark.slow
def test_a_save_that_takes_most_of_the_grace_is_not_disturbed(container: Container) -> None:
    status = end(container, job(container, SLOW, grace=2.6))
    assert "signal" not in container.file("log").read_text().splitlines()
    assert (status["step"], status["acknowledged"] or status["killed"]) == (7, True)


def test_what_never_listens_gets_the_signal_at_once(container: Container) -> None:
    process = container.start("sh", "-c", "echo up; sleep 60 & wait", grace=60)
    container.until("log", "up")
    status = end(container, process)
    assert status["exit_code"] == -signal.SIGTERM
    assert status["message"] == (
        "ended by the notice's SIGTERM, as it had not asked for the notice with makeway.checkpoint; no checkpoint"
    )


CHAIN = """
import os, sys, time
from makeway import checkpoint
checkpoint.requested()
print("listened", flush=True)
os.execvp("sh", ["sh", "-c", "echo up; sleep 60"]) if sys.argv[1] == "exec" else None
"""


@pytest.mark.parametrize("how", ["exec", "end"])
def test_who_listened_and_is_gone_counts_no_more(container: Container, how: str) -> None:
    script = container.root / "first.py"
    script.write_text(CHAIN)
    env = {"PYTHONPATH": str(LIBRARY)}
    process = container.start("sh", "-c", f"{sys.executable} {script} {how}; echo up; sleep 60", env=env, grace=60)
    container.until("log", "up")
    assert end(container, process)["exit_code"] == -signal.SIGTERM


def test_a_notice_that_cannot_be_written_comes_as_a_signal(container: Container) -> None:
    """The launcher may write no byte until the job has ended, as on a full disk."""
    code = f"""
    import atexit, os, resource, time
    from makeway import checkpoint
    def limit(size):
        resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    print("up", flush=True)
    while not os.path.exists({str(container.root / "go")!r}):
        time.sleep(0.01)
    atexit.register(limit, resource.RLIM_INFINITY)
    limit(0)
    os.mkdir({str(container.root / "full")!r})
    while not checkpoint.requested():
        time.sleep(0.01)
    assert not os.path.exists(os.environ["MAKEWAY_STOP_FILE"])
    checkpoint.stop()
    """
    process = job(container, code, grace=60)
    (container.root / "go").touch()
    while not (container.root / "full").exists():
        assert process.poll() is None
        time.sleep(0.01)
    status = end(container, process)
    assert (status["exit_code"], status["acknowledged"]) == (75, True)


def test_a_library_of_an_earlier_release_gets_the_signal_at_once(container: Container) -> None:
    """It writes nothing for the launcher, and waits for the flag of its handler."""
    code = """
    import os, signal, time
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    print("up", flush=True)
    while not (told or os.path.exists(os.environ["MAKEWAY_STOP_FILE"])):
        time.sleep(0.01)
    while not told:
        time.sleep(0.01)
    raise SystemExit(75)
    """
    status = end(container, job(container, code))
    assert (status["exit_code"], status["acknowledged"]) == (75, True)


def test_under_a_launcher_of_an_earlier_release_the_signal_is_the_notice(tmp_path: Path) -> None:
    """It names no folder to register in, writes the stop file, and signals the whole group at once."""
    code = SLOW.replace("time.sleep(2.0)", "")
    stop = tmp_path / "stop.json"
    env = {
        **os.environ,
        **{"PYTHONPATH": str(LIBRARY), "MAKEWAY_JOB_ID": "j-1", "MAKEWAY_STOP_FILE": str(stop)},
        **{"MAKEWAY_PROGRESS_FILE": str(tmp_path / "p.json"), "MAKEWAY_CHECKPOINT_DIR": str(tmp_path / "kept")},
    }
    env.pop("MAKEWAY_LISTENERS", None)
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    stop.write_text("{}")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 75
    process.stdout.close()
    assert sorted(os.listdir(tmp_path)) == ["kept", "p.json", "stop.json"]


IN_A_THREAD = """
import threading, time
from makeway import checkpoint

def train():
    for step in checkpoint.loop(10_000_000, save=lambda folder: None):
        if step == 1:
            print("up", flush=True)
        time.sleep(0.01)

thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


def test_a_loop_in_a_thread_hears_the_notice(container: Container) -> None:
    status = end(container, job(container, IN_A_THREAD))
    assert (status["exit_code"], status["acknowledged"]) == (75, True)
    assert status["step"] > 1


FORKED = """
import os, time
from makeway import checkpoint
checkpoint.requested()
ranks = []
for rank in range(2):
    if (pid := os.fork()) == 0:
        os.environ["RANK"] = str(rank)
        for step in checkpoint.loop(10_000_000, save=lambda folder: None):
            if step == 1:
                print("up", flush=True)
            time.sleep(0.01)
    ranks.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
print("ranks", codes, flush=True)
raise SystemExit(max(codes))
"""


def test_forked_ranks_listen_for_themselves(container: Container) -> None:
    status = end(container, job(container, FORKED))
    assert "ranks [75, 75]" in container.file("log").read_text()
    assert (status["exit_code"], status["acknowledged"]) == (75, True)


HANGS = """
import threading, time
from makeway import checkpoint
threading.Thread(target=time.sleep, args=(600,)).start()
for step in checkpoint.loop(10_000_000, save=lambda folder: None):
    if step == 1:
        print("up", flush=True)
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_thread_that_hangs_holds_no_gpus_after_the_acknowledgement(container: Container) -> None:
    status = end(container, job(container, HANGS, grace=600))
    assert (status["exit_code"], status["acknowledged"], status["killed"]) == (75, True, False)
    assert status["message"] == (f"saved at step {status['step']}; its process had not ended 5 s later, and was ended")


RANKS = """
import os, sys, threading, time
from makeway import checkpoint
checkpoint.requested()
print("up", os.environ["RANK"], flush=True)
while not checkpoint.requested():
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    threading.Thread(target=time.sleep, args=(600,)).start()
    checkpoint.stop()
time.sleep(7)
with checkpoint.saving(5) as folder:
    (folder / "w").touch()
checkpoint.stop()
"""


@pytest.mark.slow
def test_the_end_after_an_acknowledgement_waits_for_every_rank(container: Container) -> None:
    process = job(container, RANKS, workers=[{"env": {"RANK": "0"}}, {"env": {"RANK": "1"}}], grace=600)
    container.until("log", "up 0")
    container.until("log", "up 1")
    status = end(container, process)
    assert (status["exit_code"], status["step"], status["killed"]) == (75, 5, False)


CELL_END = """
import os, time
if True:  # what the runner of cells does at the end
    path = os.environ["MAKEWAY_RESULT_FILE"]
    open(path, "w").write("kept")
print("up", flush=True)
time.sleep(90)
"""


@pytest.mark.no_repeat
def test_a_result_that_is_kept_and_our_own_signal_are_an_end(container: Container) -> None:
    status = end(container, job(container, CELL_END))
    assert (status["exit_code"], status["completed"], status["acknowledged"]) == (0, True, False)


def test_a_crash_after_the_notice_is_told_with_its_error(container: Container) -> None:
    code = """
    import time
    from makeway import checkpoint
    with checkpoint.saving(3):
        pass
    checkpoint.requested()
    print("up", flush=True)
    while not checkpoint.requested():
        time.sleep(0.01)
    raise RuntimeError("disk on fire")
    """
    status = end(container, job(container, code))
    assert (status["exit_code"], status["acknowledged"]) == (1, False)
    assert status["message"] == "exit code 1 after the notice: RuntimeError: disk on fire; saved at step 3"


def test_a_save_that_takes_more_than_half_of_the_grace_is_told_before_and_after_the_notice(
    container: Container,
) -> None:
    code = """
    import time
    from makeway import checkpoint
    checkpoint.requested()
    with checkpoint.saving(3):
        time.sleep(2.6)
    print("up", flush=True)
    time.sleep(90)
    """
    process = job(container, code, grace=5)
    process.send_signal(signal.SIGCHLD)  # instead of waiting for its next look
    container.until("log", " s, more than half of the grace of 5 s; save less or faster")
    message = end(container, process)["message"]
    expected = r"saved at step 3; its last save took [2-4](\.\d)? s, more than half of the grace of 5 s$"
    assert re.search(expected, message), message


IN_SAVE = """
import time
from makeway import checkpoint
checkpoint.requested()
with checkpoint.saving(3):
    pass
print("up", flush=True)
while not checkpoint.requested():
    time.sleep(0.01)
try:
    with checkpoint.saving(4):
        {}
except OSError:
    time.sleep(90)
"""


@pytest.mark.parametrize(("does", "killed"), [("time.sleep(90)", True), ("raise OSError", False)])
def test_a_save_that_the_deadline_ended_is_named_and_told_to_the_service(
    container: Container, does: str, killed: bool
) -> None:
    status = end(container, job(container, IN_SAVE.format(does), grace=1))
    assert status["killed"]
    where = "1 s into a save" if killed else "after it had seen the notice"
    assert status["message"].startswith(f"did not end within 1 s and was killed {where}; saved at step 3")
    progress = json.loads(container.file("progress.json").read_text())["progress"]
    assert progress.get("save_killed", False) is killed
    assert (progress["save_seconds"] > 0.5) is killed


@pytest.mark.parametrize("thread", [False, True])
def test_a_stop_in_the_block_of_a_save_completes_the_checkpoint(container: Container, thread: bool) -> None:
    code = """
    import sys, threading, time
    from makeway import checkpoint

    def train():
        with checkpoint.saving(3):
            pass
        checkpoint.requested()
        print("up", flush=True)
        while not checkpoint.requested():
            time.sleep(0.01)
        with checkpoint.saving(4) as folder:
            (folder / "state").write_text("whole")
            checkpoint.stop()

    threading.Thread(target=train).start() if sys.argv[1:] else train()
    """
    status = end(container, job(container, code, *["thread"] * thread))
    assert (status["exit_code"], status["acknowledged"], status["message"]) == (75, True, "saved at step 4")
    kept = container.root / "job" / "checkpoints"
    assert sorted(path.name for path in kept.glob("step-*")) == ["step-000003", "step-000004"]
    assert (kept / "step-000004" / "state").read_text() == "whole"


TWICE = """
import os, sys, time
from makeway import checkpoint

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

with checkpoint.saving(3) as folder:
    (folder / "state").write_text("whole")
checkpoint.requested()
print("up", flush=True)
while not checkpoint.requested():
    time.sleep(0.01)
with checkpoint.saving(4) as folder:
    (folder / "state").write_text("ha")
    print(f"process {os.getpid()} is in its save", flush=True)
    wait_for(sys.argv[1])
    (folder / "state").write_text("whole")
checkpoint.stop()
"""


def twice(container: Container, to: str, grace: float) -> subprocess.Popen[bytes]:
    """Return a job that has got its notice and, in the save that follows, two more signals: its launcher, or itself."""
    process = job(container, TWICE, str(container.root / "go"), grace=grace)
    process.send_signal(signal.SIGTERM)
    container.until("log", "is in its save")
    (pid,) = re.findall(r"process (\d+) is in its save", container.file("log").read_text())
    for _ in range(2):
        os.kill(process.pid if to == "launcher" else int(pid), signal.SIGTERM)
        time.sleep(0.5)
    return process


@pytest.mark.covers("N12")
@pytest.mark.parametrize("to", ["launcher", "job"])
def test_two_signals_in_a_save_leave_it_whole(container: Container, to: str) -> None:
    process = twice(container, to, grace=60)
    (container.root / "go").touch()
    process.wait(90)
    status = container.status()
    assert (status["exit_code"], status["acknowledged"], status["message"]) == (75, True, "saved at step 4")
    assert container.file("log").read_text().count("to save and end") == 1, "one notice, however often it is sent"
    kept = container.root / "job" / "checkpoints"
    assert {path.name: (path / "state").read_text() for path in kept.glob("step-*")} == {
        "step-000003": "whole",
        "step-000004": "whole",
    }


@pytest.mark.parametrize("to", ["launcher", "job"])
def test_two_signals_in_a_save_move_no_deadline_and_leave_the_older_checkpoint(container: Container, to: str) -> None:
    process = twice(container, to, grace=10)  # with less, a busy machine ends it before its save begins
    process.wait(90)
    status = container.status()
    assert (status["exit_code"], status["killed"], status["acknowledged"]) == (-signal.SIGKILL, True, False)
    expected = r"did not end within 10 s and was killed (\d(\.\d)?|10|10\.[0-2]) s into a save; saved at step 3"
    assert re.fullmatch(expected, status["message"]), status["message"]
    assert container.file("log").read_text().count("to save and end") == 1
    kept = container.root / "job" / "checkpoints"
    complete = [path for path in kept.iterdir() if path.name.startswith("step-")]
    assert [(path.name, (path / "state").read_text()) for path in complete] == [("step-000003", "whole")]


EXITS = """
import atexit, os, signal, time
from makeway import checkpoint

def while_the_interpreter_exits():
    print("up", flush=True)
    while not os.path.exists(os.environ["MAKEWAY_STOP_FILE"]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

atexit.register(while_the_interpreter_exits)
late = checkpoint.late = Late()
list(checkpoint.loop(3, save=lambda folder: None))
"""


def test_signals_while_the_interpreter_exits_change_no_exit_code(container: Container) -> None:
    status = end(container, job(container, EXITS))
    assert (status["exit_code"], status["completed"]) == (0, True)


RUNNER = Path(__file__).parents[2] / "widgets" / "makeway" / "cellrunner.py"
CELL = """
import atexit, os, time

def while_the_interpreter_exits():
    print("up", flush=True)
    while not os.path.exists(os.environ["MAKEWAY_STOP_FILE"]):
        time.sleep(0.01)
    os.kill(os.getpid(), 15)

atexit.register(while_the_interpreter_exits)
"""


@pytest.mark.no_repeat
@pytest.mark.parametrize(("last", "code"), [("41 + 1", 0), ("1 / 0", 1)])
def test_a_cell_that_is_over_ends_as_it_would_without_the_notice(container: Container, last: str, code: int) -> None:
    (container.root / "cell.py").write_text(CELL + last + "\n")
    (container.root / "run.py").write_text(RUNNER.read_text())
    process = container.start(sys.executable, "-u", str(container.root / "run.py"), grace=60)
    container.until("log", "up")
    status = end(container, process)
    assert (status["exit_code"], status["completed"]) == (code, code == 0)


RESUMES = """
import asyncio, sys
from tqdm.auto import tqdm
from makeway import checkpoint

total = 0

def save(folder):
    (folder / "total").write_text(str(total))

def load(folder):
    global total
    total = int((folder / "total").read_text())

async def batch(n):
    await asyncio.sleep(0.01)
    return n

async def others():
    while True:
        await asyncio.sleep(0.01)

task = asyncio.create_task(others())
for step in {loop}:
    total += await batch(step)
    if step == 10:
        print("up", file=sys.stderr, flush=True)
print("the sum is", total)
"""


@pytest.mark.no_repeat
@pytest.mark.covers("N12")
@pytest.mark.parametrize(
    "loop",
    [
        "checkpoint.loop(60, save, load)",
        "tqdm(checkpoint.loop(60, save, load))",
        "checkpoint.loop(tqdm(range(60)), save, load)",
    ],
)
def test_a_cell_that_awaits_in_its_loop_saves_and_resumes(container: Container, loop: str) -> None:
    (container.root / "cell.py").write_text(RESUMES.format(loop=loop))
    (container.root / "run.py").write_text(RUNNER.read_text())
    command = [sys.executable, "-u", str(container.root / "run.py")]
    process = container.start(*command, env={"PYTHONPATH": str(LIBRARY)}, grace=60)
    container.until("log", "up\n")
    status = end(container, process)
    assert (status["exit_code"], status["acknowledged"], status["completed"]) == (75, True, False)
    assert status["message"] == f"saved at step {status['step']}"
    process = container.start(*command, env={"PYTHONPATH": str(LIBRARY)}, grace=60, attempt=2)
    assert process.wait(60) == 0
    assert container.status(2)["completed"]
    assert f"the sum is {sum(range(60))}\n" in container.file("log", 2).read_text()


def test_the_signal_of_a_profile_breaks_off_no_step(container: Container) -> None:
    """Python's own handler of SIGINT raises an exception."""
    code = """
    import os, signal, time
    from makeway import checkpoint
    checkpoint.requested()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
    print("up", flush=True)
    while not checkpoint.requested():
        time.sleep(0.01)
    checkpoint.stop()
    """
    assert end(container, job(container, code, signal="SIGINT"))["exit_code"] == 75


DONE = """
import os, sys, threading, time
from makeway import checkpoint

def train():
    checkpoint.requested()
    print("up", flush=True)
    while "early" not in sys.argv and not checkpoint.requested():
        time.sleep(0.01)
    with checkpoint.saving(3) as folder:
        (folder / "state").touch()
        checkpoint.done()
        if "save" in sys.argv:
            checkpoint.stop()
    checkpoint.stop()

threading.Thread(target=train).start() if "thread" in sys.argv else train()
"""


@pytest.mark.no_repeat
@pytest.mark.covers("N12")
@pytest.mark.parametrize("where", ["main", "thread", "save", "early"])
def test_a_stop_of_work_that_is_done_does_not_run_it_again(container: Container, where: str) -> None:
    process = job(container, DONE, where)
    process.wait(90) if where == "early" else end(container, process)
    status = container.status()
    assert (status["exit_code"], status["completed"], status["acknowledged"]) == (0, True, False)
    assert status["message"] == "saved at step 3"


def test_a_stop_of_work_that_began_anew_after_it_was_done_resumes(container: Container) -> None:
    code = """
    import time
    from makeway import checkpoint
    checkpoint.done()
    for step in checkpoint.loop(10_000_000, save=lambda folder: None):
        if step == 1:
            print("up", flush=True)
        time.sleep(0.01)
    """
    status = end(container, job(container, code))
    assert (status["exit_code"], status["completed"], status["acknowledged"]) == (75, False, True)


def test_a_job_that_has_saved_exits_without_collections_and_with_all_it_wrote(container: Container) -> None:
    code = """
    import atexit, gc, time
    atexit.register(lambda: print("frozen", gc.get_freeze_count() > 1000, gc.isenabled(), flush=True))
    from makeway import checkpoint

    class Writer:
        def __init__(self, name, mode):
            self.file, self.own = open(name, mode), self

    writers = [Writer("text", "w"), Writer("bytes", "wb"), Writer("both", "w+b"), Writer("closed", "w")]
    checkpoint.requested()
    print("up", flush=True)
    while not checkpoint.requested():
        time.sleep(0.01)
    writers[0].file.write("last words")
    writers[1].file.write(b"last bytes")
    writers[2].file.write(b"last of both")
    writers[3].file.close()
    checkpoint.stop()
    """
    assert end(container, job(container, code))["exit_code"] == 75
    assert "frozen True False" in container.file("log").read_text()
    work = container.root / "job" / "work"
    assert [(work / name).read_text() for name in ("text", "bytes", "both")] == [
        "last words",
        "last bytes",
        "last of both",
    ]


DAEMONS = """
import multiprocessing, os, sys, time
from makeway import checkpoint
checkpoint.requested()

def work():
    while True:
        time.sleep(0.1)

def main():
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=work, daemon=True)
    worker.start()
    print("up", flush=True)
    while not os.path.exists(os.environ["MAKEWAY_STOP_FILE"]):
        time.sleep(0.01)
    if sys.argv[1] == "terminate":
        checkpoint.requested()
        worker.terminate()
        worker.join()
    if sys.argv[1] == "result":
        checkpoint.requested()
        checkpoint.done()
        sys.exit(0)
    checkpoint.stop()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("way", ["stop", "terminate", "result"])
def test_a_job_that_leaves_does_not_wait_for_the_workers_that_it_ends(container: Container, way: str) -> None:
    """They ignore the signal of a notice, and took the one of their parent for it."""
    status = end(container, job(container, DAEMONS, way, grace=15))
    assert (status["exit_code"], status["killed"]) == (0 if way == "result" else 75, False)
    assert "was ended" not in status["message"]


GROUP = """
import multiprocessing, os, time
from makeway import checkpoint
checkpoint.latest()  # handles the signal, and does not listen yet

def work(batches, number):
    while True:
        batches.put(number)

def main():
    context = multiprocessing.get_context("fork")
    batches = context.Queue(1)
    worker = context.Process(target=work, args=(batches, 1), daemon=True)
    worker.start()
    batches.get()
    print("up", flush=True)
    while not os.path.exists(os.path.join(os.environ["MAKEWAY_LISTENERS"], "signalled")):
        time.sleep(0.01)
    time.sleep(0.5)
    later = context.Process(target=time.sleep, args=(600,), daemon=True)
    later.start()
    time.sleep(0.2)
    with checkpoint.saving(1) as folder:
        (folder / "w").write_text(str(batches.get() + batches.get() + batches.get()))
    assert worker.is_alive()
    checkpoint.stop()

if __name__ == "__main__":
    main()
"""


def test_workers_outlive_the_signal_to_their_group_and_those_of_later_end_with_their_parent(
    container: Container,
) -> None:
    status = end(container, job(container, GROUP, grace=15))
    assert (status["exit_code"], status["killed"], status["message"]) == (75, False, "saved at step 1")


class Group:
    """What the delivery asks of the workers: which have ended, and of which of those processes go on."""

    def __init__(self, codes: dict[int, int], alive: set[int]) -> None:
        self.exit_codes = codes
        self.alive = alive

    def group_is_alive(self, worker: int) -> bool:
        return worker in self.alive

    def signal_group(self, worker: int, number: int) -> None:
        """Do nothing: the signal has ended the shells."""


@pytest.mark.parametrize(
    ("codes", "alive", "in_vain"),
    [
        ({}, {1, 2}, False),  # neither listens
        ({1: -15}, {1, 2}, False),
        ({1: -15, 2: 1}, {1}, False),  # a save below the shell of rank 0, after rank 1 failed
        ({1: 143, 2: 1}, {1}, False),
        ({1: -15, 2: 1}, set(), False),  # nothing is left that could wait
        ({2: 1}, {1}, True),  # rank 0 listens, and has not polled
        ({1: -9, 2: 1}, {1}, True),
        ({2: -15, 3: 1}, {1, 2}, False),  # rank 0 waits, and below the shell of rank 1 there is a save
    ],
)
def test_workers_wait_in_vain_only_where_all_that_is_left_of_them_does(
    tmp_path: Path, codes: dict[int, int], alive: set[int], in_vain: bool
) -> None:
    delivery = NoticeDelivery(Group(codes, alive), signal.SIGTERM, str(tmp_path / "progress.json"))  # type: ignore[arg-type]
    for worker in (1, 2, 3):
        (tmp_path / str(worker)).mkdir()
        if worker in alive | codes.keys():
            delivery.add(worker, str(tmp_path / str(worker)))
    if in_vain or 3 in codes:
        (tmp_path / "1" / "999999999.1.1").touch()
    delivery.begin(0.0, written=True)
    assert delivery.wait_in_vain(is_saving=False) is in_vain
    (tmp_path / "progress.json").write_text(json.dumps({"saved_at": time.time() - 3}))
    assert not delivery.wait_in_vain(is_saving=False), "it may still acknowledge the notice"
    (tmp_path / "progress.json").write_text(json.dumps({"saved_at": time.time() - 9}))
    assert delivery.wait_in_vain(is_saving=False) is in_vain
