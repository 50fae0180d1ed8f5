"""Assign every GPU to its pool, as the policy document says, also where one host's GPUs are divided among pools.

A backend that does not know pools reports its nodes with pool "": a node whose labels match a pool's is in that pool,
else its GPUs become one part for each pool that the document gives them to. A node of a cluster may offer several kinds
of GPUs, each to another pool (`NodeStatus.parts`); these share its CPU, memory and pods. Store, pages and people know a
divided host by its one name; only the engine, which puts a node into one pool, sees `NAME/POOL`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ...backends.base import NodeStatus
from ...engine.snapshot import GPU, Node, Placed, Placement, Terminating
from ...policy import Document
from ...store.records import Workload
from ...values import Place


class PoolAssignment:
    """The nodes by pool; a value that never changes. A divided host has one part for each of its pools."""

    def __init__(
        self,
        parts: Mapping[str, tuple[NodeStatus, ...]] | None = None,
        unassigned: Mapping[str, NodeStatus] | None = None,
    ) -> None:
        self.parts = parts or {}
        """Machine to its parts, each in one pool; none where no pool takes its GPUs."""
        self.unassigned = unassigned or {}
        """The hosts without parts"""

    @cached_property
    def nodes(self) -> tuple[NodeStatus, ...]:
        """The parts of all hosts."""
        return tuple(part for parts in self.parts.values() for part in parts)

    @cached_property
    def divided(self) -> frozenset[str]:
        """The hosts that have GPUs in several pools."""
        return frozenset(name for name, parts in self.parts.items() if len(parts) > 1)

    @cached_property
    def virtual(self) -> bool:
        """Whether any GPUs are virtual."""
        return any(node.virtual for node in self.nodes)

    def changed(self, nodes: Iterable[NodeStatus], gone: Iterable[str], document: Document) -> PoolAssignment:
        """Return the assignment once these nodes are as they are now, and those of these names are gone."""
        parts, unassigned = dict(self.parts), dict(self.unassigned)
        nodes = tuple(nodes)
        for name in gone:
            parts.pop(name, None)
            unassigned.pop(name, None)
        for status in nodes:
            parts[status.name] = _parts(status, document)
            unassigned.pop(status.name, None)
            if not parts[status.name]:
                unassigned[status.name] = status
        result = PoolAssignment(parts, unassigned)
        if not self.divided and all(len(parts[status.name]) < 2 for status in nodes):
            result.divided = self.divided
        return result

    def pools_of(self, host: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the pools that a host is in, each with the devices there."""
        return tuple((part.pool, part.devices) for part in self.parts.get(host, ()))

    def as_nodes(self, host: str, rows: Iterable[Workload]) -> tuple[Node, ...]:
        """Return a host as nodes of the engine; `rows` are placed there.

        Devices that a workload holds in a second pool count there as foreign.
        """
        parts = self.parts.get(host, ())
        strays = self._strays(host, rows) if len(parts) > 1 else {}
        return tuple(self._node(part, strays.get(part.pool, ()), len(parts) > 1) for part in parts)

    def placement(self, places: Sequence[Place], pools: Sequence[str] = ()) -> Placement:
        """Return a placement of the store as the engine writes it, one entry a worker.

        Work without GPUs counts on the part that is in the first of its profile's `pools`.
        """
        return tuple(
            Placed(worker, self._name_for(place, pools), place.devices, place.milli[0] if place.milli else 0)
            for worker, place in enumerate(places)
        )

    def pool_of(self, place: Place, pools: Sequence[str] = ()) -> str | None:
        """Return the pool in which a worker counts; None where its node is gone. `pools` as for `placement`."""
        parts = self.parts.get(place.node)
        return _home(parts, place, pools).pool if parts else None

    def without_sessions(self, pools: Iterable[str]) -> list[str]:
        """Return those of some pools on whose nodes no notebook can start: not those without nodes."""
        held: dict[str, bool] = {}
        for node in self.nodes:
            held[node.pool] = held.get(node.pool, False) or node.sessions
        return [pool for pool in pools if not held.get(pool, True)]

    def pooled(self, placement: Iterable[Place]) -> set[tuple[str, int]]:
        """Return the hosts and devices of a placement that are in a pool."""
        return {
            (place.node, index)
            for place in placement
            for index in place.devices
            if any(index in part.devices for part in self.parts.get(place.node, ()))
        }

    def outside(self, host: str, work: Iterable[tuple[Workload, Sequence[str]]]) -> dict[str, tuple[int, ...]]:
        """Return the devices of a host that are in no pool and are held, by the pool in which the work counts.

        `work` are the workloads placed there, each with the pools of its profile. A policy, or the loss of a label or
        of a device, takes GPUs out of their pool while work runs on them; they count until it ends.
        """
        parts = self.parts.get(host, ())
        pooled = {index for part in parts for index in part.devices}
        result: dict[str, set[int]] = {}
        for row, pools in work:
            for place in row.placement:
                strays = set(place.devices) - pooled if place.node == host else set()
                home = _home(parts, place, pools).pool if parts else next(iter(pools), None)
                if strays and home is not None:
                    result.setdefault(home, set()).update(strays)
        return {pool: tuple(sorted(strays)) for pool, strays in result.items()}

    def _node(self, status: NodeStatus, strays: tuple[int, ...], divided: bool) -> Node:
        whole = {index for index, milli in status.foreign.items() if milli >= GPU}.union(strays)
        part = sum(milli for index, milli in status.foreign.items() if index not in whole)
        return Node(
            name=f"{status.name}/{status.pool}" if divided else status.name,
            pool=status.pool,
            gpus=len(status.devices),
            cpu=status.cpu,
            memory=status.memory,
            ready=status.ready,
            cordoned=status.cordoned,
            devices=() if status.anonymous_devices else status.devices,
            first_device=min(status.devices, default=0) if status.anonymous_devices else 0,
            host=status.name if divided and status.anonymous_devices else "",
            foreign_devices=tuple(sorted(whole)),
            foreign_gpus=part + status.foreign_gpus,
            foreign_cpu=status.foreign_cpu,
            foreign_memory=status.foreign_memory,
            model=status.model,
            terminating=status.terminating,
            down_since=status.down_since,
            pods=status.max_pods,
            foreign_pods=status.foreign_pods,
            sessions=status.sessions,
        )

    def _name_for(self, place: Place, pools: Sequence[str]) -> str:
        parts = self.parts.get(place.node, ())
        if len(parts) < 2:
            return place.node
        part = _home(parts, place, pools)
        return f"{part.name}/{part.pool}"

    def _strays(self, host: str, rows: Iterable[Workload]) -> dict[str, tuple[int, ...]]:
        """Find devices that work holds in another pool than the one it is counted in, as after a change of policy."""
        result: dict[str, tuple[int, ...]] = {}
        parts = self.parts[host]
        for row in rows:
            for place in row.placement:
                if place.node != host:
                    continue
                home = _home(parts, place, ())
                for part in parts:
                    held = tuple(index for index in place.devices if index in part.devices)
                    if part is not home and held:
                        result[part.pool] = (*result.get(part.pool, ()), *held)
        return result


