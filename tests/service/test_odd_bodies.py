"""Whatever is sent to the API as JSON, it is refused with a sentence, and never ends in an error of the service."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from running import URL, running

BODIES = {
    "deep lists": b"[" * 100_000,
    "deep tables": b'{"command":' * 50_000,
    "deep but whole": b'{"command":["x"],"env":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    "5,000 digits": b'{"command":["true"],"profile":"gpu1","time_limit":1' + b"0" * 5000 + b"}",
    "2**70": b'{"command":["true"],"profile":"gpu1","time_limit":1180591620717411303424}',
    "NaN": b'{"command":["true"],"profile":"gpu1","time_limit":NaN}',
    "infinity": b'{"command":["true"],"profile":"gpu1","workers":1e999}',
    "half a character": b'{"command":["\\ud800"],"profile":"gpu1","name":"\\udfff"}',
    "half a character in a name": b'{"command":["true"],"profile":"gpu1","env":{"\\ud800":"x"}}',
    "NUL": b'{"command":["a\\u0000b"],"profile":"gpu1"}',
    "not UTF-8": b'{"command":["\xff"]}',
    "a list": b"[1]",
    "nothing": b"",
    "null": b"null",
}
ROUTES = [
    ("POST", "jobs"),
    ("POST", "sessions"),
    ("PUT", "policy"),
    ("POST", "policy/validate"),
    ("POST", "policy/preview"),
    ("POST", "jobs/j-1/preempt-test"),
]


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
async def test_no_body_is_an_error_of_the_service(tmp_path: Path, route: tuple[str, str]) -> None:
    backend = MemoryBackend([NodeStatus("n1", "gpu", tuple(range(10)))], real_time=True)
    async with running(tmp_path, backend=backend) as run:
        transport = httpx2.ASGITransport(app=run.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport) as client:
            for what, body in BODIES.items():
                for who in ("ana", "root", "spawner"):
                    headers = {"Authorization": f"token {who}", "Content-Type": "application/json"}
                    answer = await client.request(route[0], f"{URL}/api/v1/{route[1]}", content=body, headers=headers)
                    assert 400 <= answer.status_code < 500, (what, answer.text)
                    assert answer.json()["detail"]
        assert not backend.attempts
