"""Run an attempt from its order to its report: start, wait, pass on the notice, kill, report."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from typing import Any

from .attempt import Attempt
from .causes import SAVED_AND_LEFT, Ending, end_of, last_words, reason_of, slow_save
from .checkpoint_check import CANNOT_CREATE, write_failure
from .children import Children
from .durations import duration
from .files import exact_integer, number, read_json, write_json
from .log import LIMIT, Log
from .notice_delivery import LINGER_SECONDS, NoticeDelivery
from .output_copy import OutputCopy
from .transport import LocalTransport, Transport

USAGE = """usage: launcher ORDER [--detach]    (ORDER: a file, or - for standard input)
       launcher --remote            (for the worker of MAKEWAY_ATTEMPT_URL and MAKEWAY_ATTEMPT_TOKEN or …_TOKEN_FILE)
       launcher --copy FOLDER       (itself, into a folder that it can be run from)"""
OWN_VARIABLES = (
    *("MAKEWAY_ATTEMPT_URL", "MAKEWAY_WORKER_ENV", "MAKEWAY_TERMINATION_FILE"),
    *("MAKEWAY_JOB_DIR", "MAKEWAY_CHECKPOINT_DIR"),
)
"""The launcher's part of a remote worker's environment"""
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
LOST_RANK_SECONDS = 10.0
"""Seconds, at least, after the failure of a worker for which others of its gang may still run after a notice"""
NOTICE_POLL = 5.0
"""Seconds between reads of a notice that came without a signal."""
DRAIN_SECONDS = 60.0
"""Seconds for which the last output may take to reach a slow disk"""
HELD_OPEN_SECONDS = 2.0
"""Seconds for which a pipe without output is waited for that a process elsewhere holds open"""


def main(argv: list[str]) -> int:
    """Run one attempt as ordered; return the command's exit code, 0 if another launcher runs the attempt already."""
    paths = [word for word in argv if not word.startswith("--")]
    if argv == ["--remote"]:
        return _run_remote()
    if argv[:1] == ["--copy"] and len(argv) == 2:
        return _copy(argv[1])
    if len(paths) != 1:
        print(USAGE, file=sys.stderr)
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
    return Run(attempt, LocalTransport(stream), started).run()


def _copy(folder: str) -> int:
    """Copy the launcher to where an image without it can run it; make the checkpoints' folder as the job's own."""
    from .copying import copy_launcher

    if checkpoints := os.environ.get("MAKEWAY_CHECKPOINT_DIR"):
        with contextlib.suppress(OSError):  # a volume in which only others make folders
            os.makedirs(checkpoints, exist_ok=True)
            if not os.access(checkpoints, os.W_OK | os.X_OK):
                os.rmdir(checkpoints)  # the kubelet's, which made it as root while the job could not
                os.mkdir(checkpoints)
    os.makedirs(folder, exist_ok=True)
    copy_launcher(folder)
    return 0


def _run_remote() -> int:
    """Run the worker that the environment names, by the attempt protocol; the job does not get the token."""
    from .remote import RemoteTransport  # local jobs start without HTTP
    from .secrecy import take_token
    from .service import Service

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        token = take_token()
        environ = {name: os.environ.pop(name, "") for name in OWN_VARIABLES}
        remote = RemoteTransport(Service(environ["MAKEWAY_ATTEMPT_URL"], token), environ)
        attempt = Attempt(remote.order())
    except (OSError, ValueError) as error:
        print(f"launcher: {error}", file=sys.stderr)
        return 1
    if not attempt.claim():
        return 0
    copy = OutputCopy(sys.stdout.fileno(), _log_limit(attempt.order)) if sys.stdout else None
    try:
        return Run(attempt, remote, None, copy).run()
    finally:
        if copy is not None:
            copy.close()


def _log_limit(order: dict[str, Any]) -> int:
    return int(order.get("log_limit") or LIMIT)


def _detach() -> int:
    """Continue in a child of its own session; this process ends when the job has started."""
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


