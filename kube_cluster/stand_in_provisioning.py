"""ProvisioningRequests as Cluster Autoscaler answers them, for the stand-in autoscaler: their conditions and bookings.

A request of the class `best-effort-atomic-scale-up` is provisioned as soon as a node is asked for, long before it has
joined, and its capacity is kept for ten minutes; without a group that can grow, Provisioned is false until the next
try. One of `check-capacity` adds no node: it is provisioned where a node has the room now.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from .api import GPU, Api, Object

GROUP = "autoscaling.x-k8s.io"
REQUESTS = f"/apis/{GROUP}/v1/provisioningrequests"
CONSUMES = f"{GROUP}/consume-provisioning-request"
ATOMIC, CHECK = f"best-effort-atomic-scale-up.{GROUP}", f"check-capacity.{GROUP}"
RETRY_SECONDS = 60.0


class StandInProvisioning:
    """The requests of one pool. `grow` adds a node for a pod and returns its name, None where no group can grow."""

    def __init__(
        self, api: Api, selector: tuple[str, str], grow: Callable[[Object], str | None], booking: float
    ) -> None:
        """`selector`: the label of the pool's nodes; `booking`: seconds for which capacity is kept."""
        self._api, self._selector, self._grow, self._booking = api, selector, grow, booking
        self._booked: dict[str, tuple[str, float]] = {}
        """nodes by the UID of their request, and until when"""
        self._next_try: dict[str, float] = {}

    def scan(self) -> None:
        """Answer the requests that are new, or due again, and let old bookings expire."""
        requests = self._api.items(REQUESTS)
        known = {one["metadata"]["uid"] for one in requests}
        self._booked = {uid: booked for uid, booked in self._booked.items() if uid in known}
        for request in requests:
            uid, conditions = request["metadata"]["uid"], conditions_of(request)
            if conditions.get("Provisioned") == "True":
                if "BookingExpired" not in conditions and time.monotonic() >= self._booked[uid][1]:
                    self._set(request, "BookingExpired", "True", "CapacityReservationTimeExpired", "Its time is over")
            elif "Failed" not in conditions and time.monotonic() >= self._next_try.get(uid, 0.0):
                self._decide(request)

    def reserved(self) -> set[str]:
        """Return the nodes that are kept for requests."""
        return {node for node, until in self._booked.values() if time.monotonic() < until}

    def _decide(self, request: Object) -> None:
        metadata, spec = request["metadata"], request["spec"]
        name = spec["podSets"][0]["podTemplateRef"]["name"]
        template = self._api.get(f"/api/v1/namespaces/{metadata['namespace']}/podtemplates/{name}")["template"]
        key, value = self._selector
        if template["spec"].get("nodeSelector", {}).get(key) != value:
            return
        if spec["provisioningClassName"] not in (ATOMIC, CHECK):
            return
        request = self._set(request, "Accepted", "True", "Accepted", "ProvisioningRequest is accepted")
        pod = {"metadata": metadata, "spec": template["spec"]}
        node = self._free_node(pod) or (self._grow(pod) if spec["provisioningClassName"] == ATOMIC else None)
        if node is not None:
            self._booked[metadata["uid"]] = node, time.monotonic() + self._booking
            self._set(request, "Provisioned", "True", "CapacityIsProvisioned", "Capacity is provisioned")
            return
        self._next_try[metadata["uid"]] = time.monotonic() + RETRY_SECONDS
        why = "Capacity is not found, it is looked for again later."
        self._set(request, "Provisioned", "False", "CapacityIsNotFound", why)

    def _free_node(self, pod: Object) -> str | None:
        """Return a node with the labels and the GPUs of a pod that nothing uses."""
        labels = ",".join(f"{key}={value}" for key, value in pod["spec"]["nodeSelector"].items())
        used: dict[str, int] = {}
        for one in self._api.items("/api/v1/pods"):
            if "nodeName" in one["spec"]:
                used[one["spec"]["nodeName"]] = used.get(one["spec"]["nodeName"], 0) + gpus_of(one)
        for node in self._api.items("/api/v1/nodes", labelSelector=labels):
            name = node["metadata"]["name"]
            room = int(node["status"].get("allocatable", {}).get(GPU, 0)) - used.get(name, 0)
            if room >= gpus_of(pod) > 0 and name not in self.reserved():
                return str(name)
        return None

    def _set(self, request: Object, kind: str, status: str, reason: str, message: str) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        added = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now}
        others = [one for one in request.get("status", {}).get("conditions", ()) if one["type"] != kind]
        metadata = request["metadata"]
        path = f"/apis/{GROUP}/v1/namespaces/{metadata['namespace']}/provisioningrequests/{metadata['name']}/status"
        return self._api.merge(path, {"status": {"conditions": [*others, added]}})


def conditions_of(request: Object) -> dict[str, str]:
    """Return the status of each condition of a request."""
    return {one["type"]: one["status"] for one in request.get("status", {}).get("conditions", ())}


def gpus_of(pod: Object) -> int:
    """Return the GPUs that the containers of a pod have together."""
    return sum(int(one.get("resources", {}).get("limits", {}).get(GPU, 0)) for one in pod["spec"]["containers"])
