"""Logs are shown whole or with what is left out, below the limits of a notebook server; changes once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import samples
from makeway import follow, pacing
from makeway.follow import Reporter
from makeway.pacing import BURST, MESSAGE, RATE, Budget, Output
from makeway_api.models import Job, LogChunk, Reason, State

SERVER_RATE, SERVER_MESSAGES, WINDOW = 1_000_000, 1_000, 3.0
"""Limits of a notebook server, in bytes and messages a second, and the seconds over which it looks at them"""


class Service:
    """The service's side of one log."""

    def __init__(self, log: bytes, monkeypatch: pytest.MonkeyPatch, gap: int = 0) -> None:
        self.log, self.gap = log, gap
        self.reads = 0
        self.data = samples.job(state=State.SUCCEEDED, attempt=1)
        monkeypatch.setattr(follow, "client", lambda: self)

    def job(self, id: str, **_: Any) -> Job:
        return self.data

    def logs(self, id: str, attempt: int | None, offset: int, limit: int, wait: float | None) -> LogChunk:
        self.reads += 1
        skipped = offset == self.gap and self.gap > 0
        start = max(0, len(self.log) + offset) if offset < 0 else offset
        while start and start < len(self.log) and self.log[start] & 0xC0 == 0x80:
            start += 1
        end = min(len(self.log), start + limit)
        while end < len(self.log) and self.log[end] & 0xC0 == 0x80:
            end -= 1
        return LogChunk(
            attempt=1,
            offset=start,
            next_offset=end,
            text=self.log[start:end].decode(),
            eof=end >= len(self.log),
            truncated=skipped,
        )


Log = Callable[..., Service]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return lambda data, gap=0: Service(data, monkeypatch, gap)


LONG = "".join(f"step {n} ü\n" for n in range(250_000)).encode()
"""3.6 MB"""


