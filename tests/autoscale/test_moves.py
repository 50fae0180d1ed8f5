"""Jobs are moved to other machines, so that the least used one is given back, where that pays and nothing waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from autoscale.fleet import CLOUD, GPU_TYPE, START, Fleet, gpu_work
from makeway_quota.autoscale.demand import PlacedWork
from makeway_quota.autoscale.deployment import MoveRules
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Observation, Phase
from makeway_quota.control.machines.cycle_demand import JobFacts, cycle_demand
from makeway_quota.control.machines.machine_notices import MARGIN, moving, notices
from makeway_quota.control.machines.move_checks import MoveCheck, drain_candidates, restartable
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.world.clock_steps import ClockSteps
from makeway_quota.control.world.corrected_times import CorrectedTimes
from makeway_quota.control.world.engine_view import as_workload
from makeway_quota.engine.restarts import Restarts
from makeway_quota.engine.snapshot import GPU, Node, Pool, Profile, QuotaLine, Snapshot, TeamQuota
from makeway_quota.simulate.planner import placed
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import changed, initial_record
from makeway_quota.values import Notice, Place

RULES = MoveRules(interval=3600.0, free_gpus=0, max_jobs=2)
FOUR = replace(GPU_TYPE, gpus=4, zones=("a",), price=3_000_000, idle_timeout=600.0)
POOL = replace(CLOUD, types=(FOUR,), hourly_budget=None, moves=RULES)
HOUR = 3600.0


def job(name: str, machine: str, *devices: int, **fields: Any) -> PlacedWork:
    made = PlacedWork(name, machine, devices, 1000, 1000, 1024, attempt_started_at=START - 10 * HOUR, movable=True)
    return made._replace(**fields)


def shared(rules: MoveRules | None = RULES, *, most: int = 1) -> Fleet:
    """Return a fleet with two machines of four GPUs: one job of one GPU on the first, two on the second."""
    fleet = Fleet(replace(POOL, moves=rules), pending=[gpu_work("a", gpus=4000), gpu_work("b", gpus=4000)])
    fleet.cycle()
    fleet.boot()
    fleet.pending = []
    first, second = (row.id for row in fleet.rows)
    fleet.placed = [job("small", first, 0), job("one", second, 0), job("two", second, 1)]
    fleet.busy = {first: 1, second: 2}
    fleet.moved_at = START - 2 * HOUR
    fleet.cycle()
    return fleet


def moved(fleet: Fleet) -> list[str]:
    """Return the machines that are being emptied."""
    return [row.id for row in fleet.rows if row.drain == "move"]


def again(fleet: Fleet, **fields: Any) -> list[str]:
    """Return what is emptied of a fleet as it was before, with other jobs, or at another time."""
    for row in fleet.rows:
        fleet.store.rows[row.id] = row.with_fields(state="ready", drain=None, reason="ready")
    for name, value in fields.items():
        setattr(fleet, name, value)
    fleet.hear()
    fleet.cycle()
    return moved(fleet)


def test_the_least_used_machine_is_emptied_if_its_jobs_fit_elsewhere() -> None:
    fleet = shared()
    assert moved(fleet) == [fleet.rows[0].id]
    assert fleet.rows[0].state == "draining"
    assert fleet.rows[0].deadline is None


def test_nothing_moves_without_the_rule() -> None:
    assert moved(shared(None)) == []


def test_nothing_moves_again_before_its_time_nor_by_a_leader_that_does_not_know_of_the_last_move() -> None:
    fleet = shared()
    assert again(fleet, moved_at=fleet.now - HOUR + 1) == []
    assert again(fleet, moved_at=None) == []
    assert again(fleet, moved_at=fleet.now + 50) == [], "the clock was set back"
    assert again(fleet, moved_at=fleet.now - HOUR) == [fleet.rows[0].id]


@pytest.mark.parametrize(
    "change",
    [
        {"movable": False},
        {"attempt_started_at": START - HOUR + 100},
        {"notice": "preempt_test"},
    ],
    ids=["a session, a gang, or work that is not preemptible", "a young job", "a job that makes way"],
)
def test_some_jobs_never_move(change: dict[str, Any]) -> None:
    fleet = shared()
    placed = [fleet.placed[0]._replace(**change), *[one._replace(movable=False) for one in fleet.placed[1:]]]
    assert again(fleet, placed=placed) == []


def test_no_more_jobs_move_at_once_than_allowed() -> None:
    fleet = shared()
    first, second = (row.id for row in fleet.rows)
    three = [job(f"s{n}", first, 0, milli_gpus=100) for n in range(3)]
    large = [job("x", second, 0), job("y", second, 1)]
    assert again(fleet, placed=[*three, *large]) == [second], "the one with two jobs, though it is used more"
    fleet.deployment = replace(POOL, moves=replace(RULES, max_jobs=1))
    assert again(fleet) == []


def test_headroom_stays_free_on_the_machines_that_work() -> None:
    fleet = shared()
    for headroom, expected in ((1, 1), (2, 0)):
        fleet.deployment = replace(POOL, moves=replace(RULES, free_gpus=headroom))
        assert len(again(fleet)) == expected, f"one GPU is left with the jobs on one machine, {headroom} are wanted"


def test_nothing_moves_while_work_waits_or_a_machine_boots() -> None:
    fleet = shared()
    assert again(fleet, pending=[gpu_work("wide", gpus=9000)]) == []
    fleet.pending = []
    fleet.store.rows["m-9"] = replace(fleet.rows[0], id="m-9", state="booting", instance="i-9")
    fleet.nominated = frozenset({"m-9"})
    assert again(fleet) != []  # `again` made it ready
    fleet.store.rows["m-9"] = replace(fleet.store.rows["m-9"], state="booting", drain=None)
    fleet.store.rows[fleet.rows[0].id] = fleet.rows[0].with_fields(state="ready", drain=None)
    fleet.cycle()
    assert moved(fleet) == []


def test_jobs_are_not_moved_onto_a_machine_without_work_or_of_another_model_or_that_is_too_small() -> None:
    fleet = shared()
    first, second = (row.id for row in fleet.rows)
    assert again(fleet, placed=[fleet.placed[0]], busy={first: 1}) == [], "an idle machine ends by itself"
    full = [job(f"full-{n}", second, n) for n in range(4)]
    assert again(fleet, placed=[job("small", first, 0), *full], busy={first: 1, second: 4}) == []
    much = job("small", first, 0, memory=FOUR.memory - 1000)
    assert again(fleet, placed=[much, job("one", second, 0)]) == []
    other = replace(FOUR, name="other", model="B")
    fleet.deployment = replace(POOL, types=(replace(FOUR, model="A"), other))
    fleet.store.rows[second] = fleet.store.rows[second].with_fields(type="other")
    assert again(fleet, placed=[job("small", first, 0), job("one", second, 0)]) == []


def test_a_move_has_to_pay() -> None:
    fleet = shared()
    short = fleet.placed[0]._replace(remaining_seconds=0.0, lost_seconds=0.0, milli_gpus=1000)
    third = [job("one", fleet.rows[1].id, 0)]
    assert again(fleet, placed=[short, *third]) != [], "the machine would idle for ten minutes yet"
    dear = short._replace(lost_seconds=4 * 600.0)
    assert again(fleet, placed=[dear, *[one._replace(lost_seconds=9e9) for one in third]]) == []
    long = dear._replace(remaining_seconds=600.0)
    assert again(fleet, placed=[long, *[one._replace(lost_seconds=9e9) for one in third]]) != []


def test_an_unknown_size_holds_no_job_without_gpus() -> None:
    fleet = shared()
    fleet.deployment = replace(POOL, types=(replace(FOUR, cpu=0),))
    first, second = (row.id for row in fleet.rows)
    jobs = [job("small", first, milli_gpus=0), job("one", second, milli_gpus=0)]
    assert again(fleet, placed=jobs) == []
    fleet.sizes = {first: (8000, 65_536), second: (8000, 65_536)}
    assert again(fleet) == [first]


def test_demand_that_comes_back_before_the_notices_ends_the_drain() -> None:
    """A job was submitted between the decision and the drain."""
    fleet = shared()
    machine = fleet.rows[0].id
    fleet.now += 2
    fleet.pending = [gpu_work("new", gpus=3000)]
    fleet.cycle()
    assert fleet.store.rows[machine].state == "ready"
    assert fleet.provider.launches == 2, "and nothing is launched for it"


def test_a_drain_ends_where_the_jobs_do_not_fit_elsewhere_any_more() -> None:
    fleet = shared()
    machine, other = fleet.rows[0].id, fleet.rows[1].id
    fleet.now += 2
    fleet.placed = [fleet.placed[0], *[job(f"new-{n}", other, n) for n in range(4)]]
    fleet.cycle()
    assert fleet.store.rows[machine].state == "ready"


def test_after_the_notices_the_drain_goes_on_and_the_machine_is_ended_when_all_have_left() -> None:
    fleet = shared()
    machine = fleet.rows[0].id
    fleet.placed = [fleet.placed[0]._replace(notice="give_back", movable=False), *fleet.placed[1:]]
    fleet.pending = [gpu_work("new", gpus=4000)]
    fleet.run(30)
    assert fleet.store.rows[machine].state == "draining", "its job has saved, and goes on elsewhere"
    fleet.pending = []
    fleet.placed, fleet.busy = fleet.placed[1:], {fleet.rows[1].id: 3}
    fleet.run(60)
    assert machine not in fleet.store.rows or fleet.store.rows[machine].state == "terminating"


def test_a_machine_that_has_jobs_yet_is_not_ended_by_an_old_report() -> None:
    fleet = shared()
    machine = fleet.rows[0]
    fleet.placed = [fleet.placed[0]._replace(notice="give_back", movable=False), *fleet.placed[1:]]
    fleet.run(60)
    fleet.report(machine.id, "heard", at=fleet.now - 20, boot=machine.boot or "", attempts=0)
    fleet.busy, fleet.placed = {fleet.rows[1].id: 2}, fleet.placed[1:]
    fleet.cycle()
    assert fleet.store.rows[machine.id].state == "draining", "the report is from before its last use"


def test_nothing_moves_that_the_engine_would_not_start_elsewhere() -> None:
    fleet = shared()
    first = fleet.rows[0].id
    assert again(fleet, restartable=frozenset()) == []
    assert again(fleet, restartable=frozenset({first})) == [first]
    fleet.restartable = frozenset()
    fleet.now += 2
    fleet.cycle()
    assert fleet.store.rows[first].state == "ready", "before the notices, it is asked again"


def test_jobs_are_not_moved_onto_machines_that_take_none_or_whose_gpus_are_broken() -> None:
    fleet = shared()
    first, second = (row.id for row in fleet.rows)
    whole = dict.fromkeys(range(4), 1000)
    others = [job("one", second, 0, movable=False)]
    assert again(fleet, placed=[fleet.placed[0], *others], devices={first: whole, second: whole}) == [first]
    assert again(fleet, devices={first: whole}) == []
    assert again(fleet, devices={first: whole, second: {0: 1000}}) == []


def test_a_job_with_several_workers_moves_whole_and_counts_once() -> None:
    fleet = Fleet(
        replace(POOL, moves=replace(RULES, max_jobs=1)), pending=[gpu_work(name, gpus=4000) for name in "abc"]
    )
    fleet.cycle()
    fleet.boot()
    fleet.pending, fleet.moved_at = [], START - 2 * HOUR
    a, b, c = (row.id for row in fleet.rows)
    two = [job("two", a, 0), job("two", a, 1)]
    full = [[job(f"{m}{n}", m, n, movable=False) for n in range(4)] for m in (b, c)]
    busy = {a: 1, b: 3, c: 3}
    assert again(fleet, placed=[*two, *full[0][:3], *full[1][:3]], busy=busy) == [], "one GPU is free on each"
    assert again(fleet, placed=[*two, *full[0][:2], *full[1]]) == [a]


def test_a_job_that_has_not_saved_for_longer_than_moves_are_apart_stays() -> None:
    fleet = shared()
    others = [one._replace(movable=False) for one in fleet.placed[1:]]
    assert again(fleet, placed=[fleet.placed[0]._replace(lost_seconds=HOUR), *others]) != []
    assert again(fleet, placed=[fleet.placed[0]._replace(lost_seconds=HOUR + 1), *others]) == []


def test_moves_are_looked_for_ten_times_within_every_until_one_is_found() -> None:
    fleet = shared()
    for row in fleet.rows:
        fleet.store.rows[row.id] = row.with_fields(state="ready", drain=None)

    def question(last: float, since_checked: float) -> bool:
        deployment, now = fleet.deployment, fleet.now
        return MoveCheck.of(deployment, fleet.rows, now - last, since_checked, now) is not None

    assert [question(HOUR, 360), question(HOUR, 359), question(HOUR - 1, 9e9)] == [True, False, False]
    first = fleet.rows[0]
    fleet.store.rows[first.id] = first.with_fields(state="draining", drain="move")
    assert question(0, 0), "what drains is asked for in each cycle"


def test_two_machines_are_never_emptied_at_once() -> None:
    fleet = Fleet(POOL, pending=[gpu_work(name, gpus=4000) for name in "abcd"])
    fleet.cycle()
    fleet.boot()
    fleet.pending = []
    first, second, third, fourth = (row.id for row in fleet.rows)
    others = [job(f"{id}-{device}", id, device) for id in (third, fourth) for device in (0, 1)]
    stays = job("other", second, 0)
    fleet.placed = [job("small", first, 0), stays, *others]
    fleet.busy = {first: 1, second: 1, third: 2, fourth: 2}
    fleet.moved_at = START - 2 * HOUR
    fleet.cycle()
    assert moved(fleet) == [first]
    for notice in ("", "give_back"):  # before the job has its notice, and while it saves
        fleet.placed = [job("small", first, 0, notice=notice), stays, *others]
        fleet.moved_at = START - 2 * HOUR
        fleet.now += 2
        fleet.cycle()
        assert moved(fleet) == [first]
    fleet.placed = [job("small", third, 2), stays, *others]
    fleet.busy = {second: 1, third: 3, fourth: 2}
    fleet.run(60)
    assert first not in [row.id for row in fleet.rows if row.state != "terminating"]
    fleet.moved_at = START - 2 * HOUR
    fleet.cycle()
    assert [row.id for row in fleet.rows if row.state == "draining"] == [second], "it could have gone all the time"


# ── The notices ─────────────────────────────────────────────────────────────


def running(name: str = "train", node: str = "m-0001", **fields: Any) -> Workload:
    made = initial_record(NewWorkload(name, "job", "rnd", "gpu1", "ana", gpus=1000, cpu=1000, memory=1024), 0.0)
    place = Place(node, (0,), (1000,))
    values: dict[str, Any] = {"state": "running", "attempt": 1, "placement": (place,), "grace": 60.0}
    return made._replace(**values | {"started_at": START - 10 * HOUR, "checkpoint_at": START - 60.0} | fields)


PROFILE = Profile("gpu1", GPU, pools=("gpu",), policies=(("rnd",),))


def told(
    fleet: Fleet, *rows: Workload, profile: Profile = PROFILE, excludes: Any = lambda row: False, **nodes: Any
) -> dict[str, Notice]:
    """Return the notices of a cycle that sees the rows. `nodes`: of the second machine's node, as `target`."""
    names = {row.id: row.id for row in fleet.rows}
    statuses = {
        row.id: NodeStatus(row.id, row.pool, (0, 1, 2, 3), cordoned=row.state == "draining") for row in fleet.rows
    }
    second = fleet.rows[1].id
    statuses[second] = replace(statuses[second], **nodes)
    facts = JobFacts(fleet.now, lambda row, now: None)
    known = cycle_demand(0.0, [], statuses, rows, names, {}, facts)
    snapshot = Snapshot(
        fleet.now,
        pools=(Pool("gpu", kind="autoscaled"),),
        nodes=tuple(map(_engine_node, statuses.values())),
        profiles=(profile,),
        policies=(TeamQuota("rnd", (QuotaLine((), 8 * GPU),)),),
        workloads=tuple(as_workload(row, placed, None) for row in rows),
    )
    question = MoveCheck(fleet.deployment, fleet.rows, fleet.moved_at)
    known = restartable(known, drain_candidates(known, [question], fleet.now), lambda: Restarts(snapshot), excludes)
    demand = known.of((), moves=True)
    assert demand is not None
    which = moving([fleet.deployment], fleet.rows, {"cloud": demand})
    change_set = notices(fleet.rows, rows, names, which, fleet.now)
    return {change.workload: change.fields["notice"] for change in change_set.changes}  # type: ignore[misc]


