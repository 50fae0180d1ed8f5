"""Scale a document to the real sizes of its pools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..engine.snapshot import GPU, QuotaLine, TeamQuota, from_milli
from .check import overcommitted
from .document import Document
from .issues import Loc
from .read import Sizes, read_policy
from .source import parse
from .write import write_policy


def overcommitments(document: Document, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return a sentence for each set of pools with more reserved than exists now, as after the loss of a node."""
    return tuple(problem for problem, _, _ in overcommitted(document, sizes))


def rescale(document: Document, sizes: Mapping[str, int]) -> Document:
    """Scale reservations and limits to the pools' real sizes; for the sample that a first start begins with.

    Only pools whose document gives a `size` are scaled. Reservations become whole GPUs, and add up to no more than
    before (the teams named first get what rounding leaves over); limits never fall below 1 or below the reservation.
    A document that cannot be scaled like this, because of capacities or departments, is returned as it is.
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
    for share_out in (True, False):
        scaled = replace(document, policies=_scaled(document, factors, share_out), pool_facts=facts)
        if not any(overcommitted(scaled, None)):
            return scaled
    return document


def _scaled(document: Document, factors: Mapping[str, float], share_out: bool) -> tuple[TeamQuota, ...]:
    """Scale every quota line. `share_out`: round up while the sum over all teams allows it, else always down."""
    wanted: dict[tuple[str, ...], float] = {}
    given: dict[tuple[str, ...], int] = {}
    sums: dict[tuple[str, ...], float] = {}
    every = tuple(pool.name for pool in document.pools)

    def factor(line: QuotaLine) -> float:
        return min((factors.get(pool, 1.0) for pool in line.pools or every), default=1.0)

    for line in (line for policy in document.policies for line in policy.quotas):
        sums[line.pools] = sums.get(line.pools, 0.0) + line.reserved * factor(line)

    def scale(line: QuotaLine) -> QuotaLine:
        reserved = _down(line.reserved * factor(line))
        if share_out:
            wanted[line.pools] = wanted.get(line.pools, 0.0) + line.reserved * factor(line)
            reserved = min(_up(wanted[line.pools]), _down(sums[line.pools])) - given.get(line.pools, 0)
            given[line.pools] = given.get(line.pools, 0) + reserved
        limit = None if line.limit is None else max(_down(line.limit * factor(line)), reserved, GPU)
        lend = None if line.lend is None else min(line.lend, reserved)
        return replace(line, reserved=reserved, limit=limit, lend=lend)

    return tuple(replace(policy, quotas=tuple(map(scale, policy.quotas))) for policy in document.policies)


def rescale_text(text: str, file: str, sizes: Sizes) -> str:
    """Return a document scaled as by `rescale`, with its comments; PolicyInvalid if it cannot be read.

    The numbers are replaced in the text. Where that does not give the scaled document, the whole
    document is written again, without its comments.
    """
    document = read_policy(text, file)
    rescaled = rescale(document, sizes(document) if callable(sizes) else sizes)
    if rescaled is document:
        return text
    source = parse(text)
    amounts = [(loc, str(from_milli(milli))) for loc, milli in _amounts(rescaled)]
    spots = [(node, amount) for loc, amount in amounts if (node := source.node(loc)) is not None]
    changed = text.removeprefix("\ufeff")
    for node, amount in sorted(spots, key=lambda spot: spot[0].start_mark.index, reverse=True):
        if node.value != amount:
            changed = changed[: node.start_mark.index] + amount + changed[node.end_mark.index :]
    return changed if read_policy(changed, file) == rescaled else write_policy(rescaled)


def _amounts(rescaled: Document) -> Iterator[tuple[Loc, int]]:
    """Yield the places of sizes, reservations and limits, and the amounts of `rescaled`."""
    for at, pool in enumerate(rescaled.pools):
        if (size := rescaled.pool_facts[pool.name].size) is not None:
            yield ("pools", at, "size"), size
    for at, policy in enumerate(rescaled.policies):
        for line_at, line in enumerate(policy.quotas):
            for key in ("reserved", "limit", "lend"):
                if (milli := getattr(line, key)) is not None:
                    yield ("policies", at, "quotas", line_at, key), milli


def _down(milli: float) -> int:
    return int(milli + 1e-6) // GPU * GPU


def _up(milli: float) -> int:
    return -(-int(milli + 1e-6) // GPU) * GPU
