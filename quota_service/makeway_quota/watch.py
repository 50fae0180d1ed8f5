"""The world as it is now: what the machines showed last, what the books say, and the policy in force.

The loop keeps it; the desk reads it. `snapshot` is the only place where books and machines become what the engine sees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from .backends.base import Seen
from .engine.state import ADMITTED, PRIORITIES, Snapshot
from .engine.state import Workload as EngineWorkload
from .machines import Machines, divide, sizes
from .policy import Document
from .store.records import Workload
from .store.store import Store

NOTHING = Seen((), ())


class Watch:
    """The last observation, the active rows (read again only after a commit) and the document."""

    def __init__(self, store: Store, document: Document, policy_version: int) -> None:
        self._store = store
        self.document = document
        self.policy_version = policy_version
        self.seen = NOTHING
        self._raw = NOTHING
        self._machines = Machines()
        self._divided = (self._raw.nodes, document)
        self.failure: str | None = None
        self._seen_at: float | None = None
        self._commits = 0
        self._rows: dict[str, Workload] = {}
        self._rows_at = -1
        self._reading = asyncio.Lock()
        store.on_commit(self._committed)

    def _committed(self) -> None:
        self._commits += 1

    def see(self, seen: Seen) -> None:
        """Take a new observation."""
        self._raw = seen
        self._seen_at = time.monotonic()
        self._divide()

    def use(self, document: Document, version: int) -> None:
        """Take a new policy document."""
        self.document = document
        self.policy_version = version
        self._divide()

    def _divide(self) -> None:
        """Put the machines into the pools of the document in force, if either is new."""
        nodes, document = self._divided
        if self._raw.nodes is not nodes or self.document is not document:
            self._divided = (self._raw.nodes, self.document)
            self._machines = divide(self._raw.nodes, self.document)
        self.seen = replace(self._raw, nodes=self._machines.nodes)

    def age(self) -> float | None:
        """Seconds since the last observation; None before the first."""
        return None if self._seen_at is None else time.monotonic() - self._seen_at

    @property
    def virtual(self) -> bool:
        """True where the GPUs are virtual."""
        return any(node.virtual for node in self.seen.nodes)

    async def rows(self) -> dict[str, Workload]:
        """Every workload that has not ended, by id; do not change it."""
        async with self._reading:
            mark = self._commits
            if mark != self._rows_at:
                self._rows = {row.id: row for row in await asyncio.to_thread(self._store.active)}
                self._rows_at = mark
            return self._rows

    def snapshot(self, rows: Mapping[str, Workload], now: float, document: Document | None = None) -> Snapshot:
        """Show the engine the world; `document` other than the one in force asks what if."""
        doc = document or self.document
        machines = self._machines if document is None else divide(self._raw.nodes, document)
        return Snapshot(
            now=now,
            settings=doc.settings,
            pools=doc.pools,
            nodes=machines.as_nodes(rows.values()),
            profiles=doc.profiles,
            policies=doc.policies,
            workloads=tuple(_workload(row, machines, doc) for row in rows.values() if row.team is not None),
        )

    def sizes(self, document: Document) -> dict[str, int]:
        """GPUs (whole devices) of every pool, were this document in force."""
        return sizes(self._raw.nodes, document)


def _workload(row: Workload, machines: Machines, document: Document) -> EngineWorkload:
    """Show one row to the engine."""
    pools: tuple[str, ...] = ()
    if machines.divided and (profile := document.profile(row.profile)) is not None:
        pools = profile.pools
    return EngineWorkload(
        id=row.id,
        policy=row.team or "",
        profile=row.profile,
        owner=row.owner,
        kind=row.kind,
        priority=PRIORITIES[row.priority],
        preemptible=row.preemptible,
        submitted_at=row.submitted_at,
        state=row.state,
        started_at=row.started_at if row.state in ADMITTED else None,
        placement=machines.placement(row.placement, pools),
        attempt=max(1, row.attempt),
        last_checkpoint_at=row.checkpoint_at,
        promised_to=row.promised_to,
        deadline=row.notice.deadline if row.notice else None,
        claim=machines.placement(row.claim, pools),
        failed_node=row.failed_node,
        gpus=row.gpus,
        workers=row.workers,
        min_workers=row.min_workers,
        cpu=row.cpu,
        memory=row.memory,
        time_limit=row.time_limit,
    )
