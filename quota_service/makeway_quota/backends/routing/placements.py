"""Keep on which backend attempts that have ended were placed: those that were asked for last."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from ..base import Key

MAX_WORKLOADS = 1000
"""Workloads that are kept; the one that was read first goes first"""


async def _nothing(workload: str) -> Mapping[int, str]:
    return {}


class EndedPlacements:
    """The backends of ended attempts, which do not change any more, by workload."""

    def __init__(self) -> None:
        self.read: Callable[[str], Awaitable[Mapping[int, str]]] = _nothing
        """returns the backends of the ended attempts of a workload by number; "" where there was one only"""
        self._kept: dict[str, Mapping[int, str]] = {}

    async def backend_of(self, key: Key) -> str:
        """Return the backend that an attempt was placed on; "" where that is not known, or it has not ended."""
        workload, attempt = key
        if attempt not in self._kept.get(workload, ()):
            placed = await self.read(workload)
            self._kept.pop(workload, None)
            if placed:
                self._kept[workload] = placed
            while len(self._kept) > MAX_WORKLOADS:
                del self._kept[next(iter(self._kept))]
        return self._kept.get(workload, {}).get(attempt, "")
