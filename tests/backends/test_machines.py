"""Attempts on machines: what their agents report, what silence means, and which machines are nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from backends.test_remote import ENDED, RUNS, Reported
from makeway_quota.backends.base import AttemptStatus, Key, Phase, StartOrder
from makeway_quota.backends.machines.backend import START_WITHIN, MachinesBackend
from makeway_quota.backends.machines.machine_source import HostedWorker, MachineStatus, PlacedAttempt
from makeway_quota.backends.remote.backend import REPORT_GRACE, REPORT_WITHIN
from makeway_quota.backends.remote.workers import WorkerStatus
from makeway_quota.values import Notice, Place

KEY = ("j1", 1)
ONE, TWO = MachineStatus("m-1", "cloud", "ready", gpus=2), MachineStatus("m-2", "cloud", "ready", gpus=2)
RUNNING = HostedWorker(*KEY, 0, "running", devices=(1,))


class Machines:
    """Machines and placements that the test brings and takes."""

    def __init__(self) -> None:
        self.synced = True
        self.version = 1
        self.there: dict[str, MachineStatus] = {"m-1": ONE, "m-2": TWO}
        self.on: dict[Key, PlacedAttempt] = {KEY: PlacedAttempt((Place("m-1", (1,), (1000,), "machines"),))}

    def on_change(self, wake: Callable[[], None]) -> None:
        """Never wake."""

    async def refresh(self) -> None:
        self.version += 1

    def machines(self) -> Mapping[str, MachineStatus]:
        return self.there

    def placed(self) -> Mapping[Key, PlacedAttempt]:
        return self.on


class Fleet(MachinesBackend):
    """The backend with everything that the test says of it."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(monotonic=lambda: self.now, clock=lambda: self.now)
        self.reported, self.cloud = Reported(), Machines()
        self.connect(self.reported)
        self.follow_machines(self.cloud)

    def machine(self, name: str, **fields: object) -> None:
        self.cloud.there[name] = replace(self.cloud.there[name], **fields)  # type: ignore[arg-type]

    def hosts_say(self, *workers: HostedWorker) -> None:
        """Have the agent of the first machine report these workers."""
        self.machine("m-1", workers=workers)

    def report(self, *workers: WorkerStatus) -> None:
        """Have launchers report themselves."""
        self.reported.workers[KEY] = dict(enumerate(workers))

    async def one(self, key: Key = KEY) -> AttemptStatus | None:
        return next((seen for seen in (await self.observe()).attempts if seen.key == key), None)

    async def seen(self) -> AttemptStatus:
        seen = await self.one()
        assert seen is not None
        return seen


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def gang() -> PlacedAttempt:
    return PlacedAttempt(tuple(Place(name, (0,), (1000,), "machines") for name in ("m-1", "m-2")))


async def test_an_attempt_starts_runs_and_ends_by_what_its_launcher_reports(fleet: Fleet) -> None:
    order = StartOrder(*KEY, "a", "ana", "rnd", "gpu1", ("true",), {}, (Place("m-1", (1,), (1000,)),), 30.0)
    await fleet.start(order)
    assert (await fleet.seen()).phase is Phase.STARTING, "it is placed, and its agent has not heard of it yet"
    fleet.hosts_say(RUNNING)
    fleet.report(RUNS)
    assert (await fleet.seen()).phase is Phase.RUNNING
    fleet.report(replace(ENDED, completed=True))
    seen = await fleet.seen()
    assert (seen.phase, seen.exit_code, seen.completed, seen.node_lost) == (Phase.EXITED, 0, True, False)
    del fleet.cloud.on[KEY]
    await fleet.forget(*KEY)
    assert await fleet.one() is None, "what its agent still names is not shown as an attempt"


async def test_machines_are_nodes_without_notebooks_and_say_what_they_run(fleet: Fleet) -> None:
    fleet.hosts_say(RUNNING, HostedWorker("j2", 3, 1, "exited", 0, (0,)))
    fleet.machine("m-1", cpu=8000, memory=64, model="A", virtual=True)
    fleet.machine("m-2", condition="draining")
    fleet.cloud.there |= {
        "m-3": replace(ONE, name="m-3", condition="lost", down_since=900.0),
        "m-4": replace(ONE, name="m-4", condition="starting"),
        "m-5": replace(ONE, name="m-5", condition="ending"),
    }
    nodes = {node.name: node for node in (await fleet.observe()).nodes}
    assert sorted(nodes) == ["m-1", "m-2", "m-3"]
    one = nodes["m-1"]
    assert (one.pool, one.devices, one.cpu, one.memory, one.model, one.virtual) == (
        "cloud",
        (0, 1),
        8000,
        64,
        "A",
        True,
    )
    assert not any(node.sessions for node in nodes.values())
    assert [(node.ready, node.cordoned, node.down_since) for node in nodes.values()] == [
        (True, False, None),
        (True, True, None),
        (False, False, 900.0),
    ]
    [pod] = one.pods
    assert (pod.workload, pod.attempt, pod.worker, pod.gpus, pod.devices, pod.milli) == (*KEY, 0, 1000, (1,), (1000,))