def _engine_node(status: NodeStatus) -> Node:
    """Return a node as the engine has it; one that was not observed takes no work."""
    taken = tuple(device for device, milli in status.foreign.items() if milli)
    return Node(
        status.name,
        status.pool,
        len(status.devices),
        ready=status.ready and status.observed,
        cordoned=status.cordoned,
        devices=status.devices,
        foreign_devices=taken,
    )


def test_a_job_of_a_machine_that_is_emptied_is_told_so_and_keeps_its_whole_grace() -> None:
    fleet = shared()
    first, second = (row.id for row in fleet.rows)
    result = told(fleet, running("small", first), running("one", second))
    assert set(result) == {"small"}
    assert result["small"].reason == "It is moved to another machine so that this one can be given back."
    assert result["small"].deadline == fleet.now + 60
    assert result["small"].kind == "give_back"


def test_no_notice_is_given_where_the_jobs_cannot_move_any_more() -> None:
    fleet = shared()
    first, second = (row.id for row in fleet.rows)
    session = running("note", first, kind="session")
    assert told(fleet, running("small", first), session, running("one", second)) == {}
    starting = running("new", first, state="starting")
    assert told(fleet, running("small", first), starting, running("one", second)) == {}
    never_saved = running("small", first, checkpoint_at=None)
    assert told(fleet, never_saved, running("one", second)) == {}, "it would begin anew, again and again"
    before = running("small", first, checkpoint_at=START - 11 * HOUR)
    assert told(fleet, before, running("one", second)) == {}, "it was moved before, and has saved nothing since"


