"""The parent of every job: starts it once, keeps its log, asks it to make way, and reports how it ended.

Run by a backend as `python -m makeway.launcher ORDER` or by the path of this file; standard library only, and
Python 3.8 is enough, because it runs inside other people's images. ORDER is a file (or `-` for standard input):
one line of JSON, followed by the bytes of the files to lay out. SIGTERM, or a `notice.json` beside the order's
attempt, asks the job to make way. As process 1 of a container it collects every orphan.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

SAVED_AND_LEFT = 75
"""The exit code of a job that saved because it was asked to, and left."""
LOG_LIMIT = 64 * 2**20
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
LOOK_EVERY = 5.0
"""Seconds between looks for a notice that came without a signal."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(argv: list[str]) -> int:
    """Run one attempt as ordered; the answer is the command's exit code (0 when somebody else runs it already)."""
    paths = [word for word in argv if not word.startswith("--")]
    if len(paths) != 1:
        print("usage: launcher.py ORDER [--detach]    (ORDER: a file, or - for standard input)", file=sys.stderr)
        return 2
    stream = sys.stdin.buffer if paths[0] == "-" else open(paths[0], "rb")  # noqa: SIM115
    order: dict[str, Any] = json.loads(stream.readline())
    started = _detach() if "--detach" in argv else None
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    attempt = Attempt(order)
    if not attempt.claim():
        return 0
    if started is not None:
        _close_standard_streams()
    return Run(attempt, stream, started).run()


def _detach() -> int:
    """Go on in a child that no terminal and no service owns; this process ends when the job has started."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    os.setsid()
    return writing


def _close_standard_streams() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nothing, stream)


def write_json(path: str, value: dict[str, Any]) -> None:
    """Write a file so that a reader finds the old or the new content, never half of one."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def read_json(path: str) -> dict[str, Any]:
    """Read a JSON object; an absent or broken file counts as empty."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def start_time(pid: int) -> int:
    """Tell when a process started, in clock ticks since the boot: with the pid, it names a process for good."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def boot_id() -> str:
    """Name this boot of the machine: pids and start times of another one mean nothing."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


class Attempt:
    """One attempt of a job: its order, and where its files are.

    JOB/work (the working directory), JOB/checkpoints (the same over all attempts), JOB/attempt-N (log, reports).
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.number = int(order["attempt"])
        self.job = os.path.abspath(order.get("directory") or os.environ.get("MAKEWAY_JOB_DIR") or ".")
        self.work = os.path.join(self.job, "work")
        self.checkpoints = os.path.join(self.job, "checkpoints")
        self.home = os.path.join(self.job, f"attempt-{self.number}")

    def path(self, name: str) -> str:
        """Name a file of this attempt."""
        return os.path.join(self.home, name)

    def claim(self) -> bool:
        """Be the one launcher of this attempt, for ever; False when there was one before."""
        for directory in (self.work, self.checkpoints, self.home):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        mine = self.path(f"launcher.json.{os.getpid()}")
        write_json(mine, {"pid": os.getpid(), "start_time": start_time(os.getpid()), "boot": boot_id()})
        try:
            os.link(mine, self.path("launcher.json"))
        except FileExistsError:
            return False
        finally:
            os.unlink(mine)
        return True

    def lay_out(self, stream: BinaryIO) -> None:
        """Write the order's files below the working directory; what an earlier attempt left there stays."""
        for entry in self.order.get("files", ()):
            data = stream.read(int(entry["size"]))
            path = os.path.normpath(os.path.join(self.work, entry["path"]))
            if os.path.commonpath([path, self.work]) != self.work or path == self.work:
                raise OSError(errno.EPERM, "a file outside of the working directory", entry["path"])
            if os.path.lexists(path):
                continue
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(f"{path}.part", "wb") as file:
                file.write(data)
            os.chmod(f"{path}.part", 0o755 if entry.get("executable") else 0o644)
            os.replace(f"{path}.part", path)

    def inherit_progress(self) -> None:
        """Start from what the attempt before had saved: its checkpoint is still there."""
        before = read_json(os.path.join(self.job, f"attempt-{self.number - 1}", "progress.json"))
        kept = {str(key): before[key] for key in ("step", "saved_at") if key in before}
        if kept and not os.path.exists(self.path("progress.json")):
            write_json(self.path("progress.json"), kept)

    def environment(self, worker: dict[str, Any]) -> dict[str, str]:
        """Everything that the job finds in its environment."""
        order = self.order
        own = {
            "MAKEWAY_JOB_ID": order["workload"],
            "MAKEWAY_JOB_NAME": order.get("name", ""),
            "MAKEWAY_ATTEMPT": str(self.number),
            "MAKEWAY_TEAM": order.get("team", ""),
            "MAKEWAY_PROFILE": order.get("profile", ""),
            "MAKEWAY_JOB_DIR": self.job,
            "MAKEWAY_CHECKPOINT_DIR": self.checkpoints,
            "MAKEWAY_STOP_FILE": self.path("stop.json"),
            "MAKEWAY_PROGRESS_FILE": self.path("progress.json"),
            "MAKEWAY_RESULT_FILE": self.path("result.pkl"),
            "MAKEWAY_ERROR_FILE": self.path("error.json"),
            "MAKEWAY_SIGNAL": order.get("signal", "SIGTERM"),
            "MAKEWAY_GRACE": str(order.get("grace", 30)),
        }
        return {**os.environ, "PYTHONUNBUFFERED": "1", **order.get("env", {}), **own, **worker.get("env", {})}


