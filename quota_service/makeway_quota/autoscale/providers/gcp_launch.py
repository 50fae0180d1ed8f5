"""Make the call instances.insert of Compute Engine from the request of a machine: the same request, the same call."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from typing import Any

from ..provider import InvalidLaunch, JoinData
from .boot_script import MAX_USER_DATA_BYTES, boot_script

DEPLOYMENT_LABEL, MACHINE_LABEL = "makeway-deployment", "makeway-machine"
INSTALLATION_LABEL = "makeway-installation"
REQUIRED_FIELDS = ("deployment", "machine", "instance", "machine_image", "market", "zone")
LABEL = re.compile(r"[a-z0-9_-]{1,63}")
REQUEST_ID_NAMESPACE = uuid.UUID("6f0b5f0e-4a3c-5d0e-9a51-0a4f6a7c5b1d")
"""The name space of request ids"""
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
DISK_TYPE = "pd-balanced"
NETWORK = "default"


def parse_request(request: str) -> dict[str, Any]:
    """Return the fields of a launch request (JSON); InvalidLaunch if one is missing or cannot be a label."""
    try:
        wanted = json.loads(request)
        texts = [wanted[name] for name in REQUIRED_FIELDS] + [wanted["settings"]["project"]]
    except (ValueError, TypeError, KeyError):
        raise InvalidLaunch("the request is not complete") from None
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidLaunch("the request is not complete")
    for name in ("deployment", "machine"):
        if not LABEL.fullmatch(wanted[name]):
            raise InvalidLaunch(f"{wanted[name]!r} cannot be a label of Compute Engine")
    return dict(wanted)


def request_id(installation: str, token: str) -> str:
    """Return the request id of a launch, a UUID: the same for each call for one machine."""
    return str(uuid.uuid5(REQUEST_ID_NAMESPACE, f"{installation}/{token}"))


def instance_name(installation: str, machine: str) -> str:
    """Return the name of the instance of a machine, which no other installation in the project uses."""
    return f"makeway-{hashlib.sha256(installation.encode()).hexdigest()[:8]}-{machine}".replace("_", "-")


def labels_of(installation: str, deployment: str) -> dict[str, str]:
    """Return the labels by which the instances of a deployment are found."""
    return {INSTALLATION_LABEL: installation, DEPLOYMENT_LABEL: deployment}


def instance_resource(wanted: dict[str, Any], join: JoinData | None, installation: str) -> dict[str, Any]:
    """Return the instance that is asked for, in the fields of Google's library."""
    settings, zone = wanted["settings"], wanted["zone"]
    labels = labels_of(installation, wanted["deployment"]) | {MACHINE_LABEL: wanted["machine"]}
    result: dict[str, Any] = {
        "name": instance_name(installation, wanted["machine"]),
        "machine_type": f"zones/{zone}/machineTypes/{wanted['instance']}",
        "labels": labels,
        "disks": [_disk(wanted, labels)],
        "network_interfaces": [_network(wanted)],
        "scheduling": _scheduling(wanted),
    }
    if wanted.get("accelerator"):
        kind = f"projects/{settings['project']}/zones/{zone}/acceleratorTypes/{wanted['accelerator']}"
        result["guest_accelerators"] = [{"accelerator_type": kind, "accelerator_count": int(wanted["gpus"])}]
    if wanted.get("security_groups"):
        result["tags"] = {"items": list(wanted["security_groups"])}
    if settings.get("service_account"):  # without one, what runs on the machine has no rights in the project
        result["service_accounts"] = [{"email": settings["service_account"], "scopes": list(SCOPES)}]
    if join is not None:
        result["metadata"] = {"items": [{"key": "startup-script", "value": _script(wanted, join)}]}
    return result


def _disk(wanted: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    kind = wanted["settings"].get("disk_type") or DISK_TYPE
    parameters: dict[str, Any] = {
        "source_image": wanted["machine_image"],
        "disk_type": f"zones/{wanted['zone']}/diskTypes/{kind}",
        "labels": dict(labels),
    }
    if wanted.get("disk"):
        parameters["disk_size_gb"] = -(-int(wanted["disk"]) // 1024)
    return {"boot": True, "auto_delete": True, "initialize_params": parameters}


def _network(wanted: dict[str, Any]) -> dict[str, Any]:
    settings, zone = wanted["settings"], wanted["zone"]
    result: dict[str, Any] = {}
    if subnet := wanted.get("subnet"):
        region = zone.rpartition("-")[0]
        result["subnetwork"] = subnet if "/" in subnet else f"regions/{region}/subnetworks/{subnet}"
    else:
        result["network"] = f"global/networks/{settings.get('network') or NETWORK}"
    if settings.get("external_ip") == "true":
        result["access_configs"] = [{"name": "External NAT", "type_": "ONE_TO_ONE_NAT"}]
    return result


def _scheduling(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return when Google may stop the machine. One that has stopped is not started again: another is launched."""
    spot = wanted["market"] == "spot"
    moves = not spot and not wanted.get("gpus")  # machines with GPUs cannot be moved while they run
    result: dict[str, Any] = {
        "provisioning_model": "SPOT" if spot else "STANDARD",
        "on_host_maintenance": "MIGRATE" if moves else "TERMINATE",
        "automatic_restart": False,
    }
    if hours := wanted["settings"].get("max_run_hours"):
        result["max_run_duration"] = {"seconds": int(hours) * 3600}
    if spot or hours:
        result["instance_termination_action"] = "DELETE"
    return result


def _script(wanted: dict[str, Any], join: JoinData) -> str:
    orphan_after = float(wanted.get("orphan_after") or 900.0)
    script = boot_script(join, wanted["machine"], wanted["deployment"], orphan_after, "gcp")
    if len(script.encode()) > MAX_USER_DATA_BYTES:
        raise InvalidLaunch("the script of the first boot is too large: shorten MAKEWAY_MACHINE_URL")
    return script
