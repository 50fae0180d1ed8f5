"""The launcher alone, as a container runs it: no service, no detaching, plain signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from container import FOLDER, Container
from makeway.launcher import log as launcher_log
from makeway.launcher.attempt import Attempt
from makeway.launcher.durations import duration
from makeway.launcher.log import Log
from makeway.launcher.run import DRAIN_SECONDS, Run, _remaining_seconds
from makeway_api import durations


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_its_exit_code_is_the_jobs(container: Container) -> None:
    assert container.run("sh", "-c", "exit 7") == 7
    assert container.run("sh", "-c", "kill -9 $$", attempt=2) == 137
    assert container.status(2)["message"] == "killed by SIGKILL (out of memory?)"


def test_who_reports_its_end_knows_the_deadline_of_its_notice(tmp_path: Path) -> None:
    class Reports:
        def finish(self, attempt: Attempt, status: dict[str, Any], log: Log, deadline: float | None = None) -> None:
            self.deadline = deadline

    attempt = Attempt({"workload": "j-1", "attempt": 1, "directory": str(tmp_path)})
    assert attempt.claim()
    reports = Reports()
    run = Run(attempt, reports, None)  # type: ignore[arg-type]
    run.kill_at = 12.0
    run._report(0, "")
    run.log._file.close()
    assert reports.deadline == 12.0


SLOW_DISK = """
import sys, time
from makeway.launcher import log, run
write = log.Log._write
def slow(self, data):
    time.sleep(2.5)
    write(self, data)
log.Log._write = slow
sys.exit(run.main(sys.argv[1:]))
"""


def test_the_last_line_of_a_job_is_in_its_log_on_a_slow_disk(container: Container) -> None:
    container.launcher = [sys.executable, "-c", SLOW_DISK]
    assert container.run("echo", "the last line") == 0
    assert container.file("log").read_text() == "the last line\n"


HANDS_ON = """
import os, socket
print("said", flush=True)
with socket.socket(socket.AF_UNIX) as elsewhere:
    elsewhere.connect(os.environ["MAKEWAY_JOB_DIR"] + "/../elsewhere")
    socket.send_fds(elsewhere, [b"x"], [1])
