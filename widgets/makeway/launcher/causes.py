"""Write in words why a command could not start, and how it ended."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .durations import duration

SAVED_AND_LEFT = 75
"""The exit code of a job that saved because of a notice, and ended."""
UNANSWERED = {
    "": ", as it had not asked for the notice with makeway.checkpoint",
    "unheard": ", as it had not called checkpoint.requested() since",
}
"""Why the signal of a notice ended a job, by its reaction"""


MAX_RANKS = 8
"""Ranks that a message names"""
RANK_STATES = {
    "ended": "had ended without an acknowledgement",
    "unheard": "did not call checkpoint.requested() in that time",
    "heard": "had seen the notice",
}
"""How far a rank was with the notice when it was killed, in words; one that had saved is not named"""
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Missing)(?:: |$)")
LOST_CONNECTION = re.compile(
    r"connection closed by (?:remote )?peer|remote process exit|collective operation timeout|monitoredBarrier"
    r"|(?:gloo|nccl|pair\.cc|c10d|TCPStore|Dist(?:Backend|Network|Store)Error)"
    r".*(?:closed|reset|refused|aborted|broken pipe|got 0 bytes|remote|timed out|timeout)",
    re.I,
)
"""What libraries of collectives say where another rank is gone; a download that fails says other words"""
ROOT_CAUSE = re.compile(r"^Root Cause.*?^\s+rank\s*: (\d+) .*?^\s+exitcode\s*: (-?\d+)", re.MULTILINE | re.DOTALL)
"""What torchrun writes of the rank that failed first"""


def last_words(lines: list[str], rank: str = "", signalled: int = 0) -> str:
    """Return the line of an output that tells why the job failed: with ranks, that of the one which failed first.

    `rank`: that of the worker which failed first, where the lines of each worker begin with `[RANK] `. `signalled`: its
    exit code where a signal killed it and the attempt has the code of another worker.
    """
    if rank:
        lines = [line.partition("] ")[2] for line in lines if line.startswith(f"[{rank}] ")]
    if match := ROOT_CAUSE.search("\n".join(lines)):
        rank, own = match[1], [line for line in lines if line.startswith(f"[rank{match[1]}]: ")]
        return f"rank {rank}: {_reason(own) or end_of(int(match[2]))}"
    if rank:
        reason = end_of(signalled) if signalled else _reason(lines)
        return f"rank {rank}: {reason}" if reason else f"rank {rank}"
    return lines[-1].strip()[:500] if lines else ""


def _reason(lines: list[str]) -> str:
    """Return the last line that is an exception's, else the last one."""
    plain = [re.sub(r"^\[rank\d+\]: ", "", line).strip()[:500] for line in lines]
    return next((line for line in reversed(plain) if EXCEPTION.match(line)), plain[-1] if plain else "")


def reason_of(error: OSError) -> str:
    """Return why a program or a file could not be used."""
    name = f"{error.filename!r}" if error.filename else ""
    known: dict[int | None, tuple[str, str]] = {
        errno.ENOENT: ("no such file or program", ""),
        errno.EACCES: ("not allowed to run or open", ""),
        errno.ENOEXEC: ("not a program", " (a script needs a first line like #!/bin/sh)"),
        errno.ENOSPC: ("the disk is full", ""),
    }
    what, hint = known.get(error.errno, ((error.strerror or str(error)).lower(), ""))
    return " ".join(filter(None, [what, name])) + hint


def end_of(code: int) -> str:
    """Return an exit code, negative for a signal, in words."""
    if code >= 0:
        return f"exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    try:
        return f"killed by {signal.Signals(-code).name}{hint}"
    except ValueError:  # as real-time signals
        return f"killed by signal {-code}"


