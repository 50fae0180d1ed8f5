"""What one read returns is of one moment, whatever is committed between its statements."""

from __future__ import annotations

import threading

import pytest
from makeway_quota.store import Store, reads
from makeway_quota.store.records import Attempt, Change
from sqlalchemy import Connection

from .conftest import NewJob


def test_a_job_and_its_attempts_are_of_one_moment(store: Store, job: NewJob, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add_workload(job("j1"), now=1.0)
    store.commit([Change("j1", {"state": "running", "attempt": 1}, open_attempt=Attempt("j1", 1, 1.0))], now=1.0)
    read_attempts = reads.attempts_of
    ended = Change("j1", {"state": "succeeded"}, close_attempt={"ended_at": 2.0})

    def after_a_commit(connection: Connection, id: str) -> list[Attempt]:
        """Return the attempts after another thread has committed the end of the job."""
        writer = threading.Thread(target=store.commit, args=([ended],), kwargs={"now": 2.0})
        writer.start()
        writer.join()
        return read_attempts(connection, id)

    monkeypatch.setattr(reads, "attempts_of", after_a_commit)
    seen = store.with_attempts("j1")
    monkeypatch.undo()
    assert seen is not None
    assert (seen[0].state, [attempt.ended_at for attempt in seen[1]]) == ("running", [None])
    seen = store.with_attempts("j1")
    assert seen is not None
    assert (seen[0].state, [attempt.ended_at for attempt in seen[1]]) == ("succeeded", [2.0])
    assert store.with_attempts("j2") is None
