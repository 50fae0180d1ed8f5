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

from .base import AttemptSeen, NoticeOrder, Phase
from .jobdir import AttemptFiles
from .processes import Mark, Process, boot_id

PATIENCE = 8.0
"""Seconds after the deadline (or 3 after a kill) that a launcher gets to end its job before it is ended itself."""
KILL_PATIENCE = 3.0
TRIES = 3
"""How often a launcher that never came up is started again."""
FOREVER = 1e11
"""Seconds since the epoch that no clock shows; NaN and infinity are not below it."""
LOST = "its launcher vanished without a report (killed, or out of memory)"
REBOOTED = "the machine was restarted"


class LocalAttempt:
    """The state of one attempt."""

    def __init__(self, header: Mapping[str, Any], files: AttemptFiles) -> None:
        self.workload = str(header["workload"])
        self.number = int(header["attempt"])
        self.owner = str(header.get("owner", ""))
        self.grace = float(header.get("grace", 30.0))
        self.header = dict(header)
        self.files = files
        self.mark = Mark(str(files.job), self.number)
        self.process: Process | None = None
        self.spawning = False
        self.tries = 0
        self.forgotten = False
        self._claim: dict[str, Any] = {}
        self._notice: NoticeOrder | None = None
        self._leave_by: float | None = None
        self._kill_at: float | None = None
        self._stamps: dict[str, tuple[int, int] | None] = {}
        self._seen = AttemptSeen(self.workload, self.number, Phase.STARTING)

    @property
    def seen(self) -> AttemptSeen:
        """The report of this attempt."""
        return self._seen

    @property
    def ended(self) -> bool:
        """True once its end is known and nothing of it is left."""
        return self._seen.phase in (Phase.EXITED, Phase.LOST)

    @property
    def claimed(self) -> bool:
        """True when a launcher took this attempt, now or ever."""
        if not self._claim:
            self._claim = self.files.read_json("launcher.json")
        return bool(self._claim)

    @property
    def wants_launcher(self) -> bool:
        """Whether a launcher has to be started for it."""
        return not (self.ended or self.spawning or self._kill_at is not None or self.claimed)

    def refresh(self, now: float) -> bool:
        """Check it and do what is due; return True when its launcher is gone, so that its end can be concluded."""
        if self.ended or self.spawning or not self.claimed:
            self._cancel_unstarted(now)
            return False
        if self.process is None and not self._adopt():
            return True
        assert self.process is not None
        if not self.process.alive():
            return True
        self._look()
        self._enforce(now)
        return False

    def conclude(self, now: float) -> None:
        """Write down how it ended; only after everything that carried its mark is gone."""
        self._look()
        status = self.files.read_json("status.json")
        if _number(status.get("ended_at")) is not None:
            self._seen = _reported(self._seen, status)
            return
        boot = self._claim.get("boot")
        if boot == boot_id() and self._was_ended_by_us():
            self._seen = replace(
                self._seen, phase=Phase.EXITED, ended_at=now, exit_code=-signal.SIGKILL, killed=True,
                message="did not leave in time and was killed",
            )  # fmt: skip
            return
        message = LOST if boot == boot_id() else REBOOTED
        self._seen = replace(self._seen, phase=Phase.LOST, ended_at=now, message=message)

    def could_not_start(self, why: str, now: float) -> None:
        """Report that no launcher ever came up."""
        message = f"could not start: {why}"
        self._seen = replace(self._seen, phase=Phase.EXITED, ended_at=now, exit_code=127, message=message)

    def notice(self, order: NoticeOrder) -> None:
        """Order it to save and end; a repetition changes nothing, an earlier deadline counts."""
        if self.ended:
            return
        if self._notice is None or order.deadline < self._notice.deadline:
            self._notice = order
            self._leave_by = time.monotonic() + max(0.0, order.deadline - order.at)
            self._seen = replace(self._seen, noticed=True)
        self._deliver()

    def kill(self, now: float) -> None:
        """Stop it now: the launcher kills everything, or is killed with everything itself."""
        if self.ended:
            return
        if self._kill_at is None:
            self._kill_at = now
        self._deliver()

    def _adopt(self) -> bool:
        """Take hold of the launcher by its claim; False when that process is gone."""
        self.process = Process.find(self._claim, self.files.uid, self.mark)
        if self.process is None:
            return False
        earlier = self.files.read_json("notice.json")
        if self._notice is None and earlier and not earlier.get("kill"):
            self._notice = _notice_of(earlier)
            self._leave_by = time.monotonic() + self.grace
            self._seen = replace(self._seen, noticed=self._notice is not None)
        self._deliver()
        return True

    def _deliver(self) -> None:
        """Write the notice for the launcher and signal it, unless it has already followed it."""
        if self.process is None or (self._notice is None and self._kill_at is None):
            return
        said: dict[str, Any] = {"kill": True} if self._kill_at is not None else _words(self._notice)
        if self.files.read_json("notice.json") == said and self.files.stamp("stop.json") is not None:
            return
        try:
            self.files.write_json("notice.json", said)
        except OSError:
            said = {}
        if said or self._kill_at is None:
            self.process.send(signal.SIGTERM)

    def _enforce(self, now: float) -> None:
        late = self._leave_by is not None and time.monotonic() > self._leave_by + PATIENCE
        if self.process is not None and (late or (self._kill_at is not None and now > self._kill_at + KILL_PATIENCE)):
            self.process.send(signal.SIGKILL)

    def _was_ended_by_us(self) -> bool:
        late = self._leave_by is not None and time.monotonic() > self._leave_by
        return self._kill_at is not None or late

    def _cancel_unstarted(self, now: float) -> None:
        if self.ended or self.spawning or self._kill_at is None:
            return
        self._seen = replace(
            self._seen, phase=Phase.EXITED, ended_at=now, exit_code=-signal.SIGKILL, killed=True,
            message="stopped before it started",
        )  # fmt: skip

    def _look(self) -> None:
        """Read what is new: the start, a checkpoint, a requested stop."""
        seen = self._seen
        if seen.started_at is None and self._is_new("running.json"):
            seen = replace(
                seen, phase=Phase.RUNNING, started_at=_number(self.files.read_json("running.json").get("at"))
            )
        if self._is_new("progress.json"):
            progress = self.files.read_json("progress.json")
            seen = replace(seen, step=_whole(progress.get("step")), checkpoint_at=_number(progress.get("saved_at")))
        if seen.phase is Phase.RUNNING and (self._notice is not None or self.files.stamp("stop.json") is not None):
            seen = replace(seen, phase=Phase.STOPPING)
        self._seen = seen

    def _is_new(self, name: str) -> bool:
        stamp = self.files.stamp(name)
        if stamp is None or self._stamps.get(name) == stamp:
            return False
        self._stamps[name] = stamp
        return True


