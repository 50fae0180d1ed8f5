"""A cell runs in a Python without Makeway, and leaves its result or its exception."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from makeway import payload

BARE = [sys.executable, "-I", "-S", "-u"]
"""A Python without site-packages, as an image may have."""


class Ran:
    """One run of a cell in a folder of its own."""

    def __init__(self, folder: Path, cell: str, variables: dict[str, Any] | None = None, **env: str) -> None:
        for file in payload.cell_files(cell, variables or {}):
            path = folder / file.path
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(base64.b64decode(file.data))
        self.result_file, self.error_file = folder / "result", folder / "error"
        env = {"MAKEWAY_RESULT_FILE": str(self.result_file), "MAKEWAY_ERROR_FILE": str(self.error_file), **env}
        env["PATH"] = os.environ["PATH"]
        done = subprocess.run([*BARE, ".makeway/run.py"], cwd=folder, env=env, capture_output=True, text=True)
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def result(self) -> Any:
        return pickle.loads(self.result_file.read_bytes())

    @property
    def error(self) -> dict[str, str]:
        result: dict[str, str] = json.loads(self.error_file.read_text())
        return result


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1 + 1", 2),
        ("x = 3\nx * 2  # last expression", 6),
        ("result = {'loss': 0.1}", {"loss": 0.1}),
        ("result = 1\nprint('no value')", 1),
        ("result = 1\n2", 2),
        ("x = 1", None),
        ("5;", None),
        ("import asyncio\nawait asyncio.sleep(0, 'awaited')", "awaited"),
        ("def f(n):\n    return n and f(n - 1) + 1\nf(5)", 5),
        ("import sys\n__name__, sys.argv[1:]", ("__main__", [])),
    ],
)
def test_the_value_of_the_cell(tmp_path: Path, cell: str, value: object) -> None:
    ran = Ran(tmp_path, cell)
    assert (ran.code, ran.err) == (0, "")
    assert ran.result == value


def test_variables_travel_by_value(tmp_path: Path) -> None:
    factor = 7

    def times(n: int) -> int:
        return n * factor

    ran = Ran(tmp_path, "times(data[0])", {"times": times, "data": [6]})
    assert ran.err == ""
    assert ran.result == 42


def test_an_exception_is_kept_with_the_lines_of_the_cell_only(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "def boom():\n    raise ValueError('lr must be > 0')\n\nboom()\n")
    assert ran.code == 1
    assert ran.error["type"] == "ValueError"
    assert ran.error["message"] == "lr must be > 0"
    assert 'File "cell", line 2, in boom' in ran.error["traceback"]
    assert "run.py" not in ran.error["traceback"]
    assert ran.err == ran.error["traceback"]
    assert not ran.result_file.exists()


def test_chained_exceptions_are_kept(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e")
    assert "ZeroDivisionError" in ran.error["traceback"]
    assert "run.py" not in ran.error["traceback"]


def test_a_result_that_cannot_be_pickled_is_reported_not_fatal(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "(i for i in range(3))")
    assert ran.code == 0
    assert ran.error["type"] == "ResultNotKept"
    assert "generator" in ran.error["message"]
    assert "save it to a file instead" in ran.err


def test_a_result_of_a_class_of_the_cell_can_be_read_elsewhere(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "class Net:\n    depth = 3\nNet()")
    assert ran.result.depth == 3


def test_the_exit_code_of_the_cell_is_the_jobs(tmp_path: Path) -> None:
    assert Ran(tmp_path, "import sys\nsys.exit(75)").code == 75


def test_only_the_first_worker_leaves_a_result(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "1", RANK="1")
    assert ran.code == 0
    assert not ran.result_file.exists()


def test_checkpoint_is_there_without_makeway_installed(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "from makeway import checkpoint\ncheckpoint.requested()")
    assert (ran.err, ran.code) == ("", 0)
    assert ran.result is False


def test_files_beside_the_cell_can_be_imported_and_read(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("depth = 9")
    assert Ran(tmp_path, "import net\nnet.depth, open('net.py').read()").result == (9, "depth = 9")


def test_a_python_without_makeway_is_told_what_to_install(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "import makeway_api")
    assert ran.error["message"].startswith("No module named 'makeway_api': the Python of this job (")
    assert "Install the wheel makeway-*.whl there" in ran.error["message"]
    assert "Install the wheel" in ran.err
    (tmp_path / "other").mkdir()
    assert "Install" not in Ran(tmp_path / "other", "import no_such_thing").error["message"]
