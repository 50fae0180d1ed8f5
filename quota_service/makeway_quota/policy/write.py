"""Write a document as YAML that reads back as the same document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ..engine.state import Policy, Pool, Profile, QuotaLine, Settings
from .document import Document, PolicyFacts, PoolFacts, ProfileFacts


def write(document: Document) -> str:
    """Write the document; what has its default is left out."""
    tree = {
        "version": 1,
        "settings": _settings(document),
        "pools": [_pool(pool, document.pool_facts[pool.name]) for pool in document.pools],
        "profiles": [_profile(profile, document) for profile in document.profiles],
        "policies": [_policy(policy, document.policy_facts[policy.name]) for policy in document.policies],
    }
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def _settings(document: Document) -> dict[str, Any]:
    default = Settings()
    values = {
        name: _plain(value)
        for name in Settings.__dataclass_fields__
        if (value := getattr(document.settings, name)) != getattr(default, name)
    }
    return values if document.sessions_per_user == 2 else {**values, "sessions_per_user": document.sessions_per_user}


def _pool(pool: Pool, facts: PoolFacts) -> dict[str, Any]:
    nodes: dict[str, Any] = {}
    if facts.local is not None:
        nodes["local"] = {"gpus": "all" if facts.local == "all" else list(facts.local)}
    if facts.labels:
        nodes["labels"] = dict(facts.labels)
    return {"name": pool.name} | _given(
        {
            "title": facts.title,
            "kind": pool.kind if pool.kind != "static" else None,
            "resource": pool.resource if pool.resource != "nvidia.com/gpu" else None,
            "size": _thousandths(facts.size),
            "capacity": _thousandths(pool.capacity),
            "strategy": pool.strategy if pool.strategy != "pack" else None,
            "consolidation": None if pool.consolidation else False,
            "profiles": list(pool.profiles),
            "max_nodes": pool.max_nodes or None,
            "node_gpus": pool.node_gpus or None,
            "node_cpu": _thousandths(pool.node_cpu or None),
            "node_memory": pool.node_memory or None,
            "nodes": nodes,
        }
    )


def _profile(profile: Profile, document: Document) -> dict[str, Any]:
    facts: ProfileFacts = document.profile_facts[profile.name]
    all_pools = tuple(pool.name for pool in document.pools) if profile.gpus else ()
    ranks = [list(rank) if len(rank) > 1 else rank[0] for rank in profile.policies]
    written = {"name": profile.name, "title": facts.title} | _given({"description": facts.description})
    written |= {"gpus": _thousandths(profile.gpus)} | _given(
        {
            "workers": profile.workers if profile.workers != 1 else None,
            "min_workers": profile.min_workers,
            "cpu": _thousandths(profile.cpu or None),
            "memory": profile.memory or None,
            "pools": None if profile.pools == all_pools else list(profile.pools),
        }
    )
    if not facts.everyone:
        written["policies"] = ranks
    return written | _given(
        {
            "kinds": list(facts.kinds) if len(facts.kinds) < 2 else None,
            "image": facts.image,
            "env": dict(facts.env),
            "grace": _plain(profile.grace) if profile.grace != document.settings.grace else None,
            "signal": facts.signal if facts.signal != "SIGTERM" else None,
            "time_limit": _plain(profile.time_limit),
            "min_runtime": _plain(profile.min_runtime or None),
            "reclaim_after": _plain(profile.reclaim_after or None),
        }
    )


def _policy(policy: Policy, facts: PolicyFacts) -> dict[str, Any]:
    return {"name": policy.name} | _given(
        {
            "title": policy.title,
            "groups": list(facts.groups),
            "users": list(facts.users),
            "weight": policy.weight if policy.weight != "Medium" else None,
            "priority": policy.priority or None,
            "parent": policy.parent,
            "quotas": [_quota(line) for line in policy.quotas],
        }
    )


def _quota(line: QuotaLine) -> dict[str, Any]:
    pools = {"pools": list(line.pools)} if line.pools else {}
    amounts = {"limit": _thousandths(line.limit), "lend": _thousandths(line.lend)}
    return pools | {"reserved": _thousandths(line.reserved)} | _given(amounts)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is not there; False and 0 are."""
    return {name: value for name, value in values.items() if value is not None and value not in ("", [], {})}


def _thousandths(milli: int | None) -> float | int | None:
    return None if milli is None else _plain(milli / 1000)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value == int(value) else value
