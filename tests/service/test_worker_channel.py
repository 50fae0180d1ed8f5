"""Reports of workers reach every replica; silence is counted only while a worker could be heard."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import itsdangerous
import pytest
from makeway_quota.backends.remote.backend import WorkerStatus
from makeway_quota.control.workers.channel import HEARD_EVERY, MAX_STEP, READ_ALL_EVERY, STALE_SECONDS, WorkerChannel
from makeway_quota.control.workers.tokens import RENEWAL_SECONDS, TOKEN_SECONDS, AttemptTokens
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import NewWorkload
from makeway_quota.store.reports.worker_reports import WorkerReport

KEY = ("j1", 1, 0)
SECRET = b"a secret of thirty-two bytes ..."


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}")
    opened.add_workload(NewWorkload("j1", "job", "rnd", "gpu1", "ana", gpus=1000), now=0.0)
    yield opened
    opened.close()


class Replica:
    """A channel on a clock of its own."""

    def __init__(self, store: Store) -> None:
        self.now = 0.0
        self.channel = WorkerChannel(
            store, AttemptTokens(SECRET), clock=lambda: 1e9 + self.now, monotonic=lambda: self.now
        )

    async def later(self, seconds: float) -> None:
        """Move the clock while the service observes, as it does every few seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 5.0)
            await self.channel.refresh()

    def worker(self) -> WorkerStatus | None:
        return self.channel.worker_statuses().get(KEY[:2], {}).get(0)

    @property
    def silent(self) -> float:
        """For how many whole seconds the worker was silent."""
        return max(seconds for seconds in range(1000) if self.channel.silent(seconds))


async def test_silence_is_counted_from_the_last_word(store: Store) -> None:
    here = Replica(store)
    store.worker_reports.claim(KEY, "launcher", 0.0)
    await here.channel.refresh()
    assert here.silent == 0
    await here.later(100)
    assert here.silent == 100
    here.channel.record_contact(KEY)
    assert here.silent == 0


async def test_an_absence_of_the_service_makes_no_worker_silent(store: Store) -> None:
    here = Replica(store)
    store.worker_reports.claim(KEY, "launcher", 0.0)
    await here.later(30)
    here.now += 3600  # suspended
    await here.channel.refresh()
    assert here.silent <= 30 + MAX_STEP
    after_restart = Replica(store)
    await after_restart.channel.refresh()
    assert after_restart.silent == 0


async def test_a_report_to_one_replica_reaches_the_other(store: Store) -> None:
    here, there = Replica(store), Replica(store)
    store.worker_reports.claim(KEY, "launcher", 0.0)
    assert await there.channel.refresh()
    assert not await there.channel.refresh(), "nothing is new"
    store.worker_reports.write(KEY, {"step": 7, "saved_at": 5.0}, 1.0)
    assert await there.channel.refresh()
    worker = there.worker()
    assert worker is not None
    assert worker.step == 7
    await here.later(HEARD_EVERY)
    await there.later(HEARD_EVERY)
    assert there.silent == HEARD_EVERY
    here.channel.record_contact(KEY)
    await here.channel.write_heard()
    assert not await there.channel.refresh(), "being heard of is no news"
    assert there.silent == 0


async def test_a_replica_without_its_database_knows_that_it_is_behind(store: Store) -> None:
    here = Replica(store)
    here.channel.on_change(lambda: None)
    await here.later(STALE_SECONDS + 5)
    assert not here.channel.stale
    here.now += STALE_SECONDS + 1
    assert here.channel.stale
    await here.channel.refresh()
    assert not here.channel.stale


async def test_what_another_replica_forgot_goes_here_too(store: Store) -> None:
    here, there = Replica(store), Replica(store)
    store.worker_reports.claim(KEY, "launcher", 0.0)
    await here.channel.refresh()
    await there.channel.refresh()
    await here.channel.forget(*KEY[:2])
    assert here.worker() is None
    await there.later(READ_ALL_EVERY + 5)
    assert there.worker() is None


async def test_a_read_under_way_brings_no_forgotten_attempt_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Replica(store)
    store.worker_reports.claim(KEY, "launcher", 0.0)
    await here.channel.refresh()
    store.worker_reports.write(KEY, {"step": 7}, 1.0)
    read, go, after = threading.Event(), threading.Event(), store.worker_reports.after

    def slow(serial: int) -> list[WorkerReport]:
        result = after(serial)
        read.set()
        assert go.wait(60)
        return result

    monkeypatch.setattr(store.worker_reports, "after", slow)
    refreshing = asyncio.create_task(here.channel.refresh())
    await asyncio.to_thread(read.wait, 60)
    forgetting = asyncio.create_task(here.channel.forget(*KEY[:2]))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(refreshing, forgetting)
    assert here.worker() is None


