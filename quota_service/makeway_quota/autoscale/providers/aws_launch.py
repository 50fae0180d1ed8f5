"""Build the parameters of EC2's RunInstances from the launch request of a machine: equal requests, equal parameters."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from ..budget import MICROS_PER_UNIT
from ..provider import InvalidLaunch, JoinData
from .boot_script import MAX_USER_DATA_BYTES, boot_script

DEPLOYMENT_TAG, MACHINE_TAG = "makeway:deployment", "makeway:machine"
INSTALLATION_TAG = "makeway:installation"
REQUIRED_FIELDS = ("deployment", "machine", "instance", "machine_image", "market")


def parse_request(request: str) -> dict[str, Any]:
    """Return the fields of a launch request (JSON); InvalidLaunch if a required one is missing."""
    try:
        fields = json.loads(request)
        texts = [fields[name] for name in REQUIRED_FIELDS] + [fields["settings"]["region"]]
    except (ValueError, TypeError, KeyError):
        raise InvalidLaunch("the request is not complete") from None
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidLaunch("the request is not complete")
    return dict(fields)


def launch_parameters(
    fields: dict[str, Any], token: str, join: JoinData | None, installation: str, device: str
) -> dict[str, Any]:
    """Return the parameters of RunInstances. `device`: the name of the first disk, where the request has its size."""
    settings = fields["settings"]
    tags = {
        INSTALLATION_TAG: installation,
        DEPLOYMENT_TAG: fields["deployment"],
        MACHINE_TAG: fields["machine"],
        "Name": f"makeway {fields['deployment']} {fields['machine']}",
    }
    tagged = [{"Key": key, "Value": value} for key, value in tags.items()]
    result: dict[str, Any] = {
        "ClientToken": token,
        "ImageId": fields["machine_image"],
        "InstanceType": fields["instance"],
        "MinCount": 1,
        "MaxCount": 1,
        "InstanceInitiatedShutdownBehavior": "terminate",
        # no second hop: containers with a network of their own do not reach the metadata service
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        "TagSpecifications": [{"ResourceType": kind, "Tags": tagged} for kind in ("instance", "volume")],
    }
    if fields.get("zone"):
        result["Placement"] = {"AvailabilityZone": fields["zone"]}
    if fields.get("subnet"):
        result["SubnetId"] = fields["subnet"]
    if fields.get("security_groups"):
        result["SecurityGroupIds"] = list(fields["security_groups"])
    if settings.get("instance_profile"):
        result["IamInstanceProfile"] = {"Name": settings["instance_profile"]}
    if settings.get("key_pair"):
        result["KeyName"] = settings["key_pair"]
    if fields.get("disk"):
        disk = {"VolumeSize": -(-int(fields["disk"]) // 1024), "VolumeType": "gp3", "DeleteOnTermination": True}
        result["BlockDeviceMappings"] = [{"DeviceName": device, "Ebs": disk}]
    if fields["market"] == "spot":
        result["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": _spot(fields.get("max_price"))}
    if join is not None:
        result["UserData"] = _user_data(fields, join)
    return result


def _spot(max_price: int | None) -> dict[str, Any]:
    """Return the options of the spot market. `max_price`: millionths for an hour; None: the price on demand."""
    options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    if max_price is None:
        return options
    return options | {"MaxPrice": format((Decimal(max_price) / MICROS_PER_UNIT).normalize(), "f")}


def _user_data(fields: dict[str, Any], join: JoinData) -> str:
    orphan_after = float(fields.get("orphan_after") or 900.0)
    script = boot_script(join, fields["machine"], fields["deployment"], orphan_after, "aws")
    if len(script.encode()) > MAX_USER_DATA_BYTES:
        raise InvalidLaunch("the script of the first boot is larger than AWS allows: shorten MAKEWAY_MACHINE_URL")
    return script