@pytest.mark.parametrize(
    "target",
    [
        {"cordoned": True},
        {"ready": False},
        {"observed": False},
        {"devices": (0,)},
        {"foreign": {1: 1000, 2: 1000, 3: 1000}},
    ],
    ids=["cordoned", "not ready", "not observed", "three broken GPUs", "GPUs of foreign pods"],
)
def test_no_job_moves_to_a_machine_that_does_not_take_it(target: dict[str, Any]) -> None:
    fleet = shared()
    first, second = (row.id for row in fleet.rows)
    assert set(told(fleet, running("small", first), running("one", second))) == {"small"}
    assert told(fleet, running("small", first), running("one", second), **target) == {}


def test_no_job_moves_that_would_not_start_again() -> None:
    fleet = shared()
    first, second = (row.id for row in fleet.rows)
    rows = (running("small", first), running("one", second))
    assert set(told(fleet, *rows)) == {"small"}
    lost = running("small", first, lost_on=(second, second))
    assert told(fleet, lost, rows[1]) == {}, "it was lost there too often"
    assert told(fleet, *rows, profile=replace(PROFILE, pools=("other",))) == {}, "its profile has other pools now"
    assert told(fleet, *rows, profile=replace(PROFILE, policies=())) == {}, "its queue is closed"
    assert told(fleet, *rows, profile=replace(PROFILE, min_runtime=11 * HOUR)) == {}, "it is protected yet"
    assert told(fleet, *rows, excludes=lambda row: row.id == "small") == {}, "its owner has left the team"


