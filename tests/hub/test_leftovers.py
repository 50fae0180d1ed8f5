"""Leftovers of an earlier run are stopped, and a process that only has the pid of one is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from makeway_hub import leftovers
from makeway_hub.settings import Settings, read

DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return read({"MAKEWAY_STATE_DIR": str(tmp_path)})


@pytest.fixture
def deaf() -> Iterator[subprocess.Popen[str]]:
    """Yield a process that ignores SIGTERM and whose command line has the name of the Hub's program."""
    with subprocess.Popen([sys.executable, "-c", DEAF, "jupyterhub"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_a_process_that_ignores_sigterm_is_killed(
    settings: Settings, deaf: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "TERM_TIMEOUT", 0.1)
    pid_file = settings.state.root / "hub.pid"
    pid_file.write_text(f"{deaf.pid}\n")
    assert leftovers.stop_leftovers(settings) == [f"the Hub (process {deaf.pid})"]
    assert not psutil.pid_exists(deaf.pid)
    assert not pid_file.exists()


def test_another_program_with_the_pid_of_a_leftover_is_spared(settings: Settings, deaf: subprocess.Popen[str]) -> None:
    settings.state.proxy_pid.write_text(f"{deaf.pid}\n")
    assert leftovers.stop_leftovers(settings) == []
    assert deaf.poll() is None
    assert not settings.state.proxy_pid.exists()


@pytest.mark.parametrize("text", ["", "soon", "-5", "99999999"])
def test_a_broken_pid_file_is_removed(settings: Settings, text: str) -> None:
    (settings.state.root / "hub.pid").write_text(text)
    assert leftovers.stop_leftovers(settings) == []
    assert not (settings.state.root / "hub.pid").exists()


def test_a_process_that_has_ended_is_no_error() -> None:
    ended = psutil.Popen([sys.executable, "-c", "pass"])
    assert ended.wait(60) == 0
    leftovers.stop(ended)
