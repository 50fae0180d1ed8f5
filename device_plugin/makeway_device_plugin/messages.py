"""The messages of the kubelet's device plugin API, version v1beta1; only the fields that this plugin uses."""

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
class Options(Message):
    """What the kubelet asks this plugin for beyond the necessary."""

    pre_start_required: bool = numbered(1, bool)
    prefers: bool = numbered(2, bool)


@dataclass(slots=True)
class Registration(Message):
    """What a plugin says to the kubelet: the version it speaks, its socket's name and its resource."""

    version: str = numbered(1, str)
    endpoint: str = numbered(2, str)
    resource_name: str = numbered(3, str)
    options: Options | None = numbered(4, Options)


@dataclass(slots=True)
class Device(Message):
    """One device and its health."""

    id: str = numbered(1, str)
    health: str = numbered(2, str)


@dataclass(slots=True)
class DeviceList(Message):
    """Every device of the plugin; sent again whenever one changes."""

    devices: list[Device] = numbered(1, Device, many=True)


@dataclass(slots=True)
class Choice(Message):
    """The devices from which the kubelet chooses for one container, those it must take, and how many it needs."""

    available: list[str] = numbered(1, str, many=True)
    required: list[str] = numbered(2, str, many=True)
    size: int = numbered(3, int)


@dataclass(slots=True)
class PreferredRequest(Message):
    """The containers for which the kubelet is about to choose devices."""

    containers: list[Choice] = numbered(1, Choice, many=True)


@dataclass(slots=True)
class ContainerRequest(Message):
    """The devices of one container: those that the kubelet chose, or those that the plugin prefers."""

    device_ids: list[str] = numbered(1, str, many=True)


@dataclass(slots=True)
class AllocateRequest(Message):
    """The containers of a pod that start now."""

    containers: list[ContainerRequest] = numbered(1, ContainerRequest, many=True)


@dataclass(slots=True)
class PreferredResponse(Message):
    """One answer for each container of the request."""

    containers: list[ContainerRequest] = numbered(1, ContainerRequest, many=True)


@dataclass(slots=True)
class ContainerResponse(Message):
    """What a container needs to use its devices; here only variables of its environment."""

    environ: dict[str, str] = numbered(1, dict)


@dataclass(slots=True)
class AllocateResponse(Message):
    """One answer for each container of the request."""

    containers: list[ContainerResponse] = numbered(1, ContainerResponse, many=True)
