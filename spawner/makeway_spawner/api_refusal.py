"""Distinguish refusals of Kubernetes' API server from failures that pass, and describe them for the user. Pure."""

from __future__ import annotations

import json
from typing import Any

from kubernetes_asyncio.client.rest import ApiException

_PASSING = frozenset({408, 409, 429})
"""Client errors that say "not now"."""
_NO_MESSAGE = "Forbidden"
"""All that is left of a refusal of the lists that KubeSpawner's watches begin with."""
MAX_MESSAGE = 2000
"""Characters of what the API server said that a page shows"""
RESTART = "An administrator has to restart the Hub: Kubernetes does not accept its credentials any more."


def refused(error: BaseException) -> bool:
    """Whether the API server understood a request and refuses it: repeating it does not help."""
    return isinstance(error, ApiException) and 400 <= _status(error) < 500 and _status(error) not in _PASSING


def api_message(error: ApiException) -> str:
    """Return what the API server said, from the Status in its answer, without a full stop."""
    try:
        answer: Any = json.loads(error.body or "")
    except (ValueError, TypeError, RecursionError):  # a proxy may answer for the API server
        answer = None
    message = answer.get("message") if isinstance(answer, dict) else None
    result = message if isinstance(message, str) and message.strip() else str(error.reason or f"status {error.status}")
    return result[:MAX_MESSAGE].encode("utf-8", "replace").decode().strip().rstrip(".")


def start_sentence(error: ApiException, namespace: str) -> str:
    """Return why the API server creates no pod or no volume of a notebook, and what to do."""
    message = api_message(error)
    if not refused(error):
        return f"Kubernetes could not create the notebook's pod: {message} (status {error.status}). Start it again."
    if "exceeded quota" in message:
        todo = (
            "Start it again when other pods have ended, or ask an administrator to raise the quota of this namespace."
        )
    elif _status(error) == 401:
        todo = RESTART
    elif "no PriorityClass" in message:
        todo = "An administrator has to create this priority class, or to name another one in the Hub's configuration."
    elif lacks_permission(error):
        todo = f"An administrator has to give the Hub's account {_right(message)}."
    else:
        todo = (
            "Show this to an administrator: the Hub configures a pod that Kubernetes does not accept in the namespace "
            f"{namespace}."
        )
    return f"Kubernetes refuses the notebook's pod: {message}. {todo}"


def stop_sentence(error: ApiException, pod: str) -> str:
    """Return why the API server does not let the Hub stop a pod, and what to do."""
    message = api_message(error)
    begin = (
        f"Kubernetes does not let the Hub stop the notebook: {message}. Its pod {pod} may still run and hold its GPUs"
    )
    if _status(error) == 401:
        return f"{begin}. {RESTART}"
    return f"{begin}: an administrator has to give the Hub's account {_right(message)}, and to delete the pod."


def lacks_permission(error: ApiException) -> bool:
    """Whether the Hub's account lacks a right; a quota or an admission rule is also a 403."""
    message = api_message(error)
    return message == _NO_MESSAGE or ('User "' in message and "cannot" in message)


def _right(message: str) -> str:
    return "the right to list and watch pods and events" if message == _NO_MESSAGE else "this right"


def _status(error: ApiException) -> int:
    return error.status if isinstance(error.status, int) else 0
