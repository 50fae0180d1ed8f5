"""Merge the pod template of a profile into a pod, as Kubernetes merges a strategic patch.

Tables are merged key by key; lists whose entries have a key of their own are merged entry by entry; tolerations are
added; anything else is replaced. Pure; the template was checked when the policy document was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ..api.client import Object

KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
}
ADDED = ("tolerations",)


def merged(pod: Object, template: Mapping[str, Any]) -> Object:
    """Return the pod with everything that the template says; neither is changed."""
    return _tables(pod, template)


def _tables(base: Object, patch: Mapping[str, Any]) -> Object:
    found = deepcopy(base)
    for name, value in patch.items():
        mine = found.get(name)
        if value is None:
            found.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(mine, dict):
            found[name] = _tables(mine, value)
        elif isinstance(value, list) and isinstance(mine, list) and name in KEYS:
            found[name] = _entries(mine, value, KEYS[name])
        elif isinstance(value, list) and isinstance(mine, list) and name in ADDED:
            found[name] = [*mine, *(deepcopy(one) for one in value if one not in mine)]
        else:
            found[name] = deepcopy(value)
    return found


def _entries(base: list[Object], patch: list[Object], key: str) -> list[Object]:
    found = {entry.get(key): entry for entry in base}
    for entry in patch:
        name = entry.get(key)
        found[name] = _tables(found[name], entry) if name in found else deepcopy(entry)
    return list(found.values())
