"""A real node: kubelet, containerd, runc and CNI in namespaces and cgroups of its own.

The GPUs are virtual, from our device plugin. Needs root; several nodes may run on one machine.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cgroups, cni_policies, dns, images, policies, processes, programs
from .api import GPU
from .commands import missing_packages, run, succeeds
from .control_plane import ControlPlane
from .folder import Folder
from .network import NAMESPACES, Network, add_node
from .problems import KubeProblem, NotHere
from .simulated import is_ready

ROOT = Path(__file__).resolve().parent.parent
CNI = ("/usr/lib/cni", "/opt/cni/bin")
PACKAGES = {
    "containerd": ("containerd",),
    "runc": ("runc",),
    "containernetworking-plugins": tuple(f"{folder}/bridge" for folder in CNI),
    "iproute2": ("ip",),
    "nftables": ("nft",),
    "iptables": ("iptables",),
    "conntrack": ("conntrack",),
}
"""Debian's packages for a real node, each with the programs of which one must be there."""
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Capabilities that root may lack in a container, with their numbers in linux/capability.h."""
READY_SECONDS = 300.0
UNHEALTHY = "unhealthy-gpus"
POLICIES = "makeway-policies"
"""The CNI plugin of ours."""
BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
"""Only there where the kernel can filter what one pod of a node sends to another."""


def check_machine() -> None:
    """Raise NotHere with one sentence when this machine cannot run a real node."""
    if os.geteuid() != 0:
        raise NotHere("A real node needs root: run the same command as root, for example with sudo.")
    if lacking := [name for name, bit in CAPABILITIES.items() if not effective_capabilities() >> bit & 1]:
        raise NotHere(f"A real node needs capabilities that this container lacks: {', '.join(lacking)}.")
    cgroups.plan("x")
    if not BRIDGED.exists() and not succeeds(["modprobe", "br_netfilter"]):
        raise NotHere("A real node needs the kernel's module br_netfilter, which this machine does not have.")
    if missing := missing_packages(PACKAGES):
        raise NotHere(f"A real node needs these packages, which `make kube` installs on Debian: {', '.join(missing)}.")


def effective_capabilities() -> int:
    """Return the effective capabilities of this process as a bit mask."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)


def cni_folder() -> Path | None:
    """Return the folder of the CNI plugins, None when they are not installed."""
    return next((Path(folder) for folder in CNI if (Path(folder) / "bridge").exists()), None)


@dataclass(frozen=True, slots=True)
class Node:
    """A running node: its name, its folder and its cluster's folder."""

    name: str
    path: Path
    folder: Folder

    def service(self, program: str) -> int | None:
        """Return the PID of a service of this node, None while it does not run."""
        for pid in processes.marked(self.folder):
            words = _words(pid)
            if words and Path(words[0]).name == program and f"--hostname-override={self.name}" in words:
                return pid
        return None

    def import_image(self, archive: Path) -> None:
        """Add the images of an archive to those of the node's containerd."""
        self._images("import", archive)

    def tag_image(self, name: str, other: str) -> None:
        """Add another name of an image to those of the node's containerd."""
        self._images("tag", "--force", name, other)

    def _images(self, *arguments: str | Path) -> None:
        (containerd,) = [pid for pid in processes.marked(self.folder) if _words(pid)[:3] == self._containerd()]
        run(["nsenter", f"--target={containerd}", "--mount", "ctr", "--namespace", "k8s.io", "images", *arguments])

    def _containerd(self) -> list[str]:
        return ["containerd", "--config", str(self.path / "containerd.toml")]

    def break_gpus(self, *indices: int) -> None:
        """Report these GPUs, and no others, as unhealthy."""
        fresh = self.path / "unhealthy.new"
        fresh.write_text("".join(f"{index}\n" for index in indices), encoding="utf-8")
        fresh.replace(self.path / UNHEALTHY)

    def log(self, service: str) -> str:
        """Return what a service printed."""
        return (self.path / "log" / f"{service}.log").read_text(encoding="utf-8", errors="replace")


