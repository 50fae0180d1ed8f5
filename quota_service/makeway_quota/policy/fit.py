"""Make a document fit the machine that is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..engine.state import GPU, Policy, QuotaLine
from .check import overcommitted
from .document import Document


def sold_out(document: Document, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Say in sentences where more is reserved than there is now, as after a node was lost."""
    return tuple(problem for problem, _, _ in overcommitted(document, sizes))


def fit(document: Document, sizes: Mapping[str, int]) -> Document:
    """Scale reservations and limits to the pools' real sizes; for the sample that a first start begins with.

    Only pools whose document gives a `size` are scaled. Reservations become whole GPUs, and add up to no more than
    before (what rounding leaves goes to the teams named first); limits never fall below 1 or below the reservation.
    """
    factors = {
        name: sizes[name] * GPU / facts.size
        for name, facts in document.pool_facts.items()
        if facts.size and name in sizes and sizes[name] * GPU != facts.size
    }
    if not factors:
        return document
    facts = {
        name: replace(facts, size=sizes[name] * GPU) if name in factors else facts
        for name, facts in document.pool_facts.items()
    }

    totals: dict[tuple[str, ...], list[float]] = {}

    def line(old: QuotaLine) -> QuotaLine:
        pools = old.pools or tuple(pool.name for pool in document.pools)
        factor = min(factors.get(pool, 1.0) for pool in pools) if pools else 1.0
        before, given = totals.setdefault(pools, [0.0, 0.0])
        wanted = before + old.reserved * factor
        everybody = factor * sum(q.reserved for p in document.policies for q in p.quotas if q.pools == old.pools)
        reserved = int(min(_up(wanted), _down(everybody)) - given)
        totals[pools] = [wanted, given + reserved]
        limit = None if old.limit is None else max(_down(old.limit * factor), reserved, GPU)
        return replace(old, reserved=reserved, limit=limit, lend=None if old.lend is None else min(old.lend, reserved))

    def policy(old: Policy) -> Policy:
        return replace(old, quotas=tuple(line(quota) for quota in old.quotas))

    return replace(document, policies=tuple(policy(old) for old in document.policies), pool_facts=facts)


def _down(milli: float) -> int:
    return int(milli + 1e-6) // GPU * GPU


def _up(milli: float) -> int:
    return -(-int(milli + 1e-6) // GPU) * GPU
