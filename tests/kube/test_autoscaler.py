"""A deployment of a cluster whose autoscaler adds nodes for jobs that wait, and removes them when these are over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml
from informing import soon
from job_service import NAMESPACE, PODS, Serving, make_namespace
from makeway_quota.autoscale.machine import Machine
from pods import wait_until
from releases import DEFINITIONS

from kube_cluster.api import Api, ApiProblem, Object
from kube_cluster.cluster import Cluster
from kube_cluster.stand_in_autoscaler import POOL, StandInAutoscaler
from kube_cluster.stand_in_provisioning import conditions_of

pytestmark = [pytest.mark.kube, pytest.mark.slow]

DEPLOYMENT = """
version: 1
name: grows
provider: kubernetes
poll_interval: 1
request_timeout: 60
machine_types:
  - {name: small, pool: cloud, instance: small-2, gpus: 2, idle_timeout: 3}
  - {name: large, pool: cloud, instance: large-4, gpus: 4, idle_timeout: 3}
"""
NEXT_POOL = DEPLOYMENT.replace("name: large, pool: cloud", "name: large, pool: spare")
ASKS = DEPLOYMENT + "settings: {provisioning: request}\n"
REQUESTS = f"/apis/autoscaling.x-k8s.io/v1/namespaces/{NAMESPACE}/provisioningrequests"
TEMPLATES = f"/api/v1/namespaces/{NAMESPACE}/podtemplates"
SIMULATED = {"key": "kwok.x-k8s.io/node", "operator": "Exists"}


def policy(*pools: str) -> str:
    pod = {"spec": {"tolerations": [SIMULATED]}}
    document = {
        "version": 1,
        "pools": [{"name": name, "kind": "autoscaled", "nodes": {"labels": {POOL: name}}} for name in pools],
        "profiles": [{"name": "gpu2", "gpus": 2, "pools": [*pools], "policies": ["rnd"], "grace": 1, "pod": pod}],
        "policies": [{"name": "rnd", "groups": ["rnd"], "quotas": [{"pools": [*pools], "reserved": 0, "limit": 8}]}],
    }
    return json.dumps(document)


@pytest.fixture
async def growing(control_plane: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Serving]:
    """Return a service for pools without a single node, which does not run yet; by default one pool."""
    make_namespace(control_plane)
    control_plane.simulate()
    made = Serving(control_plane, tmp_path / "state", policy(*getattr(request, "param", ("cloud",))))
    made.environ |= {"MAKEWAY_BACKEND": "kubernetes,machines", "MAKEWAY_KUBE_TOLERATIONS": "kwok.x-k8s.io/node"}
    del made.environ["MAKEWAY_KUBE_CHECKPOINT_CLAIM"]
    yield made
    for one in made.clients.values():
        await one.close()
    made.reservation.close()
    control_plane.api.delete(PODS, gracePeriodSeconds="0")


@pytest.fixture
def requests(control_plane: Cluster) -> Iterator[str]:
    """Install the kind of ProvisioningRequests; return the path of those of the jobs' namespace."""
    api = control_plane.api
    text = Path(__file__).with_name("provisioningrequests.yaml").read_text(encoding="utf-8")
    name = api.create(DEFINITIONS, yaml.safe_load(text))["metadata"]["name"]

    def serves() -> bool:
        conditions = (api.get(f"{DEFINITIONS}/{name}").get("status") or {}).get("conditions") or ()
        if not any(one["type"] == "Established" and one["status"] == "True" for one in conditions):
            return False
        try:
            api.items(REQUESTS)
        except ApiProblem as error:
            if error.status in (404, 429):  # 429: "storage is (re)initializing"
                return False
            raise
        return True

    wait_until(serves, "the kind is served")
    yield REQUESTS
    api.delete(f"{DEFINITIONS}/{name}")
    wait_until(lambda: not api.items(DEFINITIONS, fieldSelector=f"metadata.name={name}"), "the kind is gone")


