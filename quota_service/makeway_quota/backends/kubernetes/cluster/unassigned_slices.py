"""Describe the GPUs that drivers offer by dynamic resource allocation (DRA), and that no pool takes.

Such GPUs are in ResourceSlices, and not among the allocatable resources of nodes. Read once, for `makeway-quota nodes`
and `doctor`; a cluster without that API, or an account that may not read it, is no error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from makeway_api.quantities import count, listed

from ..api.client import ApiClient, ApiStatusError, Object
from .dra_devices import SLICES, DeviceId, newest_slices, project_slice

Offered = Mapping[str, Mapping[str, int]]
"""Node and resource to the number of devices"""
UNREADABLE = (403, 404)
"""The answers where the account may not read ResourceSlices, and where the cluster has none of this version."""
_GPUS = re.compile(r"(?:^|[^a-z])[vx]?(?:gpu|npu|tpu|gaudi|neuron)", re.IGNORECASE)
"""In the name of a driver, such as gpu.nvidia.com; not in those of network cards, or of compute-domain.nvidia.com."""


async def slice_sentences(client: ApiClient, counted: Offered = MappingProxyType({})) -> list[str]:
    """Return one sentence for each driver whose GPUs no pool takes, sorted by driver; `counted` are taken."""
    try:
        items = (await client.get(SLICES)).get("items") or ()
    except ApiStatusError as refusal:
        if refusal.status in UNREADABLE:
            return []
        raise
    return described(items, counted)


def described(items: Iterable[Object], counted: Offered = MappingProxyType({})) -> list[str]:
    """Return one sentence for each driver of GPUs in ResourceSlices, sorted by driver.

    `counted` has what pools take, by node and resource: it may be of one driver for each node.
    """
    result: list[str] = []
    for driver, by_node in sorted(sliced(items).items()):
        uncounted = {name: many - sum(counted.get(name, {}).values()) for name, many in by_node.items()}
        uncounted = {name: many for name, many in uncounted.items() if many > 0}
        where = f" of {listed(names)}" if (names := sorted(filter(None, uncounted))) else ""
        if uncounted:
            result.append(
                f"{driver} offers {count(sum(uncounted.values()), 'device')}{where} by ResourceSlices (DRA), which no "
                "pool takes: give a pool the extended resource of their DeviceClass. Devices that are tainted or share "
                "counters, and classes with other selectors than `==`, never count."
            )
    return result


def sliced(items: Iterable[Object]) -> dict[str, dict[str, int]]:
    """Return the devices of GPU drivers that can be allocated whole, by driver and node; "" has those of several nodes.

    Each counts once, as those of pools do.
    """
    result: dict[str, dict[str, int]] = {}
    known: set[DeviceId] = set()
    for item in newest_slices(filter(None, map(project_slice, items))):
        ids = {DeviceId(item.driver, item.pool, name) for name, _ in item.devices} - known
        if _GPUS.search(item.driver) and ids:
            known |= ids
            by_node = result.setdefault(item.driver, {})
            by_node[item.node] = by_node.get(item.node, 0) + len(ids)
    return result
