"""Find limits that are smaller than what is reserved under them, by the same policy or its children."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..engine.snapshot import QuotaLine, TeamQuota
from ..wording import gpus
from .document import Document

Children = Mapping[str, Sequence[TeamQuota]]


def reservations_above_limits(document: Document) -> Iterator[tuple[str, str, int | None]]:
    """Yield a message for each limit that is smaller than what is reserved under it, with policy and index of the line.

    A limit bounds the usage of a policy and its children in the pools of its line. Reservations whose pools all lie
    within those pools count against it together; one that also covers other pools can be met there, and does not count.
    """
    children: dict[str, list[TeamQuota]] = {}
    for policy in document.policies:
        children.setdefault(policy.parent or "", []).append(policy)
    all_pools = frozenset(pool.name for pool in document.pools)
    for policy in document.policies:
        for line in policy.quotas:
            if line.limit is not None and line.reserved <= line.limit:
                yield from _exceeded(policy, line.limit, _covered(line, all_pools), children, all_pools)


def _exceeded(
    policy: TeamQuota, limit: int, pools: frozenset[str], children: Children, all_pools: frozenset[str]
) -> Iterator[tuple[str, str, int | None]]:
    contributions: list[tuple[TeamQuota, int]] = []
    own = _own_reserved(policy, pools, all_pools)
    if own > limit:
        contributions = [(policy, own)]
    else:
        for child in children.get(policy.name, ()):
            if amount := _reserved_below(child, pools, children, all_pools, frozenset({policy.name})):
                contributions.append((child, amount))
            if sum(entry for _, entry in contributions) > limit:
                break
        else:
            return
    total, last = sum(amount for _, amount in contributions), contributions[-1][0]
    named = ", ".join(f"{entry.label} {gpus(amount)}" for entry, amount in contributions)
    message = (
        f"{gpus(total)} are reserved ({named}), but the limit of {policy.label} for all its work is {gpus(limit)}; "
        "raise that limit or reserve less"
    )
    reserving = (at for at, line in enumerate(last.quotas) if line.reserved and _covered(line, all_pools) <= pools)
    at = next(reserving, None)
    if last is policy:
        amounts = {at: line.reserved for at, line in enumerate(policy.quotas) if _covered(line, all_pools) <= pools}
        at = max(amounts, key=lambda item: amounts[item])
    yield message, last.name, at


def _reserved_below(
    policy: TeamQuota, pools: frozenset[str], children: Children, all_pools: frozenset[str], ancestors: frozenset[str]
) -> int:
    """Return the milli-GPUs that a policy and its children reserve in these pools, at least.

    A policy that is among its `ancestors`, in a circle, counts once.
    """
    if policy.name in ancestors:
        return 0
    path = ancestors | {policy.name}
    below = sum(_reserved_below(child, pools, children, all_pools, path) for child in children.get(policy.name, ()))
    return max(_own_reserved(policy, pools, all_pools), below)


def _own_reserved(policy: TeamQuota, pools: frozenset[str], all_pools: frozenset[str]) -> int:
    """Return what its own lines reserve in these pools: together where they share none, else at least the largest."""
    lines = [(line.reserved, _covered(line, all_pools)) for line in policy.quotas]
    within = [(amount, covered) for amount, covered in lines if amount and covered <= pools]
    amounts = [amount for amount, _ in within]
    disjoint = sum(len(covered) for _, covered in within) == len(frozenset().union(*(covered for _, covered in within)))
    return sum(amounts) if disjoint else max(amounts)


def _covered(line: QuotaLine, all_pools: frozenset[str]) -> frozenset[str]:
    """Return the pools that a quota line covers."""
    return frozenset(line.pools) or all_pools
