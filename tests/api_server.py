"""An API server of Kubernetes that answers what a test chooses, also what a real one should not."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from makeway_quota.backends.kubernetes.api.client import ApiClient, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.api.connection import Connection

PODS = "/api/v1/namespaces/jobs/pods"


class ApiServer(ApiClient):
    """A cluster with one node: what it was asked, and answers that the test chooses."""

    def __init__(self) -> None:
        self.connection = Connection("https://127.0.0.1:6443", ssl.create_default_context(), namespace="jobs")
        self.asked: list[str] = []
        self.lists: dict[str, list[Object]] = {"/api/v1/nodes": [node("n0")]}
        self.graces: list[int | None] = []
        """of what was deleted, in seconds; None: its own"""
        self.version = "10"
        self.events: list[Object] = []
        """of the next watch, which then says nothing more"""
        self.answer: Callable[[str, str], None] = lambda method, path: None
        """raises what is answered in place of the usual"""

    def abort_requests(self) -> None:
        """Nothing is under way."""

    async def close(self) -> None:
        """Nothing is open."""

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        self._hear("GET", path)
        return {"metadata": {"resourceVersion": self.version}, "items": self.lists.get(path, [])}

    async def create(self, path: str, body: Object) -> Object:
        self._hear("POST", path)
        return {**body, "metadata": {**body["metadata"], "uid": "u"}}

    async def replace(self, path: str, body: Object) -> Object:
        self._hear("PUT", path)
        return body

    async def delete(self, path: str, *, uid: str = "", grace: int | None = None) -> bool:
        self._hear("DELETE", path)
        self.graces.append(grace)
        return True

    @asynccontextmanager
    async def stream(self, path: str, query: Mapping[str, str], silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        events, self.events = self.events, []

        async def lines() -> AsyncIterator[bytes]:
            for event in events:
                yield json.dumps(event).encode()
            await asyncio.sleep(silence)
            raise ApiUnreachable("the Kubernetes API server does not answer")

        yield lines()

    def _hear(self, method: str, path: str) -> None:
        self.asked.append(f"{method} {path}")
        self.answer(method, path)


def node(name: str) -> Object:
    status = {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "resourceVersion": "1"}, "spec": {}, "status": status}


def pod(
    job: str,
    phase: str = "Running",
    version: str = "20",
    *,
    worker: int = 0,
    of: int = 1,
    drained: bool = False,
    words: str | None = None,
) -> Object:
    """Return the pod of a worker, as the API server lists it; `words` are the termination message of one that ended."""
    labels = {"makeway/job": job, "makeway/attempt": "1", "makeway/worker": str(worker), "makeway/workers": str(of)}
    metadata = {"name": f"makeway-{job}-1-{worker}", "namespace": "jobs", "uid": f"{job}-{worker}", "labels": labels}
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    ended = {"exitCode": 0, "reason": "Completed", "message": words}
    containers = [] if words is None else [{"name": "worker", "state": {"terminated": ended}}]
    return {
        "metadata": {**metadata, "resourceVersion": version},
        "spec": {"nodeName": "n0"},
        "status": {
            "phase": phase,
            "conditions": [evicted] if drained else [],
            "containerStatuses": containers,
        },
    }
