"""Serve virtual GPUs to the kubelet: register, list the devices with their health, and allocate them to containers.

A kubelet that starts again empties the folder of sockets and forgets its plugins. So the plugin watches the kubelet's
socket and its own, and registers again when either has changed.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc

from .messages import (
    HEALTHY,
    UNHEALTHY,
    VERSION,
    AllocateRequest,
    AllocateResponse,
    ContainerRequest,
    ContainerResponse,
    Device,
    DeviceList,
    Empty,
    Options,
    PreferredRequest,
    PreferredResponse,
    Registration,
)
from .wire import Message

log = logging.getLogger("makeway-device-plugin")

KUBELET = "kubelet.sock"
REGISTER_SECONDS = 10.0
LOOK_SECONDS = 0.5
OPTIONS = Options(prefers=True)
THREADS = 8
"""Each kubelet that follows the devices holds one; a restarted kubelet's old stream may take a moment to end."""


class Devices:
    """The virtual GPUs of a node, and a version that rises when one changes its health.

    A file that lists the indices of broken devices, one a line, takes them out of service; it is read again at every
    look.
    """

    def __init__(self, count: int, unhealthy_file: Path | None = None) -> None:
        self.count = count
        self._file = unhealthy_file
        self._unhealthy: frozenset[int] = frozenset()
        self._changed = threading.Condition()
        self.look()

    def look(self) -> None:
        """Read which devices are unhealthy, and wake the streams when that has changed."""
        found: frozenset[int] = frozenset()
        if self._file is not None:
            with suppress(FileNotFoundError):
                found = frozenset(int(word) for word in re.findall(r"^\d+$", self._file.read_text(), re.MULTILINE))
        with self._changed:
            if found != self._unhealthy:
                log.info("unhealthy devices: %s", ", ".join(map(str, sorted(found))) or "none")
                self._unhealthy = found
                self._changed.notify_all()

    def list(self) -> DeviceList:
        """Return every device with its health."""
        with self._changed:
            return self._list()

    def follow(self, alive: Callable[[], bool]) -> Iterator[DeviceList]:
        """Yield the list now and after every change, as long as the reader lives."""
        last = None
        while alive():
            with self._changed:
                if self._list() == last:
                    self._changed.wait(LOOK_SECONDS)
                    continue
                last = self._list()
            yield last

    def _list(self) -> DeviceList:
        health = [UNHEALTHY if index in self._unhealthy else HEALTHY for index in range(self.count)]
        return DeviceList([Device(device_id(index), state) for index, state in enumerate(health)])


def device_id(index: int) -> str:
    """Return the id of a device by its index on the node."""
    return f"virtual-gpu-{index:04d}"


def environ(request: ContainerRequest) -> dict[str, str]:
    """Return the variables of a container: the indices of its devices on the node, and that they are virtual."""
    indices = sorted(int(one.rpartition("-")[2]) for one in request.device_ids)
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, indices)),
        "NVIDIA_VISIBLE_DEVICES": "void",  # where NVIDIA's container runtime is installed: it adds nothing
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
                while self._identity(KUBELET) is None and not stop.wait(LOOK_SECONDS):
                    pass
                continue
            server = self.serve()
            try:
                if not self.register():
                    stop.wait(LOOK_SECONDS)
                    continue
                while self._identity(KUBELET) == kubelet and self._socket.exists() and not stop.wait(LOOK_SECONDS):
                    self._devices.look()
            finally:
                server.stop(grace=None).wait()
                self._socket.unlink(missing_ok=True)

    def serve(self) -> grpc.Server:
        """Start to answer on the plugin's own socket."""
        self._socket.unlink(missing_ok=True)
        server = grpc.server(ThreadPoolExecutor(THREADS))
        methods = {
            "GetDevicePluginOptions": _unary(Empty, lambda _: OPTIONS),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch, request_deserializer=Empty.decode, response_serializer=DeviceList.encode
            ),
            "Allocate": _unary(AllocateRequest, allocate),
            "GetPreferredAllocation": _unary(PreferredRequest, prefer),
            # The kubelet does not call it, because the options do not ask for it.
            "PreStartContainer": _unary(Empty, lambda _: Empty()),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(f"{VERSION}.DevicePlugin", methods)])
        server.add_insecure_port(f"unix://{self._socket}")
        server.start()
        return server

    def register(self) -> bool:
        """Announce the plugin to the kubelet; False when it does not take it."""
        request = Registration(VERSION, self._socket.name, self._resource, OPTIONS)
        with grpc.insecure_channel(f"unix://{self._folder / KUBELET}") as channel:
            call = channel.unary_unary(
                f"/{VERSION}.Registration/Register",
                request_serializer=Registration.encode,
                response_deserializer=Empty.decode,
            )
            try:
                call(request, timeout=REGISTER_SECONDS)
            except grpc.RpcError as problem:
                log.warning("the kubelet did not take the plugin: %s", problem.details())
                return False
        log.info("registered %d devices as %s", self._devices.count, self._resource)
        return True

    def _list_and_watch(self, _: Empty, context: grpc.ServicerContext) -> Iterator[DeviceList]:
        yield from self._devices.follow(context.is_active)

    def _identity(self, name: str) -> tuple[int, int] | None:
        """Return what changes when a socket is made anew, None when it is not there."""
        try:
            found = os.stat(self._folder / name)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_ctime_ns


def prefer(request: PreferredRequest) -> PreferredResponse:
    """Return the free devices with the lowest indices for each container, those that it must take included."""
    answers = []
    for one in request.containers:
        others = sorted(set(one.available) - set(one.required))
        answers.append(ContainerRequest([*one.required, *others][: one.size]))
    return PreferredResponse(answers)


def allocate(request: AllocateRequest) -> AllocateResponse:
    """Return the variables of each container that starts."""
    for one in request.containers:
        log.info("allocated %s", ", ".join(sorted(one.device_ids)))
    return AllocateResponse([ContainerResponse(environ(one)) for one in request.containers])


def _unary(request: type[Message], answer: Callable[..., Message]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(
        lambda message, _: answer(message), request_deserializer=request.decode, response_serializer=Message.encode
    )
