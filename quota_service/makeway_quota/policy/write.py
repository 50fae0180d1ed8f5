"""Write a document as YAML that reads back as the same document."""

from __future__ import annotations

from typing import Any

import yaml

from ..engine.snapshot import Pool, Profile
from .document import Document
from .models import DocumentPool, DocumentProfile, DocumentSettings, DocumentTeamQuota, LocalNodes, PoolNodes
from .tables import Table


def write_policy(document: Document) -> str:
    """Return the document as YAML; what has its default is left out."""
    settings = DocumentSettings.of(document.settings, sessions_per_user=document.sessions_per_user, work=document.work)
    tree = {
        "version": 1,
        "settings": settings.written(),
        "pools": [_entry(_pool(pool, document)) for pool in document.pools],
        "profiles": [_entry(_profile(profile, document)) for profile in document.profiles],
        "policies": [
            _entry(DocumentTeamQuota.of(policy, document.team_facts[policy.name])) for policy in document.policies
        ],
    }
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def _pool(pool: Pool, document: Document) -> DocumentPool:
    facts = document.pool_facts[pool.name]
    local = None if facts.local is None else LocalNodes.of(gpus=facts.local)
    return DocumentPool.of(pool, facts, nodes=PoolNodes.of(local=local, labels=facts.labels))


def _profile(profile: Profile, document: Document) -> DocumentProfile:
    facts = document.profile_facts[profile.name]
    every = tuple(pool.name for pool in document.pools) if profile.gpus else ()
    return DocumentProfile.of(
        profile,
        facts,
        pools=() if profile.pools == every else profile.pools,
        policies=None if facts.everyone else profile.policies,
        grace=None if profile.grace == document.settings.grace else profile.grace,
        image=facts.image or "",
    )


def _entry(table: Table) -> dict[str, Any]:
    """Return the table with what people read first."""
    values = table.written()
    return {key: values[key] for key in ("name", "title", "description") if key in values} | values
