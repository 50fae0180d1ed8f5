"""Real GPUs are taken as NVML tells them; without any, virtual ones that say so."""

from __future__ import annotations

import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest
from makeway_quota.backends.local.gpus import host_node, nodes_here, real_gpus, virtual_nodes


class NVMLError(Exception):
    """What pynvml raises."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A machine with four devices, told by the names that pynvml has."""
    nvml = ModuleType("pynvml")
    memory = SimpleNamespace(total=80 * 2**30)
    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 4,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100" if handle else b"NVIDIA A100",
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
    }
    for name, function in functions.items():
        monkeypatch.setattr(nvml, name, function, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml


@pytest.mark.covers("N22")
def test_real_gpus_are_one_node_with_the_hosts_name(driver: ModuleType) -> None:
    (node,) = nodes_here("lab", 10, 2)
    assert (node.name, node.pool, node.devices, node.virtual) == (socket.gethostname(), "lab", (0, 1, 2, 3), False)
    assert node.model == "NVIDIA A100 + NVIDIA H100"
    assert node.cpu >= 1000
    assert node.memory > 100
    assert {gpu.memory for gpu in real_gpus()} == {80 * 1024}


@pytest.mark.parametrize(
    ("allowed", "devices"), [("1,3", (1, 3)), ("0", (0,)), ("9", ()), ("GPU-8f1c", (0, 1, 2, 3)), ("", (0, 1, 2, 3))]
)
def test_the_service_uses_only_the_devices_that_it_may_use(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, allowed: str, devices: tuple[int, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert host_node(real_gpus(), "gpu").devices == devices


@pytest.mark.covers("N22")
@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount"])
def test_without_a_driver_there_are_virtual_ones(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fails() -> None:
        raise NVMLError("no driver")

    monkeypatch.setattr(driver, broken, fails)
    assert nodes_here("gpu", 10, 2) == virtual_nodes(10, 2, "gpu")
    assert [len(node.devices) for node in nodes_here("gpu", 10, 3)] == [4, 3, 3]
    assert all(node.virtual for node in nodes_here("gpu", 1, 1))


def test_without_the_library_there_are_virtual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert real_gpus() == ()
