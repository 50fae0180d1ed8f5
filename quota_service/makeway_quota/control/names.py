"""Names of workloads and teams for the sentences of decisions: titles of policies, names of jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..engine.state import Policy
from ..store.records import Workload
from ..wording import Names


def names_of(policies: Iterable[Policy], rows: Mapping[str, Workload]) -> Names:
    """Return the names for sentences about these workloads: “name” of a job, its id where it has no name."""
    titles = {policy.name: policy.label for policy in policies}

    def workload(id: str) -> str:
        row = rows.get(id)
        return f"“{row.name}”" if row and row.name else id

    return Names(workload=workload, team=lambda name: titles.get(name, name))
