"""Submissions that come together are written together, one transaction every few milliseconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from makeway_quota.services.jobs import submission_batches
from makeway_quota.services.jobs.submission_batches import MAX_INTERVAL, MIN_INTERVAL, SubmissionBatcher, batch_interval
from makeway_quota.store.records import SharedFiles


class FakeStore:
    """Answers every submission with itself, and records when each transaction began and what was in it."""

    def __init__(self) -> None:
        self.written: list[tuple[float, list[Any]]] = []

    def add_workloads(self, submissions: Sequence[Any], *, now: float) -> list[Any]:
        """Take a batch."""
        self.written.append((time.monotonic(), [item.new for item in submissions]))
        return [ValueError(item.new) if item.new == "bad" else item.new for item in submissions]


async def test_submissions_of_one_moment_share_a_transaction() -> None:
    store = FakeStore()
    batcher = SubmissionBatcher(store, time.time)  # type: ignore[arg-type]
    taken = [batcher.submit(name) for name in ("a", "bad", "b")]  # type: ignore[arg-type]
    answers = await asyncio.gather(*taken, return_exceptions=True)
    batcher.close()
    assert [names for _, names in store.written] == [["a", "bad", "b"]]
    assert [answers[0], answers[2]] == ["a", "b"]
    assert isinstance(answers[1], ValueError), "one that is refused hinders no other"


async def test_the_next_transaction_waits_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission_batches, "MIN_INTERVAL", 0.5)
    store = FakeStore()
    batcher = SubmissionBatcher(store, time.time)  # type: ignore[arg-type]
    begin = time.monotonic()
    await batcher.submit("a")  # type: ignore[arg-type]
    await asyncio.gather(batcher.submit("b"), batcher.submit("c"))  # type: ignore[arg-type]
    batcher.close()
    (_, first), (at, second) = store.written
    assert (first, second) == (["a"], ["b", "c"])
    assert at - begin > 0.4


def test_transactions_that_take_longer_start_less_often() -> None:
    assert batch_interval(0.0) == MIN_INTERVAL
    assert batch_interval(0.003) == pytest.approx(0.015)
    assert batch_interval(3.0) == MAX_INTERVAL


async def test_a_transaction_has_few_rows_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other write is possible meanwhile: copies of a job with thousands of files go one after the other."""
    monkeypatch.setattr(submission_batches, "MAX_BATCH_FILES", 10)
    store = FakeStore()
    batcher = SubmissionBatcher(store, time.time)  # type: ignore[arg-type]
    counts = (4, 6, 1, 30, 0, 0, 11)
    await asyncio.gather(*(batcher.submit(str(count), SharedFiles("j", count)) for count in counts))  # type: ignore[arg-type]
    batcher.close()
    assert [names for _, names in store.written] == [["4", "6"], ["1"], ["30"], ["0", "0"], ["11"]]
