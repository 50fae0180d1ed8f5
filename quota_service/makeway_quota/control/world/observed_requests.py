"""Remember what the pods of workloads request, where Kubernetes' admission control made that more than was planned.

Sidecars, the defaults of a LimitRange and the overhead of a runtime class are added when a pod is made. Of a workload
the larger of plan and pod counts, also when it returns to the queue: the next plan has room for what its pod will
request, or gives its GPUs to others. Kept by `World`; read by `EngineView`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ...store.records import Workload

KEPT = 900.0
"""Seconds for which a pod's request counts for its pending workload: what adds to pods may be gone by then."""
MAX_ENDED = 64
"""Entries beyond twice the live workloads, from which on those of ended ones, noted from late pods, are dropped"""


@dataclass(slots=True)
class _Request:
    """CPU in milli-cores and memory in MiB of the largest pod; since when its workload waits again, in Unix seconds."""

    cpu: int
    memory: int
    waits_since: float | None = None


class ObservedRequests:
    """What pods request, by workload. `clock` returns Unix seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._known)

    def note(self, workload: str, cpu: int, memory: int) -> bool:
        """Remember what a pod of a workload requests; return whether that is new. Zeros: it is not known."""
        if not cpu and not memory:
            return False
        known = self._known.get(workload)
        if known is not None and (known.cpu, known.memory) == (cpu, memory):
            return False
        self._known[workload] = _Request(cpu, memory)
        return True

    def forget(self, workload: str) -> None:
        """Forget a workload that has ended."""
        self._known.pop(workload, None)

    def keep(self, live: Collection[str]) -> None:
        """Forget all but live workloads, once most of what is known is about others."""
        if len(self._known) > 2 * len(live) + MAX_ENDED:
            self._known = {id: known for id, known in self._known.items() if id in live}

    def clear(self) -> None:
        """Forget everything, as when profiles may have changed."""
        self._known.clear()

    def of(self, row: Workload) -> Workload:
        """Return a row with the larger of what was planned for each of its workers and what its pods request."""
        known = self._known.get(row.id)
        if known is None:
            return row
        if row.state != "pending":
            known.waits_since = None
        elif known.waits_since is None:
            known.waits_since = self._clock()
        elif self._clock() >= known.waits_since + KEPT:
            self.forget(row.id)
            return row
        cpu, memory = max(row.cpu, known.cpu), max(row.memory, known.memory)
        return row if (cpu, memory) == (row.cpu, row.memory) else row._replace(cpu=cpu, memory=memory)

    def until(self, workload: str) -> float | None:
        """Return when the noted request of a pending workload expires, in Unix seconds; None without one."""
        known = self._known.get(workload)
        return None if known is None or known.waits_since is None else known.waits_since + KEPT
