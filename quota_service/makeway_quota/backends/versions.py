"""Version the nodes and attempts of a backend, so that a caller can ask for the changes since a version.

Works like a watch by resourceVersion: a version that is too old is answered with a full list. Used by the backends that
compute their whole state for each observation; one that is fed by a watch of its own needs none of this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from .base import AttemptStatus, Key, NodeStatus, Observation

K = TypeVar("K")
V = TypeVar("V")

MAX_REMOVALS = 10_000
"""Removals that are remembered; a caller with an older version gets a full list."""


class ChangeTracker(Generic[K, V]):
    """The latest state by key, with the version of each item's last change, and the versions of removals."""

    def __init__(self) -> None:
        self._current: dict[K, V] = {}
        self._changed_in: OrderedDict[K, int] = OrderedDict()
        self._removed_in: OrderedDict[K, int] = OrderedDict()
        self._compacted = 0
        """Removals up to this version are forgotten."""

    def update(self, state: Mapping[K, V], version: int) -> bool:
        """Replace the latest state, and record its differences under `version`; return whether there are any."""
        current = self._current
        other_objects = [(key, value) for key, value in state.items() if current.get(key) is not value]
        changed = [(key, value) for key, value in other_objects if key not in current or current[key] != value]
        complete = len(state) >= len(current) + len(changed)  # every change is an addition, and no key is missing
        removed = [] if complete else [key for key in current if key not in state]
        for key, value in changed:
            current[key] = value
            self._changed_in[key] = version
            self._changed_in.move_to_end(key)
            self._removed_in.pop(key, None)
        for key in removed:
            del current[key], self._changed_in[key]
            self._removed_in[key] = version
            if len(self._removed_in) > MAX_REMOVALS:
                _, self._compacted = self._removed_in.popitem(last=False)
        return bool(changed or removed)

    def since(self, version: int) -> tuple[list[V], list[K]] | None:
        """Return the items that changed after a version and the keys removed since; None if the version is too old."""
        if version < self._compacted:
            return None
        changed = [self._current[key] for key in _newer_than(version, self._changed_in)]
        return changed[::-1], list(_newer_than(version, self._removed_in))


def _newer_than(version: int, versions: OrderedDict[K, int]) -> Iterator[K]:
    """Yield the keys with a later version, newest first; `versions` is in ascending order of its values."""
    for key in reversed(versions):
        if versions[key] <= version:
            return
        yield key


class ObservationTracker:
    """Makes the observations of a backend: nodes and attempts with a common version. Not thread-safe."""

    def __init__(self) -> None:
        self._version = 1
        self._nodes: ChangeTracker[str, NodeStatus] = ChangeTracker()
        self._attempts: ChangeTracker[Key, AttemptStatus] = ChangeTracker()

    def observation(
        self,
        nodes: Mapping[str, NodeStatus],
        attempts: Mapping[Key, AttemptStatus],
        since: int | None,
        *,
        synced: bool = True,
    ) -> Observation:
        """Return the changes after version `since`; everything if it is None or too old, or while not synced."""
        changed = self._nodes.update(nodes, self._version + 1)
        changed |= self._attempts.update(attempts, self._version + 1)
        self._version += changed
        if since is not None and 0 < since <= self._version and synced:
            node_changes, attempt_changes = self._nodes.since(since), self._attempts.since(since)
            if node_changes is not None and attempt_changes is not None:
                (changed_nodes, gone_nodes), (changed_attempts, gone_attempts) = node_changes, attempt_changes
                return Observation(
                    tuple(changed_nodes),
                    tuple(changed_attempts),
                    self._version,
                    whole=False,
                    gone_nodes=tuple(gone_nodes),
                    gone_attempts=tuple(gone_attempts),
                )
        return Observation(tuple(nodes.values()), tuple(attempts.values()), self._version, synced=synced)
