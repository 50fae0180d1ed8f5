"""Decide whether a notebook's pod has ended, from the pod as the API server shows it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from makeway_api.quantities import memory

from .server_log import last_line, quoted

ENDED = ("Succeeded", "Failed")
_SENTENCES = {
    "EvictionByEvictionAPI": "Its pod was evicted, as before maintenance of its node",
    "DeletionByTaintManager": "Its pod was evicted because of a taint of its node, as when a node does not answer",
    "DeletionByPodGC": "Its node is gone",
    "PreemptionByScheduler": "Kubernetes removed its pod for one with a higher priority",
    "TerminationByKubelet": "Its node evicted its pod",
    "Evicted": "Its node evicted its pod",
    "Terminated": "Its node was shut down",
    "Preempting": "Its node ended its pod for one that the cluster needs",
}
"""What happened, by the reason that Kubernetes gives."""
_REFUSALS = ("NodeAffinity", "NodeShutdown", "TopologyAffinityError", "UnexpectedAdmissionError")
"""Reasons of a pod that its node refused before anything of it ran"""
_OUT_OF = "OutOf"
"""The beginning of further such reasons, as OutOfcpu"""
OUT_OF_MEMORY = "OOMKilled"
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
CLOCKS_DIFFER = 60.0
"""Seconds by which the clocks of the Hub and of the API server may differ."""


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Whether the containers of the pod have ended for good."""
    return (pod.get("status") or {}).get("phase") in ENDED


def server_has_ended(pod: Mapping[str, Any]) -> bool:
    """Whether the notebook's container has ended, also while others of its pod run."""
    return has_ended(pod) or bool(_terminated(pod))


def is_refused(pod: Mapping[str, Any]) -> bool:
    """Whether the node of the pod refused it, so that nothing of it ran."""
    reason = str((pod.get("status") or {}).get("reason") or "")
    return has_ended(pod) and not _terminated(pod) and (reason in _REFUSALS or reason.startswith(_OUT_OF))


def is_refused_temporarily(pod: Mapping[str, Any]) -> bool:
    """Whether the node refused the pod for a reason that passes in seconds, as while its device plugin restarts."""
    reason = str((pod.get("status") or {}).get("reason") or "")
    return is_refused(pod) and (reason == "UnexpectedAdmissionError" or reason.startswith(_OUT_OF))


def is_deleting(pod: Mapping[str, Any]) -> bool:
    """Whether the pod is deleted and its containers may still be saving."""
    return "deletionTimestamp" in pod["metadata"]


def grace_seconds(pod: Mapping[str, Any]) -> float:
    """Return the seconds that the pod has to end once it is deleted."""
    return float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)


def seconds_since_deletion(pod: Mapping[str, Any], now: float) -> float:
    """Return for how many seconds the pod has been deleted for certain at `now` (Unix seconds), whatever the clocks."""
    until = datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]).timestamp()
    return max(0.0, now - (until - grace_seconds(pod)) - CLOCKS_DIFFER)


def cause(pod: Mapping[str, Any]) -> str:
    """Return Kubernetes' own `reason: message` of the end or deletion of the pod; empty where it gives none."""
    reason, message = _reason(pod)
    return ": ".join(str(part) for part in (reason, message) if part)


def end_message(pod: Mapping[str, Any] | None, gone: bool = False) -> str:
    """Return how the server in the pod ended, for its user; of a pod that is gone, what was seen last."""
    if pod is None:
        return "Its pod is gone, and Kubernetes does not say why."
    reason, _ = _reason(pod)
    if reason not in _SENTENCES and (is_deleting(pod) or (gone and not has_ended(pod))):
        return "Its pod was deleted in Kubernetes, not by Makeway."
    if reason == OUT_OF_MEMORY:
        return _out_of_memory(pod)
    message = cause(pod).rstrip(". ")
    by_node = "Its node refused its pod" if is_refused(pod) else ""
    words = _SENTENCES.get(reason) or by_node or _failed_before(pod) or "Its server ended by itself"
    line = "" if reason in _SENTENCES else quoted(last_line(str(_terminated(pod).get("message") or "")))
    return words + (f" ({message})." if message else ".") + line


def memory_limit(pod: Mapping[str, Any]) -> str:
    """Return the most memory that the notebook's container may use, such as `16 GiB`; empty without a limit."""
    for one in (pod.get("spec") or {}).get("containers") or ():
        if one.get("name") == "notebook":
            text = str(((one.get("resources") or {}).get("limits") or {}).get("memory") or "")
            match = _QUANTITY.fullmatch(text)
            return memory(float(match[1]) * _UNITS.get(match[2], 1) / 2**20) if match else text
    return ""


def _out_of_memory(pod: Mapping[str, Any]) -> str:
    limit = memory_limit(pod)
    if not limit:
        return (
            f"Its node ran out of memory ({cause(pod)}). Start it again with a profile that sets a memory limit, or on "
            "another node."
        )
    return (
        f"It used more memory than the {limit} that it may use ({cause(pod)}). Choose a profile with more memory, or "
        "hold less data in memory at a time."
    )


def _reason(pod: Mapping[str, Any]) -> tuple[str, str]:
    status = pod.get("status") or {}
    for one in status.get("conditions") or ():
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True":
            return one.get("reason") or "", one.get("message") or ""
    if status.get("reason") or status.get("message"):
        return status.get("reason") or "", status.get("message") or ""
    if state := _terminated(pod) or _failed_init(pod)[1]:
        return state.get("reason") or "", f"exit code {state.get('exitCode')}"
    return "", ""


def _terminated(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the notebook's container ended, empty while it has not."""
    for one in (pod.get("status") or {}).get("containerStatuses") or ():
        if one.get("name") == "notebook":
            return dict((one.get("state") or {}).get("terminated") or {})
    return {}


def _failed_init(pod: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of the init container that failed and how, both empty where none has."""
    for item in (pod.get("status") or {}).get("initContainerStatuses") or ():
        state = (item.get("state") or {}).get("terminated") or {}
        if state.get("exitCode"):
            return str(item.get("name") or ""), state
    return "", {}


def _failed_before(pod: Mapping[str, Any]) -> str:
    name, _ = _failed_init(pod)
    return f"The init container {name} of its pod failed, so that its server was not started" if name else ""
