"""Hold the pending work of people who are in its team no more, until they are again.

Called by the loop after each plan, which did not see that work (`EngineView.held`). A job waits, with its place in the
queue; a session that waits for GPUs is refused, as a person waits for its page. What runs goes on: it ends by itself,
or an administrator ends it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..store.records import Change, Workload
from ..wording import Names, outcomes
from .change_set import ChangeSet, decide
from .people import People

NOT_MEMBER = "not_member"
"""The reason code of work whose owner is in its team no more, or no user of the Hub."""


def is_new(row: Workload | None) -> bool:
    """Whether a held workload does not say yet that it is held."""
    return row is not None and row.state == "pending" and row.reason_code != NOT_MEMBER


def holds(rows: Mapping[str, Workload], held: Collection[str], people: People, names: Names) -> ChangeSet:
    """Return the reasons of held jobs, where they are not written yet, and the ends of held sessions."""
    change_set = ChangeSet()
    for id in sorted(held):
        row = rows.get(id)
        if row is None or row.state != "pending":
            continue
        message = outcomes.not_member(row.owner, names.team(row.team or ""), people.is_gone(row.owner), row.kind)
        if row.reason_code == NOT_MEMBER and row.reason_message == message:
            continue
        fields: dict[str, object] = {
            "reason_code": NOT_MEMBER,
            "reason_message": message,
            "reason_numbers": {},
            "nomination": (),
            "not_before": None,
        }
        if row.kind == "session":
            fields |= {"state": "cancelled", "message": message}
        verb = "refuse" if row.kind == "session" else "wait"
        change_set.add(Change(id, fields, row.version, ("pending",)), decide(row, verb, NOT_MEMBER, message))
    return change_set
