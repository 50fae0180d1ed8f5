"""Keep what the backend reports, from observation to observation: nodes and attempts by name.

`World` merges each observation here. Attempts that changed stay in `changed` until a cycle has gone through with them,
so that the next cycle handles what a failed one did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from ...backends.base import AttemptSeen, Key, NodeSeen, Seen
from ..backend_states import BackendStates

K = TypeVar("K")
V = TypeVar("V")


class NodeChanges(NamedTuple):
    """The nodes that are new or not what they were, and the names of those that are gone."""

    changed: tuple[NodeSeen, ...]
    gone: tuple[str, ...]
    returned: tuple[str, ...] = ()
    """those that may take work now, or more of it, and did not before"""


class Observed:
    """The nodes and attempts as they were reported last."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeSeen] = {}
        self.attempts: dict[Key, AttemptSeen] = {}
        self.synced = False
        self.problem = ""
        """why what was reported last may be out of date"""
        self.backends = BackendStates()
        self.version: int | None = None
        """The version of the last observation; None before the first."""
        self.changed: set[Key] = set()
        """Attempts that changed or are gone, and that no cycle has gone through with yet."""

    def take(self, seen: Seen) -> NodeChanges:
        """Merge an observation; return what it changes of the nodes.

        Absence from a full list means that something is gone only once the backend is synced.
        """
        gone_nodes, gone_attempts = set(seen.gone_nodes), set(seen.gone_attempts)
        if seen.whole and seen.synced:
            gone_nodes |= self.nodes.keys() - {node.name for node in seen.nodes}
            gone_attempts |= self.attempts.keys() - {attempt.key for attempt in seen.attempts}
        self.synced |= seen.synced
        self.problem, self.backends = seen.problem, BackendStates(seen.backends)
        self._take_attempts(seen.attempts, gone_attempts)
        changed = tuple(node for node in seen.nodes if _differs(self.nodes, node.name, node))
        left = tuple(name for name in sorted(gone_nodes) if self.nodes.pop(name, None) is not None)
        returned = tuple(node.name for node in changed if self.version is not None and self._returns(node))
        for node in changed:
            self.nodes[node.name] = node
        self.version = seen.version
        return NodeChanges(changed, left, returned)

    def absence_counts(self, backend: str) -> bool:
        """Whether an attempt of a backend ("": of the only one, or not known) that is not reported is not there."""
        return self.backends.absence_counts(backend) if self.backends else self.synced

    def _returns(self, node: NodeSeen) -> bool:
        """Whether a node may take work, or has more devices, and had not at the last observation."""
        before = self.nodes.get(node.name)
        if not node.ready or node.cordoned:
            return False
        return before is None or not before.ready or before.cordoned or _many_open(before) < _many_open(node)

    def _take_attempts(self, attempts: Iterable[AttemptSeen], gone: Iterable[Key]) -> None:
        for attempt in attempts:
            if _differs(self.attempts, attempt.key, attempt):
                self.attempts[attempt.key] = attempt
                self.changed.add(attempt.key)
        for key in gone:
            if self.attempts.pop(key, None) is not None:
                self.changed.add(key)


def _many_open(node: NodeSeen) -> int:
    """Return how many devices of a node take work of their pool, were it not cordoned as a whole."""
    return sum(len(each.devices) for each in node.by_pool() if node.cordoned or not each.cordoned)


def _differs(known: Mapping[K, V], key: K, value: V) -> bool:
    before = known.get(key)
    return before is not value and before != value
