"""Deliver a notice to the workers of an attempt: by the stop file, and by a signal only where nothing reads that file.

A signal to a whole process group also reaches the processes that load data, which end of it while the save still needs
them. So workers that listen (`listeners.py`) get the file alone. Called by `run.py`, which writes the file.
"""

from __future__ import annotations

import contextlib
import os
import time

from .children import Children
from .files import number, read_json
from .listeners import Listener, Listeners, catches

LINGER_SECONDS = 5.0
"""Seconds for which a job that has acknowledged its notice may still run"""
ENDING_SECONDS = 10.0
"""Seconds for which what started processes that have ended, such as torchrun, may still take to end"""
SAVED_SECONDS = 5.0
"""Seconds after a save within which the process that saved may still acknowledge the notice, and end"""
POLL_SECONDS = 0.5
"""Seconds between two looks for what a noticed job does"""


class NoticeDelivery:
    """The signals of one attempt; times are monotonic.

    Workers that never registered get the signal at once, those whose listening processes have ended since the notice
    soon. Of those that did, the listening processes get it at half the
    grace if they have not seen the notice, and their group at three quarters if none of them has.
    """

    def __init__(self, children: Children, number: int, progress: str) -> None:
        """Send the signal `number`; `progress` is the file in which the job reports that its work is done."""
        self.number = number
        self._progress = progress
        self._children = children
        self._listeners: dict[int, Listeners] = {}
        self._signalled: set[int] = set()
        self._prompted: set[int] = set()
        self._prompt_at = self._group_at = self._ending_until = 0.0
        self._half_at = self._late_at = self._ending_seconds = 0.0
        self._ended_at: dict[int, float] = {}
        """When the processes of each worker that listened were first found ended since the notice"""
        self._acknowledged_since: float | None = None

    def add(self, worker: int, folder: str) -> None:
        """Follow a worker, by its pid, whose processes register in this folder."""
        self._listeners[worker] = Listeners(folder)

    def observe(self) -> None:
        """Remember what listens now: what ends from here on has ended since the notice."""
        for _, listeners in self._running():
            listeners.alive()

    def begin(self, seconds: float, *, written: bool) -> None:
        """Deliver a notice with this time to its deadline; not `written`: it cannot be read, so signals come first."""
        now = time.monotonic()
        self._half_at, self._late_at = now + seconds / 2, now + seconds * 0.75
        self._prompt_at = now + seconds / 2 if written else now
        self._group_at = now + seconds * (0.75 if written else 0.5)
        self._ending_seconds = min(ENDING_SECONDS, seconds / 2)
        self._ending_until = now + self._ending_seconds
        self.deliver()

    def deliver(self) -> None:
        """Send the signals that are due."""
        now = time.monotonic()
        for pid, listeners in self._running():
            if pid in self._signalled:
                continue
            alive = listeners.alive()
            heard = any(one.heard for one in alive) or listeners.acknowledged()
            if not heard and (now >= self._group_at or not (alive or self._is_ending(pid, listeners))):
                self._signalled.add(pid)
                listeners.mark_signalled()
                self._children.signal_group(pid, self.number)
            elif now >= self._prompt_at:
                self._prompt(alive)

    def _is_ending(self, pid: int, listeners: Listeners) -> bool:
        """Whether the rest of a worker can be taken to end soon, as torchrun does, and to say then which rank failed.

        What listened in it has ended since the notice, or before that with its work reported as done.
        """
        now = time.monotonic()
        if listeners.ended_since():
            return now < self._ended_at.setdefault(pid, now) + self._ending_seconds
        self._ended_at.pop(pid, None)
        if now >= self._ending_until or not listeners.heard():
            return False
        return number(read_json(self._progress).get("completed_at")) is not None

    def _prompt(self, alive: list[Listener]) -> None:
        """Send the signal once to listening processes that have not seen the notice, and would not die of it."""
        for one in alive:
            if one.pid and not one.heard and one.pid not in self._prompted and catches(one.pid, self.number):
                self._prompted.add(one.pid)
                with contextlib.suppress(OSError):
                    os.kill(one.pid, self.number)

    @property
    def next_at(self) -> float:
        """When there is something to look at again."""
        now = time.monotonic()
        return min([now + POLL_SECONDS, *(at for at in (self._prompt_at, self._group_at) if at > now)])

    def lingers(self) -> bool:
        """Whether all that listened has acknowledged the notice, and has still not ended LINGER_SECONDS later."""
        running, now = self._running(), time.monotonic()
        if not running or not all(_is_done(listeners) for _, listeners in running):
            self._acknowledged_since = None
            return False
        if self._acknowledged_since is None:
            self._acknowledged_since = now
        return now - self._acknowledged_since >= LINGER_SECONDS

    def wait_in_vain(self, is_saving: bool) -> bool:
        """Whether all workers that are left can be taken to wait for one that has failed, as in a collective.

        They listened, save nothing, have not just saved, and have not polled for half of the time to the deadline;
        those that have may save by means of their own, until three quarters. A worker is left while any process of its
        group is, as where the notice ended its shell alone. `is_saving`: as libraries report it that add no file for a
        save.
        """
        saves = [alive for listeners in self._listeners.values() for alive in listeners.saving()]
        if any(saves) or (is_saving and not saves) or self._has_just_saved():
            return False
        ended = self._children.exit_codes
        remaining = [
            one for pid, one in self._listeners.items() if pid not in ended or self._children.group_is_alive(pid)
        ]
        return bool(remaining) and all(self._is_late(listeners) for listeners in remaining)

    def _has_just_saved(self) -> bool:
        """Whether a worker has saved within SAVED_SECONDS: on a machine under load it takes its time to exit."""
        saved_at = number(read_json(self._progress).get("saved_at"))
        return saved_at is not None and 0 <= time.time() - saved_at < SAVED_SECONDS

    def _is_late(self, listeners: Listeners) -> bool:
        heard = any(one.heard for one in listeners.alive())
        return bool(listeners.heard()) and time.monotonic() >= (self._late_at if heard else self._half_at)

    def has_saved(self, worker: int) -> bool:
        """Whether all that listened in a worker since the notice has acknowledged it; one process at least."""
        listeners = self._listeners[worker]
        return listeners.acknowledged() and not listeners.unsaved()

    def unsaved(self) -> bool:
        """Whether a process of any worker that has listened since the notice has ended without acknowledging it."""
        return any(listeners.unsaved() for listeners in self._listeners.values())

    def exited(self) -> list[str]:
        """Return the ranks that have exited, and not of an exception: of a worker in the order of their exits."""
        return [rank for listeners in self._listeners.values() for rank in listeners.exited()]

    def ranks(self) -> dict[str, str]:
        """Return how far each rank is with the notice, as in `Listeners.ranks`; those that say theirs."""
        return {rank: state for listeners in self._listeners.values() for rank, state in listeners.ranks().items()}

    def state(self) -> str:
        """Return how far the job is with the notice: `unheard`, `heard`, `acknowledged`, or "" if nothing listened."""
        if any(listeners.acknowledged() for listeners in self._listeners.values()):
            return "acknowledged"
        heard = [one for listeners in self._listeners.values() for one in listeners.heard()]
        return ("heard" if any(heard) else "unheard") if heard else ""

    def _running(self) -> list[tuple[int, Listeners]]:
        """Return the workers that have not ended, by pid."""
        return [(pid, listeners) for pid, listeners in self._listeners.items() if pid not in self._children.exit_codes]


def _is_done(listeners: Listeners) -> bool:
    return listeners.acknowledged() and all(one.acknowledged for one in listeners.alive())
