"""Make what runs on the machine equal to what is ordered: start, adopt and end launchers, and remove their folders.

A launcher is known by pid and start time, so that one agent takes over from another. A launcher that is not ordered
any more gets time to hear so from the service itself; then it gets SIGTERM, and is killed with all that it started. A
worker runs once in its folder: one that has ended is started again only if its order went away, and came back later.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

from ..launcher.attempt import CREDENTIALS
from ..launcher.processes import stat
from ..launcher.removal import remove_tree
from .init_script import is_running
from .machine_folder import MachineFolder
from .programs import AGENT, FLAGS, source_folder
from .starter import GIVEN_UP, agent_file_of, read_record, recorded_exit_code
from .worker_order import MachineOrders, WorkerOrder, valid_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from .worker_order import WorkerKey

UNWANTED_SECONDS = 10.0
"""Seconds for which a launcher that is not ordered any more may end by what the service tells it"""
TERMINATE_SECONDS = 20.0
"""Seconds from the SIGTERM to the SIGKILL of a launcher that is not ordered any more"""
START_SECONDS = 60.0
"""Seconds for which a start is tried again before the worker counts as ended"""
RETRY_SECONDS = 5.0
REMOVAL_SECONDS = 120.0
"""Seconds for which the removal of a container is waited for before its worker counts as ended"""
LAST_REMOVAL_SECONDS = 10.0
"""The same on a machine that ends, whose containers end with it"""
STUCK_SECONDS = 20.0
"""Seconds from a SIGKILL after which it is said that a process does not die"""
FORGOTTEN_SECONDS = 60.0
CANNOT_START = 126
MAX_MESSAGE = 1000
"""Characters of the reason why a worker did not start"""


class AgentWorker:
    """One worker of the machine: its folder, its launcher, and how far its end is."""

    def __init__(self, key: WorkerKey, folder: str, now: float) -> None:
        self.key = key
        self.folder = folder
        self.record = read_record(folder)
        self.process: subprocess.Popen[bytes] | None = None
        self.removal: subprocess.Popen[bytes] | None = None
        """the process that removes its container"""
        self.removal_until = 0.0
        self.state = "starting"
        self.exit_code: int | None = None
        self.message = ""
        """why it could not start"""
        self.devices: list[int] = [one for one in self.record.get("devices") or () if isinstance(one, int)]
        self.failing_since: float | None = None
        self.next_try = now
        self.unwanted_since: float | None = None
        self.terminated_at: float | None = None
        self.killed_at: float | None = None
        """when it was killed first, while something of it is still there"""
        self.stuck_told = False

    def as_report(self) -> dict[str, Any]:
        """Return the worker as the service takes it."""
        job, attempt, worker = self.key
        return {
            "job": job,
            "attempt": attempt,
            "worker": worker,
            "state": self.state,
            "exit_code": self.exit_code if self.state == "exited" else None,
            "devices": self.devices,
            **({"message": self.message} if self.state == "exited" and self.message else {}),
        }

    @property
    def may_run(self) -> bool:
        """Whether it runs, or a start is under way."""
        return self.state != "exited" and (bool(self.record) or self.process is not None)

    @property
    def works(self) -> bool:
        """Whether its job runs, or may run still: afterwards its launcher only reports how that ended."""
        return self.may_run and not os.path.exists(os.path.join(self.folder, f"attempt-{self.key[1]}", "status.json"))

    def abandon_start(self) -> list[int]:
        """Kill a start that is under way, with the command of a container runtime that it waits for; return its pid."""
        if self.process is None or self.process.poll() is not None or read_record(self.folder):
            return []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return [self.process.pid] if self.process.poll() is None else []

    def signal(self, number: int) -> None:
        """Send a signal to the launcher, if it runs."""
        with contextlib.suppress(OSError):
            if is_running(self.record):
                os.kill(self.record["pid"], number)


class MachineWorkers:
    """All workers of a machine, those of an agent before included. `clock`: monotonic seconds."""

    def __init__(
        self,
        folder: MachineFolder,
        clock: Callable[[], float],
        log: Callable[[str], None],
        container_user: str = "",
    ) -> None:
        self._container_user = container_user
        self._removal_seconds = REMOVAL_SECONDS
        self._forgotten: subprocess.Popen[bytes] | None = None
        self._forgotten_at = clock()
        self._folder = folder
        self._clock = clock
        self._log = log
        self._root = folder.file("workers")
        self._boot = folder.boot
        self.workers: dict[WorkerKey, AgentWorker] = {}
        for key, path in _folders(self._root):
            self.workers[key] = AgentWorker(key, path, clock())
            self._log(f"{_named(key)}: found in {path}")

    @property
    def running(self) -> bool:
        """Whether a worker runs, or may run still."""
        return any(worker.may_run for worker in self.workers.values())

    @property
    def working(self) -> bool:
        """Whether a job runs, or may run still."""
        return any(worker.works for worker in self.workers.values())

    def as_report(self) -> list[dict[str, Any]]:
        """Return all workers as the service takes them, in the order of their keys."""
        return [self.workers[key].as_report() for key in sorted(self.workers)]

    def terminate(self) -> None:
        """Have every launcher end as on a machine that is stopping: the job may save until its own deadline."""
        self._removal_seconds = LAST_REMOVAL_SECONDS
        for worker in self.workers.values():
            worker.removal_until = min(worker.removal_until, self._clock() + LAST_REMOVAL_SECONDS)
            if worker.terminated_at is None and worker.record:
                worker.terminated_at = self._clock()
                worker.signal(signal.SIGTERM)
            elif not worker.record:
                self._note_killed(worker, worker.abandon_start())

    def kill(self) -> None:
        """Kill every launcher, and what it started."""
        for worker in self.workers.values():
            self._kill(worker)
            if worker.process is not None:
                worker.process.kill()
            self._note_killed(worker, worker.abandon_start())

    def stuck_for(self) -> float:
        """Return the seconds since the newest kill of what does not die, as in state D; 0 if anything else runs."""
        killed = [worker.killed_at for worker in self.workers.values() if worker.may_run]
        return min((self._clock() - at if at is not None else 0.0 for at in killed), default=0.0)

    def _kill(self, worker: AgentWorker) -> None:
        worker.signal(signal.SIGKILL)
        self._note_killed(worker, [worker.record["pid"]] if is_running(worker.record) else [])

    def _note_killed(self, worker: AgentWorker, pids: list[int]) -> None:
        """Remember since when processes were killed that are still there, and say once that they do not die."""
        if not pids:
            return
        now = self._clock()
        worker.killed_at = now if worker.killed_at is None else worker.killed_at
        if now - worker.killed_at >= STUCK_SECONDS and not worker.stuck_told:
            worker.stuck_told = True
            shown = ", ".join(f"{pid} in state {found.state}" for pid in pids if (found := stat(pid)) is not None)
            why = "a disk or a driver may hang (state D)" if " D" in shown else "it is not allowed to"
            self._log(f"{_named(worker.key)}: killed, and does not end: process {shown}; {why}. Its GPUs stay taken")

    def sync(self, orders: MachineOrders | None, *, start: bool = True) -> None:
        """Do what the orders ask for that is not done yet; without orders nothing is started or ended by them."""
        if orders is not None and start:
            for key, order in orders.workers.items():
                if key not in self.workers:
                    self.workers[key] = AgentWorker(key, self._path(key), self._clock())
                self._start(self.workers[key], order)
        for key, worker in list(self.workers.items()):
            self._observe(worker)
            if orders is not None and not orders.may_run(key):
                self._end(worker)
            else:
                worker.unwanted_since = None

    def _path(self, key: WorkerKey) -> str:
        return os.path.join(self._root, *map(str, key))

    def _start(self, worker: AgentWorker, order: WorkerOrder) -> None:
        """Start the launcher of a worker, unless it was, or a start is under way."""
        worker.devices = list(order.devices)
        if worker.record or worker.state == "exited" or worker.process is not None or self._clock() < worker.next_try:
            return
        worker.next_try = self._clock() + RETRY_SECONDS
        try:
            os.makedirs(worker.folder, mode=0o700, exist_ok=True)
            with open(agent_file_of(worker.folder, "err"), "ab") as errors:
                worker.process = _process("--start-worker", worker.folder, errors, stdin=subprocess.PIPE)
            assert worker.process.stdin is not None
            with contextlib.suppress(BrokenPipeError), worker.process.stdin as stdin:
                stdin.write(json.dumps({**order._asdict(), "user": self._container_user}).encode())
            self._log(f"{_named(worker.key)}: starting{f' in {order.image}' if order.image else ''}")
        except OSError as error:
            self._failed_start(worker, str(error))

    def _failed_start(self, worker: AgentWorker, why: str, last: bool = False) -> None:
        """Note a start that failed; after a while, or where another try does not help, the worker counts as ended."""
        now = self._clock()
        self._log(f"{_named(worker.key)}: could not start: {why}")
        worker.failing_since = now if worker.failing_since is None else worker.failing_since
        if last or now - worker.failing_since >= START_SECONDS:
            worker.state, worker.exit_code, worker.message = "exited", CANNOT_START, why[:MAX_MESSAGE]

    def _observe(self, worker: AgentWorker) -> None:
        """Update the state of a worker from what runs."""
        code = worker.process.poll() if worker.process is not None else None
        if not worker.record:
            worker.record = read_record(worker.folder)
        if worker.state == "exited":
            return
        if not worker.record:
            if code is not None:
                worker.process, worker.killed_at = None, None
                line = _last_line(worker.folder)
                self._failed_start(worker, line.strip("()") or f"exit code {code}", code == GIVEN_UP)
            return
        if is_running(worker.record):
            attempt = f"attempt-{worker.key[1]}"
            running = os.path.exists(os.path.join(worker.folder, attempt, "running.json"))
            worker.state = "running" if running else worker.state
            return
        if worker.record.get("boot") == self._boot and (pids := kill_leftovers(worker.folder)):
            self._note_killed(worker, pids)
            return  # its GPUs are not free before nothing of it runs
        worker.killed_at = None
        if worker.record.get("container") and not self._removed(worker):
            return
        if worker.record.get("container"):
            code = None  # that of the process which started it
        try:
            remove_credentials(worker.folder, worker.key[1])
        except OSError as error:
            self._log(f"{_named(worker.key)}: its credentials are still there: {error}")
        worker.process = None
        worker.exit_code = recorded_exit_code(worker.folder)
        worker.exit_code = code if worker.exit_code is None else worker.exit_code
        worker.state = "exited"
        shown = "unknown" if worker.exit_code is None else worker.exit_code
        self._log(f"{_named(worker.key)}: ended, exit code {shown} {_last_line(worker.folder)}".rstrip())

    def _removed(self, worker: AgentWorker) -> bool:
        """Whether the container of a worker that has ended is removed, or was waited for long enough."""
        now = self._clock()
        if worker.removal is None:
            worker.removal_until = now + self._removal_seconds
            with contextlib.suppress(OSError):
                worker.removal = _process("--remove-container", worker.folder)
        if worker.removal is not None and worker.removal.poll() is not None:
            return True
        return now >= worker.removal_until

    def remove_forgotten(self) -> None:
        """Remove the containers of forgotten workers, from time to time, on a machine that has run any."""
        now = self._clock()
        running = self._forgotten is not None and self._forgotten.poll() is None
        if now < self._forgotten_at or running or not os.path.exists(self._folder.file("containers-used")):
            return
        self._forgotten_at = now + FORGOTTEN_SECONDS
        with contextlib.suppress(OSError):
            self._forgotten = _process("--remove-forgotten", self._folder.path)

    def _end(self, worker: AgentWorker) -> None:
        """Go one step further with the end of a worker that is not ordered any more."""
        now = self._clock()
        worker.unwanted_since = now if worker.unwanted_since is None else worker.unwanted_since
        if worker.state == "exited" or (not worker.record and now >= worker.unwanted_since + UNWANTED_SECONDS):
            self._forget(worker)
        elif now >= worker.unwanted_since + UNWANTED_SECONDS + TERMINATE_SECONDS:
            self._kill(worker)
        elif now >= worker.unwanted_since + UNWANTED_SECONDS and worker.terminated_at is None:
            worker.terminated_at = now
            worker.signal(signal.SIGTERM)

    def _forget(self, worker: AgentWorker) -> None:
        """Remove the folder of a worker that has ended, and those above it that are empty then."""
        worker.abandon_start()
        try:
            for name in ("json", "err", "lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(agent_file_of(worker.folder, name))
            self._folder.discard(worker.folder)
        except OSError as error:
            self._log(f"{_named(worker.key)}: its folder is still there: {error}")
            return
        del self.workers[worker.key]
        attempt = os.path.dirname(worker.folder)
        if not any(key[:2] == worker.key[:2] for key in self.workers):
            with contextlib.suppress(OSError):
                self._folder.discard(attempt)
                os.rmdir(os.path.dirname(attempt))


def _process(
    what: str, folder: str, errors: BinaryIO | None = None, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a process of the agent's own program, which outlives the agent."""
    return subprocess.Popen(
        [sys.executable, *FLAGS, os.path.join(source_folder(), AGENT), what, folder],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if errors is None else errors,
        cwd=folder,
        start_new_session=True,
    )


