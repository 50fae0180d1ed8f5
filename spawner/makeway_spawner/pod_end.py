"""Decide whether a notebook's pod has ended, from the pod as the API server shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

ENDED = ("Succeeded", "Failed")
CLOCKS_DIFFER = 60.0
"""Seconds by which the clocks of the Hub and of the API server may differ."""


def ended(pod: Mapping[str, Any]) -> bool:
    """Whether the containers of the pod have ended for good."""
    return (pod.get("status") or {}).get("phase") in ENDED


def deleting(pod: Mapping[str, Any]) -> bool:
    """Whether the pod is deleted and its containers may still be saving."""
    return "deletionTimestamp" in pod["metadata"]


def grace(pod: Mapping[str, Any]) -> float:
    """Return the seconds that the pod has to end once it is deleted."""
    return float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)


def deleted_for(pod: Mapping[str, Any], now: float) -> float:
    """Return for how many seconds the pod has been deleted for certain at `now` (Unix seconds), whatever the clocks."""
    until = datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]).timestamp()
    return max(0.0, now - (until - grace(pod)) - CLOCKS_DIFFER)


def why(pod: Mapping[str, Any]) -> str:
    """Return how the pod ended or why it is being deleted, in Kubernetes' words; empty where it does not say."""
    status = pod.get("status") or {}
    for one in status.get("conditions") or ():
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True":
            return _joined(one.get("reason"), one.get("message"))
    if status.get("reason") or status.get("message"):
        return _joined(status.get("reason"), status.get("message"))
    for one in status.get("containerStatuses") or ():
        state = (one.get("state") or {}).get("terminated") or {}
        if one.get("name") == "notebook" and state:
            return _joined(state.get("reason"), f"exit code {state.get('exitCode')}")
    return ""


def _joined(reason: Any, message: Any) -> str:
    return ": ".join(str(part) for part in (reason, message) if part)
