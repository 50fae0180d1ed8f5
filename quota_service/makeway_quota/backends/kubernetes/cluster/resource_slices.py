"""Describe the GPUs that drivers offer by dynamic resource allocation (DRA), and that no pool takes.

Such GPUs are in ResourceSlices, and not among the allocatable resources of nodes. Read once, for `makeway-quota nodes`
and `doctor`; a cluster without that API, or an account that may not read it, is no error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from makeway_api.quantities import count, listed

from ..api.client import ApiClient, ApiRefusal, Object

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
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
    except ApiRefusal as refusal:
        if refusal.status in UNREADABLE:
            return []
        raise
    return described(items, counted)


def described(items: Iterable[Object], counted: Offered = MappingProxyType({})) -> list[str]:
    """Return one sentence for each driver of GPUs in ResourceSlices, sorted by driver.

    `counted` has what pools take, by node and resource: it may be of one driver for each node.
    """
    found: list[str] = []
    for driver, by_node in sorted(sliced(items).items()):
        left = {name: many - sum(counted.get(name, {}).values()) for name, many in by_node.items()}
        left = {name: many for name, many in left.items() if many > 0}
        where = f" of {listed(names)}" if (names := sorted(filter(None, left))) else ""
        if left:
            found.append(
                f"{driver} offers {count(sum(left.values()), 'device')}{where} by ResourceSlices (DRA), which no pool "
                "takes: add a pool with the extended resource of their DeviceClass."
            )
    return found


def sliced(items: Iterable[Object]) -> dict[str, dict[str, int]]:
    """Return the devices of GPU drivers by driver and node; "" has those that are not of one node.

    Only the newest generation of each of a driver's pools counts, as while a driver replaces its slices.
    """
    specs = [spec for item in items if _GPUS.search((spec := item.get("spec") or {}).get("driver") or "")]
    newest: dict[tuple[str, str], int] = {}
    for spec in specs:
        newest[_pool(spec)] = max(newest.get(_pool(spec), 0), _generation(spec))
    found: dict[str, dict[str, int]] = {}
    for spec in specs:
        if _generation(spec) == newest[_pool(spec)] and (devices := spec.get("devices") or ()):
            by_node = found.setdefault(spec["driver"], {})
            name = spec.get("nodeName") or ""
            by_node[name] = by_node.get(name, 0) + len(devices)
    return found


def _pool(spec: Object) -> tuple[str, str]:
    return spec["driver"], (spec.get("pool") or {}).get("name") or ""


def _generation(spec: Object) -> int:
    return int((spec.get("pool") or {}).get("generation") or 0)
