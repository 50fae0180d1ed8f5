"""The gate between cycles and requests: reads wait for the end of a cycle, in order, `max_wait` seconds at most."""

from __future__ import annotations

import asyncio

import pytest
from makeway_quota.control.reads.cycle_gate import CycleGate

NEVER = 3600.0
"""Seconds: longer than any test"""


async def _turns(many: int = 20) -> None:
    for _ in range(many):
        await asyncio.sleep(0)


async def test_an_open_gate_delays_nothing() -> None:
    gate = CycleGate()
    passing = asyncio.ensure_future(gate.wait_async())
    await asyncio.sleep(0)
    assert passing.done()
    gate.wait_in_thread()


@pytest.mark.covers("N26")
async def test_reads_go_on_after_a_cycle_in_the_order_in_which_they_came() -> None:
    gate, passed = CycleGate(NEVER), list[int]()

    async def read(number: int) -> None:
        await gate.wait_async()
        passed.append(number)

    with gate.closed():
        reads = [asyncio.ensure_future(read(number)) for number in range(5)]
        await _turns()
        assert passed == []
        reads[2].cancel()
    late = asyncio.ensure_future(read(5))
    await asyncio.gather(*reads, late, return_exceptions=True)
    assert passed == [0, 1, 3, 4, 5]


async def test_the_next_cycle_does_not_wait_for_all_that_the_last_one_held_back() -> None:
    gate, passed = CycleGate(NEVER), list[int]()

    async def read(number: int) -> None:
        await gate.wait_async()
        passed.append(number)

    with gate.closed():
        reads = [asyncio.ensure_future(read(number)) for number in range(50)]
        await _turns()
    await _turns(3)
    with gate.closed():
        await _turns()
        assert 0 < len(passed) < 10
    await asyncio.gather(*reads)
    assert passed == list(range(50))


async def test_a_long_cycle_holds_nothing_back_in_the_end() -> None:
    gate = CycleGate(0.01)
    async with asyncio.timeout(30):
        with gate.closed():
            await gate.wait_async()
            await asyncio.to_thread(gate.wait_in_thread)
            assert gate.is_open


async def test_a_thread_waits_for_the_end_of_a_cycle() -> None:
    gate = CycleGate(NEVER)
    with gate.closed():
        waiting = asyncio.ensure_future(asyncio.to_thread(gate.wait_in_thread))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
    await asyncio.wait_for(waiting, 30)


async def test_a_cycle_that_fails_opens_the_gate() -> None:
    gate = CycleGate(NEVER)
    with pytest.raises(ValueError, match="broken"), gate.closed():
        raise ValueError("broken")
    assert gate.is_open


async def test_reads_go_on_in_time_though_cycles_follow_each_other_without_a_pause() -> None:
    gate = CycleGate(0.05)
    with gate.closed():
        reads = [asyncio.ensure_future(gate.wait_async()) for _ in range(50)]
        await _turns()
    cycles = 0
    while not all(read.done() for read in reads):
        with gate.closed():
            await asyncio.sleep(0.01)
        cycles += 1
    assert cycles < len(reads) - 5, "more go on than one after each cycle"
