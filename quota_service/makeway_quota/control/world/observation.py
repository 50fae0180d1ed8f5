"""Keep what the backend reports, from observation to observation: nodes and attempts by name.

`World` merges each observation here. Attempts that changed stay in `changed` until a cycle has gone through with them,
so that the next cycle handles what a failed one did not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from makeway_api.quantities import listed

from ...backends.base import AttemptStatus, BackendState, Key, NodeStatus, Observation
from ...store.records import Workload

K = TypeVar("K")
V = TypeVar("V")


MAX_NAMES = 5
"""Nodes that a sentence names"""


def backend_of(row: Workload) -> str:
    """Return the backend that the present attempt of a workload was placed on; "" where there was one only."""
    return row.placement[0].backend if row.placement else ""


class BackendStates:
    """The states of several backends, as of the last observation; false where there is one backend only."""

    def __init__(self, states: Iterable[BackendState] = ()) -> None:
        self.states = tuple(states)
        self._by_name = {state.name: state for state in self.states}

    def __bool__(self) -> bool:
        return bool(self.states)

    def is_removed(self, backend: str) -> bool:
        """Whether a backend is not among those of the service any more."""
        return bool(self.states) and backend != "" and backend not in self._by_name

    def absence_is_certain(self, backend: str) -> bool:
        """Whether an attempt of this backend ("": not known) that is not reported is certainly gone."""
        if backend:
            return backend in self._by_name and _is_complete(self._by_name[backend])
        return all(_is_complete(state) for state in self.states)

    def problem_of(self, backend: str) -> str | None:
        """Return why the attempts of a backend are shown as they were seen last; None where they are observed."""
        if self.is_removed(backend):
            return (
                f"It was started on {backend}, which is not among the backends of this service (MAKEWAY_BACKEND): what "
                "became of it is not known, and it keeps its GPUs. Add the backend again, or cancel it to give it up."
            )
        state = self._by_name.get(backend)
        if state is None or not state.problem:
            return None
        return f"It runs on {backend}, which cannot be observed, so that this is as it was seen last: {state.problem}."

    def sentences(self, rows: Mapping[str, Workload]) -> list[str]:
        """Return what is wrong with backends while others go on; `rows` are all workloads that may hold GPUs."""
        result = []
        for state in self.states:
            if state.problem and not state.synced:
                result.append(
                    f"Nodes and jobs of {state.name} are not known, and nothing starts there: {state.problem}."
                )
            elif state.problem:
                result.append(
                    f"Nodes and jobs of {state.name} are shown as they were seen last, and nothing starts there: "
                    f"{state.problem}."
                )
            if names := state.name_conflicts:
                what = listed(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if names[MAX_NAMES:] else "")
                result.append(
                    f"Nodes of {state.name} are not offered, as another backend has nodes of the same names: {what}. "
                    "Rename them on one side."
                )
        removed = Counter(backend_of(row) for row in (rows.values() if self.states else ()))
        return result + [
            f"Jobs of {name}, which is not among the backends of this service (MAKEWAY_BACKEND), are kept as they were "
            f"seen last: {many}."
            for name, many in sorted(removed.items())
            if self.is_removed(name)
        ]

    def unobserved(self) -> list[str]:
        """Return the names of the backends that cannot be observed."""
        return [state.name for state in self.states if state.problem]


class NodeChanges(NamedTuple):
    """The nodes that are new or not what they were, and the names of those that are gone."""

    changed: tuple[NodeStatus, ...]
    gone: tuple[str, ...]
    returned: tuple[str, ...] = ()
    """those that may take work now, or more of it, and did not before"""


class Observed:
    """The nodes and attempts as they were reported last."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeStatus] = {}
        self.attempts: dict[Key, AttemptStatus] = {}
        self.synced = False
        self.problem = ""
        """why what was reported last may be out of date"""
        self.backends = BackendStates()
        self.version: int | None = None
        """The version of the last observation; None before the first."""
        self.changed: set[Key] = set()
        """Attempts that changed or are gone, and that no cycle has gone through with yet."""

    def merge(self, observation: Observation) -> NodeChanges:
        """Merge an observation; return what it changes of the nodes.

        Absence from a full list means that something is gone only once the backend is synced.
        """
        gone_nodes, gone_attempts = set(observation.gone_nodes), set(observation.gone_attempts)
        if observation.whole and observation.synced:
            gone_nodes |= self.nodes.keys() - {node.name for node in observation.nodes}
            gone_attempts |= self.attempts.keys() - {attempt.key for attempt in observation.attempts}
        self.synced |= observation.synced
        self.problem, self.backends = observation.problem, BackendStates(observation.backends)
        self._merge_attempts(observation.attempts, gone_attempts)
        changed = tuple(node for node in observation.nodes if _differs(self.nodes, node.name, node))
        gone = tuple(name for name in sorted(gone_nodes) if self.nodes.pop(name, None) is not None)
        returned = tuple(node.name for node in changed if self.version is not None and self._can_take_work_again(node))
        for node in changed:
            self.nodes[node.name] = node
        self.version = observation.version
        return NodeChanges(changed, gone, returned)

    def absence_is_certain(self, backend: str) -> bool:
        """Whether an attempt of a backend ("": the only one, or not known) that is not reported is certainly gone."""
        return self.backends.absence_is_certain(backend) if self.backends else self.synced

    def _can_take_work_again(self, node: NodeStatus) -> bool:
        """Whether a node may take work, or has more devices, and did not at the last observation."""
        before = self.nodes.get(node.name)
        if not node.ready or node.cordoned:
            return False
        return (
            before is None
            or not before.ready
            or before.cordoned
            or _count_open_devices(before) < _count_open_devices(node)
        )

    def _merge_attempts(self, attempts: Iterable[AttemptStatus], gone: Iterable[Key]) -> None:
        for attempt in attempts:
            if _differs(self.attempts, attempt.key, attempt):
                self.attempts[attempt.key] = attempt
                self.changed.add(attempt.key)
        for key in gone:
            if self.attempts.pop(key, None) is not None:
                self.changed.add(key)


def _is_complete(state: BackendState) -> bool:
    """Whether the lists of a backend are complete and as it is now."""
    return state.synced and not state.problem


def _count_open_devices(node: NodeStatus) -> int:
    """Return how many devices of a node take work of their pool, were it not cordoned as a whole."""
    return sum(len(part.devices) for part in node.by_pool() if node.cordoned or not part.cordoned)


def _differs(known: Mapping[K, V], key: K, value: V) -> bool:
    before = known.get(key)
    return before is not value and before != value
