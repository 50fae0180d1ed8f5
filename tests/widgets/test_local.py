"""`%%train --local` prints everything that a cell writes, as it is, and leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from makeway import local
from makeway.pacing import Output
from makeway.problems import CellStopped, JobError
from makeway.submission import Submission


def run(source: str, capsys: pytest.CaptureFixture[str], **details: Any) -> tuple[Any, str]:
    result = local.run(Submission(source=source, **details))
    return result, capsys.readouterr().out


def test_every_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    result, out = run("for n in range(20_000):\n    print('line', n)\nn", capsys)
    assert result == 19_999
    assert out == "".join(f"line {n}\n" for n in range(20_000))


def test_carriage_returns_and_other_line_ends_are_left_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\r 1 %\r 2 %\r\n\x85\u2028end without newline"
    _, out = run(f"print({text!r}, end='')", capsys)
    assert out == text


def test_characters_that_arrive_byte_by_byte_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    cell = "import os, time\nfor b in '漢🎉'.encode() + b'\\xff':\n    os.write(1, bytes([b]))\n    time.sleep(0.12)"
    assert run(cell, capsys)[1] == "漢🎉\ufffd"


def test_a_bar_that_is_redrawn_quickly_takes_few_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(Output, "write", lambda self, text: written.append(text))
    run("for n in range(3000):\n    print(f'\\r{n}', end='', flush=True)", capsys)
    assert "".join(written) == "".join(f"\r{n}" for n in range(3000))
    assert len(written) < 300


def test_what_a_cell_leaves_running_neither_holds_it_nor_lives_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = "import subprocess\nsubprocess.Popen(['sleep', '3600']).pid"
    pid, _ = run(cell, capsys)
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 60
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "it was killed, and its parent may not have reaped it yet"


def test_the_stop_button_ends_the_cell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(self: Output, text: str) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Output, "write", interrupted)
    with pytest.raises(CellStopped, match="so it has ended"):
        run("import time\nprint('started')\ntime.sleep(3600)", capsys)


def test_a_cell_has_no_keyboard_and_no_backend_of_the_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    assert run("import os, sys\nsys.stdin.read(), os.environ.get('MPLBACKEND')", capsys)[0] == ("", None)
    with pytest.raises(JobError, match="ended with exit code 3"):
        run("import sys\nsys.exit(3)", capsys)


def test_programs_that_are_sent_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run.sh").chmod(0o755)
    cell = "import subprocess\nsubprocess.run(['./run.sh'], capture_output=True, text=True).stdout"
    assert run(cell, capsys, files=["run.sh"])[0] == "ran\n"