class Log:
    """A job's output, bounded: the first half of the limit and the newest quarter at least; the middle is dropped.

    `log` holds the head; `log.OFFSET` are pieces of the tail, named after the place of their first byte.
    """

    def __init__(self, attempt: Attempt, limit: int) -> None:
        self._attempt = attempt
        self._head, self._piece = limit // 2, limit // 4
        self._lock = threading.Lock()
        self._file = open(attempt.path("log"), "ab", buffering=0)  # noqa: SIM115
        self._at = self._file.tell()
        self._room = self._head - self._at
        self._pieces: list[str] = []
        self._newest = b""

    def write(self, data: bytes) -> None:
        """Append; a full disk loses output, never the job."""
        with self._lock:
            self._newest = (self._newest + data)[-4096:]
            with contextlib.suppress(OSError):
                while data:
                    if self._room <= 0:
                        self._next_piece()
                    part, data = data[: self._room], data[self._room :]
                    self._file.write(part)
                    self._at += len(part)
                    self._room -= len(part)

    def say(self, sentence: str) -> None:
        """Add a line of our own."""
        self.write(f"makeway: {sentence}\n".encode())

    def last_lines(self, count: int) -> list[str]:
        """Give the newest lines of the output, without ours."""
        lines = self._newest.decode("utf-8", "replace").replace("\r", "\n").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("makeway: ")][-count:]

    def _next_piece(self) -> None:
        self._file.close()
        name = self._attempt.path(f"log.{self._at}")
        self._file = open(name, "ab", buffering=0)  # noqa: SIM115
        self._room = max(self._piece, 1)
        self._pieces.append(name)
        while len(self._pieces) > 2:
            os.unlink(self._pieces.pop(0))


