"""Find the GPUs of this machine: real ones through NVML, else virtual ones that are marked as such."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from ..base import NodeStatus


@dataclass(frozen=True, slots=True)
class Gpu:
    """One real device; `memory` in MiB."""

    index: int
    model: str
    memory: int


def real_gpus() -> tuple[Gpu, ...]:
    """Return the devices that NVML lists, none without a driver; CUDA_VISIBLE_DEVICES (plain indices) limits them."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        result = [_gpu(index) for index in range(int(pynvml.nvmlDeviceGetCount()))]
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None and all(word.strip().isdigit() for word in allowed.split(",")):
        indices = {int(word) for word in allowed.split(",")}
        result = [gpu for gpu in result if gpu.index in indices]
    return tuple(result)


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name = pynvml.nvmlDeviceGetName(handle)
    memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // 2**20
    return Gpu(index, name.decode() if isinstance(name, bytes) else str(name), memory)


def host_node(gpus: tuple[Gpu, ...], pool: str) -> NodeStatus:
    """Describe this machine with its real GPUs as one node."""
    models = sorted({gpu.model for gpu in gpus})
    return NodeStatus(
        name=socket.gethostname(),
        pool=pool,
        devices=tuple(gpu.index for gpu in gpus),
        model=" + ".join(models),
        cpu=(os.cpu_count() or 0) * 1000,
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
    )


def virtual_nodes(gpus: int, nodes: int, pool: str, prefix: str = "virtual") -> tuple[NodeStatus, ...]:
    """Return `nodes` virtual nodes that share `gpus` devices; the first ones get the remainder.

    Their CPU and memory are 0, not checked: they all stand for the same machine.
    """
    nodes = max(1, nodes)
    sizes = [gpus // nodes + (1 if place < gpus % nodes else 0) for place in range(nodes)]
    return tuple(
        NodeStatus(f"{prefix}-{place + 1}", pool, tuple(range(size)), model="virtual GPU", virtual=True)
        for place, size in enumerate(sizes)
    )


def nodes_here(pool: str, gpus: int, nodes: int) -> tuple[NodeStatus, ...]:
    """Describe this machine: its real GPUs as one node, or else virtual ones."""
    devices = real_gpus()
    return (host_node(devices, pool),) if devices else virtual_nodes(gpus, nodes, pool)
