"""The world as it is now: what the machines showed last, what the books say, and the policy in force.

The loop keeps it; the desk reads it. `snapshot` is the only place where books and machines become what the engine sees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence

from .backends.base import NodeSeen, Seen
from .engine.state import ADMITTED, PRIORITIES, Node, Placed, Placement, Snapshot
from .engine.state import Workload as EngineWorkload
from .policy import Document
from .store.records import Place, Workload
from .store.store import Store

NOTHING = Seen((), ())


class Watch:
    """The last observation, the active rows (read again only after a commit) and the document."""

    def __init__(self, store: Store, document: Document, policy_version: int) -> None:
        self._store = store
        self.document = document
        self.policy_version = policy_version
        self.seen = NOTHING
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
        self.seen = seen
        self._seen_at = time.monotonic()

    def use(self, document: Document, version: int) -> None:
        """Take a new policy document."""
        self.document = document
        self.policy_version = version

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
        return Snapshot(
            now=now,
            settings=doc.settings,
            pools=doc.pools,
            nodes=tuple(_node(node) for node in self.seen.nodes),
            profiles=doc.profiles,
            policies=doc.policies,
            workloads=tuple(engine_workload(row) for row in rows.values() if row.team is not None),
        )

    def sizes(self) -> dict[str, int]:
        """GPUs (whole devices) of every pool that has machines now."""
        return sizes_of(self.seen.nodes)


def sizes_of(nodes: Iterable[NodeSeen]) -> dict[str, int]:
    """Count the GPUs (whole devices) of every pool."""
    found: dict[str, int] = {}
    for node in nodes:
        found[node.pool] = found.get(node.pool, 0) + len(node.devices)
    return found


def _node(seen: NodeSeen) -> Node:
    whole = tuple(index for index, milli in seen.foreign.items() if milli >= 1000)
    part = sum(milli for milli in seen.foreign.values() if milli < 1000)
    return Node(
        name=seen.name,
        pool=seen.pool,
        gpus=len(seen.devices),
        cpu=seen.cpu,
        memory=seen.memory,
        ready=seen.ready,
        devices=seen.devices,
        foreign_devices=whole,
        foreign_gpus=part,
    )


def engine_workload(row: Workload) -> EngineWorkload:
    """Show one row to the engine."""
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
        placement=placement(row.placement),
        attempt=max(1, row.attempt),
        last_checkpoint_at=row.checkpoint_at,
        promised_to=row.promised_to,
        deadline=row.notice.deadline if row.notice else None,
        claim=placement(row.claim),
        failed_node=row.failed_node,
        gpus=row.gpus,
        workers=row.workers,
        min_workers=row.min_workers,
        cpu=row.cpu,
        memory=row.memory,
        time_limit=row.time_limit,
    )


def placement(places: Sequence[Place]) -> Placement:
    """Read a placement of the books as the engine writes it, one entry a worker."""
    return tuple(
        Placed(worker, place.node, place.devices, place.milli[0] if place.milli else 0)
        for worker, place in enumerate(places)
    )
