"""Does it fit together: names that are used exist, and no more is promised than there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..engine.phrases import gpus
from ..engine.state import GPU, Policy
from .document import Document
from .fields import Fields
from .issues import Findings, did_you_mean, quote

NO_GPUS = "say which GPUs are in it with nodes: {local: {gpus: [0, 1]}} (or all), or reserve nothing"

Places = Mapping[tuple[str, str], Fields]


def check(document: Document, places: Places, findings: Findings, sizes: Mapping[str, int] | None) -> None:
    """Report every name that does not exist, teams without people, and reservations beyond the pools."""
    pools = [pool.name for pool in document.pools]
    profiles = [profile.name for profile in document.profiles]
    policies = [policy.name for policy in document.policies]
    for pool in document.pools:
        _exist(places["pools", pool.name], "profiles", pool.profiles, profiles, "profile")
    for profile in document.profiles:
        fields = places["profiles", profile.name]
        _exist(fields, "pools", profile.pools, pools, "pool")
        _exist(fields, "policies", tuple(name for rank in profile.policies for name in rank), policies, "policy")
    for policy in document.policies:
        fields = places["policies", policy.name]
        for number, line in enumerate(policy.quotas):
            where = f"{fields.at('quotas')}[{number}]"
            if ("lines", where) in places:
                _exist(places["lines", where], "pools", line.pools, pools, "pool")
        _parent(document, policy, fields)
        _people(document, policy, fields)
    for problem, policy, number in overcommitted(document, sizes):
        fields = places["policies", policy.name]
        line_fields = places.get(("lines", f"{fields.at('quotas')}[{number}]"), fields)
        line_fields.wrong("reserved", problem)


def _exist(fields: Fields, key: str, used: tuple[str, ...], known: list[str], what: str) -> None:
    for name in used:
        if name not in known:
            fields.wrong(key, f"there is no {what} {quote(name)}; {did_you_mean(name, known)}")


def _parent(document: Document, policy: Policy, fields: Fields) -> None:
    if policy.parent is None or not policy.parent:
        return
    if document.policy(policy.parent) is None:
        known = [other.name for other in document.policies if other.name != policy.name]
        fields.wrong("parent", f"there is no policy {quote(policy.parent)}; {did_you_mean(policy.parent, known)}")
        return
    line = [policy.name]
    above = document.policy(policy.parent)
    while above is not None and above.name not in line:
        line.append(above.name)
        above = document.policy(above.parent) if above.parent else None
    if above is not None and above.name == policy.name:
        fields.wrong("parent", f"the parents go round in a circle: {' → '.join([*line, policy.name])}; end it")


def _people(document: Document, policy: Policy, fields: Fields) -> None:
    facts = document.policy_facts[policy.name]
    if facts.groups or facts.users or any(other.parent == policy.name for other in document.policies):
        return
    named = [node for key in ("groups", "users") if (node := fields.node(key)) is not None]
    if not named:
        fields.wrong("groups", "nobody is in this team; name groups of the Hub, or users")
    elif all(node.value == [] for node in named):
        fields.wrong(
            "groups" if fields.has("groups") else "users", "the list is empty; name a group of the Hub or a user"
        )


def overcommitted(document: Document, sizes: Mapping[str, int] | None) -> Iterator[tuple[str, Policy, int]]:
    """Find sets of pools of which more is reserved than exists, with the policy and the line that goes too far."""
    sets = {frozenset(line.pools or _all(document)) for policy in document.policies for line in policy.quotas}
    for pools in sorted(sets | {frozenset(_all(document))}, key=sorted):
        size = _size(document, pools, sizes)
        if size is None:
            continue
        total, parts = 0, []
        for policy in document.policies:
            if policy.parent and document.policy(policy.parent):
                continue
            mine = _reserved(document, policy, pools, frozenset())
            if mine:
                total += mine
                parts.append(f"{policy.label} {gpus(mine)}")
            if mine and total > size:
                named = f"pool {min(pools)}" if len(pools) == 1 else f"pools {', '.join(sorted(pools))}"
                problem = (
                    f"{gpus(total)} are reserved in {named} ({', '.join(parts)}), but there are {gpus(size)}; "
                    f"{'reserve less or add GPUs' if size else NO_GPUS}"
                )
                number = next((n for n, line in enumerate(policy.quotas) if _within(document, line.pools, pools)), 0)
                yield problem, policy, number
                break


def _all(document: Document) -> tuple[str, ...]:
    return tuple(pool.name for pool in document.pools)


def _within(document: Document, named: tuple[str, ...], pools: frozenset[str]) -> bool:
    return frozenset(named or _all(document)) <= pools


def _reserved(document: Document, policy: Policy, pools: frozenset[str], above: frozenset[str]) -> int:
    """Count what a policy and those below it can claim inside these pools: the larger of the two."""
    if policy.name in above:
        return 0
    own = sum(line.reserved for line in policy.quotas if _within(document, line.pools, pools))
    children = (child for child in document.policies if child.parent == policy.name)
    return max(own, sum(_reserved(document, child, pools, above | {policy.name}) for child in children))


def _size(document: Document, pools: frozenset[str], sizes: Mapping[str, int] | None) -> int | None:
    """Tell how many milli-GPUs some pools can have together; None where one's size is not known."""
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
