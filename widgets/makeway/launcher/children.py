"""Start, signal, reap and kill the job's processes, so that none is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from typing import NoReturn

from .processes import stat

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_SECONDS = 5.0


class Children:
    """The workers and all their descendants: orphans are reparented to this process (a subreaper)."""

    def __init__(self) -> None:
        self.workers: list[int] = []
        self.exit_codes: dict[int, int] = {}
        """Exit codes of the workers that ended, negative for a signal, in the order of their ends."""
        self.no_descendants = False
        """Whether no descendant of this process is left."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(self, command: list[str], env: dict[str, str]) -> int:
        """Start a worker as a session and process group of its own; return the read end of its output's pipe.

        Raises OSError with the command's name if it cannot be started.
        """
        output, output_end = os.pipe()
        failure, failure_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            _exec_worker(command, env, output_end, failure_end)
        os.close(output_end)
        os.close(failure_end)
        self.workers.append(pid)
        with os.fdopen(failure, "rb") as file:
            problem = file.read()
        if problem:
            os.close(output)
            raise OSError(int(problem), os.strerror(int(problem)), command[0])
        return output

    def signal_group(self, worker: int, number: int) -> None:
        """Send a signal to a worker's process group."""
        with contextlib.suppress(OSError):
            os.killpg(worker, number)

    def group_is_alive(self, worker: int) -> bool:
        """Whether a process of a worker's group has not ended, also where the worker itself has."""
        try:
            os.killpg(worker, 0)
        except ProcessLookupError:
            return False
        except OSError:  # of another user
            return True
        return True

    def reap(self) -> None:
        """Reap every child and orphan that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.no_descendants = True
                return
            if pid == 0:
                return
            if pid in self.workers:
                self.exit_codes[pid] = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def kill_everything(self) -> None:
        """Kill the groups and all other descendants until none is left, for KILL_SECONDS at most."""
        ends = time.monotonic() + KILL_SECONDS
        self.reap()
        while not self.no_descendants and time.monotonic() < ends:
            for pid in self.workers:
                with contextlib.suppress(OSError):
                    if pid not in self.exit_codes:
                        os.killpg(pid, signal.SIGKILL)
            for pid in _descendants():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
            self.reap()

    def exit_code(self) -> int:
        """Return the attempt's exit code: a worker's own failure first, then a kill, then 75 (saved and ended)."""
        codes = [*self.exit_codes.values(), *(-signal.SIGKILL for pid in self.workers if pid not in self.exit_codes)]
        failed = [code for code in codes if code not in (0, 75, -signal.SIGKILL)]
        return failed[0] if failed else min(codes) if -signal.SIGKILL in codes else max(codes)


def _exec_worker(command: list[str], env: dict[str, str], output: int, failure: int) -> NoReturn:
    """Turn this child into the worker; never returns."""
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.execvpe(command[0], command, env)
    except OSError as error:
        os.write(failure, str(error.errno or errno.ENOENT).encode())
    except BaseException:
        os.write(failure, str(errno.EINVAL).encode())
    finally:
        os._exit(127)


def _descendants() -> list[int]:
    """Return the pids of all descendants, whatever session or group they are in."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := stat(int(name))) is not None:
            children.setdefault(process.parent, []).append(int(name))
    descendants: list[int] = []
    unvisited = [os.getpid()]
    while unvisited:
        children_of_pid = children.get(unvisited.pop(), [])
        descendants += children_of_pid
        unvisited += children_of_pid
    return descendants
