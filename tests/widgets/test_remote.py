"""The launcher's way over HTTP: what it sends, again and again, and what it makes of each answer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from makeway.launcher import log_sender, outage, output_copy, remote
from makeway.launcher.attempt import Attempt
from makeway.launcher.log import Log
from makeway.launcher.log_sender import LogSender
from makeway.launcher.pause import MAX_PAUSE, Pause
from makeway.launcher.remote import RemoteTransport
from makeway.launcher.report import report_of
from makeway.launcher.run import LOST_RANK_SECONDS
from makeway.launcher.service import AttemptEnded, RequestRejected, Service, ServiceUnavailable
from makeway.launcher.termination_message import MAX_SIZE, write_termination_message

FOLDER = Path(__file__).parents[2] / "widgets" / "makeway" / "launcher"
START = {
    "workload": "j-1",
    "attempt": 1,
    "worker": 0,
    "gang": 1,
    "name": "far",
    "team": "rnd",
    "profile": "gpu1",
    "gpus": 1.0,
    "env": {},
    "files": [],
    "grace": 5,
    "signal": "SIGTERM",
    "time_limit": None,
    "log_limit": 1000,
    "step": None,
    "saved_at": None,
    "heartbeat": 0.2,
    "lost_after": 120.0,
    "token": "second",
}
UNAUTHORIZED = (401, {"code": "unauthorized", "detail": "opens no worker"})


class Quota(ThreadingHTTPServer):
    """A service that answers one worker; the test says what is wrong with it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.command = ["true"]
        self.start: dict[str, Any] = {}
        """what the answer to a claim has otherwise"""
        self.receipt: dict[str, Any] = {}
        """what the answer to a report has otherwise"""
        self.claims = 0
        self.files: dict[str, bytes] = {}
        """by digest"""
        self.outputs: dict[str, bytes] = {"log": b"", "result": b"", "error": b""}
        self.reports: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        self.troubles: dict[str, list[tuple[int, Any]]] = {}
        """by the first word of the path: answers to give first"""
        self.down = threading.Event()
        self.connections = 0
        self.pace = 0.1
        self.orders: dict[str, Any] = {"known": "", "notice": None, "stop": False}
        self.changed = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/makeway/api/v1/attempts/j-1/1/0"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write no trace of a launcher that has ended."""

    def order(self, **orders: Any) -> None:
        with self.changed:
            self.orders = {"known": str(orders), "notice": None, "stop": False, **orders}
            self.changed.notify_all()

    def end(self) -> dict[str, Any] | None:
        """Return the last report of the end."""
        return next((report["exit"] for report in reversed(self.reports) if report.get("exit")), None)


