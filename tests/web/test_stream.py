"""The event stream: resumable, alive, limited to the rights of its reader, and quick to end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import Request
from makeway_api.client import AsyncClient
from makeway_api.models import Event, LogChunk
from makeway_quota.services import Caller
from makeway_quota.services.log import audit as audit_module
from makeway_quota.services.log import event_feed
from makeway_quota.services.log.audit import POSITION, AuditService
from makeway_quota.services.log.event_feed import EventFeed
from makeway_quota.store.store import open_store
from makeway_quota.web.login.auth import still_reads
from makeway_quota.web.settings import WebSettings
from makeway_quota.web.stream import Streams, message
from web.portal import API, PEOPLE, PREFIX, Portal, caller, serving

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def event(id: int, **data: Any) -> Event:
    return Event(id=id, at=NOW, kind="job", team="rnd", owner="ana", data=data)


async def numbers(first: int, count: int) -> AsyncIterator[bytes]:
    for id in range(first, first + count):
        yield message(event(id))


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield message(event(0))


async def test_a_message_is_one_event(web: Portal) -> None:
    streams = Streams(WebSettings())
    written = [part async for part in streams.follow(numbers(7, 2))]
    assert written[0] == b"retry: 2000\n: welcome\n\n"
    lines = written[1].decode().split("\n")
    assert lines[:2] == ["id: 7", "event: job"]
    assert Event.model_validate_json(lines[2].removeprefix("data: ")) == event(7)
    assert len(written) == 3
    assert streams.open == 0


async def test_newlines_in_data_stay_in_one_message() -> None:
    async def one() -> AsyncIterator[bytes]:
        yield message(event(1, name="a\nb\r\n\nid: 9"))

    written = b"".join([part async for part in Streams(WebSettings()).follow(one())])
    assert written.count(b"\ndata: ") == 1
    assert json.loads(written.partition(b"data: ")[2])["data"] == {"name": "a\nb\r\n\nid: 9"}


async def test_a_silent_stream_says_that_it_is_alive() -> None:
    stream = Streams(WebSettings(heartbeat=0.01)).follow(silence())
    await anext(stream)
    assert await anext(stream) == b": alive\n\n"
    assert await anext(stream) == b": alive\n\n"
    await stream.aclose()


async def test_closing_ends_streams_and_long_polls_at_once() -> None:
    streams = Streams(WebSettings())
    stream = streams.follow(silence())
    await anext(stream)
    ending = asyncio.create_task(anext(stream, b"the end"))

    async def ask(wait: float) -> LogChunk:
        if wait:
            await asyncio.Event().wait()
        return LogChunk(attempt=1, offset=0, next_offset=0, text="as it is")

    polling = asyncio.create_task(streams.poll(ask, 60))
    await asyncio.sleep(0)
    streams.close()
    assert await asyncio.wait_for(ending, 30) == b"the end"
    assert (await asyncio.wait_for(polling, 30)).text == "as it is"
    assert streams.open == 0


async def test_nothing_is_made_for_a_reader_that_takes_nothing() -> None:
    made = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal made
        async for chunk in numbers(1, 1000):
            made += 1
            yield chunk

    stream = Streams(WebSettings()).follow(counted())
    await anext(stream)
    assert await anext(stream) == message(event(1))
    for _ in range(50):
        await asyncio.sleep(0)
    assert made == 1
    await stream.aclose()


async def test_a_reader_that_was_slow_reads_on_or_is_told_to_read_everything(
    web: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "KEPT", 20)
    store, services = web.services.context.store, web.services
    for missed, kinds in ((15, ["job"] * 15), (50, ["reset"])):
        events = services.audit.batches(PEOPLE["root"], store.last_event_id(), None, 0.0)
        store.add_event("job", "rnd", "ana", {"n": 0}, 1.0)
        await anext(events)
        for number in range(missed):
            store.add_event("job", "rnd", "ana", {"n": number}, 1.0)
        batch = await asyncio.wait_for(anext(events), 30)
        heard = [row.kind for row in batch.rows] + ([batch.notice.kind] if batch.notice else [])
        assert (heard, batch.last) == (kinds, store.last_event_id())


async def test_an_event_is_serialised_once_for_all_its_readers(web: Portal, served: str) -> None:
    """Streams of people with different rights: each event is turned into text once, for those who may see it."""
    web.app.state.streams.settings = replace(web.app.state.streams.settings, streams_per_user=0)
    names = ["root", "ana", "bo", "lone", "lead"] * 4
    store = web.services.context.store
    start, before = store.last_event_id(), web.app.state.streams.messages.serialised
    reading = [asyncio.create_task(collect(served, name, start, 6 if name == "root" else 3)) for name in names]
    for _ in range(3):
        for team, owner in (("rnd", "eve"), ("devops", "bo")):
            store.add_event("job", team, owner, {}, 1.0)
    for number in range(3):
        store.add_event("job", None, "lone", {"n": number}, 1.0)
    heard = await asyncio.wait_for(asyncio.gather(*reading), 60)
    assert web.app.state.streams.messages.serialised - before == 9
    for name, events in zip(names, heard, strict=True):
        teams = {"ana": {"rnd"}, "lead": {"rnd"}, "bo": {"devops"}, "lone": {None}}.get(name)
        assert teams is None or {seen.team for seen in events} == teams


async def test_an_error_below_ends_the_stream() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield message(event(1))
        raise RuntimeError("gone")

    assert len([part async for part in Streams(WebSettings()).follow(broken())]) == 2


@pytest.fixture
async def served(web: Portal) -> AsyncIterator[str]:
    """The app behind a real socket."""
    async with serving(web.app) as address:
        yield address


async def collect(url: str, person: str, after: int | None, until: int) -> list[Event]:
    async with AsyncClient(url + PREFIX, person) as client:
        events: list[Event] = []
        async for seen in client.events(after):
            events.append(seen)
            if len(events) >= until:
                return events
    return events


async def test_the_stream_resumes_where_it_was_left(web: Portal, served: str) -> None:
    id = await web.running_job()
    everything = await asyncio.wait_for(collect(served, "root", 0, 4), 30)
    assert [seen.id for seen in everything] == sorted({seen.id for seen in everything})
    assert {seen.kind for seen in everything} >= {"job", "decision"}
    assert any(seen.data.get("id") == id for seen in everything)
    rest = await asyncio.wait_for(collect(served, "root", everything[1].id, 2), 30)
    assert [seen.id for seen in rest] == [seen.id for seen in everything[2:4]]


async def test_people_hear_of_their_own_teams_only(web: Portal, served: str) -> None:
    listening = asyncio.create_task(collect(served, "bo", 0, 3))
    await web.running_job(owner="ana")
    await web.running_job(owner="bo", profile="gpu1", name="mine")
    heard = await asyncio.wait_for(listening, 30)
    assert [(seen.kind, seen.team) for seen in heard] == [("policy", None), ("job", "devops"), ("decision", "devops")]


async def test_the_stream_answers_with_the_right_headers(web: Portal, served: str) -> None:
    async with httpx2.AsyncClient() as client:
        async with client.stream("GET", f"{served}{API}/events", headers={"Authorization": "token ana"}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            assert web.app.state.streams.open == 1
            web.app.state.streams.close()
            assert b"welcome" in await asyncio.wait_for(answer.aread(), 30)


# -- rights, limits and readers that were away -----------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_stream_follows_the_rights_of_its_reader(web: Portal) -> None:
    """Removed from the team: what is committed 10 seconds later is not sent any more."""
    clock = Clock()
    audit = AuditService(web.services.context, web.services.feed, clock)
    people: list[Caller | None] = [PEOPLE["ana"]]

    async def renew() -> Caller | None:
        return people[0]

    events = audit.events(PEOPLE["ana"], 0, renew)
    reading = asyncio.ensure_future(anext(events))
    await web.running_job(owner="ana", name="first")
    assert (await asyncio.wait_for(reading, 30)).kind in ("policy", "job", "decision")
    people[0] = caller("ana", "read", groups=("devops",))
    clock.now = 10.1
    await web.running_job(owner="eve", name="second")
    await web.running_job(owner="bo", name="third", profile="gpu1")
    heard: list[Event] = []
    async for seen in events:
        heard.append(seen)
        if seen.team == "devops" and seen.data.get("state") == "running":
            break
    later = [seen for seen in heard if seen.owner == "eve"]
    assert not later
    people[0] = None
    clock.now = 30.0
    await web.running_job(owner="bo", name="fourth", profile="gpu1")
    assert [seen async for seen in events] == []


async def test_the_rights_of_a_stream_come_from_its_token(web: Portal, served: str) -> None:
    request = Request({"type": "http", "headers": [(b"authorization", b"token ana")], "method": "GET", "path": "/"})
    authenticator = web.app.state.authenticator
    assert (await still_reads(authenticator, request)) == PEOPLE["ana"]
    before = dict(authenticator.directory.tokens)
    try:
        authenticator.directory.tokens["ana"] = caller("ana")
        assert await still_reads(authenticator, request) is None
        del authenticator.directory.tokens["ana"]
        assert await still_reads(authenticator, request) is None
    finally:
        authenticator.directory.tokens.update(before)


@pytest.mark.parametrize("after", [1, 10**9])
async def test_a_reader_from_before_the_oldest_event_gets_a_reset(web: Portal, after: int) -> None:
    await web.running_job()
    store = web.services.context.store
    await asyncio.to_thread(store.pruning.forget_events, web.services.context.clock() + 30 * 86400, 1_000, 1_000)
    newest = store.last_event_id()
    events = web.services.audit.events(PEOPLE["root"], after)
    first = await anext(events)
    assert (first.kind, first.id) == ("reset", newest)
    await web.running_job(name="next", profile="gpu1")
    assert (await asyncio.wait_for(anext(events), 30)).id == newest + 1


async def test_a_reader_that_missed_nothing_gets_no_reset(web: Portal) -> None:
    await web.running_job()
    store = web.services.context.store
    for after in (store.oldest_event_id() - 1, store.oldest_event_id(), store.last_event_id() - 1):
        first = await anext(web.services.audit.events(PEOPLE["root"], after))
        assert (first.kind == "reset", first.id) == (False, after + 1)


async def test_a_reader_far_behind_gets_a_reset(web: Portal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "KEPT", 5)
    store = web.services.context.store
    for number in range(10):
        store.add_event("job", "rnd", "ana", {"n": number}, 1.0)
    newest = store.last_event_id()
    for after, kind, id in ((newest - 6, "reset", newest), (newest - 5, "job", newest - 4)):
        first = await anext(web.services.audit.events(PEOPLE["ana"], after))
        assert (first.kind, first.id) == (kind, id)


async def test_a_reader_that_sees_nothing_hears_how_far_it_read(web: Portal) -> None:
    clock = Clock()
    store = web.services.context.store
    audit = AuditService(web.services.context, web.services.feed, clock)
    store.add_event("job", "rnd", "ana", {"n": 0}, 1.0)
    first = store.last_event_id()
    events = audit.events(PEOPLE["bo"], first - 1)
    reading = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    clock.now = 10.1
    for number in range(3):
        store.add_event("job", "rnd", "ana", {"n": number}, 1.0)
    heard = await asyncio.wait_for(reading, 30)
    assert first <= heard.id <= store.last_event_id()
    assert message(heard) == b"id: %d\n\n" % heard.id, "an id alone is no event to a browser or a client"
    assert heard.kind == POSITION


async def test_one_person_may_have_so_many_streams(web: Portal, served: str) -> None:
    web.app.state.streams.settings = replace(web.app.state.streams.settings, streams_per_user=2)
    headers = {"Authorization": "token ana"}
    async with httpx2.AsyncClient() as client, AsyncExitStack() as open_streams:
        parts = []  # a reader that is forgotten closes its stream
        for _ in range(2):
            stream = client.stream("GET", f"{served}{API}/events", headers=headers)
            answer = await open_streams.enter_async_context(stream)
            parts.append(answer.aiter_bytes())
            assert await anext(parts[-1])
        third = await client.get(f"{served}{API}/events", headers=headers)
        assert (third.status_code, third.json()["code"]) == (429, "too_many_streams")
        assert third.json()["numbers"]["most"] == 2
        assert int(third.headers["retry-after"]) > 0
        async with client.stream("GET", f"{served}{API}/events", headers={"Authorization": "token bo"}) as other:
            assert other.status_code == 200
        web.app.state.streams.close()


async def test_streams_that_begin_at_the_same_moment_stay_below_the_limit() -> None:
    streams = Streams(WebSettings(streams_per_user=1))
    first, second = streams.follow(silence(), "ana"), streams.follow(silence(), "ana")
    assert b"welcome" in await anext(first)
    assert [part async for part in second] == []
    await first.aclose()
    assert streams.open == 0


async def test_the_feed_keeps_the_last_events_and_reads_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = 100
    monkeypatch.setattr(event_feed, "KEPT", kept)
    store = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}")
    feed = EventFeed(store, asyncio.to_thread)
    store.add_event("job", None, None, {}, 1.0)
    assert [seen.id for seen in await feed.after(0)] == [1]
    for number in range(2, 8 * kept):
        store.add_event("job", None, None, {"n": number}, 1.0)
        if number % 70 == 0:
            await feed.after(number)
    for after in (0, 1, kept, 8 * kept - 10, 8 * kept - 1):
        ids = [seen.id for seen in await feed.after(after)]
        assert ids == list(range(after + 1, min(after + 500, 8 * kept - 1) + 1))
    assert len(feed._events) <= 2 * kept
    store.close()
