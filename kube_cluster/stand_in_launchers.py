"""Stand-ins for the launchers of jobs on simulated nodes: each job succeeds after a while, and nothing of it runs.

A thread of the cluster's process exchanges with the service what the launcher in a container does: it claims the worker
with the token of its pod, reports that it lives, and in the end, also after a notice or a deletion of its pod, its log
and exit code. Then the pod ends.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from makeway.launcher.service import AttemptEnded, RequestRejected, Service, ServiceUnavailable

from . import simulated
from .api import Api, ApiProblem, Object

log = logging.getLogger("kube_cluster.launchers")

POLL_SECONDS = 0.5
STOPPED = 75
"""The exit code of a job that ends after a notice."""
RUN_SECONDS = 20.0
"""How long each job takes."""
TEXT = (
    f"This node is simulated: nothing of the job runs. It is called succeeded after {RUN_SECONDS:g} seconds.\n".encode()
)
"""The log of each job."""


@contextmanager
def running(kubeconfig: Path, address: str, namespace: str) -> Iterator[None]:
    """Report for the jobs of a namespace to the service at this address until the end of the block."""
    api, end = Api(kubeconfig), threading.Event()
    launchers: dict[str, Launcher] = {}

    def work() -> None:
        while not end.wait(POLL_SECONDS):
            try:
                _exchange(api, address, namespace, launchers)
            except (ApiProblem, httpx2.HTTPError):  # it is tried again
                continue
            except Exception:  # jobs would be lost
                log.exception("Simulated jobs could not be reported; it is tried again")
        for one in launchers.values():  # connections are those of this thread
            one.close()

    thread = threading.Thread(target=work, name="launchers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        api.close()


def _exchange(api: Api, address: str, namespace: str, launchers: dict[str, Launcher]) -> None:
    nodes = {one["metadata"]["name"] for one in api.items("/api/v1/nodes", labelSelector=simulated.LABEL)}
    path = f"/api/v1/namespaces/{namespace}/pods"
    live = set()
    for pod in api.items(path, labelSelector="makeway/job", fieldSelector="status.phase=Running"):
        uid = pod["metadata"]["uid"]
        terminated = "deletionTimestamp" in pod["metadata"]
        if pod["spec"].get("nodeName") in nodes and (uid in launchers or not terminated):
            live.add(uid)
            if uid not in launchers:
                launchers[uid] = Launcher(_service(api, address, pod))
            if launchers[uid].has_ended(terminated):
                ended = {"metadata": {"annotations": {simulated.EXIT_CODE: "0"}}}
                api.merge(f"{path}/{pod['metadata']['name']}", ended)
    for uid in launchers.keys() - live:
        launchers.pop(uid).close()


def _service(api: Api, address: str, pod: Object) -> Service:
    """Return the service as the worker of a pod reaches it, at an address for programs outside of the cluster."""
    (worker,) = [one for one in pod["spec"]["containers"] if one["name"] == "worker"]
    variables = {one["name"]: one for one in worker["env"]}
    key = variables["MAKEWAY_ATTEMPT_TOKEN"]["valueFrom"]["secretKeyRef"]
    secret = api.get(f"/api/v1/namespaces/{pod['metadata']['namespace']}/secrets/{key['name']}")
    url = address + urlsplit(variables["MAKEWAY_ATTEMPT_URL"]["value"]).path
    return Service(url, base64.b64decode(secret["data"][key["key"]]).decode())


class Launcher:
    """The stand-in for the launcher of one pod."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._instance = secrets.token_hex(16)
        self._began: float | None = None
        self._due = 0.0
        self._over = False

    def has_ended(self, terminated: bool) -> bool:
        """Exchange what is due, and return whether the worker has ended; `terminated`: it has got SIGTERM."""
        try:
            if not self._over:
                self._exchange(terminated)
        except (AttemptEnded, RequestRejected):  # as when it was cancelled
            self._over = True
        except ServiceUnavailable:  # it is tried again
            return False
        return self._over

    def close(self) -> None:
        """Close the connection to the service."""
        self._service.close()

    def _exchange(self, terminated: bool) -> None:
        now = time.time()
        if self._began is None or self._service.expired:
            self._service.post("claim", {"instance": self._instance})
            self._began = self._began or now
        orders = self._service.orders("", 0)
        noticed = bool(terminated or orders.get("stop") or orders.get("notice"))
        if noticed or now >= self._began + RUN_SECONDS:
            self._service.append("log", 0, TEXT, dropped=False)
            end = {"exit_code": STOPPED if noticed else 0, "acknowledged": noticed, "ended_at": now}
            self._service.post("report", {"started_at": self._began, "noticed": noticed, "exit": end})
            self._over = True
        elif now >= self._due:
            receipt = self._service.post("report", {"started_at": self._began})
            self._due = now + float(receipt["heartbeat"])