async def test_nothing_is_gone_before_all_machines_were_read(fleet: Fleet) -> None:
    fleet.cloud.synced = False
    fleet.cloud.there = {}
    fleet.report(RUNS)
    assert (await fleet.seen()).phase is Phase.RUNNING
    assert not (await fleet.observe()).synced


async def test_a_worker_of_a_machine_that_is_gone_is_lost_with_it_at_once(fleet: Fleet) -> None:
    fleet.report(RUNS)
    await fleet.seen()
    del fleet.cloud.there["m-1"]
    seen = await fleet.seen()
    assert (seen.phase, seen.node_lost, seen.message) == (Phase.LOST, True, "its machine m-1 was ended")


async def test_one_that_had_ended_before_its_machine_went_has_ended(fleet: Fleet) -> None:
    fleet.report(replace(ENDED, completed=True))
    del fleet.cloud.there["m-1"]
    seen = await fleet.seen()
    assert (seen.phase, seen.exit_code, seen.completed) == (Phase.EXITED, 0, True)


@pytest.mark.parametrize("condition", ["lost", "ending"])
async def test_what_is_silent_with_its_machine_is_lost_after_the_time_of_its_deployment(
    fleet: Fleet, condition: str
) -> None:
    fleet.hosts_say(RUNNING)
    fleet.machine("m-1", condition=condition, lost_after=90.0)
    fleet.report(RUNS)
    fleet.reported.silent_for[0] = 89.0
    assert (await fleet.seen()).phase is Phase.RUNNING, "its launcher may still be heard"
    fleet.reported.silent_for[0] = 90.0
    seen = await fleet.seen()
    assert (seen.phase, seen.node_lost) == (Phase.LOST, True)
    assert "not heard of for 1 min 30 s" in seen.message


async def test_one_that_never_began_is_lost_with_its_machine_without_a_wait(fleet: Fleet) -> None:
    assert (await fleet.seen()).phase is Phase.STARTING
    fleet.machine("m-1", condition="lost")
    seen = await fleet.seen()
    assert (seen.phase, seen.node_lost) == (Phase.LOST, True)
    assert seen.message == "its machine m-1 was lost before worker 0 began"


async def test_work_whose_launcher_is_heard_goes_on_while_its_agent_is_silent(fleet: Fleet) -> None:
    fleet.hosts_say(RUNNING)
    fleet.report(RUNS)
    fleet.machine("m-1", condition="lost")
    assert (await fleet.seen()).phase is Phase.RUNNING
    fleet.report(replace(ENDED, exit_code=3, message="exit code 3"))
    seen = await fleet.seen()
    assert (seen.phase, seen.exit_code, seen.node_lost) == (Phase.EXITED, 3, True)


async def test_a_gang_is_lost_with_the_machine_of_any_worker(fleet: Fleet) -> None:
    fleet.cloud.on[KEY] = gang()
    fleet.report(RUNS, RUNS)
    assert (await fleet.seen()).phase is Phase.RUNNING
    del fleet.cloud.there["m-2"]
    seen = await fleet.seen()
    assert (seen.phase, seen.worker, seen.message) == (Phase.LOST, 1, "its machine m-2 was ended")


async def test_a_gang_does_not_wait_for_a_launcher_that_was_killed(fleet: Fleet) -> None:
    fleet.cloud.on[KEY] = gang()
    fleet.report(RUNS, RUNS)
    fleet.machine("m-1", workers=(HostedWorker(*KEY, 0, "running"),))
    fleet.machine("m-2", workers=(HostedWorker(*KEY, 1, "exited", -9),))
    assert (await fleet.seen()).phase is Phase.RUNNING, "its report may be on its way"
    fleet.now += REPORT_GRACE
    seen = await fleet.seen()
    assert (seen.phase, seen.worker, seen.node_lost) == (Phase.LOST, 1, False)
    assert seen.message == "the launcher of worker 1 on m-2 ended with exit code -9 and without a report"


async def test_a_gang_whose_workers_end_one_after_the_other_has_succeeded(fleet: Fleet) -> None:
    fleet.cloud.on[KEY] = gang()
    fleet.report(ENDED, RUNS)
    fleet.machine("m-1", workers=(HostedWorker(*KEY, 0, "exited", 0),))
    fleet.machine("m-2", workers=(HostedWorker(*KEY, 1, "running"),))
    for _ in range(3):
        assert (await fleet.seen()).phase is Phase.RUNNING
        fleet.now += REPORT_GRACE
    fleet.report(ENDED, ENDED)
    assert (await fleet.seen()).phase is Phase.EXITED


