"""End leases that are no longer renewed, unless the Hub says that the notebook server is active.

A lease is timed on the monotonic clock from its last renewal, so that a clock that jumps takes no session's GPUs away.
Before one ends the Hub is asked: an active server keeps it; where the Hub cannot be reached only a notebook that
never started loses it, because a GPU must never be given out twice.

The leader ends leases. A renewal that reaches another replica is written to the database (`unwritten`), where the
leader sees that the time of the lease has changed (`written`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from ...quarantine import Quarantine
from ...store.records import Workload
from ...wording import outcomes
from .. import transitions
from ..change_set import ChangeSet
from .servers import HubServers

STEP, TIMING = "looking after its lease", "timing its lease"


class Leases:
    """The renewals that this process saw; at its start, and at the start of a term, every lease counts as renewed."""

    def __init__(
        self, seconds: float, servers: HubServers | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self.seconds = seconds
        self._servers = servers
        self._clock = clock
        self._renewed: dict[str, float] = {}
        self._unwritten: set[str] = set()
        self._written: dict[str, float | None] = {}

    def renew(self, id: str) -> None:
        """Count a lease as renewed now."""
        self._renewed[id] = self._clock()
        self._unwritten.add(id)

    def restart(self) -> None:
        """Count every lease as renewed now: a new leader knows nothing of the renewals before its term."""
        self._renewed.clear()
        self._written.clear()

    def unwritten(self) -> set[str]:
        """Return the leases that were renewed here since the last call; only a follower calls it.

        A follower drops what was not renewed for the length of a lease; `restart` resets every lease in any case.
        """
        renewed, self._unwritten = self._unwritten, set()
        kept_since = self._clock() - self.seconds
        self._renewed = {id: at for id, at in self._renewed.items() if at >= kept_since}
        return renewed

    def written(self, times: Mapping[str, float | None]) -> None:
        """Count as renewed now the leases whose time in the database has changed since it was read last.

        The times are compared with each other only, never with a clock.
        """
        for id, at in times.items():
            if id in self._written and self._written[id] != at:
                self._renewed[id] = self._clock()
        self._written = dict(times)

    def reconcile(self, rows: Iterable[Workload], now: float) -> ChangeSet:
        """Return the ends of the leases whose servers are gone; the Hub confirms some of them first."""
        change_set = ChangeSet()
        expired = self._expired(rows)
        if self._servers is not None:
            self._servers.keep({(row.owner, row.server) for row, _ in expired})
        for row, since in expired:
            if self.quarantine.is_backing_off(STEP, "workload", row.id):
                continue
            with self.quarantine.guard(STEP, "workload", row.id):
                self._end(change_set, row, since, now)
        return change_set

    def _end(self, change_set: ChangeSet, row: Workload, since: float, now: float) -> None:
        """End one lease whose server is gone."""
        state = "unreachable" if self._servers is None else self._servers.state((row.owner, row.server), since)
        if state == "unknown":
            return
        if state == "active" or (state == "unreachable" and row.server_started):
            self._renewed[row.id] = self._clock()
            return
        message = outcomes.lease_expired(row.owner, self.seconds, state == "gone", row.size)
        change_set.add(*transitions.release(row, "expire", "lease_expired", message, now))

    def _expired(self, rows: Iterable[Workload]) -> list[tuple[Workload, float]]:
        """Return the sessions whose lease has expired, each with the moment when it did.

        A session that is seen for the first time counts as renewed.
        """
        now = self._clock()
        self._unwritten.clear()  # the leader has them already
        live = {row.id: row for row in rows if row.kind == "session"}
        self._renewed = {id: at for id, at in self._renewed.items() if id in live}
        expired = []
        for id, row in live.items():
            with self.quarantine.guard(TIMING, "workload", id):
                ends = self._renewed.setdefault(id, now) + self.seconds
                if now > ends:
                    expired.append((row, ends))
        return expired
