"""Read the commands of attempts that are about to start, some at a time: no row in memory has its command.

`actuate` uses it. A command may be large, so that those of a whole plan are never in memory at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..store.records import Workload
from ..store.store import Store


class Commands:
    """The commands and environments of some rows, read when the first one of a group is needed, each given out once."""

    def __init__(self, store: Store, rows: Sequence[Workload], at_once: int = 1) -> None:
        self._store = store
        self._groups = [rows[begin : begin + at_once] for begin in range(0, len(rows), at_once)]
        self._group_of = {row.id: number for number, group in enumerate(self._groups) for row in group}
        self._reading: dict[int, asyncio.Task[dict[str, Workload]]] = {}

    async def whole(self, row: Workload) -> Workload:
        """Return a row with its command and environment; a row that the store does not have comes back as it is."""
        number = self._group_of[row.id]
        if number not in self._reading:
            self._reading[number] = asyncio.create_task(self._read([each.id for each in self._groups[number]]))
        found = (await asyncio.shield(self._reading[number])).pop(row.id, row)
        return row._replace(command=found.command, env=found.env)

    async def _read(self, ids: Sequence[str]) -> dict[str, Workload]:
        return await asyncio.to_thread(self._store.whole_workloads, ids)
