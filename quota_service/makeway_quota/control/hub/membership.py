"""Hold the pending work of people who are in its team no more, until they are again.

Called by the loop after each plan, which did not see that work (`EngineView.held`). A job waits, with its place in the
queue; a session that waits for GPUs is refused, as a person waits for its page. What runs goes on: it ends by itself,
or an administrator ends it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...quarantine import Quarantine
from ...store.records import Workload
from ...wording import Names, outcomes
from .. import transitions
from ..change_set import ChangeSet
from .people import People

STEP = "holding it as its owner left the team"
NOT_MEMBER = "not_member"
"""The reason code of work whose owner is in its team no more, or no user of the Hub."""


def is_new(row: Workload | None) -> bool:
    """Whether a held workload does not say yet that it is held."""
    return row is not None and row.state == "pending" and row.reason_code != NOT_MEMBER


def holds(
    rows: Mapping[str, Workload],
    held: Collection[str],
    people: People,
    names: Names,
    now: float,
    quarantine: Quarantine | None = None,
) -> ChangeSet:
    """Return the reasons of held jobs, where they are not written yet, and the ends of held sessions."""
    change_set, quarantine = ChangeSet(), quarantine or Quarantine()
    for id in sorted(held):
        row = rows.get(id)
        if row is not None and row.state == "pending":
            with quarantine.guard(STEP, "workload", id):
                _hold(change_set, row, people, names, now)
    return change_set


def _hold(change_set: ChangeSet, row: Workload, people: People, names: Names, now: float) -> None:
    message = outcomes.not_member(row.owner, names.team(row.team or ""), people.is_gone(row.owner), row.kind)
    if row.reason_code == NOT_MEMBER and row.reason_message == message:
        return
    if row.kind == "session":
        change_set.add(*transitions.refuse_session(row, NOT_MEMBER, message, now))
    else:
        change_set.add(*transitions.exclude(row, NOT_MEMBER, message))
