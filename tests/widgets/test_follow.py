"""Following a job over its attempts and through restarts of the service, without disturbing it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from makeway import connection, follow, submit, training
from makeway.problems import Refused, StillRunning, WatchStopped
from makeway_api.client import Client
from makeway_api.models import JobRequest, State
from samples import EVIL, job

from .conftest import Portal
from .wire import Wire

STEPS = """
import time
from makeway import checkpoint
for step in checkpoint.loop(400, save=lambda folder: (folder / "x").write_text("x"), load=lambda folder: print("back")):
    print("step", step, flush=True)
    time.sleep(0.01)
"""


def later(seconds: float, call: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer


def until_step(service: Client, id: str) -> None:
    while "step 3" not in service.logs(id, wait=1).text:
        assert not service.job(id).state.ended


@pytest.mark.covers("N09", "N11")
def test_a_log_is_followed_over_a_preemption(ana: Client, capsys: pytest.CaptureFixture[str]) -> None:
    made = submit(STEPS, name="steps", profile="gpu1")
    assert isinstance(made, training.Job)
    until_step(ana, made.id)
    timer = later(0.3, lambda: ana.preempt_test(made.id))
    made.logs(follow=True)
    timer.join()
    out = capsys.readouterr().out
    assert "── attempt 1 made way, saved at step " in out
    assert "; attempt 2 continues" in out
    assert "\nback\n" in out
    assert "step 399\n" in out
    assert out.rstrip().splitlines()[-1].startswith(f"── job {made.id} succeeded")
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert steps == [f"step {n}" for n in range(400)]
    assert made.progress is not None
    assert made.progress.total == 400


def test_waiting_outlasts_a_service_that_is_away(
    portal: Portal, ana: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    wire = Wire(portal.url)
    connection.connect(wire.url, "ana")
    made = training.Job(ana.submit(JobRequest(name="short", profile="gpu1", command=["sleep", "1.5"])))
    cut = later(0.4, wire.cut)
    mend = later(1.0, wire.mend)
    assert made.wait().data.state is State.SUCCEEDED
    assert made.progress is None
    cut.join()
    mend.join()
    assert "does not answer; retrying" in capsys.readouterr().err
    wire.close()


def test_showing_a_job_never_fails(portal: Portal, ana: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(portal.url)
    connection.connect(wire.url, "ana")
    made = training.Job(ana.submit(JobRequest(name="shown", profile="gpu1", command=["sleep", "60"])))
    wire.cut()
    monkeypatch.setattr(training, "FRESH", 0.0)
    assert "shown" in repr(made)
    assert "shown" in made._repr_html_()
    wire.close()


def test_waiting_has_an_end(ana: Client) -> None:
    made = training.Job(ana.submit(JobRequest(profile="gpu1", command=["sleep", "60"])))
    with pytest.raises(StillRunning, match=r"is still \w+ after 0.2 s; it continues."):
        made.wait(0.2, quiet=True)
    assert made.refresh().status in ("pending", "starting", "running")


def test_an_interrupt_says_that_the_job_continues() -> None:
    with pytest.raises(WatchStopped) as caught:
        with follow.leaving_alone("j-1", "waiting"):
            raise KeyboardInterrupt
    assert caught.value._render_traceback_() == [
        "Stopped waiting. Job j-1 continues; `%job j-1` shows it, `%logs -f j-1` follows it, `%cancel j-1` ends it."
    ]


def test_a_state_is_reported_once_and_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = follow.Reporter()
    for _ in range(3):
        reporter.report(job(name=EVIL))
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "\x1b" not in out


def test_a_colleagues_result_is_not_unpickled_unasked(portal: Portal, ana: Client) -> None:
    made = training.Job(ana.submit(JobRequest(profile="gpu1", command=["true"]))).wait(quiet=True)
    connection.connect(portal.url, "root")  # who may read it
    with pytest.raises(Refused, match=r"belongs to ana: its result is a pickle.*trust=True"):
        training.job(made.id).result()
    with pytest.raises(Refused, match="left no result"):
        training.job(made.id).result(trust=True)


def test_characters_that_arrive_in_parts_are_whole(ana: Client, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import os, time\nfor b in '漢🎉ü'.encode() + b'\\xff':\n    os.write(1, bytes([b]))\n    time.sleep(0.15)"
    made = submit(code, profile="gpu1")
    assert isinstance(made, training.Job)
    made.logs(follow=True)
    assert "漢🎉ü\ufffd\n── job" in capsys.readouterr().out
    assert ana.logs(made.id, offset=-4).text == "ü\ufffd", "a part begins with a whole character"
    assert ana.logs(made.id, limit=1).text == "漢", "and has at least one"
