"""Number the changes of what a backend shows, so that a caller can get those since a version.

Used by backends that know their whole state; one that is fed by a watch may use its own resource versions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from .base import AttemptStatus, Key, NodeStatus, Observation

K = TypeVar("K")
V = TypeVar("V")

MAX_GONE = 10_000
"""Removals that are remembered; a caller with an older version gets a full list."""


class Versions(Generic[K, V]):
    """The state that was shown last, by key, each with the version in which it changed; and what is gone since."""

    def __init__(self) -> None:
        self.shown: dict[K, V] = {}
        self._changed: OrderedDict[K, int] = OrderedDict()
        self._gone: OrderedDict[K, int] = OrderedDict()
        self._oldest = 0
        """Things that were gone by this version are forgotten."""

    def show(self, now: Mapping[K, V], version: int) -> bool:
        """Take the present state as `version`, where it differs from the last one; return whether it does."""
        known = self.shown
        other = [(key, value) for key, value in now.items() if known.get(key) is not value]
        changed = [(key, value) for key, value in other if key not in known or known[key] != value]
        gone = [key for key in self.shown if key not in now] if len(now) < len(self.shown) + len(changed) else []
        for key, value in changed:
            self.shown[key] = value
            self._changed[key] = version
            self._changed.move_to_end(key)
            self._gone.pop(key, None)
        for key in gone:
            del self.shown[key], self._changed[key]
            self._gone[key] = version
            if len(self._gone) > MAX_GONE:
                _, self._oldest = self._gone.popitem(last=False)
        return bool(changed or gone)

    def since(self, version: int) -> tuple[list[V], list[K]] | None:
        """Return what changed after a version, and what is gone; None where that is not known any more."""
        if version < self._oldest:
            return None
        changed = [self.shown[key] for key in _after(self._changed, version)]
        return changed[::-1], list(_after(self._gone, version))


def _after(stamps: OrderedDict[K, int], version: int) -> Iterator[K]:
    for key in reversed(stamps):
        if stamps[key] <= version:
            return
        yield key


class Changes:
    """The versions of a backend's nodes and attempts together. Not thread-safe."""

    def __init__(self) -> None:
        self._version = 1
        self._nodes: Versions[str, NodeStatus] = Versions()
        self._attempts: Versions[Key, AttemptStatus] = Versions()

    def observation(
        self,
        nodes: Mapping[str, NodeStatus],
        attempts: Mapping[Key, AttemptStatus],
        since: int | None,
        *,
        synced: bool = True,
    ) -> Observation:
        """Return the present state: what changed after the version `since`, or everything."""
        changed = self._nodes.show(nodes, self._version + 1)
        changed |= self._attempts.show(attempts, self._version + 1)
        self._version += changed
        if since is not None and 0 < since <= self._version and synced:
            node_changes, attempt_changes = self._nodes.since(since), self._attempts.since(since)
            if node_changes is not None and attempt_changes is not None:
                (new_nodes, gone_nodes), (new_attempts, gone_attempts) = node_changes, attempt_changes
                return Observation(
                    tuple(new_nodes),
                    tuple(new_attempts),
                    self._version,
                    whole=False,
                    gone_nodes=tuple(gone_nodes),
                    gone_attempts=tuple(gone_attempts),
                )
        return Observation(tuple(nodes.values()), tuple(attempts.values()), self._version, synced=synced)
