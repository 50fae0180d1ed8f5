"""Read a snapshot from JSON or YAML."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pydantic import ValidationError

from ..engine import Snapshot
from ..policy.issues import Issue, Loc, Problem, did_you_mean, quote, sorted_issues, text_of_loc
from ..policy.source import UnreadableDocument, parse
from ..policy.tables import Table, explain
from .models import SnapshotTable


class SnapshotError(ValueError):
    """The file cannot be used; `issues` has every reason, the text the first three, in one line."""

    def __init__(self, issues: list[Issue]) -> None:
        more = [f"and {len(issues) - 3} more"] if len(issues) > 3 else []
        super().__init__("; ".join([*map(str, issues[:3]), *more]))
        self.issues = issues


def read_snapshot(text: str, file: str = "snapshot") -> Snapshot:
    """Return the snapshot; SnapshotError says what is wrong and where."""
    try:
        source = parse(text)
    except UnreadableDocument as error:
        raise SnapshotError(error.issues(file)) from None
    try:
        table = SnapshotTable.model_validate(source.value)
        problems = list(_inconsistencies(table))
    except ValidationError as invalid:
        problems = explain(SnapshotTable, invalid)
    if problems:
        raise SnapshotError(
            sorted_issues(Issue(file, source.line(loc), text_of_loc(loc), message) for loc, message in problems)
        )
    return table.as_value(Snapshot)


def _inconsistencies(table: SnapshotTable) -> Iterator[Problem]:
    """Yield names that occur twice or do not exist."""
    pools = {pool.name for pool in table.pools}
    policies = {policy.name for policy in table.policies}
    for section in ("pools", "nodes", "profiles", "policies", "workloads"):
        yield from _repeated(section, getattr(table, section))
    for at, node in enumerate(table.nodes):
        yield from _missing(("nodes", at, "pool"), [node.pool], pools)
    yield from _one_pool_twice(table)
    for at, profile in enumerate(table.profiles):
        yield from _missing(("profiles", at, "pools"), profile.pools, pools)
    for at, policy in enumerate(table.policies):
        for line_at, line in enumerate(policy.quotas):
            yield from _missing(("policies", at, "quotas", line_at, "pools"), line.pools, pools)
        yield from _missing(("policies", at, "parent"), [policy.parent] if policy.parent else [], policies)


def _one_pool_twice(table: SnapshotTable) -> Iterator[Problem]:
    """Yield nodes that are in the same pool as another one of their host, which would count its devices twice."""
    seen: set[tuple[str, str]] = set()
    for at, node in enumerate(table.nodes):
        if node.host and (node.host, node.pool) in seen:
            twice = f"host {quote(node.host)} is in pool {quote(node.pool)} twice"
            yield ("nodes", at, "host"), f"{twice}; a host has one node in each of its pools"
        seen.add((node.host, node.pool))


def _repeated(section: str, tables: Sequence[Table]) -> Iterator[Problem]:
    key = "id" if section == "workloads" else "name"
    seen: set[str] = set()
    for at, table in enumerate(tables):
        name: str = getattr(table, key)
        if name in seen:
            yield (section, at, key), f"the {key} {quote(name)} is used twice in {section}; give each its own"
        seen.add(name)


def _missing(loc: Loc, names: Collection[str], known: Collection[str]) -> Iterator[Problem]:
    for name in names:
        if name not in known:
            yield loc, f"there is no {quote(name)}; {did_you_mean(name, known)}"