def divide(nodes: Iterable[NodeStatus], document: Document) -> PoolAssignment:
    """Assign the GPUs of every node to the pools of the document; GPUs of no pool are not offered."""
    return PoolAssignment().changed(nodes, (), document)


def sizes(nodes: Iterable[NodeStatus], document: Document) -> dict[str, int]:
    """Return the GPUs (whole devices) of every pool that has hosts.

    Where this host is all there is: of every static pool that is not picked by labels. A node that cannot be divided
    among the pools, which the world quarantines, counts nowhere.
    """
    nodes = tuple(nodes)
    result: dict[str, int] = {}
    if any(not status.pool for status in nodes):
        facts = document.pool_facts
        result = {p.name: 0 for p in document.pools if p.kind == "static" and not facts[p.name].labels}
    for status in nodes:
        with contextlib.suppress(Exception):
            for part in _parts(status, document):
                result[part.pool] = result.get(part.pool, 0) + len(part.devices)
    return result


def _parts(status: NodeStatus, document: Document) -> tuple[NodeStatus, ...]:
    """Divide one host; CPU and memory go with the GPUs. One without GPUs is in the first pool of this host."""
    if status.parts:
        parts = status.by_pool()
        return tuple(
            replace(part, terminating=_terminating_on(status, part.devices, first=part is parts[0])) for part in parts
        )
    if status.pool:
        return (status,)
    labelled = _by_labels(status, document)
    if labelled is not None:
        return (replace(status, pool=labelled),)
    by_pool: dict[str, list[int]] = {}
    for index in status.devices:
        pool = document.pool_of_device(index)
        if pool is not None:
            by_pool.setdefault(pool, []).append(index)
    if not by_pool:
        first = next((pool.name for pool in document.pools if document.is_local(pool.name)), None)
        return () if first is None else (replace(status, pool=first, devices=()),)
    total = sum(map(len, by_pool.values()))
    result: list[NodeStatus] = []
    for pool, devices in sorted(by_pool.items()):
        part = replace(status, pool=pool, devices=tuple(devices), foreign=_of(status, devices))
        if len(by_pool) > 1:
            part = replace(
                part,
                cpu=status.cpu * len(devices) // total,
                memory=status.memory * len(devices) // total,
                foreign_gpus=0 if result else status.foreign_gpus,
                foreign_cpu=status.foreign_cpu * len(devices) // total,
                foreign_memory=status.foreign_memory * len(devices) // total,
                terminating=_terminating_on(status, devices, first=not result),
            )
        result.append(part)
    return tuple(result)


def _by_labels(status: NodeStatus, document: Document) -> str | None:
    """Return the first pool whose labels a node has, all of them."""
    for pool in document.pools if status.labels else ():
        labels = document.pool_facts[pool.name].labels
        if labels and all(status.labels.get(name) == value for name, value in labels.items()):
            return pool.name
    return None


def _terminating_on(status: NodeStatus, devices: Sequence[int], first: bool) -> tuple[Terminating, ...]:
    """Return what ended attempts hold of these devices; their CPU, memory and pods count on the `first` part."""
    result = []
    for item in status.terminating:
        held = tuple(device for device in item.devices if device in devices)
        if held or first:
            cpu, memory, pods = (item.cpu, item.memory, item.pods) if first else (0, 0, 0)
            result.append(replace(item, devices=held, cpu=cpu, memory=memory, pods=pods))
    return tuple(result)


def _of(status: NodeStatus, devices: Sequence[int]) -> dict[int, int]:
    return {index: milli for index, milli in status.foreign.items() if index in devices}


def _home(parts: Sequence[NodeStatus], place: Place, pools: Sequence[str]) -> NodeStatus:
    """Choose the part that a worker is counted on: where most of its devices are, else by its profile's pools."""
    held = [sum(index in part.devices for index in place.devices) for part in parts]
    if any(held):
        return parts[held.index(max(held))]
    ranked = {pool: rank for rank, pool in enumerate(pools)}
    return min(parts, key=lambda part: ranked.get(part.pool, len(ranked)))
