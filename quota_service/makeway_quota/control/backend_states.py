"""Judge which of several backends can be observed, and what an attempt that is not reported means, also in words.

Where there is one backend only, nothing here applies: what it reports is all there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from makeway_api.quantities import listed

from ..backends.base import BackendState
from ..store.records import Workload

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

    def absence_counts(self, backend: str) -> bool:
        """Whether an attempt of this backend ("": not known) that is not reported is really not there."""
        if backend:
            return backend in self._by_name and self._by_name[backend].synced
        return all(state.synced for state in self.states)

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
        found = []
        for state in self.states:
            if state.problem and not state.synced:
                found.append(
                    f"Nodes and jobs of {state.name} are not known, and nothing starts there: {state.problem}."
                )
            elif state.problem:
                found.append(
                    f"Nodes and jobs of {state.name} are shown as they were seen last, and nothing starts there: "
                    f"{state.problem}."
                )
            if names := state.name_conflicts:
                what = listed(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if names[MAX_NAMES:] else "")
                found.append(
                    f"Nodes of {state.name} are not offered, as another backend has nodes of the same names: {what}. "
                    "Rename them on one side."
                )
        removed = Counter(backend_of(row) for row in (rows.values() if self.states else ()))
        return found + [
            f"Jobs of {name}, which is not among the backends of this service (MAKEWAY_BACKEND), are kept as they were "
            f"seen last: {many}."
            for name, many in sorted(removed.items())
            if self.is_removed(name)
        ]

    def unobserved(self) -> list[str]:
        """Return the names of the backends that cannot be observed."""
        return [state.name for state in self.states if state.problem]
