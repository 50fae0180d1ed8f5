"""Distinguish the refusals of the API server that a start meets: those of the job, and those that wait.

A user chooses only the image and the profile of a job. Whatever else authorizers, quotas, LimitRanges, admission
policies and webhooks refuse comes from the installation, the policy document or the cluster: the job waits, and where
its pods are refused, others get its GPUs meanwhile.
"""

from __future__ import annotations

import re

from ...base import BackendError, BackendFull, BackendRefusal, BackendUnavailable
from ..api.client import ApiStatusError
from ..api.quantities import parse_quantity

NEEDS_ADMINISTRATOR = "Kubernetes does not create the pods of this job, and an administrator has to act"
CONCERNS_ALL_JOBS = (" cannot create resource ", 'namespaces "')
"""In what authorizers refuse, and where the namespace is not there: both concern all jobs, so that no other waits"""
POD_FORBIDDEN = r'pods "[^"]*" is forbidden: '
INVALID_IMAGE = re.compile(r'Pod "[^"]*" is invalid: spec\.(initContainers|containers)\[\d+\]\.image: ')
"""An invalid pod whose first fault is an image"""
QUOTA = re.compile(
    POD_FORBIDDEN + r"exceeded quota: \S+, requested: (?P<requested>\S+), used: \S+, limited: (?P<limited>\S+)"
)


def start_error(error: Exception, pods: int) -> BackendError:
    """Return why the pods of an attempt were not created: a refusal of the job, or a reason to try again.

    `pods`: how many pods the attempt has; 0 where what was refused is not one of them but what they need. A conflict
    is a reason to try again: pods that are created at the same time compete for the quota of their namespace.
    """
    if not isinstance(error, ApiStatusError):
        return BackendUnavailable(str(error))
    if error.status == 403 and "exceeded quota" in error.message:
        if beyond := _beyond_quota(error.message, pods):
            return BackendFull(f"{NEEDS_ADMINISTRATOR}: {beyond} ({error.message})")
        return BackendFull(f"the quota of the namespace is used up: {error.message}")
    if error.reason == "AlreadyExists" or (pods and INVALID_IMAGE.match(error.message)):
        return BackendError(f"Kubernetes refuses its pod: {error.message}")
    if error.status in (400, 403, 404, 422):
        admission = pods and not any(part in error.message for part in CONCERNS_ALL_JOBS)
        return (BackendFull if admission else BackendRefusal)(f"{NEEDS_ADMINISTRATOR}: {error.message}")
    return BackendRefusal(str(error))


def _beyond_quota(message: str, pods: int) -> str:
    """Return that pods, all like the refused one, need more than a quota allows in all; "" if not.

    A limit of 0 is no such reason: it closes the namespace for every job, until an administrator opens it.
    """
    match = QUOTA.match(message)
    if match is None:
        return ""
    try:
        requested, limited = _quantities(match["requested"]), _quantities(match["limited"])
        for resource in requested.keys() & limited.keys():
            if 0 < parse_quantity(limited[resource]) < pods * parse_quantity(requested[resource]):
                need = f"Each of its {pods} pods requests" if pods > 1 else "Its pod requests"
                return (
                    f"{need} {resource}={requested[resource]}, and the quota of the namespace allows "
                    f"{limited[resource]} in all"
                )
    except ValueError:  # the sentence of another version
        pass
    return ""


def fits_later(message: str) -> bool:
    """Whether a pod that a quota refuses fits as soon as others end: it requests no more than all of the quota."""
    match = QUOTA.match(message)
    if match is None:
        return False
    try:
        requested, limited = _quantities(match["requested"]), _quantities(match["limited"])
        return all(
            parse_quantity(requested[one]) <= parse_quantity(limited[one]) for one in requested.keys() & limited.keys()
        )
    except ValueError:  # the sentence of another version
        return False


def _quantities(text: str) -> dict[str, str]:
    return {resource: amount for resource, _, amount in (item.rpartition("=") for item in text.split(","))}
