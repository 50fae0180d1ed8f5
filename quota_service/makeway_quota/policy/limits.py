"""Find reservations that a limit never lets run, of the same policy or of a department above."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..engine.snapshot import Policy, QuotaLine
from ..wording import gpus
from .document import Document

Children = Mapping[str, Sequence[Policy]]


def above_limits(document: Document) -> Iterator[tuple[str, str, int | None]]:
    """Yield a message for each limit with more reserved below it, and the policy and line that exceed it.

    A limit holds for all work of a policy and its children in the pools of the line, so
    that what is reserved in some of these pools only, by all of them together, can never all run. A line of more
    pools than the limit can have its GPUs elsewhere.
    """
    children: dict[str, list[Policy]] = {}
    for policy in document.policies:
        children.setdefault(policy.parent or "", []).append(policy)
    every = frozenset(pool.name for pool in document.pools)
    for policy in document.policies:
        for line in policy.quotas:
            if line.limit is not None and line.reserved <= line.limit:
                yield from _above(policy, line.limit, _covered(line, every), children, every)


def _above(
    policy: Policy, limit: int, pools: frozenset[str], children: Children, every: frozenset[str]
) -> Iterator[tuple[str, str, int | None]]:
    parts: list[tuple[Policy, int]] = []
    own = _own(policy, pools, every)
    if own > limit:
        parts = [(policy, own)]
    else:
        for child in children.get(policy.name, ()):
            if amount := _needed(child, pools, children, every, frozenset({policy.name})):
                parts.append((child, amount))
            if sum(each for _, each in parts) > limit:
                break
        else:
            return
    total, last = sum(amount for _, amount in parts), parts[-1][0]
    named = ", ".join(f"{each.label} {gpus(amount)}" for each, amount in parts)
    message = (
        f"{gpus(total)} are reserved ({named}), but the limit of {policy.label} for all its work is {gpus(limit)}; "
        "raise that limit or reserve less"
    )
    reserving = (at for at, line in enumerate(last.quotas) if line.reserved and _covered(line, every) <= pools)
    at = next(reserving, None)
    if last is policy:
        amounts = {at: line.reserved for at, line in enumerate(policy.quotas) if _covered(line, every) <= pools}
        at = max(amounts, key=lambda item: amounts[item])
    yield message, last.name, at


def _needed(
    policy: Policy, pools: frozenset[str], children: Children, every: frozenset[str], above: frozenset[str]
) -> int:
    """Return the fewest milli-GPUs in some pools with which a policy and its children have all they reserve there.

    A policy that is among those `above` it, in a circle, counts once.
    """
    if policy.name in above:
        return 0
    line = above | {policy.name}
    below = sum(_needed(child, pools, children, every, line) for child in children.get(policy.name, ()))
    return max(_own(policy, pools, every), below)


def _own(policy: Policy, pools: frozenset[str], every: frozenset[str]) -> int:
    """Return what its own lines reserve in these pools: together where they share none, else at least the largest."""
    lines = [(line.reserved, _covered(line, every)) for line in policy.quotas]
    within = [(amount, covered) for amount, covered in lines if amount and covered <= pools]
    amounts = [amount for amount, _ in within]
    apart = sum(len(covered) for _, covered in within) == len(frozenset().union(*(covered for _, covered in within)))
    return sum(amounts) if apart else max(amounts)


def _covered(line: QuotaLine, every: frozenset[str]) -> frozenset[str]:
    """Return the pools that a quota line covers."""
    return frozenset(line.pools) or every
