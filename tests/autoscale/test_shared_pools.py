"""Sizing a deployment beside another one for the same pools: its machines count, launches are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from autoscale.fleet import CLOUD, EURO, GPU_TYPE, START, gpu_work, machine
from makeway_quota.autoscale.budget import Money
from makeway_quota.autoscale.demand import MachineDemand, PendingWork, PlacedWork
from makeway_quota.autoscale.deployment import CLUSTER, Deployment
from makeway_quota.autoscale.machine import Machine, MachineEvent
from makeway_quota.autoscale.placement.shared_pools import OtherDeployment
from makeway_quota.autoscale.sizing import Sizing, size
from makeway_quota.autoscale.transitions import apply_event

ONE = replace(GPU_TYPE, zones=("a",))
OWN, OTHER = (
    replace(CLOUD, types=(ONE,), hourly_budget=None),
    replace(CLOUD, name="other", types=(ONE,), hourly_budget=None),
)


def theirs(id: str = "o-1", **fields: Any) -> Machine:
    return machine(**{"id": id, "deployment": "other", "state": "booting"} | fields)


def sized(
    pending: Sequence[PendingWork],
    *others: Machine,
    own: Sequence[Machine] = (),
    deployment: Deployment = OWN,
    other: Deployment = OTHER,
    **demand: Any,
) -> Sizing:
    beside = OtherDeployment(other, others, {"g2": 180.0})
    known = MachineDemand(tuple(pending), **demand)
    return size(deployment, own, known, (), Money(0, 0, 0, 0), START + 10, None, (beside,))


@pytest.mark.covers("F49")
def test_both_deployments_count_the_same_machines_for_the_same_work() -> None:
    work = [gpu_work("a"), gpu_work("b"), gpu_work("c")]
    mine = [machine(state="requested")]
    first = sized(work, theirs(), own=mine)
    second = size(
        OTHER, [theirs()], MachineDemand(tuple(work)), (), Money(0, 0, 0, 0), START + 10, None,
        (OtherDeployment(OWN, tuple(mine)),),
    )  # fmt: skip
    assert (first.served["a"], first.served["b"]) == (second.served["a"], second.served["b"]) == (("o-1",), ("m-1",))
    assert (first.needed, second.needed) == ({"m-1"}, {"o-1"})
    assert len(first.launches) == len(second.launches) == 1


@pytest.mark.parametrize(
    "gone",
    [
        {"state": "terminating"},
        {"requested_at": START - 1320},
        {"state": "draining", "drain": "pause", "deadline": START + 300},
        {"type": "removed"},
    ],
)
def test_a_machine_that_will_not_be_there_is_not_waited_for(gone: dict[str, Any]) -> None:
    assert len(sized([gpu_work()], theirs(**gone)).launches) == 1
    assert not sized([gpu_work()], theirs()).launches


def test_a_machine_counts_until_its_row_is_ended_as_late() -> None:
    """It is ended `spin_up_timeout` after its launch, which may have come up to `request_timeout` after its request."""
    boots = theirs(requested_at=START - 1300, launched_at=START - 1185)
    assert not sized([gpu_work()], boots).launches
    timeouts = OTHER.timeouts("g2")
    assert apply_event(boots, MachineEvent("tick", at=START - 5000), START + 10, timeouts) is boots
    assert apply_event(boots, MachineEvent("tick", at=START - 5000), START + 20, timeouts).state == "terminating"


def test_an_idle_machine_that_drains_counts_but_where_a_cycle_could_start_work_there() -> None:
    drains = theirs(state="draining", drain="idle")
    nodes = frozenset({"o-1"})
    assert not sized([gpu_work()], drains, nodes=nodes).launches
    assert len(sized([gpu_work()], drains, nodes=nodes, accepting_machines=nodes).launches) == 1


def test_machines_of_another_deployment_are_no_spare_ones() -> None:
    spare = replace(OWN, types=(replace(ONE, min_idle=1),))
    assert len(sized([], theirs(), deployment=spare).launches) == 1


def test_no_machine_is_launched_where_room_of_the_other_deployment_is_certain_to_be_free_before() -> None:
    runs = PlacedWork("runs", "o-1", (0, 1), 1000, ends_at=START + 60)
    ready = theirs(state="ready")
    held = sized(
        [gpu_work()], ready, nodes=frozenset({"o-1"}), busy={"o-1": 1}, placed=(runs,), submitted={"job-1": START}
    )
    assert not held.launches
    assert [one.code for one in held.refusals] == ["soon_free"]


def test_a_notebook_waits_for_no_machine_that_runs_none() -> None:
    cluster = replace(OWN, provider=CLUSTER)
    notebook = gpu_work("notebook", session=True)
    assert len(sized([notebook], theirs(), deployment=cluster).launches) == 1
    launched = sized([notebook, gpu_work("job")], theirs(), deployment=cluster)
    assert (launched.served["job"], len(launched.launches)) == (("o-1",), 1)


def test_a_notebook_takes_its_room_on_the_other_deployment_before_jobs_that_come_later() -> None:
    nodes = replace(OTHER, provider=CLUSTER)
    notebook = gpu_work("notebook", session=True)
    both = sized([notebook, gpu_work("job")], theirs(), other=nodes)
    assert both.served["notebook"] == ("o-1",)
    assert len(both.launches) == 1
    assert both.unserved == ()
    assert sized([notebook], other=nodes).unserved == (), "it is not for this deployment"


def test_deployments_of_one_pool_are_in_the_order_of_priority_price_of_a_gpu_and_name() -> None:
    def made(name: str, price: int | None, gpus: int = 2, **fields: Any) -> Deployment:
        return replace(OWN, name=name, types=(replace(ONE, price=price, gpus=gpus),), **fields)

    wanted = [
        made("e", None, priority=1),
        made("d", 5 * EURO, gpus=8),
        made("b", 2 * EURO),
        made("c", 2 * EURO),
        made("a", None),
    ]
    wanted.reverse()
    assert [one.name for one in sorted(wanted, key=lambda one: one.preference)] == [*"edbca"]
