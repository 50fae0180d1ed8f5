"""Read the taints that pods tolerate: texts such as `key=value:NoSchedule`, as in MAKEWAY_KUBE_TOLERATIONS.

Called by the service for its nodes and the pods of jobs, and by the spawner for the pods of notebooks.
"""

from __future__ import annotations

import re

GPU = "nvidia.com/gpu"
EFFECTS = ("NoSchedule", "NoExecute", "PreferNoSchedule")
_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_NAME}")
_VALUE = re.compile(rf"({_NAME})?")
"""The key and the value of a taint, as Kubernetes accepts them."""


def toleration(text: str) -> dict[str, str]:
    """Return the toleration as a pod has it; ValueError for a text that is not `key[=value][:effect]`."""
    rest, colon, effect = text.strip().partition(":")
    key, equals, value = rest.partition("=")
    named = _KEY.fullmatch(key) and _VALUE.fullmatch(value)
    if not named or (colon and effect not in EFFECTS):
        raise ValueError(
            f"{text!r} is not a taint to tolerate: expected key, key=value, key:effect or key=value:effect, where the "
            "effect is NoSchedule, NoExecute or PreferNoSchedule."
        )
    result = {"key": key, "operator": "Equal" if equals else "Exists", "value": value, "effect": effect}
    return {name: part for name, part in result.items() if part}


def keys_of(resource: str) -> tuple[str, ...]:
    """Return the keys of the taints that nodes with a resource usually have, which pods for such nodes tolerate.

    That is the resource's own name; nodes whose GPUs NVIDIA's plugin cuts up or shares under another name, such as
    nvidia.com/mig-1g.10gb or nvidia.com/gpu.shared, keep the taint of whole ones.
    """
    whole = (GPU,) if resource.startswith("nvidia.com/") and resource != GPU else ()
    return (resource, *whole)
