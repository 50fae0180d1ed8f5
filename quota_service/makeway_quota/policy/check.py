"""Check that a policy document fits together: names exist, and no more is reserved than there is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..engine.snapshot import GPU, QuotaLine, TeamQuota
from ..wording import gpus
from .document import Document
from .issues import Loc, Problem, did_you_mean, quote
from .limits import reservations_above_limits
from .models import DocumentPool, DocumentProfile, DocumentTable, DocumentTeamQuota, QuotaTable
from .pod_template import claim_templates_of, has_only_claims

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
IMAGE = re.compile(
    rf"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::\d+)?/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@\w+:[0-9a-fA-F]{{32,}})?",
    re.ASCII,
)
"""The name of an image as registries and container runtimes accept it"""
AUTOSCALED = ("max_nodes", "node_gpus", "node_cpu", "node_memory")
NO_GPUS = "say which GPUs are in it with nodes: {local: {gpus: [0, 1]}} (or all), or reserve nothing"
MAX_LEVELS = 20
FOR_JOBS = (
    "the template is for the pods of jobs, and kinds has none; configure the pods of notebooks in the Hub "
    "(c.KubeSpawner, which is hub.config.KubeSpawner in the chart), or add job to kinds"
)
CLAIMS_WITHOUT_GPUS = "resourceClaims are for the GPUs of the profile, and gpus is 0; give the number that they request"
NO_TIME_LIMIT = "only jobs have a time limit, and kinds has none; remove time_limit, or add job to kinds"
WITHOUT_EFFECT = (FOR_JOBS, NO_TIME_LIMIT)
"""Messages about keys without effect: stored documents may have them, as earlier releases accepted them"""
NO_POOL = "no pool is named; name one, or remove the key to mean all"


@dataclass(frozen=True, slots=True)
class Entries:
    """The tables of a document by name, with their places."""

    top: DocumentTable
    pools: Mapping[str, tuple[Loc, DocumentPool]]
    profiles: Mapping[str, tuple[Loc, DocumentProfile]]
    policies: Mapping[str, tuple[Loc, DocumentTeamQuota]]


def check(document: Document, entries: Entries, sizes: Mapping[str, int] | None, *, stored: bool) -> Iterator[Problem]:
    """Yield every contradiction: within an entry, between entries, and with the sizes of the pools.

    `stored`: reservations above a limit and odd names of images are no problem, because earlier releases accepted them.
    """
    for key in ("pools", "profiles", "policies"):
        if not entries.top.has(key):
            yield (key,), f"the list of {key} is missing; begin it with “{key}:”"
    for loc, pool in entries.pools.values():
        yield from _check_pool(loc, pool, entries)
    for loc, profile in entries.profiles.values():
        yield from _check_profile(loc, profile, entries)
        if not stored:  # earlier releases accepted any name
            yield from _image_names(loc, profile)
    for loc, team in entries.policies.values():
        yield from _check_team(loc, team, entries)
    # totals are wrong where a pool's name occurs twice, and endless where parents form a circle
    can_add_up = len(entries.pools) == len(entries.top.pools) and all(
        len(_ancestry(name, entries)) <= MAX_LEVELS for name in entries.policies
    )
    for message, team_name, line in overcommitted(document, sizes) if can_add_up else ():
        loc = entries.policies[team_name][0]
        yield loc if line is None else (*loc, "quotas", line, "reserved"), message
    for message, team_name, line in reservations_above_limits(document) if can_add_up and not stored else ():
        loc = entries.policies[team_name][0]
        yield loc if line is None else (*loc, "quotas", line, "reserved"), message


def _check_pool(loc: Loc, pool: DocumentPool, entries: Entries) -> Iterator[Problem]:
    yield from _check_names((*loc, "profiles"), pool.profiles, entries.profiles, "profile")
    for key in AUTOSCALED:
        if pool.kind == "static" and pool.has(key):
            message = f"only a pool of kind autoscaled has {key}; set kind: autoscaled or remove it"
            yield (*loc, key), message


def _check_profile(loc: Loc, profile: DocumentProfile, entries: Entries) -> Iterator[Problem]:
    if profile.gpus is None:
        yield (*loc, "gpus"), "the number of GPUs is missing; give 0 for a profile without"
    if profile.min_workers is not None and profile.min_workers > profile.workers:
        message = f"{profile.min_workers} is more than the {profile.workers} workers; give at most that"
        yield (*loc, "min_workers"), message
    if profile.has("pools") and not profile.pools:
        yield (*loc, "pools"), NO_POOL
    yield from _check_names((*loc, "pools"), profile.pools, entries.pools, "pool")
    yield from _check_names((*loc, "policies"), profile.policies or (), entries.policies, "policy")
    if profile.pod and "job" not in profile.kinds and not has_only_claims(profile.pod):
        yield (*loc, "pod"), FOR_JOBS
    if claim_templates_of(profile.pod) and profile.gpus == 0:
        yield (*loc, "pod"), CLAIMS_WITHOUT_GPUS
    if profile.time_limit is not None and "job" not in profile.kinds:
        yield (*loc, "time_limit"), NO_TIME_LIMIT
    if profile.max_workers is not None and profile.max_workers < profile.workers:
        yield (
            (*loc, "max_workers"),
            f"{profile.max_workers} is less than the {profile.workers} workers; give at least that",
        )
    yield from _check_images((*loc, "images"), profile)


def _image_names(loc: Loc, profile: DocumentProfile) -> Iterator[Problem]:
    own = [((*loc, "image"), profile.image)] if profile.image else []
    for where, name in [
        *own,
        *(((*loc, "images", at, "image"), image.image) for at, image in enumerate(profile.images)),
    ]:
        if not IMAGE.fullmatch(name):
            yield where, f"{quote(name)} is no name of an image; write it as registry.example/group/name:tag"


def _check_images(loc: Loc, profile: DocumentProfile) -> Iterator[Problem]:
    if profile.images and profile.image:
        yield loc, "the profile has image and images; keep one of them"
    yield from _check_names(loc, [image.name for image in profile.images])
    defaults = [at for at, image in enumerate(profile.images) if image.default]
    for at in defaults[1:]:
        first = profile.images[defaults[0]].name
        yield (*loc, at, "default"), f"{quote(first)} is the default already; only one image can be"


def _check_team(loc: Loc, team: DocumentTeamQuota, entries: Entries) -> Iterator[Problem]:
    for at, line in enumerate(team.quotas):
        yield from _check_quota((*loc, "quotas", at), line, entries)
    yield from _check_names((*loc, "groups"), team.groups)
    yield from _check_names((*loc, "users"), team.users)
    yield from _check_names((*loc, "volumes"), [volume.name for volume in team.volumes])
    yield from _check_names((*loc, "volumes"), [volume.path for volume in team.volumes])
    if not (team.groups or team.users or any(other.parent == team.name for _, other in entries.policies.values())):
        if team.has("groups") or team.has("users"):
            yield (
                (*loc, "groups" if team.has("groups") else "users"),
                "the list is empty; name a group of the Hub or a user",
            )
        else:
            yield (*loc, "groups"), "this team has no members; name groups of the Hub, or users"
    yield from _check_parent((*loc, "parent"), team, entries)


def _check_quota(loc: Loc, line: QuotaTable, entries: Entries) -> Iterator[Problem]:
    if line.has("pools") and not line.pools:
        yield (*loc, "pools"), NO_POOL
    yield from _check_names((*loc, "pools"), line.pools, entries.pools, "pool")
    if line.limit is not None and line.reserved > line.limit:
        message = (
            f"{gpus(line.reserved)} are reserved, but the limit is {gpus(line.limit)}; raise the limit or reserve less"
        )
        yield (*loc, "reserved"), message
    if line.lend is not None and line.lend > line.reserved:
        message = f"{gpus(line.lend)} cannot be lent of a reservation of {gpus(line.reserved)}; lend at most that"
        yield (*loc, "lend"), message


def _check_names(
    loc: Loc, names: Iterable[str | Sequence[str]], known: Collection[str] | None = None, what: str = ""
) -> Iterator[Problem]:
    """Yield names that occur twice in a list (or in a list of ranks, as of preferred pools), or are not `known`."""
    seen: set[str] = set()
    for first, rank in enumerate(names):
        for second, name in enumerate([rank] if isinstance(rank, str) else rank):
            if name in seen:
                at = (first,) if isinstance(rank, str) or len(rank) == 1 else (first, second)
                yield (*loc, *at), f"{quote(name)} is listed twice; keep one"
            elif known is not None and name not in known:
                yield loc, f"there is no {what} {quote(name)}; {did_you_mean(name, known)}"
            seen.add(name)


def _check_parent(loc: Loc, team: DocumentTeamQuota, entries: Entries) -> Iterator[Problem]:
    if team.parent is None:
        return
    if team.parent not in entries.policies:
        known = [name for name in entries.policies if name != team.name]
        yield loc, f"there is no policy {quote(team.parent)}; {did_you_mean(team.parent, known)}"
        return
    chain = _ancestry(team.name, entries)
    if entries.policies[chain[-1]][1].parent == team.name:
        yield loc, f"the parents form a circle: {' → '.join([*chain, team.name])}; remove one of them"
    elif len(chain) > MAX_LEVELS:
        yield loc, f"more than {MAX_LEVELS} policies are above this one; nest fewer"


def _ancestry(name: str, entries: Entries) -> list[str]:
    """Return the names of a team and its ancestors, each once, at most one more than MAX_LEVELS."""
    chain, above = [name], entries.policies[name][1].parent or ""
    while above in entries.policies and above not in chain and len(chain) <= MAX_LEVELS:
        chain.append(above)
        above = entries.policies[above][1].parent or ""
    return chain


def overcommitted(document: Document, sizes: Mapping[str, int] | None) -> Iterator[tuple[str, str, int | None]]:
    """Yield a message for each set of pools with more reserved than exists, and the team and line that exceed it."""
    sets = {_covered(document, line) for team in document.policies for line in team.quotas}
    for pools in sorted(sets | {frozenset(pool.name for pool in document.pools)}, key=sorted):
        size = _size(document, pools, sizes)
        if size is None:
            continue
        total, parts = 0, []
        for team, reserved in _reserved(document, pools):
            total += reserved
            parts.append(f"{team.label} {gpus(reserved)}")
            if total > size:
                named = f"pool{'s' * (len(pools) > 1)} {', '.join(sorted(pools)) or '(there is none)'}"
                message = (
                    f"{gpus(total)} are reserved in {named} ({', '.join(parts)}), but there are {gpus(size)}; "
                    f"{'reserve less or add GPUs' if size else NO_GPUS}"
                )
                within = (at for at, line in enumerate(team.quotas) if _covered(document, line) <= pools)
                yield message, team.name, next(within, None)
                break


def _covered(document: Document, line: QuotaLine) -> frozenset[str]:
    """Return the pools that a quota line covers."""
    return frozenset(line.pools or (pool.name for pool in document.pools))


def _reserved(document: Document, pools: frozenset[str]) -> Iterator[tuple[TeamQuota, int]]:
    """Yield the teams without a parent and what they reserve in these pools, themselves or by their children."""
    children: dict[str, list[TeamQuota]] = {}
    for team in document.policies:
        children.setdefault(team.parent or "", []).append(team)

    def reserved(team: TeamQuota, above: frozenset[str]) -> int:
        if team.name in above:
            return 0
        own = sum(line.reserved for line in team.quotas if _covered(document, line) <= pools)
        below = (reserved(child, above | {team.name}) for child in children.get(team.name, ()))
        return max(own, sum(below))

    for team in document.policies:
        is_child = team.parent and document.policy(team.parent)
        if not is_child and (amount := reserved(team, frozenset())):
            yield team, amount


def _size(document: Document, pools: frozenset[str], sizes: Mapping[str, int] | None) -> int | None:
    """Return how many milli-GPUs some pools can have together; None where the size of one is not known."""
    total = 0
    for name in pools:
        pool, facts = document.pool(name), document.pool_facts.get(name)
        if pool is None or facts is None:
            return None
        live = None if sizes is None or name not in sizes else sizes[name] * GPU
        size = facts.size if live is None else live
        if pool.kind == "autoscaled":
            size = max(live or 0, pool.max_nodes * pool.node_gpus * GPU) or None
        bounds = [bound for bound in (size, pool.capacity) if bound is not None]
        if not bounds:
            return None
        total += min(bounds)
    return total
