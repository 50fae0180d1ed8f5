"""Check what a policy adds to the pods of jobs (templates and mounted volumes): nothing that Makeway itself sets.

Forbidden are the fields by which a pod would run elsewhere than planned, longer than granted, as root, or
with more rights than the *restricted* pod security standard gives. What the API server refuses beyond that is told
when the pod is created.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .source import Plain

RESERVED_PATHS = ("/makeway", "/dev", "/proc", "/sys")
"""Paths at which Makeway or the node mounts something: no volume of a policy may be there."""
PATH = re.compile(r"(/[^/\x00-\x1f:]+)+/?")

WORKER_CONTAINER = "worker"
"""The name of the container that runs the job."""
RESERVED_VOLUMES = re.compile("makeway-home$|makeway-team-")
"""Names of the volumes that Makeway adds to a pod"""
TOP_LEVEL = ("metadata", "spec")
ALLOWED_METADATA = ("labels", "annotations")
WHY_PLANNED = "the plan chooses the node"
WHY_RESTRICTED = "the restricted pod security standard forbids it"
WHY_MAKEWAY = "Makeway sets it"
WHY_PROFILE = "the profile sets it"
FORBIDDEN_SPEC: Mapping[str, str] = {
    "nodeName": WHY_PLANNED,
    "nodeSelector": WHY_PLANNED,
    "schedulerName": WHY_PLANNED,
    "affinity": WHY_PLANNED,
    "topologySpreadConstraints": WHY_PLANNED,
    "schedulingGates": WHY_PLANNED,
    "resources": WHY_PROFILE,
    "priority": WHY_MAKEWAY,
    "priorityClassName": WHY_MAKEWAY,
    "preemptionPolicy": WHY_MAKEWAY,
    "restartPolicy": WHY_MAKEWAY,
    "terminationGracePeriodSeconds": "the profile's grace sets it",
    "activeDeadlineSeconds": "the profile's time_limit sets it",
    "hostname": WHY_MAKEWAY,
    "subdomain": WHY_MAKEWAY,
    "serviceAccount": WHY_MAKEWAY,
    "serviceAccountName": WHY_MAKEWAY,
    "automountServiceAccountToken": "pods of jobs get no token of the API server",
    "hostNetwork": WHY_RESTRICTED,
    "hostPID": WHY_RESTRICTED,
    "hostIPC": WHY_RESTRICTED,
    "hostUsers": WHY_RESTRICTED,
    "ephemeralContainers": WHY_MAKEWAY,
}
"""Fields of a pod's spec that no template may have, each with the reason"""
FORBIDDEN_CONTAINER: Mapping[str, str] = {
    "image": "the profile's image, or --image, sets it",
    "command": WHY_MAKEWAY,
    "args": WHY_MAKEWAY,
    "lifecycle": WHY_MAKEWAY,
    "livenessProbe": WHY_MAKEWAY,
    "readinessProbe": WHY_MAKEWAY,
    "startupProbe": WHY_MAKEWAY,
    "stdin": WHY_MAKEWAY,
    "tty": WHY_MAKEWAY,
    "terminationMessagePath": WHY_MAKEWAY,
}
"""Fields of a container that no template may have, each with the reason"""
SPEC_LISTS = ("volumes", "containers", "initContainers", "imagePullSecrets", "tolerations", "hostAliases")
"""Fields of a pod's spec that are lists of objects"""
CONTAINER_LISTS = ("env", "envFrom", "ports", "volumeDevices", "volumeMounts")
"""Fields of a container that are lists of objects"""
RESERVED_KEYS = re.compile(r"(makeway(\.[a-z.]+)?/.*)|app\.kubernetes\.io/managed-by")
"""Labels and annotations that only Makeway sets"""
RESERVED_VARIABLES = re.compile(r"MAKEWAY_.*|JUPYTERHUB_.*|CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES")
"""Environment variables that only Makeway and device plugins set"""
STRING_FIELDS = ("labels", "annotations", "matchLabels", "value", "requests", "limits")
"""Keys whose values are strings, also where they look like numbers."""
CLAIM_TEMPLATE_FIELD = "resourceClaimTemplateName"
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
NUMBER = re.compile(r"-?(0|[1-9]\d*)")
EXTENDED_RESOURCE = re.compile(r"[^/]+/.+")
"""The name of an extended resource, such as nvidia.com/gpu."""


