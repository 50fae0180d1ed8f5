"""Notebooks as pods where the quota service reads the nodes of the cluster, and knows the pods of its sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe import violations
from browser import Person, chromium
from kube.notebooks import Notebooks, add_nodes, full, notebooks
from makeway_api.models import Pool
from playwright.sync_api import expect
from pods import PODS, wait_until
from running import SAMPLE

from kube_cluster.api import GPU
from kube_cluster.cluster import Cluster
from kube_cluster.simulated import SIMULATED

pytestmark = pytest.mark.kube

NODES = ("notebooks-1", "notebooks-2")
LABEL = {"makeway.test/notebooks": "yes"}
IMAGES = """\
    images:
      - {name: torch, title: PyTorch 2, description: "with CUDA 12", image: "site/torch:2"}
      - {name: plain, title: Python, image: "site/plain:1", default: true}
"""
POLICY = (
    SAMPLE.read_text(encoding="utf-8")
    .replace("local: {gpus: all}", "labels: {makeway.test/notebooks: 'yes'}")
    .replace("  - name: gpu1\n", f"  - name: gpu1\n{IMAGES}")
)
GPU1 = {"profile": "gpu1", "team": "rnd"}


@pytest.fixture(scope="module")
def portal(kwok_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebooks]:
    root = tmp_path_factory.mktemp("portal")
    (root / "policy.yaml").write_text(POLICY, encoding="utf-8")
    add_nodes(kwok_cluster, NODES, **LABEL)
    settings = {
        "MAKEWAY_POLICY_FILE": str(root / "policy.yaml"),
        "MAKEWAY_BACKEND": "kubernetes",
        "MAKEWAY_KUBECONFIG": str(kwok_cluster.kubeconfig),
        "MAKEWAY_KUBE_NAMESPACE": "default",
        "MAKEWAY_KUBE_LAUNCHER_IMAGE": "none",
        "MAKEWAY_WORKER_URL": "http://192.0.2.1:8765",
        "MAKEWAY_KUBE_TOLERATIONS": SIMULATED,
    }
    with notebooks(root, kwok_cluster, **settings) as portal:
        yield portal
    for name in NODES:
        kwok_cluster.api.delete(f"/api/v1/nodes/{name}")


@pytest.fixture(autouse=True)
def nothing_left(portal: Notebooks) -> Iterator[None]:
    yield
    portal.clear()


def pool(portal: Notebooks) -> Pool:
    with portal.client() as client:
        (result,) = client.pools()
    return result


@pytest.mark.covers("N06", "F26")
def test_a_session_is_placed_on_a_node_of_the_cluster_and_its_pod_is_not_foreign(portal: Notebooks) -> None:
    wait_until(lambda: (pool(portal).total, pool(portal).free) == (10, 10), "both nodes are seen, and nothing else")
    pod = portal.running("ana", **GPU1)
    assert pod["spec"]["nodeName"] in NODES
    assert pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
    (session,) = portal.live_sessions()
    assert not session.virtual
    assert session.resource == GPU
    assert session.tolerations == [SIMULATED]
    assert {"key": SIMULATED, "operator": "Exists"} in pod["spec"]["tolerations"], "else it could not be placed there"
    assert session.placement[0].node == pod["spec"]["nodeName"]
    second = portal.running("bo", profile="gpu1", team="devops")
    assert second["metadata"]["labels"]["makeway/session"] != session.id
    assert (pool(portal).used, pool(portal).free) == (2, 8), "the pods hold what the leases say, not twice as much"
    portal.api.delete(f"{PODS}/{pod['metadata']['name']}")
    wait_until(lambda: pool(portal).free == 9, "the GPU is free once pod and lease are gone")


def test_a_session_goes_where_the_pods_of_others_leave_room(portal: Notebooks) -> None:
    for taken, remaining in (NODES, NODES[::-1]):
        with full(portal.api, [taken]):
            wait_until(lambda: pool(portal).free == 5, "the service sees the pods of others")
            assert portal.running("ana", **GPU1)["spec"]["nodeName"] == remaining
            portal.stop_server("ana")


@pytest.mark.covers("F42", "N06")
def test_a_session_takes_the_node_on_which_it_leaves_the_least_room(portal: Notebooks) -> None:
    for tight in NODES:
        with full(portal.api, [tight], gpus=4):
            wait_until(lambda: pool(portal).free == 6, "the service sees the pods of others")
            pod = portal.running("ana", **GPU1)
            assert pod["spec"]["nodeName"] == tight
            terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            fields = [one["matchFields"] for one in terms["nodeSelectorTerms"]]
            assert fields == [[{"key": "metadata.name", "operator": "In", "values": [tight]}]]
            portal.stop_server("ana")


@pytest.mark.covers("F24", "N07")
def test_a_pod_that_outlives_its_lease_holds_its_gpu_until_its_containers_have_ended(portal: Notebooks) -> None:
    pod = portal.running("ana", **GPU1)
    path = f"{PODS}/{pod['metadata']['name']}"
    portal.api.merge(path, {"metadata": {"annotations": {"makeway.test/terminating-for": "1h"}}})
    (session,) = portal.live_sessions()
    with portal.client(portal.state.secret("spawner_token")) as spawner:
        spawner.release(session.id)
    wait_until(lambda: portal.api.get(path)["metadata"].get("deletionTimestamp"), "the Hub stops the server")
    assert portal.live_sessions() == []
    assert (pool(portal).used, pool(portal).free) == (0, 9)
    portal.api.delete(path, gracePeriodSeconds="0")  # what the kubelet does when the containers have ended
    wait_until(lambda: pool(portal).free == 10, "the GPU is free")


@pytest.mark.browser
@pytest.mark.covers("N03")
@pytest.mark.parametrize(("user", "dark"), [("ana", False), ("lea", True)], ids=["light", "dark"])
def test_the_picker_offers_the_images_of_a_profile_and_remembers_the_choice(
    portal: Notebooks, user: str, dark: bool, pictures: Path | None
) -> None:
    portal.servers.up = False
    with chromium() as browser:
        person = Person(browser, portal.url, user, portal.state.password(), dark=dark)
        person.log_in()
        image = person.page.get_by_label("Image of 1 GPU")
        expect(image).to_have_value("plain")
        assert image.locator("option").all_inner_texts() == ["PyTorch 2: with CUDA 12", "Python"]
        assert violations(person.page) == []
        image.select_option("torch")
        if pictures:
            person.page.screenshot(path=pictures / "images.png", full_page=True)
        person.start("rnd/gpu1")
        person.page.wait_for_url("**/spawn-pending/**")
        expect(person.page.locator(".mw-phases li.now")).to_have_attribute("data-phase", "server")
        (pod,) = portal.pods()
        assert pod["spec"]["containers"][0]["image"] == "site/torch:2"
        assert violations(person.page) == []
        if pictures:
            person.page.screenshot(path=pictures / "pending-pod.png", full_page=True)
        person.page.click("#stop-server-btn")
        expect(person.page.locator("#mw-heading")).to_have_text("Stopped")
        person.page.goto(f"{portal.url}/hub/spawn")
        expect(image).to_have_value("torch")
        assert person.errors == []
        person.close()
    portal.servers.up = True