class Answers(BaseHTTPRequestHandler):
    """Answers as the service does."""

    protocol_version = "HTTP/1.1"
    server: Quota

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        self.reply(b"")

    def do_POST(self) -> None:
        self.reply(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def reply(self, body: bytes) -> None:
        quota, parts = self.server, urlsplit(self.path)
        words = parts.path.split("/attempts/j-1/1/0/")[1].split("/")
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if quota.down.is_set():
            self.close_connection = True
            return
        quota.tokens.append(self.headers["Authorization"])
        status = 200
        answer: Any = {}
        if quota.troubles.get(words[0]):
            status, answer = quota.troubles[words[0]].pop(0)
        elif words[0] == "claim":
            quota.claims += 1
            answer = {**START, "command": quota.command, **quota.start}
        elif words[0] == "files":
            answer = quota.files[words[1]]
        elif words[0] == "report":
            quota.reports.append(json.loads(body))
            answer = {"heartbeat": 0.2, "pace": quota.pace, "token": None, **quota.receipt}
        elif words[0] == "orders":
            with quota.changed:
                quota.changed.wait_for(lambda: quota.orders["known"] != query["known"], min(2.0, float(query["wait"])))
                answer = quota.orders
        else:
            status, answer = self.append(words[1], int(query["offset"]), query["dropped"] == "true", body)
        self.send(status, answer)

    def append(self, kind: str, offset: int, dropped: bool, data: bytes) -> tuple[int, dict[str, Any]]:
        known = self.server.outputs[kind]
        if offset > len(known):
            if not dropped:
                return 409, {"code": "out_of_place", "detail": "missing", "numbers": {"expected": len(known)}}
            known += b"?" * (offset - len(known))
        self.server.outputs[kind] = known + data[len(known) - offset :]
        return 200, {"end": len(self.server.outputs[kind])}

    def send(self, status: int, answer: Any) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


@pytest.fixture
def quota() -> Iterator[Quota]:
    server = Quota()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def launch(
    quota: Quota,
    home: Path,
    *command: str,
    launcher: Path = FOLDER,
    starter: tuple[str, ...] = (),
    output: int = subprocess.DEVNULL,
    errors: int | None = None,
    **env: str,
) -> subprocess.Popen[bytes]:
    """Start a launcher that knows an address and a token."""
    quota.command = list(command) or quota.command
    environ = {
        "PATH": os.environ["PATH"],
        "MAKEWAY_ATTEMPT_URL": quota.url,
        "MAKEWAY_ATTEMPT_TOKEN": "first",
        "MAKEWAY_JOB_DIR": str(home),
        **env,
    }
    command = starter or (sys.executable, "-I", "-S", str(launcher), "--remote")
    with open(home / "errors", "wb") as file:
        return subprocess.Popen(command, env=environ, stdout=output, stderr=file if errors is None else errors)


def until(quota: Quota, what: Any) -> None:
    ends = time.monotonic() + 60
    while not what():
        assert time.monotonic() < ends, (quota.reports, quota.outputs)
        time.sleep(0.01)


def test_a_worker_reports_its_end_and_its_outputs(quota: Quota, tmp_path: Path) -> None:
    script = 'echo hello; echo result > "$MAKEWAY_RESULT_FILE"; echo \'{"type": "E"}\' > "$MAKEWAY_ERROR_FILE"; exit 3'
    process = launch(quota, tmp_path, "sh", "-c", script)
    assert process.wait(60) == 3
    end = quota.end()
    assert end is not None
    assert (end["exit_code"], end["message"]) == (3, "exit code 3: hello")
    assert quota.outputs == {"log": b"hello\n", "result": b"result\n", "error": b'{"type": "E"}\n'}
    assert quota.tokens[0] == "Bearer first"
    assert set(quota.tokens[1:]) == {"Bearer second"}, "the answer to the claim replaces the token"


def test_a_copy_of_the_launcher_runs_where_there_is_no_package(quota: Quota, tmp_path: Path) -> None:
    copy = tmp_path / "makeway" / "launcher"
    for _ in range(2):
        subprocess.run([sys.executable, "-m", "makeway.launcher", "--copy", str(copy)], check=True)
    assert {file.name for file in copy.iterdir()} - {"library"} == {file.name for file in FOLDER.glob("*.py")}
    volume = tmp_path / "volume"
    for folder in (volume / "j-1", volume / "j-1", Path("/proc/here/no/folder/can/be/made")):
        environ = os.environ | {"MAKEWAY_CHECKPOINT_DIR": str(folder)}
        subprocess.run([sys.executable, "-m", "makeway.launcher", "--copy", str(copy)], check=True, env=environ)
    assert [file.name for file in volume.iterdir()] == ["j-1"], "the job's folder is made where it can be"
    assert launch(quota, tmp_path, "echo", "here", launcher=copy).wait(60) == 0
    assert quota.outputs["log"] == b"here\n"


def test_a_worker_leaves_how_it_ended_to_its_machine(quota: Quota, tmp_path: Path) -> None:
    """While the service is away, before it gives up reporting to it."""
    words = tmp_path / "termination-message"
    code = "echo up; while [ ! -e ../away ]; do sleep 0.05; done; echo last; exit 3"
    process = launch(quota, tmp_path, "sh", "-c", code, MAKEWAY_TERMINATION_FILE=str(words))
    until(quota, lambda: quota.outputs["log"])
    quota.down.set()
    (tmp_path / "away").touch()
    until(quota, words.exists)
    until(quota, words.read_bytes)
    assert process.poll() is None, "it still tries to report"
    written = json.loads(words.read_text())
    assert (written["tail"], written["exit"]["exit_code"]) == ("up\nlast", 3)
    quota.down.clear()
    assert process.wait(60) == 3
    report = {key: value for key, value in quota.reports[-1].items() if key != "progress"}
    assert written == {**report, "tail": "up\nlast"}, "it is the report, without what would take its room"


@pytest.mark.parametrize("text", ["x" * 10_000, "ü\U0001f40d" * 2000, "\0" * 4000])
def test_a_termination_message_is_shortened_until_a_kubelet_keeps_it(tmp_path: Path, text: str) -> None:
    report = {"noticed": True, "step": 7, "exit": {"exit_code": 1, "message": text[:4000]}}
    write_termination_message(str(tmp_path / "words"), report, [text, "newest"])
    data = (tmp_path / "words").read_bytes()
    assert len(data) <= MAX_SIZE
    written = json.loads(data)
    assert (written["step"], written["exit"]["exit_code"]) == (7, 1)
    assert text.startswith(written["exit"]["message"])
    assert "newest".endswith(written["tail"][-6:])


def test_a_result_that_is_no_file_holds_nothing_up(quota: Quota, tmp_path: Path) -> None:
    process = launch(quota, tmp_path, "sh", "-c", 'mkfifo "$MAKEWAY_RESULT_FILE"; mkdir "$MAKEWAY_ERROR_FILE"')
    assert process.wait(60) == 0
    assert (quota.outputs["result"], quota.outputs["error"]) == (b"", b"")


def test_the_job_does_not_get_the_token(quota: Quota, tmp_path: Path) -> None:
    quota.start = {"log_limit": 100_000}  # PATH may be long
    launch(quota, tmp_path, "env", MAKEWAY_WORKER_ENV='{"RANK": "7"}', MAKEWAY_CHECKPOINT_DIR="/volume/j-1").wait(60)
    names = dict(line.partition("=")[::2] for line in quota.outputs["log"].decode().splitlines())
    assert not names.keys() & {"MAKEWAY_ATTEMPT_URL", "MAKEWAY_ATTEMPT_TOKEN", "MAKEWAY_WORKER_ENV"}
    assert (names["RANK"], names["MAKEWAY_CHECKPOINT_DIR"]) == ("7", "/volume/j-1")


@pytest.mark.parametrize("orders", [{"notice": {"reason": "reclaim", "at": 0.0, "deadline": 5.0}}, {"stop": True}])
def test_orders_are_followed(quota: Quota, tmp_path: Path, orders: dict[str, Any]) -> None:
    process = launch(quota, tmp_path, "sh", "-c", "echo up; trap 'exit 75' TERM; while :; do sleep 0.05; done")
    until(quota, lambda: b"up" in quota.outputs["log"])
    quota.order(**orders)
    process.wait(60)
    end = quota.end()
    assert end is not None
    if "stop" in orders:
        assert (end["message"], end["acknowledged"]) == ("stopped", False)
    else:
        assert (end["exit_code"], end["acknowledged"]) == (75, True)
        assert b"makeway: notice: reclaim" in quota.outputs["log"]
        assert json.loads((tmp_path / "attempt-1" / "stop.json").read_text())["reason"] == "reclaim"


STUCK = """
import ctypes, os, time
from makeway import checkpoint
checkpoint.requested()
print("up", flush=True)
while not os.path.exists(os.environ["MAKEWAY_STOP_FILE"]):
    time.sleep(0.01)
while True:
    ctypes.CDLL(None).sleep(600)  # no Python code runs, as in a collective
"""


def stuck(quota: Quota, home: Path, grace: float, **failed: Any) -> dict[str, Any]:
    """Run rank 0 of a gang of pods that gets a notice; return its end."""
    quota.start |= {"gang": 2, "grace": grace}
    rank = {"MAKEWAY_WORKER_ENV": '{"RANK": "0", "WORLD_SIZE": "2"}', "PYTHONPATH": str(FOLDER.parents[1])}
    process = launch(quota, home, sys.executable, "-c", STUCK, **rank)
    until(quota, lambda: b"up" in quota.outputs["log"])
    notice = {"reason": "reclaim", "at": time.time(), "deadline": time.time() + grace}
    quota.order(notice=notice)
    until(quota, lambda: b"makeway: notice: reclaim" in quota.outputs["log"])
    if failed:
        quota.order(notice=notice, failed=failed)
    process.wait(90)
    end = quota.end()
    assert end is not None
    return end


@pytest.mark.slow
@pytest.mark.covers("N12")
def test_a_worker_does_not_wait_until_the_deadline_for_a_rank_of_its_gang_that_failed(
    quota: Quota, tmp_path: Path
) -> None:
    end = stuck(quota, tmp_path, 24, worker=1, exit_code=-9)
    lost = "rank 1 failed (killed by SIGKILL (out of memory?))"
    assert (end["exit_code"], end["killed"], end["acknowledged"]) == (-9, False, False)
    assert end["message"] == f"ended, as it waited for another rank in vain: {lost}; no checkpoint"
    assert f"makeway: {lost}, and the others have not ended".encode() in quota.outputs["log"]


BY_ITSELF = """
import os, signal, time

def save(*_):
    print("saving", flush=True)
    while not os.path.exists("save"):
        time.sleep(0.01)
    open("saved", "w").close()
    raise SystemExit(75)

signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.covers("N12")
@pytest.mark.parametrize("shell", ["{} train.py; exit $?", "trap 'exit 143' TERM; {} train.py & wait"])
def test_a_save_below_a_shell_that_the_notice_ended_goes_on_though_a_rank_elsewhere_failed(
    quota: Quota, tmp_path: Path, shell: str
) -> None:
    quota.start |= {"gang": 2, "grace": 60}
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(BY_ITSELF)
    rank = {"MAKEWAY_WORKER_ENV": '{"RANK": "0", "WORLD_SIZE": "2"}'}
    process = launch(quota, tmp_path, "sh", "-c", shell.format(sys.executable), **rank)
    until(quota, lambda: b"up" in quota.outputs["log"])
    notice = {"reason": "reclaim", "at": time.time(), "deadline": time.time() + 60}
    quota.order(notice=notice)
    until(quota, lambda: b"saving" in quota.outputs["log"])
    quota.order(notice=notice, failed={"worker": 1, "exit_code": 1})
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(LOST_RANK_SECONDS + 7)
    (tmp_path / "work" / "save").touch()
    process.wait(60)
    end = quota.end()
    assert end is not None
    assert not end["killed"]
    assert (tmp_path / "work" / "saved").exists()
    assert b"they are ended" not in quota.outputs["log"]


@pytest.mark.parametrize("failed", [{}, {"worker": "one", "exit_code": None}])
def test_a_worker_whose_service_names_no_rank_that_failed_has_its_grace(
    quota: Quota, tmp_path: Path, failed: dict[str, Any]
) -> None:
    end = stuck(quota, tmp_path, 1, **failed)
    assert (end["exit_code"], end["killed"]) == (-9, True)
    why = "rank 0 did not call checkpoint.requested() in that time"
    assert end["message"] == f"did not end within 1 s and was killed: {why}; no checkpoint"


def test_the_work_goes_on_while_the_service_is_unavailable(quota: Quota, tmp_path: Path) -> None:
    process = launch(quota, tmp_path, "sh", "-c", "echo up; while [ ! -e go ]; do sleep 0.05; done; echo $((6 * 7))")
    until(quota, lambda: b"up" in quota.outputs["log"])
    quota.down.set()
    (tmp_path / "work" / "go").touch()
    until(quota, lambda: (tmp_path / "attempt-1" / "status.json").exists())
    assert quota.end() is None
    quota.down.clear()
    assert process.wait(60) == 0
    assert quota.outputs["log"] == b"up\n42\n"
    end = quota.end()
    assert end is not None
    assert end["exit_code"] == 0


def test_a_log_is_sent_at_the_pace_that_the_service_sets(quota: Quota, tmp_path: Path) -> None:
    def reported_again() -> None:
        told = len(quota.reports)
        until(quota, lambda: len(quota.reports) > told + 1)

    work = tmp_path / "work"
    script = "echo up; while [ ! -e go ]; do sleep 0.05; done; echo on; while [ ! -e end ]; do sleep 0.05; done"
    process = launch(quota, tmp_path, "sh", "-c", script)
    until(quota, lambda: b"up" in quota.outputs["log"])
    quota.pace = 600.0
    reported_again()
    (work / "go").touch()
    until(quota, lambda: b"on" in (tmp_path / "attempt-1" / "log").read_bytes())
    reported_again()
    assert quota.outputs["log"] == b"up\n"
    (work / "end").touch()
    assert process.wait(60) == 0
    assert quota.outputs["log"] == b"up\non\n"


def test_troubles_on_the_way_are_got_over(quota: Quota, tmp_path: Path) -> None:
    busy = (503, {"code": "busy", "detail": "later"})
    proxy = (502, {})
    quota.troubles = {
        "claim": [busy, (404, {}), proxy],
        "outputs": [(429, {"code": "log_too_fast", "detail": "slower"}), proxy],
        "report": [busy],
    }
    process = launch(quota, tmp_path, "sh", "-c", "echo here")
    assert process.wait(60) == 0
    assert quota.outputs["log"] == b"here\n"
    assert quota.end() is not None


def test_a_replica_that_cannot_answer_now_is_left_for_another(quota: Quota) -> None:
    service = Service(quota.url, "first")
    service.post("report", {})
    service.post("report", {})
    assert quota.connections == 1
    quota.troubles = {"report": [(503, {"code": "database_unavailable", "detail": "ask another one"})]}
    with pytest.raises(ServiceUnavailable, match="ask another one"):
        service.post("report", {})
    service.post("report", {})
    assert quota.connections == 2
    service.close()


def test_a_replica_that_is_frozen_keeps_no_orders_back_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("makeway.launcher.service.TIMEOUT", 3600.0)
    monkeypatch.setattr("makeway.launcher.service.POLL_MARGIN", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        service = Service(f"http://127.0.0.1:{frozen.getsockname()[1]}/", "first")
        with pytest.raises(ServiceUnavailable, match="timed out"):
            service.orders("", 0.1)


def test_an_expired_token_is_renewed_by_a_report(quota: Quota, tmp_path: Path) -> None:
    expired = (401, {"code": "token_expired", "detail": "too old"})
    quota.troubles = {"outputs": [expired, expired], "report": [(200, {"heartbeat": 0.2, "token": "third"})]}
    process = launch(quota, tmp_path, "sh", "-c", "echo here")
    assert process.wait(60) == 0
    assert quota.outputs["log"] == b"here\n"
    assert quota.tokens[-1] == "Bearer third"
    assert all(report["started_at"] for report in quota.reports), "no report takes anything back"


@pytest.mark.parametrize(
    "answer",
    [
        (409, {"code": "claimed", "detail": "another launcher"}),
        (410, {"code": "attempt_ended", "detail": "over"}),
    ],
)
def test_a_worker_that_is_not_wanted_starts_nothing(quota: Quota, tmp_path: Path, answer: tuple[int, Any]) -> None:
    quota.troubles = {"claim": [answer]}
    process = launch(quota, tmp_path, "touch", "started")
    assert process.wait(60) == 1
    assert answer[1]["detail"] in (tmp_path / "errors").read_text()
    assert not (tmp_path / "work").exists()


def test_a_worker_whose_attempt_has_ended_ends_and_sends_nothing_more(quota: Quota, tmp_path: Path) -> None:
    process = launch(quota, tmp_path, "sh", "-c", "trap '' TERM; echo up; sleep 600")
    until(quota, lambda: b"up" in quota.outputs["log"])
    over = (410, {"code": "attempt_ended", "detail": "over"})
    quota.troubles = {"orders": [over], "report": [over] * 100, "outputs": [over] * 100}
    quota.order(known="wake")
    process.wait(60)
    assert quota.end() is None


def test_a_sigterm_before_there_is_an_order_ends_the_launcher(quota: Quota, tmp_path: Path) -> None:
    quota.down.set()
    process = launch(quota, tmp_path)
    until(quota, lambda: b"SigBlk:\t0000000000014003" in Path(f"/proc/{process.pid}/status").read_bytes())
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    assert "the machine is stopping" in (tmp_path / "errors").read_text()


def test_an_end_that_cannot_be_read_is_reported_without_the_details(quota: Quota, tmp_path: Path) -> None:
    invalid = (422, {"code": "invalid", "detail": "no"})
    done = threading.Event()

    def trouble() -> None:
        until(quota, lambda: (tmp_path / "attempt-1" / "status.json").exists())
        quota.troubles = {"report": [invalid]}
        done.set()

    thread = threading.Thread(target=trouble)
    thread.start()
    process = launch(quota, tmp_path, "sh", "-c", "sleep 0.5; exit 4")
    assert process.wait(60) == 4
    thread.join()
    end = quota.end()
    assert end is not None
    assert end["exit_code"] == 4


def test_an_address_that_is_none_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(FOLDER), "--remote"],
        env={"MAKEWAY_ATTEMPT_URL": "ftp://x", "MAKEWAY_JOB_DIR": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert b"no http address" in done.stderr


class Kept:
    """A service that keeps a log, for the sender alone."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes, bool]] = []
        self.known = 0

    def append(self, kind: str, offset: int, data: bytes, dropped: bool) -> int:
        self.sent.append((offset, data, dropped))
        if offset > self.known and not dropped:
            raise RequestRejected(409, "out_of_place", "missing", {"expected": self.known})
        self.known = max(self.known, offset + len(data))
        return self.known


def attempt(tmp_path: Path, **order: Any) -> Attempt:
    made = Attempt({"attempt": 1, "directory": str(tmp_path), **order})
    assert made.claim()
    return made


def test_the_output_is_copied_to_the_machine(quota: Quota, tmp_path: Path) -> None:
    """In the words of the log; a remote launcher has nothing else to say there."""
    with open(tmp_path / "copy", "wb") as copy:
        process = launch(quota, tmp_path, "sh", "-c", "echo one; echo two >&2; exit 75", output=copy.fileno())
        assert process.wait(60) == 75
    assert (tmp_path / "copy").read_bytes() == quota.outputs["log"] == b"one\ntwo\n"


@pytest.mark.parametrize("reader", ["sleeps", "is gone", "was never there"])
def test_a_reader_of_the_copy_holds_no_job_up(quota: Quota, tmp_path: Path, reader: str) -> None:
    quota.start = {"log_limit": 100 * 2**20}
    reading, writing = os.pipe()
    if reader == "is gone":
        os.close(reading)
    code = "import os; print('last' if os.write(1, b'x' * 3_000_000) else '')"
    shell = f'exec {sys.executable} -c "{code}"'
    launcher = ("sh", "-c", f"exec >&-; exec {sys.executable} -I -S {FOLDER} --remote") if "never" in reader else ()
    process = launch(quota, tmp_path, "sh", "-c", shell, output=writing, starter=launcher)
    assert process.wait(60) == 0
    assert quota.outputs["log"] == b"x" * 3_000_000 + b"last\n"
    os.close(writing)
    if reader != "is gone":
        os.close(reading)


def test_the_copy_has_a_gap_where_its_reader_was_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_copy, "HELD", 200_000)
    reading, writing = os.pipe()
    copy = output_copy.OutputCopy(writing, 1_000_000)
    for _ in range(100):
        copy.write(b"a" * 9_999 + b"\n")  # a pipe holds 64 KiB
    os.set_blocking(reading, False)
    received, ends = b"", time.monotonic() + 60
    while copy._size and time.monotonic() < ends:  # until the copy knows that all was read
        with contextlib.suppress(BlockingIOError):
            received += os.read(reading, 100_000)
        time.sleep(0.001)
    os.set_blocking(reading, True)
    copy.write(b"the end\n")
    copy.close()
    os.close(writing)
    while data := os.read(reading, 100_000):
        received += data
    os.close(reading)
    *copied, empty, gap, end = received.splitlines()
    missing = 1_000_000 - 10_000 * len(copied)
    assert 20 <= len(copied) < 30, "what is held, and what the pipe has taken meanwhile"
    assert copied == [b"a" * 9_999] * len(copied)
    assert (empty, end) == (b"", b"the end")
    assert gap == b"makeway: %d bytes are missing here, which were not read in time" % missing