"""


def test_a_pipe_that_a_process_elsewhere_holds_open_is_not_waited_for(container: Container) -> None:
    with socket.socket(socket.AF_UNIX) as elsewhere:
        elsewhere.bind(str(container.root / "elsewhere"))
        elsewhere.listen()
        process = container.start(sys.executable, "-c", HANDS_ON)
        taker, _ = elsewhere.accept()
        with taker:
            _, [held], _, _ = socket.recv_fds(taker, 1, 1)
            assert process.wait(30) == 0
            os.close(held)
    assert container.file("log").read_text() == "said\n"


def test_it_runs_from_a_copy_of_its_folder(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "bin" / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
    copy = Container(tmp_path, tmp_path / "bin" / "launcher")
    assert copy.run("sh", "-c", "exit 0") == 0
    assert copy.status()["exit_code"] == 0


def test_it_runs_as_a_module(container: Container) -> None:
    container.launcher = [sys.executable, "-m", "makeway.launcher"]
    assert container.run("sh", "-c", "exit 4") == 4


def test_without_an_order_it_says_how_to_call_it() -> None:
    done = subprocess.run([sys.executable, str(FOLDER)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ORDER" in done.stderr


def test_a_second_launcher_ends_at_once(container: Container) -> None:
    first = container.start("sh", "-c", "echo ran >> ../ran; sleep 0.5")
    container.until("running.json")
    assert container.run("sh", "-c", "echo ran >> ../ran") == 0
    assert first.wait(20) == 0
    assert (container.root / "job" / "ran").read_text() == "ran\n"


@pytest.mark.covers("N11")
def test_a_plain_sigterm_is_a_notice(container: Container) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(75)); print('up'); time.sleep(60)"
    )
    process = container.start(sys.executable, "-u", "-c", code)
    container.until("log", "up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75
    assert (container.status()["acknowledged"], container.status()["noticed"]) == (True, True)
    stop = json.loads(container.file("stop.json").read_text())
    assert stop["reason"] == "the machine is stopping"
    assert stop["deadline"] - stop["at"] == pytest.approx(5.0)


def test_the_output_of_a_local_job_is_in_its_log_alone(container: Container, capfd: pytest.CaptureFixture[str]) -> None:
    assert container.run("echo", "for the log") == 0
    assert container.file("log").read_text() == "for the log\n"
    assert capfd.readouterr().out == ""


def test_a_plain_sigterm_has_a_deadline_too(container: Container) -> None:
    process = container.start("sh", "-c", "trap '' TERM; echo up; sleep 60", grace=0.3)
    container.until("log", "up")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 137
    assert container.status()["message"] == "did not end within 0.3 s and was killed; no checkpoint"


def test_a_notice_without_a_signal_is_found(container: Container) -> None:
    process = container.start("sleep", "60")
    container.until("running.json")
    notice = {"reason": "bo", "at": time.time(), "deadline": time.time() + 5}
    container.file("notice.json").write_text(json.dumps(notice))
    os.kill(process.pid, signal.SIGCHLD)  # instead of waiting for its next look
    assert process.wait(20) == 128 + signal.SIGTERM
    assert json.loads(container.file("stop.json").read_text()) == {**notice, "attempt": 1}


def test_orphans_are_collected(container: Container) -> None:
    process = container.start("sh", "-c", "for n in 1 2 3; do (setsid true &) ; done; sleep 0.3; echo up; sleep 60")
    container.until("log", "up")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1, "no zombies"
    process.terminate()
    process.wait(20)


def test_progress_goes_over_to_the_next_attempt(container: Container) -> None:
    save = 'echo \'{"step": 12, "saved_at": 5.5, "acknowledged_at": 6}\' > "$MAKEWAY_PROGRESS_FILE"'
    container.run("sh", "-c", save)
    assert container.status()["message"] == "saved at step 12"
    container.run("true", attempt=2)
    status = container.status(2)
    assert (status["step"], status["checkpoint_at"]) == (12, 5.5)


def test_files_outside_are_refused_by_the_launcher_too(container: Container) -> None:
    files = [{"path": "../../evil", "size": 1}]
    order = {
        "workload": "j",
        "attempt": 1,
        "command": ["true"],
        "directory": str(container.root / "job"),
        "files": files,
    }
    done = subprocess.run(
        [*container.launcher, "-"], input=json.dumps(order).encode() + b"\nx", capture_output=True, check=False
    )
    assert done.returncode == 127
    assert "outside of the working directory" in container.status()["message"]
    assert not (container.root / "evil").exists()


def test_the_launcher_needs_nothing_but_the_standard_library() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import launcher.run"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(FOLDER.parent)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("at", "deadline", "left"),
    [
        (-2.0, 28.0, 28.0),  # read two seconds after it was written
        (-3600.0, -3570.0, 30.0),  # the clock was put forward by an hour since
        (3600.0, 3630.0, 30.0),  # the clock was put back by an hour since
        (0.0, 0.0, 0.0),  # at once
    ],
)
def test_a_clock_that_is_set_takes_no_time_to_save(at: float, deadline: float, left: float) -> None:
    now = time.time()
    notice = {"at": now + at, "deadline": now + deadline}
    assert _remaining_seconds(notice, 5.0) == pytest.approx(left, abs=0.5)


def test_a_note_waits_for_a_line_that_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_log, "LINE_SECONDS", 60.0)
    attempt = Attempt({"workload": "j", "attempt": 1, "directory": str(tmp_path)})
    assert attempt.claim()
    log = Log(attempt, 1000)
    log.write(b"step")
    noting = threading.Thread(target=log.note, args=("notice",))
    noting.start()
    time.sleep(0.1)
    log.write(b" 43\n")
    noting.join(30.0)
    assert (tmp_path / "attempt-1" / "log").read_text() == "step 43\nmakeway: notice\n"
    log._file.close()


def test_a_note_never_continues_a_line_of_the_job(tmp_path: Path) -> None:
    attempt = Attempt({"workload": "j", "attempt": 1, "directory": str(tmp_path)})
    assert attempt.claim()
    log = Log(attempt, 1000)
    log.note("first")
    log.write(b"half a line")
    log.note("notice")
    log.write(b"\n")
    log.note("end")
    text = (tmp_path / "attempt-1" / "log").read_text()
    assert text == "makeway: first\nhalf a line\nmakeway: notice\n\nmakeway: end\n"
    assert log.last_lines(5) == ["half a line"]
    log._file.close()


@pytest.mark.parametrize("seconds", [-1, 0.04, 0.3, 0.94, 0.95, 1.4, 59.6, 90, 240, 3_599, 7_500, 86_400, 273_600])
def test_a_duration_is_written_as_the_service_writes_it(seconds: float) -> None:
    assert duration(seconds) == durations.duration(seconds)


ODD_PLACES = {
    "a FIFO": "os.mkfifo(path)",
    "a link to a FIFO": "os.mkfifo(path + '.fifo'); os.symlink(path + '.fifo', path)",
    "a link to a device": "os.symlink('/dev/zero', path)",
    "a link to nowhere": "os.symlink('/nowhere/at/all', path)",
    "a link to itself": "os.symlink(os.path.basename(path), path)",
    "a folder": "os.mkdir(path); open(path + '/x', 'w').close()",
    "a socket": "socket.socket(socket.AF_UNIX).bind(path)",
    "a read-only file": "open(path, 'w').close(); os.chmod(path, 0)",
}
FLOODS = """
import os, signal, socket, sys, time
os.chdir("../attempt-1")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in range(0, 4_000_000, 250_000):
    path = f"log.{number}"
    if number:
        PLACE
