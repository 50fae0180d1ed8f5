"""GPUs that drivers offer by ResourceSlices and that no pool takes are named."""

from __future__ import annotations

from typing import Any

import pytest
from api_server import ApiServer
from makeway_quota.backends.kubernetes.api.client import ApiStatusError
from makeway_quota.backends.kubernetes.cluster.dra_devices import SLICES
from makeway_quota.backends.kubernetes.cluster.unassigned_slices import described, slice_sentences, sliced

ADVICE = (
    "which no pool takes: give a pool the extended resource of their DeviceClass. Devices that are tainted or share "
    "counters, and classes with other selectors than `==`, never count."
)


def resource_slice(driver: str, devices: int, node: str = "n1", pool: str = "", generation: int = 1) -> dict[str, Any]:
    """Return a ResourceSlice; one without a node is of several."""
    where = {"nodeName": node} if node else {"allNodes": True}
    named = {"name": pool or node, "generation": generation, "resourceSliceCount": 1}
    return {"spec": {"driver": driver, "pool": named, "devices": [{"name": f"d{n}"} for n in range(devices)], **where}}


async def test_the_devices_of_gpu_drivers_are_named_by_driver_and_node() -> None:
    server = ApiServer()
    server.lists[SLICES] = [
        resource_slice("gpu.nvidia.com", 8),
        resource_slice("gpu.nvidia.com", 4, "n2"),
        resource_slice("tpu.google.com", 2, ""),
        resource_slice("compute-domain.nvidia.com", 2048),
        resource_slice("dra.net", 4),
        {},
    ]
    assert await slice_sentences(server) == [
        f"gpu.nvidia.com offers 12 devices of n1 and n2 by ResourceSlices (DRA), {ADVICE}",
        f"tpu.google.com offers 2 devices by ResourceSlices (DRA), {ADVICE}",
    ]


def test_what_pools_take_is_not_named() -> None:
    items = [resource_slice("gpu.nvidia.com", 8), resource_slice("gpu.nvidia.com", 4, "n2")]
    assert described(items, {"n1": {"a": 8}, "n2": {"a": 4}}) == []
    (remaining,) = described(items, {"n1": {"a": 5, "b": 3}, "n2": {"a": 1}})
    assert remaining.startswith("gpu.nvidia.com offers 3 devices of n2 by ResourceSlices (DRA)")


@pytest.mark.parametrize(
    "never",
    [
        {"consumesCounters": [{"counterSet": "gpu-0", "counters": {}}]},
        {"taints": [{"key": "example.com/broken", "effect": "NoSchedule"}]},
        {"taints": [{"key": "example.com/broken", "effect": "NoExecute"}]},
    ],
)
def test_what_no_pool_can_count_is_not_named_beside_the_pool_of_the_others(never: dict[str, Any]) -> None:
    some, all_of_them = resource_slice("gpu.nvidia.com", 4), resource_slice("gpu.nvidia.com", 2, "n2")
    for item in (*some["spec"]["devices"][:3], *all_of_them["spec"]["devices"]):
        item.update(never)
    assert described([some, all_of_them], {"n1": {"a": 1}}) == []
    (remaining,) = described([some, all_of_them], {})
    assert remaining.startswith("gpu.nvidia.com offers 1 device of n1 ")


def test_a_device_in_two_slices_counts_once() -> None:
    assert sliced([resource_slice("gpu.nvidia.com", 2), resource_slice("gpu.nvidia.com", 3)]) == {
        "gpu.nvidia.com": {"n1": 3}
    }


def test_only_the_newest_generation_of_a_pool_counts() -> None:
    old, new = resource_slice("gpu.nvidia.com", 8), resource_slice("gpu.nvidia.com", 3, generation=2)
    more = resource_slice("gpu.nvidia.com", 2, generation=2)
    more["spec"]["devices"] = [{"name": "e0"}, {"name": "e1"}]
    other = resource_slice("gpu.nvidia.com", 1, pool="other")
    assert sliced([old, new, more, other]) == {"gpu.nvidia.com": {"n1": 6}}
    assert sliced([resource_slice("gpu.nvidia.com", 0)]) == {}


@pytest.mark.parametrize(("status", "raised"), [(404, False), (403, False), (500, True)])
async def test_a_cluster_without_the_api_is_no_error(status: int, raised: bool) -> None:
    server = ApiServer()

    def refuse(method: str, path: str) -> None:
        raise ApiStatusError(status, "", "no")

    server.answer = refuse
    if raised:
        with pytest.raises(ApiStatusError):
            await slice_sentences(server)
    else:
        assert await slice_sentences(server) == []
