"""Rows in memory, for a world without a database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from makeway_quota.store.records import Workload


class Rows:
    """A store in memory, as far as a world reads it."""

    def __init__(self) -> None:
        self.found: dict[str, Workload] = {}
        self.damaged: dict[str, Sequence[str]] = {}
        self.listeners: list[Callable[[Sequence[Workload]], object]] = []

    def on_change(self, call: Callable[[Sequence[Workload]], object], last: bool = False) -> None:
        self.listeners.append(call)

    def put(self, row: Workload) -> None:
        """Commit a row."""
        self.found[row.id] = row
        for call in self.listeners:
            call((row,))

    def active(self) -> list[Workload]:
        return list(self.found.values())

    def past_runs(self) -> list[object]:
        return []

    def histories(self) -> tuple[Mapping[str, float], float]:
        return {}, 0.0
