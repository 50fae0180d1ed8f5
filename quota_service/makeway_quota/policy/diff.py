"""Describe the changes between two documents, one sentence for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from ..engine.snapshot import QuotaLine, TeamQuota
from ..wording import duration, gpus, number
from .document import Document
from .issues import quote

MILLI = frozenset({"gpus", "capacity", "size"})
CORES = frozenset({"cpu", "node_cpu"})
WORDS = {
    "gpus": "GPUs per worker",
    "min_workers": "least number of workers",
    "pools": "pools, first choice first",
    "policies": "teams, best rank first",
    "profiles": "rank of profiles",
    "kinds": "use",
    "local": "GPUs of this machine",
    "env": "environment",
    "pod": "pod template",
    "size": "expected size",
}


def policy_diff(old: Document, new: Document) -> list[str]:
    """Return what was added, removed and changed, in the new document's order."""
    sentences = _values("Settings", _facts(old.settings), _facts(new.settings))
    sentences += _values(
        "Settings",
        {"sessions_per_user": old.sessions_per_user, "work": old.work},
        {"sessions_per_user": new.sessions_per_user, "work": new.work},
    )
    sentences += _section("Pool", _pools(old), _pools(new))
    sentences += _section("Profile", _profiles(old), _profiles(new))
    sentences += _section("Team", _policies(old), _policies(new))
    for kind in ("pools", "profiles", "policies"):
        before = [thing.name for thing in getattr(old, kind)]
        after = [thing.name for thing in getattr(new, kind)]
        if before != after and sorted(before) == sorted(after):
            sentences.append(f"The order of the {kind} is now {', '.join(after)}.")
    return sentences


def _facts(thing: Any) -> dict[str, Any]:
    return {field.name: getattr(thing, field.name) for field in fields(thing)}


def _pools(document: Document) -> dict[str, dict[str, Any]]:
    return {pool.name: _facts(pool) | _facts(document.pool_facts[pool.name]) for pool in document.pools}


def _profiles(document: Document) -> dict[str, dict[str, Any]]:
    result = {}
    for profile in document.profiles:
        values = _facts(profile) | _facts(document.profile_facts[profile.name])
        if values.pop("everyone"):
            values["policies"] = "all"
        result[profile.name] = values
    return result


def _policies(document: Document) -> dict[str, dict[str, Any]]:
    return {policy.name: _policy(policy) | _facts(document.team_facts[policy.name]) for policy in document.policies}


def _policy(policy: TeamQuota) -> dict[str, Any]:
    return _facts(policy) | {"quotas": _lines(policy.quotas)}


def _lines(quotas: Iterable[QuotaLine]) -> dict[tuple[tuple[str, ...], int], QuotaLine]:
    """Return quota lines by their pools; those of the same pools are counted."""
    seen: Counter[tuple[str, ...]] = Counter()
    lines = {}
    for line in quotas:
        lines[line.pools, seen[line.pools]] = line
        seen[line.pools] += 1
    return lines


def _quotas(
    what: str,
    old: Mapping[tuple[tuple[str, ...], int], QuotaLine],
    new: Mapping[tuple[tuple[str, ...], int], QuotaLine],
) -> list[str]:
    """Return what changed in the quota lines of a team."""
    sentences = [f"{what}: the quota{_where(old[key])} is removed." for key in old if key not in new]
    for key, line in new.items():
        amounts = _amounts(line)
        if key not in old:
            shown = ", ".join(f"{name} {amount}" for name, amount in amounts.items())
            sentences.append(f"{what}: a quota{_where(line)} is new: {shown}.")
            continue
        for name, before in _amounts(old[key]).items():
            if before != amounts[name]:
                sentences.append(f"{what}: {name}{_where(line)} {before} → {amounts[name]}.")
    if not sentences and list(old) != list(new):
        sentences.append(f"{what}: the order of its quotas is another one.")
    return sentences


def _where(line: QuotaLine) -> str:
    return f" in {', '.join(line.pools)}" if line.pools else ""


def _amounts(line: QuotaLine) -> dict[str, str]:
    return {
        "reserved": gpus(line.reserved),
        "limit": "none" if line.limit is None else gpus(line.limit),
        "lent at most": "all" if line.lend is None else gpus(line.lend),
    }


def _section(what: str, old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> list[str]:
    sentences = [f"{what} {_called(name, old[name])} is removed." for name in old if name not in new]
    for name, values in new.items():
        if name not in old:
            sentences.append(f"{what} {_called(name, values)} is new.")
        else:
            sentences += _values(f"{what} {_called(name, values)}", old[name], values)
    return sentences


def _called(name: str, values: Mapping[str, Any]) -> str:
    title = values.get("title") or ""
    return f"{title} ({name})" if title and title != name else name


def _values(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    sentences = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if key == "quotas":
            sentences += _quotas(what, before or {}, after or {})
        else:
            name = WORDS.get(key, key.replace("_", " "))
            sentences.append(f"{what}: {name} {' → '.join(_shown(key, before, after))}.")
    return sentences


def _shown(key: str, before: Any, after: Any) -> tuple[str, str]:
    """Return two different values in words that differ."""
    shown = _show(key, before), _show(key, after)
    if shown[0] == shown[1]:  # durations of a day that differ by seconds, or a title that is “none”
        shown = _exactly(before), _exactly(after)
    return shown


def _exactly(value: Any) -> str:
    if isinstance(value, float):
        return f"{int(value) if value.is_integer() else value!r} s"
    return quote(value) if isinstance(value, str) else repr(value)


def _show(key: str, value: Any) -> str:
    if value is None or value == () or value == {} or value == "":
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if key in MILLI:
        return gpus(value)
    if key in CORES:
        return number(value)
    if isinstance(value, tuple):
        return ", ".join(" = ".join(item) if isinstance(item, tuple) else str(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    return duration(value) if isinstance(value, float) else str(value)
