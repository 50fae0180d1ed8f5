"""Parts of pages as streams send them: what changed and no more, made once for all, and only what each may see."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makeway_api.errors import MakewayError
from makeway_quota.services.log.topics import MAX_TOPICS
from makeway_quota.web.pages import live as live_module
from makeway_quota.web.pages import parts as parts_module
from makeway_quota.web.pages.edits import apply_edits, edits
from makeway_quota.web.requests import compression
from makeway_quota.web.requests.limits import Receive, Scope, Send
from web.portal import API, PEOPLE, PREFIX, Portal, serving

LINES = st.lists(st.sampled_from(["<tr>", "</tr>", "<td>1</td>", "<td>2</td>", "", "ü"]), max_size=30)


@given(before=LINES, after=LINES)
def test_edits_make_the_new_text_of_the_old_one(before: list[str], after: list[str]) -> None:
    assert apply_edits(before, edits(before, after)) == after


def test_edits_are_as_small_as_what_changed() -> None:
    before = [f"<tr id={n}>\n</tr>" for n in range(2_000)]
    lines = "\n".join(before).split("\n")
    after = lines.copy()
    for at in random.Random(1).sample(range(0, 4_000, 2), 20):
        after[at] = "new"
    assert len(json.dumps(edits(lines, after))) < 1_500


class Reader:
    """Reads the messages of a stream of a page."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    async def next(self, kind: str) -> dict[str, Any]:
        """Return the data of the next message of a kind."""
        while True:
            while b"\n\n" in self._rest:
                one, _, self._rest = self._rest.partition(b"\n\n")
                fields = dict(line.split(b": ", 1) for line in one.split(b"\n") if b": " in line and line[:1] != b":")
                if fields.get(b"event") == kind.encode():
                    return dict(json.loads(fields[b"data"]))
            self._rest += await anext(self._pieces)


@pytest.fixture
async def url(web: Portal) -> AsyncIterator[str]:
    async with serving(web.app) as address:
        yield address
        web.app.state.streams.close()


async def test_a_part_comes_whole_and_then_as_what_changed(web: Portal, url: str) -> None:
    await web.running_job("before", profile="gpu1")
    headers = {"Authorization": "token root", "Accept-Encoding": "gzip"}
    async with httpx2.AsyncClient(headers=headers, timeout=30) as client:
        async with client.stream("GET", f"{url}{API}/events?parts=panel") as answer:
            assert answer.headers["content-encoding"] == "gzip"
            reader = Reader(answer.aiter_bytes())
            whole = await reader.next("part")
            id = await web.running_job("shown")
            text = whole["text"].split("\n")
            while f'data-w="{id}"' not in "\n".join(text):
                change = await reader.next("part")
                assert change["base"] == whole["version"]
                assert len(json.dumps(change["edits"])) < len(whole["text"])
                text, whole = apply_edits(text, change["edits"]), whole | {"version": change["version"]}
            known = f"parts=panel@{whole['version']}"
        async with client.stream("GET", f"{url}{API}/events?{known}") as answer:
            reader = Reader(answer.aiter_bytes())
            await web.running_job("another", profile="gpu1")
            assert (await reader.next("part"))["base"] == whole["version"], (
                "a stream that comes back gets what it missed"
            )


async def test_a_part_is_rendered_compared_and_serialised_once_for_all_its_streams(
    web: Portal, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"edits": 0, "notes": 0}
    for name, real in (("edits", parts_module.edits), ("note", parts_module.note)):

        def counted(*args: Any, _real: Any = real, _name: str = name) -> Any:
            made["edits" if _name == "edits" else "notes"] += 1
            return _real(*args)

        monkeypatch.setattr(parts_module, name, counted)
    async with httpx2.AsyncClient(headers={"Authorization": "token root"}, timeout=60) as client:

        async def read() -> str:
            async with client.stream("GET", f"{url}{API}/events?parts=panel") as answer:
                reader = Reader(answer.aiter_bytes())
                await reader.next("part")
                opened.release()
                return str((await reader.next("part"))["version"])

        opened = asyncio.Semaphore(0)
        async with asyncio.timeout(120), asyncio.TaskGroup() as readers:  # a reader that fails ends the test
            reading = [readers.create_task(read()) for _ in range(15)]
            for _ in reading:
                await opened.acquire()
            before = dict(made)
            web.services.context.store.add_event("job", "rnd", "ana", {}, 1.0)
            await web.running_job("one", profile="gpu1")
        versions = [reader.result() for reader in reading]
    assert made["edits"] - before["edits"] <= 2 * len(set(versions))
    assert made["notes"] - before["notes"] <= 2 * len(set(versions))


