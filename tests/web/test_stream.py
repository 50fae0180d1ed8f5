"""The event stream: resumable, alive, visible to whom it concerns, and quick to end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest
from makeway_api.client import AsyncClient
from makeway_api.models import Event, LogChunk
from makeway_quota.web.settings import WebSettings
from makeway_quota.web.stream import Streams
from web.portal import API, PREFIX, Portal, serving

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def event(id: int, **data: Any) -> Event:
    return Event(id=id, at=NOW, kind="job", team="rnd", owner="ana", data=data)


async def numbers(first: int, count: int) -> AsyncIterator[Event]:
    for id in range(first, first + count):
        yield event(id)


async def silence() -> AsyncIterator[Event]:
    await asyncio.Event().wait()
    yield event(0)


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
    async def one() -> AsyncIterator[Event]:
        yield event(1, name="a\nb\r\n\nid: 9")

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
    assert await asyncio.wait_for(ending, 1) == b"the end"
    assert (await asyncio.wait_for(polling, 1)).text == "as it is"
    assert streams.open == 0


async def test_a_slow_reader_is_cut_off_and_can_resume() -> None:
    streams = Streams(WebSettings(stream_backlog=10))
    stream = streams.follow(numbers(1, 1000))
    await anext(stream)
    await asyncio.sleep(0)
    read = [part async for part in stream]
    assert 1 <= len(read) <= 11


async def test_an_error_below_ends_the_stream() -> None:
    async def broken() -> AsyncIterator[Event]:
        yield event(1)
        raise RuntimeError("gone")

    assert len([part async for part in Streams(WebSettings()).follow(broken())]) == 2


@pytest.fixture
async def served(web: Portal) -> AsyncIterator[str]:
    """The app behind a real socket."""
    async with serving(web.app) as address:
        yield address


async def collect(url: str, person: str, after: int | None, until: int) -> list[Event]:
    async with AsyncClient(url + PREFIX, person) as client:
        found: list[Event] = []
        async for seen in client.events(after):
            found.append(seen)
            if len(found) >= until:
                return found
    return found


async def test_the_stream_resumes_where_it_was_left(web: Portal, served: str) -> None:
    id = await web.running_job()
    everything = await asyncio.wait_for(collect(served, "root", 0, 4), 10)
    assert [seen.id for seen in everything] == sorted({seen.id for seen in everything})
    assert {seen.kind for seen in everything} >= {"job", "decision"}
    assert any(seen.data.get("id") == id for seen in everything)
    rest = await asyncio.wait_for(collect(served, "root", everything[1].id, 2), 10)
    assert [seen.id for seen in rest] == [seen.id for seen in everything[2:4]]


async def test_people_hear_of_their_own_teams_only(web: Portal, served: str) -> None:
    listening = asyncio.create_task(collect(served, "bo", 0, 3))
    await web.running_job(owner="ana")
    await web.running_job(owner="bo", profile="gpu1", name="mine")
    heard = await asyncio.wait_for(listening, 10)
    assert [(seen.kind, seen.team) for seen in heard] == [("policy", None), ("job", "devops"), ("decision", "devops")]


async def test_the_stream_answers_with_the_right_headers(web: Portal, served: str) -> None:
    async with httpx2.AsyncClient() as client:
        async with client.stream("GET", f"{served}{API}/events", headers={"Authorization": "token ana"}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            assert web.app.state.streams.open == 1
            web.app.state.streams.close()
            assert b"welcome" in await asyncio.wait_for(answer.aread(), 5)
