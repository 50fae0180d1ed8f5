"""Run the init script of a machine once for each boot, in a process that outlives the agent, and keep what it wrote.

The process is `agent --run-init`. Of the output the beginning and the end are kept, in memory of a bounded size,
however much the script writes; a script that hangs is killed when its time is up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time

from ..launcher.attempt import boot_id, start_time
from ..launcher.files import read_json, write_json
from ..launcher.processes import stat
from .environment import machine_environment
from .programs import AGENT, FLAGS, source_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEAD, TAIL = 4_096, 16_384
"""Bytes of the output that are kept: a report takes 64 KiB of it, where a byte that is none of UTF-8 becomes three"""
CONSOLE = 1_000_000
"""Bytes of the output that are copied to the agent's own, for people who look at the console of the machine"""
TIMED_OUT = 124
NOT_STARTED = 125
QUIET_SECONDS = 0.5
"""Seconds without output after the end of the script, whose children may hold its output open for ever"""
WRITE_TRIES = 60


class InitScript:
    """The init script of this boot, started once by whichever agent comes first."""

    def __init__(self, folder: str, shell: str = "/bin/sh", seconds: float = 3600.0) -> None:
        self.folder = folder
        self._shell = shell
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._result: dict[str, Any] | None = None
        self._boot = boot_id()

    def start(self, script: str, cpu_only: bool) -> None:
        """Start the script, unless an agent of this boot has started it already."""
        if not script.strip():
            self._result = {"exit_code": 0, "output": ""}
            return
        if self._runner() or self._ended() is not None:
            return
        order = {"script": script, "cpu_only": cpu_only, "seconds": self._seconds, "shell": self._shell}
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            command = [sys.executable, *FLAGS, os.path.join(source_folder(), AGENT), "--run-init", self.folder]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(json.dumps(order).encode())
        except OSError as error:
            self._result = {"exit_code": NOT_STARTED, "output": f"the init script could not be started: {error}"}

    def result(self) -> dict[str, Any] | None:
        """Return exit code and output once the script has ended; None before."""
        if self._result is None and not self._running():
            self._result = self._ended()
        if self._result is None and not self._running():
            code = self._process.returncode if self._process is not None else NOT_STARTED
            message = "the output of the init script was not kept"
            self._result = {"exit_code": code if code >= 0 else NOT_STARTED, "output": message}
        return self._result

    def _running(self) -> bool:
        """Whether the process of the script runs, whichever agent has started it."""
        if self._process is not None:
            return self._process.poll() is None
        return is_running(self._runner())

    def _runner(self) -> dict[str, Any]:
        record = read_json(os.path.join(self.folder, "runner.json"))
        return record if record.get("boot") == self._boot else {}

    def _ended(self) -> dict[str, Any] | None:
        ended = read_json(os.path.join(self.folder, "result.json"))
        if ended.get("boot") != self._boot or not isinstance(ended.get("exit_code"), int):
            return None
        return {"exit_code": ended["exit_code"], "output": str(ended.get("output", ""))}


def is_running(record: dict[str, Any]) -> bool:
    """Whether the process of a record runs: its pid, and when it was started, in this boot."""
    result = stat(record["pid"]) if isinstance(record.get("pid"), int) else None
    if result is None or not result.is_alive:
        return False
    return bool(result.start == record.get("ticks") and record.get("boot") == boot_id())


def own_record() -> dict[str, Any]:
    """Return what identifies this process, also after it has become another program."""
    return {"pid": os.getpid(), "ticks": start_time(os.getpid()), "boot": boot_id()}


def run_init(folder: str) -> int:
    """Run the script that standard input has, keep how it ended, and return its exit code; once for each boot."""
    data = sys.stdin.buffer.read()
    if not data:
        return NOT_STARTED  # the agent was killed meanwhile, and the next one starts it
    order = json.loads(data)
    with open(os.path.join(folder, "lock"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if read_json(os.path.join(folder, "runner.json")).get("boot") == boot_id():
            return NOT_STARTED
        write_json(os.path.join(folder, "runner.json"), own_record())
    code, output = _run(order)
    result = {"boot": boot_id(), "exit_code": code, "output": output}
    for _ in range(WRITE_TRIES):  # the disk may be full for a while
        try:
            write_json(os.path.join(folder, "result.json"), result)
            break
        except OSError:
            time.sleep(1.0)
    return code if 0 <= code <= 255 else 128 - code


def _run(order: dict[str, Any]) -> tuple[int, str]:
    """Run the script; return its exit code, and the beginning and the end of its output."""
    env = machine_environment(cpu_only=bool(order.get("cpu_only")))
    try:
        process = subprocess.Popen(
            [order["shell"], "-c", order["script"]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=env["HOME"] if os.path.isdir(env["HOME"]) else "/",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return NOT_STARTED, f"the init script could not be started: {error}"
    assert process.stdout is not None
    ends = time.monotonic() + float(order["seconds"])
    kept = _Output()
    timed_out = False
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN)
    quiet_since: float | None = None
    while True:
        data = os.read(process.stdout.fileno(), 65_536) if ready.poll(100) else None
        now = time.monotonic()
        if data:
            kept.add(data)
        elif data == b"" and process.poll() is None:  # it has closed its output, and goes on
            time.sleep(0.1)
        if process.poll() is None:
            if now >= ends:
                timed_out = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        elif data:
            quiet_since = now if quiet_since is None else quiet_since
            if now > quiet_since + 10 * QUIET_SECONDS:
                break  # what it has left running writes for ever
        elif data == b"" or now > (quiet_since or now) + QUIET_SECONDS:
            break
        else:
            quiet_since = now if quiet_since is None else quiet_since
    if timed_out:
        kept.add(f"\nthe init script was killed after {order['seconds']:g} s\n".encode())
    return TIMED_OUT if timed_out else process.returncode, kept.text()


class _Output:
    """The beginning and the end of an output, and a copy of its first part on standard output."""

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""
        self._size = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self._copy(data[: max(0, CONSOLE - self._size)])
        self._size += len(data)
        room = max(0, HEAD - len(self._head))
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-TAIL:]

    def text(self) -> str:
        """Return what was kept; characters that are none of UTF-8, and NUL, are replaced."""
        omitted = self._size - len(self._head) - len(self._tail)
        gap = f"\n… {omitted} bytes …\n" if omitted else ""
        parts = [part.decode("utf-8", "replace").replace("\0", "\ufffd") for part in (self._head, self._tail)]
        return gap.join(parts)

    def _copy(self, data: bytes) -> None:
        """Copy to standard output what it takes at once: a console without a reader holds up nothing."""
        with contextlib.suppress(OSError, ValueError):
            room = select.poll()
            room.register(1, select.POLLOUT)
            for start in range(0, len(data), select.PIPE_BUF):
                if not any(event & select.POLLOUT for _, event in room.poll(0)):
                    return
                os.write(1, data[start : start + select.PIPE_BUF])
