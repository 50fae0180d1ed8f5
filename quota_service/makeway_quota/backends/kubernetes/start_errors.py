"""Distinguish the refusals of the API server that a start meets: those of the job, and those that pass.

An authorizer refuses a kind of object, and admission an object by its name. Both answer 403 also where it is the
installation that lacks something, which says nothing about the job.
"""

from __future__ import annotations

import re

from ..base import BackendError, BackendFull, BackendRefusal, BackendUnavailable
from .client import ApiRefusal
from .quantities import number

POD = r'pods "[^"]*" is forbidden: '
WEBHOOK = re.compile(r'admission webhook "[^"]*" denied the request')
ADMISSION = re.compile(POD)
INSTALLATION = re.compile(
    POD + r"(error looking up service account |no PriorityClass with name |pod rejected: RuntimeClass "
    r"|unable to create new content in namespace |status unknown for quota|insufficient quota to match these scopes"
    r"|not yet ready to handle request|User )"
)
"""Refusals of a pod by its name that no other pod of the job would escape, and that an administrator can end."""
QUOTA = re.compile(POD + r"exceeded quota: \S+, requested: (?P<requested>\S+), used: \S+, limited: (?P<limited>\S+)")


def start_error(error: Exception, pods: int) -> BackendError:
    """Return why the pods of an attempt were not created: a refusal of the job, or a reason to try again.

    `pods`: how many pods the attempt has; 0 where what was refused is not one of them but what they need. A conflict
    is a reason to try again: pods that are created at the same time compete for the quota of their namespace.
    """
    if not isinstance(error, ApiRefusal):
        return BackendUnavailable(str(error))
    if error.status == 403 and "exceeded quota" in error.message:
        if beyond := _beyond(error.message, pods):
            return BackendError(f"{beyond} ({error.message})")
        return BackendFull(f"the quota of the namespace is used up: {error.message}")
    if error.reason == "AlreadyExists" or (pods and _is_of_pod(error)):
        return BackendError(f"Kubernetes refuses its pod: {error.message}")
    if error.status in (400, 403, 404, 422):
        return BackendRefusal(
            f"Kubernetes does not create the pods of this job, and an administrator has to act: {error.message}"
        )
    return BackendRefusal(str(error))


def _is_of_pod(refusal: ApiRefusal) -> bool:
    """Whether the pod itself is refused: it is invalid, or admission denies it."""
    if refusal.status not in (403, 404):
        return refusal.status in (400, 422)
    if WEBHOOK.match(refusal.message):
        return True
    return bool(ADMISSION.match(refusal.message)) and not INSTALLATION.match(refusal.message)


def _beyond(message: str, pods: int) -> str:
    """Return that pods, all like the refused one, need more than a quota allows in all; "" if not.

    A limit of 0 is no such reason: it closes the namespace for every job, until an administrator opens it.
    """
    found = QUOTA.match(message)
    if found is None:
        return ""
    try:
        requested, limited = _quantities(found["requested"]), _quantities(found["limited"])
        for resource in requested.keys() & limited.keys():
            if 0 < number(limited[resource]) < pods * number(requested[resource]):
                need = f"Each of its {pods} pods requests" if pods > 1 else "Its pod requests"
                return (
                    f"{need} {resource}={requested[resource]}, and the quota of the namespace allows "
                    f"{limited[resource]} in all"
                )
    except ValueError:  # the sentence of another version
        pass
    return ""


def _quantities(text: str) -> dict[str, str]:
    return {resource: amount for resource, _, amount in (each.rpartition("=") for each in text.split(","))}
