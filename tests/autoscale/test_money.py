"""The money of a deployment: exact, rounded up, by month, and never less than what was used."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from zoneinfo import ZoneInfo

import pytest
from autoscale.fleet import CLOUD, EURO
from autoscale.fleet import machine as new_machine
from makeway_quota.autoscale.budget import cost, count_money, gpu_cost, month_of, month_used_up, spent_by_month
from makeway_quota.autoscale.deployment import CLUSTER
from makeway_quota.autoscale.machine import Machine, MachineState


def machine(at: float, price: int | None = EURO, state: MachineState = "ready") -> Machine:
    return new_machine(price=price, requested_at=at, state_since=at, state=state)


def test_a_gpu_costs_its_share_of_the_machine_rounded_up() -> None:
    assert gpu_cost(3_100_000, 2) == 1_550_000
    assert gpu_cost(1, 8) == 1
    assert gpu_cost(0, 8) == 0
    assert gpu_cost(3_100_000, 0) is None


def test_a_cost_is_rounded_up_and_exact() -> None:
    assert cost(3_600_000, 1) == 1000
    assert cost(1, 0.001) == 1
    assert cost(EURO, 3600) == EURO
    assert cost(EURO, -5) == 0
    assert cost(999_999_999_999_999, 3600 * 24) == 999_999_999_999_999 * 24


@pytest.mark.parametrize("name", ["UTC", "Europe/Berlin", "America/St_Johns", "Pacific/Kiritimati"])
def test_months_add_up_to_the_whole_time(name: str) -> None:
    zone, random = ZoneInfo(name), Random(1)
    for _ in range(100):
        start = datetime(2026, random.randint(1, 12), random.randint(1, 28), tzinfo=UTC).timestamp()
        end = start + random.randint(0, 100 * 86_400)
        result = spent_by_month(machine(start), end, zone)
        assert cost(EURO, end - start) <= sum(result.values()) <= cost(EURO, end - start) + len(result)
        assert list(result) == sorted(result)


def test_a_machine_of_two_months_counts_in_each_and_what_is_running_as_what_is_closed() -> None:
    start = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
    now = datetime(2026, 12, 1, 6, tzinfo=UTC).timestamp()
    result = spent_by_month(machine(start), now, ZoneInfo("UTC"))
    assert result == {"2026-11": 12 * EURO, "2026-12": 6 * EURO}
    assert count_money(CLOUD, [machine(start)], {"2026-12": EURO}, now).spent_in_month == 7 * EURO
    assert month_of(now, ZoneInfo("America/New_York"))[0] == "2026-12"
    assert month_of(now - 3 * 3600, ZoneInfo("America/New_York"))[0] == "2026-11"


@pytest.mark.parametrize("state", ["requested", "booting", "joining", "ready", "draining", "lost", "terminating"])
def test_every_state_until_the_end_is_committed(state: MachineState) -> None:
    assert count_money(CLOUD, [machine(0, state=state)], {}, 10.0).hourly_cost == EURO


def test_machines_that_are_over_are_not_committed_and_unknown_prices_are_counted() -> None:
    result = count_money(CLOUD, [machine(0, state="gone"), machine(0, state="failed"), machine(0, None)], {}, 10.0)
    assert (result.hourly_cost, result.unpriced_machines) == (0, 1)


def test_a_month_is_used_up_before_it_is_exceeded() -> None:
    limited = replace(CLOUD, monthly_budget=10 * EURO)
    begin = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
    row = machine(begin)
    assert not month_used_up(limited, count_money(limited, [row], {}, begin + 9 * 3600))
    assert month_used_up(limited, count_money(limited, [row], {}, begin + 9.8 * 3600))
    assert count_money(limited, [row], {}, begin + 9.8 * 3600).spent_in_month < 10 * EURO


def test_a_month_on_a_cluster_that_removes_nodes_late_is_used_up_before_it_is_exceeded() -> None:
    """Autoscalers of clusters keep an empty node for a while, up to an hour by the alarm: it is paid for."""
    limited = replace(CLOUD, provider=CLUSTER, monthly_budget=10 * EURO, drain_timeout=300.0)
    begin = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
    row = machine(begin)
    used_up = next(
        at for at in range(0, 36_000, 60) if month_used_up(limited, count_money(limited, [row], {}, begin + at))
    )
    assert count_money(limited, [row], {}, begin + used_up + 300 + 3600).spent_in_month <= 10 * EURO + EURO // 60
