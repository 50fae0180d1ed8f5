"""`make run` explains why it cannot start, and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO

import pytest
from hub.portal import Portal, until
from makeway_hub import checks, embedded, nodejs
from makeway_hub.address import Address, check_free
from makeway_hub.ports import holder
from makeway_hub.settings import read
from makeway_hub.state_directory import LISTENING, StateDirectory, free_port, is_free
from makeway_spawner.process import marked, start_ticks

LEASE = 5.0
"""Seconds: short, and long enough for the renewals of a busy machine."""


def settings(root: Path, **env: str) -> object:
    return read({"MAKEWAY_STATE_DIR": str(root), **env})


def processes_of(portal: Portal) -> list[int]:
    """Return the pids of everything that this portal started, found by their environment."""
    return [
        *marked("MAKEWAY_STATE_DIR", str(portal.state.root)),
        *marked("MAKEWAY_URL", portal.url + "/services/makeway"),
    ]


@pytest.mark.covers("N22")
@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"PORT": "http"}, "PORT='http' is not accepted: use a whole number from 1 to 65535"),
        ({"PORT": "70000"}, "use a whole number from 1 to 65535"),
        ({"MAKEWAY_MODE": "cloud"}, "use demo or system"),
        ({"MAKEWAY_LEASE_SECONDS": "soon"}, "use a number from 3 to 3600"),
        ({"MAKEWAY_LEASE_SECONDS": "1"}, "use a number from 3 to 3600"),
        ({"MAKEWAY_KEEP": "perhaps"}, "use 1 or 0"),
    ],
)
def test_settings_that_make_no_sense_are_named(env: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        read(env)


def test_a_taken_port_is_named_with_the_program_that_has_it(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"process {os.getpid()}" in (holder(port) or "")
        with pytest.raises(checks.CannotStart, match=rf"Port {port} is taken by .*process {os.getpid()}"):
            check_free(Address(port=port))
    assert is_free(port)


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "var").write_text("a file, not a directory")
    with pytest.raises(checks.CannotStart, match="cannot be written"):
        checks.check_state(settings(tmp_path / "var"))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "FREE_MB", 10**9)
    with pytest.raises(checks.CannotStart, match="MB left and Makeway needs"):
        checks.check_state(settings(tmp_path))


def test_an_old_python_and_a_missing_node_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PYTHON", (9, 9))
    with pytest.raises(checks.CannotStart, match=r"needs Python 9\.9 or newer"):
        checks.check_python()
    monkeypatch.setattr(nodejs, "find_node", lambda *_: None)
    with pytest.raises(checks.CannotStart, match="make setup"):
        checks.check_node()


def test_system_mode_without_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(checks.CannotStart, match="only root may do"):
        checks.check_mode(settings(tmp_path, MAKEWAY_MODE="system"))


def test_secrets_and_ports_stay_the_same(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path)
    first.create()
    before = (first.secret("a"), first.password(), first.ports())
    assert (
        StateDirectory(tmp_path).secret("a"),
        StateDirectory(tmp_path).password(),
        StateDirectory(tmp_path).ports(),
    ) == before
    assert len(before[1]) == 19


def test_a_port_is_chosen_that_no_outgoing_connection_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    assert port in LISTENING
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        monkeypatch.setattr("makeway_hub.state_directory.LISTENING", [port])
        assert free_port() != port


def test_two_portals_do_not_share_a_state_directory(tmp_path: Path) -> None:
    StateDirectory(tmp_path).create()
    first = checks.StateDirectoryLock(settings(tmp_path, PORT="8123"))
    first.take()
    with pytest.raises(checks.CannotStart, match=rf"process {os.getpid()}, http://127.0.0.1:8123"):
        checks.StateDirectoryLock(settings(tmp_path)).take()
    first.release()
    again = checks.StateDirectoryLock(settings(tmp_path))
    again.take()
    again.release()


class SlowPortal(embedded.Portal):
    """A portal whose Hub answers at once and whose service does when it was asked three times."""

    def __init__(self, root: Path, at_last: Callable[[SlowPortal], int]) -> None:
        StateDirectory(root).create()
        super().__init__(read({"MAKEWAY_STATE_DIR": str(root), "PORT": str(free_port())}))
        asked = []

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.endswith("/healthz"):
                    asked.append(self.path)
                    self.send_response(at_last(portal) if len(asked) == 3 else 503)
                else:
                    self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        portal = self
        self.server = ThreadingHTTPServer(("127.0.0.1", self.settings.port), Answers)

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        self.settings.address.write(self.settings.state.address_file)
        threading.Thread(target=self.server.serve_forever).start()
        return subprocess.Popen(["sleep", "60"])


def answers_until_ctrl_c(portal: SlowPortal) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return 200


def cannot_start(portal: SlowPortal) -> int:
    portal.settings.state.problem_file.write_text("The policy has a mistake.")
    return 503


@pytest.mark.covers("N22")
@pytest.mark.parametrize(
    ("at_last", "code", "words"),
    [
        (answers_until_ctrl_c, 0, "Makeway is ready"),
        (cannot_start, 1, "Makeway cannot start. The policy has a mistake."),
    ],
)
def test_a_service_that_is_slow_to_start_is_waited_for_and_how_it_ends_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    at_last: Callable[[SlowPortal], int],
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr(embedded, "START_TIMEOUT", 0.0)
    monkeypatch.setattr(embedded, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(embedded.databases, "upgrade_service", lambda *_: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    portal = SlowPortal(tmp_path, at_last)
    try:
        assert portal.run() == code
    finally:
        portal.server.shutdown()
        portal.server.server_close()
        for number, handler in before.items():
            signal.signal(number, handler)
    output = "".join(capfd.readouterr())
    assert output.count("does not answer after 0 s, and is waited for") == 1
    assert words in output
    assert ("Makeway is ready" in output) == (code == 0)


@pytest.mark.e2e
@pytest.mark.covers("N22")
def test_ctrl_c_stops_everything_and_a_second_start_finds_nothing_left(fresh: Portal) -> None:
    fresh.start()
    assert "ana" in fresh.printed
    assert "secrets/password" in fresh.printed
    assert fresh.state.password_file.read_text().strip() not in fresh.printed
    fresh.start_server("ana", profile="gpu1", team="rnd")
    assert len(processes_of(fresh)) > 3
    second = subprocess.run(
        [sys.executable, "-m", "makeway_hub.embedded"], env=fresh.env, capture_output=True, text=True, timeout=120
    )
    assert second.returncode == 1
    assert "Makeway already runs" in second.stderr
    assert "Stopped." in fresh.stop()
    assert fresh.process
    assert fresh.process.returncode == 0
    assert processes_of(fresh) == []
    assert is_free(fresh.port)
    fresh.start()
    until(lambda: not fresh.live_sessions(), "no lease is left of the first run")


@pytest.mark.e2e
@pytest.mark.covers("N07")
def test_a_killed_hub_is_announced_and_its_notebooks_are_adopted(fresh: Portal) -> None:
    fresh.env["MAKEWAY_LEASE_SECONDS"] = f"{LEASE:g}"
    fresh.start()
    fresh.start_server("ana", profile="gpu1", team="rnd")
    session = fresh.live_sessions()[0]
    notebook = next(iter(marked("MAKEWAY_SESSION", session.id)))
    os.kill(fresh.hub_pid, signal.SIGKILL)
    assert fresh.process
    assert fresh.process.wait(90) == 1
    assert "JupyterHub ended unexpectedly" in fresh.printed
    assert start_ticks(notebook), "the notebook runs on"
    fresh.start()
    assert (fresh.server("ana") or {})["ready"]
    time.sleep(2 * LEASE)  # only renewals of the new Hub keep the lease
    assert [s.id for s in fresh.live_sessions()] == [session.id]
    assert start_ticks(notebook)
    fresh.hub("DELETE", "/users/ana/server")
    until(lambda: not fresh.live_sessions(), "given back")
    assert not start_ticks(notebook)


@pytest.mark.e2e
@pytest.mark.covers("N07")
def test_a_hub_killed_during_a_start_leaks_no_lease(fresh: Portal) -> None:
    fresh.start()
    fresh.start_server("ana", profile="gpu3", team="rnd")
    fresh.start_server("bo", wait=False, profile="gpu8", team="devops", preemptible=True)  # waits: 7 GPUs are idle
    until(lambda: [s for s in fresh.live_sessions() if s.user == "bo"], "bo waits")
    os.kill(fresh.hub_pid, signal.SIGKILL)
    assert fresh.process
    fresh.process.wait(90)
    fresh.start()
    until(lambda: [s.user for s in fresh.live_sessions()] == ["ana"], "bo's lease is over, ana's is not")
    assert not fresh.server("bo")


@pytest.mark.e2e
@pytest.mark.covers("N05")
@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.5, 2.5])
def test_stop_while_the_server_comes_up_leaves_no_lease_and_no_process(portal: Portal, seconds: float) -> None:
    portal.start_server("lea", wait=False, profile="gpu2", team="rnd")
    session = until(lambda: [s for s in portal.live_sessions() if s.user == "lea"], "asked")[0]
    time.sleep(seconds)
    portal.hub("DELETE", "/users/lea/server")
    until(lambda: not [s for s in portal.live_sessions() if s.user == "lea"], "given back")
    until(lambda: not portal.server("lea"), "stopped")
    assert list(marked("MAKEWAY_SESSION", session.id)) == []


@pytest.mark.e2e
@pytest.mark.covers("N07")
def test_a_killed_starter_takes_the_hub_with_it_and_the_next_start_clears_up(fresh: Portal) -> None:
    fresh.start()
    hub = fresh.hub_pid
    assert fresh.process
    fresh.process.kill()
    fresh.process.wait()
    until(lambda: not start_ticks(hub), "the Hub ended")
    fresh.start()


@pytest.mark.e2e
@pytest.mark.covers("N07")
def test_a_crashed_notebook_frees_its_gpu_and_leaves_no_process(portal: Portal) -> None:
    portal.start_server("bo", profile="gpu1", team="devops")
    session = next(s for s in portal.live_sessions() if s.user == "bo")
    before = set(marked("MAKEWAY_SESSION", session.id))
    child = subprocess.Popen(["sleep", "600"], env={"MAKEWAY_SESSION": session.id, "PATH": os.environ["PATH"]})
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not [s for s in portal.live_sessions() if s.user == "bo"], "the GPU is free")
    assert child.wait(60) == -signal.SIGKILL  # a daemon that a kernel left behind would still use the GPU
    until(lambda: not portal.server("bo"), "the Hub knows")


@pytest.mark.e2e
@pytest.mark.covers("N07")
def test_a_killed_service_is_back_soon_and_notebooks_keep_their_gpus(portal: Portal) -> None:
    portal.start_server("lea", profile="gpu1", team="rnd")
    mine = [s.id for s in portal.live_sessions() if s.user == "lea"]
    service = next(
        pid
        for pid in marked("JUPYTERHUB_SERVICE_NAME", "makeway")
        if str(portal.state.root) in Path(f"/proc/{pid}/environ").read_text()
    )
    os.kill(service, signal.SIGKILL)

    def back() -> bool:
        try:
            return [s.id for s in portal.live_sessions() if s.user == "lea"] == mine
        except Exception:
            return False

    until(back, "the service is back with the lease")
    assert (portal.server("lea") or {})["ready"]
    portal.hub("DELETE", "/users/lea/server")
    until(lambda: not [s for s in portal.live_sessions() if s.user == "lea"], "given back")


@pytest.mark.e2e
def test_kept_notebooks_survive_ctrl_c(tmp_path: Path) -> None:
    portal = Portal(tmp_path, MAKEWAY_KEEP="1").start()
    try:
        portal.start_server("ana", profile="gpu1", team="rnd")
        session = portal.live_sessions()[0]
        notebook = next(iter(marked("MAKEWAY_SESSION", session.id)))
        portal.stop()
        assert start_ticks(notebook)
        portal.start()
        assert (portal.server("ana") or {})["ready"]
        assert [s.id for s in portal.live_sessions()] == [session.id]
    finally:
        portal.env["MAKEWAY_KEEP"] = ""
        portal.stop()
        portal.start()
        portal.stop()
    assert not start_ticks(notebook)
