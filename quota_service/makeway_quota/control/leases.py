"""Whose notebooks are still there: leases end unless they are renewed, and the Hub has the last word.

A lease is timed on the monotonic clock from its last renewal, so that a clock that jumps takes nobody's GPU away.
Before one ends the Hub is asked: an active server keeps it; where the Hub cannot be reached only a notebook that
never started loses it, because a GPU must never be given out twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from ..store.records import Change, Workload
from .hub_client import HubApi, HubUnreachable
from .reconcile import ChangeSet, decide

log = logging.getLogger("makeway.leases")

SESSION_LIVE = ("pending", "starting", "running", "checkpointing")


class Leases:
    """The renewals that were seen since this process started; every lease begins fresh with it."""

    def __init__(self, seconds: float, hub: HubApi | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._hub = hub
        self._clock = clock
        self._renewed: dict[str, float] = {}

    def renew(self, id: str) -> None:
        """Count a lease as renewed now."""
        self._renewed[id] = self._clock()

    def expired(self, rows: Iterable[Workload]) -> list[Workload]:
        """Tell the sessions that nobody renewed in time; those seen for the first time count as renewed."""
        now = self._clock()
        live = {row.id: row for row in rows if row.kind == "session"}
        self._renewed = {id: at for id, at in self._renewed.items() if id in live}
        late = []
        for id, row in live.items():
            if now - self._renewed.setdefault(id, now) > self.seconds:
                late.append(row)
        return late

    async def reconcile(self, rows: Iterable[Workload], now: float) -> ChangeSet:
        """End the leases of servers that are gone; a Hub that knows better keeps them."""
        change_set = ChangeSet()
        late = self.expired(rows)
        if not late:
            return change_set
        active = await self._active()
        for row in late:
            there = (row.owner, row.server) in active if active is not None else row.server_started
            if there:
                self.renew(row.id)
                continue
            known = "the Hub has no such server" if active is not None else "the Hub cannot be reached"
            message = (
                f"The lease of {row.owner}'s session was not renewed for {self.seconds:g} s and {known}: "
                f"its GPUs are free again."
            )
            change_set.add(
                end_session(row, now, "lease_expired", message), decide(row, "expire", "lease_expired", message)
            )
        return change_set

    async def _active(self) -> set[tuple[str, str]] | None:
        if self._hub is None:
            return None
        try:
            return await self._hub.active_servers()
        except HubUnreachable as error:
            log.warning("Leases cannot be checked with the Hub: %s", error)
            return None


def end_session(row: Workload, now: float, code: str, message: str) -> Change:
    """Free a session's GPUs for good."""
    fields: dict[str, object] = {
        "state": "stopped" if row.attempt else "cancelled",
        "ended_at": now,
        "placement": (),
        "nomination": (),
        "notice": None,
        "evicted_for": None,
        "reason_code": code,
        "reason_message": message,
        "reason_numbers": {},
        "message": message,
        "over_quota": False,
        "borrowed_from": (),
        "ran": row.ran + (max(0.0, now - row.started_at) if row.placement and row.started_at is not None else 0.0),
    }
    close = {"ended_at": now, "outcome": "succeeded" if code == "released" else "preempted" if row.notice else "lost"}
    return Change(row.id, fields, expect_states=SESSION_LIVE, close_attempt=close)