async def test_a_launcher_that_cannot_be_started_sends_the_job_elsewhere(fleet: Fleet) -> None:
    fleet.hosts_say(HostedWorker(*KEY, 0, "exited", 126))
    assert (await fleet.seen()).phase is Phase.STARTING
    fleet.now += REPORT_GRACE
    seen = await fleet.seen()
    assert (seen.phase, seen.never_ran, seen.node_lost) == (Phase.LOST, True, False)


async def test_a_job_whose_image_a_machine_cannot_pull_goes_elsewhere_and_says_why(fleet: Fleet) -> None:
    fleet.hosts_say(HostedWorker(*KEY, 0, "exited", 126, message="the image team/x could not be pulled"))
    await fleet.seen()
    fleet.now += REPORT_GRACE
    seen = await fleet.seen()
    assert (seen.phase, seen.never_ran) == (Phase.LOST, True)
    assert seen.message == "worker 0 did not start on m-1: the image team/x could not be pulled"


async def test_an_agent_that_does_not_start_a_worker_is_not_waited_for_for_ever(fleet: Fleet) -> None:
    assert (await fleet.seen()).phase is Phase.STARTING
    fleet.now += REPORT_WITHIN
    seen = await fleet.seen()
    assert seen.phase is Phase.LOST
    assert "worker 0 on m-1 did not reach the service within 5 min" in seen.message


async def test_an_agent_that_says_that_it_starts_a_worker_gets_more_time_but_not_all_of_it(fleet: Fleet) -> None:
    fleet.hosts_say(HostedWorker(*KEY, 0, "starting"))
    seen = await fleet.seen()
    assert (seen.phase, seen.waiting_reason) == (Phase.STARTING, "container")
    fleet.now += START_WITHIN - 1
    assert (await fleet.seen()).phase is Phase.STARTING
    fleet.now += 1
    assert (await fleet.seen()).waiting_reason == ""
    fleet.now += REPORT_WITHIN
    assert (await fleet.seen()).phase is Phase.LOST


async def test_a_notice_that_is_not_followed_ends_when_the_agent_has_ended_it(fleet: Fleet) -> None:
    fleet.hosts_say(RUNNING)
    fleet.report(replace(RUNS, notice_received=True))
    await fleet.observe()
    await fleet.notice(*KEY, Notice("reclaim", at=fleet.now, deadline=fleet.now + 30.0))
    fleet.now += 30.0 + REPORT_GRACE
    fleet.cloud.on[KEY] = fleet.cloud.on[KEY]._replace(wanted=False)
    assert (await fleet.seen()).phase is Phase.STOPPING, "its agent still runs it"
    tries = fleet.termination_progress("j1")
    assert tries is not None
    assert tries.targets == ("worker 0 of attempt 1 on m-1",)
    fleet.hosts_say()
    seen = await fleet.seen()
    assert (seen.phase, seen.killed) == (Phase.EXITED, True)


async def test_a_job_that_is_cancelled_before_its_agent_has_heard_of_it_ends(fleet: Fleet) -> None:
    await fleet.seen()
    fleet.cloud.on[KEY] = fleet.cloud.on[KEY]._replace(wanted=False)
    await fleet.kill(*KEY)
    await fleet.observe()
    seen = await fleet.seen()
    assert (seen.phase, seen.killed) == (Phase.EXITED, True)


async def test_a_machine_is_not_believed_about_the_work_of_another(fleet: Fleet) -> None:
    fleet.hosts_say(RUNNING)
    fleet.report(RUNS)
    fleet.machine("m-2", workers=(HostedWorker(*KEY, 0, "exited", -9), HostedWorker("other", 7, 0, "running")))
    for _ in range(3):
        assert [(seen.key, seen.phase) for seen in (await fleet.observe()).attempts] == [(KEY, Phase.RUNNING)]
        fleet.now += REPORT_GRACE


async def test_a_new_leader_sees_what_the_one_before_saw(fleet: Fleet) -> None:
    fleet.hosts_say(RUNNING)
    fleet.report(RUNS)
    other = Fleet()
    other.cloud, other.reported = fleet.cloud, fleet.reported
    other.connect(other.reported)
    other.follow_machines(other.cloud)
    assert await fleet.observe() == await other.observe()


async def test_no_launcher_is_told_less_time_than_it_is_waited_for(fleet: Fleet) -> None:
    fleet.machine("m-1", lost_after=1000.0)
    fleet.machine("m-2", lost_after=60.0)
    fleet.cloud.on["j2", 1] = gang()
    fleet.report(RUNS)
    fleet.reported.silent_for[0] = 999.0
    assert (await fleet.seen()).phase is Phase.RUNNING
    assert fleet.lost_after_of(*KEY) == 1000.0
    assert fleet.lost_after_of("j2", 1) == 60.0
    assert fleet.lost_after_of("unknown", 1) == fleet.lost_after == 1000.0
