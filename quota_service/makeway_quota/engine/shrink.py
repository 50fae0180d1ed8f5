"""Elastic gangs make room with some of their workers: they save, and go on with the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .place import allowed, find
from .victims import Seeker
from .world import Part, Tenancy

Kept = Mapping[str, tuple[Part, ...]]
"""Workload id to the part of its place on which it goes on."""
_MOST_NODES = 16
"""A gang on more nodes than this gives up its last workers, wherever they are."""


def shrink(seeker: Seeker, victims: Sequence[Tenancy]) -> Kept:
    """Promise elastic gangs that were told to go what the seeker can do without, if that is enough to go on.

    Only as many workers leave as have to: the last ones, unless fewer would do on one node.
    """
    kept: dict[str, tuple[Part, ...]] = {}
    for victim in victims:
        if not victim.fresh and len(victim.parts) > victim.need.least:
            stays = max((_stays(seeker, victim, parts) for parts in _orders(seeker, victim)), key=len)
            if len(stays) >= victim.need.least:
                stays.sort(key=lambda part: part.worker)
                kept[victim.workload.id] = tuple(part._replace(worker=at) for at, part in enumerate(stays))
                seeker.cluster.claim(victim.workload, victim.need, kept[victim.workload.id])
    return kept


def _orders(seeker: Seeker, victim: Tenancy) -> Iterator[list[Part]]:
    """List orders in which workers might stay: first come first, and with those of one node last."""
    parts = sorted(victim.parts, key=lambda part: part.worker)
    yield parts
    nodes = {part.node.position: part.node for part in parts}
    if seeker.need.least == 1 and len(nodes) <= _MOST_NODES:
        for _, node in sorted(nodes.items()):
            yield sorted(parts, key=lambda part: (part.node is node, part.worker))


def _stays(seeker: Seeker, victim: Tenancy, parts: Sequence[Part]) -> list[Part]:
    """Let one worker after the other stay where the seeker still fits."""
    cluster, need = seeker.cluster, victim.need
    stays: list[Part] = []
    for part in parts:
        if not part.node.usable or len(part.devices) * part.milli != need.gpus:
            continue
        cluster.claim(victim.workload, need, (*stays, part))
        fits = allowed(cluster, seeker.account, seeker.pool, seeker.amount, True) and bool(
            find(seeker.pool, seeker.need, True)
        )
        cluster.unclaim(victim.workload)
        if fits:
            stays.append(part)
    return stays
