"""Machines in a database for tests: launched in a term of their own, changed, and ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoscale.fleet import START, machine
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.store import Store


def launch(store: Store, *ids: str, deployment: str = "cloud", **fields: Any) -> int:
    """Commit machines in a term of their own, and return the term."""
    term = store.take_term("test", 0.0)
    rows = tuple(machine(id=id, deployment=deployment, **fields) for id in ids)
    assert store.machines.commit(deployment, term, MachineChanges(rows))
    return term


def row_of(store: Store, id: str = "m-1") -> Machine:
    row = store.machines.machine(id)
    assert row is not None
    return row


def end(store: Store, term: int, *ids: str, at: float = START + 60, state: str = "gone", **changes: Any) -> None:
    """Commit the end of machines."""
    known = {row.id: row for row in store.machines.live()}
    rows = [known[id] for id in ids]
    ended = tuple(replace(row, state=state, state_since=at, reason="idle") for row in rows)  # type: ignore[arg-type]
    assert store.machines.commit(rows[0].deployment, term, MachineChanges(changed=ended, **changes))
