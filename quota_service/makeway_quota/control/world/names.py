"""Names for the sentences of decisions: titles of teams and profiles, names of jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...engine.snapshot import TeamQuota
from ...policy import Document
from ...store.records import Workload
from ...wording import Names


def names_of(policies: Iterable[TeamQuota], rows: Mapping[str, Workload], document: Document | None = None) -> Names:
    """Return the names for sentences about these workloads: “name” of a job, titles of teams and profiles.

    What has no name keeps its id; profiles have titles only where their `document` is given.
    """
    teams = {policy.name: policy.label for policy in policies}
    profiles = {} if document is None else document.profile_facts

    def workload(id: str) -> str:
        row = rows.get(id)
        return f"“{row.name}”" if row and row.name else id

    def profile(name: str) -> str:
        return f"“{profiles[name].title}”" if name in profiles else name

    return Names(workload=workload, team=lambda name: teams.get(name, name), profile=profile)