class Run:
    """One running attempt: its processes, its notice, and the report at the end."""

    def __init__(
        self, attempt: Attempt, transport: Transport, started: int | None, copy: OutputCopy | None = None
    ) -> None:
        self.attempt = attempt
        self.order = attempt.order
        self.transport = transport
        self.started = started
        self.log = Log(attempt, _log_limit(self.order), copy)
        self.began = time.time()
        self.grace = float(self.order.get("grace", 30))
        self.signal = _signal_named(str(self.order.get("signal", "SIGTERM")))
        self.children = Children()
        self.delivery = NoticeDelivery(self.children, self.signal, attempt.path("progress.json"))
        self.notice: dict[str, Any] = {}
        self._noticed_at = 0.0
        """When the first notice was given, by the clock of the service"""
        self.kill_at: float | None = None
        self.killed = self.timed_out = self.cancelled = self.lingered = False
        self.storage_failed = self._warned = False
        self._ranks: dict[int, str] = {}
        """of the workers of a gang, by pid"""
        self._failed_since: float | None = None
        self._waited_for = ""
        """The rank of a gang's other launcher that failed, where the workers here waited for it in vain"""
        self._at_the_kill: dict[str, str] = {}
        """How far each rank was with the notice when it was killed"""
        self._pumps: list[tuple[threading.Thread, int]] = []

    def run(self) -> int:
        """Start the command, wait until none of its processes is left, and report; return the exit code."""
        try:
            os.umask(int(self.order.get("umask", 0o022)))
            if failure := write_failure(self.attempt.checkpoints):
                return self._without_checkpoints(failure)
            _limit_open_files(self.order.get("open_files"))
            self.attempt.write_files(self.transport.content)
            self.attempt.write_credentials()
            self.attempt.inherit_progress()
            os.chdir(self.attempt.work)
            for worker in self.order.get("workers") or [{}]:
                self._start(worker)
        except OSError as error:
            self.children.kill_everything()
            self._remove_credentials()
            if error.errno == errno.EINTR:
                self.notice = self._own_notice("the machine is stopping")
            sentence = "could not start: " + reason_of(error)
            self.log.note(sentence)
            return self._report(126 if error.errno in (errno.EACCES, errno.ENOEXEC) else 127, sentence)
        finally:
            if self.started is not None:
                os.close(self.started)
        self.transport.begin(self.attempt)
        self._wait()
        running = [pid for pid in self.children.workers if pid not in self.children.exit_codes]
        self.children.kill_everything()
        self._remove_credentials()
        self._drain()
        if self.lingered:
            self.children.exit_codes.update(dict.fromkeys(running, SAVED_AND_LEFT))
        return self._report(self._exit_code())

    def _remove_credentials(self) -> None:
        with contextlib.suppress(OSError):  # the job may have removed its folders
            self.attempt.remove_credentials()

    def _without_checkpoints(self, failure: str) -> int:
        """End before the command begins, as none of its checkpoints could be kept."""
        self.storage_failed = True
        self.log.note(failure)
        return self._report(CANNOT_CREATE, failure)

    def _start(self, worker: dict[str, Any]) -> None:
        folder = self.attempt.listeners(len(self.children.workers))
        env = self.attempt.environment(worker, folder)
        output = self.children.start(self.order["command"], env)
        self.delivery.add(self.children.workers[-1], folder)
        gang = int(self.order.get("gang") or len(self.order.get("workers") or ()))
        if gang > 1 and "RANK" in env:
            self._ranks[self.children.workers[-1]] = env["RANK"]
        prefix = f"[{env['RANK']}] ".encode() if gang > 1 and "RANK" in env else b""
        pump = threading.Thread(target=self._pump, args=(output, prefix), daemon=True)
        pump.start()
        self._pumps.append((pump, output))
        with contextlib.suppress(OSError):  # the job may have removed its folder already, or put something in it
            write_json(self.attempt.path("running.json"), {"at": self.began, "pids": self.children.workers})

    def _pump(self, output: int, prefix: bytes) -> None:
        """Copy a worker's output to the log; in a gang by whole lines, so that no line mixes two ranks."""
        held = b""
        with os.fdopen(output, "rb", buffering=0) as file:
            while data := file.read(65536):
                if prefix:
                    held += data
                    end = max(held.rfind(b"\n"), held.rfind(b"\r")) + 1 or (len(held) if len(held) > 65536 else 0)
                    data, held = held[:end], held[end:]
                    data = re.sub(rb"(?:^|(?<=\n))(?=.)", prefix, data, flags=re.DOTALL)
                if data:
                    self.log.write(data)
            if held:
                self.log.write(prefix + held + b"\n")

    def _drain(self) -> None:
        """Wait until all output is in the log: a pipe ends with its processes, unless one elsewhere holds it open."""
        ends = time.monotonic() + DRAIN_SECONDS
        for pump, output in self._pumps:
            unread = select.poll()
            unread.register(output, select.POLLIN)
            quiet_at = time.monotonic()
            while pump.is_alive() and time.monotonic() < min(ends, quiet_at + HELD_OPEN_SECONDS):
                pump.join(0.02)
                if any(event & (select.POLLIN | select.POLLHUP) for _, event in unread.poll(0)):
                    quiet_at = time.monotonic()

    def _wait(self) -> None:
        """Wait for the end. Limits use the monotonic clock, so that setting the wall clock costs no time to save."""
        limit = float(self.order.get("time_limit") or 0.0)
        ends = time.monotonic() + limit if limit else None
        self.children.reap()
        while not self._over():
            now = time.monotonic()
            if ends is not None and now >= ends and not self.notice:
                self.timed_out = True
                reason = self._limit_reached()
                self._preempt(self._own_notice(reason), reason)
            if self.kill_at is not None and now >= self.kill_at:
                self.killed = True
                self._at_the_kill = self.delivery.ranks()
                return
            if self.notice and self.delivery.lingers():
                self.lingered = True
                return
            if self.notice and self._wait_in_vain():
                return
            ahead = self.delivery.next_at if self.notice else ends
            moments = [moment for moment in (self.kill_at, ahead) if moment is not None]
            patience = min([NOTICE_POLL, *(max(0.0, moment - now) for moment in moments)])
            self._warn_of_slow_saves()
            caught = signal.sigtimedwait(SIGNALS, patience)
            self.children.reap()
            if self.notice and not self.cancelled:
                self.delivery.deliver()
            self._read_notice(caught is not None and caught.si_signo in (signal.SIGTERM, signal.SIGINT))

    def _wait_in_vain(self) -> bool:
        """Whether the workers that are left wait for one of their gang that has failed, as in a collective."""
        failed = self._failed()
        if failed is not None:
            rank, code = self._ranks.get(failed, "0"), self.children.exit_codes[failed]
        elif (elsewhere := self.transport.failed_rank()) is not None:
            rank, code = elsewhere
        else:
            return False
        now = time.monotonic()
        self._failed_since = now if self._failed_since is None else self._failed_since
        saving = number(read_json(self.attempt.path("progress.json")).get("saving_since")) is not None
        if now < self._failed_since + LOST_RANK_SECONDS or not self.delivery.wait_in_vain(saving):
            return False
        lost = f"rank {rank} failed ({end_of(code)})"
        self._waited_for = lost if failed is None else ""
        self.log.note(
            f"{lost}, and the others have not ended {duration(now - self._failed_since)} later: they are ended"
        )
        return True

    def _failed(self) -> int | None:
        """Return the worker that failed first; None without one. Our own signal is no failure."""
        for worker, code in self.children.exit_codes.items():
            if code not in (0, SAVED_AND_LEFT) and not self._is_ours(code) and not self.delivery.has_saved(worker):
                return worker
        return None

    def _exited(self) -> list[str]:
        """Return the ranks of a gang whose workers have exited without an error."""
        ended = [worker for worker, code in self.children.exit_codes.items() if code in (0, SAVED_AND_LEFT)]
        return [self._ranks[worker] for worker in ended if worker in self._ranks]

    def _warn_of_slow_saves(self) -> None:
        """Write into the log, once, that a save would not fit well into the grace."""
        if self._warned or self.notice:
            return
        took = number(read_json(self.attempt.path("progress.json")).get("save_seconds"))
        if text := slow_save(took, self.grace):
            self._warned = True
            self.log.note(f"{text}; save less or faster, or use a profile with a longer grace")

    def _read_notice(self, signalled: bool) -> None:
        """Read the service's notice; a SIGTERM without one means that the machine is stopping."""
        given = self.transport.notice(self.attempt)
        if given.get("kill"):
            self.cancelled = True
            self.notice = {**self.notice, "deadline": 0.0}
            self.kill_at = 0.0
        elif number(given.get("deadline")) is not None:
            self._preempt(given, f"notice: {given.get('reason') or 'no reason given'}")
        elif signalled and not self.notice:
            reason = "the machine is stopping"
            self._preempt(self._own_notice(reason), f"notice: {reason}")

    def _limit_reached(self) -> str:
        return f"time limit of {duration(float(self.order['time_limit']))} reached"

    def _own_notice(self, reason: str) -> dict[str, Any]:
        now = time.time()
        return {"reason": reason, "at": now, "deadline": now + self.grace}

    def _preempt(self, notice: dict[str, Any], sentence: str) -> None:
        """Write the stop file, and signal what does not read it; a repeated notice only brings the deadline forward."""
        if self.notice and notice["deadline"] >= self.notice["deadline"]:
            return
        if not self.notice:
            self._noticed_at = number(notice.get("at")) or 0.0
        self.notice = notice
        self.delivery.observe()
        try:
            write_json(self.attempt.path("stop.json"), {**notice, "attempt": self.attempt.number})
            written = True
        except OSError:
            written = False
        seconds = _remaining_seconds(notice, self.grace)
        self.kill_at = time.monotonic() + seconds
        self.log.note(f"{sentence.rstrip('.')}; it has {duration(seconds)} to save and end")
        self.delivery.begin(seconds, written=written)

    def _over(self) -> bool:
        """Whether the attempt is over: all workers ended, or one failed.

        A shell that our own signal ended does not count while a process that it started is still saving.
        """
        if self.children.no_descendants:
            return True
        codes = list(self.children.exit_codes.values())
        if not self.notice:
            return len(codes) == len(self.children.workers) or any(codes)
        if len(codes) < len(self.children.workers):
            return False
        return not any(self._is_ours(code) for code in codes) or self._acknowledged_in_writing()

    def _is_ours(self, code: int) -> bool:
        """Whether a worker that ended with this code ended by the signal of the notice."""
        return bool(self.notice) and code in (-self.signal, 128 + self.signal)

    def _acknowledged_in_writing(self) -> bool:
        at = number(read_json(self.attempt.path("progress.json")).get("acknowledged_at"))
        return at is not None and at >= self._noticed_at - 1.0

    def _acknowledged(self, code: int) -> bool:
        """Whether the job ended by itself because of the notice."""
        if not self.notice or self.timed_out or self.killed:
            return False
        return code == SAVED_AND_LEFT or (self._acknowledged_in_writing() and not self.delivery.unsaved())

    def _exit_code(self) -> int:
        """Return the attempt's exit code; 0 where only this launcher ended a process whose result was kept already."""
        codes = self.children.exit_codes.values()
        ours = all(code == 0 or self._is_ours(code) or (self.killed and code == -signal.SIGKILL) for code in codes)
        if self.notice and not self.cancelled and not self.timed_out and ours and self._has_result():
            return 0
        if self.notice:
            self._translate_codes()
        return self.children.exit_code()

    def _translate_codes(self) -> None:
        """Take 75 for the code of a worker whose listening processes have all saved, whatever started them made of it.

        torchrun ends with 1 when its ranks end with 75, having sent SIGTERM to those that were slower.
        """
        for worker, code in self.children.exit_codes.items():
            if code not in (0, -signal.SIGKILL) and self.delivery.has_saved(worker):
                self.children.exit_codes[worker] = SAVED_AND_LEFT

    def _has_result(self) -> bool:
        return os.path.exists(self.attempt.path("result.pkl"))

    def _report(self, code: int, message: str = "") -> int:
        progress = self._progress_at_the_end()
        done = bool(progress.get("completed_at")) or self._has_result()
        acknowledged = self._acknowledged(code)
        status = {
            "exit_code": code,
            "killed": self.killed,
            "acknowledged": acknowledged,
            "noticed": bool(self.notice) and not self.timed_out and not self.cancelled,
            "completed": code == 0 and done,
            "timed_out": self.timed_out,
            "storage_failed": self.storage_failed,
            "step": exact_integer(progress.get("step")),
            "checkpoint_at": number(progress.get("saved_at")),
            "message": message or self._message(code, progress, acknowledged),
            "started_at": self.began,
            "ended_at": time.time(),
        }
        with contextlib.suppress(OSError):
            write_json(self.attempt.path("status.json"), status)
        self.log.wait_for_notes()
        self.transport.finish(self.attempt, status, self.log, self.kill_at)
        return code if code >= 0 else 128 - code

    def _progress_at_the_end(self) -> dict[str, Any]:
        """Return what the job wrote of its progress; a save in which it was killed is added to it, for the service."""
        path = self.attempt.path("progress.json")
        progress: dict[str, Any] = read_json(path)
        since = number(progress.get("saving_since"))
        if not self.killed or self.cancelled or since is None:
            return progress
        took = min(max(0.0, time.time() - since), max(0.0, time.time() - self.began))
        shown = progress.get("progress")
        shown = {**(shown if isinstance(shown, dict) else {}), "save_seconds": took, "save_killed": True}
        progress = {**progress, "save_killed_after": took, "progress": shown}
        with contextlib.suppress(OSError):
            write_json(path, progress)
        return progress

    def _message(self, code: int, progress: dict[str, Any], acknowledged: bool) -> str:
        """Return in one line how the attempt ended."""
        if self.cancelled:
            return "stopped"
        failed = self._failed()
        rank = self._ranks.get(failed, "") if failed is not None else ""
        own = self.children.exit_codes[failed] if failed is not None else code
        notice = self.notice
        ending = Ending(
            code=code,
            saved_step=exact_integer(progress.get("step")),
            last_line=last_words(self.log.last_lines(200), rank, own if own < 0 and own != code else 0),
            reaction=self.delivery.state() if notice else "",
            seconds=notice["deadline"] - (number(notice.get("at")) or self.began) if notice else 0.0,
            killed=self.killed,
            saving=number(progress.get("save_killed_after")) if self.killed else None,
            lingered=LINGER_SECONDS if self.lingered else 0.0,
            signal=self.signal if self._is_ours(code) else 0,
            slow_save=slow_save(number(progress.get("save_seconds")), self.grace),
            waited_for=self._waited_for,
            exited=[*self._exited(), *self.delivery.exited()],
            ranks=self._at_the_kill if self._ranks or len(self._at_the_kill) > 1 else {},
        )
        if self.timed_out:
            return ending.after_time_limit(self._limit_reached())
        if self.killed:
            self.log.note(ending.kill)
        return ending.after_notice(acknowledged) if notice else ending.unasked()


def _limit_open_files(limit: Any) -> None:
    """Set the job's soft limit of open files: that of the service is for its connections."""
    if isinstance(limit, int):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _signal_named(name: str) -> int:
    try:
        return signal.Signals[name]
    except KeyError:
        return signal.SIGTERM


def _remaining_seconds(notice: dict[str, Any], grace: float) -> float:
    """Return the seconds until a notice's deadline; all of them if the clock was set since it was written."""
    at = number(notice.get("at"))
    given = max(0.0, notice["deadline"] - at) if at is not None else grace
    passed = time.time() - at if at is not None else 0.0
    return given - passed if 0.0 <= passed < given else given
