"""Count the money of a deployment: committed for an hour, spent in a month, and what one more machine would add.

All amounts are integers in millionths of the currency, rounded up. A machine counts from the moment it is requested
until it is gone, a spot machine at its `spot_price`. An unknown price is never zero: with a limit, it launches
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

from .deployment import Deployment
from .machine import Machine

HOUR = 3600
MICROS_PER_UNIT = 1_000_000
"""Millionths of the currency in one unit of it"""

MoneyRefusal = Literal["price_unknown", "hour_budget", "month_budget"]


def cost(price: int, seconds: float) -> int:
    """Return what a machine costs for a time, rounded up; `price` is for an hour."""
    whole_ms = max(0, round(seconds * 1000))
    return -(-price * whole_ms // (HOUR * 1000))


def gpu_cost(price: int, gpus: int) -> int | None:
    """Return what one GPU of a machine costs for an hour, rounded up; None for a machine without GPUs."""
    return -(-price // gpus) if gpus else None


def month_of(now: float, zone: ZoneInfo) -> tuple[str, float]:
    """Return the month at a time, such as `2026-11`, and when it began, in Unix seconds."""
    moment = datetime.fromtimestamp(now, zone)
    start = moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0, fold=0)
    return f"{start:%Y-%m}", start.timestamp()


def spent_by_month(machine: Machine, end: float, zone: ZoneInfo) -> dict[str, int]:
    """Return what a machine costs from its request to `end`, by month; nothing where its price is not known."""
    result: dict[str, int] = {}
    at = machine.requested_at
    while machine.price is not None and at < end:
        month, start = month_of(at, zone)
        started = datetime.fromtimestamp(start, zone)
        following = month_of((started + timedelta(days=32)).timestamp(), zone)[1]
        until = min(end, following)
        result[month] = result.get(month, 0) + cost(machine.price, until - at)
        at = until
    return result


@dataclass(frozen=True, slots=True)
class Money:
    """What a deployment has committed and spent at one moment.

    `hourly_cost`: of all machines that are not finished; `ending_cost`: what the machines that are being ended still
    cost until they are gone, as expected; `unpriced_machines`: how many have no known price.
    """

    hourly_cost: int
    spent_in_month: int
    ending_cost: int
    unpriced_machines: int

    @property
    def committed(self) -> int:
        """What this month costs even if every machine is ended now."""
        return self.spent_in_month + self.ending_cost


def count_money(deployment: Deployment, machines: Iterable[Machine], closed: Mapping[str, int], now: float) -> Money:
    """Return the money of a deployment. `closed` has what the machines that are over have cost, by month."""
    zone = ZoneInfo(deployment.timezone)
    month, start = month_of(now, zone)
    hour, ending, unknown, spent = 0, 0, 0, closed.get(month, 0)
    seconds = max_ending_seconds(deployment)
    for machine in machines:
        if machine.finished:
            continue
        if machine.price is None:
            unknown += 1
            continue
        hour += machine.price
        ending += cost(machine.price, seconds)
        spent += cost(machine.price, now - max(start, machine.requested_at))
    return Money(hour, spent, ending, unknown)


def max_ending_seconds(deployment: Deployment) -> float:
    """Return for how long a machine is paid for after it was decided to end it, at the most."""
    return deployment.drain_timeout + deployment.timeouts("").alarm


def refusal(deployment: Deployment, money: Money, price: int | None, seconds: float) -> MoneyRefusal | None:
    """Return why the budget does not allow one more machine that runs for at least `seconds`; None if it does."""
    if not deployment.limited:
        return None
    if price is None or money.unpriced_machines:
        return "price_unknown"
    if deployment.hourly_budget is not None and money.hourly_cost + price > deployment.hourly_budget:
        return "hour_budget"
    over_month = deployment.monthly_budget is not None and (
        money.committed + cost(price, seconds) > deployment.monthly_budget
    )
    if over_month or month_used_up(deployment, money):  # the latter ends even a machine that costs nothing
        return "month_budget"
    return None


def over_the_hour(deployment: Deployment, money: Money, price: int | None) -> MoneyRefusal | None:
    """Return why the budget does not allow a machine that is among the committed ones; None if it does."""
    if deployment.limited and price is None:
        return "price_unknown"
    limit = deployment.hourly_budget
    return "hour_budget" if limit is not None and money.hourly_cost > limit else None


def with_launch(money: Money, price: int | None, seconds: float) -> Money:
    """Return the money with one more machine, which runs for `seconds` at least."""
    if price is None:
        return replace(money, unpriced_machines=money.unpriced_machines + 1)
    ending_cost = money.ending_cost + cost(price, seconds)
    return replace(money, hourly_cost=money.hourly_cost + price, ending_cost=ending_cost)


def month_used_up(deployment: Deployment, money: Money) -> bool:
    """Whether all machines have to be ended now so that the month stays within its limit."""
    return deployment.monthly_budget is not None and money.committed >= deployment.monthly_budget
