"""Follow the devices and claims of dynamic resource allocation (DRA) for the inventory, where a cluster has any.

A cluster without a DeviceClass, without the API, or whose account may not read these, is asked again now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..api.client import ApiClient, ApiRefusal, ApiUnreachable
from ..api.informer import Informer, Timing
from .dra_devices import (
    CLAIMS,
    CLASSES,
    SLICES,
    Claim,
    DeviceClass,
    DeviceSlice,
    DraDevices,
    count_devices,
    project_claim,
    project_class,
    project_slice,
)

log = logging.getLogger(__name__)

NOT_AVAILABLE = (403, 404)
"""The answers where the account may not read classes, and where the cluster has none of this version"""
ABSENT_RETRY = 60.0
"""Seconds after which a cluster without classes is asked again"""
ERROR_RETRY = 2.0
"""Seconds after which one that did not answer is"""

TRIES = 3
"""After so many without an answer the nodes are shown without these devices"""


class DraInformers:
    """The devices of each node by the resources of pools, and who holds them; nothing before there is a class."""

    def __init__(self, client: ApiClient, wake: Callable[[], None], timing: Timing) -> None:
        self._client = client
        self._wake = wake
        self.slices: Informer[DeviceSlice] = Informer(client, SLICES, project_slice, wake=wake, timing=timing)
        self.classes: Informer[DeviceClass] = Informer(client, CLASSES, project_class, wake=wake, timing=timing)
        self.claims: Informer[Claim] = Informer(client, CLAIMS, project_claim, wake=wake, timing=timing)
        self._followed: tuple[asyncio.Task[None], ...] = ()
        self._resources: tuple[str, ...] = ()
        self._count = DraDevices()

    @property
    def followed(self) -> bool:
        """Whether the cluster has classes, as far as is known."""
        return bool(self._followed)

    @property
    def synced(self) -> bool:
        """Whether everything was read that there is."""
        return not self.followed or (self.slices.synced and self.classes.synced and self.claims.synced)

    @property
    def problem(self) -> str:
        """Why devices and claims cannot be followed at the moment; "" when they can, or there are none."""
        return (self.slices.problem or self.classes.problem or self.claims.problem) if self.followed else ""

    async def run(self, looked: asyncio.Event) -> None:
        """Follow classes, slices and claims from the first class on; `looked` is set once it is known what there is."""
        try:
            tries = 0
            while not (there := await self._has_classes()):
                tries += 1
                if there is not None or tries >= TRIES:
                    looked.set()
                await asyncio.sleep(ERROR_RETRY if there is None else ABSENT_RETRY)
            informers: tuple[Informer[Any], ...] = (self.slices, self.classes, self.claims)
            self._followed = tuple(asyncio.create_task(informer.run()) for informer in informers)
            await asyncio.gather(*(informer.wait_synced() for informer in informers))
            looked.set()
            self._wake()
            await asyncio.gather(*self._followed)
        finally:
            for task in self._followed:
                task.cancel()
            for task in self._followed:
                with suppress(asyncio.CancelledError):
                    await task

    async def _has_classes(self) -> bool | None:
        """Whether the cluster has a DeviceClass, and claims and slices may be read; None where that is not known."""
        try:
            found = [(await self._client.get(path, {"limit": "1"})).get("items") for path in (CLASSES, SLICES, CLAIMS)]
        except ApiRefusal as refusal:
            return False if refusal.status in NOT_AVAILABLE else None
        except (ApiUnreachable, OSError, TimeoutError):
            return None
        return bool(found[0])

    def changed(self, resources: Sequence[str]) -> set[str]:
        """Return the nodes whose devices, or the claims of these, changed; count by these resources from now on."""
        taken = self.slices.take() | self.classes.take() | self.claims.take()
        if not self.followed or (not taken and tuple(resources) == self._resources):
            return set()
        before, self._resources = self._count, tuple(resources)
        known = (list(each.objects.values()) for each in (self.slices, self.classes, self.claims))
        slices, classes, claims = known
        self._count = count_devices(slices, classes, claims, self._resources)  # type: ignore[arg-type]
        return before.differs(self._count)

    @property
    def by_node(self) -> Mapping[str, Mapping[str, int]]:
        """The devices of all nodes, by node and resource."""
        return self._count.offered

    def offered(self, node: str) -> Mapping[str, int]:
        """Return how many devices a node has, by resource."""
        return self._count.offered.get(node, {})

    def foreign(self, node: str, ours: Mapping[str, str]) -> Mapping[str, int]:
        """Return how many of them claims of other pods hold, by resource."""
        return self._count.foreign(node, ours)
