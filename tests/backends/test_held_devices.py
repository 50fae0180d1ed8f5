"""A process of this machine that outlives its row keeps its devices, as terminating, until it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from makeway_quota import policy
from makeway_quota.backends.base import NodeStatus, Observation, WorkloadPod
from makeway_quota.backends.local import processes
from makeway_quota.backends.local.held_devices import holding
from makeway_quota.control.world.world import World
from makeway_quota.engine import Plan, reference, schedule
from makeway_quota.engine.snapshot import Terminating
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import changed, initial_record
from makeway_quota.values import Place
from memory_rows import Rows
from workshop import Workshop

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DOCUMENT = policy.read_policy(
    """
version: 1
pools: [{name: p, nodes: {local: {gpus: all}}}]
profiles: [{name: one, gpus: 1, pools: [p], policies: [[lender, borrower]]}]
policies:
  - {name: lender, groups: [lender], quotas: [{reserved: 2}]}
  - {name: borrower, groups: [borrower], quotas: [{reserved: 0}]}
"""
)


async def held(shop: Workshop) -> list[tuple[str, str, int | None, int | None, tuple[int, ...]]]:
    nodes = (await shop.backend.observe()).nodes
    return [(n.name, pod.workload, pod.attempt, pod.worker, pod.devices) for n in nodes for pod in n.pods]


async def becomes(shop: Workshop, wanted: Callable[[list[object]], bool]) -> None:
    async with asyncio.timeout(60):
        while not wanted(list(await held(shop))):  # noqa: ASYNC110 - a matter of time
            await asyncio.sleep(0.05)


@pytest.fixture
async def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    await made.backend.open()
    return made


@pytest.mark.covers("N33")
async def test_a_process_that_cannot_be_ended_holds_its_devices_until_it_is_gone(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shop.python("j1", SLEEP, gpus=2)
    await shop.running("j1", says="up")
    assert await held(shop) == [("virtual-1", "j1", 1, 0, (0, 1))]
    with monkeypatch.context() as unkillable:
        unkillable.setattr(processes, "_kill", lambda pid, start_time: None)
        unkillable.setattr(processes.Process, "send", lambda process, number: None)
        unkillable.setattr(processes, "SWEEP_SECONDS", 0.01)
        await shop.backend.kill("j1", 1)
        await shop.backend.forget("j1", 1)
        seen = await shop.backend.observe()
        assert seen.attempts == (), "it is reported no more"
        assert await held(shop) == [("virtual-1", "j1", 1, 0, (0, 1))]
        await shop.again()
        assert await held(shop) == [("virtual-1", "j1", 1, 0, (0, 1))], "a service that starts again knows it, too"
    await shop.backend.forget("j1", 1)
    await becomes(shop, lambda found: not found)
    await shop.backend.close(stop_jobs=True)


async def test_what_has_ended_holds_nothing(shop: Workshop) -> None:
    await shop.python("j1", "pass")
    await shop.over("j1")
    assert await held(shop) == []
    await shop.backend.close(stop_jobs=True)


def test_the_devices_of_orders_of_an_earlier_version_are_known() -> None:
    nodes = [NodeStatus("virtual-1", "", (0, 1)), NodeStatus("virtual-2", "", (2, 3))]
    gang = {"workload": "g", "attempt": 2, "workers": [
        {"env": {"CUDA_VISIBLE_DEVICES": "1", "MAKEWAY_GPUS": "2"}},
        {"env": {"CUDA_VISIBLE_DEVICES": "2", "MAKEWAY_GPUS": "2"}},
    ]}  # fmt: skip
    share = {"workload": "s", "attempt": 1, "workers": [{"env": {"CUDA_VISIBLE_DEVICES": "3", "MAKEWAY_GPUS": "0.5"}}]}
    without = {"workload": "c", "attempt": 1, "workers": [{"env": {"CUDA_VISIBLE_DEVICES": "", "MAKEWAY_GPUS": "0"}}]}
    result = holding(nodes, [gang, share, without, {"workload": "damaged", "attempt": 1}])
    assert [(p.workload, p.attempt, p.devices, p.milli) for p in result["virtual-1"].pods] == [("g", 2, (1,), (1000,))]
    assert [(p.workload, p.attempt, p.devices, p.milli) for p in result["virtual-2"].pods] == [
        ("g", 2, (2,), (1000,)),
        ("s", 1, (3,), (500,)),
    ]


ODD: list[object] = [None, 0, -1, 2**70, 1e308, float("nan"), "", "x", [], [[]], {}, {"node": 1}, True]


def test_an_odd_order_holds_nothing_and_hides_no_other() -> None:
    nodes = [NodeStatus("virtual-1", "", (0, 1))]
    good = {"workload": "g", "attempt": 1, "places": [{"node": "virtual-1", "devices": [1], "milli": [1000]}]}
    odd: list[dict[str, object]] = []
    for value in ODD:
        odd += [{**good, "workload": "o", "places": value}, {"workload": "o", "attempt": 1, "workers": value}]
        odd += [{**good, "workload": "o", "places": [value]}, {"workload": "o", "attempt": 1, "workers": [value]}]
        odd += [{"workload": "o", "attempt": 1, "workers": [{"env": value}]}]
        for key in ("CUDA_VISIBLE_DEVICES", "MAKEWAY_GPUS"):
            env = {"CUDA_VISIBLE_DEVICES": "0", "MAKEWAY_GPUS": "1", key: value}
            odd += [{"workload": "o", "attempt": 1, "workers": [{"env": env}]}]
        for key in ("node", "devices", "milli"):
            place = {"node": "virtual-1", "devices": [0], "milli": [1000], key: value}
            odd += [{**good, "workload": "o", "places": [place]}]
    for item in odd:
        result = holding(nodes, [item, good, item])["virtual-1"].pods
        assert [pod.workload for pod in result if pod.workload == "g"] == ["g"], item
        assert all(0 <= milli <= 1000 for pod in result for milli in pod.milli), item


class Machine:
    """One machine of two GPUs with a job of the borrower on each, in the eyes of the control loop."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.rows = Rows()
        self.world = World(self.rows, DOCUMENT, 1, lambda: self.now)  # type: ignore[arg-type]
        self.pods: list[WorkloadPod] = []
        for device in (0, 1):
            self.start(f"b-{device}", "borrower", device)
        self.observe()

    def observe(self) -> None:
        self.world.observe(Observation((NodeStatus("n1", "", (0, 1), pods=tuple(self.pods)),)))

    def submit(self, id: str, team: str) -> Workload:
        row = initial_record(NewWorkload(id, "job", team, "one", team, gpus=1000), self.now)
        self.rows.put(row)
        return row

    def start(self, id: str, team: str, device: int) -> None:
        here = (Place("n1", (device,), (1000,)),)
        row = self.submit(id, team)
        self.rows.put(changed(row, {"state": "running", "attempt": 1, "placement": here, "started_at": self.now}))
        self.pods.append(WorkloadPod(id, 1000, attempt=1, worker=0, devices=(device,), milli=(1000,)))

    def end(self, id: str, state: str) -> None:
        """End the attempt of a job in the store; its process is still there."""
        self.rows.put(changed(self.rows.found[id], {"state": state, "placement": (), "ended_at": self.now}))

    async def plan(self) -> Plan:
        snapshot = self.world.snapshot(await self.world.rows(), self.now)
        plan = schedule(snapshot)
        other = reference.schedule(snapshot)
        assert [s.id for s in plan.start] == [s.id for s in other.start]
        assert [e.id for e in plan.evict] == [e.id for e in other.evict]
        return plan

    async def terminating(self) -> tuple[Terminating, ...]:
        await self.world.rows()
        return self.world.observation.nodes[0].terminating