async def test_a_stream_misses_nothing_that_happens_while_it_begins(
    web: Portal, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, happened = web.services.feed, asyncio.Event()
    read_range = feed.range

    async def late() -> tuple[int, int]:
        with suppress(TimeoutError):
            await asyncio.wait_for(happened.wait(), 2)
        return await read_range()

    monkeypatch.setattr(feed, "range", late)
    async with httpx2.AsyncClient(headers={"Authorization": "token root"}, timeout=30) as client:
        async with client.stream("GET", f"{url}{API}/events?parts=panel") as answer:
            reader = Reader(answer.aiter_bytes())
            whole = await reader.next("part")
            id = await web.running_job("one", profile="gpu1")
            happened.set()
            text = whole["text"].split("\n")
            async with asyncio.timeout(10):
                while f'data-w="{id}"' not in "\n".join(text):
                    text = apply_edits(text, (await reader.next("part"))["edits"])


def test_versions_that_were_never_sent_take_no_memory() -> None:
    made = parts_module.History().add(parts_module.Rendering("<p>1</p>", {}, 1, 1.0))
    assert len({id(made.message("panel", f"made-up-{number}", None)) for number in range(50)}) == 1


async def test_each_reader_is_sent_its_own_view(web: Portal, url: str) -> None:
    await web.running_job("secret of rnd", owner="ana", profile="gpu1")

    async def part(name: str, query: str, kind: str = "part") -> dict[str, Any]:
        async with httpx2.AsyncClient(headers={"Authorization": f"token {name}"}, timeout=30) as client:
            async with client.stream("GET", f"{url}{API}/events?{query}") as answer:
                return await Reader(answer.aiter_bytes()).next(kind)

    whole = await part("root", "parts=teams/rnd")
    assert "secret of rnd" in whole["text"]
    assert await part("bo", "parts=teams/rnd", "gone") == {"part": "teams/rnd"}
    stolen = await part("bo", f"parts=panel@{(await part('root', 'parts=panel'))['version']}")
    assert "text" in stolen, "a version of another view is not known in this one"
    assert ">secret of rnd</a>" not in stolen["text"]


async def test_a_stream_names_only_the_topics_that_its_page_shows(web: Portal, url: str) -> None:
    id = await web.running_job("mine", profile="gpu1")
    async with httpx2.AsyncClient(headers={"Authorization": "token root"}, timeout=30) as client:
        async with client.stream("GET", f"{url}{API}/events?topics=job:{id},team:devops") as answer:
            reader = Reader(answer.aiter_bytes())
            await reader.next("beat")
            await web.running_job("other", profile="gpu1")
            await web.services.jobs.cancel(PEOPLE["root"], id)
            assert (await reader.next("changed"))["topics"] == [f"job:{id}"]
            await web.running_job("theirs", owner="bo", profile="gpu1")
            assert (await reader.next("changed"))["topics"] == ["team:devops"]
        for query, code in (("topics=secret", "unknown_topic"), ("parts=jobs/j-1", "unknown_part")):
            refused = await client.get(f"{url}{API}/events?{query}")
            assert (refused.status_code, refused.json()["code"]) == (422, code)
        many = ",".join(f"job:j-{n}" for n in range(MAX_TOPICS + 1))
        assert (await client.get(f"{url}{API}/events?topics={many}")).json()["code"] == "too_many_topics"


@pytest.mark.parametrize("accepted", ["gzip", "br, gzip;q=0.5", "*"])
async def test_documents_parts_files_and_answers_are_compressed(web: Portal, accepted: str) -> None:
    browser = await web.browser("root")
    for path in (
        "",
        "live/panel",
        "workloads",
        "static/makeway.css",
        "static/hub/css/style.min.css",
        "api/v1/openapi.json",
    ):
        client = web.as_("root") if path.startswith("api/") else browser
        plain = await client.get(f"{PREFIX}{path}", headers={"Accept-Encoding": "identity"})
        small = await client.get(f"{PREFIX}{path}", headers={"Accept-Encoding": accepted})
        assert "content-encoding" not in plain.headers
        assert small.headers["content-encoding"] == "gzip", path
        assert "accept-encoding" in small.headers["vary"].lower()
        assert int(small.headers["content-length"]) < len(plain.content)
        if path.startswith("static/"):
            assert small.content == plain.content


async def test_files_asked_for_several_times_at_once_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the room for compressed files shrinks until none is kept."""
    body = b"body" * 400
    size = len(gzip.compress(body, compression.BEST, mtime=0))
    monkeypatch.setattr(compression, "MAX_KEPT", 3 * size)
    made = list[bytes]()
    real = gzip.compress

    def counted(data: bytes, level: int, *, mtime: int) -> bytes:
        made.append(data)
        return real(data, level, mtime=mtime)

    monkeypatch.setattr(gzip, "compress", counted)
    files = compression.Compression(no_app, "/static/")
    for number in range(8):
        await asyncio.gather(*(files.compressed("/static/a.js", b"v=%d" % number, body) for _ in range(4)))
    made.clear()
    for number in (5, 6, 7):
        assert real(body, compression.BEST, mtime=0) == await files.compressed("/static/a.js", b"v=%d" % number, body)
    assert not made, "the newest three, which have room, are kept"


async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer nothing."""


async def test_who_takes_no_gzip_gets_none(web: Portal) -> None:
    browser = await web.browser("root")
    for accepted in ("identity", "br", "gzip;q=0", "gzip; q=0.0"):
        answer = await browser.get(PREFIX, headers={"Accept-Encoding": accepted})
        assert "content-encoding" not in answer.headers, accepted


async def test_the_token_of_a_page_has_other_bytes_in_each_response_and_works_each_time(web: Portal) -> None:
    """Else the size of a compressed page tells it to who can put guesses into the address (BREACH)."""
    id = await web.running_job()
    browser = await web.browser("root")
    tokens = set()
    for _ in range(5):
        text = (await browser.get(f"{PREFIX}jobs/{id}")).text
        token = text.split('name="makeway-xsrf" content="')[1].split('"')[0]
        tokens.add(token)
        headers = {"X-XSRFToken": token, "Sec-Fetch-Mode": "cors"}
        assert (await browser.get(f"{PREFIX}live/panel", headers=headers)).status_code == 200
    assert len(tokens) == 5
    for forged in ("", ".", "a.b", f"{token}x", token.partition(".")[2]):
        headers = {"X-XSRFToken": forged, "Sec-Fetch-Mode": "cors"}
        assert (await browser.get(f"{PREFIX}live/panel", headers=headers)).status_code == 403, forged


async def test_a_service_that_is_busy_for_a_moment_ends_no_part(
    web: Portal, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered, busy = live_module.rendered, [True, True]

    async def sometimes(*given: Any) -> Any:
        if busy:
            busy.pop()
            raise MakewayError("The service is busy.", code="busy", status=503)
        return await rendered(*given)

    monkeypatch.setattr(live_module, "rendered", sometimes)
    monkeypatch.setattr(live_module, "RETRY_SECONDS", 0.01, raising=False)
    async with httpx2.AsyncClient(headers={"Authorization": "token root"}, timeout=30) as client:
        async with client.stream("GET", f"{url}{API}/events?parts=panel") as answer:
            pieces = answer.aiter_bytes()
            kinds = b""
            while b"event: part" not in kinds:
                kinds += await anext(pieces)
    assert b"event: gone" not in kinds
