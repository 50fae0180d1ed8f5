"""Informers on the test cluster, and what tests do to its API server and to etcd."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import httpx2
from makeway_quota.backends.kubernetes.api.client import ApiClient
from makeway_quota.backends.kubernetes.api.connection import from_kubeconfig
from makeway_quota.backends.kubernetes.api.informer import Informer

from kube_cluster import processes
from kube_cluster.cluster import Cluster

SECONDS = 240


async def soon(true: Callable[[], object], what: str) -> None:
    """Return when it is true; raise TimeoutError after a time that is much too long."""
    end = time.monotonic() + SECONDS
    while not true():
        if time.monotonic() >= end:
            raise TimeoutError(f"still not true after {SECONDS} s: {what}")
        await asyncio.sleep(0.05)


@asynccontextmanager
async def client(cluster: Cluster, seconds: float = 30.0) -> AsyncIterator[ApiClient]:
    """Return a client with the rights of the administrator."""
    made = ApiClient(from_kubeconfig(cluster.kubeconfig), seconds)
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def running(*informers: Informer[object]) -> AsyncIterator[None]:
    """Run informers until the block ends; they are synced when it starts."""
    tasks = [asyncio.create_task(informer.run()) for informer in informers]
    try:
        await asyncio.wait_for(asyncio.gather(*(informer.wait_synced() for informer in informers)), SECONDS)
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def compact(cluster: Cluster) -> None:
    """Make etcd forget all past versions."""
    transport = httpx2.HTTPTransport(uds=str(cluster.folder.path / "etcd.sock"))
    with httpx2.Client(transport=transport, base_url="http://etcd") as etcd:
        header = etcd.post("/v3/maintenance/status", content="{}").raise_for_status().json()["header"]
        body = json.dumps({"revision": header["revision"], "physical": True})
        etcd.post("/v3/kv/compaction", content=body).raise_for_status()


def stop_api_server(cluster: Cluster) -> list[str]:
    """Kill the API server; return the command that starts it again."""
    process = cluster.folder.started["kube-apiserver"]
    process.kill()
    process.wait()
    assert isinstance(process.args, list)
    return [str(part) for part in process.args]


def start_api_server(cluster: Cluster, command: list[str]) -> None:
    """Start the API server again and return when it is ready."""
    processes.start(cluster.folder, "kube-apiserver", command)
    processes.wait_until(cluster.api.ready, "The API server", SECONDS, lambda: processes.check(cluster.folder))


def forget_the_past(cluster: Cluster) -> None:
    """Compact etcd and start the API server anew, so that nothing knows the objects' past versions any more."""
    compact(cluster)
    start_api_server(cluster, stop_api_server(cluster))


@contextmanager
def frozen_api_server(cluster: Cluster) -> Iterator[None]:
    """Freeze the API server: it accepts connections and answers nothing."""
    pid = cluster.folder.started["kube-apiserver"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