@pytest.mark.covers("N33", "F20")
@pytest.mark.parametrize("state", ["pending", "failed", "cancelled"])
async def test_its_devices_are_on_their_way_and_nothing_else_is_evicted(state: str) -> None:
    machine = Machine()
    assert await machine.terminating() == ()
    machine.submit("l-1", "lender")
    machine.end("b-0", state)
    machine.observe()
    assert await machine.terminating() == (Terminating("b-0", (0,), 1000, deadline=1000.0),)
    plan = await machine.plan()
    assert (plan.start, plan.evict) == ((), ()), "one GPU is on its way, and one is all that is needed"
    machine.pods = [pod for pod in machine.pods if pod.workload != "b-0"]
    machine.observe()
    assert await machine.terminating() == ()
    assert [start.id for start in (await machine.plan()).start] == ["l-1"]


async def test_what_does_not_end_is_stuck_after_a_while_and_another_leaves() -> None:
    machine = Machine()
    machine.submit("l-1", "lender")
    machine.end("b-0", "failed")
    machine.observe()
    assert not (await machine.plan()).evict
    machine.now += 59
    assert not (await machine.plan()).evict
    machine.now += 2
    plan = await machine.plan()
    assert ([e.id for e in plan.evict], plan.start) == (["b-1"], ())


async def test_the_next_attempt_beside_it_counts_once() -> None:
    machine = Machine()
    machine.end("b-0", "pending")
    here = (Place("n1", (0,), (1000,)),)
    again = {"state": "running", "attempt": 2, "placement": here, "started_at": machine.now}
    machine.rows.put(changed(machine.rows.found["b-0"], again))
    machine.pods.append(WorkloadPod("b-0", 1000, attempt=2, worker=0, devices=(0,), milli=(1000,)))
    machine.observe()
    assert await machine.terminating() == (), "the device is held once"
    assert machine.world.observation.nodes[0].foreign_gpus == 0
