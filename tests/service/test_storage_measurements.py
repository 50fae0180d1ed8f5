"""However many pages show what a job keeps, it is measured once, and its failures are sentences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import JobStorage
from makeway_quota.services.jobs import storage_measurements
from makeway_quota.services.jobs.storage_measurements import StorageMeasurements


def row(id: str = "j-1", state: str = "running", attempt: int = 1) -> Any:
    return SimpleNamespace(id=id, state=state, attempt=attempt, live=state == "running")


class Disk:
    """Jobs' folders, which are measured when `open` is set; `answers` come first, and then ever more bytes."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers = list(answers)
        self.open = asyncio.Event()
        self.open.set()
        self.measured: list[str] = []
        self.at_once = self.most_at_once = 0

    async def measure(self, job: Any) -> JobStorage:
        self.measured.append(job.id)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.open.wait()
        self.at_once -= 1
        answer = self.answers.pop(0) if self.answers else 1000 * len(self.measured)
        if isinstance(answer, Exception):
            raise answer
        return JobStorage(bytes=answer)


@pytest.fixture
def monotonic(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what sets the clock of the pauses forward."""
    now = [1000.0]
    monkeypatch.setattr(storage_measurements.time, "monotonic", lambda: now[0])

    def later(seconds: float) -> None:
        now[0] += seconds

    return later


def of(disk: Disk) -> StorageMeasurements:
    return StorageMeasurements(disk.measure, lambda: 1_000_000.0)


def size(measured: storage_measurements.MeasuredStorage) -> int | None:
    return measured.storage.bytes if measured.storage else None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that wait for no measurement."""
    monkeypatch.setattr(storage_measurements, "WAIT_SECONDS", 0.0)


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_a_hundred_pages_at_once_and_after_one_another_share_one_measurement(
    monotonic: Callable[[float], None],
) -> None:
    disk = Disk()
    measurements = of(disk)
    shown = await asyncio.gather(*(measurements.latest(row()) for _ in range(100)))
    for _ in range(100):
        shown.append(await measurements.latest(row()))
    assert {size(item) for item in shown} == {1000}
    assert disk.measured == ["j-1"]
    monotonic(storage_measurements.PAUSE_SECONDS)
    assert size(await measurements.latest(row())) == 2000


@pytest.mark.usefixtures("monotonic", "impatient")
async def test_a_measurement_that_hangs_holds_up_no_page_and_few_run_at_once() -> None:
    disk = Disk()
    measurements = of(disk)
    disk.open.clear()
    for number in range(10):
        assert size(await measurements.latest(row(f"j-{number}"))) is None
        assert size(await measurements.latest(row(f"j-{number}"))) is None
    await turns()
    assert disk.most_at_once == storage_measurements.AT_ONCE
    disk.open.set()
    await turns(100)
    assert all([size(await measurements.latest(row(f"j-{number}"))) for number in range(10)])
    assert len(disk.measured) == 10


async def test_a_long_measurement_is_followed_by_a_long_pause(
    monotonic: Callable[[float], None], impatient: None
) -> None:
    disk = Disk()
    measurements = of(disk)
    disk.open.clear()
    await measurements.latest(row())
    await turns()
    monotonic(60)
    disk.open.set()
    await turns()
    monotonic(60 * storage_measurements.PAUSE_FACTOR - 1)
    assert size(await measurements.latest(row())) == 1000
    await turns()
    assert disk.measured == ["j-1"]
    monotonic(1)
    await measurements.latest(row())
    await turns()
    assert disk.measured == ["j-1", "j-1"]


@pytest.mark.usefixtures("monotonic")
async def test_a_new_state_or_attempt_is_measured_at_once() -> None:
    disk = Disk()
    measurements = of(disk)
    states = [row(), row(attempt=2), row(state="succeeded", attempt=2)]
    assert [size(await measurements.latest(item)) for item in states] == [1000, 2000, 3000]


@pytest.mark.usefixtures("monotonic", "impatient")
async def test_what_was_measured_while_something_was_deleted_is_never_shown() -> None:
    disk = Disk(500_000, 7_000)
    measurements = of(disk)
    disk.open.clear()
    await measurements.latest(row(state="succeeded"))
    await turns()
    measurements.forget("j-1")
    await measurements.latest(row(state="succeeded"))
    await turns()
    disk.open.set()
    await turns()
    assert size(await measurements.latest(row(state="succeeded"))) == 7_000


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MakewayError("The database is busy.", code="busy", status=503), "The database is busy."),
        (OSError(5, "Input/output error"), "the log of the service has the reason."),
    ],
)
async def test_a_failure_is_a_sentence_beside_the_measurement_before_and_is_tried_again_soon(
    error: Exception, reason: str, monotonic: Callable[[float], None]
) -> None:
    disk = Disk(1000, error)
    measurements = of(disk)
    first = await measurements.latest(row())
    monotonic(storage_measurements.PAUSE_SECONDS)
    failed = await measurements.latest(row())
    assert (size(failed), failed.at) == (1000, first.at)
    assert failed.error == f"What this job keeps was not measured: {reason}"
    monotonic(storage_measurements.SHORT_PAUSE_SECONDS)
    again = await measurements.latest(row())
    assert (size(again), again.error) == (3000, "")


@pytest.mark.usefixtures("monotonic")
async def test_measurements_of_many_jobs_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_measurements, "MAX_JOBS", 3)
    measurements = of(Disk())
    for number in range(10):
        await measurements.latest(row(f"j-{number}"))
    assert list(measurements._kept) == ["j-7", "j-8", "j-9"]
    assert not measurements._tasks