def test_the_newest_part_of_a_long_log_is_printed_with_what_is_left_out(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    log(LONG)
    follow.print_newest("j-1")
    out = capsys.readouterr().out
    first, _, rest = out.partition("\n")
    assert first.startswith("── 3.")
    assert "MB before this are left out: `%logs j-1 --all` prints everything" in first
    assert LONG.decode().endswith(rest)
    assert rest.startswith("step ")
    assert rest.endswith("step 249999 ü\n")
    assert 250_000 < len(rest.encode()) <= follow.CHUNK


def test_all_of_a_long_log_is_there_for_those_who_want_it(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log(LONG)
    follow.print_newest("j-1", all=True)
    assert capsys.readouterr().out == LONG.decode()
    assert follow.read_log("j-1") == LONG.decode()
    follow.print_log("j-1", all=True)
    assert capsys.readouterr().out.startswith(LONG.decode())


def test_following_a_long_log_shows_its_end_and_the_outcome(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log(LONG)
    follow.print_log("j-1")
    lines = capsys.readouterr().out.splitlines()
    assert "left out" in lines[0]
    assert lines[-2] == "step 249999 ü"
    assert lines[-1].startswith("── job j-1 succeeded")


@pytest.mark.parametrize(
    ("text", "lines", "shown"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("50 %\r100 %\rdone\nend\n", 2, "50 %\r100 %\rdone\nend\n"),
        ("one\u2028two\u0085three\x0bfour\x1cfive\nend\n", 1, "end\n"),
        ("one\u2028two\n", 1, "one\u2028two\n"),
        ("a\n\n\n", 2, "\n\n"),
        ("a\n", 5, "a\n"),
        ("", 3, "The log is empty so far.\n"),
    ],
)
def test_only_a_newline_ends_a_line(
    log: Log, capsys: pytest.CaptureFixture[str], text: str, lines: int, shown: str
) -> None:
    log(text.encode())
    follow.print_newest("j-1", tail=lines)
    assert capsys.readouterr().out == (shown if shown.endswith("\n") else f"{shown}\n")
    assert follow.read_log("j-1", tail=lines) == ("" if not text else shown)


def test_a_line_longer_than_one_read_is_shown_whole(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    line = "ü" * 700_000
    service = log(f"first\n{line}\nlast\n".encode())
    follow.print_newest("j-1", tail=2)
    assert capsys.readouterr().out == f"{line}\nlast\n"
    assert follow.read_log("j-1", tail=2) == f"{line}\nlast\n"
    assert service.reads < 20


def test_a_mark_stands_on_a_line_of_its_own(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log(b"no newline")
    follow.print_log("j-1")
    assert "no newline\n── job j-1 succeeded" in capsys.readouterr().out


def test_a_part_that_was_not_kept_is_marked(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log(b"a\n" * 200_000, gap=follow.CHUNK)
    follow.print_newest("j-1", all=True)
    out = capsys.readouterr().out
    assert out.count("── a part of the log was not kept\n") == 1


# -- pace ------------------------------------------------------------------------------------------------------------


class Wire:
    """A clock that only sleeping and the sender move, and what was sent when."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[tuple[float, int]] = []

    def budget(self) -> Budget:
        def sleep(seconds: float) -> None:
            self.now += seconds

        return Budget(lambda: self.now, sleep)

    def worst(self) -> tuple[float, float]:
        """Return the most bytes and messages in a second, averaged over any window."""
        windows = [[size for at, size in self.sent if start <= at < start + WINDOW] for start, _ in self.sent]
        return max(sum(w) for w in windows) / WINDOW, max(len(w) for w in windows) / WINDOW


@pytest.mark.parametrize("piece", ["x" * 300_000, "\x1b" * 100_000, "漢" * 200_000, "short\n", "x" * 3000])
def test_the_limits_of_a_notebook_server_are_never_reached(monkeypatch: pytest.MonkeyPatch, piece: str) -> None:
    wire = Wire()
    monkeypatch.setattr(
        "builtins.print",
        lambda text, **_: wire.sent.append((wire.now, len(json.dumps(text, ensure_ascii=False).encode()))),
    )
    outputs = [Output(budget := wire.budget()), Output(budget)]  # two cells, one after the other
    for n in range(4000 if len(piece) < 10 else 300 if len(piece) < 10_000 else 30):
        outputs[n % 2].write(piece)
    size, messages = wire.worst()
    assert size < SERVER_RATE * 0.7
    assert messages < SERVER_MESSAGES * 0.7
    assert BURST + WINDOW * RATE < WINDOW * SERVER_RATE
    assert (BURST + WINDOW * RATE) / MESSAGE < WINDOW * SERVER_MESSAGES


def test_only_a_notebook_is_paced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pacing.KERNEL, "spend", lambda _: pytest.fail("a terminal takes all"))
    Output().write("x" * 10_000_000)
    assert len(capsys.readouterr().out) == 10_000_000


# -- changes ---------------------------------------------------------------------------------------------------------


def waiting(number: int, code: str = "busy") -> Job:
    reason = Reason(code=code, message=f"Waiting for 2 GPUs: {number} of 10 are free.")
    return samples.job(state=State.PENDING, reason=reason)


def test_numbers_that_change_are_reported_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    reporter = Reporter(clock=lambda: now[0])
    for n in range(120):
        reporter.report(waiting(n))
        now[0] += 1
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2
    assert "0 of 10" in out[0]
    assert "60 of 10" in out[1]


def test_every_state_is_reported_at_once_and_a_reason_that_returns_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    reporter = Reporter(clock=lambda: now[0])
    for n in range(20):
        reporter.report(waiting(n, "busy" if n % 2 else "held"))
    assert len(capsys.readouterr().out.splitlines()) == 2
    for state, attempt in ((State.RUNNING, 1), (State.PENDING, 1), (State.RUNNING, 2), (State.SUCCEEDED, 2)):
        reporter.report(samples.job(state=state, attempt=attempt))
    assert len(capsys.readouterr().out.splitlines()) == 4
