"""Why a notebook's pod does not start, in words: a spawner of this process against the real API server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from informing import soon
from kube.notebooks import Line
from kube.spawners import NAMESPACED, notebook
from kubernetes_asyncio.client import V1ObjectMeta, V1Pod
from makeway_spawner.kube import MakewayKubeSpawner
from makeway_spawner.lease import Lease
from makeway_spawner.refusal import Refused
from pods import PODS

from kube_cluster.api import Api
from kube_cluster.provisioner import LABEL

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("kwok_cluster")]

DEFAULT = "/api/v1/namespaces/default"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
NO_LEASE = Lease("s-2", "cpu", None, 0.0, False, [], {}, False)


@pytest.fixture
def manifest(spawner: MakewayKubeSpawner, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the pod that the spawner will create for a node that was granted; a test changes what it needs."""
    spawner._lease = Lease("s-1", "gpu1", "rnd", 1.0, False, [("node-9", [0])], {}, False)
    pod = notebook()
    spawner.pod_name = pod["metadata"]["name"] = "jupyter-starts"
    pod["spec"]["containers"][0] |= {"name": "notebook", "ports": [{"name": "notebook-port", "containerPort": 8888}]}

    async def made() -> V1Pod:
        return V1Pod(metadata=V1ObjectMeta(**pod["metadata"]), spec=pod["spec"])

    monkeypatch.setattr(spawner, "get_pod_manifest", made)
    return pod


@pytest.fixture
def claim(api: Api, manifest: dict[str, Any]) -> Iterator[Callable[[str], None]]:
    """Have the pod need a claim `home` of a storage class that binds so, for which nothing makes volumes."""

    def create(mode: str) -> None:
        api.create(CLASSES, {"metadata": {"name": "no"}, "provisioner": "makeway.test/no", "volumeBindingMode": mode})
        home = {"name": "home", "labels": {LABEL: "false"}}
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "no",
        }
        api.create(f"{DEFAULT}/persistentvolumeclaims", {"metadata": home, "spec": spec})

    manifest["spec"]["volumes"] = [{"name": "home", "persistentVolumeClaim": {"claimName": "home"}}]
    yield create
    api.delete(f"{DEFAULT}/persistentvolumeclaims")
    api.delete(CLASSES, fieldSelector="metadata.name=no")


def phase(spawner: MakewayKubeSpawner) -> str:
    """Return the phase of the last step that Kubernetes has reported of the start."""
    last = spawner._following._last if spawner._created else None
    return last.phase if last else ""


def begin(spawner: MakewayKubeSpawner) -> asyncio.Future[str]:
    """Begin a start that will fail; its result is the reason."""
    return asyncio.ensure_future(refusal(spawner))


async def refusal(spawner: MakewayKubeSpawner) -> str:
    """Return why the start fails."""
    with pytest.raises(Refused) as told:
        await asyncio.wait_for(spawner.start_server(), 150)
    return str(told.value)


async def late(spawner: MakewayKubeSpawner, starting: asyncio.Future[str], reached: Callable[[], object]) -> str:
    """Return why the start fails whose time is over once it has come so far."""
    await soon(lambda: starting.done() or reached(), "the start has come so far")
    assert not starting.done(), starting.result()
    spawner.start_timeout = 1  # KubeSpawner's counts from later on
    return await starting


@pytest.mark.covers("N05")
async def test_a_server_that_never_listens_is_told_from_a_pod_that_does_not_run(
    api: Api, spawner: MakewayKubeSpawner, manifest: dict[str, Any]
) -> None:
    with socket.socket() as closed:  # no address of a pod: some networks accept connections to any
        closed.bind(("127.0.0.1", 0))
        where = f"http://127.0.0.1:{closed.getsockname()[1]}"
        spawner.get_pod_url = lambda spawner, pod: where
        message = await late(spawner, begin(spawner), lambda: spawner._server_address)
    assert f", but accepts no connection at {where}. Check that the image starts a notebook server" in message
    assert "its container has run for " in message


@pytest.mark.covers("N05")
async def test_a_slow_pull_is_named_where_a_start_takes_too_long(
    api: Api, spawner: MakewayKubeSpawner, manifest: dict[str, Any]
) -> None:
    manifest["spec"]["schedulerName"] = "none"  # it stays pending
    starting = begin(spawner)
    await soon(lambda: spawner.created_pod, "the pod is seen")
    about = {"kind": "Pod", "namespace": "default", "name": "jupyter-starts", "fieldPath": "spec.containers{notebook}"}
    pulling = {"reason": "Pulling", "message": 'Pulling image "lab:1"', "type": "Normal", "involvedObject": about}
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    api.create(f"{DEFAULT}/events", {"metadata": {"generateName": "pulling-"}, "lastTimestamp": now, **pulling})
    message = await late(spawner, starting, lambda: phase(spawner) == "image")
    assert "Pulling the image lab:1. Start it again: its node may have the image by then." in message
    assert "start_timeout" in message


