"""The backend that only exists in memory keeps the same promises as the real ones."""

from __future__ import annotations

import asyncio

import pytest
from makeway_quota.backends.base import AttemptStatus, BackendError, NodeStatus, Phase, StartOrder
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.values import Notice, Place

NODES = (NodeStatus("n1", "gpu", (0, 1)), NodeStatus("n2", "gpu", (0, 1)))


class Clock:
    """A time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def order(workload: str, attempt: int = 1, node: str = "n1", time_limit: float | None = None) -> StartOrder:
    place = Place(node, (0,), (1000,))
    return StartOrder(workload, attempt, "", "ana", "rnd", "1gpu", ("x",), {}, (place,), 30.0, time_limit=time_limit)


def notice(at: float, deadline: float) -> Notice:
    return Notice("because", at, deadline, by_team="devops", by_owner="bo", by_workload="s-1")


async def seen(backend: MemoryBackend, workload: str, attempt: int = 1) -> AttemptStatus:
    return next(a for a in (await backend.observe()).attempts if (a.workload, a.attempt) == (workload, attempt))


async def test_it_starts_once_and_runs_for_its_duration() -> None:
    clock = Clock()
    woken: list[None] = []
    backend = MemoryBackend(NODES, clock=clock, lasts=lambda order: 10.0, starts_after=2.0)
    backend.on_change(lambda: woken.append(None))
    await backend.open()
    await backend.start(order("j-1"))
    await backend.start(order("j-1"))
    assert (backend.starts, len(woken)) == (1, 1)
    assert (await seen(backend, "j-1")).phase is Phase.STARTING
    assert backend.next_event() == 1002.0
    clock.now = 1002.0
    assert (await seen(backend, "j-1")).started_at == 1002.0
    clock.now = 1012.0
    ended = await seen(backend, "j-1")
    assert (ended.phase, ended.exit_code, ended.ended_at) == (Phase.EXITED, 0, 1012.0)
    await backend.forget("j-1", 1)
    await backend.start(order("j-1"))
    assert (await backend.observe()).attempts == ()
    assert backend.starts == 1
    await backend.close(stop_jobs=True)


async def test_attempts_end_the_given_time_after_their_notice() -> None:
    clock = Clock()
    backend = MemoryBackend(NODES, clock=clock, leaves_after=3.0)
    await backend.start(order("j-1"))
    await backend.observe()
    backend.save("j-1", 7)
    for _ in range(2):
        await backend.notice("j-1", 1, notice(1000.0, 1030.0))
    stopping = await seen(backend, "j-1")
    assert (stopping.phase, stopping.notice_received) == (Phase.STOPPING, True)
    clock.now = 1003.0
    remaining = await seen(backend, "j-1")
    assert (remaining.exit_code, remaining.acknowledged, remaining.killed, remaining.message) == (
        75,
        True,
        False,
        "saved at step 7",
    )
    await backend.start(order("j-1", attempt=2))
    assert (await seen(backend, "j-1", 2)).step == 7


async def test_a_job_that_ignores_a_notice_is_killed_at_the_earliest_deadline() -> None:
    clock = Clock()
    backend = MemoryBackend(NODES, clock=clock)
    backend.ignoring.add("j-1")
    await backend.start(order("j-1"))
    await backend.notice("j-1", 1, notice(1000.0, 1030.0))
    await backend.notice("j-1", 1, notice(1000.0, 1010.0))
    await backend.notice("j-1", 1, notice(1000.0, 1099.0))
    clock.now = 1009.0
    assert (await seen(backend, "j-1")).phase is Phase.STOPPING
    clock.now = 1010.0
    killed = await seen(backend, "j-1")
    assert (killed.killed, killed.exit_code, killed.acknowledged) == (True, -9, False)


async def test_time_limits_hold() -> None:
    clock = Clock()
    backend = MemoryBackend(NODES, clock=clock, lasts=lambda order: 100.0)
    await backend.start(order("j-1", time_limit=60.0))
    await backend.observe()
    clock.now = 1060.0
    ended = await seen(backend, "j-1")
    assert (ended.timed_out, ended.message) == (True, "time limit of 1 min reached")


async def test_faults_can_be_injected() -> None:
    backend = MemoryBackend(NODES, clock=Clock())
    backend.refusals["bad"] = "The image does not exist."
    with pytest.raises(BackendError, match="The image does not exist"):
        await backend.start(order("bad"))
    with pytest.raises(BackendError, match="no node 'n9'"):
        await backend.start(order("bad2", node="n9"))
    for job, node in (("j-1", "n1"), ("j-2", "n2"), ("j-3", "n2")):
        await backend.start(order(job, node=node))
    backend.lose("j-3")
    backend.lose_node("n1")
    world = await backend.observe()
    assert [node.ready for node in world.nodes] == [False, True]
    assert [attempt.phase for attempt in world.attempts] == [Phase.LOST, Phase.RUNNING, Phase.LOST]
    backend.node_back("n1")
    assert all(node.ready for node in (await backend.observe()).nodes)


async def test_what_a_job_leaves_is_kept_until_it_is_purged() -> None:
    backend = MemoryBackend(NODES, clock=Clock())
    await backend.start(order("j-1"))
    backend.say("j-1", "hello\n")
    backend.finish("j-1", 0, result=b"42", error=b"{}")
    assert (await seen(backend, "j-1")).completed
    await backend.forget("j-1", 1)
    assert await backend.log("j-1", 1, 1, 3) == (b"ell", 6)
    assert await backend.log_gap("j-1", 1) is None
    assert (await backend.result("j-1", 1), await backend.error("j-1", 1)) == (b"42", b"{}")
    assert backend.newest("j-1").status.exit_code == 0
    await backend.purge("j-1")
    assert await backend.result("j-1", 1) is None
    with pytest.raises(KeyError):
        backend.newest("j-1")


async def test_killing_and_closing_end_attempts() -> None:
    backend = MemoryBackend(NODES, clock=Clock())
    for job in ("j-1", "j-2", "j-3"):
        await backend.start(order(job))
    await backend.kill("j-1", 1)
    await backend.kill("unknown", 1)
    await backend.notice("unknown", 1, notice(0, 1))
    backend.ignoring.add("j-3")
    await backend.close(stop_jobs=True)
    ended = (await backend.observe()).attempts
    assert [(a.exit_code, a.killed, a.notice_received) for a in ended] == [
        (-9, True, False),
        (75, False, True),
        (-9, True, True),
    ]


async def test_in_real_time_the_loop_is_woken() -> None:
    woken = asyncio.Event()
    backend = MemoryBackend(NODES, lasts=lambda order: 0.02, real_time=True)
    backend.on_change(woken.set)
    await backend.start(order("j-1"))
    async with asyncio.timeout(30):
        while (await seen(backend, "j-1")).phase is not Phase.EXITED:
            woken.clear()
            await woken.wait()
    await backend.close(stop_jobs=False)
