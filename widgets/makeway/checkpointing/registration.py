"""Register this process with the launcher as listening for the notice, and follow the ranks beside it.

Used by `makeway.checkpoint`; the launcher reads the files in `launcher/listeners.py`. Their names are
`PID.START.NAMESPACE`, with `.heard` once the process has seen the notice, `.acknowledged` once it has saved and ends,
with `.saving` while it saves, and with `.exited` once one of several ranks exits, and not of an exception. The first
and the last of them have its rank in them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

HEARD, ACKNOWLEDGED, SAVING, EXITED = ".heard", ".acknowledged", ".saving", ".exited"
SIBLING_SECONDS = 5.0
"""Seconds without a save for which ranks beside this one are waited for: they may hang in a collective without it"""
PAUSE_SECONDS = 0.02


class Registration:
    """The files by which the launcher knows how far a listening process is."""

    def __init__(self) -> None:
        self._noted: set[tuple[int, str]] = set()
        self._is_later = False
        """Whether this process was forked after the launcher had signalled all processes"""
        self._saves = 0

    def watch_forks(self) -> None:
        """Note in each fork whether it began later than the signal of the notice."""
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._is_later = self._is_group_signalled()

    def is_notice(self) -> bool:
        """Whether a signal that this process gets is that of a notice.

        If not, it is one of its parent, which ends its workers when it leaves, and waits for them.
        """
        to_all = self._is_group_signalled() and not self._is_later
        return to_all or ((os.getpid(), "") in self._noted and _is_noticed())

    def _is_group_signalled(self) -> bool:
        """Whether the launcher has signalled all processes: one of an earlier release does so at once."""
        folder = os.environ.get("MAKEWAY_LISTENERS")
        return os.path.exists(os.path.join(folder, "signalled")) if folder else _is_noticed()

    def note(self, suffix: str = "") -> None:
        """Add a file of this process, once; nothing where the launcher reads none, as one of an earlier release."""
        key = (os.getpid(), suffix)
        if key in self._noted:
            return
        self._noted.add(key)
        if folder := os.environ.get("MAKEWAY_LISTENERS"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it gets the signal then
                _add(os.path.join(folder, _process_name() + suffix), "" if suffix else os.environ.get("RANK", ""))
            if not suffix and os.environ.get("WORLD_SIZE", "1") != "1":
                atexit.register(self._exit, os.getpid(), folder)

    def _exit(self, pid: int, folder: str) -> None:
        """Add a file with this rank where no exception ends it: others may wait for it, and fail of that."""
        rank = os.environ.get("RANK", "")
        if pid == os.getpid() and rank.isdigit() and not hasattr(sys, "last_type"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                _add(os.path.join(folder, _process_name() + EXITED), rank)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Show the launcher, and the ranks beside this one, that this process saves; one save may be in another."""
        path = ""
        if (folder := os.environ.get("MAKEWAY_LISTENERS")) and not self._saves:
            with contextlib.suppress(OSError, ValueError, IndexError):
                path = os.path.join(folder, _process_name() + SAVING)
                _add(path)
        self._saves += 1
        try:
            yield
        finally:
            self._saves -= 1
            if path:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def wait_for_siblings(self, deadline: Callable[[], float | None]) -> None:
        """Wait until the ranks that the same agent started have acknowledged the notice that they have seen, or ended.

        When the first of its ranks ends with 75, torchrun sends SIGTERM to the process groups of the others, and so to
        the loaders that a save still needs. Waits until `deadline()`, in Unix seconds, while any of them saves; where
        none does, for SIBLING_SECONDS.
        """
        until, last_save_at = deadline() or 0.0, time.monotonic()
        while time.time() < until and time.monotonic() < last_save_at + SIBLING_SECONDS:
            unsaved, saving = self._siblings()
            if not unsaved:
                return
            if saving:
                last_save_at = time.monotonic()
            time.sleep(PAUSE_SECONDS)

    def _siblings(self) -> tuple[bool, bool]:
        """Return whether a rank beside this one has seen the notice and not acknowledged it, and whether one saves."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            names = set(os.listdir(os.environ.get("MAKEWAY_LISTENERS") or os.devnull))  # an earlier launcher has none
            heard = {name[: -len(HEARD)] for name in names if name.endswith(HEARD)} - {_process_name()}
            unsaved = [name for name in heard if name + ACKNOWLEDGED not in names and _is_sibling(name)]
            return bool(unsaved), any(name + SAVING in names for name in unsaved)
        return False, False


def _add(path: str, text: str = "") -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)


def _is_noticed() -> bool:
    return os.path.exists(os.environ.get("MAKEWAY_STOP_FILE", ""))


def start_ticks(pid: int | str) -> int:
    """Return when a process of this machine started, in clock ticks since boot; 0 if it has ended."""
    fields = _stat_fields(pid)
    return 0 if not fields or fields[0] in "ZX" else int(fields[19])


def _process_name() -> str:
    """Return what identifies this process: its pid, its start in clock ticks since boot, and its pid namespace."""
    return f"{os.getpid()}.{int(_stat_fields('self')[19])}.{_namespace()}"


def _is_sibling(name: str) -> bool:
    """Whether the process of this name lives, and has the parent of this one."""
    pid, start, namespace = map(int, name.split("."))
    if namespace != _namespace():
        return False
    fields = _stat_fields(pid)
    return bool(fields) and fields[0] not in "ZX" and int(fields[1]) == os.getppid() and int(fields[19]) == start


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _stat_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat behind the command's name: state, parent …; none if the process is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
    return []