def plain_values(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template with scalars without quotes (`Plain`) resolved to booleans and integers, as YAML does.

    Values of labels, annotations and variables stay strings: Kubernetes takes nothing else there.
    """
    return {str(name): _plain(value, text=name in STRING_FIELDS) for name, value in template.items()}


def _plain(value: Any, *, text: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item, text=text or name in STRING_FIELDS) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, Plain) or text:
        return str(value) if isinstance(value, str) else value
    if value in ("true", "false"):
        return value == "true"
    return int(value) if NUMBER.fullmatch(value) else str(value)


def template_problems(template: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong with a template; the field is named with its path."""
    for part in template:
        if part not in TOP_LEVEL:
            yield f"{part}: a pod template has metadata and spec"
    metadata, spec = template.get("metadata", {}), template.get("spec", {})
    if not isinstance(metadata, dict) or not isinstance(spec, dict):
        yield "metadata and spec have to be objects"
        return
    yield from _metadata(metadata)
    for field, why in FORBIDDEN_SPEC.items():
        if field in spec:
            yield f"spec.{field} is not for a template: {why}"
    for field in SPEC_LISTS:
        entries = spec.get(field, [])
        if not _is_list_of_tables(entries):
            yield f"spec.{field} has to be a list of objects"
        elif field in ("containers", "initContainers"):
            yield from _containers(field, entries)
        elif field in ("volumes", "imagePullSecrets") and not all(entry.get("name") for entry in entries):
            yield f"spec.{field}: each entry needs a name"
    if not isinstance(spec.get("securityContext", {}), dict):
        yield "spec.securityContext has to be an object"
    yield from _security("spec", spec.get("securityContext"))
    yield from _claims(spec)
    for volume in spec.get("volumes", []) if isinstance(spec.get("volumes", []), list) else ():
        if isinstance(volume, dict) and RESERVED_VOLUMES.match(str(volume.get("name"))):
            yield f"spec.volumes[{volume['name']}] is not for a template: Makeway's own volumes have such names"
        if isinstance(volume, dict) and "hostPath" in volume:
            yield f"spec.volumes[{volume.get('name')}].hostPath is not for a template: {WHY_RESTRICTED}"


def _claims(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with resourceClaims: only ResourceClaimTemplates, of which each pod gets a claim."""
    entries, known = spec.get("resourceClaims", []), set[str]()
    if not _is_list_of_tables(entries):
        yield "spec.resourceClaims has to be a list of objects"
        return
    for entry in entries:
        name, template = entry.get("name"), entry.get(CLAIM_TEMPLATE_FIELD)
        where = f"spec.resourceClaims[{name}]"
        if not isinstance(name, str) or not DNS_LABEL.fullmatch(name):
            yield f"{where}: each claim needs a name of small letters, digits and dashes, 63 at most"
        elif name in known:
            yield f"{where} is there twice"
        elif "resourceClaimName" in entry:
            why = f"pods would share one claim; use {CLAIM_TEMPLATE_FIELD}"
            yield f"{where}.resourceClaimName is not for a template: {why}"
        elif not isinstance(template, str) or not DNS_NAME.fullmatch(template):
            yield f"{where}: {CLAIM_TEMPLATE_FIELD} names a ResourceClaimTemplate of the pods' namespace"
        elif more := sorted(entry.keys() - {"name", CLAIM_TEMPLATE_FIELD}):
            yield f"{where}.{more[0]} is not known: expected name and {CLAIM_TEMPLATE_FIELD}"
        known.add(str(name))
    for field in ("containers", "initContainers"):
        for container in entries_of(spec, field):
            resources = container.get("resources")
            used = resources.get("claims", []) if isinstance(resources, dict) else []
            where = f"spec.{field}[{container.get('name')}].resources.claims"
            if not _is_list_of_tables(used):
                yield f"{where} has to be a list of objects"
            else:
                yield from (
                    f"{where}: spec.resourceClaims has no {one.get('name')}"
                    for one in used
                    if one.get("name") not in known
                )


def entries_of(spec: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Return the objects of a list; empty if it is not a list of objects."""
    entries = spec.get(field, [])
    return entries if _is_list_of_tables(entries) else []


def claim_templates_of(template: Mapping[str, Any]) -> dict[str, str]:
    """Return the ResourceClaimTemplates that a valid pod template names, by the names of the claims in the pod."""
    spec = template.get("spec") or {}
    return {str(one["name"]): str(one[CLAIM_TEMPLATE_FIELD]) for one in spec.get("resourceClaims") or ()}


def has_only_claims(template: Mapping[str, Any]) -> bool:
    """Whether a pod template says nothing but which claims its pods have."""
    return template.keys() <= {"spec"} and (template.get("spec") or {}).keys() <= {"resourceClaims"}


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _metadata(metadata: Mapping[str, Any]) -> Iterator[str]:
    for field, value in metadata.items():
        if field not in ALLOWED_METADATA:
            yield f"metadata.{field} is not for a template: only labels and annotations are"
        elif not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            yield f"metadata.{field} has to be an object of strings"
        else:
            for name in value:
                if RESERVED_KEYS.fullmatch(str(name)):
                    yield f"metadata.{field}.{name} is not for a template: {WHY_MAKEWAY}"


def _containers(field: str, entries: list[dict[str, Any]]) -> Iterator[str]:
    for entry in entries:
        name = entry.get("name")
        where = f"spec.{field}[{name}]"
        if not name or not isinstance(name, str):
            yield f"spec.{field}: each container needs a name; that of the job is {WORKER_CONTAINER}"
            continue
        if field == "containers" and name == WORKER_CONTAINER:
            for key, why in FORBIDDEN_CONTAINER.items():
                if key in entry:
                    yield f"{where}.{key} is not for a template: {why}"
        for key in CONTAINER_LISTS:
            if not _is_list_of_tables(entry.get(key, [])):
                yield f"{where}.{key} has to be a list of objects"
        for key in ("resources", "securityContext"):  # without a value they would remove what Makeway sets
            if not isinstance(entry.get(key, {}), dict):
                yield f"{where}.{key} has to be an object"
        for variable in entry.get("env", []) if isinstance(entry.get("env", []), list) else ():
            if isinstance(variable, dict) and RESERVED_VARIABLES.fullmatch(str(variable.get("name"))):
                yield f"{where}.env.{variable['name']} is not for a template: {WHY_MAKEWAY}"
        yield from _security(where, entry.get("securityContext"))
        yield from _resources(where, entry.get("resources"), worker=name == WORKER_CONTAINER)


def _resources(where: str, resources: Any, *, worker: bool) -> Iterator[str]:
    if not isinstance(resources, dict):
        return
    for kind in ("requests", "limits"):
        if not isinstance(resources.get(kind, {}), dict):
            yield f"{where}.resources.{kind} has to be an object"
            continue
        for name in resources.get(kind, {}):
            if EXTENDED_RESOURCE.fullmatch(str(name)) or (worker and name in ("cpu", "memory")):
                yield f"{where}.resources.{kind}.{name} is not for a template: {WHY_PROFILE}"


def _security(where: str, context: Any) -> Iterator[str]:
    if not isinstance(context, dict):
        return
    for key in ("privileged", "allowPrivilegeEscalation"):
        if context.get(key):
            yield f"{where}.securityContext.{key} is not for a template: {WHY_RESTRICTED}"
    if context.get("runAsUser") == 0 or context.get("runAsNonRoot") is False:
        yield f"{where}.securityContext lets the job run as root: {WHY_RESTRICTED}"
    for key, value in context.items():
        if value is None:
            yield f"{where}.securityContext.{key} has no value: it would remove what Makeway sets"
        elif key in ("capabilities", "seccompProfile") and not isinstance(value, dict):
            yield f"{where}.securityContext.{key} has to be an object"
    capabilities, seccomp = context.get("capabilities"), context.get("seccompProfile")
    if isinstance(capabilities, dict) and capabilities.get("add"):
        yield f"{where}.securityContext.capabilities.add is not for a template: {WHY_RESTRICTED}"
    elif isinstance(capabilities, dict) and "ALL" not in (capabilities.get("drop") or ()):
        yield f"{where}.securityContext.capabilities.drop has to name ALL: {WHY_RESTRICTED} otherwise"
    if isinstance(seccomp, dict) and seccomp.get("type") == "Unconfined":
        yield f"{where}.securityContext.seccompProfile is not for a template: {WHY_RESTRICTED}"


def path_problem(path: str) -> str:
    """Return why no volume can be mounted at a path, "" where one can."""
    parts = path.split("/")
    if not PATH.fullmatch(path) or "." in parts or ".." in parts or len(path) > 1000:
        return "it is no absolute path of a folder, such as /data"
    taken = next((one for one in RESERVED_PATHS if path == one or path.startswith(f"{one}/")), None)
    return f"{taken} is not for volumes" if taken else ""


def folder_problem(folder: str) -> str:
    """Return why a text is no folder of a volume, "" where it is one, or empty."""
    if folder and not PATH.fullmatch(f"/{folder}"):
        return "it is no relative path of a folder, such as shared/models"
    return "it leads out of the volume or has needless parts" if {".", ".."} & {*folder.split("/")} else ""
