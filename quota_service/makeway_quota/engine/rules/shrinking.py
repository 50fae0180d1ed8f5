"""Elastic gangs make room with some of their workers: they save, and go on with the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..index.nodes import Allocation, Part
from ..placement.fit import allowed, find
from .victims import Preemptor

Kept = Mapping[str, tuple[Part, ...]]
"""Workload id to the part of its place on which it goes on."""
_MOST_NODES = 16
"""A gang on more nodes than this gives up its last workers, wherever they are."""


def shrink(preemptor: Preemptor, victims: Sequence[Allocation]) -> Kept:
    """Promise elastic gangs that were told to go what the preemptor can do without, if that is enough to go on.

    Only as many workers leave as have to: the last ones, unless fewer would do on one node.
    """
    kept: dict[str, tuple[Part, ...]] = {}
    for victim in victims:
        if not victim.fresh and len(victim.parts) > victim.need.least:
            stays = max((_stays(preemptor, victim, parts) for parts in _orders(preemptor, victim)), key=len)
            if len(stays) >= victim.need.least:
                stays.sort(key=lambda part: part.worker)
                kept[victim.workload.id] = tuple(part._replace(worker=at) for at, part in enumerate(stays))
                preemptor.cluster.nominate(victim.workload, victim.need, kept[victim.workload.id])
    return kept


def _orders(preemptor: Preemptor, victim: Allocation) -> Iterator[list[Part]]:
    """List orders in which workers might stay: first come first, and with those of one node last."""
    parts = sorted(victim.parts, key=lambda part: part.worker)
    yield parts
    nodes = {part.node.position: part.node for part in parts}
    if preemptor.need.least == 1 and len(nodes) <= _MOST_NODES:
        for _, node in sorted(nodes.items()):
            yield sorted(parts, key=lambda part: (part.node is node, part.worker))


def _stays(preemptor: Preemptor, victim: Allocation, parts: Sequence[Part]) -> list[Part]:
    """Let one worker after the other stay where the preemptor still fits."""
    cluster, need = preemptor.cluster, victim.need
    stays: list[Part] = []
    for part in parts:
        if not part.node.usable or len(part.devices) * part.milli != need.gpus:
            continue
        cluster.nominate(victim.workload, need, (*stays, part))
        fits = allowed(cluster, preemptor.account, preemptor.pool, preemptor.amount, True) and bool(
            find(preemptor.pool, preemptor.need, True)
        )
        cluster.withdraw_nomination(victim.workload)
        if fits:
            stays.append(part)
    return stays
