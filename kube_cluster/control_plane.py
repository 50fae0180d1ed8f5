"""Start etcd, the API server with RBAC, the controller manager and the scheduler of one cluster.

None of them needs privileges on the machine. etcd listens on a socket in the cluster's folder only, the controller
manager and the scheduler do not listen at all.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import processes, programs
from .api import Api, ApiProblem
from .certificates import MASTERS, Authority
from .folder import Folder
from .problems import KubeProblem

LOOPBACK = "127.0.0.1"
PORT = 6443
"""Of the API server, where it has an address of its own: network policies name it."""
SERVICE_CIDR = "10.96.0.0/16"
KUBERNETES_SERVICE = "10.96.0.1"
"""The cluster IP of the Service `kubernetes`, by which pods reach the API server."""
READY_SECONDS = 300.0
AUDIT_LOG = "audit.log"
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}
"""What the API server writes down: the requests of service accounts, without those of the controllers."""


@dataclass(slots=True)
class ControlPlane:
    """A running control plane, its certificate authority, and the API as its administrator sees it."""

    authority: Authority
    server: str
    """the URL of the API server"""
    kubeconfig: Path
    """of the administrator"""
    api: Api


def start(folder: Folder, address: str = LOOPBACK) -> ControlPlane:
    """Start the control plane with its API server on this address and return it once pods can be created."""
    result = programs.control_plane()
    authority = Authority(folder.path / "pki")
    names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    serving = authority.server_certificate(
        "api-server", "kube-apiserver", [*names, LOOPBACK, address, KUBERNETES_SERVICE]
    )
    tokens = authority.service_account_keys()
    _start_etcd(folder, result["etcd"])
    with reserved_port(address, 0 if address == LOOPBACK else PORT) as port:
        server = f"https://{address}:{port}"
        _start_api_server(folder, result["kube-apiserver"], (address, port), authority, serving, tokens)
        kubeconfig = authority.kubeconfig(server, "admin", MASTERS)
        api = Api(kubeconfig)
        folder.at_end.callback(api.close)
        processes.wait_until(api.ready, "The API server", READY_SECONDS, lambda: processes.check(folder))
    # They need the bootstrap RBAC policy, which the API server creates before it is ready.
    _start_controller_manager(folder, result["kube-controller-manager"], authority, server, tokens[0])
    _start_scheduler(folder, result["kube-scheduler"], authority, server)
    manager = "The controller manager"
    processes.wait_until(lambda: _has_service_account(api), manager, READY_SECONDS, lambda: processes.check(folder))
    return ControlPlane(authority, server, kubeconfig, api)


def _start_etcd(folder: Folder, program: Path) -> None:
    client, peer = (f"unix://{folder.path}/{name}.sock" for name in ("etcd", "etcd-peer"))
    options = {
        "name": "one",
        "data-dir": folder.path / "etcd",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"one={peer}",
        "log-level": "warn",
    }
    processes.start(folder, "etcd", [program, *_options(options), "--unsafe-no-fsync"])


def _start_api_server(
    folder: Folder,
    program: Path,
    place: tuple[str, int],
    authority: Authority,
    serving: tuple[Path, Path],
    tokens: tuple[Path, Path],
) -> None:
    kubelets = authority.client_certificate("kube-apiserver-kubelet-client", MASTERS)
    address, port = place
    options = {
        "etcd-servers": f"unix://{folder.path}/etcd.sock",
        "bind-address": address,
        "advertise-address": address,
        "secure-port": port,
        "permit-port-sharing": "true",  # with the socket that reserves the port
        # The Service `kubernetes` may not have a loopback address as endpoint; without a real node, no pod uses it.
        "endpoint-reconciler-type": "none" if address == LOOPBACK else "lease",
        "tls-cert-file": serving[0],
        "tls-private-key-file": serving[1],
        "client-ca-file": authority.file,
        "kubelet-client-certificate": kubelets[0],
        "kubelet-client-key": kubelets[1],
        "kubelet-certificate-authority": authority.file,
        "kubelet-preferred-address-types": "InternalIP",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-signing-key-file": tokens[0],
        "service-account-key-file": tokens[1],
        "service-cluster-ip-range": SERVICE_CIDR,
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "anonymous-auth": "false",
        "allow-privileged": "true",
    }
    policy = folder.path / "audit.json"
    policy.write_text(json.dumps(AUDIT), encoding="utf-8")
    options |= {"audit-policy-file": policy, "audit-log-path": folder.logs / AUDIT_LOG}
    processes.start(folder, "kube-apiserver", [program, *_options(options)])


def _start_controller_manager(
    folder: Folder, program: Path, authority: Authority, server: str, signing_key: Path
) -> None:
    kubeconfig = authority.kubeconfig(server, "system:kube-controller-manager")
    options = {
        "kubeconfig": kubeconfig,
        "service-account-private-key-file": signing_key,
        "root-ca-file": authority.file,
        "cluster-signing-cert-file": authority.file,
        "cluster-signing-key-file": authority.file.with_suffix(".key"),
        "use-service-account-credentials": "true",
        "leader-elect": "false",
        "secure-port": 0,
        "kube-api-qps": 200,  # with 20, its default, a thousand new nodes stay tainted for a minute
        "kube-api-burst": 400,
        "flex-volume-plugin-dir": folder.path / "volume-plugins",  # else it makes one in /usr
    }
    processes.start(folder, "kube-controller-manager", [program, *_options(options)])


def _start_scheduler(folder: Folder, program: Path, authority: Authority, server: str) -> None:
    kubeconfig = authority.kubeconfig(server, "system:kube-scheduler")
    options = {"kubeconfig": kubeconfig, "leader-elect": "false", "secure-port": 0}
    processes.start(folder, "kube-scheduler", [program, *_options(options)])


def _has_service_account(api: Api) -> bool:
    """Whether the controller manager has made the default service account, without which no pod is admitted."""
    try:
        api.get("/api/v1/namespaces/default/serviceaccounts/default")
    except ApiProblem as problem:
        if problem.status != 404:
            raise KubeProblem(f"The API server refused its administrator: {problem}") from problem
        return False
    return True


@contextmanager
def reserved_port(address: str, wanted: int = 0) -> Iterator[int]:
    """Yield a TCP port of this address that no other program gets meanwhile, unless it shares ports on purpose.

    It is the wanted one, where that is free.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            reservation.bind((address, wanted))
        except OSError:
            reservation.bind((address, 0))
        yield int(reservation.getsockname()[1])


def _options(options: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]
