"""Distinguish refusals by the API server for which a job fails from those after which its start is tried again.

Of what a pod has, its user chooses the image and the profile only, so an invalid image fails the job. All else that
authorizers, quotas, LimitRanges, admission policies and webhooks refuse is for administrators to change: the job waits
for its next try, and if it was its pods that were refused, other work gets its GPUs meanwhile.
"""

from __future__ import annotations

import re

from ...base import BackendError, BackendFull, BackendRejected, BackendUnavailable
from ..api.client import ApiStatusError
from ..api.quantities import parse_quantity

NEEDS_ADMINISTRATOR = "Kubernetes does not create the pods of this job, and an administrator has to act"
CONCERNS_ALL_JOBS = (" cannot create resource ", 'namespaces "')
"""Parts of messages about a missing right or namespace: no job can start then, so none gets the GPUs of another."""
POD_FORBIDDEN = r'pods "[^"]*" is forbidden: '
INVALID_IMAGE = re.compile(r'Pod "[^"]*" is invalid: spec\.(initContainers|containers)\[\d+\]\.image: ')
"""An invalid pod whose first fault is an image"""
QUOTA = re.compile(
    POD_FORBIDDEN + r"exceeded quota: \S+, requested: (?P<requested>\S+), used: \S+, limited: (?P<limited>\S+)"
)


def start_error(error: Exception, pods: int) -> BackendError:
    """Return why the objects of an attempt were not created: BackendError itself fails the job, others are tried again.

    `pods`: how many pods the attempt has; 0 where not a pod was refused but an object that pods need. A conflict is
    tried again: pods that are created at the same time compete for the quota of their namespace.
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
        return (BackendFull if admission else BackendRejected)(f"{NEEDS_ADMINISTRATOR}: {error.message}")
    return BackendRejected(str(error))


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
