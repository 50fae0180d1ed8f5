"""Follow one attempt on this machine from its order to its report, and do what is due for it.

Called by the local backend from one thread only. Nothing here waits: `refresh` reads the attempt's files and
does what has become due.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...values import Notice, NoticeKind
from ..base import AttemptStatus, Phase
from ..untrusted import UnreadableJson, number, text, whole
from .jobdir import AttemptFiles
from .processes import MAX_PID, MAX_TICKS, Mark, Process, boot_id

LAUNCHER_GRACE = 8.0
"""Seconds after the deadline (or 3 after a kill) that a launcher gets to end its job before it is ended itself."""
KILL_GRACE = 3.0
MAX_TRIES = 3
"""How often a launcher that never came up is started again."""
MAX_EXIT_CODE = 1000
LOST = "its launcher vanished without a report (killed, or out of memory)"
REBOOTED = "the machine was restarted"
ALL_LOST = "all jobs of this machine vanished at once (as by a restart of it)"
DAMAGED = "its order on this machine is damaged"


class LocalAttempt:
    """The state of one attempt.

    Reading may raise OSError while the service itself cannot open files: nothing is concluded from that.
    """

    def __init__(self, header: Mapping[str, Any], files: AttemptFiles, damaged: str = "") -> None:
        """`damaged`: why its order cannot be read; what runs of it goes on, but no launcher can be started."""
        self.workload = str(header["workload"])
        self.number = int(header["attempt"])
        self.owner = str(header.get("owner", ""))
        self.grace = float(header.get("grace", 30.0))
        self.header = dict(header)
        self.files = files
        self.damaged = damaged
        self.problem = ""
        """what cannot be understood of it: it is to be ended"""
        self.held_until: float | None = None
        """monotonic seconds until which a launcher of an earlier process may still claim it"""
        self.mark = Mark(str(files.job), self.number)
        self.process: Process | None = None
        self.spawning = False
        self.tries = 0
        self.end_tries = 0
        """how often what is left of it was killed"""
        self.forgotten = False
        self._claim: dict[str, Any] | None = None
        self._notice: Notice | None = None
        self._leave_by: float | None = None
        self._kill_at: float | None = None
        self._stamps: dict[str, tuple[int, int] | None] = {}
        self._status = AttemptStatus(self.workload, self.number, Phase.STARTING)
        self._progress: object = None

    def new_progress(self) -> object:
        """Return what its process wrote about its progress since the last call: anything, or None."""
        progress, self._progress = self._progress, None
        return progress

    @property
    def status(self) -> AttemptStatus:
        """The report of this attempt."""
        return self._status

    @property
    def ended(self) -> bool:
        """Whether its end is known and nothing of it runs any more."""
        return self._status.phase in (Phase.EXITED, Phase.LOST)

    @property
    def claimed(self) -> bool:
        """Whether a launcher took this attempt, now or ever."""
        if self._claim is None:
            try:
                self._claim = self.files.report("launcher.json")
                if self._claim is not None and not _names_process(self._claim):
                    raise UnreadableJson("it names no process")
            except UnreadableJson as error:
                self._claim = {}
                self.problem = f"its file launcher.json cannot be read: {error}"
        return self._claim is not None

    @property
    def wants_launcher(self) -> bool:
        """Whether a launcher has to be started for it."""
        if self.ended or self.spawning or self._kill_at is not None or self.damaged or self.held_until is not None:
            return False
        return not self.claimed

    def refresh(self, now: float) -> bool:
        """Check it and do what is due; return True when its launcher is gone, so that its end can be concluded."""
        if self.ended or self.spawning:
            return False
        if self.problem:
            return True
        if not self.claimed:
            self._cancel_unstarted(now)
            return bool(self.damaged) and not self.ended
        self.held_until = None
        if self.problem:
            return True
        if self.process is None and not self._adopt():
            return True
        assert self.process is not None
        if not self.process.alive():
            return True
        self._read_files()
        self._enforce()
        return False

    @property
    def vanished(self) -> bool:
        """Whether, with its launcher gone, nothing says how it ended: no report, no restart and no order of ours."""
        return not (self._report() or self.problem or self._rebooted() or self._was_ended_by_us())

    def conclude(self, now: float, *, all_vanished: bool = False) -> None:
        """Write down how it ended; only after everything that carried its mark is gone.

        `all_vanished`: everything that ran on this machine vanished together, which says nothing about this job.
        """
        self._read_files()
        report = self._report()
        if report:
            self._status = _reported(self._status, report)
        elif self._rebooted():
            self._lose(REBOOTED, now, with_machine=True)
        elif self._was_ended_by_us():
            self._status = replace(
                self._status, phase=Phase.EXITED, ended_at=now, exit_code=-signal.SIGKILL, killed=True,
                message="did not leave in time and was killed",
            )  # fmt: skip
        elif self.problem:
            self.end(self.problem, now)
        elif self.damaged:
            self._lose(f"{DAMAGED}: {self.damaged}", now, with_machine=True)
        else:
            self._lose(ALL_LOST if all_vanished else LOST, now, with_machine=all_vanished)

    def end(self, why: str, now: float) -> None:
        """Report an end that nothing more is known of."""
        self._status = replace(self._status, phase=Phase.EXITED, ended_at=now, exit_code=None, message=why)

    def _lose(self, message: str, now: float, *, with_machine: bool) -> None:
        self._status = replace(
            self._status,
            phase=Phase.LOST,
            ended_at=now,
            message=message,
            node_lost=with_machine,
            node_returned=with_machine,
        )

    def _report(self) -> dict[str, Any]:
        """Return the launcher's report of the end, {} without one; one that is unreadable is a problem."""
        try:
            status = self.files.report("status.json")
            if status is not None and number(status.get("ended_at")) is None:
                raise UnreadableJson("it has no time of the end")
        except UnreadableJson as error:
            self.problem = self.problem or f"its report, the file status.json, cannot be read: {error}"
            return {}
        return status or {}

    def _rebooted(self) -> bool:
        """Whether the machine was started anew since its launcher, or (without a claim) its order, was there."""
        boot = (self._claim or {}).get("boot") or self.header.get("boot")
        return isinstance(boot, str) and boot != boot_id()

    def could_not_start(self, why: str, now: float) -> None:
        """Report that no launcher ever came up."""
        message = f"could not start: {why}"
        self._status = replace(self._status, phase=Phase.EXITED, ended_at=now, exit_code=127, message=message)

    def notice(self, order: Notice) -> None:
        """Order it to save and end; a repetition changes nothing, an earlier deadline counts."""
        if self.ended:
            return
        if self._notice is None or order.deadline < self._notice.deadline:
            self._notice = order
            self._leave_by = time.monotonic() + max(0.0, order.deadline - order.at)
            self._status = replace(self._status, notice_received=True)
        self._deliver()

    def kill(self) -> None:
        """Stop it now: the launcher kills everything, or is killed with everything itself."""
        if self.ended:
            return
        if self._kill_at is None:
            self._kill_at = time.monotonic()
        self._deliver()

    def _adopt(self) -> bool:
        """Take hold of the launcher by its claim; False when that process is gone."""
        self.process = Process.find(self._claim or {}, self.files.uid, self.mark)
        if self.process is None:
            return False
        earlier = self.files.read_json("notice.json")
        if self._notice is None and earlier and not earlier.get("kill"):
            self._notice = _notice_of(earlier)
            self._leave_by = time.monotonic() + self.grace
            self._status = replace(self._status, notice_received=self._notice is not None)
        self._deliver()
        return True

    def _deliver(self) -> None:
        """Write the notice for the launcher and signal it, unless it has already followed it."""
        if self.process is None or (self._notice is None and self._kill_at is None):
            return
        content: dict[str, Any] = {"kill": True}
        if self._kill_at is None:
            assert self._notice is not None
            content = self._notice.for_launcher()
        if self.files.read_json("notice.json") == content and self.files.stamp("stop.json") is not None:
            return
        try:
            self.files.write_json("notice.json", content)
        except OSError:
            content = {}
        if content or self._kill_at is None:
            self.process.send(signal.SIGTERM)

    def _enforce(self) -> None:
        at = time.monotonic()
        late = self._leave_by is not None and at > self._leave_by + LAUNCHER_GRACE
        if self.process is not None and (late or (self._kill_at is not None and at > self._kill_at + KILL_GRACE)):
            self.end_tries += 1
            self.process.send(signal.SIGKILL)

    def _was_ended_by_us(self) -> bool:
        late = self._leave_by is not None and time.monotonic() > self._leave_by
        return self._kill_at is not None or late

    def _cancel_unstarted(self, now: float) -> None:
        if self.ended or self.spawning or self._kill_at is None:
            return
        self._status = replace(
            self._status, phase=Phase.EXITED, ended_at=now, exit_code=-signal.SIGKILL, killed=True,
            message="stopped before it started",
        )  # fmt: skip

    def _read_files(self) -> None:
        """Read what is new: the start, a checkpoint, a requested stop."""
        status = self._status
        if status.started_at is None and self._is_new("running.json"):
            status = replace(
                status, phase=Phase.RUNNING, started_at=number(self.files.read_json("running.json").get("at"))
            )
        if self._is_new("progress.json"):
            progress = self.files.read_json("progress.json")
            status = replace(status, step=whole(progress.get("step")), checkpoint_at=number(progress.get("saved_at")))
            self._progress = progress.get("progress")
        if status.phase is Phase.RUNNING and (self._notice is not None or self.files.stamp("stop.json") is not None):
            status = replace(status, phase=Phase.STOPPING)
        self._status = status

    def _is_new(self, name: str) -> bool:
        stamp = self.files.stamp(name)
        if stamp is None or self._stamps.get(name) == stamp:
            return False
        self._stamps[name] = stamp
        return True


