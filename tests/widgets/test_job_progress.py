"""How far a job is: a bar, a rate, what remains, and a curve; and nothing where a service does not know."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makeway import blocks, job_progress, view
from makeway_api.models import Job, JobProgress, State
from samples import NOW, ago, job

REPORT: dict[str, Any] = {
    "step": 420, "total": 1000, "rate": 12.3, "remaining_seconds": 47.2, "updated_at": NOW,
    "metrics": {"loss": 0.01234, "accuracy": 0.9},
    "curve": {"name": "loss", "points": [[n, 64 - n] for n in range(64)]},
}  # fmt: skip


def reporting(state: State = State.RUNNING, **changes: Any) -> Job:
    """Return a job that reported its progress."""
    return job(state, progress=JobProgress(**{**REPORT, **changes}))


def text(shown: Job) -> str:
    return blocks.text_of(job_progress.progress_blocks(shown, NOW))


def test_a_report_becomes_a_bar_numbers_and_a_curve() -> None:
    lines = text(reporting()).splitlines()
    assert lines[0] == "█" * 8 + "░" * 12
    assert lines[1] == "Step 420 of 1,000, 42 %, 12.3 steps/s, 47 s remaining"
    assert lines[2].startswith("loss 0.01234, accuracy 0.9 █")
    assert lines[2].endswith("▁")
    html = str(blocks.html(job_progress.progress_blocks(reporting(), NOW)))
    assert 'aria-valuenow="42"' in html
    assert "width:42%" in html


def test_without_a_report_there_is_nothing() -> None:
    assert job_progress.progress_blocks(job(), NOW) == []
    assert "Progress" not in view.jobs_text([job()], NOW)
    assert "PROGRESS" in view.jobs_text([job(), reporting()], NOW)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"total": None, "remaining_seconds": None}, "Step 420, 12.3 steps/s"),
        ({"rate": 0.02}, "Step 420 of 1,000, 42 %, a step in 50 s, 47 s remaining"),
        ({"rate": 0, "remaining_seconds": None}, "Step 420 of 1,000, 42 %"),
        ({"step": 999, "total": 1000}, "Step 999 of 1,000, 99 %, 12.3 steps/s, 47 s remaining"),
        ({"step": 1200, "total": 1000, "rate": None}, "Step 1,200 of 1,000, 100 %, 47 s remaining"),
        ({"total": 0, "rate": None, "remaining_seconds": None}, "Step 420"),
    ],
)
def test_what_is_not_known_is_not_said(changes: dict[str, Any], line: str) -> None:
    assert line in text(reporting(**changes)).splitlines()


def test_a_rate_of_the_past_is_not_that_of_the_present() -> None:
    silent = text(reporting(updated_at=ago(600)))
    assert "remaining" not in silent
    assert "steps/s" not in silent
    assert "reported last at 11:50:00" in silent
    assert "remaining" not in text(reporting(State.PENDING))
    assert "remaining" not in text(reporting(State.SUCCEEDED))


def test_metrics_without_a_step_and_a_stage_are_shown() -> None:
    assert text(reporting(step=None, curve=None)) == "loss 0.01234, accuracy 0.9"
    assert "Epoch 3: step 420 of 1,000" in text(reporting(stage="epoch 3"))


def test_a_metric_that_is_no_number_is_named() -> None:
    shown = reporting(metrics={"loss": 0.5, "broken": None})
    assert "Step 420 of 1,000, 42 %, 12.3 steps/s, 47 s remaining" in text(shown)
    assert "loss 0.5, broken not finite █" in text(shown)


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1e9, 1e9)), max_size=64))
def test_a_curve_is_short_and_complete(points: list[tuple[float, float]]) -> None:
    drawn = job_progress.sparkline(points)
    assert len(drawn) <= job_progress.CURVE_WIDTH
    assert (drawn == "") is (len(points) < 2)


WARNING = "Its last save took 50 s, more than half of the grace of 1 min: save less or faster, or use another profile."


def test_a_warning_of_the_service_is_shown_wherever_the_job_is() -> None:
    shown = job(State.RUNNING, warnings=[WARNING])
    assert f"  Warning  {WARNING}" in view.job_text(shown, NOW)
    assert f"in quota. {WARNING}" in view.jobs_text([shown], NOW)
    assert WARNING in str(view.job_card(shown, NOW))
    assert sum(WARNING in part["text/plain"] for part in view.job_bundles(shown, NOW)) == 1
    assert "Warning" not in view.job_text(job(State.RUNNING), NOW)
