"""Which pool every GPU is in, as the policy document says, also where one machine's GPUs are divided among pools.

A backend that does not know pools (this machine's) reports its nodes with pool ""; here each becomes one part for
each pool that the document gives it to. ChangeSet, pages and people know a divided machine by its one name; only the
engine, which puts a node into one pool, sees `NAME/POOL`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..backends.base import NodeSeen
from ..engine.state import Node, Placed, Placement
from ..policy import Document
from ..store.records import Place, Workload


@dataclass(frozen=True)
class PoolAssignment:
    """The nodes by pool. `nodes` holds a divided machine once for each of its pools; `divided` its parts by name."""

    nodes: tuple[NodeSeen, ...] = ()
    divided: Mapping[str, tuple[NodeSeen, ...]] = field(default_factory=dict)

    @cached_property
    def _pools(self) -> dict[str, str]:
        return {seen.name: seen.pool for seen in self.nodes}

    def as_nodes(self, rows: Iterable[Workload]) -> tuple[Node, ...]:
        """Show the engine the nodes; what runs over the border of two pools is a stranger in the second."""
        strays = self._strays(rows) if self.divided else {}
        return tuple(self._node(seen, strays.get((seen.name, seen.pool), ())) for seen in self.nodes)

    def placement(self, places: Sequence[Place], pools: Sequence[str] = ()) -> Placement:
        """Read a placement of the store as the engine writes it, one entry a worker.

        Work without GPUs counts on the part that is in the first of its profile's `pools`.
        """
        return tuple(
            Placed(worker, self._name_for(place, pools), place.devices, place.milli[0] if place.milli else 0)
            for worker, place in enumerate(places)
        )

    def pool_of(self, place: Place, pools: Sequence[str] = ()) -> str | None:
        """Say in which pool a worker counts; None where its node is gone. `pools` as for `placement`."""
        parts = self.divided.get(place.node)
        if parts is not None:
            return _home(parts, place, pools).pool
        return self._pools.get(place.node)

    def _node(self, seen: NodeSeen, strays: tuple[int, ...]) -> Node:
        whole = {index for index, milli in seen.foreign.items() if milli >= 1000}.union(strays)
        part = sum(milli for index, milli in seen.foreign.items() if index not in whole)
        return Node(
            name=f"{seen.name}/{seen.pool}" if seen.name in self.divided else seen.name,
            pool=seen.pool,
            gpus=len(seen.devices),
            cpu=seen.cpu,
            memory=seen.memory,
            ready=seen.ready,
            devices=seen.devices,
            foreign_devices=tuple(sorted(whole)),
            foreign_gpus=part,
        )

    def _name_for(self, place: Place, pools: Sequence[str]) -> str:
        parts = self.divided.get(place.node)
        if parts is None:
            return place.node
        part = _home(parts, place, pools)
        return f"{part.name}/{part.pool}"

    def _strays(self, rows: Iterable[Workload]) -> dict[tuple[str, str], tuple[int, ...]]:
        """Find devices that work holds in another pool than the one it is counted in, as after a change of policy."""
        found: dict[tuple[str, str], tuple[int, ...]] = {}
        for row in rows:
            for place in row.placement:
                parts = self.divided.get(place.node)
                if parts is None:
                    continue
                home = _home(parts, place, ())
                for part in parts:
                    held = tuple(index for index in place.devices if index in part.devices)
                    if part is not home and held:
                        key = (part.name, part.pool)
                        found[key] = (*found.get(key, ()), *held)
        return found


def machine_of(node: str) -> str:
    """Name the machine that a node of the engine is, or is a part of."""
    return node.partition("/")[0]


def divide(nodes: Iterable[NodeSeen], document: Document) -> PoolAssignment:
    """Put every node into the pools that the document gives its GPUs to; GPUs of no pool are not offered."""
    found: list[NodeSeen] = []
    divided: dict[str, tuple[NodeSeen, ...]] = {}
    for seen in nodes:
        if seen.pool:
            found.append(seen)
            continue
        parts = _parts(seen, document)
        found += parts
        if len(parts) > 1:
            divided[seen.name] = parts
    return PoolAssignment(tuple(found), divided)


def sizes(nodes: Iterable[NodeSeen], document: Document) -> dict[str, int]:
    """Count the GPUs (whole devices) of every pool that has machines; where this host is all there is, of every
    static pool that is not picked by labels."""
    nodes = tuple(nodes)
    found: dict[str, int] = {}
    if any(not seen.pool for seen in nodes):
        facts = document.pool_facts
        found = {p.name: 0 for p in document.pools if p.kind == "static" and not facts[p.name].labels}
    for seen in divide(nodes, document).nodes:
        found[seen.pool] = found.get(seen.pool, 0) + len(seen.devices)
    return found


def _parts(seen: NodeSeen, document: Document) -> tuple[NodeSeen, ...]:
    """Divide one machine; CPU and memory go with the GPUs. One without GPUs is in the first pool of this machine."""
    by_pool: dict[str, list[int]] = {}
    for index in seen.devices:
        pool = document.pool_of_device(index)
        if pool is not None:
            by_pool.setdefault(pool, []).append(index)
    if not by_pool:
        first = next((pool.name for pool in document.pools if document.is_local(pool.name)), None)
        return () if first is None else (replace(seen, pool=first, devices=()),)
    if len(by_pool) == 1:
        [(pool, devices)] = by_pool.items()
        return (replace(seen, pool=pool, devices=tuple(devices), foreign=_of(seen, devices)),)
    total = sum(map(len, by_pool.values()))
    return tuple(
        replace(
            seen,
            pool=pool,
            devices=tuple(devices),
            foreign=_of(seen, devices),
            cpu=seen.cpu * len(devices) // total,
            memory=seen.memory * len(devices) // total,
        )
        for pool, devices in sorted(by_pool.items())
    )


def _of(seen: NodeSeen, devices: Sequence[int]) -> dict[int, int]:
    return {index: milli for index, milli in seen.foreign.items() if index in devices}


def _home(parts: Sequence[NodeSeen], place: Place, pools: Sequence[str]) -> NodeSeen:
    """Choose the part that a worker is counted on: where most of its devices are, else by its profile's pools."""
    if place.devices:
        return max(parts, key=lambda part: sum(index in part.devices for index in place.devices))
    ranked = {pool: rank for rank, pool in enumerate(pools)}
    return min(parts, key=lambda part: ranked.get(part.pool, len(ranked)))


def places(placement: Placement) -> tuple[Place, ...]:
    """Write a placement of the engine as the store keeps it, one entry a worker."""
    ordered = sorted(placement, key=lambda placed: placed.worker)
    return tuple(Place(machine_of(p.node), tuple(p.devices), (p.milli,) * len(p.devices)) for p in ordered)
