"""A whole portal whose notebooks are pods of the test cluster: a real Hub, proxy and quota service.

The simulated nodes run no processes, so a program of this test answers for every notebook server.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jupyterhub
import yaml
from hub.portal import Portal
from pods import PODS, phase, simulated_pod, wait_until

from kube_cluster import simulated
from kube_cluster.api import GPU, Api, Object
from kube_cluster.cluster import Cluster

CONFIG = """
from makeway_spawner.kube import MakewayKubeSpawner
local = c.MakewayLocalSpawner
c.JupyterHub.spawner_class = MakewayKubeSpawner
c.MakewayKubeSpawner.makeway_api_url = local.makeway_api_url
c.MakewayKubeSpawner.makeway_url = local.makeway_url
c.MakewayKubeSpawner.makeway_token = local.makeway_token
c.MakewayKubeSpawner.makeway_public_path = local.makeway_public_path
c.MakewayKubeSpawner.renew_seconds = local.renew_seconds
c.KubeSpawner.namespace = "default"
c.KubeSpawner.image = "none"
c.KubeSpawner.cmd = ["jupyterhub-singleuser"]
c.KubeSpawner.node_selector = {{"type": "kwok"}}
c.KubeSpawner.start_timeout = 20
c.KubeSpawner.get_pod_url = lambda spawner, pod: "http://127.0.0.1:{port}"
c.Spawner.poll_interval = 1
c.JupyterHub.cleanup_servers = False
{more}
"""


class Line:
    """A TCP connection from the Hub to the API server that can be cut."""

    def __init__(self, kubeconfig: Path, copy: Path) -> None:
        """Write a copy of the kubeconfig that leads through this line."""
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        cluster = config["clusters"][0]["cluster"]
        url = urlsplit(cluster["server"])
        self._target = (str(url.hostname), int(url.port or 443))
        self._listener = socket.create_server(("127.0.0.1", 0))
        cluster["server"] = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        copy.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._whole = True
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections and refuse new ones."""
        self._whole = False
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Allow connections again."""
        self._whole = True

    def close(self) -> None:
        """End everything."""
        self.cut()
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                if not self._whole:
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                for one, other in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._pass_on, args=(one, other), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        self._open.add(one)
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
        self._open.discard(one)
        one.close()


class Servers(ThreadingHTTPServer):
    """What answers for the notebook servers; not `up`: they are still starting."""

    up = True


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Servers)
        self.send_response(200 if self.server.up else 503)
        self.send_header("X-JupyterHub-Version", jupyterhub.__version__)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Notebooks(Portal):
    """The portal; `pods` are those of its notebooks."""

    api: Api
    line: Line
    servers: Servers

    def begin(self, user: str, server: str = "", **options: Any) -> None:
        """Have the Hub start a server."""
        path = f"/users/{user}/server{'s/' + server if server else ''}"
        answer = self.hub("POST", path, json=options)
        assert answer.is_success, answer.text

    def starting(self, user: str, server: str = "") -> bool:
        """Whether a server is starting."""
        return (self.server(user, server) or {}).get("pending") == "spawn"

    def running(self, user: str, server: str = "", **options: Any) -> Object:
        """Start a server and return its pod once the Hub says that it is ready."""
        self.begin(user, server, **options)
        wait_until(lambda: not self.starting(user, server), f"{user}'s server has started or failed")
        assert (self.server(user, server) or {}).get("ready"), self.log[-5000:]
        (pod,) = [one for one in self.pods() if self.owner(one) == (user, server)]
        return pod

    def stop_server(self, user: str, server: str = "") -> None:
        """Have the Hub stop a server; return once it is stopped."""
        self.hub("DELETE", f"/users/{user}/server{'s/' + server if server else ''}")
        wait_until(lambda: not self.server(user, server), f"{user}'s server has stopped")

    def clear(self) -> None:
        """Stop all servers; neither a pod nor a session is left."""
        for user in ("ana", "bo", "lea"):
            for name in self.hub("GET", f"/users/{user}").json().get("servers", {}):
                self.stop_server(user, name)
        wait_until(lambda: not self.pods() and not self.live_sessions(), "neither a pod nor a session is left")

    def pods(self) -> list[Object]:
        """Return the pods of notebooks."""
        return self.api.items(PODS, labelSelector="component=singleuser-server")

    def owner(self, pod: Object) -> tuple[str, str]:
        """Return the user and the server's name of a pod."""
        annotations = pod["metadata"]["annotations"]
        return annotations["makeway/owner"], annotations.get("hub.jupyter.org/servername", "")


def add_nodes(cluster: Cluster, names: Sequence[str], **labels: str) -> None:
    """Add simulated nodes with 5 GPUs each, tainted as nodes with GPUs often are; `cluster` simulates some already."""
    simulated.add(cluster.folder, cluster.api, list(names), gpus=5, model="virtual")
    taints = [
        {"key": simulated.SIMULATED, "value": "fake", "effect": "NoSchedule"},
        {"key": GPU, "value": "present", "effect": "NoSchedule"},
    ]
    for name in names:
        cluster.api.merge(f"/api/v1/nodes/{name}", {"metadata": {"labels": labels}, "spec": {"taints": taints}})


@contextmanager
def full(api: Api, nodes: Sequence[str], gpus: int = 5) -> Iterator[None]:
    """Have the pods of others use GPUs of these nodes, by default all."""
    names = [f"other-{node}" for node in nodes]
    for name, node in zip(names, nodes, strict=True):
        pod = simulated_pod(name, gpus=gpus)
        pod["spec"]["tolerations"].append({"key": GPU, "operator": "Exists"})
        pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] = node
        api.create(PODS, pod)
    wait_until(lambda: all(phase(api, name) == "Running" for name in names), "the GPUs are used")
    try:
        yield
    finally:
        for name in names:
            api.delete(f"{PODS}/{name}", gracePeriodSeconds="0")


@contextmanager
def notebooks(root: Path, cluster: Cluster, more: str = "", **settings: str) -> Iterator[Notebooks]:
    """Run a portal whose Hub reaches the API server by a line of its own; `settings` are variables of its service."""
    server = Servers(("127.0.0.1", 0), _Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    line = Line(cluster.kubeconfig, root / "kubeconfig")
    env = {
        "KUBECONFIG": str(root / "kubeconfig"),
        "MAKEWAY_LEASE_SECONDS": "6",
        **settings,
    }
    portal = Notebooks(root, CONFIG.format(port=server.server_address[1], more=more), **env)
    portal.api, portal.line, portal.servers = cluster.api, line, server
    try:
        yield portal.start()
    finally:
        portal.stop()
        line.close()
        server.shutdown()
        server.server_close()
        thread.join()