@dataclass(frozen=True)
class Ending:
    """How a command ended, with what its owner has to know about it; durations in seconds."""

    code: int
    saved_step: int | None = None
    """of the newest checkpoint"""
    last_line: str = ""
    """of its output"""
    reaction: str = ""
    """to the notice, as in `NoticeDelivery.state`"""
    seconds: float = 0.0
    """from the notice to its deadline"""
    killed: bool = False
    saving: float | None = None
    """for how long it had been saving when it was killed; None if it was not"""
    lingered: float = 0.0
    """how long it ran on after it had acknowledged the notice, where it was ended for that"""
    signal: int = 0
    """the signal of the notice, where that ended it"""
    slow_save: str = ""
    """that its saves take long for its grace"""
    waited_for: str = ""
    """the rank elsewhere that failed, where it was ended as it waited for that rank in vain"""
    exited: Sequence[str] = ()
    """the ranks that had exited, and not of an exception"""
    ranks: Mapping[str, str] = field(default_factory=dict)
    """how far each rank was with the notice when it was killed, as in `NoticeDelivery.ranks`; empty where it is one"""

    @property
    def saved(self) -> str:
        """Return what is saved; "" if nothing is."""
        return "" if self.saved_step is None else f"saved at step {self.saved_step}"

    @property
    def why(self) -> str:
        """Return the line that tells why it failed; where a rank lost its connection, first which others had exited."""
        gone = {rank for rank in self.exited if not self.last_line.startswith(f"rank {rank}: ")}
        if not gone or not LOST_CONNECTION.search(self.last_line):
            return self.last_line
        return f"{_names(gone)} had exited while others waited; {self.last_line}"

    @property
    def kill(self) -> str:
        """Return that it was killed at the deadline, and how far it was with the notice."""
        text = f"did not end within {duration(self.seconds)} and was killed"
        how = {
            "heard": " after it had seen the notice",
            "unheard": ": it did not call checkpoint.requested() in that time",
        }
        if self.saving is not None:
            text = f"{text} {duration(self.saving)} into a save"
        if about := _joined(*(_of_ranks(self.ranks, state) for state in RANK_STATES), by=", "):
            return f"{text}: {about}"
        return text if self.saving is not None else text + how.get(self.reaction, "")

    def unasked(self) -> str:
        """Return how it ended without a notice."""
        if self.code == 0:
            return self.saved
        if self.code == SAVED_AND_LEFT:
            return _joined("exit code 75 (saved, and made way) without a notice", self.saved)
        return _joined(end_of(self.code), self.why, by=": ")

    def after_time_limit(self, reason: str) -> str:
        """Return how it ended because of its time limit."""
        return _joined(reason, "killed" if self.killed else "", self.saved)

    def after_notice(self, acknowledged: bool) -> str:
        """Return how it ended after a notice."""
        if self.killed:
            if self.code == 0:
                return f"finished with its result; its process {self.kill}"
            return _joined(self.kill, self.saved or "no checkpoint", self.slow_save)
        if self.waited_for:
            text = f"ended, as it waited for another rank in vain: {self.waited_for}"
            return _joined(text, self.saved or "no checkpoint")
        if self.lingered:
            rest = f"its process had not ended {duration(self.lingered)} later, and was ended"
            return _joined(self.saved or "acknowledged the notice", rest)
        if self.code in (0, SAVED_AND_LEFT) or acknowledged:
            return _joined(self.saved, self.slow_save)
        if self.signal:
            text = f"ended by the notice's {signal.Signals(self.signal).name}{UNANSWERED.get(self.reaction, '')}"
        else:
            text = _joined(f"{end_of(self.code)} after the notice", self.why, by=": ")
        return _joined(text, self.saved or "no checkpoint")


def _of_ranks(ranks: Mapping[str, str], state: str) -> str:
    """Return the ranks in one state, with that state in words; "" if none is."""
    in_state = [rank for rank, own in ranks.items() if own == state]
    return f"{_names(in_state)} {RANK_STATES[state]}" if in_state else ""


def _names(ranks: Iterable[str]) -> str:
    """Return ranks in words, such as "ranks 1, 2 and 3"; not all where they are many."""
    ordered = sorted(ranks, key=lambda rank: (len(rank), rank))
    shown = [*ordered[:MAX_RANKS], f"{len(ordered) - MAX_RANKS} more"] if len(ordered) > MAX_RANKS else ordered
    names = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
    return f"rank{'s' if len(ordered) > 1 else ''} {names}"


def slow_save(seconds: float | None, grace: float) -> str:
    """Return that a save took more than half of the grace; "" if it did not."""
    if seconds is None or grace <= 0 or seconds <= grace / 2:
        return ""
    part = "longer than" if seconds > grace else "more than half of"
    return f"its last save took {duration(seconds)}, {part} the grace of {duration(grace)}"


def _joined(*parts: str, by: str = "; ") -> str:
    return by.join(filter(None, parts))
