"""A spawner of this process against the real API server: what a whole Hub shows too late or too rarely."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from informing import soon
from jupyterhub.utils import maybe_future
from kube.notebooks import Line
from kubernetes_asyncio.client import V1ObjectMeta, V1Pod
from kubernetes_asyncio.config import kube_config
from kubespawner.clients import load_config
from makeway_spawner import pod_spawner
from makeway_spawner.kube import MakewayKubeSpawner
from makeway_spawner.refusal import Refused
from pods import PODS, evict, simulated_pod

from kube_cluster.api import Api
from kube_cluster.cluster import Cluster

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("kwok_cluster")]


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


def notebook(**annotations: str) -> dict[str, Any]:
    """Return ana's pod as the Hub's watch finds it."""
    pod = simulated_pod("jupyter-ana", **annotations)
    pod["metadata"]["labels"] = {"component": "singleuser-server"}
    return pod


NAMESPACED = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
ACCOUNTS = "/api/v1/namespaces/default/serviceaccounts"
VERBS = ["get", "list", "watch", "create"]


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


BINDING = {
    "metadata": {"name": "hub"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "hub"},
    "subjects": [{"kind": "ServiceAccount", "name": "hub", "namespace": "default"}],
}


async def test_a_watch_that_gave_up_begins_anew(api: Api, spawner: MakewayKubeSpawner) -> None:
    await spawner.follow_pods()
    first = spawner.pod_reflector
    first.watch_task.cancel()  # KubeSpawner's own end of it comes after a minute without an API server
    await asyncio.wait([first.watch_task])
    api.create(PODS, notebook())
    assert spawner.pod is None
    await spawner.follow_pods()
    await soon(lambda: spawner.pod, "the pod is seen")


async def test_without_an_api_server_a_poll_waits_for_it_and_concludes_nothing(
    api: Api, spawner: MakewayKubeSpawner, line: Line
) -> None:
    api.create(PODS, notebook())
    await spawner.follow_pods()
    await soon(lambda: spawner.pod and spawner.pod["status"]["phase"] == "Running", "the pod runs")
    first = spawner.pod_reflector
    line.cut()
    first.watch_task.cancel()
    await asyncio.wait([first.watch_task])
    polls = [asyncio.ensure_future(spawner.poll()) for _ in range(3)]
    await soon(lambda: spawner.pod_reflector is not first, "a new watch is tried")
    second = spawner.pod_reflector
    await soon(lambda: spawner.pod_reflector is not second, "and another one")
    assert not any(poll.done() for poll in polls)
    line.mend()
    assert [await poll for poll in polls] == [None] * 3


async def test_a_running_pod_is_not_deleted_without_its_grace(api: Api, spawner: MakewayKubeSpawner) -> None:
    api.create(PODS, notebook(terminating_for="1h"))
    await spawner.follow_pods()
    await soon(lambda: spawner.pod, "the pod is seen")
    stopping = asyncio.ensure_future(spawner.stop(now=True))
    await soon(lambda: spawner.pod and "deletionTimestamp" in spawner.pod["metadata"], "the pod terminates")
    assert spawner.pod is not None
    assert spawner.pod["metadata"]["deletionGracePeriodSeconds"] == 30
    assert await spawner.poll() is None
    api.delete(f"{PODS}/jupyter-ana", gracePeriodSeconds="0")
    await stopping
    assert await spawner.poll() == 1


async def test_stop_returns_when_the_pod_is_lost(api: Api, spawner: MakewayKubeSpawner) -> None:
    spawner.delete_grace_period, spawner.lost_seconds = 1, 0.5
    api.create(PODS, notebook(terminating_for="1h"))
    await spawner.follow_pods()
    await soon(lambda: spawner.pod, "the pod is seen")
    await spawner.stop()
    assert spawner.pod, "no kubelet confirms the end"
    assert await spawner.poll() == 1
    await spawner.stop(now=True)  # what KubeSpawner does before it creates a pod of the same name
    await soon(lambda: not spawner.pod, "the pod is gone")


async def test_a_failed_pod_has_ended_whatever_its_containers_say(api: Api, spawner: MakewayKubeSpawner) -> None:
    api.create(PODS, notebook())
    await spawner.follow_pods()
    await soon(lambda: spawner.pod and spawner.pod["status"]["phase"] == "Running", "the pod runs")
    assert await spawner.poll() is None
    api.merge(f"{PODS}/jupyter-ana/status", {"status": {"phase": "Failed", "reason": "NodeShutdown"}})
    await soon(lambda: spawner.pod and spawner.pod["status"]["phase"] == "Failed", "the pod has failed")
    assert await spawner.poll() == 1
    await soon(lambda: not spawner.pod, "the pod is deleted")


async def test_a_start_ends_when_the_pod_runs_and_not_at_the_next_look_of_kubespawner(
    api: Api, spawner: MakewayKubeSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one_look(check: Any, *_: Any, **__: Any) -> Any:
        return await maybe_future(check()) or await asyncio.sleep(3600)

    async def manifest() -> V1Pod:
        pod = notebook()
        pod["spec"]["containers"][0]["ports"] = [{"name": "notebook-port", "containerPort": 8888}]
        return V1Pod(metadata=V1ObjectMeta(**pod["metadata"]), spec=pod["spec"])

    monkeypatch.setattr("kubespawner.spawner.exponential_backoff", one_look)
    monkeypatch.setattr(spawner, "get_pod_manifest", manifest)
    where = await asyncio.wait_for(spawner._start(), 60)
    assert where == f"http://{api.get(f'{PODS}/jupyter-ana')['status']['podIP']}:8888"
    assert spawner.pod_id == api.get(f"{PODS}/jupyter-ana")["metadata"]["uid"]


async def test_a_pod_whose_creation_was_not_answered_is_not_created_again(
    api: Api, spawner: MakewayKubeSpawner
) -> None:
    spawner.pod_name = "jupyter-once"  # a pod of another test with the same name may still be simulated

    def manifest(session: str) -> V1Pod:
        pod = notebook()
        pod["metadata"]["name"] = spawner.pod_name
        pod["metadata"]["labels"]["makeway/session"] = session
        return V1Pod(metadata=V1ObjectMeta(**pod["metadata"]), spec=pod["spec"])

    def uid() -> str:
        return str(api.get(f"{PODS}/{spawner.pod_name}")["metadata"]["uid"])

    await spawner.follow_pods()
    assert await spawner._make_create_pod_request(manifest("s-1"), 60)
    first = uid()
    assert await spawner._make_create_pod_request(manifest("s-1"), 60)
    assert uid() == first
    assert not await spawner._make_create_pod_request(manifest("s-2"), 60), "another start's pod is removed"
    assert await spawner._make_create_pod_request(manifest("s-2"), 60)
    assert uid() != first


async def test_what_was_seen_last_of_a_pod_is_kept_until_the_next_stop(api: Api, spawner: MakewayKubeSpawner) -> None:
    api.create(PODS, notebook())
    await spawner.follow_pods()
    await soon(lambda: spawner.pod and spawner.pod["status"]["phase"] == "Running", "the pod runs")
    assert spawner.pod
    evict(api, spawner.pod)
    await soon(lambda: not spawner.pod, "the pod is gone")
    assert await spawner.poll() == 1
    assert spawner.how_server_ended(1).startswith("Its pod was evicted, as before maintenance of its node")
    await spawner.stop()
    assert not spawner.pod_reflector.gone
    api.create(PODS, notebook())
    await soon(lambda: spawner.pod, "the pod is seen")
    watch = spawner.pod_reflector
    watch.watch_task.cancel()
    await asyncio.wait([watch.watch_task])
    api.delete(f"{PODS}/jupyter-ana", gracePeriodSeconds="0")
    await watch._list_and_update()
    assert spawner._gone_pod(), "missed by the watch, and missing in the next list"


async def test_a_stop_that_the_hub_has_no_right_to_fails_with_the_reason(
    api: Api, rights: str, spawner: MakewayKubeSpawner
) -> None:
    api.create(PODS, notebook())
    await spawner.follow_pods()
    await soon(lambda: spawner.pod and spawner.pod["status"]["phase"] == "Running", "the pod runs")
    spawner._stop_pending = True
    with pytest.raises(Refused, match='User "system:serviceaccount:default:hub" cannot delete resource "pods"') as told:
        await asyncio.wait_for(spawner.stop(), 30)
    assert "Its pod default/jupyter-ana may still run and hold its GPUs" in str(told.value)
    assert spawner.makeway_end == str(told.value)
    assert api.get(f"{PODS}/jupyter-ana")["metadata"].get("deletionTimestamp") is None


async def test_a_poll_without_the_right_to_see_pods_waits_and_fails_in_a_stop_only(
    api: Api, rights: str, spawner: MakewayKubeSpawner
) -> None:
    api.create(PODS, notebook())
    await spawner.follow_pods()
    await soon(lambda: spawner.pod and spawner.pod["status"]["phase"] == "Running", "the pod runs")
    api.delete(rights)
    first = spawner.pod_reflector
    first.watch_task.cancel()
    await asyncio.wait([first.watch_task])
    poll = asyncio.ensure_future(spawner.poll())
    for _ in range(5):
        before = spawner.pod_reflector
        await soon(lambda before=before: spawner.pod_reflector is not before, "another watch is tried")
    assert not poll.done(), "the Hub would take an error for the end of the server"
    spawner._stop_pending = True
    with pytest.raises(Refused, match="has to give the Hub's account this right"):
        await asyncio.wait_for(poll, 30)
    spawner._stop_pending = False
    api.create(f"{NAMESPACED}/rolebindings", BINDING)
    assert await asyncio.wait_for(spawner.poll(), 30) is None


async def test_a_start_without_the_right_to_see_pods_is_refused_with_what_to_do(
    api: Api, rights: str, spawner: MakewayKubeSpawner
) -> None:
    api.delete(rights)
    spawner._spawn_pending = True
    with pytest.raises(Refused, match="An administrator has to give the Hub's account this right"):
        await asyncio.wait_for(spawner.start_server(), 30)
