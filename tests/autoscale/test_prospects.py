"""What pending work is told of machines: whether one is coming for it, and if none is, why, with the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autoscale.fleet import CLOUD, EURO, GPU_TYPE, START, Fleet, gpu_work
from makeway_quota.autoscale.demand import PendingWork
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.prospects import MachinesStarting, Prospect, WaitingDecision, p90_boot_seconds, prospects
from makeway_quota.autoscale.step import StepResult
from makeway_quota.control.machines.machine_reasons import MachineReasons
from makeway_quota.engine.index.pending import Pending, PendingGroup, PendingReason
from makeway_quota.engine.plan import Demand, Fact, Plan, Waiting
from makeway_quota.engine.snapshot import Workload
from makeway_quota.wording import sentence

ONE = replace(GPU_TYPE, zones=("a",), max_machines=3)
POOL = replace(CLOUD, types=(ONE,), hourly_budget=None)


def told(fleet: Fleet, *, boots: dict[str, float] | None = None, deleting: bool = False) -> dict[str, Prospect]:
    """Return what the pending work of a fleet can expect after a step."""
    return of(fleet, fleet.step(deleting=deleting), boots=boots, deleting=deleting)


def of(
    fleet: Fleet, result: StepResult, *, boots: dict[str, float] | None = None, deleting: bool = False
) -> dict[str, Prospect]:
    assert result.committed
    assert result.served is not None
    decision = WaitingDecision(result.served, result.unserved, result.refusals)
    known = (fleet.deployment, result.machines, decision, result.money, boots or {}, fleet.now)
    return prospects(*known, deleting=deleting)


def fleet_of(deployment: Deployment, *pending: PendingWork) -> Fleet:
    return Fleet(deployment, pending=pending)


def words(found: dict[str, Prospect], job: str = "job-1", pools: tuple[str, ...] = ("gpu",)) -> Waiting:
    """Return the reason of a job that the engine has no room for."""
    fact = Fact("no_free_gpus", {"free": 0, "total": 0, "pool": "gpu", "needs": 2, "kind": "job", "workers": 1})
    plan = planned((job,), PendingReason("no_free_gpus", "place", (fact,), {}), pools)
    [waiting] = MachineReasons().refined(plan, [({"gpu"}, found)]).pending
    return waiting


def planned(jobs: tuple[str, ...], reason: PendingReason, pools: tuple[str, ...] = ("gpu",)) -> Plan:
    members = tuple(Workload(job, "job", "rnd", "ana", "gpu2") for job in jobs)
    demand = tuple(Demand(job, pools, 1, 2000, 0, 0) for job in jobs)
    return Plan(pending=Pending({}, [PendingGroup(7, members, reason)]), demand=demand)


def test_a_machine_that_is_launched_and_boots_is_told_with_its_price_and_when_it_is_ready() -> None:
    fleet = fleet_of(POOL, gpu_work())
    assert sentence(words(of(fleet, fleet.cycle())).facts) == (
        "Waiting for a machine: being launched, about 3.00 EUR/h. cloud has 1 of at most 3 machines."
    )
    fleet.now += 20
    waiting = words(told(fleet, boots={"g2": 180.0}))
    assert waiting.code == "waiting_for_node"
    assert waiting.not_before == START + 180
    assert sentence(waiting.facts) == (
        "Waiting for a machine: booting, about 3.00 EUR/h. cloud has 1 of at most 3 machines."
    )
    fleet.now += 200
    late = words(told(fleet, boots={"g2": 180.0}))
    assert late.not_before is None
    assert "booting for longer than most do, about" in sentence(late.facts)


def test_a_gang_is_told_how_many_of_its_machines_boot_and_what_all_of_them_cost() -> None:
    fleet = fleet_of(POOL, gpu_work(workers=2))
    result = fleet.step()
    first = sorted(result.machines, key=lambda row: row.id)[0]
    machines = tuple(replace(row, state="booting") if row.id == first.id else row for row in result.machines)
    assert sentence(words(of(fleet, replace(result, machines=machines))).facts) == (
        "Waiting for 2 machines: 1 of 2 booting, about 6.00 EUR/h. cloud has 2 of at most 3 machines."
    )


def test_without_a_price_none_is_told() -> None:
    fleet = fleet_of(replace(POOL, types=(replace(ONE, price=None),)), gpu_work())
    assert "EUR" not in sentence(words(told(fleet)).facts)


def test_a_machine_that_failed_is_promised_to_no_work() -> None:
    fleet = fleet_of(POOL, gpu_work())
    result = fleet.step()
    [machine] = result.machines
    for state in ("terminating", "failed", "lost"):
        assert of(fleet, replace(result, machines=(replace(machine, state=state),))) == {}
    waiting = words({})
    assert waiting.code == "waiting_for_node"
    assert sentence(waiting.facts) == "Whether a machine of pool gpu comes for it is decided in a moment."


def test_work_beyond_the_machines_is_told_that_none_is_coming_for_it() -> None:
    """The first three get a machine; the others are not told of those."""
    fleet = fleet_of(POOL, *(gpu_work(f"job-{number}") for number in range(1, 6)))
    result = told(fleet)
    assert [isinstance(result[f"job-{number}"], MachinesStarting) for number in range(1, 6)] == [True] * 3 + [False] * 2
    waiting = words(result, "job-5")
    assert waiting.code == "no_machine"
    assert sentence(waiting.facts) == (
        "No machine is coming for it: at most 3 machines of type g2 are allowed. cloud has 3 of at most 3 machines."
    )


@pytest.mark.parametrize(
    ("deployment", "expected"),
    [
        (replace(POOL, paused=True), "cloud is paused."),
        (replace(POOL, max_machines=0), "at most 0 machines are allowed."),
        (
            replace(POOL, hourly_budget=2 * EURO),
            "the budget of an hour leaves no room, as 0.00 of 2.00 EUR are taken and a machine of type g2 costs "
            "3.00 EUR/h.",
        ),
        (
            replace(POOL, monthly_budget=EURO // 10),
            "the budget of the month leaves no room, as 0.00 of 0.10 EUR are taken and a machine of type g2 costs "
            "3.00 EUR/h.",
        ),
        (
            replace(POOL, hourly_budget=2 * EURO, types=(replace(ONE, price=None),)),
            "cloud has a budget, and the price of a machine is not known.",
        ),
        (
            replace(POOL, types=(replace(ONE, gpus=1),)),
            "no type of cloud is large enough, as the largest has 1 GPU.",
        ),
    ],
)  # fmt: skip
def test_what_forbids_a_launch_is_told_plainly(deployment: Deployment, expected: str) -> None:
    waiting = words(told(fleet_of(deployment, gpu_work())))
    assert (waiting.code, waiting.not_before) == ("no_machine", None)
    maximum = min(deployment.max_machines, 3)
    assert sentence(waiting.facts) == (
        f"No machine is coming for it: {expected} cloud has 0 of at most {maximum} machines."
    )


@pytest.mark.parametrize(
    ("deployment", "workers", "expected"),
    [
        (replace(POOL, max_machines=1), 2, "1 worker only: at most 1 machine is allowed. cloud has 0 of at most 1 m"),
        (POOL, 5, "3 workers only: at most 3 machines of type g2 are allowed. cloud has 0 of at most 3 machines."),
        (
            replace(POOL, hourly_budget=4 * EURO),
            2,
            "1 worker only: the budget of an hour leaves no room, as 0.00 of 4.00 EUR are taken and a machine of type "
            "g2 costs 3.00 EUR/h.",
        ),
    ],
)  # fmt: skip
def test_a_gang_is_told_for_how_many_of_its_workers_one_deployment_could_launch(
    deployment: Deployment, workers: int, expected: str
) -> None:
    """Of two gangs of one shape only the first one is tried; both are told the same."""
    gangs = [gpu_work(f"job-{number}", workers=workers) for number in (1, 2)]
    result = told(fleet_of(deployment, *gangs))
    head = f"No machine is coming for it: the machines for its {workers} workers have to come from one deployment, "
    for job in ("job-1", "job-2"):
        assert sentence(words(result, job).facts).startswith(f"{head}and cloud can launch them for {expected}")


def test_a_gang_of_which_no_worker_gets_a_machine_is_told_of_the_limit_alone() -> None:
    full = told(fleet_of(replace(POOL, max_machines=0), gpu_work(workers=2)))
    assert sentence(words(full).facts).startswith("No machine is coming for it: at most 0 machines are allowed.")


def test_a_deployment_that_is_deleted_is_told_as_such() -> None:
    assert sentence(words(told(fleet_of(POOL, gpu_work()), deleting=True)).facts).startswith(
        "No machine is coming for it: cloud is being deleted."
    )


def test_out_of_stock_is_told_with_the_next_try() -> None:
    fleet = fleet_of(POOL, gpu_work())
    fleet.provider.stock_out = {("big-2", "a", "on_demand")}
    fleet.cycle()
    waiting = words(told(fleet))
    assert waiting.not_before == START + 300
    assert sentence(waiting.facts) == (
        "No machine is coming for it: the provider is out of machines of type g2. cloud has 0 of at most 3 machines."
    )


def test_before_the_deployments_are_known_nothing_is_told_of_them() -> None:
    """After a restart: the reason stays that of a machine, and denies none."""
    plan = planned(("job-1",), PendingReason("no_free_gpus", "place", (), {}))
    [waiting] = MachineReasons().refined(plan, None).pending
    assert waiting.code == "waiting_for_node"
    assert sentence(waiting.facts) == "Whether a machine of pool gpu comes for it is decided in a moment."


def test_a_pool_without_a_deployment_is_told_as_such() -> None:
    waiting = words({}, pools=("other",))
    assert waiting.code == "no_machine"
    assert sentence(waiting.facts) == ("No machine is coming for it: no deployment launches machines for pool other.")


def test_what_its_pools_lack_now_is_told_before_why_no_machine_adds_it() -> None:
    result = told(fleet_of(replace(POOL, paused=True), gpu_work()))
    fact = Fact(
        "no_free_gpus", {"free": 1, "total": 8, "pool": "lab", "needs": 2, "kind": "job", "workers": 1, "each": 2}
    )
    plan = planned(("job-1",), PendingReason("no_free_gpus", "place", (fact,), {}))
    [waiting] = MachineReasons().refined(plan, [({"gpu"}, result)]).pending
    assert sentence(waiting.facts) == (
        "1 of the 8 GPUs of pool lab is free; this job needs 2. "
        "No machine is coming for it: cloud is paused. cloud has 0 of at most 3 machines."
    )


def test_a_plan_that_is_the_same_as_before_has_the_same_groups() -> None:
    """Ten thousand that wait are compared by the object of their group, not one by one."""
    jobs = tuple(f"job-{number}" for number in range(10))
    result = told(fleet_of(replace(POOL, paused=True), *map(gpu_work, jobs)))
    reasons, engine = MachineReasons(), PendingReason("limit", "limit", (), {})
    first = reasons.refined(planned(jobs, engine), [({"gpu"}, result)]).pending
    again = reasons.refined(planned(jobs, engine), [({"gpu"}, dict(result))]).pending
    assert isinstance(first, Pending)
    assert isinstance(again, Pending)
    [one], [two] = first.groups, again.groups
    assert one.members is two.members
    assert one.reason == two.reason


def test_nine_of_ten_boots_end_within_the_usual_time() -> None:
    assert p90_boot_seconds({"a": [10.0, 30.0, 20.0], "b": [], "c": list(range(1, 11))}) == {"a": 30.0, "c": 9}


PATIENT = PendingReason(
    "patience",
    "reclaim_after",
    (
        Fact(
            "no_free_gpus", {"free": 0, "total": 2, "pool": "lab", "needs": 2, "kind": "job", "workers": 1, "each": 2}
        ),
        Fact("patience", {"wait": 120.0}),
    ),
    {"reclaim_after": 120.0},
    patience=120.0,
)
"""of work that may evict others two minutes after it was submitted"""


def patient(fleet: Fleet, boots: dict[str, float], reason: PendingReason = PATIENT) -> Waiting:
    """Return the reason of a job that was submitted at START, as its machine boots."""
    plan = planned(("job-1",), reason)
    [group] = plan.pending.groups  # type: ignore[attr-defined]
    members = tuple(replace(one, submitted_at=START) for one in group.members)
    plan = replace(plan, pending=Pending({}, [group._replace(members=members)]))
    [waiting] = MachineReasons().refined(plan, [({"gpu"}, told(fleet, boots=boots))]).pending
    return waiting


@pytest.fixture
def boots_for_one() -> Fleet:
    fleet = fleet_of(POOL, gpu_work())
    fleet.cycle()
    fleet.now += 20
    return fleet


@pytest.mark.covers("F54")
def test_a_machine_that_is_ready_before_the_patience_ends_is_waited_for(boots_for_one: Fleet) -> None:
    waiting = patient(boots_for_one, {"g2": 110.0})
    assert (waiting.code, waiting.not_before) == ("waiting_for_node", START + 110)
    assert sentence(waiting.facts) == (
        "Waiting for a machine: booting, about 3.00 EUR/h. cloud has 1 of at most 3 machines. "
        "No other workload makes way for it unless the machine is late."
    )


@pytest.mark.covers("F54")
@pytest.mark.parametrize("boot", [300.0, 10.0, None], ids=["later", "late", "not known"])
def test_others_make_way_before_a_machine_that_is_ready_too_late(boots_for_one: Fleet, boot: float | None) -> None:
    waiting = patient(boots_for_one, {} if boot is None else {"g2": boot})
    assert (waiting.code, waiting.rule, waiting.not_before) == ("patience", "reclaim_after", START + 120)
    state = {
        300.0: "booting, ready about 3 min after others make way",
        10.0: "booting for longer than most do",
        None: "booting",
    }[boot]
    assert sentence(waiting.facts) == (
        "0 of the 2 GPUs of pool lab are free; this job needs 2. "
        "It waits 2 min for free GPUs before other work makes way for it. "
        f"Waiting for a machine: {state}, about 3.00 EUR/h. cloud has 1 of at most 3 machines."
    )
    assert waiting.numbers["machines"] == 1


@pytest.mark.covers("F54")
def test_the_end_of_a_protection_counts_as_that_of_patience(boots_for_one: Fleet) -> None:
    victim = {"victim": "v", "team": "b", "kind": "job", "owner": "bob", "gpus": 2, "min_runtime": 600.0, "others": 0}
    protected = replace(PATIENT, code="protected", rule="min_runtime", not_before=START + 200, patience=0.0)
    protected = replace(protected, facts=(Fact("protected", victim),))
    assert patient(boots_for_one, {"g2": 180.0}, protected).code == "waiting_for_node"
    waiting = patient(boots_for_one, {"g2": 230.0}, protected)
    assert (waiting.code, waiting.not_before) == ("protected", START + 200)
    assert "booting, ready about 30 s after others make way" in sentence(waiting.facts)
