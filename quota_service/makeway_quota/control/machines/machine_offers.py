"""Add to an offer of the engine what machines would do for the request: which would be started, or why none.

The words are those of the reasons of work that waits (`machine_reasons`), for work that could be submitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...autoscale.budget import MICROS_PER_UNIT
from ...autoscale.prospects import MachinesStarting, NoLaunch, Prospect, WouldLaunch
from ...engine.plan import Fact, Number, Offer
from .machine_reasons import COMES, NONE_COMES, OWN_END, about, is_in_time, kept, launch_facts


def with_machines(offer: Offer, pool: str, prospects: Sequence[Prospect | WouldLaunch | None], now: float) -> Offer:
    """Return an offer with the machines that are ready soonest, of those the cheapest; without any, that none comes.

    Of equal ones the first in the order of `prospects` counts. What is not known of a machine comes last.
    """
    offer = replace(offer, demand=())
    launches = [one for one in prospects if isinstance(one, WouldLaunch | MachinesStarting)]
    if launches:
        return _with_machine(offer, min(launches, key=lambda one: _rank(one, now)), now)
    none = next((one for one in prospects if isinstance(one, NoLaunch)), None)
    if none is None:
        facts: tuple[Fact, ...] = (Fact("no_deployment_offered", {"pool": pool}),)
        return _without(offer, facts, {"pool": pool})
    values = _counts(none)
    facts = launch_facts(none.causes, values, offered=True)
    if none.retry_at is not None and none.retry_at > now:
        facts = (*facts, Fact("next_launch", {"seconds": about(none.retry_at - now)}))
    return _without(offer, facts, {**values, "causes": tuple(dict.fromkeys(cause.code for cause in none.causes))})


def _seconds(one: WouldLaunch | MachinesStarting, now: float) -> float | None:
    """Return in how many seconds the machines are probably ready, None where that is not known."""
    if isinstance(one, WouldLaunch):
        return one.seconds
    return None if one.ready_at is None else one.ready_at - now


def _rank(one: WouldLaunch | MachinesStarting, now: float) -> tuple[float, float]:
    seconds = _seconds(one, now)
    return math.inf if seconds is None else seconds, math.inf if one.price is None else one.price


def _with_machine(offer: Offer, one: WouldLaunch | MachinesStarting, now: float) -> Offer:
    values, seconds = _counts(one), _seconds(one, now)
    if isinstance(one, WouldLaunch):
        code = "machine_offered"
        values |= {"types": one.types, "existing": one.existing, "machines": len(one.types) + one.existing}
    else:
        code = "machine_on_its_way"
        values |= {"machines": one.machines, "booting": one.booting, "ready": one.ready, "late": one.overdue}
    if seconds is not None:
        values["seconds"] = about(seconds)
    if one.price is not None:
        values |= {"price": one.price / MICROS_PER_UNIT, "currency": one.currency}
    facts: tuple[Fact, ...] = (Fact(code, values),)
    if (end := _others_make_way(offer, now)) is not None:
        if not is_in_time(None if seconds is None else now + seconds, end, values):
            return replace(offer, facts=(*offer.facts, *facts), numbers={**offer.numbers, **values})
        facts = (*facts, Fact("machine_in_time"))
    return replace(
        offer,
        code="ready_after_launch",
        reason=COMES,
        facts=facts,
        seconds=None if seconds is None else about(seconds),
        numbers=values,
    )


def _others_make_way(offer: Offer, now: float) -> float | None:
    """Return when others make way for the request if it is made now; None where they never do."""
    if offer.reason == "patience":
        return now + float(str(offer.numbers["reclaim_after"]))
    return float(str(offer.numbers["until"])) if offer.reason == "protected" else None


def _without(offer: Offer, facts: tuple[Fact, ...], values: dict[str, Number]) -> Offer:
    """Return an offer for which no machine is started: what its pools lack now comes first."""
    if offer.reason in OWN_END:
        return replace(offer, facts=(*offer.facts, *facts))
    return replace(offer, code="wait", reason=NONE_COMES, facts=(*kept(offer.facts), *facts), numbers=values)


def _counts(one: Prospect | WouldLaunch) -> dict[str, Number]:
    count = one.count
    return {"deployment": count.deployment, "all_machines": count.machines, "limit": count.limit}
