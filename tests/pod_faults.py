"""Harm the pods of a node from outside: kill or freeze their processes, drop what they send and are sent.

Everything is done from the machine that runs the node, so that the pod cannot notice it in any other way than a pod of
a real cluster would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from charts import Object

from kube_cluster.cluster import Cluster

TABLE = "makeway-test"


class PodProcesses:
    """The processes of the first container of a pod, by their PIDs on this machine."""

    def __init__(self, cluster: Cluster, pod: Object) -> None:
        self.name = str(pod["metadata"]["name"])
        self.address = str(pod["status"]["podIP"])
        container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        groups = [Path(one) for one in cluster.folder.facts()["cgroups"]]
        (self._freezer,) = [result for one in groups if "freezer" in one.parts for result in _below(one, container)]
        self._network = os.open(f"/proc/{self.pids()[0]}/ns/net", os.O_RDONLY)
        """the network namespace, which stays there as long as this is open"""

    def pids(self) -> list[int]:
        """Return the processes that run, the first one first."""
        try:
            return [int(pid) for pid in (self._freezer / "cgroup.procs").read_text(encoding="ascii").split()]
        except OSError:  # the container is gone, and its cgroup
            return []

    def kill(self) -> None:
        """Kill all processes at once."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Stop all processes where they are."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue stopped processes; nothing to do where they are gone."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            os.kill(pid, number)

    def freeze(self) -> None:
        """Freeze the container, as a machine that is suspended would."""
        state = self._freezer / "freezer.state"
        state.write_text("FROZEN", encoding="ascii")
        while state.read_text(encoding="ascii").strip() != "FROZEN":
            time.sleep(0.01)

    def thaw(self) -> None:
        """Thaw a frozen container; nothing to do where it is gone."""
        if self._freezer.exists():
            (self._freezer / "freezer.state").write_text("THAWED", encoding="ascii")

    def cut(self, *places: tuple[str, int]) -> None:
        """Drop every packet to and from these addresses and ports; without any, every packet."""
        lines = [f"add table inet {TABLE}"]
        for chain, hook, way, device in (("sent", "output", "d", "oifname"), ("received", "input", "s", "iifname")):
            lines.append(f"add chain inet {TABLE} {chain} {{ type filter hook {hook} priority 0; }}")
            lines.append(f"add rule inet {TABLE} {chain} {device} lo accept")
            for address, port in places:
                lines.append(f"add rule inet {TABLE} {chain} ip {way}addr {address} tcp {way}port {port} drop")
            if not places:
                lines.append(f"add rule inet {TABLE} {chain} drop")
        self._nft("\n".join(lines))

    def mend(self) -> None:
        """Drop nothing any more."""
        self._nft(f"add table inet {TABLE}\ndelete table inet {TABLE}")

    def close(self) -> None:
        """Close the network namespace."""
        os.close(self._network)

    def _nft(self, rules: str) -> None:
        namespace = f"/proc/{os.getpid()}/fd/{self._network}"
        command = ["nsenter", f"--net={namespace}", "nft", "-f", "-"]
        subprocess.run(command, input=rules, text=True, check=True, capture_output=True)


def _below(group: Path, container: str) -> Iterator[Path]:
    """Yield the cgroup of a container if it is below that of a node."""
    for folder, folders, _ in os.walk(group):
        if container in folders:
            yield Path(folder, container)
