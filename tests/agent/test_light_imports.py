"""What the agent has in the place of `email` and of `typing`: enough for `http.client`, and the same as these do."""

from __future__ import annotations

import email.parser
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from agent.machine_service import answering
from makeway.agent.light_imports import HeaderParser
from makeway.launcher.record import Record

SOURCES = Path(__file__).parents[2] / "widgets"


@pytest.mark.parametrize(
    "text",
    [
        "Content-Length: 5\r\nRetry-After:7\r\n\r\n",
        "content-type: text/html;\r\n charset=utf-8\r\nX: 1\r\n\r\n",
        "Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nset-cookie: c\r\n\r\n",
        "X-Empty:\r\nTransfer-Encoding: chunked\r\n\r\n",
        "X-Odd: a\x0bb\x85c\r\nConnection: close\r\n\r\n",
        "\r\n",
    ],
)
def test_headers_are_read_as_by_the_package_email(text: str) -> None:
    ours, theirs = HeaderParser().parsestr(text), email.parser.Parser().parsestr(text)
    names = ["content-length", "CONTENT-TYPE", "Retry-After", "set-cookie", "x-empty", "x-odd", "connection", "none"]
    for name in [*names, "transfer-encoding"]:
        assert ours.get(name, "-").split() == str(theirs.get(name, "-")).split()
        assert len(ours.get_all(name, [])) == len(theirs.get_all(name, []))
    assert ours.keys() == theirs.keys()


@pytest.mark.parametrize("line", ["no colon", ": no name", " goes on with nothing"])
def test_a_line_that_is_no_header_is_none(line: str) -> None:
    headers = HeaderParser().parsestr(f"{line}\r\nA: 1\r\n\r\n")
    assert headers.items() == [("A", "1")]


def test_an_agent_speaks_to_the_service_with_these_headers() -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from makeway.agent.light_imports import Headers, import_http_client
import_http_client(tls=False)
import http.client
assert issubclass(http.client.HTTPMessage, Headers)
from makeway.agent.client import AgentClient
client = AgentClient(sys.argv[2], "m-1", "token-0")
for _ in range(3):
    print(client.report({"attempts": []})["report_seconds"])
"""
    with answering() as service:
        command = [sys.executable, "-I", "-c", code, str(SOURCES), service.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["0.2"] * 3, "")


def test_a_record_is_a_named_tuple() -> None:
    class Plain(NamedTuple):
        """Two fields."""

        name: str
        size: int

        @property
        def doubled(self) -> int:
            return 2 * self.size

    class Ours(Record):
        """Two fields."""

        name: str
        size: int

        @property
        def doubled(self) -> int:
            return 2 * self.size

    for kind in (Plain, Ours):
        record = kind("a", size=2)
        assert record == ("a", 2)
        assert (record.doubled, record._asdict(), record._replace(size=3)) == (4, {"name": "a", "size": 2}, ("a", 3))
        assert (kind.__name__, kind.__doc__, kind.__module__) == (kind.__name__, "Two fields.", __name__)
        with pytest.raises(TypeError):
            kind("a")
