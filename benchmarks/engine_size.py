"""Measure how long one decision takes as the cluster grows (the engine alone, no service, no database)."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from makeway_quota.control.garbage import collect_less
from makeway_quota.engine import IncrementalEngine, Snapshot, schedule

from .measure import Measured
from .worlds_at_scale import (
    GPUS_PER_NODE,
    all_at_once,
    carried_out,
    gang_on_shared_machines,
    nothing_fits,
    one_gang,
    shared_machines,
)

R1_SIZES = (100, 200, 500, 1000, 2000)
R2_SIZES = (100, 200, 500, 1000)
R3_NODES = 10_000
R5_SIZES = (100, 200, 500)
R6_SIZES = (50, 100, 200)
R1_PUBLISHED = {100: 7.8, 200: 33.0, 500: 249.0}
"""seconds that the best-known open GPU scheduler takes on such a machine"""
R2_PUBLISHED = {500: 11.5, 1000: 65.0}
GOALS = {"R1": 1.0, "R2": 1.0}
"""seconds, at the size that has a goal"""
REPEATS = 3
ENDS = 20
"""so many jobs end, one after the other, each followed by a pass"""


@dataclass(frozen=True, slots=True)
class Run:
    """What one case took, in a process of its own. `cpu`: the processor's seconds of the median run."""

    seconds: list[float]
    cpu: float
    peak: float
    facts: dict[str, Any]


def measure() -> Iterator[Measured]:
    """Measure R1 (victims of many jobs), R2 (of a gang), R3 (one job ends), R4 (a first pass), R5, R6 (shared CPU)."""
    yield from _growing("R1", "all victims of {gpus} jobs on {n} nodes", R1_SIZES, R1_PUBLISHED, 500)
    yield from _growing("R2", "all victims of a gang of {half} × 8 on {n} nodes", R2_SIZES, R2_PUBLISHED, 1000)
    yield from _growing("R5", "all {gpus} victims beside the pool, on {n} machines of two pools", R5_SIZES, {}, 500)
    yield from _growing("R6", "all victims of a gang beside its pool, on {half} of {n} machines", R6_SIZES, {}, 200)
    cold = run("R4", R3_NODES)
    facts = cold.facts
    crowd = f"{R3_NODES} nodes, {facts['running']} running, {facts['waiting']} waiting"
    yield from _incremental(run("R3", R3_NODES), crowd, median(cold.seconds))
    yield Measured(
        f"R4: the first pass from a snapshot, {crowd}",
        "s",
        cold.seconds,
        "reading the same snapshot from its JSON file",
        facts["read"],
        goal=5.0,
        note=f"{cold.cpu:.3g} s of one processor; the process reaches {cold.peak:.0f} MiB with the snapshot in it.",
        facts={**facts, "cpu": cold.cpu, "peak_mib": cold.peak},
    )


def _incremental(run: Run, crowd: str, cold: float) -> Iterator[Measured]:
    """Show R3: time of a pass after one job ended, and the memory of the process."""
    yield Measured(
        f"R3: one job ends, the engine stays, {crowd}",
        "ms",
        [1000 * item for item in run.seconds],
        "a pass from a snapshot of the same",
        1000 * cold,
        goal=50.0,
        note=f"{1000 * run.cpu:.3g} ms of one processor; {run.facts['started']} of {ENDS} passes started a job.",
        facts={**run.facts, "cpu": run.cpu},
    )
    yield Measured(
        f"R3: memory, {crowd}",
        "MiB",
        [run.peak],
        "the process that made one pass from a snapshot",
        run.facts["cold_peak"],
        goal=500.0,
        note="The most that the process ever took, with the snapshot in it.",
    )


def _growing(
    case: str, words: str, sizes: tuple[int, ...], published: dict[int, float], goal_at: int
) -> Iterator[Measured]:
    """Measure one case over its sizes; the baseline is linear growth from the smallest one."""
    first: float | None = None
    for size in sizes:
        result = run(case, size)
        value = median(result.seconds)
        first = first if first is not None else value
        known = f"published for the best-known open GPU scheduler: {published[size]:g} s, " if size in published else ""
        faster = f"{published[size] / value:.0f} times as long; " if size in published else ""
        yield Measured(
            f"{case}: {words.format(n=size, gpus=size * GPUS_PER_NODE, half=size // 2)}",
            "s",
            result.seconds,
            f"linear growth from {sizes[0]} nodes",
            first * size / sizes[0],
            goal=GOALS.get(case) if size == goal_at else None,
            note=f"{known}{faster}{result.cpu:.3g} s of one processor, {result.peak:.0f} MiB; "
            f"the pass that starts them all once the victims have left: {result.facts['then']:.3g} s.",
            facts={**result.facts, "cpu": result.cpu, "peak_mib": result.peak, "published": published.get(size)},
        )


