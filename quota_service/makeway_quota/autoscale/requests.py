"""Render what a provider is asked for when it launches a machine: the same bytes for each call of one machine.

The request is kept in the row, so that a document that changes between two calls changes nothing of them. It has no
secret.
"""

from __future__ import annotations

import json

from .deployment import Deployment, MachineType
from .sizing import Launch


def render(deployment: Deployment, kind: MachineType, launch: Launch, machine: str) -> str:
    """Return the request of a launch as JSON with sorted keys."""
    request = {
        "deployment": deployment.name,
        "machine": machine,
        "instance": kind.instance,
        "zone": launch.zone,
        "market": launch.market,
        "max_price": launch.price if launch.market == "spot" else None,
        "gpus": kind.gpus,
        "cpu": kind.cpu,
        "memory": kind.memory,
        "image": kind.image,
        "init_script": kind.init_script,
        "cpu_only": kind.cpu_only,
        "orphan_after": deployment.orphan_after,
        "settings": dict(deployment.settings),
    }
    return json.dumps(request, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