def _reported(status: AttemptStatus, report: Mapping[str, Any]) -> AttemptStatus:
    """Read a launcher's report; its account could have written anything there, so types are checked."""
    return replace(
        status,
        phase=Phase.EXITED,
        started_at=number(report.get("started_at")),
        ended_at=number(report.get("ended_at")),
        exit_code=whole(report.get("exit_code"), MAX_EXIT_CODE),
        killed=report.get("killed") is True,
        acknowledged=report.get("acknowledged") is True,
        notice_received=status.notice_received or report.get("noticed") is True,
        completed=report.get("completed") is True,
        timed_out=report.get("timed_out") is True,
        storage_failed=report.get("storage_failed") is True,
        step=whole(report.get("step")),
        checkpoint_at=number(report.get("checkpoint_at")),
        message=text(report.get("message"), 2000),
    )


def _notice_of(words: Mapping[str, Any]) -> Notice | None:
    deadline, at = number(words.get("deadline")), number(words.get("at"))
    if deadline is None:
        return None
    by = {key: text(words.get(key), 300) or None for key in ("by_team", "by_owner", "by_workload")}
    kind: NoticeKind = "preempt_test" if words.get("preempt_test") is True else "evict"
    return Notice(text(words.get("reason"), 2000), at or deadline, deadline, kind, **by)


def _names_process(claim: Mapping[str, Any]) -> bool:
    """Whether a claim has what a launcher writes: a pid, a start time, and the boot that they are of."""
    pid, start_time = whole(claim.get("pid"), MAX_PID), whole(claim.get("start_time"), MAX_TICKS)
    return pid is not None and pid > 1 and start_time is not None and isinstance(claim.get("boot"), str)