def run(case: str, size: int) -> Run:
    """Measure one case in a process of its own, so that its memory is its own."""
    command = [sys.executable, "-m", "benchmarks.engine_size", case, str(size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Run(**json.loads(done.stdout))


# In the process of one case


def _reclaim(world: Snapshot, victims: int) -> Run:
    """R1, R2, R5, R6: one pass chooses the victims and nominates the preemptors; the next one starts them."""
    seconds, cpu, plan = _timed(lambda: schedule(world), REPEATS)
    assert len(plan.evict) == victims, f"{len(plan.evict)} victims instead of {victims}"
    after = carried_out(world, plan)
    then, _, second = _timed(lambda: schedule(after), 1)
    assert len(second.start) == len([w for w in world.workloads if w.state == "pending"])
    return Run(seconds, cpu, _peak(), {"victims": victims, "then": then[0]})


def _cold(size: int) -> Run:
    """R4: a snapshot that the engine has not seen before."""
    world = nothing_fits(size)
    seconds, cpu, plan = _timed(lambda: schedule(world), 1)
    peak = _peak()
    assert not plan.start
    assert not plan.evict
    # Imported here: the models of files are no part of the engine, whose memory is measured.
    from makeway_quota.snapshot_file import read_snapshot, write_snapshot

    text = write_snapshot(world, "json")
    begin = time.perf_counter()
    assert read_snapshot(text) == world
    read = time.perf_counter() - begin
    running = sum(w.state == "running" for w in world.workloads)
    return Run(seconds, cpu, peak, {"running": running, "waiting": len(plan.pending), "read": read})


def _staying(size: int) -> Run:
    """R3: nothing fits, and one job after the other ends; what is started runs from then on."""
    world = nothing_fits(size)
    running = [w for w in world.workloads if w.state == "running"]
    incremental, now = IncrementalEngine(world), world.now
    incremental.plan(now)
    cold_peak, started = _peak(), 0
    gc.collect()
    seconds, cpu = [], []
    for workload in running[:: len(running) // ENDS][:ENDS]:
        now += 1
        begin, busy = time.perf_counter(), time.process_time()
        incremental.change((), [workload.id])
        plan = incremental.plan(now)
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - busy)
        started_now = {start.id: start.placement for start in plan.start}
        started += bool(started_now)
        waiting = [w for w in world.workloads if w.id in started_now]
        incremental.change([replace(w, state="running", started_at=now, placement=started_now[w.id]) for w in waiting])
    return Run(seconds, median(cpu), _peak(), {"started": started, "cold_peak": cold_peak})


def _timed(work: Callable[[], Any], repeats: int) -> tuple[list[float], float, Any]:
    seconds, cpu, result = [], [], None
    for _ in range(repeats):
        result = None
        gc.collect()
        begin, busy = time.perf_counter(), time.process_time()
        result = work()
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - busy)
    return seconds, median(cpu), result


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


CASES: dict[str, Callable[[int], Run]] = {
    "R1": lambda size: _reclaim(all_at_once(size), size * GPUS_PER_NODE),
    "R2": lambda size: _reclaim(one_gang(size), size // 2 * GPUS_PER_NODE),
    "R3": _staying,
    "R4": _cold,
    "R5": lambda size: _reclaim(shared_machines(size), size * GPUS_PER_NODE),
    "R6": lambda size: _reclaim(gang_on_shared_machines(size), size // 2 * GPUS_PER_NODE),
}

if __name__ == "__main__":
    collect_less()  # as the service does
    found = CASES[sys.argv[1]](int(sys.argv[2]))
    print(json.dumps({"seconds": found.seconds, "cpu": found.cpu, "peak": found.peak, "facts": found.facts}))