def test_a_notice_for_another_reason_moves_no_other_job_of_the_machine() -> None:
    fleet = shared()
    first, second = (row.id for row in fleet.rows)
    test = Notice("test", fleet.now, fleet.now + 60, "preempt_test")
    tested = running("small", first, notice=test, state="checkpointing")
    other = running("hard", first, preemptible=False, placement=(Place(first, (1,), (1000,)),))
    assert told(fleet, tested, other, running("one", second)) == {}
    leaves = running("small", first, notice=replace(test, kind="give_back"), state="checkpointing")
    assert told(fleet, leaves, other, running("one", second)) == {}, "what is not preemptible never moves"
    late = running("late", first, placement=(Place(first, (1,), (1000,)),))
    assert set(told(fleet, leaves, late, running("one", second))) == {"late"}


def test_a_leader_that_was_killed_between_drain_and_notice_leaves_it_to_the_next_one() -> None:
    fleet = shared()
    fleet.change_leader()
    fleet.moved_at = fleet.now
    fleet.cycle()
    assert moved(fleet), "the drain is in its row"
    assert set(told(fleet, running("small", fleet.rows[0].id), running("one", fleet.rows[1].id))) == {"small"}


def test_a_notice_is_given_once() -> None:
    fleet = shared()
    first, second = (row.id for row in fleet.rows)
    given = told(fleet, running("small", first), running("one", second))["small"]
    fleet.now += 5
    assert told(fleet, running("small", first, notice=given, state="checkpointing"), running("one", second)) == {}


