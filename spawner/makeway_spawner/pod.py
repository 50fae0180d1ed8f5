"""A lease as pod settings: where the pod must run, what it asks for, and what it is called. Pure."""

from __future__ import annotations

import copy
from typing import Any

from .held import Held

PREFIX = "makeway.io"


def labels(lease: Held) -> dict[str, str]:
    """Name the session, so that the service finds its pods; names of people are not labels (see `notes`)."""
    found = {
        f"{PREFIX}/session": lease.id,
        f"{PREFIX}/profile": lease.profile,
        f"{PREFIX}/kind": "session",
        f"{PREFIX}/preemptible": str(lease.preemptible).lower(),
    }
    return found | ({f"{PREFIX}/team": lease.team} if lease.team else {})


def notes(lease: Held, owner: str) -> dict[str, str]:
    """Tell what may be any text."""
    devices = ";".join(f"{node}:{','.join(map(str, indices))}" for node, indices in lease.places)
    return {f"{PREFIX}/owner": owner, f"{PREFIX}/placement": devices}


def resources(lease: Held, resource: str) -> dict[str, str]:
    """Ask for whole devices of a resource; Kubernetes counts them and the device plugin hands them out."""
    return {resource: f"{lease.gpus:g}"} if lease.gpus else {}


def pinned(lease: Held, terms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the granted node to required node affinity terms.

    Terms are alternatives ("or"), so the node goes into each of them; a term of its own would let the pod run
    anywhere that another term allows.
    """
    nodes = [node for node, _ in lease.places]
    if not nodes or not lease.gpus:
        return terms
    field = {"key": "metadata.name", "operator": "In", "values": nodes}
    found = copy.deepcopy(terms) or [{}]
    for term in found:
        term["matchFields"] = [*term.get("matchFields", []), field]
    return found


def environment(env: dict[str, str], lease: Held | None) -> dict[str, str]:
    """Leave device numbers to the container runtime; without GPUs it must hand out none."""
    found = {key: value for key, value in env.items() if key not in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")}
    if lease is None or not lease.gpus:
        found["NVIDIA_VISIBLE_DEVICES"] = "void"
    return found
