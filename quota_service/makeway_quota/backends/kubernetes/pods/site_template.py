"""Read what a site adds to all pods of jobs from the settings of the service, in JSON; called when the backend is made.

The template has the form of a profile's `pod`, and the same limits: nothing that Makeway decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ....policy.pod_template import problems
from ..api.quantities import number

TEMPLATE = "MAKEWAY_KUBE_POD"
RESOURCES = "MAKEWAY_KUBE_LAUNCHER_RESOURCES"
_NAME = re.compile(r"[a-z0-9.-]+(/[A-Za-z0-9._-]+)?")


def template_setting(text: str) -> Mapping[str, Any]:
    """Return the pod template that a setting means, empty for ""; ValueError where it is none, or not allowed."""
    template = _table(TEMPLATE, text, 'such as {"metadata": {"annotations": {"team": "ml"}}}')
    for problem in problems(template):
        raise ValueError(f"{TEMPLATE}: {problem}.")
    return template


def resources_setting(text: str) -> Mapping[str, Any]:
    """Return the requests and limits that a setting means, empty for ""; ValueError where they are none."""
    example = 'such as {"requests": {"cpu": "100m"}, "limits": {"cpu": "500m"}}'
    resources = _table(RESOURCES, text, example)
    for kind, quantities in resources.items():
        if kind not in ("requests", "limits") or not isinstance(quantities, dict):
            raise ValueError(f"{RESOURCES}: {kind} is not requests or limits: expected a JSON object {example}.")
        for name, quantity in quantities.items():
            if not _NAME.fullmatch(name) or not isinstance(quantity, str | int | float):
                raise ValueError(f"{RESOURCES}: {kind}.{name} is not a resource: expected a JSON object {example}.")
            number(str(quantity))
    return resources


def _table(setting: str, text: str, example: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{setting} is not JSON ({error}): expected an object {example}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{setting} is not a JSON object: expected one {example}.")
    return found
