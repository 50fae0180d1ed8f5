"""Two Hubs in one namespace: neither ends a notebook of the other one, nor mounts a home that the other one uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from makeway_spawner.kube import MakewayKubeSpawner
from makeway_spawner.refusal import Refused
from spawner.kube_fake import KubeFake, serving, spawner_for
from spawner.quota_fake import URL, QuotaFake

NAME, INSTANCE = "app.kubernetes.io/name", "app.kubernetes.io/instance"
IMAGE = {"image": "notebook:1", "imageID": "1", "restartCount": 0}


@pytest.fixture
async def kube(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeFake]:
    async with serving(monkeypatch) as fake:
        yield fake


def labels(release: str, chart: str = "makeway") -> dict[str, str]:
    return {NAME: chart, INSTANCE: release}


def hub_of(release: str, chart: str = "makeway", state: Any = None, **traits: Any) -> MakewayKubeSpawner:
    """Return ana's spawner in the Hub of a release."""
    named = {"storage_pvc_ensure": True, "makeway_api_url": URL, "makeway_token": "t", "renew_seconds": 0.1, **traits}
    spawner: MakewayKubeSpawner = spawner_for("ana", state, common_labels=labels(release, chart), **named)
    spawner.user_options = {"profile": "cpu"}
    return spawner


def pod_of(release: str, name: str = "jupyter-ana", chart: str = "makeway") -> dict[str, Any]:
    pod_labels = {**labels(release, chart), "component": "singleuser-server"}
    return {
        "metadata": {"name": name, "labels": pod_labels},
        "spec": {"nodeName": "n0", "containers": [{"name": "notebook"}]},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.9",
            "containerStatuses": [{"name": "notebook", "ready": True, "state": {"running": {}}} | IMAGE],
        },
    }


async def start(kube: KubeFake, spawner: MakewayKubeSpawner) -> None:
    """Start until the pod is created, or the start is refused."""
    await spawner.run_pre_spawn_hook()
    starting = asyncio.ensure_future(spawner.start())
    before = len(kube.objects["pods"])
    await until(lambda: len(kube.objects["pods"]) > before or starting.done())
    if starting.done():
        await starting
    starting.cancel()
    await asyncio.wait([starting])
    await spawner._release()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        for _ in iter(lambda: bool(true()), True):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("release", "chart"), [("second", "makeway"), ("jupyterhub", "jupyterhub")])
async def test_a_running_notebook_of_another_hub_is_not_replaced(
    kube: KubeFake, quota: QuotaFake, release: str, chart: str
) -> None:
    kube.add("pods", pod_of("first"))
    spawner = hub_of(release, chart, pvc_name_template="other-{user_server}")
    with pytest.raises(Refused, match="its pod would be called jupyter-ana, as one of another installation"):
        await start(kube, spawner)
    await spawner.stop()
    await spawner.run_post_stop_hook()
    assert list(kube.objects["pods"]) == ["jupyter-ana"]
    assert not [one for one in kube.asked if one.startswith("DELETE")]


async def test_a_hub_whose_notebook_was_replaced_neither_takes_the_new_one_for_its_own_nor_ends_it(
    kube: KubeFake, quota: QuotaFake
) -> None:
    """As two releases of an earlier chart left it."""
    kube.add("pods", pod_of("second"))
    state = {"pod_name": "jupyter-ana", "kubespawner_version": "7.1.0", "makeway_pod": True}
    spawner = hub_of("first", state=state)
    assert await spawner.poll() == 1
    await spawner.stop()
    await spawner.run_post_stop_hook()
    assert list(kube.objects["pods"]) == ["jupyter-ana"]


@pytest.mark.parametrize("state", [None, {"pvc_name": "claim-ana", "kubespawner_version": "7.1.0"}])
async def test_a_home_of_a_release_that_runs_is_not_mounted_a_second_time(
    kube: KubeFake, quota: QuotaFake, state: Any
) -> None:
    kube.add("persistentvolumeclaims", {"metadata": {"name": "claim-ana", "labels": labels("first")}})
    kube.add("pods", pod_of("first", "first-hub"))
    spawner = hub_of("second", state=state, pod_name_template="second-nb-{user_server}")
    with pytest.raises(Refused, match="the claim claim-ana for its home belongs to first, another installation"):
        await start(kube, spawner)
    assert list(kube.objects["pods"]) == ["first-hub"]


@pytest.mark.parametrize("state", [None, {"pvc_name": "claim-ana", "kubespawner_version": "7.1.0"}])
@pytest.mark.parametrize("found", [labels("first"), labels("second"), {}], ids=["uninstalled", "own", "by hand"])
async def test_a_home_that_no_other_release_uses_is_mounted(
    kube: KubeFake, quota: QuotaFake, found: dict[str, str], state: Any
) -> None:
    kube.add("persistentvolumeclaims", {"metadata": {"name": "claim-ana", "labels": found}})
    kube.add("pods", pod_of("third", "third-hub"))
    spawner = hub_of("second", state=state, pod_name_template="second-nb-{user_server}")
    await start(kube, spawner)
    assert sorted(kube.objects["pods"]) == ["second-nb-ana", "third-hub"]
    assert spawner.pvc_name == "claim-ana"


async def test_a_notebook_of_an_earlier_chart_keeps_its_pod_and_its_home(kube: KubeFake, quota: QuotaFake) -> None:
    kube.add("persistentvolumeclaims", {"metadata": {"name": "home-ana", "labels": labels("first")}})
    kube.add("pods", pod_of("first"))
    state = {"pod_name": "jupyter-ana", "pvc_name": "home-ana", "kubespawner_version": "7.1.0", "makeway_pod": True}
    templates = {"pod_name_template": "first-nb-{user_server}", "pvc_name_template": "home-{user_server}"}
    spawner = hub_of("first", state=state, **templates)
    assert await spawner.poll() is None
    assert (spawner.pod_name, spawner.pvc_name) == ("jupyter-ana", "home-ana")
    stopping = asyncio.ensure_future(spawner.stop())
    await until(lambda: "deletionTimestamp" in kube.objects["pods"]["jupyter-ana"]["metadata"])
    kube.remove("pods", "jupyter-ana")
    await stopping
    spawner.clear_state()
    await start(kube, spawner)
    assert (list(kube.objects["pods"]), spawner.pvc_name) == (["first-nb-ana"], "home-ana")


@pytest.mark.parametrize("beside", [{"name": "proxy"}, {"name": "proxy", "ports": []}, {"name": "p", "ports": None}])
@pytest.mark.parametrize("first", [True, False])
async def test_the_address_is_that_of_the_notebook_whatever_sidecars_are_beside_it(
    kube: KubeFake, beside: Any, first: bool
) -> None:
    notebook = {"name": "notebook", "ports": [{"name": "notebook-port", "containerPort": 8888}]}
    containers = [beside, notebook] if first else [notebook, beside]
    pod = {**pod_of("first"), "spec": {"containers": containers}}
    assert hub_of("first")._get_pod_url(pod) == "http://10.0.0.9:8888"
    pod["spec"] = {"containers": [beside]}  # as a webhook may leave it
    pod["status"]["podIP"] = "fd00::9"
    assert hub_of("first", port=8889)._get_pod_url(pod) == "http://[fd00::9]:8889"
