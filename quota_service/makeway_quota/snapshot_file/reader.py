"""Read a snapshot from JSON or YAML."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from pydantic import ValidationError

from ..engine import Node, Placed, Policy, Pool, Profile, QuotaLine, Settings, Snapshot, Workload
from ..policy.issues import Issue, Loc, Problem, did_you_mean, in_order, place, quote
from ..policy.source import Unreadable, parse
from ..policy.tables import Table, explain
from .models import FileForeign, FileNode, FilePlaced, FileTable

ENOUGH = 1000


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
    except Unreadable as error:
        raise SnapshotError(error.issues(file)) from None
    try:
        table = FileTable.model_validate(source.value)
        problems = list(_inconsistencies(table))
    except ValidationError as invalid:
        problems = list(islice(explain(FileTable, invalid), ENOUGH))
    if problems:
        raise SnapshotError(in_order(Issue(file, source.line(loc), place(loc), message) for loc, message in problems))
    return _snapshot(table)


def _inconsistencies(table: FileTable) -> Iterator[Problem]:
    """Yield names that occur twice or do not exist."""
    pools = {pool.name for pool in table.pools}
    policies = {policy.name for policy in table.policies}
    for section in ("pools", "nodes", "profiles", "policies", "workloads"):
        yield from _repeated(section, getattr(table, section))
    for at, node in enumerate(table.nodes):
        yield from _missing(("nodes", at, "pool"), [node.pool], pools)
    for at, profile in enumerate(table.profiles):
        yield from _missing(("profiles", at, "pools"), profile.pools, pools)
    for at, policy in enumerate(table.policies):
        for line_at, line in enumerate(policy.quotas):
            yield from _missing(("policies", at, "quotas", line_at, "pools"), line.pools, pools)
        yield from _missing(("policies", at, "parent"), [policy.parent] if policy.parent else [], policies)


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


def _snapshot(table: FileTable) -> Snapshot:
    return Snapshot(
        now=table.now,
        settings=table.settings.as_value(Settings),
        pools=tuple(pool.as_value(Pool) for pool in table.pools),
        nodes=tuple(_node(node) for node in table.nodes),
        profiles=tuple(profile.as_value(Profile) for profile in table.profiles),
        policies=tuple(
            policy.as_value(Policy, quotas=tuple(line.as_value(QuotaLine) for line in policy.quotas))
            for policy in table.policies
        ),
        workloads=tuple(
            work.as_value(Workload, placement=_placement(work.placement), nomination=_placement(work.nomination))
            for work in table.workloads
        ),
        paused=table.paused,
    )


def _node(node: FileNode) -> Node:
    foreign = {f"foreign_{key}": getattr(node.foreign, key) for key in FileForeign.model_fields}
    return node.as_value(Node, **foreign)


def _placement(workers: tuple[FilePlaced, ...]) -> tuple[Placed, ...]:
    return tuple(
        Placed(at if placed.worker is None else placed.worker, placed.node, placed.devices, placed.gpu_share)
        for at, placed in enumerate(workers)
    )
