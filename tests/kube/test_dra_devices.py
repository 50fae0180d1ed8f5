"""What a DRA driver offers and claims hold is counted from a real API server; the driver is imitated by its slices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from informing import client, soon
from makeway_quota.backends.kubernetes.cluster.dra_devices import CLASSES, GROUP, IMPLICIT_RESOURCE_PREFIX, SLICES
from makeway_quota.backends.kubernetes.cluster.inventory import KubernetesInventory
from makeway_quota.backends.kubernetes.cluster.nodes import NodeSelector, toleration

from kube_cluster.cluster import Cluster
from kube_cluster.simulated import SIMULATED

pytestmark = [pytest.mark.kube, pytest.mark.covers("F02", "F82")]

NODE, DRIVER, CLASS = "simulated-0060", "gpu.makeway.test", "gpus-of-makeway-test"
CLAIMS = f"{GROUP}/namespaces/default/resourceclaims"


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
            found = inventory.seen()[NODE]
            return len(found.devices), found.foreign_gpus

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
