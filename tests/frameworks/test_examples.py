"""The examples in `examples/` make way and resume, and end with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import training_jobs as jobs

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.covers("N12")]

EXAMPLES = jobs.ROOT / "examples"
PREEMPTED = """
import json, os, runpy, signal, sys, threading, time
from pathlib import Path
from makeway import checkpoint
sys.path.insert(0, os.path.dirname(sys.argv[1]))
first = os.environ["MAKEWAY_ATTEMPT"] == "1" and os.environ.get("RANK", "0") == "0" and os.environ.get("PREEMPT")
count = 0
def report(*, step=None, total=None, real=checkpoint.report, **metrics):
    global count
    real(step=step, total=total, **metrics)
    count += step is not None
    if first and count == 3:
        stop = Path(os.environ["MAKEWAY_STOP_FILE"])
        os.kill(json.loads((stop.parent / "launcher.json").read_text())["pid"], signal.SIGTERM)
        while not stop.exists():
            time.sleep(0.01)
checkpoint.report = report
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""Runs an example, and preempts it once at its third step."""

Make = Callable[..., jobs.Job]


@pytest.mark.parametrize("name", ["vision", "language", "image_lightning"])
def test_an_example_resumes_and_ends_with_the_same_weights(name: str, job: Make, tmp_path: Path) -> None:
    weights = []
    for preempt in ("", "1"):
        made = job(EXAMPLES / f"{name}.py", "-c", PREEMPTED, env={"PREEMPT": preempt, "EPOCHS": "2"})
        outcome = made.run()
        assert [one.code for one in outcome.attempts] == ([75, 0] if preempt else [0]), outcome.attempts[-1].log[-3000:]
        (file,) = (made.folder / "job" / "work").glob("*.pt")
        weights.append(file.read_bytes())
    assert weights[0] == weights[1]


def test_the_gang_makes_way_together(job: Make, port: str) -> None:
    env = {"PREEMPT": "1", "EPOCHS": "2"}
    made = job(EXAMPLES / "gang.py", "-c", PREEMPTED, env=env, workers=jobs.gang(port))
    outcome = made.run()
    assert [one.code for one in outcome.attempts] == [75, 0], outcome.attempts[-1].log[-3000:]
    assert outcome.attempts[0].status["message"].startswith("saved at step 3")
    assert "epoch 1: loss" in outcome.attempts[1].log


def test_the_page_on_checkpoints_shows_the_examples_as_they_are() -> None:
    page = (jobs.ROOT / "docs" / "how-to" / "checkpointing.md").read_text(encoding="utf-8")
    shown = [block.split("```")[0] for block in page.split("<!-- from examples/")[1:]]
    assert len(shown) >= 4
    for block in page.split("<!-- from examples/")[1:]:
        name, _, rest = block.partition(" -->\n```python\n")
        lines = rest.partition("\n```")[0].splitlines()
        example = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
        assert all(line in example for line in lines if line.strip()), name
