"""Enforce network policies on the real nodes of a cluster, as a network plugin does.

A process of the cluster on this machine. It hears of pods by `cni_policies.py`, which waits for it: the filter knows a
pod before its first container starts. It watches policies, namespaces and the labels of pods, and loads the filter of
`packet_filter.py` into the network namespace of each node.
"""

from __future__ import annotations

import json
import socketserver
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from . import processes
from .api import Api, Object
from .control_plane import ControlPlane
from .folder import Folder
from .network import NAMESPACES, Network
from .packet_filter import Endpoint, Port, filter_of

ROOT = Path(__file__).resolve().parent.parent
POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"
ALL_NAMESPACES = "/api/v1/namespaces"
DNS_SERVICE = "/api/v1/namespaces/kube-system/services/kube-dns"
DNS_PODS = "makeway.test/dns-pods"
"""The annotation of the DNS's Service with namespace and port of its pods, such as openshift-dns:5353."""
USUAL_DNS_PODS = "kube-system:53"
READY_SECONDS = 180.0
WATCH_SECONDS = 300
PAUSE = 1.0


def socket_of(folder: Folder) -> Path:
    """Return the socket by which nodes report their pods."""
    return folder.path / "policies.sock"


def start(folder: Folder, plane: ControlPlane, network: Network, dns_port: int) -> None:
    """Start to enforce policies; the DNS on this machine counts as a pod of kube-system that listens on port 53.

    The annotation DNS_PODS of its Service says otherwise, from the next change of a policy or namespace on.
    """
    command = [sys.executable, "-m", __name__, plane.kubeconfig, socket_of(folder), network.number, dns_port]
    processes.start(folder, "policies", [str(part) for part in command], {"PYTHONPATH": str(ROOT)})
    processes.wait_until(
        socket_of(folder).exists, "The enforcement of policies", READY_SECONDS, lambda: processes.check(folder)
    )


class Enforcer:
    """The pods, policies and namespaces of a cluster, and the filter that follows from them."""

    def __init__(self, api: Api, network: Network, dns_port: int) -> None:
        self._api, self._network, self._dns_port = api, network, dns_port
        self._dns = dns_endpoint({}, network.host, dns_port)
        self._lock = threading.Lock()
        self._pods: dict[str, Endpoint] = {}
        """by the ids of their sandboxes"""
        self._names: dict[str, str] = {}
        """the pod of each sandbox"""
        self._watched: set[str] = set()
        """nodes whose pods are watched"""
        self._policies: list[Object] = []
        self._labels: dict[str, Mapping[str, str]] = {}
        """of namespaces, by their names"""
        self._loaded: dict[Path, str] = {}

    def add(self, sandbox: str, path: str, address: str) -> None:
        """Load the filter with one more pod."""
        result = endpoint(self._api.get(path), address)
        with self._lock:
            for other in [key for key, pod in self._pods.items() if pod.address == address]:  # its node forgot it
                del self._pods[other], self._names[other]
            self._pods[sandbox], self._names[sandbox] = result, path
            self._read()
            self._load()

    def remove(self, sandbox: str) -> None:
        """Load the filter without a pod; nothing to do when it is not known."""
        with self._lock:
            if self._pods.pop(sandbox, None) is not None:
                del self._names[sandbox]
                self._load()

    def load(self) -> None:
        """Load the filter that follows from the policies and namespaces of now."""
        with self._lock:
            self._read()
            self._load()

    def follow_pods(self, node: str) -> None:
        """Follow changes of pods on a node, from now on."""
        with self._lock:
            if node in self._watched:
                return
            self._watched.add(node)
        watch(self._api, "/api/v1/pods", self._pod_changed, fieldSelector=f"spec.nodeName={node}")

    def _pod_changed(self, item: Object) -> None:
        path = pod_path(item["metadata"]["namespace"], item["metadata"]["name"])
        with self._lock:
            for sandbox in [key for key, name in self._names.items() if name == path]:
                fresh = endpoint(item, self._pods[sandbox].address)
                if fresh != self._pods[sandbox]:
                    self._pods[sandbox] = fresh
                    self._load()

    def _read(self) -> None:
        self._policies = self._api.items(POLICIES)
        namespaces = [item["metadata"] for item in self._api.items(ALL_NAMESPACES)]
        self._labels = {item["name"]: item.get("labels") or {} for item in namespaces}
        self._dns = dns_endpoint(self._api.get(DNS_SERVICE), self._network.host, self._dns_port)

    def _load(self) -> None:
        text = filter_of(self._policies, self._labels, [self._dns, *self._pods.values()])
        for namespace in NAMESPACES.glob(f"{self._network.bridge}-*"):
            if self._loaded.get(namespace) != text:
                command = ["nsenter", f"--net={namespace}", "nft", "-f", "-"]
                subprocess.run(command, input=text, text=True, check=True)
                self._loaded[namespace] = text


def endpoint(item: Object, address: str) -> Endpoint:
    """Return what policies see of a pod."""
    ports = {
        (port.get("protocol", "TCP"), port["name"]): port["containerPort"]
        for container in item["spec"]["containers"]
        for port in container.get("ports") or ()
        if "name" in port
    }
    return Endpoint(item["metadata"]["namespace"], item["metadata"].get("labels") or {}, address, ports)


def dns_endpoint(service: Object, address: str, port: int) -> Endpoint:
    """Return what policies see of the DNS that listens on a port of this machine."""
    annotations = service.get("metadata", {}).get("annotations") or {}
    namespace, _, pod_port = annotations.get(DNS_PODS, USUAL_DNS_PODS).partition(":")
    ports: dict[Port, int] = {(protocol, int(pod_port)): port for protocol in ("UDP", "TCP")}
    return Endpoint(namespace, {"k8s-app": "kube-dns"}, address, ports)


def pod_path(namespace: str, name: str) -> str:
    """Return the path of a pod."""
    return f"{ALL_NAMESPACES}/{namespace}/pods/{name}"


def watch(api: Api, path: str, on_change: Callable[[Object], None], **query: str) -> None:
    """Call `on_change` for each object of a list, and again when it changes or goes, in a thread of its own."""

    def follow() -> None:
        while True:
            try:
                for event in api.watch(path, WATCH_SECONDS, **query):
                    on_change(event["object"])
            except Exception:  # the API server is away, or a node is being removed: try again
                traceback.print_exc()
            time.sleep(PAUSE)

    threading.Thread(target=follow, daemon=True).start()


def serve(kubeconfig: Path, place: Path, number: int, dns_port: int) -> None:
    """Enforce policies; never returns."""
    api, network = Api(kubeconfig), Network(number)
    enforcer = Enforcer(api, network, dns_port)

    class Report(socketserver.StreamRequestHandler):
        """One pod that came or went."""

        def handle(self) -> None:
            message = json.loads(self.rfile.readline())
            try:
                if message["command"] == "ADD":
                    enforcer.follow_pods(message["node"])
                    path = pod_path(message["namespace"], message["name"])
                    enforcer.add(message["container"], path, message["address"])
                else:
                    enforcer.remove(message["container"])
                self.wfile.write(b"done\n")
            except Exception as problem:  # the pod is not started; the kubelet tries again
                traceback.print_exc()
                self.wfile.write(f"{problem}\n".encode())

    class Reports(socketserver.ThreadingUnixStreamServer):
        """The socket of all nodes."""

        daemon_threads = True

    server = Reports(str(place), Report)
    for path in (POLICIES, ALL_NAMESPACES):
        watch(api, path, lambda _: enforcer.load())
    server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