def test_the_copy_ends_at_the_limit_of_the_log() -> None:
    reading, writing = os.pipe()
    copy = output_copy.OutputCopy(writing, 10)
    for _ in range(3):
        copy.write(b"seven..")
    copy.close()
    os.close(writing)
    assert os.read(reading, 1000) == b"seven..sev\nmakeway: the rest of the output is not copied here\n"
    os.close(reading)


def test_a_service_that_is_not_reached_is_named_at_once_and_then_once_a_minute(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(outage.time, "monotonic", lambda: now[0])
    unreachable = outage.Outage("http://makeway:8765")
    for _ in range(1200):
        unreachable.failed("[Errno 111] Connection\nrefused" + "!" * 1000)
        now[0] += 0.1
    unreachable.over()
    unreachable.over()
    lines = capfdbinary.readouterr().err.decode().splitlines()
    told = "launcher: the service at http://makeway:8765 was not reached: [Errno 111] Connection refused!!!"
    assert [told in line for line in lines] == [True, True, False]
    assert lines[2].endswith("launcher: the service at http://makeway:8765 is reached again")
    assert max(map(len, lines)) < 500


def test_a_launcher_says_which_service_it_does_not_reach_and_not_its_token(quota: Quota, tmp_path: Path) -> None:
    quota.down.set()
    process = launch(quota, tmp_path, "true")
    until(quota, lambda: b"not reached" in (tmp_path / "errors").read_bytes())
    quota.down.clear()
    assert process.wait(60) == 0
    first, second = (tmp_path / "errors").read_text().splitlines()
    assert f"launcher: the service at http://127.0.0.1:{quota.server_port} was not reached: Remote end closed" in first
    assert second.endswith("is reached again")
    assert "j-1" not in first, "what it has to itself is for its own eyes"


def test_a_reader_of_standard_error_that_sleeps_holds_nothing_up(quota: Quota, tmp_path: Path) -> None:
    """Standard error is a pipe without a reader, and full."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 65536)
    os.set_blocking(writing, True)
    quota.down.set()
    process = launch(quota, tmp_path, "true", errors=writing)
    time.sleep(1.0)
    quota.down.clear()
    assert process.wait(60) == 0
    os.close(writing)
    os.close(reading)


@contextmanager
def opened(tmp_path: Path) -> Iterator[tuple[Attempt, Log]]:
    """Return an attempt and its log."""
    made = attempt(tmp_path)
    log = Log(made, 1000)
    yield made, log
    log._file.close()


def test_what_a_long_log_dropped_is_left_out(tmp_path: Path) -> None:
    made, kept = attempt(tmp_path), Kept()
    (tmp_path / "attempt-1" / "log").write_bytes(b"head")
    (tmp_path / "attempt-1" / "log.10").write_bytes(b"tail")
    sender = LogSender(made, kept)  # type: ignore[arg-type]
    sender.send()
    assert kept.sent == [(0, b"head", False), (10, b"tail", True)]
    (tmp_path / "attempt-1" / "log.10").write_bytes(b"tail, and more")
    sender.send()
    assert kept.sent[2:] == [(14, b", and more", False)]


def test_a_sender_goes_back_to_what_the_service_knows(tmp_path: Path) -> None:
    made, kept = attempt(tmp_path), Kept()
    (tmp_path / "attempt-1" / "log").write_bytes(b"0123456789")
    sender = LogSender(made, kept)  # type: ignore[arg-type]
    sender._sent = 7
    sender.send()
    assert kept.sent == [(7, b"789", False), (0, b"0123456789", False)]


def test_a_gang_sends_whole_lines_until_its_end(tmp_path: Path) -> None:
    made, kept = attempt(tmp_path, gang=2), Kept()
    (tmp_path / "attempt-1" / "log").write_bytes(b"[0] one\n[0] tw")
    sender = LogSender(made, kept)  # type: ignore[arg-type]
    sender.send()
    assert kept.sent == [(0, b"[0] one\n", False)]
    sender.send(final=True)
    assert kept.sent[1:] == [(8, b"[0] tw", False)]


def test_a_gang_sends_a_line_whole_that_two_pieces_of_its_log_share(tmp_path: Path) -> None:
    made, kept = attempt(tmp_path, gang=2), Kept()
    (tmp_path / "attempt-1" / "log").write_bytes(b"one\ntw")
    (tmp_path / "attempt-1" / "log.6").write_bytes(b"o\nthree\nfo")
    LogSender(made, kept).send()  # type: ignore[arg-type]
    assert b"".join(data for _, data, _ in kept.sent) == b"one\ntwo\nthree\n"


def test_a_gang_sends_a_line_whose_end_was_dropped(tmp_path: Path) -> None:
    made, kept = attempt(tmp_path, gang=2), Kept()
    (tmp_path / "attempt-1" / "log").write_bytes(b"one\ntw")
    (tmp_path / "attempt-1" / "log.10").write_bytes(b"e\nfour\n")
    LogSender(made, kept).send()  # type: ignore[arg-type]
    assert kept.sent == [(0, b"one\ntw", False), (10, b"e\nfour\n", True)]


@pytest.mark.parametrize("final", [False, True])
def test_a_gang_sends_whole_lines_however_much_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, final: bool
) -> None:
    monkeypatch.setattr(log_sender, "PART", 8)
    made, kept = attempt(tmp_path, gang=2), Kept()
    (tmp_path / "attempt-1" / "log").write_bytes(b"one\ntwo\nthree\nmore than one part\nfive")
    LogSender(made, kept).send(final=final)  # type: ignore[arg-type]
    sent = [data for _, data, _ in kept.sent]
    assert sent == [b"one\ntwo\n", b"three\n", b"more tha", b"n one pa", b"rt\nfive" if final else b"rt\n"]


@pytest.mark.parametrize(
    ("progress", "step", "saved_at"),
    [
        ({"step": 3, "saved_at": 5}, 3, 5.0),
        ({"step": True, "saved_at": True}, None, None),
        ({"step": "3", "saved_at": "now"}, None, None),
        ({"step": 2**60, "saved_at": 1e300}, None, None),
        ({"step": [1], "saved_at": -1}, None, None),
        ([], None, None),
    ],
)
def test_whatever_a_job_writes_a_report_can_be_read(
    tmp_path: Path, progress: Any, step: int | None, saved_at: float | None
) -> None:
    made = attempt(tmp_path)
    (tmp_path / "attempt-1" / "progress.json").write_text(json.dumps(progress))
    status = {"exit_code": -9, "ended_at": 5.0, "noticed": False, "message": "a\0b\udc80" * 3000}
    status |= dict.fromkeys(("killed", "acknowledged", "completed", "timed_out"), False)
    report = report_of(made, status)
    assert (report["step"], report["saved_at"]) == (step, saved_at)
    assert len(report["exit"]["message"]) == 4000
    assert "\0" not in report["exit"]["message"]
    json.dumps(report).encode()


def test_pauses_grow_and_differ() -> None:
    pause = Pause()
    seconds = [pause.next() for _ in range(12)]
    assert seconds[0] < 1
    assert max(seconds) <= MAX_PAUSE * 1.5
    assert min(seconds[6:]) >= MAX_PAUSE / 2
    assert pause.next(100.0) >= 50
    assert len(set(seconds)) == len(seconds)


def test_answers_mean_what_they_say(quota: Quota) -> None:
    service = Service(quota.url, "first")
    cases: list[tuple[int, Any, type[OSError]]] = [
        (410, {"code": "attempt_ended", "detail": "over"}, AttemptEnded),
        (422, {"code": "invalid", "detail": "no"}, RequestRejected),
        (404, {}, ServiceUnavailable),
        (401, {"code": "unauthorized", "detail": "no"}, ServiceUnavailable),
        (500, {"code": "internal", "detail": "no"}, ServiceUnavailable),
        (503, {"code": "busy", "detail": "later"}, ServiceUnavailable),
        (200, [], ServiceUnavailable),
    ]
    for status, answer, kind in cases:
        quota.troubles = {"report": [(status, answer)]}
        with pytest.raises(kind) as raised:
            service.post("report", {})
        if isinstance(raised.value, ServiceUnavailable):
            assert raised.value.wait == (1.0 if status == 503 else 0.0)
    assert service.post("report", {})["heartbeat"] == 0.2
    quota.down.set()
    with pytest.raises(ServiceUnavailable, match="does not answer"):
        service.post("report", {})
    quota.down.clear()
    assert service.post("report", {})["heartbeat"] == 0.2, "a connection that broke is opened again"
    service.close()


def test_a_file_that_came_damaged_is_fetched_again(quota: Quota) -> None:
    digest = hashlib.sha256(b"whole").hexdigest()
    quota.files[digest] = b"whole"
    quota.troubles = {"files": [(200, b"who"), (200, b"")]}
    far = RemoteTransport(Service(quota.url, "t"), {})
    assert far.content({"digest": digest, "path": "a.txt"}) == b"whole"
    quota.files[digest] = b"who"
    with pytest.raises(OSError, match="came damaged 5 times"):
        far.content({"digest": digest, "path": "a.txt"})
    far._service.close()


def with_a_file(quota: Quota) -> None:
    digest = hashlib.sha256(b"#!/bin/sh\necho it ran\n").hexdigest()
    quota.files[digest] = b"#!/bin/sh\necho it ran\n"
    quota.start = {"files": [{"path": "run.sh", "executable": True, "digest": digest}]}


def test_a_token_that_expires_before_the_files_are_there_is_renewed(quota: Quota, tmp_path: Path) -> None:
    with_a_file(quota)
    quota.troubles = {"files": [(503, {}), (401, {"code": "token_expired", "detail": "too old"})]}
    assert launch(quota, tmp_path, "./run.sh").wait(60) == 0
    assert quota.outputs["log"] == b"it ran\n"
    assert quota.claims == 2


def test_a_sigterm_while_files_are_fetched_is_not_the_jobs_failure(quota: Quota, tmp_path: Path) -> None:
    with_a_file(quota)
    quota.troubles = {"files": [(503, {})] * 1000}
    process = launch(quota, tmp_path, "./run.sh")
    until(quota, lambda: len(quota.troubles["files"]) < 1000)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    end = quota.end()
    assert end is not None
    assert (end["message"], quota.reports[-1]["noticed"]) == ("could not start: the machine is stopping", True)


def test_a_token_that_stays_unknown_ends_the_launcher(
    quota: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "TOKEN_UNKNOWN_SECONDS", 0.0)
    quota.troubles = {what: [UNAUTHORIZED] * 1000 for what in ("claim", "files", "report", "outputs")}
    far = RemoteTransport(Service(quota.url, "void"), {})
    with pytest.raises(AttemptEnded, match="opens no worker"):
        far.order()
    with pytest.raises(AttemptEnded, match="opens no worker"):
        far.content({"digest": "0" * 64, "path": "a.txt"})
    status = dict.fromkeys(("killed", "acknowledged", "completed", "timed_out", "noticed"), False)
    with opened(tmp_path) as (here, log):
        far.finish(here, {**status, "exit_code": 0, "ended_at": 5.0, "message": ""}, log)
    assert quota.end() is None
    assert len(quota.troubles["report"]) > 990
    far._service.close()


def test_a_token_that_is_unknown_for_a_moment_is_tried_again(quota: Quota, tmp_path: Path) -> None:
    quota.troubles = {"claim": [UNAUTHORIZED], "report": [UNAUTHORIZED], "outputs": [UNAUTHORIZED]}
    assert launch(quota, tmp_path, "echo", "here").wait(60) == 0
    assert quota.outputs["log"] == b"here\n"


@pytest.mark.parametrize("told", ["at the start", "later"])
@pytest.mark.parametrize("deaf", [False, True])
def test_the_work_ends_before_the_service_starts_it_elsewhere(
    quota: Quota, tmp_path: Path, deaf: bool, told: str
) -> None:
    quota.start = {"lost_after": 8.0 if told == "at the start" else 3600.0, "grace": 2}
    quota.receipt = {} if told == "at the start" else {"lost_after": 8.0}
    trap = "trap '' TERM" if deaf else "trap 'exit 75' TERM"
    process = launch(quota, tmp_path, "sh", "-c", f"{trap}; echo up; while :; do sleep 0.05; done")
    until(quota, lambda: b"up" in quota.outputs["log"] and quota.reports)
    quota.down.set()
    until(quota, lambda: (tmp_path / "attempt-1" / "status.json").exists())
    assert quota.end() is None
    assert "the service was not reached" in (tmp_path / "attempt-1" / "stop.json").read_text()
    quota.down.clear()
    process.wait(60)
    end = quota.end()
    assert end is not None
    assert (end["killed"], end["acknowledged"], quota.reports[-1]["noticed"]) == (deaf, not deaf, True)
    assert end["unheard"]


def test_a_launcher_whose_machine_is_stopping_does_not_wait_for_a_service_that_is_away(
    quota: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STOPPING_SECONDS", 0.5)
    words = tmp_path / "termination-message"
    far = RemoteTransport(Service(quota.url, "t"), {"MAKEWAY_TERMINATION_FILE": str(words)})
    far.order()
    quota.down.set()
    far._service.close()
    status = dict.fromkeys(("killed", "acknowledged", "completed", "timed_out"), False)
    ended = {**status, "noticed": True, "exit_code": 75, "ended_at": 5.0, "message": ""}
    began = time.monotonic()
    with opened(tmp_path) as (here, log):
        far.finish(here, ended, log)
    assert time.monotonic() - began < 60, "not a quarter of an hour"
    assert json.loads(words.read_text())["exit"]["exit_code"] == 75
    far._service.close()


TOO_FAST = (429, {"code": "too_fast", "detail": "send the rest later"})
FINISHED = dict.fromkeys(("killed", "acknowledged", "timed_out"), False) | {
    "noticed": True,
    "completed": True,
    "exit_code": 0,
    "ended_at": 5.0,
    "message": "saved at step 7",
}


def finish_on_a_drain(quota: Quota, folder: Path, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Finish a job with a result of several parts so long before its deadline; return its end, and what its pod has."""
    words = folder / "termination-message"
    far = RemoteTransport(Service(quota.url, "t"), {"MAKEWAY_TERMINATION_FILE": str(words)})
    far.order()
    with opened(folder) as (here, log):
        Path(here.path("result.pkl")).write_bytes(b"r" * 3 * log_sender.PART)
        log.write(b"the end of the log\n")
        far.finish(here, FINISHED, log, time.monotonic() + seconds)
    far._service.close()
    end = quota.end()
    assert end is not None
    return end, json.loads(words.read_text())["exit"]


def test_a_result_is_sent_for_as_long_as_its_machine_waits(
    quota: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STOPPING_SECONDS", 0.5)
    quota.troubles = {"outputs": [TOO_FAST] * 4}
    end, stored = finish_on_a_drain(quota, tmp_path, 60.0)
    assert len(quota.outputs["result"]) == 3 * log_sender.PART
    assert quota.outputs["log"] == b"the end of the log\n"
    assert (end["completed"], end["result_unsent"], end["message"]) == (True, False, "saved at step 7")
    assert stored == end


def test_a_result_that_its_machine_does_not_wait_for_is_said_to_be_missing(
    quota: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STOPPING_SECONDS", 0.5)
    monkeypatch.setattr(remote, "STOPPING_MARGIN", 0.5)
    append, refused = Answers.append, (503, {"code": "busy", "detail": "later"})

    def slow(answers: Answers, kind: str, offset: int, dropped: bool, data: bytes) -> tuple[int, dict[str, Any]]:
        return refused if kind == "result" and offset else append(answers, kind, offset, dropped, data)

    monkeypatch.setattr(Answers, "append", slow)
    end, stored = finish_on_a_drain(quota, tmp_path, 0.0)
    assert len(quota.outputs["result"]) == log_sender.PART, "a part of it"
    assert end["result_unsent"]
    assert stored["result_unsent"], "its pod tells it, too, should this report not arrive"
    assert end["message"] == "saved at step 7; its result could not be sent in time"
    assert quota.outputs["log"].startswith(b"the end of the log\n"), "it has its turn all the same"
    assert b"its result could not be sent in time" in quota.outputs["log"]


def test_no_more_of_a_result_is_sent_after_its_last_moment(quota: Quota, tmp_path: Path) -> None:
    far = RemoteTransport(Service(quota.url, "t"), {})
    with opened(tmp_path) as (here, log):
        Path(here.path("result.pkl")).write_bytes(b"r" * 3 * log_sender.PART)
        with pytest.raises(ServiceUnavailable, match="the time is up"):
            far._send_file(here, "result", "result.pkl", log.note, time.monotonic())
    far._service.close()
    assert len(quota.outputs["result"]) == log_sender.PART


def test_a_worker_that_is_told_to_wait_goes_on_as_soon_as_it_may(
    quota: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", paused.append)
    quota.troubles = {"outputs": [TOO_FAST] * 12}
    finish_on_a_drain(quota, tmp_path, 60.0)
    assert len(quota.outputs["result"]) == 3 * log_sender.PART
    assert len(paused) == 12
    assert max(paused) <= 1.5, "pauses that grow would leave most of what is taken unused"


def test_an_end_is_reported_as_long_as_the_service_may_wait_for_it(
    quota: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FINISH_SECONDS", 0.0)
    monkeypatch.setattr(remote, "REPORT_SECONDS", 0.0)
    far = RemoteTransport(Service(quota.url, "t"), {})
    far.order()
    quota.down.set()
    status = dict.fromkeys(("killed", "acknowledged", "completed", "timed_out", "noticed"), False)
    ended = {**status, "exit_code": 7, "ended_at": 5.0, "message": ""}

    def finish() -> None:
        with opened(tmp_path) as (here, log):
            far.finish(here, ended, log)
        far._service.close()

    far._service.close()
    ending = threading.Thread(target=finish)
    ending.start()
    ending.join(2.0)
    assert ending.is_alive(), "the service counts with this worker for 120 s"
    quota.down.clear()
    ending.join(60)
    end = quota.end()
    assert end is not None
    assert end["exit_code"] == 7


def test_a_job_that_removes_its_folder_is_heard_of_to_its_end(quota: Quota, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    go = tmp_path / "go"
    remove = 'until rm -rf "$MAKEWAY_JOB_DIR"; do sleep 0.05; done'  # the launcher may write into it just then
    script = f"{remove}; while [ ! -e {go} ]; do sleep 0.05; done; exit 4"
    process = launch(quota, home, "sh", "-c", script)
    until(quota, lambda: not home.exists())
    told = len(quota.reports)
    until(quota, lambda: len(quota.reports) > told + 3)
    go.touch()
    assert process.wait(60) == 4
    end = quota.end()
    assert end is not None
    assert end["exit_code"] == 4
    assert all(report["started_at"] for report in quota.reports[told:]), "no report takes anything back"


def test_progress_that_is_too_deep_is_none(tmp_path: Path) -> None:
    made = attempt(tmp_path)
    (tmp_path / "attempt-1" / "progress.json").write_text("[" * 100_000)
    assert report_of(made, None)["step"] is None


SEES = """
for name in environ cmdline; do echo "$name:"; tr '\\0' '\\n' < /proc/$PPID/$name; done
echo own:; tr '\\0' '\\n' < /proc/self/environ
"""


@pytest.mark.parametrize("how", ["variable", "file"])
def test_the_token_is_in_no_environment_and_no_command_line(quota: Quota, tmp_path: Path, how: str) -> None:
    quota.start = {"log_limit": 100_000}
    file = tmp_path / "token"
    if how == "file":
        file.write_text("very-secret\n")
        token = {"MAKEWAY_ATTEMPT_TOKEN": "", "MAKEWAY_ATTEMPT_TOKEN_FILE": str(file)}
    else:
        token = {"MAKEWAY_ATTEMPT_TOKEN": "very-secret"}
    assert launch(quota, tmp_path, "sh", "-c", SEES, **token).wait(60) == 0
    assert quota.tokens[0] == "Bearer very-secret"
    seen = quota.outputs["log"].decode()
    assert str(FOLDER) in seen
    assert "very-secret" not in seen
    assert "MAKEWAY_ATTEMPT_TOKEN" not in seen.partition("own:")[2]
    assert not file.exists()


PEEKS = """
import os
for name in ("environ", "mem", "fd/0"):
    try:
        open(f"/proc/{os.getppid()}/{name}", "rb").close()
        print(name, "is open")
    except PermissionError:
        print(name, "is closed")
"""


@pytest.mark.root
def test_a_job_of_the_same_account_cannot_read_the_launcher(quota: Quota) -> None:
    quota.command = ["/usr/bin/python3", "-I", "-S", "-c", PEEKS]
    with tempfile.TemporaryDirectory() as folder:
        launcher = str(Path(folder) / "launcher")
        subprocess.run([sys.executable, "-m", "makeway.launcher", "--copy", launcher], check=True)
        os.chown(folder, 65534, 65534)
        environ = {"PATH": os.environ["PATH"], "MAKEWAY_ATTEMPT_URL": quota.url, "MAKEWAY_JOB_DIR": folder}
        subprocess.run(
            ["/usr/bin/python3", "-I", "-S", launcher, "--remote"],
            env={**environ, "MAKEWAY_ATTEMPT_TOKEN": "first"},
            user=65534,
            group=65534,
            extra_groups=[],
            check=True,
        )
    assert quota.outputs["log"] == b"environ is closed\nmem is closed\nfd/0 is closed\n"


def test_a_token_file_that_cannot_be_removed_is_refused(quota: Quota, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-token")
    process = launch(quota, tmp_path, MAKEWAY_ATTEMPT_TOKEN="", MAKEWAY_ATTEMPT_TOKEN_FILE=missing)
    assert process.wait(60) == 1
    assert "no-such-token" in (tmp_path / "errors").read_text()
    assert quota.tokens == []
