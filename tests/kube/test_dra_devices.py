"""What a DRA driver offers and claims hold is counted from a real API server; the driver is imitated by its slices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from informing import client, soon
from job_service import NAMESPACE, PODS, Serving, make_namespace, waits_because
from makeway_quota.backends.kubernetes.cluster.dra_devices import CLASSES, GROUP, IMPLICIT_RESOURCE_PREFIX, SLICES
from makeway_quota.backends.kubernetes.cluster.inventory import KubernetesInventory
from makeway_quota.backends.kubernetes.cluster.nodes import NodeSelector, toleration

from kube_cluster.cluster import Cluster
from kube_cluster.simulated import SIMULATED

pytestmark = [pytest.mark.kube, pytest.mark.covers("F02", "F82")]

NODE, DRIVER, CLASS = "simulated-0060", "gpu.makeway.test", "gpus-of-makeway-test"
CLAIMS = f"{GROUP}/namespaces/default/resourceclaims"
JOB_CLAIMS = f"{GROUP}/namespaces/{NAMESPACE}/resourceclaims"
TEMPLATES = f"{GROUP}/namespaces/{NAMESPACE}/resourceclaimtemplates"
CLAIM: dict[str, Any] = {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two-of-makeway"}]}}
POLICY = {
    "version": 1,
    "pools": [
        {
            "name": "dra",
            "resource": f"{IMPLICIT_RESOURCE_PREFIX}{CLASS}",
            "nodes": {"labels": {"kubernetes.io/hostname": NODE}},
        }
    ],
    "profiles": [{"name": "gpu2", "gpus": 2, "pools": ["dra"], "kinds": ["job"], "pod": CLAIM}],
    "policies": [{"name": "rnd", "groups": ["rnd"], "quotas": [{"pools": ["dra"], "reserved": 4}]}],
}


def device_slice(devices: int) -> dict[str, Any]:
    kind = {"type": {"string": "gpu"}}
    made = [{"name": f"gpu-{at}", "attributes": kind} for at in range(devices)]
    pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "slice-of-makeway-test"},
        "spec": {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": made},
    }


@pytest.fixture
def driver(kwok_cluster: Cluster) -> Iterator[Cluster]:
    """Return the cluster with a driver's slice of 4 devices on one node, and their class."""
    expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"
    kwok_cluster.api.create(
        CLASSES,
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": CLASS},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        },
    )
    kwok_cluster.api.create(SLICES, device_slice(4))
    yield kwok_cluster
    kwok_cluster.api.delete(f"{SLICES}/slice-of-makeway-test")
    kwok_cluster.api.delete(f"{CLASSES}/{CLASS}")


