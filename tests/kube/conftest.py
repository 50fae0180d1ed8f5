"""One cluster for all tests of a run, which grows when a test asks for simulated nodes or for a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pods import PODS, wait_until

from kube_cluster.api import Api
from kube_cluster.cluster import Cluster
from kube_cluster.network import NAMESPACES
from kube_cluster.node import Node
from kube_cluster.problems import NotHere
from kube_cluster.processes import marked

SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")
FOLDERS = ("/var/lib/kubelet", "/var/log/pods", "/var/log/containers", "/etc/cni", "/etc/kubernetes", "/run/containerd")
MORE_FOLDERS = ("/usr/libexec/kubernetes", "/opt/cni", "/run/flannel", "/var/lib/cni")


def machine() -> list[str]:
    """Return what a cluster could leave on the machine: settings, folders, devices, namespaces, groups and mounts."""
    found = [f"{name} = {Path('/proc/sys', name).read_text().strip()}" for name in SYSCTLS]
    found += [folder for folder in (*FOLDERS, *MORE_FOLDERS) if Path(folder).exists()]
    found += [str(path) for path in sorted(Path("/sys/class/net").glob("mwkube*"))]
    found += [str(path) for path in sorted(NAMESPACES.glob("mwkube*"))]
    found += [str(path) for path in sorted(Path("/sys/fs/cgroup").glob("*/**/makeway-*"))]
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return found + [line for line in mounts if "makeway-kube" in line]


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """Return a cluster without nodes; later tests of the run may find some."""
    before = machine()
    with Cluster.start() as cluster:
        yield cluster
        folder = cluster.folder
    assert machine() == before
    assert not marked(folder)
    assert not folder.path.exists()


@pytest.fixture(scope="session")
def kwok_cluster(control_plane: Cluster) -> Cluster:
    """Return the cluster with 100 simulated nodes of 8 GPUs."""
    control_plane.add_simulated_nodes(100, gpus=8)
    return control_plane


@pytest.fixture(scope="session")
def real_node(control_plane: Cluster) -> Node:
    """Return a real node with two virtual GPUs; skip where this machine cannot run one."""
    try:
        return control_plane.add_node(gpus=2)
    except NotHere as reason:
        pytest.skip(str(reason))


@pytest.fixture
def api(control_plane: Cluster) -> Iterator[Api]:
    """Return the API as the administrator sees it; afterwards the pods of the test are gone."""
    yield control_plane.api
    control_plane.api.delete(PODS, gracePeriodSeconds="0")
    wait_until(lambda: not control_plane.api.items(PODS), "no pod is left")
