"""Make the call RunInstances of Amazon EC2 from the request of a machine: the same request is always the same call."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from ..budget import UNIT
from ..provider import InvalidLaunch, JoinData
from .boot_script import MAX_BYTES, boot_script

DEPLOYMENT_TAG, MACHINE_TAG = "makeway:deployment", "makeway:machine"
INSTALLATION_TAG = "makeway:installation"
NEEDED = ("deployment", "machine", "instance", "machine_image", "market")


def read_request(request: str) -> dict[str, Any]:
    """Return a request; InvalidLaunch if it lacks what a machine needs."""
    try:
        wanted = json.loads(request)
        texts = [wanted[name] for name in NEEDED] + [wanted["settings"]["region"]]
    except (ValueError, TypeError, KeyError):
        raise InvalidLaunch("the request is not complete") from None
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidLaunch("the request is not complete")
    return dict(wanted)


def launch_parameters(
    wanted: dict[str, Any], token: str, join: JoinData | None, installation: str, device: str
) -> dict[str, Any]:
    """Return the parameters of RunInstances. `device`: the name of the first disk, where the request has its size."""
    settings = wanted["settings"]
    tags = {
        INSTALLATION_TAG: installation,
        DEPLOYMENT_TAG: wanted["deployment"],
        MACHINE_TAG: wanted["machine"],
        "Name": f"makeway {wanted['deployment']} {wanted['machine']}",
    }
    tagged = [{"Key": key, "Value": value} for key, value in tags.items()]
    result: dict[str, Any] = {
        "ClientToken": token,
        "ImageId": wanted["machine_image"],
        "InstanceType": wanted["instance"],
        "MinCount": 1,
        "MaxCount": 1,
        "InstanceInitiatedShutdownBehavior": "terminate",
        # no second hop: containers with a network of their own do not reach the metadata service
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        "TagSpecifications": [{"ResourceType": kind, "Tags": tagged} for kind in ("instance", "volume")],
    }
    if wanted.get("zone"):
        result["Placement"] = {"AvailabilityZone": wanted["zone"]}
    if wanted.get("subnet"):
        result["SubnetId"] = wanted["subnet"]
    if wanted.get("security_groups"):
        result["SecurityGroupIds"] = list(wanted["security_groups"])
    if settings.get("instance_profile"):
        result["IamInstanceProfile"] = {"Name": settings["instance_profile"]}
    if settings.get("key_pair"):
        result["KeyName"] = settings["key_pair"]
    if wanted.get("disk"):
        disk = {"VolumeSize": -(-int(wanted["disk"]) // 1024), "VolumeType": "gp3", "DeleteOnTermination": True}
        result["BlockDeviceMappings"] = [{"DeviceName": device, "Ebs": disk}]
    if wanted["market"] == "spot":
        result["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": _spot(wanted.get("max_price"))}
    if join is not None:
        result["UserData"] = _user_data(wanted, join)
    return result


def _spot(max_price: int | None) -> dict[str, Any]:
    """Return the options of the spot market. `max_price`: millionths for an hour; None: the price on demand."""
    options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    if max_price is None:
        return options
    return options | {"MaxPrice": format((Decimal(max_price) / UNIT).normalize(), "f")}


def _user_data(wanted: dict[str, Any], join: JoinData) -> str:
    orphan_after = float(wanted.get("orphan_after") or 900.0)
    script = boot_script(join, wanted["machine"], wanted["deployment"], orphan_after, "aws")
    if len(script.encode()) > MAX_BYTES:
        raise InvalidLaunch("the script of the first boot is larger than AWS allows: shorten MAKEWAY_MACHINE_URL")
    return script