async def test_slices_and_allocated_claims_are_counted_as_they_change(driver: Cluster) -> None:
    pool = NodeSelector(
        "dra", f"{IMPLICIT_RESOURCE_PREFIX}{CLASS}", {"kubernetes.io/hostname": NODE}, (toleration(SIMULATED),)
    )
    async with client(driver) as api:
        inventory = KubernetesInventory(api, [pool], instance="here")
        await inventory.open()

        def amounts() -> tuple[int, int]:
            results = inventory.node_statuses()[NODE]
            return len(results.devices), results.foreign_gpus

        await soon(lambda: amounts() == (4, 0), "the devices of the slice are there")
        request = {"name": "gpu", "exactly": {"deviceClassName": CLASS}}
        claim = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "theirs"},
            "spec": {"devices": {"requests": [request]}},
        }
        await asyncio.to_thread(driver.api.create, CLAIMS, claim)
        result = {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": "gpu-1"}
        status = {"allocation": {"devices": {"results": [result]}}}
        await asyncio.to_thread(driver.api.merge, f"{CLAIMS}/theirs/status", {"status": status})
        await soon(lambda: amounts() == (4, 1000), "the allocated device is taken")
        await asyncio.to_thread(driver.api.merge, f"{CLAIMS}/theirs/status", {"status": {"allocation": None}})
        await asyncio.to_thread(driver.api.delete, f"{CLAIMS}/theirs")
        await soon(lambda: amounts() == (4, 0), "it is free again")
        await inventory.close()


@pytest.fixture
def template(driver: Cluster) -> Iterator[dict[str, Any]]:
    """Return a template of claims of two devices, which is not there yet; afterwards it and the pods are gone."""
    make_namespace(driver)
    request = {"name": "gpu", "exactly": {"deviceClassName": CLASS, "count": 2}}
    yield {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "two-of-makeway"},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
    driver.api.delete(PODS, gracePeriodSeconds="0")
    driver.api.delete(TEMPLATES)


async def test_jobs_get_their_gpus_by_claims_of_their_profile_and_the_next_one_once_these_are_free(
    driver: Cluster, template: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claims are generated and allocated by Kubernetes; the service has the rights of the documentation alone."""
    monkeypatch.setattr("makeway_quota.control.start_backoff.FIRST_DELAY", 1.0)
    monkeypatch.setattr("makeway_quota.control.start_backoff.MAX_DELAY", 1.0)
    serving = Serving(driver, tmp_path / "state", json.dumps(POLICY))
    serving.environ |= {"MAKEWAY_KUBE_TOLERATIONS": SIMULATED, "MAKEWAY_KUBE_CHECKPOINT_CLAIM": ""}

    async def devices() -> dict[str, set[str]]:
        """Return the devices of each job's pod that is on the node."""
        pods = await asyncio.to_thread(driver.api.items, PODS)
        claims = {one["metadata"]["name"]: one for one in await asyncio.to_thread(driver.api.items, JOB_CLAIMS)}
        result = {}
        for pod in pods:
            names = [one["resourceClaimName"] for one in pod["status"].get("resourceClaimStatuses", ())]
            given = [claims[name].get("status", {}).get("allocation", {}) for name in names if name in claims]
            results = [one["device"] for item in given for one in item.get("devices", {}).get("results", ())]
            if pod["spec"].get("nodeName") == NODE and "deletionTimestamp" not in pod["metadata"]:
                result[pod["metadata"]["labels"]["makeway/job"]] = set(results)
        return result

    try:
        async with serving.running():
            root = serving.client("root")
            first = await serving.submit("ana", "one", "sleep", "600", profile="gpu2")
            await waits_because(serving, first, "there is no ResourceClaimTemplate two-of-makeway", "administrator")
            (odd,) = (await root.policy_validate(json.dumps(POLICY))).warnings
            assert odd.where == "profile gpu2"
            assert "There is no ResourceClaimTemplate two-of-makeway in the namespace jobs" in odd.message
            await asyncio.to_thread(driver.api.create, TEMPLATES, template)
            second, third = [await serving.submit("ana", name, "sleep", "600", profile="gpu2") for name in ("b", "c")]

            async def both_run() -> bool:
                return sorted(map(len, (await devices()).values())) == [2, 2]

            await serving.until(both_run, lambda: "two jobs have two devices each")
            result = await devices()
            assert set.union(*result.values()) == {f"gpu-{at}" for at in range(4)}
            (waits,) = {first.id, second.id, third.id} - result.keys()
            (pool,) = await root.pools()
            assert [(node.name, node.foreign, len(node.devices)) for node in pool.nodes] == [(NODE, 0, 4)]
            assert (await serving.client("ana").job(waits)).state.value == "pending"
            ended = min(result)
            await serving.client("ana").cancel(ended)

            async def moved_up() -> bool:
                return (await devices()).get(waits) == result[ended]

            await serving.until(moved_up, lambda: "the next job has the devices that became free")
            assert (await root.policy_validate(json.dumps(POLICY))).warnings == []
    finally:
        for one in serving.clients.values():
            await one.close()
        serving.reservation.close()
