"""Serve virtual GPUs to the kubelet: register, list the devices with their health, and allocate them to containers.

A kubelet that restarts removes the sockets in its device plugin folder and forgets the plugins. So the plugin watches
the kubelet's socket and its own, and registers again when either has changed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from .messages import (
    HEALTHY,
    UNHEALTHY,
    VERSION,
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    ContainerPreferredAllocationResponse,
    Device,
    DevicePluginOptions,
    Empty,
    ListAndWatchResponse,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    RegisterRequest,
)
from .wire import Message

log = logging.getLogger("makeway-device-plugin")

KUBELET = "kubelet.sock"
REGISTER_SECONDS = 10.0
POLL_SECONDS = 0.5
OPTIONS = DevicePluginOptions(get_preferred_allocation_available=True)
THREADS = 8
"""Each stream of ListAndWatch holds one, and that of a kubelet that was restarted may take a moment to end."""


class Devices:
    """The virtual GPUs of a node and their health.

    A file that lists the indices of broken devices, one a line, makes them unhealthy; every `look` reads it again.
    While it cannot be read, all devices keep their health.
    """

    def __init__(self, count: int, unhealthy_file: Path | None = None) -> None:
        self.count = count
        self._file = unhealthy_file
        self._unhealthy: frozenset[int] = frozenset()
        self._problem: str | None = None
        self._changed = threading.Condition()
        self.refresh()

    def refresh(self) -> None:
        """Read which devices are unhealthy, and wake the streams if that has changed."""
        result = self._listed()
        with self._changed:
            if result != self._unhealthy:
                log.info("unhealthy devices: %s", ", ".join(map(str, sorted(result))) or "none")
                self._unhealthy = result
                self._changed.notify_all()

    def _listed(self) -> frozenset[int]:
        """Return the indices in the file; other lines, and devices that do not exist, count for nothing."""
        problem, result = None, frozenset[int]()
        try:
            lines = set(self._file.read_bytes().splitlines()) if self._file is not None else set()
            result = frozenset(index for index in range(self.count) if str(index).encode() in lines)
        except FileNotFoundError:
            pass
        except OSError as error:
            problem, result = f"{self._file} cannot be read: {error.strerror}", self._unhealthy
        if problem is not None and problem != self._problem:
            log.warning("%s; all devices keep their health", problem)
        self._problem = problem
        return result

    def follow(self, alive: Callable[[], bool]) -> Iterator[ListAndWatchResponse]:
        """Yield the list now and after every change, as long as the stream is `alive`."""
        last = None
        while alive():
            with self._changed:
                if self._list() == last:
                    self._changed.wait(POLL_SECONDS)
                    continue
                last = self._list()
            yield last

    def _list(self) -> ListAndWatchResponse:
        health = [UNHEALTHY if index in self._unhealthy else HEALTHY for index in range(self.count)]
        return ListAndWatchResponse([Device(device_id(index), state) for index, state in enumerate(health)])


def device_id(index: int) -> str:
    """Return the id of a device by its index on the node."""
    return f"virtual-gpu-{index:04d}"


def envs(request: ContainerAllocateRequest) -> dict[str, str]:
    """Return a container's environment variables: the indices of its devices on the node, and that they are virtual."""
    indices = sorted(int(one.rpartition("-")[2]) for one in request.device_ids)
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, indices)),
        "NVIDIA_VISIBLE_DEVICES": "void",  # NVIDIA's container runtime, where it is installed, adds no device
        "MAKEWAY_VIRTUAL_GPUS": "1",
    }


class Plugin:
    """The device plugin of one resource."""

    def __init__(self, folder: Path, resource: str, devices: Devices) -> None:
        self._folder = folder
        self._resource = resource
        self._devices = devices
        self._socket = folder / f"{resource.replace('/', '-')}.sock"

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set; wait for a kubelet that is not there, and register with each new one."""
        while not stop.is_set():
            kubelet = self._identity(KUBELET)
            if kubelet is None:
                log.info("waiting for the kubelet's socket in %s", self._folder)
                while self._identity(KUBELET) is None and not stop.wait(POLL_SECONDS):
                    pass
                continue
            server = self.serve()
            try:
                if not self.register():
                    stop.wait(POLL_SECONDS)
                    continue
                while self._identity(KUBELET) == kubelet and self._socket.exists() and not stop.wait(POLL_SECONDS):
                    self._devices.refresh()
            finally:
                server.stop(grace=None).wait()
                self._socket.unlink(missing_ok=True)

    def serve(self) -> grpc.Server:
        """Start the gRPC server on the plugin's own socket."""
        self._socket.unlink(missing_ok=True)
        server = grpc.server(ThreadPoolExecutor(THREADS))
        methods = {
            "GetDevicePluginOptions": _unary(Empty, lambda _: OPTIONS),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch, request_deserializer=Empty.decode, response_serializer=ListAndWatchResponse.encode
            ),
            "Allocate": _unary(AllocateRequest, allocate),
            "GetPreferredAllocation": _unary(PreferredAllocationRequest, prefer),
            # Never called: the options do not set pre_start_required.
            "PreStartContainer": _unary(Empty, lambda _: Empty()),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(f"{VERSION}.DevicePlugin", methods)])
        server.add_insecure_port(f"unix://{self._socket}")
        server.start()
        return server

    def register(self) -> bool:
        """Register with the kubelet; return whether it accepted."""
        request = RegisterRequest(VERSION, self._socket.name, self._resource, OPTIONS)
        with grpc.insecure_channel(f"unix://{self._folder / KUBELET}") as channel:
            call = channel.unary_unary(
                f"/{VERSION}.Registration/Register",
                request_serializer=RegisterRequest.encode,
                response_deserializer=Empty.decode,
            )
            try:
                call(request, timeout=REGISTER_SECONDS)
            except grpc.RpcError as problem:
                log.warning("the kubelet refused the registration: %s", problem.details())
                return False
        log.info("registered %d devices as %s", self._devices.count, self._resource)
        return True

    def _list_and_watch(self, _: Empty, context: grpc.ServicerContext) -> Iterator[ListAndWatchResponse]:
        yield from self._devices.follow(context.is_active)

    def _identity(self, name: str) -> tuple[int, int] | None:
        """Return the inode and ctime of a socket, which differ once it was created again; None when it is not there."""
        try:
            result = os.stat(self._folder / name)
        except FileNotFoundError:
            return None
        return result.st_ino, result.st_ctime_ns


def prefer(request: PreferredAllocationRequest) -> PreferredAllocationResponse:
    """Return the free devices with the lowest indices for each container, after those that it must include."""
    answers = []
    for one in request.containers:
        others = sorted(set(one.available_device_ids) - set(one.must_include_device_ids))
        chosen = [*one.must_include_device_ids, *others][: one.allocation_size]
        answers.append(ContainerPreferredAllocationResponse(chosen))
    return PreferredAllocationResponse(answers)


def allocate(request: AllocateRequest) -> AllocateResponse:
    """Return the environment variables of each container."""
    for one in request.containers:
        log.info("allocated %s", ", ".join(sorted(one.device_ids)))
    return AllocateResponse([ContainerAllocateResponse(envs(one)) for one in request.containers])


def _unary(request: type[Message], answer: Callable[..., Message]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(
        lambda message, _: answer(message), request_deserializer=request.decode, response_serializer=Message.encode
    )