for name in ("notice.json", "progress.json", "stop.json", "result.pkl", "status.json", "running.json"):
    path = name
    if os.path.exists(path):
        os.unlink(path)
    PLACE
# the names that the launcher gives to files before they have their own
for name in ("stop.json", "status.json"):
    path = f"{name}.{os.getppid()}"
    PLACE
for _ in range(6_000):
    os.write(1, b"x" * 999 + b"\\n")
open("../flooded", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("what", ODD_PLACES)
def test_nothing_in_the_place_of_its_files_keeps_it_from_its_time_limit(container: Container, what: str) -> None:
    code = FLOODS.replace("PLACE", ODD_PLACES[what])
    began = time.monotonic()
    process = container.start(sys.executable, "-c", code, time_limit=4.0, grace=1, log_limit=1_000_000)
    assert process.wait(60) == 137
    assert time.monotonic() - began < 25
    assert (container.root / "job" / "flooded").exists(), "its output went on"
    status = container.status()
    assert (status["timed_out"], status["killed"]) == (True, True)
    first = container.file("log").read_text()
    assert len(first) == 500_000
    pieces = [path for path in sorted(container.root.glob("job/attempt-1/log.*"), key=_offset) if _offset(path) >= 0]
    newest = "".join(path.read_text() for path in pieces if path.stat().st_size)
    assert "time limit of 4 s reached" in newest


def _offset(path: Path) -> int:
    return int(path.suffix[1:]) if path.suffix[1:].isdigit() and path.is_file() and not path.is_symlink() else -1


def test_a_disk_that_hangs_holds_up_no_time_limit(container: Container) -> None:
    container.launcher = [sys.executable, "-c", SLOW_DISK.replace("time.sleep(2.5)", "time.sleep(600)")]
    process = container.start("sh", "-c", "trap '' TERM; while :; do echo x; done", time_limit=2.0, grace=1)
    assert process.wait(DRAIN_SECONDS + 40) == 137
    assert container.status()["timed_out"]


def test_a_notice_after_the_time_limit_changes_no_reason(container: Container) -> None:
    code = "import signal, time; signal.signal(15, lambda *_: print('told', flush=True))\nwhile True: time.sleep(1)"
    process = container.start(sys.executable, "-c", code, time_limit=1.0, grace=60)
    container.until("log", "told")
    notice = {"reason": "devops gets its guaranteed GPUs", "at": time.time(), "deadline": time.time() + 1.0}
    path = container.file("notice.json")
    path.with_suffix(".new").write_text(json.dumps(notice))
    path.with_suffix(".new").rename(path)
    assert process.wait(30) == 137, "its end is brought forward"
    status = container.status()
    assert (status["timed_out"], status["noticed"], status["message"]) == (
        True,
        False,
        "time limit of 1 s reached; killed",
    )
