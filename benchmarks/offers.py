"""Measure what an offer takes at 1,000 nodes (the engine alone): the first of each team, and after one job ended."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from makeway_quota.engine import (
    GPU,
    Node,
    Placed,
    Pool,
    Profile,
    QuotaLine,
    Settings,
    Snapshot,
    TeamQuota,
    WhatIf,
    Workload,
)

from .measure import Measured

NODES, DEVICES, TEAMS = 1000, 8, 50
SIZES = (1, 2, 4, 8)
GOAL = 50.0
"""milliseconds for all profiles of one team"""


def measure() -> Iterator[Measured]:
    """Measure a cluster full of whole nodes, and one full of single GPUs."""
    for size, pending in ((8, 5000), (1, 20_000)):
        result = costs(size, pending)
        crowd = f"{NODES} nodes, {NODES * DEVICES // size} jobs of {size} GPUs run, {pending} wait, {TEAMS} teams"
        for kind, facts in result.items():
            yield Measured(
                f"offers of a team for a {kind}, first question, {crowd}",
                "ms",
                facts["first"],
                "the same after one job ended",
                facts["later_median"],
                GOAL,
                f"of one processor; what-if built in {facts['build']:.0f} ms, one end taken in {facts['renew']:.2f} ms",
                facts,
            )


def world(size: int, pending: int) -> Snapshot:
    """Return a full pool: teams reserve half of it together, and each runs and submits the same number of jobs."""
    running = NODES * DEVICES // size
    workloads = []
    for at in range(running + pending):
        team = at % TEAMS
        node, first = divmod(at * size, DEVICES)
        placement = (Placed(0, f"n{node:05}", tuple(range(first, first + size)), GPU),) if at < running else ()
        workloads.append(
            Workload(
                f"j-{at:06}",
                f"team{team:02}",
                f"gpu{size}",
                owner=f"user{team:02}-{at // TEAMS % 10}",
                kind="job",
                submitted_at=1000.0 + at / 1000,
                state="running" if placement else "pending",
                started_at=2000.0 + at / 1000 if placement else None,
                placement=placement,
            )
        )
    item = NODES * DEVICES * GPU // TEAMS // 2
    teams = tuple(f"team{at:02}" for at in range(TEAMS))
    return Snapshot(
        now=4000.0,
        settings=Settings(),
        pools=(Pool("gpu", profiles=tuple(f"gpu{n}" for n in SIZES)),),
        profiles=tuple(Profile(f"gpu{n}", n * GPU, pools=("gpu",), policies=(teams,)) for n in SIZES),
        policies=tuple(TeamQuota(name, quotas=(QuotaLine(("gpu",), item),)) for name in teams),
        nodes=tuple(Node(f"n{at:05}", "gpu", DEVICES) for at in range(NODES)),
        workloads=tuple(workloads),
    )


def costs(size: int, pending: int, teams: int = TEAMS) -> dict[str, dict[str, Any]]:
    """Return for sessions and jobs the milliseconds of one processor for the offers of each team in turn."""
    snapshot = world(size, pending)
    result: dict[str, dict[str, Any]] = {}
    for kind in ("session", "job"):
        began = time.process_time()
        what_if = WhatIf(snapshot)
        _ask(what_if, kind, 0)
        build = _since(began)
        first = []
        for team in range(1, teams):
            began = time.process_time()
            _ask(what_if, kind, team)
            first.append(_since(began))
        later, renew = [], []
        now = snapshot
        for team in range(teams):
            ended = next(w for w in now.workloads if w.state == "running")
            now = replace(now, workloads=tuple(w for w in now.workloads if w is not ended))
            began = time.process_time()
            what_if.renew(now)
            renew.append(_since(began))
            began = time.process_time()
            _ask(what_if, kind, team)
            later.append(_since(began))
        result[kind] = {
            "build": build,
            "first": first,
            "first_worst": max(first),
            "later_median": sorted(later)[len(later) // 2],
            "later_worst": max(later),
            "renew": sorted(renew)[len(renew) // 2],
        }
    return result


def _ask(what_if: WhatIf, kind: str, team: int) -> None:
    for size in SIZES:
        what_if.offer(f"team{team:02}", f"gpu{size}", "job" if kind == "job" else "session", f"user{team:02}-0")


def _since(began: float) -> float:
    return 1000 * (time.process_time() - began)


if __name__ == "__main__":
    for kind, facts in costs(*map(int, sys.argv[1:])).items():
        print(kind, json.dumps({name: round(each, 1) for name, each in facts.items() if name != "first"}), flush=True)
