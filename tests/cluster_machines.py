"""An API server with the objects of machines that the cluster's autoscaler adds; tests play the cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from api_server import ApiServer
from makeway_quota.autoscale.deployment import Deployment, MachineType
from makeway_quota.autoscale.instances import Instance
from makeway_quota.backends.kubernetes.api.access_reviews import ACCESS_REVIEWS
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, Object
from makeway_quota.backends.kubernetes.cluster.nodes import NodeSelector, Toleration
from makeway_quota.backends.kubernetes.machines.provider import KubernetesProvider
from makeway_quota.backends.kubernetes.pods.manifest import PodSettings

GPU = "nvidia.com/gpu"
SETTINGS = PodSettings("jobs", "portal", "http://service:8765", "makeway:1", "jobs:1")
SELECTOR = NodeSelector("cloud", GPU, {"pool": "cloud"}, (Toleration(GPU, "Exists"),))
TYPE = MachineType("g8", "cloud", "p5.48xlarge", gpus=8, cpu=8000, memory=65536, zones=("a",))
DEPLOYMENT = Deployment("grows", "kubernetes", (TYPE,))
REQUEST = DEPLOYMENT.request(TYPE, "a", "on_demand", None, "m-1")
KINDS = ("configmaps", "pods", "events", "podtemplates")
CONFIG, PODS, EVENTS, TEMPLATES = (f"/api/v1/namespaces/jobs/{kind}" for kind in KINDS)
REQUESTS = "/apis/autoscaling.x-k8s.io/v1/namespaces/jobs/provisioningrequests"
NOW = 1_790_000_000.0


class Server(ApiServer):
    """An API server that keeps objects, and that a test plays scheduler and autoscaler of."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, Object] = {}
        self.made = 0
        self.denied: set[tuple[str, str]] = set()
        """verbs and resources that the account may not use, as access reviews say"""

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        self._hear("GET", path)
        if path in (CONFIG, PODS, EVENTS, REQUESTS, "/api/v1/nodes"):
            return {"items": [json.loads(json.dumps(one)) for one in self._selected(path, dict(query or {}))]}
        if path not in self.objects:
            raise ApiStatusError(404, "NotFound", f"{path} is not there")
        return json.loads(json.dumps(self.objects[path]))  # type: ignore[no-any-return]

    def _selected(self, path: str, query: dict[str, str]) -> list[Object]:
        result = [one for key, one in self.objects.items() if key.rpartition("/")[0] == path]
        for part in query.get("labelSelector", "").split(",") if query.get("labelSelector") else ():
            name, value = part.split("=")
            result = [one for one in result if one["metadata"]["labels"].get(name) == value]
        for part in query.get("fieldSelector", "").split(",") if query.get("fieldSelector") else ():
            name, value = part.split("=")
            result = [one for one in result if _field(one, name) == value]
        return result

    async def create(self, path: str, body: Object) -> Object:
        self._hear("POST", path)
        if path == ACCESS_REVIEWS:
            wanted = body["spec"]["resourceAttributes"]
            return {"status": {"allowed": (wanted["verb"], wanted["resource"]) not in self.denied}}
        key = f"{path}/{body['metadata']['name']}"
        if key in self.objects:
            raise ApiStatusError(409, "AlreadyExists", "it is there")
        self.made += 1
        at = datetime.fromtimestamp(NOW + self.made, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata = {**body["metadata"], "uid": f"u{self.made}", "creationTimestamp": at}
        self.objects[key] = json.loads(json.dumps({**body, "metadata": metadata}))
        return self.objects[key]

    async def replace(self, path: str, body: Object) -> Object:
        self._hear("PUT", path)
        self.objects[path] = body
        return body

    async def delete(self, path: str, *, uid: str = "", grace: int | None = None) -> bool:
        self._hear("DELETE", path)
        return self.objects.pop(path, None) is not None

    # -- what a cluster does

    def says(self, reason: str, message: str, machine: str = "m-1", by: str = "cluster-autoscaler") -> None:
        """Add an event about a placeholder."""
        number = len(self.objects) + 1
        about = {"name": f"makeway-machine-{machine}-place", "uid": self.pod(machine)["metadata"]["uid"]}
        at = f"2026-11-28T12:{number:02}:00Z"
        event = {"reason": reason, "message": message, "involvedObject": about, "lastTimestamp": at}
        event["source"] = {"component": by}
        self.objects[f"{EVENTS}/e{number}"] = {**event, "metadata": {"name": f"e{number}"}}

    def pod(self, machine: str = "m-1", kind: str = "place") -> Object:
        return self.objects[f"{PODS}/makeway-machine-{machine}-{kind}"]

    def joins(self, name: str, gpus: int) -> None:
        """Add a node, or change it."""
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"allocatable": {GPU: str(gpus), "cpu": "16"}, "conditions": conditions}
        self.objects[f"/api/v1/nodes/{name}"] = {"metadata": {"name": name}, "spec": {}, "status": status}

    def names(self) -> list[str]:
        return sorted(key.rpartition("/")[2] for key in self.objects if key.startswith((PODS, CONFIG)))

    def decides(self, **conditions: tuple[str, str]) -> None:
        """Set conditions of the ProvisioningRequest of m-1, each with its status and reason."""
        request = self.objects[f"{REQUESTS}/makeway-machine-m-1"]
        known = {one["type"]: one for one in (request.get("status") or {}).get("conditions", ())}
        for kind, (status, reason) in conditions.items():
            known[kind] = {"type": kind, "status": status, "reason": reason, "message": f"{reason} it says"}
        request["status"] = {"conditions": list(known.values())}


def _field(one: Object, path: str) -> Any:
    for part in path.split("."):
        one = one.get(part, {})
    return one


def listed(provider: KubernetesProvider, now: float = NOW + 10) -> list[Instance]:
    return list(provider.list("grows", now).instances)
