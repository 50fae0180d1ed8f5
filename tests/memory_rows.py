"""Rows in memory, for a world without a database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from makeway_quota.store.records import PastRun, Workload


class Rows:
    """A store in memory, as far as a world reads it."""

    def __init__(self, past: Sequence[PastRun] = ()) -> None:
        self.found: dict[str, Workload] = {}
        self.damaged: dict[str, Sequence[str]] = {}
        self.past = list(past)
        self.listeners: list[Callable[[Sequence[Workload]], object]] = []

    def on_change(self, call: Callable[[Sequence[Workload]], object], last: bool = False) -> None:
        """Call back in the order of registration; a world registers the `last` ones last."""
        self.listeners.append(call)

    def put(self, *rows: Workload) -> None:
        """Commit rows."""
        for row in rows:
            self.found[row.id] = row
            if not row.live:
                del self.found[row.id]
        for call in self.listeners:
            call(rows)

    def active(self) -> list[Workload]:
        return list(self.found.values())

    def past_runs(self) -> list[PastRun]:
        return list(self.past)

    def histories(self) -> tuple[Mapping[str, float], float]:
        return {}, 0.0
