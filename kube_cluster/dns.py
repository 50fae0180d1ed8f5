"""Answer the DNS questions of pods: names of Services, and of the pods behind those without an address.

A process of the cluster on this machine; pods ask it by the Service `kube-dns`, as on any cluster. It knows no other
names and no other server, because nothing leaves the machine.
"""

from __future__ import annotations

import socket
import socketserver
import struct
import sys
import threading
import time
from ipaddress import IPv4Address
from pathlib import Path

from . import processes
from .api import Api, Object
from .control_plane import ControlPlane, reserved_port
from .folder import Folder

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "10.96.0.10"
"""The cluster IP of the Service `kube-dns`."""
DOMAIN = "cluster.local"
USER = "system:serviceaccount:kube-system:kube-dns"
"""The API server's bootstrap policy lets it list Services and Endpoints."""
READY_SECONDS = 180.0
KEPT_SECONDS = 0.5
"""How long a list of Services is used."""
TTL = 2
"""Seconds for which a pod may keep an answer."""
HEADER = struct.Struct("!6H")
"""Of a message: its number, flags, and the numbers of questions, answers and two sections that are empty here."""
KIND = struct.Struct("!2H")
RECORD = struct.Struct("!3HIH4s")
A, INTERNET = 1, 1
NAME_OF_QUESTION = 0xC00C
"""A pointer to the name in the question, instead of the name itself."""
ASKED, ANSWERED = 0x0100, 0x8480
"""Flags: recursion is desired; an authoritative answer, and recursion is available."""
NO_ERROR, FAILED, NO_NAME = 0, 2, 3
"""Codes of an answer."""
MAX_LABEL = 63


def start(folder: Folder, plane: ControlPlane, address: str) -> int:
    """Start the name server on this address, make the Service by which pods reach it, and return its port."""
    kubeconfig = plane.authority.kubeconfig(plane.server, USER)
    with reserved_port(address) as port:
        command = [sys.executable, "-m", __name__, str(kubeconfig), address, str(port)]
        processes.start(folder, "dns", command, {"PYTHONPATH": str(ROOT)})
        known = f"kubernetes.default.svc.{DOMAIN}"
        processes.wait_until(
            lambda: bool(ask(address, port, known)), "The DNS", READY_SECONDS, lambda: processes.check(folder)
        )
    protocols = ("UDP", "TCP")
    ports = [{"name": one.lower(), "port": 53, "targetPort": port, "protocol": one} for one in protocols]
    plane.api.create(
        "/api/v1/namespaces/kube-system/services",
        {
            "metadata": {"name": "kube-dns", "labels": {"k8s-app": "kube-dns"}},
            "spec": {"clusterIP": ADDRESS, "ports": ports},
        },
    )
    plane.api.create(
        "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices",
        {
            "metadata": {"name": "kube-dns", "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address]}],
            "ports": [{"name": one.lower(), "port": port, "protocol": one} for one in protocols],
        },
    )
    return port


def ask(address: str, port: int, name: str) -> list[str]:
    """Return the addresses of a name; none where it has none, or nothing answers."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(1)
        try:
            message = HEADER.pack(1, ASKED, 1, 0, 0, 0) + labels + b"\0" + KIND.pack(A, INTERNET)
            asking.sendto(message, (address, port))
            answer = asking.recv(4096)
        except OSError:
            return []
    records = answer[len(message) :]
    return [str(IPv4Address(packed)) for *_, packed in RECORD.iter_unpack(records)]


class Names:
    """The names of a cluster, from lists of its Services and Endpoints that are at most half a second old."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._read_at = -KEPT_SECONDS
        self._services: dict[tuple[str, str], str] = {}
        self._pods: dict[tuple[str, str], list[Object]] = {}

    def find(self, name: str) -> list[str] | None:
        """Return the addresses of a name in lower case, without the dot at its end; None where it has none."""
        host, domain, rest = name.partition(f".svc.{DOMAIN}")
        parts = host.split(".")
        if not domain or rest or len(parts) not in (2, 3):
            return None
        with self._lock:
            if time.monotonic() - self._read_at > KEPT_SECONDS:
                self._read()
            service = (parts[-1], parts[-2])
            address, pods = self._services.get(service), self._pods.get(service, [])
        if address is None:
            return None
        if len(parts) == 3:
            return [pod["ip"] for pod in pods if pod.get("hostname") == parts[0]] or None
        return [pod["ip"] for pod in pods] if address in ("", "None") else [address]

    def _read(self) -> None:
        self._services = {_key(one): one["spec"].get("clusterIP", "") for one in self._api.items("/api/v1/services")}
        self._pods = {
            _key(one): [pod for subset in one.get("subsets") or () for pod in subset.get("addresses") or ()]
            for one in self._api.items("/api/v1/endpoints")
        }
        self._read_at = time.monotonic()


def _key(item: Object) -> tuple[str, str]:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def reply(names: Names, message: bytes) -> bytes:
    """Return the answer to a message of one question; IndexError, struct.error or ValueError for anything else."""
    number, flags, questions, *_ = HEADER.unpack_from(message)
    labels, at = [], HEADER.size
    while length := message[at]:
        if questions != 1 or length > MAX_LABEL:
            raise ValueError("A message of one question is expected.")
        labels.append(message[at + 1 : at + 1 + length].decode("ascii").lower())
        at += 1 + length
    at += 1
    kind, _ = KIND.unpack_from(message, at)
    try:
        result = names.find(".".join(labels))
        code = NO_NAME if result is None else NO_ERROR
    except Exception as problem:  # the API server does not answer: the resolver asks again
        print(f"{'.'.join(labels)}: {problem}", file=sys.stderr, flush=True)
        result, code = None, FAILED
    addresses = result if result and kind == A else []
    records = [RECORD.pack(NAME_OF_QUESTION, A, INTERNET, TTL, 4, IPv4Address(one).packed) for one in addresses]
    head = HEADER.pack(number, ANSWERED | flags & ASKED | code, 1, len(records), 0, 0)
    return head + message[HEADER.size : at + KIND.size] + b"".join(records)


def serve(kubeconfig: Path, address: str, port: int) -> None:
    """Answer by UDP and TCP; never returns."""
    names = Names(Api(kubeconfig))

    class Datagram(socketserver.BaseRequestHandler):
        """One question by UDP."""

        def handle(self) -> None:
            message, asking = self.request
            asking.sendto(reply(names, message), self.client_address)

    class Stream(socketserver.StreamRequestHandler):
        """Questions by TCP, each after its length."""

        def handle(self) -> None:
            while len(size := self.rfile.read(2)) == 2:
                answer = reply(names, self.rfile.read(int.from_bytes(size)))
                self.wfile.write(len(answer).to_bytes(2) + answer)

    class Streams(socketserver.ThreadingTCPServer):
        """The server for TCP, on the port that was reserved for it."""

        allow_reuse_port = True
        daemon_threads = True

    by_stream = Streams((address, port), Stream)
    threading.Thread(target=by_stream.serve_forever, daemon=True).start()
    socketserver.ThreadingUDPServer((address, port), Datagram).serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
