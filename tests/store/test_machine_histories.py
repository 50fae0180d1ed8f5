"""Random histories of machines on a database: what a step commits is what the next one reads."""

from __future__ import annotations

from operator import attrgetter

import pytest
from autoscale.histories import CheckedStore, History
from makeway_quota.autoscale.step import MachineChanges, MachineRows
from makeway_quota.store import Store, open_store


class MirroredStore(CheckedStore):
    """A store in memory and one in a database: each read and commit is made of both, and compared."""

    def __init__(self, history: History, database: Store) -> None:
        super().__init__(history)
        self.database = database
        self.led = 0
        self.lead()

    def lead(self) -> None:
        while self.led < self.term:
            self.led = self.database.take_term("test", 0.0)

    def read(self, deployment: str) -> MachineRows:
        expected, result = super().read(deployment), self.database.machines.read(deployment)
        assert result.machines == tuple(sorted(expected.machines, key=attrgetter("id")))
        assert sorted(result.backoffs, key=attrgetter("key")) == sorted(expected.backoffs, key=attrgetter("key"))
        assert (result.closed_spend, result.first_seen) == (expected.closed_spend, expected.first_seen)
        return result

    def commit(self, deployment: str, term: int, changes: MachineChanges) -> bool:
        self.lead()
        done = super().commit(deployment, term, changes)
        assert self.database.machines.commit(deployment, term, changes) is done
        return done


class StoredHistory(History):
    """A history whose machines are in a database, too."""

    def __init__(self, seed: int, database: Store) -> None:
        super().__init__(seed)
        self.store = MirroredStore(self, database)


def play(seed: int, database: Store) -> None:
    """Play a history, then compare every machine that is over, and what was told of it."""
    history = StoredHistory(seed, database)
    history.play()
    kept = {row.id: row for row in database.machines.machines("cloud", limit=10_000)}
    assert kept == history.store.all_machines()
    assert database.machines.live() == []
    told = database.machine_log.events("cloud", limit=10_000)
    assert {event.machine for event in told} == set(kept)
    for row in kept.values():
        mine = [event for event in told if event.machine == row.id]
        assert (mine[0].state, mine[0].reason) == (row.state, row.reason)
        assert [event.at for event in mine] == sorted((event.at for event in mine), reverse=True) or history.ahead


def test_a_history_of_machines_is_the_same_in_the_database(sqlite_url: str) -> None:
    database = open_store(sqlite_url)
    play(2, database)
    database.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3534])
def test_histories_of_machines_are_the_same_in_the_database(store: Store, seed: int) -> None:
    play(seed, store)
