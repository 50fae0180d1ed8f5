"""The messages of the kubelet's device plugin API, version v1beta1, by their own names.

Only the fields that this plugin uses are declared.
"""

from __future__ import annotations

from dataclasses import dataclass

from .wire import Message, numbered

VERSION = "v1beta1"
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"


@dataclass(slots=True)
class Empty(Message):
    """No content."""


@dataclass(slots=True)
class DevicePluginOptions(Message):
    """Which of its optional methods a plugin implements."""

    pre_start_required: bool = numbered(1, bool)
    get_preferred_allocation_available: bool = numbered(2, bool)


@dataclass(slots=True)
class RegisterRequest(Message):
    """What a plugin registers with: the API's version, the name of its socket, and its resource."""

    version: str = numbered(1, str)
    endpoint: str = numbered(2, str)
    resource_name: str = numbered(3, str)
    options: DevicePluginOptions | None = numbered(4, DevicePluginOptions)


@dataclass(slots=True)
class Device(Message):
    """One device and its health."""

    id: str = numbered(1, str)
    health: str = numbered(2, str)


@dataclass(slots=True)
class ListAndWatchResponse(Message):
    """Every device of the plugin; sent again whenever one changes."""

    devices: list[Device] = numbered(1, Device, many=True)


@dataclass(slots=True)
class ContainerPreferredAllocationRequest(Message):
    """The devices that are free for one container, those of them that it must include, and how many it gets."""

    available_device_ids: list[str] = numbered(1, str, many=True)
    must_include_device_ids: list[str] = numbered(2, str, many=True)
    allocation_size: int = numbered(3, int)


@dataclass(slots=True)
class PreferredAllocationRequest(Message):
    """The containers for which the kubelet is about to choose devices."""

    containers: list[ContainerPreferredAllocationRequest] = numbered(1, ContainerPreferredAllocationRequest, many=True)


@dataclass(slots=True)
class ContainerPreferredAllocationResponse(Message):
    """The devices that the plugin prefers for one container."""

    device_ids: list[str] = numbered(1, str, many=True)


@dataclass(slots=True)
class PreferredAllocationResponse(Message):
    """One answer for each container of the request."""

    containers: list[ContainerPreferredAllocationResponse] = numbered(
        1, ContainerPreferredAllocationResponse, many=True
    )


@dataclass(slots=True)
class ContainerAllocateRequest(Message):
    """The devices that the kubelet chose for one container."""

    device_ids: list[str] = numbered(1, str, many=True)


@dataclass(slots=True)
class AllocateRequest(Message):
    """The containers of a pod that is admitted to the node."""

    containers: list[ContainerAllocateRequest] = numbered(1, ContainerAllocateRequest, many=True)


@dataclass(slots=True)
class ContainerAllocateResponse(Message):
    """What a container needs to use its devices; here only environment variables."""

    envs: dict[str, str] = numbered(1, dict)


@dataclass(slots=True)
class AllocateResponse(Message):
    """One answer for each container of the request."""

    containers: list[ContainerAllocateResponse] = numbered(1, ContainerAllocateResponse, many=True)