class Run:
    """One attempt under way: its processes, its notice, and the report at the end."""

    def __init__(self, attempt: Attempt, stream: BinaryIO, started: int | None) -> None:
        self.attempt = attempt
        self.order = attempt.order
        self.stream = stream
        self.started = started
        self.log = Log(attempt, int(self.order.get("log_limit") or LOG_LIMIT))
        self.began = time.time()
        self.grace = float(self.order.get("grace", 30))
        self.workers: list[int] = []
        self.codes: dict[int, int] = {}
        self.alone = False
        self.notice: dict[str, Any] = {}
        self.killed = self.timed_out = self.cancelled = False
        self._pumps: list[threading.Thread] = []

    def run(self) -> int:
        """Start the command, stay until nothing of it is left, and report."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            os.umask(int(self.order.get("umask", 0o022)))
            with self.stream:
                self.attempt.lay_out(self.stream)
            self.attempt.inherit_progress()
            os.chdir(self.attempt.work)
            for worker in self.order.get("workers") or [{}]:
                self._start(worker)
        except OSError as error:
            self._kill_everything()
            sentence = "could not start: " + _why(error)
            self.log.say(sentence)
            return self._report(126 if error.errno in (errno.EACCES, errno.ENOEXEC) else 127, sentence)
        finally:
            if self.started is not None:
                os.close(self.started)
        self._wait()
        self._kill_everything()
        for pump in self._pumps:
            pump.join(timeout=2.0)
        code = self._exit_code()
        return self._report(code, self._message(code))

    def _start(self, worker: dict[str, Any]) -> None:
        """Start one worker: a session and process group of its own, which dies with this launcher."""
        env = self.attempt.environment(worker)
        prefix = f"[{env['RANK']}] ".encode() if len(self.order.get("workers", ())) > 1 and "RANK" in env else b""
        output, output_end = os.pipe()
        failure, failure_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become(self.order["command"], env, output_end, failure_end)
        os.close(output_end)
        os.close(failure_end)
        self.workers.append(pid)
        pump = threading.Thread(target=self._pump, args=(output, prefix), daemon=True)
        pump.start()
        self._pumps.append(pump)
        with os.fdopen(failure, "rb") as file:
            problem = file.read()
        if problem:
            code = int(problem)
            raise OSError(code, os.strerror(code), self.order["command"][0])
        write_json(self.attempt.path("running.json"), {"at": self.began, "pids": self.workers})

    def _pump(self, output: int, prefix: bytes) -> None:
        with os.fdopen(output, "rb", buffering=0) as file:
            fresh = True
            while True:
                data = file.read(65536)
                if not data:
                    return
                if prefix:
                    marked = re.sub(rb"(?<=\n)(?=.)", prefix, data, flags=re.DOTALL)
                    data, fresh = (prefix if fresh else b"") + marked, data.endswith(b"\n")
                self.log.write(data)

    def _wait(self) -> None:
        limit = float(self.order.get("time_limit") or 0.0)
        ends = self.began + limit if limit else None
        self._reap()
        while not self._over():
            now = time.time()
            if ends is not None and now >= ends and not self.notice:
                self.timed_out = True
                reason = f"time limit of {limit:g} s reached"
                self._make_way({"reason": reason, "at": now, "deadline": now + self.grace}, reason)
            deadline = self.notice.get("deadline")
            if deadline is not None and now >= deadline:
                self.killed = True
                return
            moments = [moment for moment in (deadline, None if self.notice else ends) if moment is not None]
            patience = min([LOOK_EVERY, *(max(0.0, moment - now) for moment in moments)])
            caught = signal.sigtimedwait(SIGNALS, patience)
            self._reap()
            self._heed(caught is not None and caught.si_signo == signal.SIGTERM)

    def _heed(self, told: bool) -> None:
        """Read what the service left for us; a plain SIGTERM without a word is the machine's own notice."""
        given = read_json(self.attempt.path("notice.json"))
        if given.get("kill"):
            self.cancelled = True
            self.notice = {**self.notice, "deadline": 0.0}
        elif given and isinstance(given.get("deadline"), (int, float)):
            self._make_way(given, f"asked to make way: {given.get('reason') or 'no reason given'}")
        elif told and not self.notice:
            now = time.time()
            reason = "the machine that it runs on is stopping"
            self._make_way({"reason": reason, "at": now, "deadline": now + self.grace}, f"asked to make way: {reason}")

    def _make_way(self, notice: dict[str, Any], sentence: str) -> None:
        """Write the stop file, then send the signal, once; a repeated notice can only shorten the time."""
        if self.notice and notice["deadline"] >= self.notice["deadline"]:
            return
        first = not self.notice
        self.notice = notice
        write_json(self.attempt.path("stop.json"), {**notice, "attempt": self.attempt.number})
        seconds = max(0.0, notice["deadline"] - time.time())
        self.log.say(f"{sentence}; it has {round(seconds, 1):g} s to save and leave")
        if first:
            number = getattr(signal, str(self.order.get("signal", "SIGTERM")), signal.SIGTERM)
            for pid in self.workers:
                with contextlib.suppress(OSError):
                    os.killpg(pid, number)

    def _reap(self) -> None:
        """Collect every child and orphan that ended; `alone` when none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.alone = True
                return
            if pid == 0:
                return
            if pid in self.workers:
                self.codes[pid] = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def _over(self) -> bool:
        """Say whether the attempt is done: all workers ended, or one failed; a shell that our own signal ended
        does not count while what it started is still saving."""
        if self.alone:
            return True
        codes = list(self.codes.values())
        if not self.notice:
            return len(codes) == len(self.workers) or any(codes)
        if len(codes) < len(self.workers):
            return False
        number = getattr(signal, str(self.order.get("signal", "SIGTERM")), signal.SIGTERM)
        return not any(code in (-number, 128 + number) for code in codes) or self._acknowledged_in_writing()

    def _acknowledged_in_writing(self) -> bool:
        said = read_json(self.attempt.path("progress.json")).get("acknowledged_at")
        return isinstance(said, (int, float)) and said >= float(self.notice.get("at", 0.0)) - 1.0

    def _kill_everything(self) -> None:
        """Kill the groups, then whatever still descends from us, until nothing is left (5 s at most)."""
        ends = time.monotonic() + 5.0
        self._reap()
        while not self.alone and time.monotonic() < ends:
            for pid in self.workers:
                with contextlib.suppress(OSError):
                    if pid not in self.codes:
                        os.killpg(pid, signal.SIGKILL)
            for pid in _descendants():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
            self._reap()

    def _exit_code(self) -> int:
        codes = [self.codes.get(pid, -signal.SIGKILL) for pid in self.workers]
        failed = [code for code in codes if code not in (0, SAVED_AND_LEFT, -signal.SIGKILL)]
        return failed[0] if failed else min(codes) if -signal.SIGKILL in codes else max(codes)

    def _acknowledged(self, code: int) -> bool:
        """Say whether the job left by itself because it was asked to."""
        if not self.notice or self.timed_out or self.killed:
            return False
        return code == SAVED_AND_LEFT or self._acknowledged_in_writing()

    def _report(self, code: int, message: str) -> int:
        progress = read_json(self.attempt.path("progress.json"))
        done = bool(progress.get("completed_at")) or os.path.exists(self.attempt.path("result.pkl"))
        status = {
            "exit_code": code,
            "killed": self.killed,
            "acknowledged": self._acknowledged(code),
            "noticed": bool(self.notice) and not self.timed_out and not self.cancelled,
            "completed": code == 0 and done,
            "timed_out": self.timed_out,
            "step": progress.get("step"),
            "checkpoint_at": progress.get("saved_at"),
            "message": message,
            "started_at": self.began,
            "ended_at": time.time(),
        }
        with contextlib.suppress(OSError):
            write_json(self.attempt.path("status.json"), status)
        if self.order.get("termination_file"):
            short = {**status, "tail": "\n".join(self.log.last_lines(10))[-2000:]}
            with contextlib.suppress(OSError), open(self.order["termination_file"], "w", encoding="utf-8") as file:
                file.write(json.dumps(short)[:4096])
        return code if code >= 0 else 128 - code

    def _message(self, code: int) -> str:
        """Say in a line how it ended."""
        step = read_json(self.attempt.path("progress.json")).get("step")
        saved = "" if step is None else f"saved at step {step}"
        if self.cancelled:
            return "stopped"
        if self.timed_out:
            return "; ".join(filter(None, [str(self.notice["reason"]), "killed" if self.killed else "", saved]))
        if self.killed:
            seconds = self.notice["deadline"] - self.notice.get("at", self.began)
            text = f"did not leave within {round(seconds, 1):g} s and was killed"
            self.log.say(text)
            return f"{text}; {saved or 'no checkpoint'}"
        if code in (0, SAVED_AND_LEFT) or self._acknowledged(code):
            return saved
        lines = self.log.last_lines(1)
        return _how(code) + (f": {lines[0].strip()[:500]}" if lines else "")


def _become(command: list[str], env: dict[str, str], output: int, failure: int) -> None:
    """Turn this fresh child into the job; never returns."""
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
    """Find every process below this one, wherever it moved itself."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                children.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
    found: list[int] = []
    ahead = [os.getpid()]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def _why(error: OSError) -> str:
    name = f"{error.filename!r}" if error.filename else ""
    known: dict[int | None, tuple[str, str]] = {
        errno.ENOENT: ("no such file or program", ""),
        errno.EACCES: ("not allowed to run or open", ""),
        errno.ENOEXEC: ("not a program", " (a script needs a first line like #!/bin/sh)"),
        errno.ENOSPC: ("the disk is full", ""),
    }
    what, hint = known.get(error.errno, ((error.strerror or str(error)).lower(), ""))
    return " ".join(filter(None, [what, name])) + hint


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
