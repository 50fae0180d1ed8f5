"""What a request would get of machines: which would be started, when and for how much, or why none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from autoscale.fleet import CLOUD, CPU_TYPE, EURO, GPU_TYPE, START, Fleet, draining, gpu_work
from makeway_quota.autoscale.backoff import backoff_after_failure
from makeway_quota.autoscale.demand import MachineDemand, PendingWork
from makeway_quota.autoscale.prospects import launch_what_if
from makeway_quota.control.machines.machine_offers import with_machines
from makeway_quota.control.machines.machine_reasons import about
from makeway_quota.engine.plan import Demand, Fact, Offer
from makeway_quota.wording import sentence

ONE = replace(GPU_TYPE, zones=("a",), price=3_100_000, max_machines=3)
POOL = replace(CLOUD, types=(ONE,), hourly_budget=None)
BOOTS = {"g2": 180.0}
FULL = Fact("no_free_gpus", {"free": 0, "total": 2, "pool": "gpu", "needs": 2, "kind": "job", "workers": 1, "each": 2})
NONE = Fact("no_free_gpus", {"free": 0, "total": 0, "pool": "gpu", "needs": 2, "kind": "job", "workers": 1, "each": 2})


def offer_of(
    *fleets: Fleet, work: PendingWork | None = None, boots: Mapping[str, float] = BOOTS, fact: Fact = NONE, **more: Any
) -> Offer:
    """Return what a request gets that is added to what waits, with all deployments of its pool."""
    asked, now = work or gpu_work("?"), fleets[0].now if fleets else START
    found = []
    for fleet in fleets:
        ready = frozenset(row.id for row in fleet.rows if row.state == "ready")
        demand = MachineDemand((*fleet.pending, asked), ready, dict(fleet.busy))
        found.append(launch_what_if(fleet.deployment, fleet.store.read("cloud"), demand, boots, now, **more))
    engine = Offer("rnd", "gpu2", "wait", "no_free_gpus", (fact,), demand=(Demand("?", ("gpu",), 1, 2000, 0, 0),))
    result = with_machines(engine, "gpu", found, now)
    assert not result.demand, "thousands of these are kept in memory"
    return result


def words(offer: Offer) -> str:
    return sentence(offer.facts)


@pytest.mark.covers("F54")
def test_a_machine_that_would_be_started_is_offered_with_its_time_and_price() -> None:
    fleet = Fleet(POOL)
    offer = offer_of(fleet)
    assert words(offer) == (
        "A machine of type g2 would be started: ready in about 3 min, about 3.10 EUR/h. "
        "cloud has 0 of at most 3 machines."
    )
    assert (offer.code, offer.reason, offer.seconds) == ("ready_after_launch", "waiting_for_node", 180)
    assert offer.numbers["price"] == 3.1
    assert not fleet.rows, "an offer launches nothing"


def test_what_is_not_known_of_a_machine_is_not_made_up() -> None:
    offer = offer_of(Fleet(replace(POOL, types=(replace(ONE, price=None),))), boots={})
    assert words(offer) == (
        "A machine of type g2 would be started: boot time not known yet. cloud has 0 of at most 3 machines."
    )
    assert (offer.code, offer.seconds) == ("ready_after_launch", None)
    assert "price" not in offer.numbers


def test_a_gang_is_offered_all_of_its_machines() -> None:
    offer = offer_of(Fleet(POOL), work=gpu_work("?", workers=2))
    assert words(offer) == (
        "2 machines of type g2 would be started: ready in about 3 min, about 6.20 EUR/h. "
        "cloud has 0 of at most 3 machines."
    )
    large = replace(ONE, name="g4", gpus=4, price=6 * EURO)
    both = Fleet(replace(POOL, types=(replace(ONE, max_machines=1), large)))
    assert words(offer_of(both, work=gpu_work("?", workers=2), boots=BOOTS | {"g4": 400.0})) == (
        "A machine of type g2 and a machine of type g4 would be started: ready in about 7 min, about 9.10 EUR/h. "
        "cloud has 0 of at most 4 machines."
    )


def test_what_waits_takes_its_machines_before_the_request() -> None:
    fleet = Fleet(replace(POOL, types=(replace(ONE, max_machines=1),)), pending=[gpu_work("job-1")])
    offer = offer_of(fleet)
    assert (offer.code, offer.reason) == ("wait", "no_machine")
    assert words(offer) == (
        "No machine would be started for it: at most 1 machine of type g2 is allowed. cloud has 0 of at most 1 machine."
    )


def test_a_machine_that_boots_already_is_offered_where_it_has_room() -> None:
    fleet = Fleet(POOL, pending=[gpu_work("job-1", gpus=1000)])
    fleet.cycle()
    fleet.now += 60
    assert words(offer_of(fleet, work=gpu_work("?", gpus=1000))) == (
        "A machine that is already booting has room for it: ready in about 2 min, about 3.10 EUR/h. "
        "cloud has 1 of at most 3 machines."
    )
    fleet.now += 200
    late = offer_of(fleet, work=gpu_work("?", gpus=1000))
    begin = "A machine that is already booting has room for it: ready later than usual, about 3.10"
    assert words(late).startswith(begin)
    assert late.seconds is None
    gang = offer_of(fleet, work=gpu_work("?", gpus=1000, workers=3))
    assert words(gang) == (
        "A machine of type g2 would be started, and 1 that exists has room: ready in about 3 min, about 6.20 EUR/h for "
        "both. cloud has 1 of at most 3 machines."
    )
    larger = offer_of(fleet, work=gpu_work("?", gpus=1000, workers=5), boots={})
    assert words(larger).startswith(
        "2 machines of type g2 would be started, and 1 that exists has room: boot time not known yet, about 9.30 EUR/h "
        "for all 3."
    )


def test_a_machine_whose_drain_ends_when_it_is_needed_is_offered_without_a_boot() -> None:
    fleet = draining()
    offer = offer_of(fleet)
    assert words(offer) == (
        "A machine that is ready has room for it, about 3.00 EUR/h. cloud has 1 of at most 5 machines."
    )
    assert (offer.code, offer.seconds) == ("ready_after_launch", None)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"machines": 1, "booting": 0, "ready": 0}, "A machine that is already being launched has room for it: "),
        ({"machines": 2, "booting": 2, "ready": 0}, "2 machines that are already booting have room for it: "),
        ({"machines": 3, "booting": 2, "ready": 1}, "3 machines, 1 of them ready, have room for it: "),
        ({"machines": 2, "booting": 0, "ready": 2}, "2 machines that are ready have room for it. "),
    ],
)
def test_machines_that_exist_are_offered_by_their_states(values: dict[str, int], text: str) -> None:
    counts = {"deployment": "cloud", "all_machines": 3, "limit": 3, "late": False}
    boot = "" if values["ready"] == values["machines"] else "boot time not known yet. "
    told = sentence((Fact("machine_on_its_way", counts | values),))
    assert told == f"{text}{boot}cloud has 3 of at most 3 machines."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paused": True}, "cloud is paused."),
        (
            {"hourly_budget": 3 * EURO},
            "the budget of an hour leaves no room, as 0.00 of 3.00 EUR are taken and a machine of type g2 costs 3.10 "
            "EUR/h.",
        ),
        (
            {"types": (replace(ONE, gpus=1),)},
            "no type of cloud is large enough, as the largest has 1 GPU.",
        ),
        (
            {"types": (replace(ONE, price=None),), "monthly_budget": EURO},
            "cloud has a budget, and the price of a machine is not known.",
        ),
    ],
)
def test_where_no_machine_would_be_started_the_offer_says_why(change: dict[str, Any], message: str) -> None:
    offer = offer_of(Fleet(replace(POOL, **change)))
    assert words(offer) == f"No machine would be started for it: {message} cloud has 0 of at most 3 machines."
    assert (offer.code, offer.reason) == ("wait", "no_machine")


def test_a_deployment_that_is_being_deleted_starts_no_machine_for_a_request() -> None:
    assert words(offer_of(Fleet(POOL), deleting=True)).startswith(
        "No machine would be started for it: cloud is being deleted."
    )


def test_a_type_that_is_out_of_stock_says_when_it_is_tried_again() -> None:
    fleet = Fleet(POOL)
    back = backoff_after_failure((), "g2", "a", "on_demand", "stock_out", fleet.now)
    fleet.store.backoffs = (back,)
    fleet.now += 60
    assert words(offer_of(fleet)) == (
        "No machine would be started for it: the provider is out of machines of type g2. "
        "cloud has 0 of at most 3 machines. The next try is in about 4 min."
    )
    fleet.now = back.until + 1
    assert offer_of(fleet).code == "ready_after_launch"


def test_what_the_nodes_of_today_lack_comes_before_why_no_machine_is_started() -> None:
    text = words(offer_of(Fleet(replace(POOL, paused=True)), fact=FULL))
    assert text.startswith(
        "0 of the 2 GPUs of pool gpu are free; this job needs 2. No machine would be started for it:"
    )


def test_the_deployment_that_starts_a_machine_is_offered_and_none_for_the_pool_is_said() -> None:
    other = Fleet(replace(POOL, name="spare"))
    assert words(offer_of(Fleet(replace(POOL, paused=True)), other)).endswith("spare has 0 of at most 3 machines.")
    without = Fleet(replace(CLOUD, types=(CPU_TYPE,)))
    message = "No machine would be started for it: no deployment launches machines for pool gpu."
    assert [words(offer_of(*fleets)) for fleets in ((), (without,))] == [message, message]


@pytest.mark.parametrize("reverse", [False, True])
def test_of_several_deployments_the_soonest_machine_is_offered_and_then_the_cheapest(reverse: bool) -> None:
    def fleet(type: str, price: int | None) -> Fleet:
        return Fleet(replace(POOL, types=(replace(ONE, name=type, price=price),)))

    def offered(*fleets: Fleet) -> Offer:
        return offer_of(*(fleets[::-1] if reverse else fleets), boots={"fast": 120.0, "even": 120.0, "slow": 400.0})

    slow, fast = fleet("slow", EURO), fleet("fast", 3 * EURO)
    assert words(offered(slow, fast)).startswith("A machine of type fast would be started")
    assert words(offered(fast, fleet("even", 2 * EURO))).startswith("A machine of type even would be started")
    assert words(offered(fast, fleet("even", None))).startswith("A machine of type fast would be started")
    assert words(offered(slow, fleet("unknown", EURO))).startswith("A machine of type slow would be started")


def test_an_estimate_is_rounded_up_as_people_give_it() -> None:
    assert [about(seconds) for seconds in (-5, 0.1, 8, 12, 119, 121, 180, 181)] == [10, 10, 10, 20, 120, 180, 180, 240]


def offered_later(end: dict[str, Any], *, boots: Mapping[str, float] = BOOTS, fleet: Fleet | None = None) -> Offer:
    """Return what a request gets that may evict others once a time is over."""
    fact = Fact("patience", {"wait": 120.0})
    fleet = fleet or Fleet(POOL)
    demand = MachineDemand((gpu_work("?"),))
    code = "protected" if "until" in end else "patience"
    asked = (Demand("?", ("gpu",), 1, 2000, 0, 0),)
    engine = Offer("rnd", "gpu2", "wait", code, (FULL, fact), demand=asked, numbers=end)
    found = launch_what_if(fleet.deployment, fleet.store.read("cloud"), demand, boots, fleet.now)
    return with_machines(engine, "gpu", [found], fleet.now)


@pytest.mark.covers("F54")
@pytest.mark.parametrize("end", [{"reclaim_after": 200.0}, {"until": START + 200}])
def test_an_offer_says_that_no_work_makes_way_where_a_machine_is_ready_in_time(end: dict[str, Any]) -> None:
    offer = offered_later(end)
    assert (offer.code, offer.reason, offer.seconds) == ("ready_after_launch", "waiting_for_node", 180)
    assert words(offer) == (
        "A machine of type g2 would be started: ready in about 3 min, about 3.10 EUR/h. "
        "cloud has 0 of at most 3 machines. No other workload makes way for it unless the machine is late."
    )


@pytest.mark.covers("F54")
@pytest.mark.parametrize("end", [{"reclaim_after": 120.0}, {"until": START + 120}])
@pytest.mark.parametrize("boots", [BOOTS, {}], ids=["too late", "not known"])
def test_an_offer_says_that_others_make_way_before_a_machine_is_ready(
    end: dict[str, Any], boots: dict[str, float]
) -> None:
    offer = offered_later(end, boots=boots)
    assert (offer.code, offer.reason) == ("wait", "protected" if "until" in end else "patience")
    assert words(offer) == (
        "0 of the 2 GPUs of pool gpu are free; this job needs 2. "
        "It waits 2 min for free GPUs before other work makes way for it. "
        f"A machine of type g2 would be started: {'ready in about 3 min' if boots else 'boot time not known yet'}, "
        "about 3.10 EUR/h. cloud has 0 of at most 3 machines."
    )
    assert offer.numbers["price"] == 3.1


@pytest.mark.covers("F54")
def test_a_machine_that_boots_already_may_be_ready_in_time_where_a_new_one_is_not() -> None:
    fleet = Fleet(POOL, pending=[gpu_work("gone")])
    fleet.cycle()
    fleet.now += 100
    assert offered_later({"reclaim_after": 120.0}, fleet=fleet).code == "ready_after_launch"
    fleet.now += 100
    assert offered_later({"reclaim_after": 120.0}, fleet=fleet).code == "wait", "it is later than most"