def kill_leftovers(folder: str) -> list[int]:
    """Kill the processes that have a worker's folder in their environment; return them."""
    mark = f"MAKEWAY_JOB_DIR={folder}".encode()
    result = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark not in file.read().split(b"\0"):
                        continue
                os.kill(int(name), signal.SIGKILL)
                result.append(int(name))
    return result


def remove_credentials(folder: str, attempt: int) -> None:
    """Remove the credentials that a killed launcher has left; links that the job has made are not followed."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    opened: list[int] = []
    try:
        opened.append(os.open(folder, flags))
        opened.append(os.open(f"attempt-{attempt}", flags, dir_fd=opened[0]))
        remove_tree(f"/proc/self/fd/{opened[1]}/{CREDENTIALS}")
    except (FileNotFoundError, NotADirectoryError):
        return  # it has written none
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _folders(root: str) -> Iterator[tuple[WorkerKey, str]]:
    """Yield the workers that have a folder, each with its path."""
    for job in _numbers_or_names(root):
        for attempt in _numbers_or_names(os.path.join(root, job)):
            for worker in _numbers_or_names(os.path.join(root, job, attempt)):
                if attempt.isdecimal() and worker.isdecimal() and valid_key(job, int(attempt), int(worker)):
                    yield (job, int(attempt), int(worker)), os.path.join(root, job, attempt, worker)


def _numbers_or_names(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(path))
    return []


def _named(key: WorkerKey) -> str:
    return f"job {key[0]}, attempt {key[1]}, worker {key[2]}"


def _last_line(folder: str) -> str:
    """Return the last line that a launcher wrote to standard error."""
    with contextlib.suppress(OSError):
        with open(agent_file_of(folder, "err"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
        return f"({lines[-1][:MAX_MESSAGE]})" if lines else ""
    return ""
