"""What the agent has in the place of `email` and of `typing`: enough for `http.client`, and the same as these do."""

from __future__ import annotations

import email.parser
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from agent.machine_service import answering
from makeway.agent import light_imports
from makeway.agent.light_imports import HeaderParser, import_lazily
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


def test_two_threads_may_use_a_module_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has just seen that no thread has imported the module yet, while the other begins to import it."""
    name, started = "imported_by_two", tmp_path / "started"
    code = f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(1.0)\nvalue = 5\n"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    looking = threading.Event()

    class Modules:
        """The modules of Python; the first one who looks up the module goes on once another imports it, if one can."""

        def get(self, key: str) -> object:
            found, ends, first = sys.modules.get(key), time.monotonic() + 2.0, not looking.is_set()
            looking.set()
            while first and not started.exists() and time.monotonic() < ends:
                time.sleep(0.01)
            return found

        def __delitem__(self, key: str) -> None:
            del sys.modules[key]

    import_lazily(name)
    lazy = sys.modules[name]
    values: list[int] = []
    errors: list[Exception] = []

    def use() -> None:
        try:
            values.append(lazy.value)
        except (AttributeError, ImportError, KeyError) as error:
            errors.append(error)

    monkeypatch.setattr(light_imports, "sys", SimpleNamespace(modules=Modules()))
    threads = [threading.Thread(target=use) for _ in range(2)]
    threads[0].start()
    assert looking.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert (values, errors) == ([5, 5], [])
    assert vars(sys.modules.pop(name))["value"] == 5


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
