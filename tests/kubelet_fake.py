"""A kubelet as device plugins see it: it accepts registrations, watches the devices and allocates them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from makeway_device_plugin.messages import (
    VERSION,
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    ContainerPreferredAllocationRequest,
    DevicePluginOptions,
    Empty,
    ListAndWatchResponse,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    RegisterRequest,
)


class Kubelet:
    """A kubelet whose socket lies in this folder, until it is stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registrations: list[RegisterRequest] = []
        self.lists: list[ListAndWatchResponse] = []
        """every list of devices that a plugin sent"""
        self._changed = threading.Condition()
        self._channels: list[grpc.Channel] = []
        for socket in folder.glob("*.sock"):  # as the real one does at its start
            socket.unlink()
        register = grpc.unary_unary_rpc_method_handler(
            self._register, request_deserializer=RegisterRequest.decode, response_serializer=Empty.encode
        )
        self._server = grpc.server(ThreadPoolExecutor(2))
        service = grpc.method_handlers_generic_handler(f"{VERSION}.Registration", {"Register": register})
        self._server.add_generic_rpc_handlers([service])
        self._server.add_insecure_port(f"unix://{folder}/kubelet.sock")
        self._server.start()

    def wait_for(self, lists: int) -> ListAndWatchResponse:
        """Return the last list of devices when this many have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.lists) >= lists, 30), f"{len(self.lists)} lists came"
            return self.lists[-1]

    def options(self) -> DevicePluginOptions:
        """Return which optional methods the plugin implements."""
        return self._call("GetDevicePluginOptions", Empty(), DevicePluginOptions)

    def allocate(self, *containers: list[str]) -> AllocateResponse:
        """Allocate devices to containers."""
        request = AllocateRequest([ContainerAllocateRequest(ids) for ids in containers])
        return self._call("Allocate", request, AllocateResponse)

    def prefer(self, available: list[str], size: int, must_include: list[str] | None = None) -> list[str]:
        """Return the devices that the plugin prefers for one container."""
        request = PreferredAllocationRequest([ContainerPreferredAllocationRequest(available, must_include or [], size)])
        (answer,) = self._call("GetPreferredAllocation", request, PreferredAllocationResponse).containers
        return list(answer.device_ids)

    def stop(self) -> None:
        """End; the socket goes with it."""
        for channel in self._channels:
            channel.close()
        self._server.stop(None).wait()
        (self.folder / "kubelet.sock").unlink(missing_ok=True)

    def _register(self, request: RegisterRequest, _: Any) -> Empty:
        self.registrations.append(request)
        self._channels.append(grpc.insecure_channel(f"unix://{self.folder}/{request.endpoint}"))
        threading.Thread(target=self._follow, args=[self._channels[-1]], daemon=True).start()
        return Empty()

    def _follow(self, channel: grpc.Channel) -> None:
        call = channel.unary_stream(
            f"/{VERSION}.DevicePlugin/ListAndWatch",
            request_serializer=Empty.encode,
            response_deserializer=ListAndWatchResponse.decode,
        )
        try:
            for result in call(Empty(), wait_for_ready=True):
                with self._changed:
                    self.lists.append(result)
                    self._changed.notify_all()
        except (grpc.RpcError, ValueError):  # the plugin or this kubelet has ended
            return

    def _call(self, method: str, request: Any, answer: Any) -> Any:
        call = self._channels[-1].unary_unary(
            f"/{VERSION}.DevicePlugin/{method}",
            request_serializer=type(request).encode,
            response_deserializer=answer.decode,
        )
        return call(request, timeout=10)
