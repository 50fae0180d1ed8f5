"""What a person is told survives a power cut: such commits are flushed to the disk, where jobs are elsewhere all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from makeway_quota.application import open_service_store
from makeway_quota.settings import load
from makeway_quota.store.records import Change, NewWorkload
from makeway_quota.store.store import Store
from quick_databases import flushes
from sqlalchemy import event

FULL, NORMAL = 2, 1


@pytest.fixture(autouse=True)
def flushed() -> Iterator[None]:
    with flushes():
        yield


def job(id: str) -> NewWorkload:
    return NewWorkload(id, "job", "rnd", "gpu1", "ana")


def level(store: Store, write: Callable[[], object]) -> int:
    """Return the level of `synchronous` at which a write was committed."""
    levels: list[int] = []
    engine = store._database.engine

    def committed(connection: object) -> None:
        levels.append(connection.exec_driver_sql("PRAGMA synchronous").scalar_one())  # type: ignore[attr-defined]

    event.listen(engine, "commit", committed)
    try:
        write()
    finally:
        event.remove(engine, "commit", committed)
    return levels[-1]


@pytest.mark.parametrize(("backend", "loop"), [("local", NORMAL), ("kubernetes", FULL)])
def test_an_answer_survives_a_power_cut(tmp_path: Path, backend: str, loop: int) -> None:
    environ = {"MAKEWAY_STATE_DIR": str(tmp_path), "MAKEWAY_BACKEND": backend}
    store = open_service_store(load(environ=environ))
    term = store.take_term("a", 1.0)
    assert level(store, lambda: store.add_workload(job("j1"), now=1.0)) == FULL
    assert level(store, lambda: store.policies.add("version: 1", "root", "", None, 1.0)) == FULL
    assert level(store, lambda: store.commit([Change("j1", {"state": "cancelled"})], now=2.0)) == FULL
    assert level(store, lambda: store.commit([Change("j1", {"reason_code": "x"})], now=2.0, term=term)) == loop
    assert level(store, lambda: store.keep_histories({"rnd": 1.0}, now=3.0)) == loop
    assert level(store, lambda: store.add_workload(job("j2"), now=1.0)) == FULL, "the level is not that of the last one"
    store.close()