@pytest.mark.covers("N05")
async def test_a_start_is_given_up_early_where_its_node_is_not_for_its_pod_and_only_there(
    api: Api, spawner: MakewayKubeSpawner, manifest: dict[str, Any]
) -> None:
    spawner.start_timeout, spawner.unschedulable_seconds = 60, 0.5
    manifest["spec"]["nodeSelector"] = {"makeway.test/zone": "another"}
    message = await refusal(spawner)
    assert message.startswith("Kubernetes has not placed the notebook on node-9 for ")
    assert "choose another profile" in message
    await spawner.stop()
    spawner._lease = NO_LEASE
    starting = asyncio.ensure_future(spawner.start_server())
    await soon(lambda: spawner._following.unscheduled_for > 1, "the scheduler finds no place")
    assert not starting.done(), "the cluster may be adding a node; none was granted"
    starting.cancel()
    await asyncio.wait([starting])


@pytest.mark.covers("N05")
@pytest.mark.parametrize("granted", [True, False], ids=["given up early", "too late"])
async def test_a_claim_that_is_not_bound_is_named_and_not_the_node_or_the_profile(
    api: Api, spawner: MakewayKubeSpawner, claim: Callable[[str], None], granted: bool
) -> None:
    claim("Immediate")
    spawner.unschedulable_seconds = 0.5
    if granted:
        message = await refusal(spawner)
    else:
        spawner._lease = NO_LEASE
        message = await late(spawner, begin(spawner), lambda: phase(spawner) == "node")
    assert "pod has unbound immediate PersistentVolumeClaims" in message
    assert message.endswith("look at that claim, at its storage class, and at what makes volumes of it.")
    assert message.startswith("Kubernetes has not placed the notebook on node-9") == granted
    assert "profile" not in message


@pytest.mark.covers("N05")
async def test_a_claim_whose_volume_is_never_made_is_named_though_kubernetes_says_nothing(
    api: Api, spawner: MakewayKubeSpawner, claim: Callable[[str], None]
) -> None:
    claim("WaitForFirstConsumer")

    def chosen() -> bool:
        (made,) = api.items(f"{DEFAULT}/persistentvolumeclaims")
        return "volume.kubernetes.io/selected-node" in made["metadata"].get("annotations", {})

    message = await late(spawner, begin(spawner), chosen)
    assert "It needs a volume for home. An administrator has to look at that claim" in message
    assert "list and watch" not in message, "the Hub has its rights"


@pytest.mark.covers("N05")
async def test_a_pod_that_an_admission_rule_refuses_fails_at_once_with_its_words(
    api: Api, spawner: MakewayKubeSpawner, manifest: dict[str, Any]
) -> None:
    enforce = "pod-security.kubernetes.io/enforce"
    api.merge(DEFAULT, {"metadata": {"labels": {enforce: "restricted"}}})
    try:
        message = await refusal(spawner)
    finally:
        api.merge(DEFAULT, {"metadata": {"labels": {enforce: None}}})
    assert message.startswith(
        'Kubernetes refuses the notebook\'s pod: pods "jupyter-starts" is forbidden: violates PodSecurity'
    )
    assert "the Hub configures a pod that Kubernetes does not accept in the namespace default" in message


@pytest.mark.covers("N05")
@pytest.mark.parametrize("verb", ["create", "watch"])
async def test_a_right_that_is_lost_while_a_notebook_starts_is_named(
    api: Api, rights: str, line: Line, spawner: MakewayKubeSpawner, manifest: dict[str, Any], verb: str
) -> None:
    made = spawner.get_pod_manifest
    verbs = {"create": ["get", "list", "watch"], "watch": ["get", "create"]}[verb]

    async def once_lost() -> V1Pod:
        rules = [{"apiGroups": [""], "resources": ["pods", "events"], "verbs": verbs}]
        api.merge(f"{NAMESPACED}/roles/hub", {"rules": rules})
        review = {"resource": "pods", "namespace": "default", "verb": verb}
        body = {"spec": {"user": "system:serviceaccount:default:hub", "resourceAttributes": review}}
        reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        await soon(lambda: not api.create(reviews, body)["status"].get("allowed"), "the right is lost")
        line.cut()
        line.mend()
        return await made()

    spawner.get_pod_manifest = once_lost
    if verb == "create":
        message = await refusal(spawner)
        assert 'User "system:serviceaccount:default:hub" cannot create resource "pods"' in message
        assert message.endswith("An administrator has to give the Hub's account this right.")
    else:
        message = await late(spawner, begin(spawner), lambda: api.items(PODS))
        assert ", and the Hub does not see its pod. An administrator can check that the Hub's account may " in message
