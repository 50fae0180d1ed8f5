"""Informers, where an API server answers what it should not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from api_server import PODS, ApiServer, pod
from makeway_quota.backends.kubernetes.client import Object
from makeway_quota.backends.kubernetes.informer import Informer, Timing

QUICK = Timing(first_pause=0.01, longest_pause=0.02, silence=0.2)


@asynccontextmanager
async def followed(server: ApiServer, project: Callable[[Object], Any]) -> AsyncIterator[Informer[Any]]:
    informer: Informer[Any] = Informer(server, PODS, project, timing=QUICK)
    task = asyncio.create_task(informer.run())
    async with asyncio.timeout(20):
        await informer.wait_synced()
        yield informer
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(true: Callable[[], object]) -> None:
    while not true():  # noqa: ASYNC110 - an informer has no event for it
        await asyncio.sleep(0.01)


async def test_an_api_server_that_went_back_in_time_is_listed_again() -> None:
    server = ApiServer()
    server.lists[PODS] = [pod("old")]
    server.version = "500"
    async with followed(server, lambda item: item["metadata"]["name"]) as informer:
        server.lists[PODS], server.version = [pod("restored")], "90"
        await until(lambda: "jobs/makeway-restored-1-0" in informer.objects)
        assert list(informer.objects) == ["jobs/makeway-restored-1-0"]
        assert informer.counts.lists >= 2


async def test_an_older_version_in_a_watch_leads_to_a_list() -> None:
    server = ApiServer()
    server.version = "500"
    server.events = [{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "90"}}}]
    async with followed(server, lambda item: item["metadata"]["name"]) as informer:
        await until(lambda: informer.counts.lists >= 2)
        assert informer.counts.expired == 1


async def test_one_object_that_is_not_understood_hides_no_other() -> None:
    server = ApiServer()
    strange = {**pod("strange"), "status": None}
    server.lists[PODS] = [strange, pod("plain")]
    server.events = [
        {"type": "MODIFIED", "object": {**pod("plain", version="21"), "status": None}},
        {"type": "ADDED", "object": pod("later", version="22")},
    ]
    async with followed(server, lambda item: item["status"]["phase"]) as informer:
        await until(lambda: len(informer.objects) == 2)
        assert informer.objects == {"jobs/makeway-plain-1-0": "Running", "jobs/makeway-later-1-0": "Running"}


@pytest.mark.parametrize("event", [{}, {"type": "ADDED", "object": None}, {"type": "ADDED", "object": {}}, [], None])
async def test_no_answer_ends_an_informer(event: Any) -> None:
    server = ApiServer()
    server.events = [event]
    async with followed(server, lambda item: item["metadata"]["name"]) as informer:
        await until(lambda: informer.counts.failures)
        server.events = [{"type": "ADDED", "object": pod("later")}]
        await until(lambda: informer.objects)
