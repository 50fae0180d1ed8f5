"""Read the policy document: all that is wrong is told at once, with lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from ..engine.state import Settings
from .check import check
from .document import Document
from .fields import Fields
from .issues import Findings, quote
from .sections import POLICY, POOL, PROFILE, Context, read_policy, read_pool, read_profile
from .tree import parse


class Named(Protocol):
    """Whatever has a name."""

    @property
    def name(self) -> str:
        """Its name in the document."""


T = TypeVar("T", bound=Named)
F = TypeVar("F")

Sizes = Mapping[str, int] | Callable[[Document], Mapping[str, int]]

TOP = ("version", "settings", "pools", "profiles", "policies")
SETTINGS = (
    "consolidation",
    "victim_order",
    "starvation_after",
    "history_half_life",
    "user_fairness",
    "fair_share",
    "in_team_preemption",
    "yields_after",
    "grace",
    "sessions_per_user",
)


def read(text: str, file: str = "policy.yaml", sizes: Sizes | None = None) -> Document:
    """Read a document; PolicyInvalid lists everything that is wrong with it.

    `sizes` tells how many whole GPUs each pool has now: no more can be reserved. A pool that is not in it counts
    with the size that the document gives, if any. It may be a function of the document, which says what is where.
    """
    findings = Findings(file)
    root = parse(text, findings)
    findings.stop()
    top = Fields(root, "", findings, TOP)
    top.whole("version", 1, 1, 1, "(this Makeway reads version 1)")
    if root is not None and isinstance(root.value, dict):
        for key in ("pools", "profiles", "policies"):
            if not top.has(key):
                findings.say(None, key, f"the list of {key} is missing; begin it with “{key}:”")
    settings, sessions_per_user = read_settings(Fields(top.node("settings"), "settings", findings, SETTINGS))
    context = Context(settings)
    pools, pool_facts = section(top, "pools", POOL, read_pool, context)
    context.pools = tuple(pool.name for pool in pools)
    policies, policy_facts = section(top, "policies", POLICY, read_policy, context)
    context.policies = tuple(policy.name for policy in policies)
    profiles, profile_facts = section(top, "profiles", PROFILE, read_profile, context)
    document = Document(settings, sessions_per_user, pools, profiles, policies, pool_facts, profile_facts, policy_facts)
    check(document, context.places, findings, sizes(document) if callable(sizes) else sizes)
    findings.stop()
    return document


def read_settings(fields: Fields) -> tuple[Settings, int]:
    """Read what holds for all pools."""
    default = Settings()

    def seconds(key: str, otherwise: float) -> float:
        value = fields.seconds(key)
        return otherwise if value is None else value

    settings = Settings(
        consolidation=fields.flag("consolidation", default.consolidation),
        victim_order=fields.choice("victim_order", ("newest", "cheapest"), default.victim_order),
        starvation_after=seconds("starvation_after", default.starvation_after),
        history_half_life=seconds("history_half_life", default.history_half_life),
        user_fairness=fields.flag("user_fairness", default.user_fairness),
        fair_share=fields.choice("fair_share", ("order", "reclaim"), default.fair_share),
        in_team_preemption=fields.flag("in_team_preemption", default.in_team_preemption),
        yields_after=seconds("yields_after", default.yields_after),
        grace=seconds("grace", default.grace),
    )
    return settings, fields.whole("sessions_per_user", 2, 1, 1000, "sessions")


def section(
    top: Fields,
    key: str,
    known: tuple[str, ...],
    one: Callable[[Fields, Context], tuple[T, F]],
    context: Context,
) -> tuple[tuple[T, ...], dict[str, F]]:
    """Read a list of things with names; each name once."""
    found: list[T] = []
    facts: dict[str, F] = {}
    for node, where in top.items(key):
        fields = Fields(node, where, top.findings, known)
        if top.findings.full:
            break
        if fields.broken:
            continue
        thing, more = one(fields, context)
        if not thing.name:
            continue
        if thing.name in facts:
            first = context.places.get((key, thing.name))
            line = f" (first on line {first.line})" if first else ""
            fields.wrong("name", f"the name {quote(thing.name)} is used twice in {key}{line}; give each its own")
            continue
        context.places[key, thing.name] = fields
        found.append(thing)
        facts[thing.name] = more
    return tuple(found), facts
