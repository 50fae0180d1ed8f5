"""A spawner of this process against the real API server: what a whole Hub shows too late or too rarely."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from informing import soon
from jupyterhub.utils import maybe_future
from kube.notebooks import Line
from kube.spawners import BINDING, NAMESPACED, notebook
from kubernetes_asyncio.client import V1ObjectMeta, V1Pod
from kubernetes_asyncio.client.rest import ApiException
from makeway_spawner.kube import MakewayKubeSpawner
from makeway_spawner.refusal import Refused
from pods import PODS, evict

from kube_cluster.api import Api

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("kwok_cluster")]


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
    with pytest.raises(Refused, match="has to give the Hub's account the right to list and watch pods"):
        await asyncio.wait_for(poll, 30)
    spawner._stop_pending = False
    api.create(f"{NAMESPACED}/rolebindings", BINDING)
    assert await asyncio.wait_for(spawner.poll(), 30) is None


async def test_a_start_without_the_right_to_see_pods_is_refused_with_what_to_do(
    api: Api, rights: str, spawner: MakewayKubeSpawner
) -> None:
    api.delete(rights)
    spawner._spawn_pending = True
    with pytest.raises(
        Refused, match="An administrator has to give the Hub's account the right to list and watch pods"
    ):
        await asyncio.wait_for(spawner.start_server(), 30)


async def test_a_watch_that_is_refused_leaves_no_error_to_the_collector(
    api: Api, rights: str, spawner: MakewayKubeSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawner.log, "disabled", True)  # pytest keeps what is logged, with its errors
    remaining: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: remaining.append(context["message"]))
    api.delete(rights)
    spawner._spawn_pending = True
    with pytest.raises(ApiException, match="Forbidden"):
        await asyncio.wait_for(spawner.follow_pods(), 30)
    spawner.reflectors.clear()
    gc.collect()
    assert remaining == []
