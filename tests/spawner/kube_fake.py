"""A small API server of Kubernetes over HTTP: pods, claims and events of a namespace, with watches.

For unit tests of the spawner, whose own client talks to it. No scheduler and no kubelet: the test changes the pods.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from kubernetes_asyncio.client import Configuration
from makeway_spawner.kube import MakewayKubeSpawner

Object = dict[str, Any]
KINDS = ("pods", "persistentvolumeclaims", "events")


class KubeFake:
    """The objects by kind and name; `refuse` returns a status and what is said for a request that is refused."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {kind: {} for kind in KINDS}
        self.asked: list[str] = []
        self.refuse: Callable[[str, str], tuple[int, str] | None] = lambda method, path: None
        self.url = ""
        self._versions = itertools.count(10)
        self._watches: dict[str, list[asyncio.Queue[Object]]] = {kind: [] for kind in KINDS}

    def add(self, kind: str, object: Object) -> Object:
        """Create an object, or replace it."""
        meta = object.setdefault("metadata", {})
        meta["resourceVersion"] = str(next(self._versions))
        meta.setdefault("uid", f"uid-{meta['resourceVersion']}")
        meta.setdefault("namespace", "default")
        known = meta["name"] in self.objects[kind]
        self.objects[kind][meta["name"]] = object
        self._tell(kind, "MODIFIED" if known else "ADDED", object)
        return object

    def change_pod(self, name: str, **status: Any) -> None:
        """Set fields of a pod's status."""
        pod = self.objects["pods"][name]
        self.add("pods", {**pod, "status": {**pod.get("status", {}), **status}})

    def delete_pod(self, name: str, grace: int = 30) -> None:
        """Mark a pod as deleted, as another client or an eviction does."""
        pod = self.objects["pods"][name]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.add(
            "pods",
            {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": now} | {"deletionGracePeriodSeconds": grace}},
        )

    def remove(self, kind: str, name: str) -> None:
        """Remove an object from the API server."""
        self._tell(kind, "DELETED", self.objects[kind].pop(name))

    def _tell(self, kind: str, what: str, object: Object) -> None:
        for queue in self._watches[kind]:
            queue.put_nowait({"type": what, "object": object})

    # -- as a server -------------------------------------------------------------------------------------------

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind, name = request.match_info["kind"], request.match_info.get("name", "")
        self.asked.append(f"{request.method} {kind}/{name}" + (" watch" if "watch" in request.query else ""))
        if refusal := self.refuse(request.method, kind):
            return _status(*refusal)
        if request.method == "POST":
            return self._create(kind, await request.json())
        if name:
            return self._one(request.method, kind, name)
        if "watch" in request.query:
            return await self._watch(request, kind)
        wanted = [one.split("=") for one in request.query.get("labelSelector", "").split(",") if "app." in one]
        items = [
            one
            for one in self.objects[kind].values()
            if all((one["metadata"].get("labels") or {}).get(key) == value for key, value in wanted)
        ]
        return web.json_response({"metadata": {"resourceVersion": str(next(self._versions))}, "items": items})

    def _create(self, kind: str, body: Object) -> web.Response:
        if body["metadata"]["name"] in self.objects[kind]:
            return _status(409, "it exists already")
        return web.json_response(self.add(kind, {**body, "status": {"phase": "Pending"}}), status=201)

    def _one(self, method: str, kind: str, name: str) -> web.Response:
        stored = self.objects[kind].get(name)
        if stored is None:
            return _status(404, f"{kind} {name!r} not found")
        if method == "DELETE":
            if (
                kind == "pods"
                and (stored.get("spec") or {}).get("nodeName")
                and "containerStatuses" in stored["status"]
                and stored["status"].get("phase") not in ("Succeeded", "Failed")
            ):
                self.delete_pod(name)  # a kubelet confirms its end
            else:
                self.remove(kind, name)
        return web.json_response(stored)

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[Object] = asyncio.Queue()
        self._watches[kind].append(queue)
        try:
            while True:
                await response.write(json.dumps(await queue.get()).encode() + b"\n")
        finally:
            self._watches[kind].remove(queue)


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeFake]:
    """Run a fake that KubeSpawner finds as its cluster."""
    fake, app = KubeFake(), web.Application()
    for path in ("", "/{name}"):
        app.router.add_route("*", f"/api/v1/namespaces/default/{{kind}}{path}", fake.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    monkeypatch.setattr("kubespawner.spawner.load_config", lambda *_, **__: None)
    monkeypatch.setattr(Configuration, "_default", Configuration(host=fake.url))
    yield fake
    await MakewayKubeSpawner._stop_all_reflectors()
    await runner.cleanup()


def spawner_for(user: str = "ana", state: Object | None = None, **traits: Any) -> MakewayKubeSpawner:
    """Return a spawner as the Hub makes it for a user with a stored state."""
    hub: Any = SimpleNamespace(
        base_url="/hub/", api_url="http://hub:8081/hub/api", public_host="", server=None, ip="", url="", port=8081
    )
    db = SimpleNamespace(commit=lambda: None)
    owner: Any = SimpleNamespace(name=user, escaped_name=user, url=f"/user/{user}/", id=1, server=None, db=db)
    made = MakewayKubeSpawner(hub=hub, user=owner, **{"namespace": "default", "look_seconds": 0.05, **traits})
    made.orm_spawner = SimpleNamespace(server=None, name="", state=state or {}, user_options={})
    made.load_state(made.orm_spawner.state)
    return made
