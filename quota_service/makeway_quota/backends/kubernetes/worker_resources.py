"""Choose what a worker gets on its node, by its pool and its profile; called where its pod is described. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.snapshot import GPU
from ...policy import Document
from ..base import BackendError, StartOrder
from .manifest import WorkerResources
from .nodes import NodeSelector, Toleration


def worker_resources(
    document: Document,
    known: Sequence[NodeSelector],
    tolerations: Sequence[Toleration],
    order: StartOrder,
    number: int,
    pool: str | None,
) -> WorkerResources:
    """Return what a worker gets; BackendError where its GPUs cannot be requested. `pool` None: its node is gone."""
    place = order.workers[number]
    profile, facts = document.profile(order.profile), document.profile_facts.get(order.profile)
    pools = [pool] if pool is not None else list(profile.pools if profile else ())
    selector = next((one for one in known if one.pool in pools), None)
    if any(milli % GPU for milli in place.milli):
        resource = selector.resource if selector else "its pool's resource"
        raise BackendError(f"Its profile needs a part of a GPU, and {resource} can only be requested as a whole.")
    return WorkerResources(
        resource=selector.resource if selector else "",
        devices=len(place.devices),
        tolerations=selector.tolerations if selector else tuple(tolerations),
        template=facts.pod if facts else {},
    )
