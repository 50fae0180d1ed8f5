"""One cluster: start its parts in order, add nodes, and remove everything again.

`with Cluster.start() as cluster:` removes the cluster however the block ends. When its process is killed, a guard
process removes it; when both are killed, the next start does.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from . import control_plane, dns, network, node, policies, processes, provisioner, simulated, teardown
from .api import Api
from .folder import Folder
from .problems import KubeProblem, NotHere


class Cluster:
    """A running cluster of this process."""

    def __init__(self, folder: Folder, guard: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.nodes: list[node.Node] = []
        """the real nodes"""
        self.simulated: list[str] = []
        """the names of the simulated nodes"""
        self._simulates = False
        self.why_no_node = why_no_node()
        """why this machine cannot run a real node, None when it can"""
        self._guard = guard
        self._network: network.Network | None = None
        self._plane: control_plane.ControlPlane | None = None

    @classmethod
    def start(cls) -> Cluster:
        """Start a control plane, on a bridge where this machine can run real nodes, and return the cluster."""
        teardown.remove_abandoned()
        folder = Folder.create()
        cluster = cls(folder, teardown.start_guard(folder))
        try:
            if cluster.why_no_node is None:
                cluster._network = network.create(folder)
            address = cluster._network.host if cluster._network else control_plane.LOOPBACK
            cluster._plane = control_plane.start(folder, address)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def kubeconfig(self) -> Path:
        """Return the administrator's kubeconfig."""
        return self._running().kubeconfig

    def kubeconfig_of(self, user: str) -> Path:
        """Return the kubeconfig of a user with a certificate, who has the rights that are bound to that name."""
        plane = self._running()
        return plane.authority.kubeconfig(plane.server, user)

    @property
    def volumes(self) -> Path:
        """Return the folder of the volumes that claims of this cluster got."""
        return self.folder.path / "volumes"

    @property
    def api(self) -> Api:
        """Return the API as the administrator sees it."""
        return self._running().api

    def add_simulated_nodes(self, count: int, gpus: int = 8, model: str = "NVIDIA-H100-80GB-HBM3") -> list[str]:
        """Add nodes that kwok simulates and return their names when they are ready."""
        plane = self._running()
        self.simulate()
        first = len(self.simulated)
        names = [f"simulated-{number:04d}" for number in range(first, first + count)]
        simulated.add(self.folder, plane.api, names, gpus, model)
        self.simulated += names
        return names

    def simulate(self) -> None:
        """Start what simulates nodes, unless it runs."""
        if not self._simulates:
            simulated.start(self.folder, self._running())
            self._simulates = True

    def add_node(self, gpus: int = 4) -> node.Node:
        """Add a real node with virtual GPUs and return it when it is ready; raise NotHere where that cannot be."""
        plane = self._running()
        if self._network is None:
            raise NotHere(self.why_no_node or "A real node needs the network that a cluster of root has.")
        if not self.nodes:
            port = dns.start(self.folder, plane, self._network.host)
            policies.start(self.folder, plane, self._network, port)
            self.folder.at_end.enter_context(provisioner.running(self.volumes, plane.kubeconfig))
        added = node.start(self.folder, plane, self._network, len(self.nodes), gpus)
        self.nodes.append(added)
        return added

    def check(self) -> None:
        """Raise KubeProblem when one of the cluster's programs has ended."""
        processes.check(self.folder)

    def stop(self) -> None:
        """Remove the cluster and everything it made."""
        self._plane = None
        try:
            self.folder.at_end.close()
            teardown.remove(self.folder)
        finally:
            self.folder.disown()
            assert self._guard.stdin
            with suppress(BrokenPipeError):
                self._guard.stdin.close()
            self._guard.wait()

    def _running(self) -> control_plane.ControlPlane:
        if self._plane is None:
            raise KubeProblem("The cluster has been stopped.")
        return self._plane


def why_no_node() -> str | None:
    """Return why this machine cannot run a real node, in one sentence; None when it can."""
    try:
        node.check_machine()
    except NotHere as reason:
        return str(reason)
    return None
