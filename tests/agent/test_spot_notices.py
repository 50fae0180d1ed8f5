"""When a provider takes a machine back, as the agent learns it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from makeway.agent.spot import SpotNotice

DEADLINE = 1767268830.0
TIME = "2026-01-01T12:00:30Z"


class _Metadata(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Write nothing."""

    def do_PUT(self) -> None:
        valid = self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self._send(200 if valid else 400, b"session")

    def do_GET(self) -> None:
        if self.path == "/computeMetadata/v1/instance/preempted":
            flavoured = self.headers.get("Metadata-Flavor") == "Google"
            self._send(*(self.server.answer if flavoured else (403, b"")))  # type: ignore[attr-defined]
        elif self.headers.get("X-aws-ec2-metadata-token") != "session":
            self._send(401, b"")
        elif self.path != "/latest/meta-data/spot/instance-action":
            self._send(404, b"")
        else:
            self._send(*self.server.answer)  # type: ignore[attr-defined]

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def metadata() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_the_deadline_of_aws_is_that_of_its_answer(action: str) -> None:
    with metadata() as server:
        notice = SpotNotice("aws", server.server_address)
        server.answer = (404, b"")
        assert notice.deadline() is None
        server.answer = (200, json.dumps({"action": action, "time": TIME}).encode())
        assert notice.deadline() == DEADLINE


def test_google_gives_half_a_minute_from_when_its_metadata_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with metadata() as server:
        notice = SpotNotice("gcp", server.server_address)
        assert (notice.watched, notice.pause) == (True, 1.0)
        server.answer = (200, b"FALSE")
        assert notice.deadline() is None
        monkeypatch.setattr("makeway.agent.spot.time.time", lambda: DEADLINE - 30)
        server.answer = (200, b"TRUE")
        assert notice.deadline() == DEADLINE
        monkeypatch.setattr("makeway.agent.spot.time.time", lambda: DEADLINE - 20)
        for answer in ((200, b"TRUE"), (503, b""), (200, b"<html>"), (404, b"")):
            server.answer = answer
            assert notice.deadline() == DEADLINE, "the first answer counts"


def test_what_is_no_answer_changes_nothing() -> None:
    with metadata() as server:
        notice = SpotNotice("aws", server.server_address)
        server.answer = (200, json.dumps({"action": "terminate", "time": TIME}).encode())
        assert notice.deadline() == DEADLINE
        for answer in ((500, b""), (401, b""), (200, b"{}"), (200, b"<html>"), (200, b'{"time": "soon"}'), (200, b"")):
            server.answer = answer
            assert notice.deadline() == DEADLINE
    assert notice.deadline() == DEADLINE  # nothing listens any more


def test_the_deadline_of_a_file_is_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    notice = SpotNotice(f"file:{path}")
    assert notice.watched
    assert notice.deadline() is None
    path.write_text('{"deadline": 5.5}')
    assert notice.deadline() == 5.5
    for text in ("", "{", "[]", '{"deadline": "x"}', '{"deadline": NaN}', '{"deadline": true}'):
        path.write_text(text)
        assert notice.deadline() is None


def test_without_a_source_nothing_is_asked() -> None:
    assert not SpotNotice("").watched
    assert SpotNotice("").deadline() is None
