"""Read a policy document: every problem is reported at once, with its line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from ..engine.snapshot import Pool, Profile, Settings, TeamQuota
from .check import WITHOUT_EFFECT, Entries, check
from .document import Document, PoolFacts, ProfileFacts, TeamFacts
from .issues import Issue, Loc, PolicyInvalid, Problem, quote, sorted_issues, text_of_loc
from .models import DocumentPool, DocumentProfile, DocumentSettings, DocumentTable, DocumentTeamQuota
from .source import Source, UnreadableDocument, parse
from .tables import ENOUGH, Table, validate_partly

T = TypeVar("T", bound=Table)
E = TypeVar("E", DocumentPool, DocumentProfile, DocumentTeamQuota)
Sizes = Mapping[str, int] | Callable[[Document], Mapping[str, int]]
MAX_BYTES = 1_000_000


def read_policy(text: str, file: str = "policy.yaml", sizes: Sizes | None = None, *, stored: bool = False) -> Document:
    """Return the document; PolicyInvalid lists everything that is wrong with it.

    `sizes` gives how many whole GPUs each pool has now: no more can be reserved. A pool that is not in it counts
    with the size that the document gives, if any. It may be a function of the document, which assigns nodes to pools.
    `stored`: an earlier release has taken the document, so that a part without any effect is no problem,
    nor are reservations above a limit.
    """
    try:
        source = parse(text, MAX_BYTES)
    except UnreadableDocument as error:
        raise PolicyInvalid(error.issues(file)) from None
    reader = _Reader(source)
    top = reader.table(DocumentTable, source.value, ()) or DocumentTable()
    settings = reader.table(DocumentSettings, top.settings, ("settings",)) or DocumentSettings()
    entries = Entries(
        top,
        reader.section(DocumentPool, "pools", top.pools),
        reader.section(DocumentProfile, "profiles", top.profiles),
        reader.section(DocumentTeamQuota, "policies", top.policies),
    )
    document = _document(settings, entries)
    checked = check(document, entries, sizes(document) if callable(sizes) else sizes, stored=stored)
    result = islice((problem for problem in checked if not (stored and problem[1] in WITHOUT_EFFECT)), ENOUGH)
    problems = reader.problems + [problem for problem in result if not reader.has_problem_at(problem[0])]
    if problems:
        raise PolicyInvalid(
            sorted_issues(Issue(file, source.line(loc), text_of_loc(loc), message) for loc, message in problems)
        )
    return document


class _Reader:
    """Validates the parts of a document, and collects their problems."""

    def __init__(self, source: Source) -> None:
        self.problems: list[Problem] = []
        self._source = source

    def table(self, model: type[T], value: Any, loc: Loc) -> T | None:
        """Return the table without its wrong values; None where too little is left."""
        table, problems = validate_partly(model, value, {"slugs": True})
        self.problems += [((*loc, *inner), message) for inner, message in problems]
        return table

    def section(self, model: type[E], key: str, values: Sequence[Any]) -> dict[str, tuple[Loc, E]]:
        """Return a section's tables with their places, by name; each name once."""
        result: dict[str, tuple[Loc, E]] = {}
        for at, value in enumerate(values):
            if len(self.problems) > ENOUGH:
                break
            table = self.table(model, value, (key, at))
            if table and table.name in result:
                first = self._source.line(result[table.name][0])
                message = (
                    f"the name {quote(table.name)} is used twice in {key} (first on line {first}); give each its own"
                )
                self.problems.append(((key, at, "name"), message))
            elif table:
                result[table.name] = (key, at), table
        return result

    def has_problem_at(self, loc: Loc) -> bool:
        """Whether a problem is known at a place, around it or in it; then another one may only be its consequence."""
        return any(loc[: len(other)] == other[: len(loc)] for other, _ in self.problems)


def _document(settings: DocumentSettings, entries: Entries) -> Document:
    pools = {name: table for name, (_, table) in entries.pools.items()}
    profiles = {name: table for name, (_, table) in entries.profiles.items()}
    policies = {name: table for name, (_, table) in entries.policies.items()}
    return Document(
        settings=settings.as_value(Settings),
        sessions_per_user=settings.sessions_per_user,
        work=settings.work,
        pools=tuple(table.as_value(Pool) for table in pools.values()),
        profiles=tuple(_profile(table, settings, tuple(pools), tuple(policies)) for table in profiles.values()),
        policies=tuple(table.as_value(TeamQuota) for table in policies.values()),
        pool_facts={name: _pool_facts(table) for name, table in pools.items()},
        profile_facts={
            name: table.as_value(
                ProfileFacts,
                title=table.title or name,
                image=table.image or None,
                everyone=table.policies is None,
            )
            for name, table in profiles.items()
        },
        team_facts={name: table.as_value(TeamFacts) for name, table in policies.items()},
    )


def _profile(
    table: DocumentProfile, settings: DocumentSettings, pools: tuple[str, ...], policies: tuple[str, ...]
) -> Profile:
    """Return a profile in which pools, policies and grace are set: by default all, all, and the settings'."""
    every = (policies,) if policies else ()
    return table.as_value(
        Profile,
        gpus=table.gpus or 0,
        pools=table.pools or (pools if table.gpus else ()),
        policies=every if table.policies is None else tuple(rank for rank in table.policies if rank),
        grace=settings.grace if table.grace is None else table.grace,
    )


def _pool_facts(table: DocumentPool) -> PoolFacts:
    local = table.nodes.local
    devices = None if local is None else "all" if local.gpus is None else local.gpus
    return table.as_value(PoolFacts, local=devices, labels=table.nodes.labels)
