"""Whatever jobs, people and other services write is read as something, and never fails for everybody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.backends.untrusted import UnreadableJson, read_value
from makeway_quota.control.hub.client import HubApi
from makeway_quota.control.hub.servers import MAX_SINGLE_REQUESTS, HubServers
from running import running
from starlette.responses import JSONResponse

ODD_ERRORS = {
    "deep": b"[" * 100_000,
    "deep but whole": b'{"message": ' + b"[" * 800 + b"]" * 800 + b', "type": "E"}',
    "no texts": b'{"type": 7, "message": {"a": 1}, "traceback": {"b": [2]}}',
    "odd lines": b'{"type": "E", "traceback": [1, null, "a line", ["b"]]}',
    "half a character": b'{"type": "\\ud800", "message": "\\udfff\\u0000", "traceback": "\\ud800"}',
    "no numbers": b'{"type": NaN, "message": Infinity}',
    "not UTF-8": b"\xff\xfe{",
    "long": json.dumps({"type": "E" * 10_000, "message": "m" * 500_000, "traceback": ["t" * 100] * 4000}).encode(),
    "digits": b'{"type": 1' + b"0" * 5000 + b"}",
    "a list": b"[]",
}


@pytest.mark.parametrize("what", ODD_ERRORS)
async def test_an_odd_report_of_an_exception_is_shown_as_far_as_it_can_be_read(tmp_path: Path, what: str) -> None:
    backend = MemoryBackend([NodeStatus("n1", "", tuple(range(10)), virtual=True)])
    async with running(tmp_path / "state", backend=backend) as run:
        job = await run.submit("ana", "train")
        await run.job(job.id, "running")
        backend.finish(job.id, 1, message="it failed", error=ODD_ERRORS[what])
        await run.job(job.id, "failed")
        http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=run.app),
            base_url="http://makeway.test/services/makeway/",
            headers={"Authorization": "token ana"},
        )
        async with http:
            answer = await http.get(f"api/v1/jobs/{job.id}/error")
            page = await http.get(f"jobs/{job.id}")
        assert answer.status_code == 200, answer.text
        assert page.status_code in (200, 302, 303), page.text[:300]
        result = answer.json()
        assert isinstance(result["message"], str)
        assert len(answer.content) < 1_000_000


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_whatever_can_be_read_can_be_sent(value: Any) -> None:
    JSONResponse(read_value(json.dumps(value), 2**20))


def test_what_is_too_deep_is_left_out() -> None:
    deep = b'{"kept": 1, "deep": ' + b"[" * 500 + b"]" * 500 + b"}"
    result = read_value(deep, 2**20)
    assert result["kept"] == 1
    JSONResponse(result)
    with pytest.raises(UnreadableJson, match="deeply"):
        read_value(b"[" * 100_000, 2**20)
    with pytest.raises(UnreadableJson, match="larger than 1 KiB"):
        read_value(b" " * 1025, 1024)


async def test_options_that_one_user_gave_a_server_hide_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"user-{number}" for number in range(MAX_SINGLE_REQUESTS + 5)]

    def user(name: str) -> bytes:
        options = b"[" * 5000 if name == "user-3" else b"{}"  # more than any reader of JSON takes
        return b'{"name": "%s", "servers": {"": {"user_options": %s}}}' % (name.encode(), options)

    def answer(request: httpx2.Request) -> httpx2.Response:
        name = request.url.path.rpartition("/")[2]
        body = user(name) if name != "users" else b'{"items": [' + b",".join(map(user, names)) + b"]}"
        return httpx2.Response(200, content=body)

    hub = HubApi("http://hub.test/hub/api", "token")
    monkeypatch.setattr(hub, "_http", httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://h"))
    servers = HubServers(hub)
    result = await servers._states_of([(name, "") for name in names])
    assert result.pop(("user-3", "")) == "unreachable", "the lease of a server that nothing is known of is kept"
    assert set(result.values()) == {"active"}
    await servers.close()
