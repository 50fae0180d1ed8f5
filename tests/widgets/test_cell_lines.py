"""The line of a magic, the number of a cell's first line, and the name of its notebook."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from makeway import notebook_name, options, snapshot
from makeway.notebook_name import check_name, name_of_cell
from makeway.problems import Refused
from makeway.submission import Submission


@pytest.mark.parametrize(
    ("line", "cell", "words", "below", "taken"),
    [
        ("--name a", "x = 1", "--name a", "x = 1", 0),
        ("--name a \\", "--wait\nx = 1", "--name a  --wait", "x = 1", 1),
        ("--name a \\  ", "  --env A=1 \\\n--wait\nx", "--name a    --env A=1  --wait", "x", 2),
        ("--name a # the first \\", "x", "--name a", "x", 0),
        ("--name a \\", "--wait # both\nx", "--name a  --wait", "x", 1),
    ],
)
def test_a_line_continues_below(line: str, cell: str, words: str, below: str, taken: int) -> None:
    assert options.continued(line, cell) == (words, below, taken)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("--name a # comment", "a"),
        ("--name a#1", "a#1"),
        ("--name 'a # b'", "a # b"),
        ('--name "it\'s # b" # c', "it's # b"),
        ("--name a\\ #b", "a #b"),
        ("# only a comment", ""),
        ("#comment", ""),
    ],
)
def test_a_comment_begins_with_a_word_outside_of_quotes(line: str, name: str) -> None:
    assert options.train().read(line).name == name


def test_a_line_that_continues_on_nothing_is_named() -> None:
    with pytest.raises(Refused, match="but no line follows that continues it"):
        options.train().read("--name a \\")


@pytest.mark.parametrize("name", ["a\u202eb", "a\u2066b", "a\x1b[1m", "a\nb", "\u202a"])
def test_a_name_that_would_be_shown_otherwise_is_refused(name: str) -> None:
    with pytest.raises(Refused, match=r"the name contains U\+"):
        Submission(source="1", name=name).request()


@pytest.mark.parametrize("name", ["عربي", "עברית", "👩‍🔬 run", "می‌خواهم", "ü"])
def test_names_of_all_languages_are_fine(name: str) -> None:
    check_name(name)
    assert Submission(source="1", name=name).request().name == name


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ("# Learning rate 0.1\ntrain()", "Learning rate 0.1"),
        ("# %% sweep\nx", "sweep"),
        ("import os\ntrain(model, 3)", "train(model, 3)"),
        ("def f():\n    pass", "def f():"),
        ("x" * 300, "x" * 60),
    ],
)
def test_a_cell_without_a_notebook_names_its_job(monkeypatch: pytest.MonkeyPatch, cell: str, name: str) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert name_of_cell(cell) == name
    assert Submission(source=cell).request().name == name


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, object]]]:
    """A notebook server that this kernel belongs to; its sessions can be changed."""
    sessions: list[dict[str, object]] = []

    class Sessions(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = self.headers["Authorization"] == "token secret" and self.path == "/user/ana/api/sessions"
            self.send_response(200 if good else 403)
            self.end_headers()
            self.wfile.write(json.dumps(sessions).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sessions) as running:
        threading.Thread(target=running.serve_forever).start()
        address = {"url": f"http://127.0.0.1:{running.server_address[1]}/user/ana/", "token": "secret"}
        (tmp_path / f"jpserver-{os.getppid()}.json").write_text(json.dumps(address))
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
        monkeypatch.setenv("JPY_PARENT_PID", str(os.getppid()))
        monkeypatch.setattr(notebook_name, "_kernel_id", lambda: "k-1")
        yield sessions
        running.shutdown()


def test_jobs_have_the_present_name_of_a_renamed_notebook(
    server: list[dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "Untitled.ipynb"))
    server += [
        {"type": "notebook", "path": "other.ipynb", "kernel": {"id": "k-2"}},
        {"type": "notebook", "path": "vision/mnist.ipynb", "kernel": {"id": "k-1"}},
    ]
    assert Submission(source="1").request().name == "mnist"
    server[1]["path"] = "vision/cifar \u202e.ipynb"
    assert Submission(source="1").request().name == "cifar "


def test_without_its_server_a_notebook_that_is_gone_gives_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPY_PARENT_PID", "0")
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "Untitled.ipynb"))
    assert Submission(source="train()").request().name == "train()"
    (tmp_path / "Untitled.ipynb").write_text("{}")
    assert Submission(source="train()").request().name == "Untitled"


def test_a_deleted_folder_is_said_where_files_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "gone").mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(Refused, match="the folder of this notebook was deleted"):
        snapshot.take(["*.py"])
    assert snapshot.take([]) == []
    module = types.ModuleType("main")
    assert Submission(source="import json\n1", name="x").request().name == "x"
    assert sys.modules.get("main") is not module


def test_reloading_the_extension_keeps_the_last_job() -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from makeway import magics

    shell = InteractiveShell.instance()
    try:
        magics.load_ipython_extension(shell)
        shell.magics_manager.registry["MakewayMagics"].last = "j-1"
        magics.load_ipython_extension(shell)
        assert shell.magics_manager.registry["MakewayMagics"].last == "j-1"
    finally:
        InteractiveShell.clear_instance()