def objects(api: Api) -> list[str]:
    result = [
        *api.items(PODS),
        *api.items(f"/api/v1/namespaces/{NAMESPACE}/configmaps", labelSelector="makeway/machine"),
    ]
    return sorted(one["metadata"]["name"] for one in result)


@pytest.mark.covers("F71", "F83")
async def test_a_job_gets_a_node_of_the_clusters_autoscaler_which_goes_when_the_job_is_over(
    growing: Serving, control_plane: Cluster
) -> None:
    api = control_plane.api
    groups = {"small-2": (2, 0), "large-4": (4, 1)}  # of the preferred type there is none
    with StandInAutoscaler(api, "cloud", groups) as autoscaler:
        async with growing.running() as service:
            store = service.components.store
            store.deployments.save("grows", DEPLOYMENT, 0, "root", 1.0)
            job = await growing.submit("ana", "fit", "train", profile="gpu2")

            def rows() -> list[Machine]:
                return list(store.machines.live())

            await soon(lambda: [row.type for row in rows() if row.state == "ready"] == ["large"], "a machine is ready")
            assert autoscaler.added == ["auto-large-4-1"]
            (machine,) = rows()
            assert machine.cluster_node == "auto-large-4-1"

            def placed() -> bool:
                result = api.items(PODS, labelSelector=f"makeway/job={job.id}")
                return any(one["spec"].get("nodeName") == "auto-large-4-1" for one in result)

            await soon(placed, "its pod is on the new node")
            assert f"makeway-machine-{machine.id}-place" not in objects(api), "the placeholder has made way"
            await asyncio.sleep(5)
            assert [row.state for row in rows()] == ["ready"], "it is kept while it works"
            assert (autoscaler.added, autoscaler.removed) == (["auto-large-4-1"], [])
            await growing.client("ana").cancel(job.id)
            await soon(lambda: autoscaler.removed == ["auto-large-4-1"], "the cluster removes the node")
            await soon(lambda: not rows(), "the machine is gone")
            await soon(lambda: not objects(api), "nothing of it is left")
            assert (autoscaler.added, autoscaler.failures) == (["auto-large-4-1"], [])
            gone = store.machines.machine(machine.id)
            assert gone is not None
            assert gone.state == "gone"


@pytest.mark.covers("F71", "F83")
@pytest.mark.parametrize("growing", [("cloud", "spare")], indirect=True, ids=["two pools"])
async def test_a_job_goes_on_to_the_next_pool_where_the_autoscaler_adds_no_node_in_the_first(
    growing: Serving, control_plane: Cluster
) -> None:
    api = control_plane.api
    full, free = (
        StandInAutoscaler(api, "cloud", {"small-2": (2, 0)}),
        StandInAutoscaler(api, "spare", {"large-4": (4, 1)}),
    )
    with full, free:
        async with growing.running() as service:
            store = service.components.store
            store.deployments.save("grows", NEXT_POOL, 0, "root", 1.0)
            job = await growing.submit("ana", "fit", "train", profile="gpu2")
            said: set[str] = set()

            def rows() -> list[Machine]:
                return list(store.machines.live())

            async def ready() -> bool:
                reason = (await growing.client("ana").job(job.id)).reason
                said.add(reason.message if reason else "")
                return [row.type for row in rows() if row.state == "ready"] == ["large"]

            for _ in range(600):
                if await ready():
                    break
                await asyncio.sleep(0.1)
            assert [(row.type, row.pool, row.cluster_node) for row in rows()] == [("large", "spare", "auto-large-4-1")]

            def placed() -> bool:
                result = api.items(PODS, labelSelector=f"makeway/job={job.id}")
                return any(one["spec"].get("nodeName") == "auto-large-4-1" for one in result)

            await soon(placed, "its pod is on the new node of the second pool")
            events = service.components.store.machine_log.events("grows")
            assert [one.message for one in events if one.reason == "stock_out"] == ["small, any zone, on demand"]
            assert any(one.startswith("Waiting for a machine: booting.") for one in said), said
            await growing.client("ana").cancel(job.id)
            await soon(lambda: free.removed == ["auto-large-4-1"], "the cluster removes the node")
            await soon(lambda: not rows() and not objects(api), "nothing of it is left")
    assert (full.added, full.failures, free.failures) == ([], [], [])


