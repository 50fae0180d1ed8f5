"""Merge pod templates into a pod, as Kubernetes merges a strategic patch, and read that of a site from its settings.

Tables are merged key by key; lists whose entries have a key of their own are merged entry by entry; tolerations are
added; anything else is replaced. Pure; the template of a profile was checked when the policy document was read. What a
site adds to all pods of jobs has the same form and limits: nothing that Makeway decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ....policy.pod_template import claim_templates_of, template_problems
from ..api.client import Object
from ..api.quantities import parse_quantity

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
TEMPLATE = "MAKEWAY_KUBE_POD"
RESOURCES = "MAKEWAY_KUBE_LAUNCHER_RESOURCES"
_NAME = re.compile(r"[a-z0-9.-]+(/[A-Za-z0-9._-]+)?")


def merged(pod: Object, template: Mapping[str, Any]) -> Object:
    """Return the pod with everything that the template says; neither is changed."""
    return _merge(pod, template)


def _merge(base: Object, patch: Mapping[str, Any]) -> Object:
    result = deepcopy(base)
    for name, value in patch.items():
        mine = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(mine, dict):
            result[name] = _merge(mine, value)
        elif isinstance(value, list) and isinstance(mine, list) and name in KEYS:
            result[name] = _entries(mine, value, KEYS[name])
        elif isinstance(value, list) and isinstance(mine, list) and name in ADDED:
            result[name] = [*mine, *(deepcopy(one) for one in value if one not in mine)]
        else:
            result[name] = deepcopy(value)
    return result


def _entries(base: list[Object], patch: list[Object], key: str) -> list[Object]:
    by_name = {entry.get(key): entry for entry in base}
    for entry in patch:
        name = entry.get(key)
        by_name[name] = _merge(by_name[name], entry) if name in by_name else deepcopy(entry)
    return list(by_name.values())


def template_setting(text: str) -> Mapping[str, Any]:
    """Return the pod template that a setting means, empty for ""; ValueError where it is none, or not allowed."""
    template = _parse_object(TEMPLATE, text, 'such as {"metadata": {"annotations": {"team": "ml"}}}')
    for problem in template_problems(template):
        raise ValueError(f"{TEMPLATE}: {problem}.")
    if claim_templates_of(template):
        raise ValueError(f"{TEMPLATE}: spec.resourceClaims is for the pod template of a profile, whose GPUs they are.")
    return template


def resources_setting(text: str) -> Mapping[str, Any]:
    """Return the requests and limits that a setting means, empty for ""; ValueError where they are none."""
    example = 'such as {"requests": {"cpu": "100m"}, "limits": {"cpu": "500m"}}'
    resources = _parse_object(RESOURCES, text, example)
    for kind, quantities in resources.items():
        if kind not in ("requests", "limits") or not isinstance(quantities, dict):
            raise ValueError(f"{RESOURCES}: {kind} is not requests or limits: expected a JSON object {example}.")
        for name, quantity in quantities.items():
            if not _NAME.fullmatch(name) or not isinstance(quantity, str | int | float):
                raise ValueError(f"{RESOURCES}: {kind}.{name} is not a resource: expected a JSON object {example}.")
            parse_quantity(str(quantity))
    return resources


def _parse_object(setting: str, text: str, example: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{setting} is not JSON ({error}): expected an object {example}.") from error
    if not isinstance(table, dict):
        raise ValueError(f"{setting} is not a JSON object: expected one {example}.")
    return table
