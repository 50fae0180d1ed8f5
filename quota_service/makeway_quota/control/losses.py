"""Judge the losses of attempts by the nodes: which count, when a job ends, and which nodes it avoids.

Called by `reconcile` for each attempt that is lost. A job avoids nodes only while others of its profile's pools could
hold all its workers, if all that runs there left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from ..backends.base import AttemptStatus, NodeStatus
from ..engine.index.devices import UNLIMITED, hosts
from ..engine.request import Need, need_of
from ..engine.snapshot import GPU
from ..policy import Document
from ..store.records import Workload
from .world.engine_view import as_workload, to_avoid
from .world.pool_assignment import PoolAssignment, divide

MAX_LOST_ON = 8
"""Losses of a job whose nodes are remembered."""

Room = Mapping[str, Mapping[str, int]]
"""Pool to node to how many workers of a job it could hold"""


class Losses:
    """Judges losses of attempts by the nodes as they are reported: a loss with its node says nothing about the job."""

    def __init__(self, nodes: Iterable[NodeStatus], max_infra_failures: int, document: Document) -> None:
        self._nodes = tuple(nodes)
        self._max_infra_failures = max_infra_failures
        self._document = document
        self._rooms: dict[tuple[str, Need], Room] = {}

    @cached_property
    def _ready(self) -> frozenset[str]:
        return frozenset(node.name for node in self._nodes if node.ready)

    @cached_property
    def _assignment(self) -> PoolAssignment:
        return divide((node for node in self._nodes if node.ready and not node.cordoned), self._document)

    def all_offered(self, row: Workload) -> bool:
        """Whether all nodes of a job are ready and take new work, so that it can be started on them again."""
        offered = {node.name for node in self._nodes if node.ready and not node.cordoned}
        return all(place.node in offered for place in row.placement)

    def counts(self, row: Workload, status: AttemptStatus) -> bool:
        """Whether a loss counts: not where a node of the job is gone or down, or the backend knows of it."""
        return not status.node_lost and (not self._ready or all(place.node in self._ready for place in row.placement))

    def ends_job(self, row: Workload, lost_on: Sequence[str]) -> bool:
        """Whether a job ends that was lost once more; `lost_on` are the nodes of all its losses.

        After `max_infra_failures` losses it does, unless all were on one node and it fits on others: then it avoids
        that node.
        """
        return row.infra_failures >= self._max_infra_failures and (
            len(set(lost_on)) > 1 or not self._fits(row, lost_on)
        )

    def remembered(self, row: Workload, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes of a job's newest losses; each once if the job would avoid every node that it fits on."""
        lost_on = (*row.lost_on, *nodes)[-MAX_LOST_ON:]
        avoided = to_avoid(lost_on)
        return tuple(dict.fromkeys(lost_on)) if avoided and not self._fits(row, avoided) else lost_on

    def nodes_to_avoid(self, row: Workload, node: str, before: Collection[str]) -> Collection[str]:
        """Return the nodes that a job avoids for a while: `node` and those `before`, else `node` alone, else none.

        So it always fits on some node. Where `node` is not ready those `before`: nothing is placed there anyway.
        """
        if node not in self._ready:
            return before
        for nodes in ({*before, node}, {node}):
            if self._fits(row, {*nodes, *to_avoid(row.lost_on)}):
                return nodes
        return ()

    def _fits(self, row: Workload, avoided: Collection[str]) -> bool:
        """Whether all workers of a job fit into one of its pools without these nodes."""
        need = need_of(as_workload(row._replace(lost_on=()), lambda _: (), None), self._document.profile(row.profile))
        if (key := (row.profile, need)) not in self._rooms:
            self._rooms[key] = self._room(row.profile, need)
        rooms = self._rooms[key].values()
        return any(
            sum(room.values()) - sum(room.get(name, 0) for name in set(avoided)) >= need.min_workers for room in rooms
        )

    def _room(self, name: str, need: Need) -> Room:
        profile = self._document.profile(name)
        pools = profile.pools if profile else ()
        room: dict[str, dict[str, int]] = {}
        for node in self._assignment.nodes:
            suits = (not need.models or node.model in need.models) and (node.sessions or not need.session)
            if suits and (not pools or node.pool in pools):
                devices = [GPU] * len(node.devices)
                held = hosts(need, devices, len(devices), node.cpu or UNLIMITED, node.memory or UNLIMITED)
                room.setdefault(node.pool, {})[node.name] = held
        return room
