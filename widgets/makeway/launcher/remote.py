"""Speak the attempt protocol: fetch order and files, follow orders, report, and send log, result and exception.

The service may be unavailable for minutes: the work goes on, and what it has not taken is kept in the attempt's files
and sent later. Orders become the notice that a service on the same machine would write, and the signal. A launcher that
reaches the service no more has its work end before the service starts it elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .attempt import Attempt
from .durations import duration
from .files import exact_integer, open_file
from .log import Log
from .log_sender import PART, LogSender
from .pause import Pause
from .report import report_of, time_of, without_progress
from .service import AttemptEnded, RateLimited, RequestRejected, Service, ServiceUnavailable
from .termination_message import write_termination_message

POLL_SECONDS = 25.0
"""Seconds that one long poll for orders takes at most, and never more than a heartbeat"""
READ_SECONDS = 1.0
"""Seconds between two reads of output and progress"""
ORDERS_PAUSE = 3.0
"""Seconds between two tries to get orders, at most, and half as much more by chance: a notice has a deadline"""
FINISH_SECONDS = 900.0
"""Seconds for which a launcher tries to report an end, at least; longer where the service counts it as lost later"""
STOPPING_SECONDS = 10.0
"""The same, at least, where the machine is stopping, which waits for its pods and processes and soon kills them"""
STOPPING_MARGIN = 12.0
"""Seconds after the deadline of such a notice for which outputs are sent still: a pod is killed 20 s after it"""
REPORT_SECONDS = 60.0
"""Seconds that are left for the report of the end, however long the outputs took"""
TOKEN_UNKNOWN_SECONDS = 60.0
"""Seconds after which a token that the service does not know is believed to stay so"""
MAX_DAMAGED = 5
"""Damaged copies of one file after which it is not fetched again"""
END_BEFORE_LOST = 45.0
"""Seconds before the service counts a silent worker as lost in which the work has ended here. To kill it takes 5 s, and
the service may have heard from the worker 35 s before the last answer that came here."""
STEPS_SECONDS = 5.0
"""Seconds between two reports of which only the progress is new, at least; half a heartbeat where that is longer"""
OUTPUTS = {"result": "result.pkl", "error": "error.json"}
NAMES = {"result": "its result", "error": "its exception", "log": "the end of its log"}
"""What outputs are called in the sentence about those that were not sent"""


class RemoteTransport:
    """The service elsewhere; see `transport.Transport` for what each method guarantees."""

    def __init__(self, service: Service, environ: dict[str, str]) -> None:
        self._service = service
        self._environ = environ
        self._instance = os.urandom(16).hex()
        self._heartbeat = 10.0
        self._pace = READ_SECONDS
        self._worker = 0
        self._lost_after = math.inf
        self._notice: dict[str, Any] = {}
        self._failed: tuple[str, int] | None = None
        self._progress: dict[str, Any] = dict.fromkeys(("started_at", "step", "saved_at"))
        self._done = threading.Event()
        self._unheard = False
        """Whether the work was ended because the service was not reached"""
        self._ended = False
        """Whether the service has ended the attempt"""
        self._refused = ""
        """Why the service did not keep the result"""
        self._log: LogSender | None = None
        self._threads: list[threading.Thread] = []

    def order(self) -> dict[str, Any]:
        """Claim the worker and return its order; AttemptEnded if it has another launcher or no attempt any more.

        OSError on a SIGTERM while the service is unavailable: nothing was started.
        """
        pause = Pause()
        while True:
            try:
                start = self._claim()
                break
            except RequestRejected as error:
                raise AttemptEnded(str(error)) from error
            except ServiceUnavailable as error:
                self._wait(pause, error)
        self._heartbeat = float(start["heartbeat"])
        self._lost_after = float(start["lost_after"])
        self._worker = int(start["worker"])
        return _order(start, self._environ)

    def _claim(self) -> dict[str, Any]:
        return self._service.post("claim", {"instance": self._instance})

    def _wait(self, pause: Pause, error: ServiceUnavailable) -> None:
        """Wait before the next try, while nothing is started yet; AttemptEnded or OSError where there will be none."""
        if self._service.token_unknown_for > TOKEN_UNKNOWN_SECONDS:
            raise AttemptEnded(str(error)) from error
        if signal.SIGTERM in signal.sigpending():
            raise OSError(errno.EINTR, "the machine is stopping") from error
        time.sleep(pause.next(error.wait))

    def content(self, entry: dict[str, Any]) -> bytes:
        """Fetch a file and check that it is the one that was submitted; wait for a service that is unavailable."""
        pause, damaged = Pause(), 0
        while damaged < MAX_DAMAGED:
            try:
                if self._service.expired:
                    self._claim()
                data = self._service.file(entry["digest"])
                if hashlib.sha256(data).hexdigest() == entry["digest"]:
                    return data
                damaged += 1
            except RequestRejected as error:
                raise OSError(errno.EIO, str(error.strerror), entry["path"]) from error
            except ServiceUnavailable as error:
                self._wait(pause, error)
        raise OSError(errno.EIO, f"the file came damaged {MAX_DAMAGED} times", entry["path"])

    def begin(self, attempt: Attempt) -> None:
        """Report and send the log in one thread; follow orders in another; have the work end in time in a third."""
        self._log = LogSender(attempt, self._service)
        self._progress["started_at"] = time.time()
        for work in (self._send, self._follow, self._end_unheard):
            thread = threading.Thread(target=work, args=(attempt,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish(self, attempt: Attempt, status: dict[str, Any], log: Log, deadline: float | None = None) -> None:
        """Send result, exception and the rest of the log, then how it ended; give up after a long time."""
        self._done.set()
        report = self._report(attempt, status)
        end, result = report["exit"], self._worker == 0 and os.path.isfile(attempt.path(OUTPUTS["result"]))
        end.update(unheard=self._unheard, result_unsent=result)
        self._write_termination_message(report, log)  # before all else, however it ends from here on
        for thread in self._threads[:1]:  # the others may wait for orders, and end with the process
            thread.join(30.0)
        stopping = status["noticed"] and not self._notice  # by its machine, which keeps what it has written
        patience = max(FINISH_SECONDS, self._lost_after)
        if stopping:
            patience = max(STOPPING_SECONDS, (deadline or 0.0) + STOPPING_MARGIN - time.monotonic())
        ends = time.monotonic() + patience
        unsent = self._send_outputs(attempt, log, ends, ends if stopping else math.inf)
        if not self._ended:
            end["result_unsent"] = "result" in unsent
            if self._refused:
                end["result_refused"] = True
                end["message"] = "; ".join(filter(None, [end["message"][:3400], self._refused[:500]]))
            if result and not end["result_unsent"]:
                self._write_termination_message(report, log)
        if unsent:
            note = f"{' and '.join(NAMES[kind] for kind in unsent)} could not be sent in time"
            end["message"] = "; ".join(filter(None, [end["message"][:3800], note]))
        ends = max(ends, time.monotonic() + min(patience, STOPPING_SECONDS if stopping else REPORT_SECONDS))
        try:
            self._until_taken(attempt, partial(self._send_report, report), ends)
        except RequestRejected:  # what the job wrote about itself cannot be read: its end can
            reduced = {key: end[key] for key in ("exit_code", "ended_at", "result_unsent")}
            with contextlib.suppress(RequestRejected):
                self._until_taken(attempt, partial(self._send_report, {"exit": reduced}), ends)

    def _write_termination_message(self, report: dict[str, Any], log: Log) -> None:
        """Write how the attempt ended to the file that its machine keeps, where it keeps one."""
        if path := self._environ.get("MAKEWAY_TERMINATION_FILE"):
            write_termination_message(path, report, log.last_lines(10))

    def _send_outputs(self, attempt: Attempt, log: Log, ends: float, stops: float) -> list[str]:
        """Send result, exception and log; return those that were not taken. A file under way is left at `stops`."""
        unsent = []
        for kind, name in OUTPUTS.items():
            if kind == "error" or self._worker == 0:
                send = partial(self._send_file, attempt, kind, name, log.note, stops)
                if not self._until_taken(attempt, send, ends):
                    unsent.append(kind)
                    if not self._ended:
                        log.note(f"{NAMES[kind]} could not be sent in time")
        log.wait_for_notes()
        sender = self._log or LogSender(attempt, self._service)
        if not self._until_taken(attempt, partial(sender.send, final=True), ends):
            unsent.append("log")
        return unsent

    def _until_taken(self, attempt: Attempt, work: Callable[[], object], ends: float) -> bool:
        """Do something, once at least, until time is up; return whether the service has taken it.

        It does not where the attempt has ended, or a file cannot be read.
        """
        pause = Pause()
        while not self._ended:
            try:
                if self._service.expired:
                    self._renew(attempt)
                work()
                return True
            except AttemptEnded:
                self._ended = True
            except ServiceUnavailable as error:
                self._ended |= self._service.token_unknown_for > TOKEN_UNKNOWN_SECONDS
                if (remaining := ends - time.monotonic()) <= 0:
                    return False
                if isinstance(error, RateLimited):  # it takes a little every second: longer pauses would waste them
                    pause = Pause()
                time.sleep(min(remaining, pause.next(error.wait)))
            except RequestRejected:
                raise
            except OSError:
                return False
        return False

    def _follow(self, attempt: Attempt) -> None:
        """Turn orders into the notice of this attempt, and a signal to this process."""
        known, pause = "", Pause(ORDERS_PAUSE)
        while not self._done.is_set():
            try:
                orders = self._service.orders(known, min(POLL_SECONDS, self._heartbeat))
            except AttemptEnded:
                self._ended = True
                self._notify({"kill": True})
                return
            except (ServiceUnavailable, RequestRejected) as error:
                self._done.wait(pause.next(getattr(error, "wait", 0.0)))
                continue
            pause = Pause(ORDERS_PAUSE)
            if orders.get("known") != known:
                known = str(orders.get("known"))
                notice = {"kill": True} if orders.get("stop") else orders.get("notice")
                self._failed = _failed(orders.get("failed")) or self._failed
                if isinstance(notice, dict):
                    self._notify(notice)

    def _end_unheard(self, attempt: Attempt) -> None:
        """Preempt the job once the service is silent, so early that it can save and end before it counts as lost."""
        while not self._done.wait(READ_SECONDS):
            silence, after = self._service.silence, self._lost_after
            last = after - min(END_BEFORE_LOST, after / 4)
            first = max(after / 2, last - float(attempt.order.get("grace", 0)))
            if silence >= first:
                self._unheard, at = True, time.time()
                reason = f"the service was not reached for {duration(silence)}"
                self._notify({"reason": reason, "at": at, "deadline": at + max(0.0, last - silence)})
                return

    def notice(self, attempt: Attempt) -> dict[str, Any]:
        """Return the newest order; an order to end at once stays."""
        return self._notice

    def failed_rank(self) -> tuple[str, int] | None:
        """Return the rank of the gang that failed first after the notice, as the service has it from its launcher."""
        return self._failed

    def _notify(self, notice: dict[str, Any]) -> None:
        if not self._done.is_set():
            self._notice = self._notice if self._notice.get("kill") else notice
            os.kill(os.getpid(), signal.SIGTERM)

    def _send(self, attempt: Attempt) -> None:
        """Report whenever something changed, and as a heartbeat; send the log as it grows."""
        assert self._log is not None
        last: dict[str, Any] = {}
        due, log_due, steps_due, pause = 0.0, 0.0, 0.0, Pause()
        while not self._done.wait(READ_SECONDS):
            try:
                report, now = self._report(attempt, None), time.monotonic()
                steps = report != last and now >= steps_due
                if steps or without_progress(report) != without_progress(last) or now >= due or self._service.expired:
                    self._send_report(report)
                    last, due = report, now + self._heartbeat
                    steps_due = now + max(STEPS_SECONDS, self._heartbeat / 2)
                if now >= log_due:
                    self._log.send()
                    log_due = now + self._pace
                pause = Pause()
            except AttemptEnded:
                return  # the other thread hears the same, and ends the job
            except RequestRejected:
                last, due = report, time.monotonic() + self._heartbeat
            except OSError as error:
                self._done.wait(pause.next(getattr(error, "wait", 0.0)))

    def _send_report(self, report: dict[str, Any]) -> None:
        receipt = self._service.post("report", report)
        self._heartbeat = time_of(receipt.get("heartbeat")) or self._heartbeat
        self._pace = time_of(receipt.get("pace")) or READ_SECONDS
        self._lost_after = time_of(receipt.get("lost_after")) or self._lost_after

    def _renew(self, attempt: Attempt) -> None:
        """Get a new token by a report; the next try shows whether that went well."""
        with contextlib.suppress(ServiceUnavailable, RequestRejected):
            self._send_report(self._report(attempt, None))

    def _report(self, attempt: Attempt, status: dict[str, Any] | None) -> dict[str, Any]:
        """Return a report that takes nothing back, also where the job has removed its files."""
        report = report_of(attempt, status)
        for key in self._progress:
            self._progress[key] = self._progress[key] if report[key] is None else report[key]
        return {**report, **self._progress}

    def _send_file(
        self, attempt: Attempt, kind: str, name: str, note: Callable[[str], None], stops: float = math.inf
    ) -> None:
        """Send a result or an exception in parts, from where the service knows it; ServiceUnavailable at `stops`."""
        if not os.path.isfile(attempt.path(name)):
            return
        with open_file(attempt.path(name), links=True) as file:
            try:
                at = self._service.append(kind, 0, file.read(PART), False)
                while file.seek(at) == at and (data := file.read(PART)):
                    if time.monotonic() >= stops:
                        raise ServiceUnavailable("the time is up")
                    at = self._service.append(kind, at, data, False)
            except RequestRejected as error:
                message = f"the {kind} was not kept: {error.strerror}"
                note(message)
                if kind == "result":
                    self._refused = message


def _failed(order: object) -> tuple[str, int] | None:
    """Return rank and exit code of the failed worker in an order; None where it has none, as of an older service."""
    if not isinstance(order, dict):
        return None
    worker, code = exact_integer(order.get("worker")), exact_integer(order.get("exit_code"))
    return None if worker is None or code is None else (str(worker), code)


def _order(start: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    """Return the order of a launcher: what the service answered, and what the machine's own environment says."""
    env = {"MAKEWAY_GPUS": f"{start['gpus']:g}", **json.loads(environ.get("MAKEWAY_WORKER_ENV") or "{}")}
    return {
        **start,
        "directory": environ.get("MAKEWAY_JOB_DIR") or os.getcwd(),
        "checkpoints": environ.get("MAKEWAY_CHECKPOINT_DIR"),
        "workers": [{"env": env}],
        "progress": {"step": start["step"], "saved_at": start["saved_at"]} if start["saved_at"] is not None else {},
    }
