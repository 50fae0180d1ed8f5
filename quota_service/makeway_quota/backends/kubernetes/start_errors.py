"""Distinguish the refusals of the API server that a start meets: those of the job, and those that pass."""

from __future__ import annotations

from ..base import BackendError, BackendFull, BackendUnavailable
from .client import ApiRefusal


def start_error(error: Exception) -> BackendError:
    """Return why pods were not created: a refusal of the job, or a reason to try again.

    A conflict is one: pods that are created at the same time compete for the quota of their namespace.
    """
    if isinstance(error, ApiRefusal) and error.status == 403 and "exceeded quota" in error.message:
        return BackendFull(f"the quota of the namespace is used up: {error.message}")
    if isinstance(error, ApiRefusal) and (error.status in (400, 403, 404, 422) or error.reason == "AlreadyExists"):
        return BackendError(f"Kubernetes refuses its pod: {error.message}")
    return BackendUnavailable(str(error))
