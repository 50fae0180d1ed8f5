"""Describe what an administrator can do about what does not end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .amounts import names

WorkerKind = Literal["pod", "process", "session"]


def remedy(place: WorkerKind, targets: Sequence[str], down: Sequence[str], namespace: str) -> str:
    """Return what an administrator can do; `targets` are what is left, `down` those of its nodes that are not ready."""
    if place == "session":
        return (
            "Stop the server on the Hub's admin page. If the Hub still lists it, look for its pod or process, and "
            "restart the Hub once that is gone."
        )
    if place == "process":
        pids = ",".join(target.removeprefix("process ") for target in targets) or "PID"
        return (
            f"The kernel cannot end it, usually because a driver or a network file system hangs: ps -o "
            f"pid,stat,wchan:30,args -p {pids} shows where. If that does not come back, restart the machine."
        )
    if down:
        node = down[0]
        return (
            f"{names(list(down))} {'is' if len(down) == 1 else 'are'} not ready. Where you know that a node is off, "
            f"this removes its pods: kubectl taint node {node} "
            f"node.kubernetes.io/out-of-service=nodeshutdown:NoExecute, or kubectl delete node {node}. If it hangs, "
            "restart its kubelet or the node."
        )
    pod = targets[0].removeprefix("pod ") if targets else "POD"
    space = f" --namespace {namespace}" if namespace else ""
    return (
        f"kubectl{space} describe pod {pod} shows its finalizers and what its kubelet says. Once its containers "
        f"have ended: kubectl{space} delete pod {pod} --force --grace-period=0, or remove its finalizers."
    )