@pytest.mark.covers("F71", "F83")
async def test_a_node_that_is_asked_for_by_a_provisioning_request_runs_the_job_that_consumes_it(
    growing: Serving, control_plane: Cluster, requests: str
) -> None:
    api = control_plane.api
    groups = {"small-2": (2, 0), "large-4": (4, 1)}  # of the preferred type there is none
    with StandInAutoscaler(api, "cloud", groups, booking=10.0) as autoscaler:
        async with growing.running() as service:
            store = service.components.store
            store.deployments.save("grows", ASKS, 0, "root", 1.0)
            job = await growing.submit("ana", "fit", "train", profile="gpu2")

            def rows() -> list[Machine]:
                return list(store.machines.live())

            await soon(lambda: [row.type for row in rows() if row.state == "ready"] == ["large"], "a machine is ready")
            (machine,) = rows()
            (asked,) = api.items(requests)
            assert asked["metadata"]["name"] == f"makeway-machine-{machine.id}"
            assert conditions_of(asked)["Provisioned"] == "True"
            assert machine.cluster_node == "auto-large-4-1"

            def pods() -> list[Object]:
                found = api.items(PODS, labelSelector=f"makeway/job={job.id}")
                return [one for one in found if one["spec"].get("nodeName") == "auto-large-4-1"]

            await soon(lambda: len(pods()) == 1, "its pod is on the new node")
            annotations = pods()[0]["metadata"]["annotations"]
            assert annotations["autoscaling.x-k8s.io/consume-provisioning-request"] == asked["metadata"]["name"]
            wanted_class = "best-effort-atomic-scale-up.autoscaling.x-k8s.io"
            assert annotations["autoscaling.x-k8s.io/provisioning-class-name"] == wanted_class
            await soon(lambda: "BookingExpired" in conditions_of(api.items(requests)[0]), "the booking has expired")
            await asyncio.sleep(5)
            assert [row.state for row in rows()] == ["ready"], "it is kept while it works"
            assert (autoscaler.added, autoscaler.removed) == (["auto-large-4-1"], [])
            await growing.client("ana").cancel(job.id)
            await soon(lambda: autoscaler.removed == ["auto-large-4-1"], "the cluster removes the node")
            await soon(lambda: not rows(), "the machine is gone")
            await soon(lambda: not objects(api), "no pod and no record is left")
            assert (api.items(requests), api.items(TEMPLATES), autoscaler.failures) == ([], [], [])


@pytest.mark.covers("F83")
async def test_the_cluster_removes_what_was_asked_for_with_the_record_of_the_machine(
    growing: Serving, control_plane: Cluster, requests: str
) -> None:
    api = control_plane.api
    records = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
    async with growing.running() as service:  # without an autoscaler, nothing is decided
        store = service.components.store
        store.deployments.save("grows", ASKS, 0, "root", 1.0)
        job = await growing.submit("ana", "fit", "train", profile="gpu2")
        await soon(lambda: len(api.items(requests)) == 1, "a machine is asked for")
        assert [one["metadata"]["name"] for one in api.items(TEMPLATES)] == [api.items(requests)[0]["metadata"]["name"]]
        await growing.client("ana").cancel(job.id)
    (record,) = api.items(records, labelSelector="makeway/machine")
    api.delete(f"{records}/{record['metadata']['name']}")
    await soon(lambda: not (api.items(requests) or api.items(TEMPLATES)), "what belongs to the record is removed")
