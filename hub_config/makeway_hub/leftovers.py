"""Stop the Hub and the proxy that an earlier run left behind, as after their parent was killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from .settings import Settings

TERM_TIMEOUT = 10.0
"""Seconds between SIGTERM and SIGKILL."""


def stop_leftovers(settings: Settings) -> list[str]:
    """Stop what an earlier run from this state directory left, and return what it was; notebooks are adopted instead.

    Called only while this process holds the lock of the state directory, so nothing else needs the leftovers.
    """
    stopped = []
    for name, pid_file, command in (
        ("the Hub", settings.state.root / "hub.pid", "jupyterhub"),
        ("its proxy", settings.state.proxy_pid, "configurable-http-proxy"),
    ):
        if process := _process(pid_file, command):
            stop(process)
            stopped.append(f"{name} (process {process.pid})")
        pid_file.unlink(missing_ok=True)
    return stopped


def stop_machines(settings: Settings) -> None:
    """End the machines of the demo's cloud, which are processes of this computer, with all that runs on them.

    Without that they end by themselves, as machines of a cloud do: some time after the service is gone.
    """
    own = f"{settings.state.root / 'machines'}/"
    machines = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get("LOCAL_MACHINE_FOLDER", "").startswith(own):
                machines.append(process)
    for process in machines:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(machines, TERM_TIMEOUT)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()


def stop(process: psutil.Process) -> None:
    """End a process: SIGTERM, and SIGKILL after TERM_TIMEOUT seconds."""
    with suppress(psutil.NoSuchProcess):
        process.terminate()
        with suppress(psutil.TimeoutExpired):
            process.wait(TERM_TIMEOUT)
            return
        process.kill()
        with suppress(psutil.TimeoutExpired):
            process.wait(TERM_TIMEOUT)


def _process(pid_file: Path, command: str) -> psutil.Process | None:
    """Return the process of a pid file, if it is the program meant: the pid may belong to another one by now."""
    with suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(pid_file.read_text().strip()))
        if command in " ".join(process.cmdline()):
            return process
    return None
