"""Messages become protobuf and come back; what is unknown is skipped, what is broken is refused."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makeway_device_plugin.messages import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    Device,
    DevicePluginOptions,
    ListAndWatchResponse,
    RegisterRequest,
)
from makeway_device_plugin.wire import Message, WireError

TEXT = st.text(max_size=300)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""How long an example takes depends on what else the machine does."""


def test_a_registration_has_the_bytes_that_protobuf_gives_it() -> None:
    encoded = b'\n\x07v1beta1\x12\x06x.sock\x1a\x0envidia.com/gpu"\x02\x08\x01'
    message = RegisterRequest("v1beta1", "x.sock", "nvidia.com/gpu", DevicePluginOptions(pre_start_required=True))
    assert message.encode() == encoded
    assert RegisterRequest.decode(encoded) == message


def test_default_values_take_no_bytes_and_an_absent_message_stays_absent() -> None:
    assert RegisterRequest().encode() == b""
    assert RegisterRequest.decode(b"").options is None
    assert RegisterRequest(options=DevicePluginOptions()).encode() == b'"\x00'
    assert RegisterRequest.decode(b'"\x00').options == DevicePluginOptions()


@unhurried
@given(st.lists(st.lists(TEXT, max_size=3), max_size=3))
def test_requests_come_back(ids: list[list[str]]) -> None:
    message = AllocateRequest([ContainerAllocateRequest(one) for one in ids])
    assert AllocateRequest.decode(message.encode()) == message


@unhurried
@given(st.lists(st.dictionaries(TEXT, TEXT, max_size=4), max_size=3))
def test_maps_come_back(environs: list[dict[str, str]]) -> None:
    message = AllocateResponse([ContainerAllocateResponse(one) for one in environs])
    assert AllocateResponse.decode(message.encode()) == message


def test_unknown_fields_of_every_kind_are_skipped() -> None:
    known = Device("a", "Healthy").encode()
    topology = b"\x1a\x04\x0a\x02\x08\x01"
    numbers = b"\x20\x96\x01" + b"\x29" + bytes(8) + b"\x35" + bytes(4)
    assert Device.decode(topology + known + numbers) == Device("a", "Healthy")


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Device, b"\n\x05ab"),
        (Device, b"\n"),
        (Device, b"\x08\x01"),
        (Device, b"\n\x01\xff"),
        (Device, b"\x0b"),
        (Device, b"\xff" * 11),
        (DevicePluginOptions, b"\n\x01a"),
        (ListAndWatchResponse, b"\x08\x01"),
    ],
    ids=["short text", "no length", "number for text", "no UTF-8", "group", "endless number", "text for flag", "flat"],
)
def test_broken_bytes_are_refused(kind: type[Message], data: bytes) -> None:
    with pytest.raises(WireError):
        kind.decode(data)
