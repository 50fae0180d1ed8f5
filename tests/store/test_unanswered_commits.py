"""A COMMIT without an answer is neither a failure nor written twice: its outcome is looked up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from makeway_quota.store import OutcomeUnknown, Store, StoreError, open_store
from makeway_quota.store.database import database
from makeway_quota.store.records import Change, Workload
from postgres import Network, address, empty_database, network
from sqlalchemy import Connection, create_engine, event, text


@dataclass
class Cut:
    """A store behind a network, in which something happens just before the next COMMIT is sent."""

    store: Store
    proxy: Network
    heard: list[tuple[str, int]] = field(default_factory=list)

    def before_commit(self, happens: Callable[[Connection], None]) -> None:
        """Call `happens` once, in the thread that is about to send a COMMIT."""
        event.listen(self.store._database.engine, "commit", happens, once=True)


@pytest.fixture
async def cut(postgres: str) -> AsyncIterator[Cut]:
    """Open a store through a network that can lose answers."""
    empty_database(postgres)
    async with network(postgres) as proxy:
        store = await asyncio.to_thread(open_store, proxy.url())
        made = Cut(store, proxy)

        def hear(rows: list[Workload]) -> None:
            made.heard.extend((row.id, row.version) for row in rows)

        store.on_change(hear)  # type: ignore[arg-type]
        yield made
        await asyncio.to_thread(store.close)


async def test_a_commit_whose_answer_is_lost_counts_once(cut: Cut, job) -> None:
    cut.before_commit(lambda _: cut.proxy.lose_answers())
    added = await asyncio.to_thread(cut.store.add_workload, job("j1"), now=1.0)
    assert added.id == "j1"
    assert cut.heard == [("j1", 1)], "the listeners hear of it as of any commit"
    cut.before_commit(lambda _: cut.proxy.lose_answers())
    change = Change("j1", {"state": "running"}, expect_version=1)
    assert await asyncio.to_thread(cut.store.commit, [change], now=2.0) == {"j1"}
    assert cut.heard == [("j1", 1), ("j1", 2)]
    [row] = await asyncio.to_thread(cut.store.active)
    assert (row.state, row.version) == ("running", 2)


async def test_a_commit_that_never_arrived_is_a_failure_and_leaves_nothing(cut: Cut, job, postgres: str) -> None:
    def end_connection(connection: Connection) -> None:
        number = connection.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
        admin = create_engine(address(postgres), isolation_level="AUTOCOMMIT")
        with admin.connect() as other:
            assert other.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": number}).scalar_one()
        admin.dispose()

    cut.before_commit(end_connection)
    with pytest.raises(StoreError, match="cannot do this") as failed:
        await asyncio.to_thread(cut.store.add_workload, job("j1"), now=1.0)
    assert not isinstance(failed.value, OutcomeUnknown)
    assert cut.heard == []
    assert await asyncio.to_thread(cut.store.workload, "j1") is None
    assert (await asyncio.to_thread(cut.store.add_workload, job("j1"), now=2.0)).version == 1


async def test_an_outcome_that_cannot_be_looked_up_is_unknown_and_told_later(
    cut: Cut, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "OUTCOME_SECONDS", 0.0)

    def cut_off(_: Connection) -> None:
        cut.proxy.lose_answers()
        cut.proxy.refusing = True

    cut.before_commit(cut_off)
    with pytest.raises(OutcomeUnknown, match="not known yet"):
        await asyncio.to_thread(cut.store.add_workload, job("j1"), now=1.0)
    with pytest.raises(StoreError):
        await asyncio.to_thread(cut.store.add_workload, job("j2"), now=2.0)
    assert cut.heard == []
    cut.proxy.refusing = False
    await asyncio.to_thread(cut.store.add_workload, job("j3"), now=3.0)
    assert cut.heard == [("j1", 1), ("j3", 1)], "first what was committed first, each once"
    followed = await asyncio.to_thread(cut.store.follow, 0)
    assert followed.rows == [], "nothing is left that this process does not know"


async def test_a_server_that_does_not_know_the_transaction_leaves_it_unknown_and_the_store_usable(
    cut: Cut, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restore, or after a standby that lacked the last commits took over."""
    monkeypatch.setattr(database, "STATUS", text("SELECT txid_status(:number + 1000000)"))
    cut.before_commit(lambda _: cut.proxy.lose_answers())
    with pytest.raises(OutcomeUnknown):
        await asyncio.to_thread(cut.store.add_workload, job("j1"), now=1.0)
    assert cut.heard == [("j1", 1)], "the row is there, whatever the server says of its transaction"
    await asyncio.to_thread(cut.store.add_workload, job("j2"), now=2.0)
    await asyncio.to_thread(cut.store.follow, 0)
    await asyncio.to_thread(cut.store.probe, 0.0)
    assert cut.store.failure() is None
    assert cut.heard == [("j1", 1), ("j2", 1)]


async def test_the_number_of_another_transaction_does_not_count(
    cut: Cut, job, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = create_engine(address(postgres))
    with other.begin() as connection:
        number = connection.execute(text("SELECT txid_current()")).scalar_one()
    monkeypatch.setattr(database, "STATUS", text(f"SELECT txid_status({number} + 0 * :number)"))

    def end_connection(connection: Connection) -> None:
        pid = connection.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
        with other.begin() as admin:
            assert admin.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid}).scalar_one()

    cut.before_commit(end_connection)
    with pytest.raises(OutcomeUnknown):
        await asyncio.to_thread(cut.store.add_workload, job("j1"), now=1.0)
    other.dispose()
    assert cut.heard == []
    assert await asyncio.to_thread(cut.store.workload, "j1") is None
