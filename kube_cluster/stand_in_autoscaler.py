"""A small cluster autoscaler: adds simulated nodes for pods that fit nowhere, and removes those that nothing keeps.

For the portal of `make run-kube`, and for tests. It writes the events and taints of Cluster Autoscaler, which itself is
not to be had here: TriggeredScaleUp and NotTriggerScaleUp, ToBeDeletedByClusterAutoscaler. Pods with the annotation
safe-to-evict "false" keep their node. ProvisioningRequests are answered where `booking` is given.
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType

import httpx2

from . import simulated
from .api import GPU, Api, ApiProblem, Object
from .stand_in_provisioning import CONSUMES, StandInProvisioning, gpus_of

POOL = "makeway.test/pool"
TYPE = "node.kubernetes.io/instance-type"
SAFE = "cluster-autoscaler.kubernetes.io/safe-to-evict"
PRIORITY_CUTOFF = -10
"""Cluster Autoscaler ignores pods of a lower priority, and lets nodes go on which only such run"""
NEW_POD_SCALE_UP_DELAY = 2.0
"""Seconds for which a pod has to be unschedulable, as with Cluster Autoscaler's option of that name.

The scheduler may say so just before it nominates the pod to the node of a placeholder that it preempts.
"""

PASSING = (404, 429)
"""The refusals after which it looks again: what it looked at is gone, or its kind is only just served"""


class StandInAutoscaler:
    """Groups of nodes by the instance type of their label, with the GPUs of a node and the most nodes of the group."""

    def __init__(
        self,
        api: Api,
        pool: str,
        groups: dict[str, tuple[int, int]],
        boot: float = 1.0,
        unneeded: float = 3.0,
        booking: float | None = None,
    ) -> None:
        """`boot`: seconds until the device plugin of a new node shows its GPUs; `unneeded`: until an empty one goes.

        `booking`: seconds for which a ProvisioningRequest keeps its node; None: the cluster has no such requests.
        """
        self.api, self.pool, self.groups, self.boot, self.unneeded = api, pool, groups, boot, unneeded
        self.added: list[str] = []
        self.removed: list[str] = []
        self.failures: list[Exception] = []
        self._numbers = itertools.count(1)
        self._for: dict[str, str] = {}
        """pods by UID for which a node was added"""
        self._unschedulable_since: dict[str, float] = {}
        self._refused: set[str] = set()
        self._empty_since: dict[str, float] = {}
        self._without_gpus: dict[str, tuple[float, int]] = {}
        self._provisioning: StandInProvisioning | None = None
        if booking is not None:
            self._provisioning = StandInProvisioning(api, (POOL, pool), self._grow, booking)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoscaler")

    def __enter__(self) -> StandInAutoscaler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        for name in set(self.added) - set(self.removed):
            with suppress(ApiProblem, httpx2.HTTPError):
                self.api.delete(f"/api/v1/nodes/{name}")

    def _run(self) -> None:
        while not self._stop.wait(0.3):
            try:
                self._scan()
            except (ApiProblem, httpx2.HTTPError) as error:
                if not isinstance(error, ApiProblem) or error.status not in PASSING:
                    self.failures.append(error)

    def _scan(self) -> None:
        pods = self.api.items("/api/v1/pods")
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if not self._waits(pod):
                self._unschedulable_since.pop(uid, None)
            elif uid not in self._for:
                since = self._unschedulable_since.setdefault(uid, time.monotonic())
                if time.monotonic() - since >= NEW_POD_SCALE_UP_DELAY:
                    self._scale_up(pod)
        if self._provisioning is not None:
            self._provisioning.scan()
        self._finish_boots()
        self._scale_down(pods)

    def _waits(self, pod: Object) -> bool:
        conditions = pod["status"].get("conditions", ())
        unschedulable = any(one.get("reason") == "Unschedulable" for one in conditions)
        ours = pod["spec"].get("nodeSelector", {}).get(POOL) == self.pool
        consumes = CONSUMES in pod["metadata"].get("annotations", {})
        if pod["status"].get("nominatedNodeName"):  # it preempts a pod of a lower priority, as a placeholder
            return False
        return unschedulable and ours and not consumes and pod["spec"].get("priority", 0) >= PRIORITY_CUTOFF

    def _scale_up(self, pod: Object) -> None:
        wanted, uid = pod["spec"]["nodeSelector"].get(TYPE, ""), pod["metadata"]["uid"]
        name = self._grow(pod)
        if name is None:
            if uid not in self._refused:
                self._refused.add(uid)
                self._say(pod, "NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached")
            return
        self._for[uid] = name
        self._say(
            pod, "TriggeredScaleUp", f"pod triggered scale-up: [{{{wanted} 0->1 (max: {self.groups[wanted][1]})}}]"
        )

    def _grow(self, pod: Object) -> str | None:
        """Add a node on which a pod fits; return its name, None where its group cannot grow."""
        wanted = pod["spec"]["nodeSelector"].get(TYPE, "")
        gpus, maximum = self.groups.get(wanted, (0, 0))
        if len(self._nodes_of(wanted)) >= maximum or gpus_of(pod) > gpus:
            return None
        name = f"auto-{wanted}-{next(self._numbers)}"
        node = simulated.node(name, 0, "NVIDIA-H100-80GB-HBM3")
        node["metadata"]["labels"] |= {POOL: self.pool, TYPE: wanted}
        self.api.create("/api/v1/nodes", node)
        self.added.append(name)
        self._without_gpus[name] = time.monotonic() + self.boot, gpus
        return name

    def _nodes_of(self, kind: str) -> list[Object]:
        return self.api.items("/api/v1/nodes", labelSelector=f"{POOL}={self.pool},{TYPE}={kind}")

    def _finish_boots(self) -> None:
        for name, (due, gpus) in list(self._without_gpus.items()):
            if time.monotonic() >= due and simulated.is_ready(self.api.get(f"/api/v1/nodes/{name}")):
                room = {GPU: str(gpus)}
                self.api.merge(f"/api/v1/nodes/{name}/status", {"status": {"allocatable": room, "capacity": room}})
                del self._without_gpus[name]

    def _scale_down(self, pods: list[Object]) -> None:
        for name in [one for one in self.added if one not in self.removed]:
            kept = any(
                pod["spec"].get("nodeName") == name
                and (pod["metadata"].get("annotations", {}).get(SAFE) == "false" or gpus_of(pod))
                for pod in pods
            ) or (self._provisioning is not None and name in self._provisioning.reserved())
            if kept or name in self._without_gpus or any(self._for.get(p["metadata"]["uid"]) == name for p in pods):
                self._empty_since.pop(name, None)
                continue
            if time.monotonic() - self._empty_since.setdefault(name, time.monotonic()) > self.unneeded:
                taints = self.api.get(f"/api/v1/nodes/{name}")["spec"].get("taints", [])
                leaving = {"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}
                self.api.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": [*taints, leaving]}})
                time.sleep(1.0)
                self.api.delete(f"/api/v1/nodes/{name}")
                self.removed.append(name)

    def _say(self, pod: Object, reason: str, message: str) -> None:
        create_event(self.api, pod, reason, message, "cluster-autoscaler")


def create_event(api: Api, pod: Object, reason: str, message: str, component: str) -> None:
    """Create an event of a pod as an autoscaler of that name does."""
    metadata, now = pod["metadata"], datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"]}
    event = {
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
        "involvedObject": about | {"namespace": metadata["namespace"]},
        "reason": reason,
        "message": message,
        "type": "Normal",
        "source": {"component": component},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    api.create(f"/api/v1/namespaces/{metadata['namespace']}/events", event)