def test_a_spot_notice_during_a_move_ends_the_time_to_save_earlier() -> None:
    fleet = shared()
    machine, second = fleet.rows[0].id, fleet.rows[1].id
    given = told(fleet, running("small", machine), running("one", second))["small"]
    fleet.report(machine, "spot_notice", deadline=fleet.now + 30)
    fleet.placed = [fleet.placed[0]._replace(notice="give_back", movable=False), *fleet.placed[1:]]
    fleet.cycle()
    assert fleet.store.rows[machine].drain == "spot"
    hurried = told(fleet, running("small", machine, notice=given, state="checkpointing"), running("one", second))
    assert hurried["small"].deadline == fleet.now + 30 - MARGIN
    assert hurried["small"].reason == given.reason


def test_a_notice_that_ends_earlier_reaches_the_job_and_is_written_once() -> None:
    fleet = shared(None)
    machine = fleet.rows[0].id
    fleet.report(machine, "spot_notice", deadline=fleet.now + 120)
    fleet.cycle()
    times = CorrectedTimes(ClockSteps(lambda: fleet.now, lambda: fleet.now))
    given = Notice("evicted", fleet.now - 5, fleet.now + 595, "evict")
    row = running("small", machine, grace=600.0, notice=given, state="checkpointing")
    times.of(row)  # the cycles before the notice of the provider have seen it
    hurried = told(fleet, times.of(row))["small"]
    row = changed(row, {"notice": hurried})
    assert times.of(row).notice == hurried, "this leader counts the new deadline, too"
    assert hurried.deadline == fleet.now + 120 - MARGIN
    assert hurried.at != given.at, "the backend gets it as a new one"
    fleet.now += 1
    assert told(fleet, times.of(row)) == {}


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("pause", "Its machine is ended, as its deployment is paused or being deleted."),
        ("budget", "Its machine is ended, as the budget of the month is used up."),
        ("spot", "The provider takes back its machine."),
    ],
)
def test_work_on_a_machine_with_a_deadline_gets_its_notice_before_it(cause: Any, words: str) -> None:
    fleet = shared(None)
    machine = fleet.rows[0].id
    fleet.report(machine, "drain", drain=cause, deadline=fleet.now + 300)
    fleet.cycle()
    long = told(fleet, running("small", machine, grace=900.0))["small"]
    assert (long.reason, long.deadline, long.kind) == (words, fleet.now + 300 - MARGIN, "machine_ends")
    assert told(fleet, running("small", machine, grace=20.0))["small"].deadline == fleet.now + 20


