"""Follow the devices and claims of dynamic resource allocation (DRA) while the resource of a pool is of a DeviceClass.

Else, and where the API is missing or the account may not read it, the classes are read again now and then. What fails
here stops nothing: the devices stay as they were counted last, and `problem` says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ..api.client import ApiClient, ApiStatusError, ApiUnreachable
from ..api.informer import Informer, Timing
from .dra_devices import (
    CLAIMS,
    CLASSES,
    IMPLICIT_RESOURCE_PREFIX,
    SLICES,
    Attribute,
    DeviceClass,
    DeviceIndex,
    DeviceSlice,
    HeldDevices,
    NodeDevices,
    index_of,
    project_claim,
    project_class,
    project_slice,
)

log = logging.getLogger(__name__)

NOT_FOUND = 404
"""The answer where the cluster has no API of this version"""
REFUSED = (401, 403, NOT_FOUND)
ABSENT_RETRY = 60.0
"""Seconds after which the classes of a cluster whose devices are not followed are read again"""
ERROR_RETRY = 2.0
"""Seconds after which a cluster that did not answer is asked again, which double, and between two looks at informers"""


class DeviceInformers:
    """The informers on slices, classes and claims, from one first list on."""

    def __init__(
        self, client: ApiClient, compared: frozenset[Attribute], wake: Callable[[], None], timing: Timing
    ) -> None:
        """Follow nothing yet; `compared` are the attributes that are kept of devices."""
        project = partial(project_slice, compared=compared)
        self.compared = compared
        self.slices: Informer[DeviceSlice] = Informer(client, SLICES, project, wake=wake, timing=timing)
        self.classes: Informer[DeviceClass] = Informer(client, CLASSES, project_class, wake=wake, timing=timing)
        self.claims: Informer[HeldDevices] = Informer(client, CLAIMS, project_claim, wake=wake, timing=timing)
        self.all: tuple[Informer[Any], ...] = (self.slices, self.classes, self.claims)

    @property
    def synced(self) -> bool:
        """Whether everything was read once."""
        return all(informer.synced for informer in self.all)

    @property
    def problem(self) -> str:
        """Why the API server cannot be followed at the moment; "" when it can."""
        return next((informer.problem for informer in self.all if informer.problem), "")

    @property
    def refused(self) -> bool:
        """Whether the account may not follow these, or the API is gone."""
        return any(informer.problem and informer.status in REFUSED for informer in self.all)

    async def wait_synced(self) -> None:
        """Wait until everything was read."""
        for informer in self.all:
            await informer.wait_synced()


class DraInformers:
    """The devices of each node by the resources of pools, and how many claims hold; none before there is a class."""

    def __init__(self, client: ApiClient, wake: Callable[[], None], timing: Timing) -> None:
        self.first_answer = asyncio.Event()
        """set once it is known what there is, or that the account may not know it"""
        self._client = client
        self._wake = wake
        self._timing = timing
        self._resources: frozenset[str] = frozenset()
        self._followed: DeviceInformers | None = None
        self._index = DeviceIndex()
        self._indexed: DeviceInformers | None = None
        """what the index has; another one from its first complete lists on"""
        self._failure = ""
        self._retry = asyncio.Event()

    @property
    def followed(self) -> bool:
        """Whether devices and claims are followed, or were until the API server refused it."""
        return self._followed is not None

    @property
    def problem(self) -> str:
        """Why the devices of a pool cannot be followed at the moment; "" when they can, or no pool has any."""
        concerned = any(
            resource.startswith(IMPLICIT_RESOURCE_PREFIX) or self._index.knows(resource) for resource in self._resources
        )
        return self._failure if concerned else ""

    def follow_resources(self, resources: Iterable[str]) -> None:
        """Follow devices where one of these resources, which pools have, is of a class."""
        if (wanted := frozenset(resources)) != self._resources:
            self._resources = wanted
            self._retry.set()

    def retry_now(self) -> None:
        """End what is waited for: the API server could not be reached, and can again."""
        for informer in self._followed.all if self._followed is not None else ():
            informer.retry_now()
        self._retry.set()

    async def run(self) -> None:
        """Follow classes, slices and claims while a resource is of a class, until cancelled."""
        tries = 0
        while True:
            self._retry.clear()
            try:
                classes = await self._read_classes()
            except Exception as error:
                tries = 0 if isinstance(error, ApiStatusError) and error.status in REFUSED else tries + 1
                self._fail(error)
            else:
                tries = 0
                if not classes:
                    self._failure, self._followed = "", None
                elif await self._follow(classes):
                    continue
            if not tries:
                self.first_answer.set()
            self._wake()
            await self._pause(min(ABSENT_RETRY, ERROR_RETRY * 2.0 ** (tries - 1)) if tries else ABSENT_RETRY)

    async def _read_classes(self) -> list[DeviceClass]:
        """Return the classes; none where no pool has a resource of one. Raise where slices or claims are refused."""
        items = (await self._client.get(CLASSES)).get("items") or ()
        classes = [project_class(item) for item in items]
        if not self._has_wanted(classes):
            return []
        for path in (SLICES, CLAIMS):
            await self._client.get(path, {"limit": "1"})
        return classes

    def _has_wanted(self, classes: Iterable[DeviceClass]) -> bool:
        return any(not self._resources.isdisjoint(device_class.resources) for device_class in classes)

    def _compared(self, classes: Iterable[DeviceClass]) -> frozenset[Attribute]:
        """Return the attributes that the selectors of pools' classes compare."""
        wanted = (dc for dc in classes if not self._resources.isdisjoint(dc.resources))
        return frozenset(name for dc in wanted for name, _ in dc.attributes)

    def _fail(self, error: Exception) -> None:
        """Note why nothing can be followed; where the API is gone, so are its devices."""
        if not isinstance(error, ApiStatusError | ApiUnreachable | OSError | TimeoutError):
            log.exception("%s: an answer that was not understood", CLASSES, exc_info=error)
        if isinstance(error, ApiStatusError) and error.status == NOT_FOUND:
            self._followed = None
        self._failure = str(error) or type(error).__name__

    async def _follow(self, classes: Iterable[DeviceClass]) -> bool:
        """Follow these until refused, whether to look at the classes again at once instead."""
        self._followed = followed = DeviceInformers(self._client, self._compared(classes), self._wake, self._timing)
        tasks = [asyncio.create_task(informer.run()) for informer in followed.all]
        tasks.append(asyncio.create_task(self._note_synced(followed)))
        try:
            while True:
                await self._pause(ERROR_RETRY)
                self._retry.clear()
                if followed.problem or followed.synced:
                    self._failure = followed.problem
                if followed.refused:
                    return False
                known = list(followed.classes.objects.values()) if followed.classes.synced else classes
                if not self._has_wanted(known) or not self._compared(known) <= followed.compared:
                    return True
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # a cancellation that comes meanwhile is not lost

    async def _note_synced(self, followed: DeviceInformers) -> None:
        await followed.wait_synced()
        self.first_answer.set()
        self._wake()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._retry.wait()

    def take_changed_nodes(self) -> set[str]:
        """Take what changed; return the nodes whose devices, or the claims of these, that concerns.

        Lists that are not complete change nothing yet.
        """
        followed = self._followed
        if followed is not self._indexed:
            if followed is not None and not followed.synced:
                return set()
            return self._switch_to(followed)
        if followed is None:
            return set()
        result: set[str] = set()
        try:
            for key in followed.slices.take():
                result |= self._index.put_slice(key, followed.slices.objects.get(key))
            for key in followed.claims.take():
                result |= self._index.put_claim(key, followed.claims.objects.get(key))
            classes = followed.classes.objects.values()
            if followed.classes.take() and self._compared(classes) <= followed.compared:
                result |= self._index.set_classes(classes)
        except Exception:
            self._indexed = None  # made anew from all objects the next time
            raise
        return result

    def _switch_to(self, followed: DeviceInformers | None) -> set[str]:
        """Read other informers, or none, from now on; return the nodes that this changes."""
        index = DeviceIndex()
        if followed is not None:
            for informer in followed.all:
                informer.take()
            classes = followed.classes.objects.values()
            index = index_of(followed.slices.objects, classes, followed.claims.objects)
        result = self._index.differs(index)
        self._index, self._indexed = index, followed
        return result

    def on(self, node: str, resources: Iterable[str]) -> NodeDevices:
        """Return the devices of a node by these resources, each by the first whose class selects it."""
        return self._index.on(node, resources)

    def is_generated(self, claim: str) -> bool:
        """Whether a claim, by its key, was generated for one pod."""
        return self._index.is_generated(claim)

    def by_node(self, resources: Mapping[str, Iterable[str]]) -> dict[str, Mapping[str, int]]:
        """Return how many devices each of these nodes has, by the resources that it may have."""
        return {node: self.on(node, wanted).offered for node, wanted in resources.items()}
