"""Decisions about jobs become events of their pods, beside all else and within bounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from api_server import PODS, ApiServer, pod
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.attempts.event_recorder import (
    LONG_PAUSE_AFTER_FAILURE,
    MAX_PODS,
    MAX_WAITING,
    PAUSE_AFTER_FAILURE,
    EventRecorder,
)
from makeway_quota.backends.kubernetes.attempts.pod_states import JobPod
from makeway_quota.store.store import open_store
from makeway_quota.values import Notice
from pod_backend import Backend

EVENTS = "/api/v1/namespaces/jobs/events"


class Server(ApiServer):
    """An API server that keeps the events that it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[Object] = []

    async def create(self, path: str, body: Object) -> Object:
        result = await super().create(path, body)
        if path == EVENTS:
            self.posted.append(body)
        return result


def worker(number: int = 0) -> JobPod:
    return JobPod(f"makeway-j1-1-{number}", f"u{number}", ("j1", 1), number, 1, "n0", 0.0)


def events_of(server: Server, clock: Callable[[], float] = lambda: 0.0) -> EventRecorder:
    return EventRecorder(server, "jobs", lambda: True, pause=0.0, monotonic=clock, clock=lambda: 1_800_000_000.0)


async def idle(events: EventRecorder) -> None:
    """Wait until nothing is posted any more."""
    if events._posting is not None:
        await events._posting


def refusing(status: int, reason: str) -> Callable[[str, str], None]:
    def answer(method: str, path: str) -> None:
        raise ApiStatusError(status, reason, "no")

    return answer


async def test_a_decision_is_an_event_of_each_pod_of_the_attempt() -> None:
    server = Server()
    events = events_of(server)
    events.publish_events([worker(1), worker(0)], "made_way", "fit made way for owner.")
    await idle(events)
    assert [result["involvedObject"]["name"] for result in server.posted] == ["makeway-j1-1-0", "makeway-j1-1-1"]
    first = server.posted[0]
    assert (first["reason"], first["type"], first["message"]) == ("MadeWay", "Normal", "fit made way for owner.")
    assert (first["involvedObject"]["uid"], first["lastTimestamp"]) == ("u0", "2027-01-15T08:00:00Z")
    events.publish_events([worker()], "lost", "x" * 2000)
    await idle(events)
    assert (server.posted[-1]["type"], len(server.posted[-1]["message"])) == ("Warning", 1000)


async def test_the_same_decision_has_the_same_name_and_is_posted_once() -> None:
    server = Server()
    events = events_of(server)
    for text in ("a", "a", "b"):
        events.publish_events([worker()], "notice", text)
    await idle(events)
    names = [result["metadata"]["name"] for result in server.posted]
    assert names[0] == names[1] != names[2]
    server.answer = refusing(409, "AlreadyExists")
    for _ in range(2):
        events.publish_events([worker()], "notice", "a")
        await idle(events)
    assert len(server.asked) == 5, "it goes on after that answer"


async def test_what_is_too_much_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    events = events_of(server)
    for number in range(MAX_WAITING):
        events.publish_events([worker()], "notice", str(number))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            events.publish_events([worker()], "notice", "one too many")
    await idle(events)
    assert len(server.posted) == MAX_WAITING
    assert len(caplog.records) == 1
    events.publish_events([worker(number) for number in range(100)], "notice", "a gang")
    await idle(events)
    assert len(server.posted) == MAX_WAITING + MAX_PODS


@pytest.mark.parametrize(("status", "pause"), [(403, LONG_PAUSE_AFTER_FAILURE), (429, PAUSE_AFTER_FAILURE)])
async def test_an_api_server_that_refuses_events_is_left_alone_for_a_while(status: int, pause: float) -> None:
    server, now = Server(), [0.0]
    events = events_of(server, lambda: now[0])
    server.answer = refusing(status, "No")
    events.publish_events([worker(), worker(1)], "notice", "a")
    await idle(events)
    assert len(server.asked) == 1
    events.publish_events([worker()], "notice", "a")
    await idle(events)
    assert len(server.asked) == 1
    server.answer = lambda method, path: None
    now[0] = pause
    events.publish_events([worker()], "notice", "a")
    await idle(events)
    assert len(server.posted) == 1


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    server = Server()
    server.lists[PODS] = [pod("j1", worker=0, of=2), pod("j1", worker=1, of=2)]
    made = Backend(server, store)
    await made.open()
    await made.observe()
    yield made
    await made.close(stop_jobs=False)
    store.close()


NOTICE = Notice("fit makes way for owner of DevOps.", 1_800_000_000.0, 1_800_000_030.0, "evict", "devops", "bo", "j2")


async def test_a_notice_is_an_event_with_its_deadline(backend: Backend) -> None:
    server = backend.server
    assert isinstance(server, Server)
    await backend.notice("j1", 1, NOTICE)
    await idle(backend._events)
    assert {result["message"] for result in server.posted} == {
        "fit makes way for owner of DevOps. It may save until 08:00:30 UTC."
    }
    assert {result["involvedObject"]["uid"] for result in server.posted} == {"j1-0", "j1-1"}


async def test_a_pod_that_is_gone_gets_the_event_of_its_loss(backend: Backend) -> None:
    server = backend.server
    assert isinstance(server, Server)
    for number in range(2):
        backend.hear("DELETED", pod("j1", worker=number, of=2, version="30"))
    await backend.observe()
    backend.publish_event(("j1", 1), "lost", "fit was lost.")
    await idle(backend._events)
    assert {result["involvedObject"]["uid"] for result in server.posted} == {"j1-0", "j1-1"}


async def test_a_replica_that_leads_no_more_posts_nothing(backend: Backend) -> None:
    backend.fence_with(lambda: False)
    backend.publish_event(("j1", 1), "lost", "fit was lost.")
    await idle(backend._events)
    assert f"POST {EVENTS}" not in backend.server.asked


async def test_a_notice_does_not_wait_for_its_event(backend: Backend) -> None:
    held = asyncio.Event()

    async def slow(path: str, body: Object) -> Object:
        await held.wait()
        raise ApiUnreachable("no answer")

    backend.server.create = slow  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        await backend.notice("j1", 1, NOTICE)
    held.set()
    await idle(backend._events)
    assert (await backend.seen("j1")).workload == "j1"
