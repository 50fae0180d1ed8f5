"""One cluster for all tests of a worker, which grows when a test asks for simulated nodes or for a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from charts import EVERYTHING
from job_service import PODS as JOB_PODS
from job_service import Serving, make_namespace, policy_of
from kube.notebooks import Line
from kube.spawners import ACCOUNTS, BINDING, NAMESPACED, VERBS
from kubernetes_asyncio.config import kube_config
from kubespawner.clients import load_config
from leftovers import left
from makeway_spawner import pod_spawner
from makeway_spawner.kube import MakewayKubeSpawner
from pods import PODS, SPARE, allocatable, wait_until
from releases import DEFINITIONS, MONITOR, MONITORS, Installation, installation

from kube_cluster import image_build
from kube_cluster.api import Api
from kube_cluster.cluster import Cluster
from kube_cluster.node import Node
from kube_cluster.problems import NotHere

SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")
FOLDERS = ("/var/lib/kubelet", "/var/log/pods", "/var/log/containers", "/etc/cni", "/etc/kubernetes", "/run/containerd")
MORE_FOLDERS = ("/usr/libexec/kubernetes", "/opt/cni", "/run/flannel", "/var/lib/cni")


def machine() -> list[str]:
    """Return what any cluster could change on the machine outside of what bears its name."""
    result = [f"{name} = {Path('/proc/sys', name).read_text().strip()}" for name in SYSCTLS]
    return result + [folder for folder in (*FOLDERS, *MORE_FOLDERS) if Path(folder).exists()]


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """Return a cluster without nodes; later tests of the run may find some."""
    before = machine()
    with Cluster.start() as cluster:
        yield cluster
        facts = cluster.folder.facts()
        assert len(left(cluster.folder, facts)) > 4
    assert machine() == before
    assert left(cluster.folder, facts) == []


@pytest.fixture(scope="session")
def kwok_cluster(control_plane: Cluster) -> Cluster:
    """Return the cluster with 100 simulated nodes of 8 GPUs."""
    control_plane.add_simulated_nodes(100, gpus=8)
    return control_plane


@pytest.fixture(scope="session")
def real_node(control_plane: Cluster) -> Node:
    """Return a real node that offers two virtual GPUs; skip where this machine cannot run one."""
    try:
        node = control_plane.add_node(gpus=2 + len(SPARE))
    except NotHere as reason:
        pytest.skip(str(reason))
    node.break_gpus(*SPARE)
    wait_until(lambda: allocatable(control_plane.api, node) == "2", "the node offers two GPUs")
    return node


@pytest.fixture(scope="module")
def release(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Return the chart as Helm installed it, with everything that it has, Prometheus's monitor included."""
    control_plane.api.create(DEFINITIONS, MONITORS)
    with installation(control_plane, tmp_path_factory.mktemp("helm")) as result:
        message = result.run("install", values=EVERYTHING)
        assert "Makeway 0.1.0 is installed in makeway; jobs run in makeway-jobs." in message
        yield result
    control_plane.api.delete(f"{DEFINITIONS}/{MONITOR}")
    gone = {"fieldSelector": f"metadata.name={MONITOR}"}
    wait_until(lambda: not control_plane.api.items(DEFINITIONS, **gone), "the kind of monitors is gone")


@pytest.fixture(scope="session")
def images(real_node: Node) -> dict[str, Path]:
    """Return the archives of the portal's images, imported into the real node."""
    try:
        archives = image_build.build(["hub", "proxy", "quota-service", "notebook"])
    except NotHere as reason:
        pytest.skip(str(reason))
    for archive in archives.values():
        real_node.import_image(archive)
    return archives


@pytest.fixture
def api(control_plane: Cluster) -> Iterator[Api]:
    """Return the API as the administrator sees it; afterwards the pods of the test are gone."""
    yield control_plane.api
    control_plane.api.delete(PODS, gracePeriodSeconds="0")
    wait_until(lambda: not control_plane.api.items(PODS), "no pod is left")


@pytest.fixture(scope="session")
def jobs_policy(control_plane: Cluster, real_node: Node, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a policy document for jobs on the real node; their namespace and volumes are there."""
    make_namespace(control_plane)
    return policy_of(control_plane, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
async def serving(control_plane: Cluster, jobs_policy: str, tmp_path: Path) -> AsyncIterator[Serving]:
    """Return a service for jobs on the real node, which does not run yet; afterwards their pods are gone."""
    made = Serving(control_plane, tmp_path / "state", jobs_policy)
    yield made
    for one in made.clients.values():
        await one.close()
    made.reservation.close()
    control_plane.api.delete(JOB_PODS, gracePeriodSeconds="0")
    await asyncio.to_thread(wait_until, lambda: not made.pods(), "no pod of a job is left")


@pytest.fixture
def line(control_plane: Cluster, tmp_path: Path) -> Iterator[Line]:
    """The way of the spawner to the API server."""
    made = Line(control_plane.kubeconfig, tmp_path / "kubeconfig")
    yield made
    made.close()


@pytest.fixture
async def spawner(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakewayKubeSpawner]:
    """A spawner for ana with the administrator's rights."""
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    load_config.cache_clear()
    hub: Any = SimpleNamespace(base_url="/hub/", api_url="http://hub:8081/hub/api", public_host="", server=None)
    user: Any = SimpleNamespace(name="ana", escaped_name="ana", url="/user/ana/", id=1, server=None)
    made = MakewayKubeSpawner(hub=hub, user=user, namespace="default", look_seconds=0.1)
    yield made
    await MakewayKubeSpawner._stop_all_reflectors()
    await made.api.api_client.close()
    await asyncio.sleep(0.3)  # aiohttp closes connections with TLS after its session


@pytest.fixture
def rights(api: Api, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have the spawner's account lack the right to delete pods; without the binding that is returned it has none."""
    monkeypatch.setattr(pod_spawner, "_REFUSED", 0.3)
    api.create(ACCOUNTS, {"metadata": {"name": "hub"}})
    rules = [{"apiGroups": [""], "resources": ["pods", "events"], "verbs": VERBS}]
    api.create(f"{NAMESPACED}/roles", {"metadata": {"name": "hub"}, "rules": rules})
    api.create(f"{NAMESPACED}/rolebindings", BINDING)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = api.create(f"{ACCOUNTS}/hub/token", request)["status"]["token"]
    config = yaml.safe_load((tmp_path / "kubeconfig").read_text(encoding="utf-8"))
    config["users"][0]["user"] = {"token": token}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config), encoding="utf-8")
    yield f"{NAMESPACED}/rolebindings/hub"
    for path in (f"{NAMESPACED}/rolebindings", f"{NAMESPACED}/roles", ACCOUNTS):
        api.delete(path, fieldSelector="metadata.name=hub")
