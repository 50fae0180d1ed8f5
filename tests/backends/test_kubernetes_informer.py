"""Informers, where an API server answers what it should not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from api_server import PODS, ApiServer, pod
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, Object, refusal_of
from makeway_quota.backends.kubernetes.api.informer import Informer, Timing

QUICK = Timing(first_pause=0.01, max_pause=0.02, silence=0.2, page=1)


@asynccontextmanager
async def followed(
    server: ApiServer, project: Callable[[Object], Any], gone: Callable[[Any], None] = lambda last: None
) -> AsyncIterator[Informer[Any]]:
    informer: Informer[Any] = Informer(server, PODS, project, gone=gone, timing=QUICK)
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


class PagedServer(ApiServer):
    """Lists of pods by pages, which show what was there when the list began."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.lists[PODS] = [pod(name) for name in names]
        self.listed: list[Object] = []
        """the list that the continue token stands for"""
        self.before: list[Callable[[], None]] = []
        """of what happens before each page after the first; what they raise is answered instead of the page"""

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        query = query or {}
        if "continue" not in query:
            self.listed = list((await super().get(path, query))["items"])
        elif self.before:
            self.before.pop(0)()
        start, size = int(query.get("continue", 0)), int(query.get("limit", len(self.listed) or 1))
        metadata = {"resourceVersion": self.version}
        if start + size < len(self.listed):
            metadata["continue"] = str(start + size)
        return {"metadata": metadata, "items": self.listed[start : start + size]}


def expired() -> ApiStatusError:
    return ApiStatusError(410, "Expired", "The provided continue parameter is too old")


def uid_of(item: Object) -> str:
    return str(item["metadata"]["uid"])


def with_uid(name: str, uid: str) -> Object:
    made = pod(name)
    return {**made, "metadata": {**made["metadata"], "uid": uid}}


def names(informer: Informer[Any]) -> list[str]:
    return sorted(key.removeprefix("jobs/makeway-").removesuffix("-1-0") for key in informer.objects)


async def test_a_list_that_expires_between_pages_keeps_nothing_that_was_deleted_meanwhile() -> None:
    server = PagedServer("a", "b", "c")

    def change() -> None:
        server.lists[PODS] = [pod("b"), pod("d")]
        raise expired()

    server.before = [change]
    async with followed(server, uid_of) as informer:
        assert names(informer) == ["b", "d"]
        assert informer.counts.expired == 1


async def test_what_an_expired_list_showed_is_gone_once() -> None:
    server = PagedServer("a", "b")

    def change() -> None:
        server.lists[PODS] = [pod("b")]
        raise expired()

    server.before = [change]
    gone: list[str] = []
    async with followed(server, uid_of, gone.append) as informer:
        assert gone == ["a-0"]
        assert "jobs/makeway-a-1-0" in informer.take()


async def test_a_list_that_expires_twice_keeps_only_what_the_last_one_has() -> None:
    server = PagedServer("a", "b", "c")
    lists = 0

    def refuse(method: str, path: str) -> None:
        nonlocal lists
        lists += 1
        if lists == 2:  # the list in place of the expired one
            server.lists[PODS] = [pod("c"), pod("d")]
            raise expired()

    def change() -> None:
        server.lists[PODS] = [pod("b"), pod("c")]
        raise expired()

    server.answer = refuse
    server.before = [change]
    async with followed(server, uid_of) as informer:
        assert names(informer) == ["c", "d"]
        assert informer.counts.expired == 2


@pytest.mark.parametrize("seed", range(40))
async def test_after_any_changes_between_pages_a_list_holds_what_is_there(seed: int) -> None:
    """Pods come, go and are replaced under their names; the list expires at any page, or not."""
    chance = random.Random(seed)
    server = PagedServer("a", "b", "c", "d")
    truth = {name: f"{name}-0" for name in "abcd"}

    def change() -> None:
        for name in chance.sample("abcdef", 2):
            if name not in truth or chance.random() < 0.5:
                truth[name] = f"{name}-{chance.random()}"
            else:
                del truth[name]
        server.lists[PODS] = [with_uid(name, uid) for name, uid in truth.items()]
        raise expired()

    server.before = [change if chance.random() < 0.6 else lambda: None for _ in range(8)]
    seen: set[str] = set()
    gone: list[str] = []

    def project(item: Object) -> str:
        seen.add(uid_of(item))
        return uid_of(item)

    async with followed(server, project, gone.append) as informer:
        assert informer.objects == {f"jobs/makeway-{name}-1-0": uid for name, uid in truth.items()}
        assert sorted(gone) == sorted(seen - set(truth.values()))


async def test_a_pod_of_the_same_name_is_another_and_the_old_one_is_gone() -> None:
    server = PagedServer("a")
    gone: list[str] = []
    async with followed(server, uid_of, gone.append) as informer:
        server.lists[PODS] = [with_uid("a", "new")]
        server.events = [{"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}]
        await until(lambda: informer.counts.lists >= 2 and list(informer.objects.values()) == ["new"])
        assert gone == ["a-0"]


@pytest.mark.parametrize(
    ("code", "reason"), [(0, "Expired"), (500, "Expired"), (500, "InternalError"), (400, "BadRequest"), (0, "")]
)
async def test_a_watch_that_ends_with_any_error_again_is_listed_again(code: int, reason: str) -> None:
    server = BrokenWatch({"type": "ERROR", "object": {"code": code, "reason": reason}})
    server.lists[PODS] = [pod("a")]
    async with followed(server, uid_of) as informer:
        server.lists[PODS] = [pod("b")]
        await until(lambda: names(informer) == ["b"])


async def test_an_event_that_is_never_understood_leads_to_a_list() -> None:
    server = BrokenWatch({"type": "MODIFIED", "object": {"metadata": {"name": "a"}}})
    server.lists[PODS] = [pod("a")]
    async with followed(server, uid_of) as informer:
        server.lists[PODS] = [pod("b")]
        await until(lambda: names(informer) == ["b"])


async def test_a_watch_that_was_asked_to_wait_goes_on_where_it_was() -> None:
    server = BrokenWatch({"type": "ERROR", "object": {"code": 429, "reason": "TooManyRequests"}})
    async with followed(server, uid_of) as informer:
        await until(lambda: informer.counts.failures >= 4)
        assert informer.counts.lists == 1


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("5", 5), ("86400", 60), ("9" * 400, 60), ("-1", None), ("Sun, 29 Nov 2026", None), ("", None)],
)
def test_no_answer_has_the_cluster_looked_at_again_only_a_day_later(header: str, seconds: float | None) -> None:
    """As of a gateway in front of an API server that is being replaced."""
    assert refusal_of(503, b"maintenance", header).retry_after == seconds


class BrokenWatch(ApiServer):
    """Every watch ends with the same event."""

    def __init__(self, event: Object) -> None:
        super().__init__()
        self.event = event

    @asynccontextmanager
    async def stream(self, path: str, query: Mapping[str, str], silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        self.events = [self.event]
        async with super().stream(path, query, silence) as lines:
            yield lines
