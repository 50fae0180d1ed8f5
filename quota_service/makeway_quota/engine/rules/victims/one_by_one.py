"""Choose victims one after the other, where there are too many candidates for every set (rule 5.4).

Called for a node (on_node.py) and for a pool (rules/reclaim.py), each with its own trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from ...index.nodes import Allocation, NodeState, WorkerPlacement
from .preemptor import Preemptor
from .sets import SHRINK, WITHDRAW, Victim, Victims, extra_workers, items_of, protection, whole


class Trial(Protocol):
    """The nodes without some victims."""

    booked: bool
    """Whether the victims are subtracted from the usage of their teams, too."""

    def add(self, victim: Victim) -> None:
        """Add a victim, in place of an earlier victim of the same allocation."""

    def remove(self, victim: Victim) -> None:
        """Remove a victim: it is spared."""

    def fits(self) -> bool:
        """Whether the preemptor fits."""

    def surely_needs(self, victim: Victim) -> bool:
        """Whether the preemptor would not fit with a victim kept, as far as that is quick to see."""


def one_by_one(
    preemptor: Preemptor,
    steps: Iterable[Victim],
    trial: Trial,
    may_block: Callable[[Allocation], bool] = lambda _: True,
) -> Victims:
    """Return victims chosen in this order, each if it is legal then, until there is room; none if there never is.

    `may_block`: whether a candidate counts on the limit that is in the way, if any. Needless victims are spared again.
    The chosen victims are left in `trial`.
    """
    chosen: dict[str, Victim] = {}
    counted: list[tuple[Allocation, int]] = []
    fits = False
    for step in steps:
        name = step.allocation.workload.id
        before = chosen.get(name)
        joined = step._replace(gone=(*before.gone, *step.gone)) if before and step.kind == SHRINK else step
        if may_block(step.allocation) and _count(preemptor, joined, before, counted):
            if trial.booked:
                _uncount(preemptor, counted)
            chosen[name] = joined
            trial.add(joined)
            if fits := trial.fits():
                break
    _uncount(preemptor, counted)
    if fits:
        return without_needless(preemptor, tuple(chosen.values()), trial)
    for victim in chosen.values():
        trial.remove(victim)
    return ()


def _count(preemptor: Preemptor, victim: Victim, before: Victim | None, counted: list[tuple[Allocation, int]]) -> bool:
    """Subtract what a victim gives up more than `before` from its team's usage, if that is legal now."""
    done = len(counted)
    amounts = [item.amount for item in items_of(preemptor, victim)]
    if before is not None:
        gone = len(before.allocation.parts) - len(before.kept)
        del amounts[: len(before.gone) if victim.kind == SHRINK else gone]
    for amount in amounts:
        if not preemptor.may_evict_now(victim.allocation):
            _uncount(preemptor, counted, done)
            return False
        preemptor.choose(victim.allocation, amount)
        counted.append((victim.allocation, amount))
    return True


def _uncount(preemptor: Preemptor, counted: list[tuple[Allocation, int]], keep: int = 0) -> None:
    for allocation, amount in counted[keep:]:
        preemptor.choose(allocation, -amount)
    del counted[keep:]


def steps_of(allocation: Allocation, nodes: Sequence[NodeState] | None = None) -> Iterator[Victim]:
    """Return the steps of a candidate: extra workers on these nodes one by one, the last ones first, then all of it."""
    extra = extra_workers(allocation)
    gone: list[WorkerPlacement] = []
    for part in sorted(allocation.parts, key=lambda part: -part.worker) if extra else ():
        here = nodes is None or part.node in nodes
        if here and len(gone) < extra and Victim(allocation, SHRINK, (*gone, part)).kept:
            gone.append(part)
            yield Victim(allocation, SHRINK, (part,))
    yield whole(allocation)


def in_order(preemptor: Preemptor, steps: Iterable[Victim]) -> list[Victim]:
    """Sort steps by kind (withdrawals, shrinks, stops), then by protection."""
    return sorted(steps, key=lambda step: protection(preemptor, step))


def smallest_first(preemptor: Preemptor, steps: Iterable[Victim]) -> list[Victim]:
    """Sort steps by kind and GPUs, then by protection."""
    return sorted(steps, key=lambda step: (step.kind, step.milli_gpus, protection(preemptor, step)))


def orders(preemptor: Preemptor, steps: Iterable[Victim]) -> Iterator[list[Victim]]:
    """Iterate over the orders of steps, each of which is tried where those before find no room.

    The last one withdraws no start of this plan: that may be all which puts others above a reservation.
    """
    ordered = in_order(preemptor, steps)
    yield ordered
    yield smallest_first(preemptor, ordered)
    if ordered and ordered[0].kind == WITHDRAW:
        yield [step for step in ordered if step.kind != WITHDRAW]


def without_needless(preemptor: Preemptor, victims: Victims, trial: Trial) -> Victims:
    """Return the victims without those, and those workers, that the preemptor does not need; most protected first."""
    needed: list[Victim] = []
    for victim in sorted(victims, key=lambda v: protection(preemptor, v), reverse=True):
        gone = victim.gone
        if victim.kind != SHRINK:
            if trial.surely_needs(victim):
                needed.append(victim)
                continue
            trial.remove(victim)
            if not trial.fits():
                trial.add(victim)
                needed.append(victim)
            continue
        for part in sorted(gone, key=lambda p: p.worker):
            fewer = tuple(other for other in gone if other is not part)
            _replace(trial, victim._replace(gone=gone), victim._replace(gone=fewer))
            if trial.fits():
                gone = fewer
            else:
                _replace(trial, victim._replace(gone=fewer), victim._replace(gone=gone))
        if gone:
            needed.append(victim._replace(gone=gone))
    return tuple(needed)


def _replace(trial: Trial, old: Victim, new: Victim) -> None:
    if new.gone:
        trial.add(new)
    else:
        trial.remove(old)