def _reported(seen: AttemptSeen, status: Mapping[str, Any]) -> AttemptSeen:
    """Read a launcher's report; its account could have written anything there, so types are checked."""
    return replace(
        seen,
        phase=Phase.EXITED,
        started_at=_number(status.get("started_at")),
        ended_at=_number(status.get("ended_at")),
        exit_code=_whole(status.get("exit_code")),
        killed=status.get("killed") is True,
        acknowledged=status.get("acknowledged") is True,
        noticed=seen.noticed or status.get("noticed") is True,
        completed=status.get("completed") is True,
        timed_out=status.get("timed_out") is True,
        step=_whole(status.get("step")),
        checkpoint_at=_number(status.get("checkpoint_at")),
        message=str(status.get("message") or "")[:2000],
    )


def _words(notice: NoticeOrder | None) -> dict[str, Any]:
    assert notice is not None
    return {
        "reason": notice.reason,
        "by_team": notice.by_team,
        "by_owner": notice.by_owner,
        "by_workload": notice.by_workload,
        "at": notice.at,
        "deadline": notice.deadline,
        "preempt_test": notice.preempt_test,
    }


def _notice_of(words: Mapping[str, Any]) -> NoticeOrder | None:
    deadline, at = _number(words.get("deadline")), _number(words.get("at"))
    if deadline is None:
        return None
    by = {
        key: str(words[key]) if words.get(key) is not None else None for key in ("by_team", "by_owner", "by_workload")
    }
    preempt_test = words.get("preempt_test") is True
    return NoticeOrder(
        reason=str(words.get("reason", "")), **by, at=at or deadline, deadline=deadline, preempt_test=preempt_test
    )


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < FOREVER else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