def start(folder: Folder, plane: ControlPlane, network: Network, number: int, gpus: int) -> Node:
    """Start a node with this many virtual GPUs and return it when it offers them; 0: it runs no device plugin."""
    check_machine()
    result = programs.built()
    name = f"node-{number}"
    path = folder.path / name
    for part in ("log", "kubelet", "containerd", "pods", "cni", "images", "volume-plugins"):
        (path / part).mkdir(parents=True)
    for part in ("var-lib", "var-log"):
        for layer in ("upper", "work"):
            (path / part / layer).mkdir(parents=True)
    groups = cgroups.plan(f"makeway-{folder.name}-{name}")
    folder.record(cgroups=[*folder.facts().get("cgroups", []), *map(str, groups)])
    cgroups.create(groups)
    add_node(network, number, list(range(number)))
    config = {
        "name": name,
        "folder": str(path),
        "netns": str(NAMESPACES / network.namespace(number)),
        "cgroups": [str(group) for group in groups],
        "hidden": {"/var/lib/kubelet": str(path / "kubelet")},
        "images": _images(path, result / "pause"),
        "services": _services(path, folder, plane, network, number, gpus, result),
    }
    (path / "node.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    command = [sys.executable, "-m", f"{__package__}.node_main", "enter", str(path / "node.json")]
    processes.start(folder, name, command, {"PYTHONPATH": str(ROOT)})

    def ready() -> bool:
        nodes = [one for one in plane.api.items("/api/v1/nodes") if one["metadata"]["name"] == name]
        return any(is_ready(one) and one["status"]["allocatable"].get(GPU, "0") == str(gpus) for one in nodes)

    try:
        processes.wait_until(ready, f"The node {name}", READY_SECONDS, lambda: processes.check(folder))
    except KubeProblem as problem:
        log = processes.last_lines(path / "log" / "kubelet.log")
        raise KubeProblem(f"{problem} The kubelet's last lines:\n{log}") from problem
    return Node(name, path, folder)


def _images(path: Path, pause: Path) -> list[str]:
    files = []
    for name, content in (("pause", images.pause(pause)), ("host", images.host())):
        file = path / "images" / f"{name}.tar"
        file.write_bytes(content)
        files.append(str(file))
    return files


def _services(
    path: Path, folder: Folder, plane: ControlPlane, network: Network, number: int, gpus: int, result: Path
) -> dict[str, list[str]]:
    """Write the configuration of each service and return its command."""
    name, address = f"node-{number}", network.address(number)
    authority = plane.authority
    serving = authority.server_certificate(f"{name}-serving", f"system:node:{name}", [name, address], "system:nodes")
    kubelet = authority.kubeconfig(plane.server, f"system:node:{name}", "system:nodes")
    proxy = authority.kubeconfig(plane.server, "system:kube-proxy")
    _make_plugins(path / "cni-plugins", folder)
    (path / "cni" / "10-makeway.conflist").write_text(json.dumps(_cni(network, number)), encoding="utf-8")
    (path / "containerd.toml").write_text(_containerd(path), encoding="utf-8")
    (path / "kubelet.json").write_text(json.dumps(_kubelet(path, authority.file, serving)), encoding="utf-8")
    (path / "kube-proxy.json").write_text(json.dumps(_kube_proxy(network, proxy)), encoding="utf-8")
    plugin = [sys.executable, "-m", "makeway_device_plugin", "--count", str(gpus)]
    own = f"--hostname-override={name}"
    return {
        "containerd": ["containerd", "--config", str(path / "containerd.toml")],
        "kube-proxy": [str(result / "kube-proxy"), f"--config={path}/kube-proxy.json", own],
        **({"device-plugin": [*plugin, "--unhealthy", str(path / UNHEALTHY)]} if gpus else {}),
        "kubelet": [
            str(result / "kubelet"),
            f"--config={path}/kubelet.json",
            f"--kubeconfig={kubelet}",
            own,
            f"--node-ip={address}",
            "--root-dir=/var/lib/kubelet",
            "--node-labels=makeway.test/real=true",
        ],
    }


def _make_plugins(place: Path, folder: Folder) -> None:
    """Fill the folder of CNI plugins: Debian's, and ours that reports pods to where policies are enforced."""
    result = cni_folder()
    assert result
    place.mkdir()
    for plugin in result.iterdir():
        (place / plugin.name).symlink_to(plugin)
    own = [sys.executable, "-S", "-E", cni_policies.__file__, str(policies.socket_of(folder))]
    (place / POLICIES).write_text(f"#!/bin/sh\nexec {shlex.join(own)}\n", encoding="utf-8")
    (place / POLICIES).chmod(0o755)


def _cni(network: Network, number: int) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": str(network.pods_of(number))}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": "/run/cni-addresses",
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    plugins = [bridge | {"ipam": addresses}, ports, {"type": POLICIES}]
    return {"cniVersion": "0.4.0", "name": "makeway", "plugins": plugins}


def _containerd(path: Path) -> str:
    # restrict_oom_score_adj: where root lacks CAP_SYS_RESOURCE, no container starts without it.
    plugin = "io.containerd.grpc.v1.cri"
    return f"""version = 2
root = "{path}/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."{plugin}"]
  restrict_oom_score_adj = true
  sandbox_image = "{images.PAUSE}"
  [plugins."{plugin}".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."{plugin}".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."{plugin}".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."{plugin}".cni]
    bin_dir = "{path}/cni-plugins"
    conf_dir = "{path}/cni"
"""


def _kubelet(path: Path, authority: Path, serving: tuple[Path, Path]) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(serving[0]),
        "tlsPrivateKeyFile": str(serving[1]),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "resolvConf": "",
        "clusterDNS": [dns.ADDRESS],
        "clusterDomain": dns.DOMAIN,
        "podLogsDir": str(path / "pods"),
        "volumePluginDir": str(path / "volume-plugins"),
        # The disk is shared with the machine: pods of a test must not be evicted because it is full.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%"}
        | {"imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "5s",
    }


def _kube_proxy(network: Network, kubeconfig: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": str(network.pods),
        # Limits of connection tracking belong to the whole machine: they are left as they are.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "nodePortAddresses": [str(network.nodes)],
    }


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