async def test_an_end_on_a_notice_in_the_gang_is_known(store: Store) -> None:
    here = Replica(store)
    for number in (0, 1):
        store.worker_reports.claim(("j1", 1, number), f"launcher-{number}", 0.0)
    for noticed, completed, code, at in ((True, True, 0, None), (False, False, 75, None), (True, False, 75, 5.0)):
        end = {"exit_code": code, "ended_at": 5.0, "completed": completed}
        store.worker_reports.write(("j1", 1, 1), {"noticed": noticed, "exit": end}, 1.0)
        await here.channel.refresh()
        assert here.channel.gang_stopped_at(KEY) == at
        assert here.channel.gang_stopped_at(("j1", 1, 1)) is None


async def test_a_failure_in_the_gang_is_known(store: Store) -> None:
    here = Replica(store)
    for number in (0, 1):
        store.worker_reports.claim(("j1", 1, number), f"launcher-{number}", 0.0)
    await here.channel.refresh()
    assert not here.channel.gang_failed(KEY)
    for code, failed in ((0, False), (75, False), (1, True), (-9, True)):
        store.worker_reports.write(("j1", 1, 1), {"exit": {"exit_code": code, "ended_at": 1.0}}, 1.0)
        await here.channel.refresh()
        assert here.channel.gang_failed(KEY) is failed
        assert not here.channel.gang_failed(("j1", 1, 1)), "its own end is no reason to stop it"


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        ({"exit_code": 1}, (1, 1)),
        ({"exit_code": -9}, (1, -9)),
        ({"exit_code": 75, "acknowledged": True}, None),
        ({"exit_code": 0}, None),
        ({"exit_code": 1, "acknowledged": True}, None),
        ({"exit_code": -10}, None),
        ({"exit_code": 138}, None),
        ({"exit_code": -15}, (1, -15)),
    ],
)
async def test_the_worker_that_failed_after_a_notice_is_known(
    store: Store, end: dict[str, Any], failed: tuple[int, int] | None
) -> None:
    here = Replica(store)
    for number in (0, 1, 2):
        store.worker_reports.claim(("j1", 1, number), f"launcher-{number}", 0.0)
    later = {"noticed": True, "exit": {"exit_code": 3, "ended_at": 9.0}}
    store.worker_reports.write(("j1", 1, 1), {"noticed": True, "exit": {"ended_at": 5.0, **end}}, 1.0)
    await here.channel.refresh()
    assert here.channel.failed_worker(KEY, "SIGUSR1") == failed
    store.worker_reports.write(("j1", 1, 2), later, 1.0)
    await here.channel.refresh()
    assert here.channel.failed_worker(KEY, "SIGUSR1") == (failed or (2, 3)), "the first one"
    assert here.channel.failed_worker(("j1", 1, 2), "SIGUSR1") == failed, "never itself"


def test_a_token_grows_old_expires_and_is_void() -> None:
    now = 0.0
    tokens = AttemptTokens(SECRET, clock=lambda: now)
    token = tokens.token(KEY)
    assert tokens.check(token, KEY) == "valid"
    now = TOKEN_SECONDS * 0.6
    assert tokens.check(token, KEY) == "old"
    now = TOKEN_SECONDS + 1
    assert tokens.check(token, KEY) == "expired"
    assert tokens.check(tokens.token(KEY), KEY) == "valid"
    now = RENEWAL_SECONDS + 1
    assert tokens.check(token, KEY) == "void"
    for forged in ("", "x", token[:-1], token + "A", token.replace(".", ""), "é", "W10.x"):
        assert tokens.check(forged, KEY) == "void"


def test_tokens_are_signed_with_a_key_of_their_own() -> None:
    signing = {"key_derivation": "hmac", "digest_method": hashlib.sha256}
    notes = itsdangerous.URLSafeSerializer(SECRET, salt="attempt", signer_kwargs=signing)
    assert AttemptTokens(SECRET, clock=lambda: 0.0).check(str(notes.dumps([*KEY, 0])), KEY) == "void"
