"""Failed calls and unknown prices hold back launches, and only those that they have to do with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autoscale.fleet import CLOUD, EURO, GPU_TYPE, Fleet, gpu_work
from makeway_quota.autoscale.instances import Instance
from makeway_quota.autoscale.provider import CallOutcomeUnknown, Denied, ProviderError
from makeway_quota.autoscale.step import ProviderCall, answer


@pytest.mark.parametrize(("error", "held_back"), [(CallOutcomeUnknown("no answer"), []), (Denied("no"), ["denied"])])
def test_an_end_without_an_answer_holds_back_no_launch(error: ProviderError, held_back: list[str]) -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    row = fleet.rows[0]
    call = ProviderCall("terminate", row, row.instance or "")
    answer(fleet.store, fleet.deployment, [(call, fleet.now, error)], fleet.store.term, fleet.now)
    assert [one.failure for one in fleet.store.backoffs] == held_back


def test_a_launch_that_answers_with_an_instance_that_has_ended_boots_nothing() -> None:
    fleet = Fleet(pending=[gpu_work()])
    (call,) = fleet.step().calls
    ended = Instance("i-1", fleet.rows[0].id, "cloud", "terminated")
    answer(fleet.store, fleet.deployment, [(call, fleet.now, ended)], fleet.store.term, fleet.now)
    assert [(row.state, row.reason) for row in fleet.store.all_machines().values()] == [("gone", "ended_by_provider")]


def test_with_a_limit_nothing_is_launched_beside_a_machine_without_a_price() -> None:
    fleet = Fleet(replace(CLOUD, types=(replace(GPU_TYPE, price=None),), hourly_budget=None), pending=[gpu_work("a")])
    fleet.cycle()
    fleet.deployment = replace(CLOUD, hourly_budget=30 * EURO)
    fleet.pending = [gpu_work("a"), gpu_work("b")]
    assert {one.code for one in fleet.cycle().refusals} == {"price_unknown"}
    assert fleet.running == 1