def test_an_idle_drain_gives_no_notice() -> None:
    fleet = shared(None)
    fleet.report(fleet.rows[0].id, "drain", drain="age")
    fleet.cycle()
    assert told(fleet, running("small", fleet.rows[0].id)) == {}


@pytest.mark.parametrize(
    ("kind", "outcome", "words"),
    [
        ("give_back", "moved", "“train” of ana was moved to another machine so that its machine can be given back; "),
        ("machine_ends", "preempted", "“train” of ana left its machine as its machine is ended; "),
    ],
)
def test_a_job_that_left_its_machine_waits_again_with_a_plain_reason(kind: Any, outcome: str, words: str) -> None:
    notice = Notice("", START, START + 60, kind)
    row = running(notice=notice, state="checkpointing", checkpoint_step=12)
    end = AttemptStatus(
        "train", 1, Phase.EXITED, ended_at=START + 5, exit_code=75, acknowledged=True, notice_received=True,
        checkpoint_at=START + 4, step=12,
    )  # fmt: skip
    seen = Observation((), (end,))
    (change,) = reconcile({"train": row}, seen, now=START + 5, max_infra_failures=3).changes
    assert change.fields["state"] == "pending"
    assert str(change.fields["reason_message"]).startswith(words + "saved at step 12.")
    assert change.close_attempt is not None
    assert change.close_attempt["outcome"] == outcome
