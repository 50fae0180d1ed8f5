"""The backend for pods on an API server of the test's own, with a clock that the test sets."""

from __future__ import annotations

import asyncio
import json

from api_server import ApiServer
from makeway_quota.backends.base import AttemptStatus, Phase, StartOrder
from makeway_quota.backends.kubernetes.api.client import Object
from makeway_quota.backends.kubernetes.api.health_check import HEALTH_CHECK_TIMING, HealthCheckTiming
from makeway_quota.backends.kubernetes.backend import KubernetesBackend
from makeway_quota.backends.kubernetes.pods.manifest import PodSettings
from makeway_quota.backends.remote.workers import WorkerStatus
from makeway_quota.control.workers.channel import WorkerChannel
from makeway_quota.control.workers.tokens import AttemptTokens
from makeway_quota.policy import read_policy
from makeway_quota.store.store import Store
from makeway_quota.values import Place

SETTINGS = PodSettings("jobs", "here", "http://10.0.0.1:1/services/makeway", "makeway:1", "notebook:1")
POLICY = "{version: 1, pools: [{name: gpu}], profiles: [{name: gpu1, gpus: 1}], policies: []}"


class Backend(KubernetesBackend):
    """The backend with a clock that the test sets, and pods that it lets come and go."""

    def __init__(
        self, server: ApiServer, store: Store, health_check_timing: HealthCheckTiming = HEALTH_CHECK_TIMING
    ) -> None:
        self.now = 1000.0
        super().__init__(server, SETTINGS, health_check_timing=health_check_timing, monotonic=lambda: self.now)
        self.server = server
        self.store = store
        self.connect(WorkerChannel(store, AttemptTokens(b"secret" * 8)))
        document = read_policy(POLICY)
        self.follow_policy(lambda: document)

    def hear(self, kind: str, found: Object) -> None:
        """Take one event of the watch."""
        self.pods._event(json.dumps({"type": kind, "object": found}).encode())

    def report(self, job: str, *workers: WorkerStatus) -> None:
        """Set what the workers of a job have reported."""
        result = {(job, 1): dict(enumerate(workers))}
        self.channel.worker_statuses = lambda: result  # type: ignore[method-assign]
        self.channel.changed = lambda: set(result)  # type: ignore[method-assign]

    async def undone(self, job: str) -> None:
        """Return when the pods of a refused start are deleted."""
        async with asyncio.timeout(60):
            while self._removals.undoing((job, 1)):  # noqa: ASYNC110 - a matter of time
                await asyncio.sleep(0)

    async def seen(self, job: str) -> AttemptStatus:
        return next(seen for seen in (await self.observe()).attempts if seen.workload == job)

    async def phases(self) -> dict[str, Phase]:
        return {seen.workload: seen.phase for seen in (await self.observe()).attempts}


def order(job: str, workers: int = 1) -> StartOrder:
    places = (Place("n0", (0,), (1000,)),) * workers
    return StartOrder(job, 1, "fit", "ana", "rnd", "gpu1", ("true",), {}, places, 30.0)
