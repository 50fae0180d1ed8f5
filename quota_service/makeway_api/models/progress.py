"""Define how far a job is: what its process reports, and what the API shows."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from .base import Wire

LARGEST = 2**53
SLOWEST = 1e-9
"""Steps per second; what is slower stands still"""
MAX_METRICS = 32
MAX_POINTS = 64
MAX_NAME = 64

Count = Annotated[int, Field(ge=0, lt=LARGEST)]


def _number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -1e300 < value < 1e300 else None


def _name(value: Any) -> str:
    text = "".join(c if c.isprintable() else "\ufffd" for c in str(value)[: MAX_NAME * 2])
    return text[:MAX_NAME]


class ProgressCurve(Wire):
    """The history of one metric: `points` are pairs of a step and a value, in the order of the steps."""

    name: str = ""
    points: list[tuple[int, float]] = Field(default_factory=list, max_length=MAX_POINTS, description="at most 64")

    @field_validator("name", mode="before")
    @classmethod
    def _clean_name(cls, value: Any) -> str:
        return _name(value)

    @field_validator("points", mode="before")
    @classmethod
    def _clean_points(cls, value: Any) -> list[tuple[int, float]]:
        result: list[tuple[int, float]] = []
        for point in list(value)[-MAX_POINTS - 1 :] if isinstance(value, list | tuple) else ():
            if isinstance(point, list | tuple) and len(point) == 2:
                step, number = point
                ordered = isinstance(step, int) and 0 <= step < LARGEST and (not result or step > result[-1][0])
                if ordered and (finite := _number(number)) is not None:
                    result.append((step, finite))
        return result[-MAX_POINTS:]


class ReportedProgress(Wire):
    """How far a job's process says it is; what it wrote may be anything, so whatever cannot be read is left out."""

    step: Count | None = None
    total: Count | None = None
    rate: float | None = None
    stage: str = ""
    at: float = 0.0
    metrics: dict[str, float | None] = Field(default_factory=dict, max_length=MAX_METRICS)
    curve: ProgressCurve | None = None
    save_seconds: float | None = None
    save_killed: bool = False

    @field_validator("step", "total", mode="before")
    @classmethod
    def _clean_count(cls, value: Any) -> int | None:
        whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST
        return value if whole else None

    @field_validator("rate", "save_seconds", mode="before")
    @classmethod
    def _clean_positive(cls, value: Any) -> float | None:
        number = _number(value)
        return number if number is not None and SLOWEST <= number < LARGEST else None

    @field_validator("save_killed", mode="before")
    @classmethod
    def _clean_flag(cls, value: Any) -> bool:
        return value is True

    @field_validator("at", mode="before")
    @classmethod
    def _clean_time(cls, value: Any) -> float:
        return _number(value) or 0.0

    @field_validator("stage", mode="before")
    @classmethod
    def _clean_stage(cls, value: Any) -> str:
        return _name(value) if isinstance(value, str) else ""

    @field_validator("metrics", mode="before")
    @classmethod
    def _clean_metrics(cls, value: Any) -> dict[str, float | None]:
        pairs = list(value.items())[:MAX_METRICS] if isinstance(value, dict) else []
        return {_name(name): _number(number) for name, number in pairs}

    @field_validator("curve", mode="before")
    @classmethod
    def _clean_curve(cls, value: Any) -> Any:
        return value if isinstance(value, dict | ProgressCurve) else None

    @property
    def shown(self) -> bool:
        """Whether it says how far the job is."""
        return self.step is not None or bool(self.metrics)


def read_progress(value: Any) -> ReportedProgress | None:
    """Return the progress that a job's process wrote, bounded to a few kilobytes; None where it says nothing."""
    if not isinstance(value, dict):
        return None
    try:
        result = ReportedProgress.model_validate(value)
    except (ValidationError, RecursionError):
        return None
    return result if result.shown or result.save_seconds is not None else None


class JobProgress(Wire):
    """How far a job is, by its own report: `loop`, the adapters of frameworks, or `checkpoint.report`."""

    step: int | None = Field(None, description="steps done")
    total: int | None = None
    rate: float | None = Field(None, description="steps per second, while it runs and takes steps")
    remaining_seconds: float | None = Field(None, description="at this rate")
    updated_at: datetime = Field(description="when the last step, or metric, was reported")
    stage: str = Field("", description="the name of the loop that runs, such as an epoch")
    reached: int | None = Field(
        None, description="the step that an earlier attempt had reached, while this one is not as far"
    )
    metrics: dict[str, float | None] = Field(
        default_factory=dict, description="the newest values; null: not a finite number"
    )
    curve: ProgressCurve | None = Field(None, description="of the loss, else of the first metric; null in lists")

    @property
    def percent(self) -> int | None:
        """Return how much is done, from 0 to 100 and 100 only at the end; None where the total is not known."""
        if self.step is None or not self.total or self.total < 0:
            return None
        return min(max(self.step * 100 // self.total, 0), 100)

    @property
    def steps(self) -> str:
        """Return the steps in words, such as `epoch-2: step 500 of 1,000`; "" where there are none."""
        if self.step is None:
            return ""
        of = f" of {self.total:,}" if self.total else ""
        again = f" (it had reached {self.reached:,} before)" if self.reached else ""
        return (f"{self.stage}: " if self.stage else "") + f"step {self.step:,}{of}{again}"
