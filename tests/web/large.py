"""A portal at size: a thousand nodes of eight GPUs, fifty teams, thousands of workloads, all in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.store.records import NewWorkload
from running import running
from web.portal import PEOPLE, Portal, caller

NODES, GPUS, TEAMS = 1_000, 8, 50
SIZES = (1, 2, 4, 8)


def policy(nodes: int = NODES, teams: int = TEAMS, departments: int = 0) -> str:
    """The policy document: every team reserves its part of the one pool, in one of so many departments."""
    names = [f"team{at:02}" for at in range(teams)]
    share = nodes * GPUS // teams
    profiles = "".join(
        f"  - {{name: gpu{size}, title: {size} GPUs, gpus: {size}, pools: [h100], policies: [[{', '.join(names)}]]}}\n"
        for size in SIZES
    )
    policies = "".join(
        f"  - {{name: {name}, title: Team {name[4:]}, groups: [{name}], quotas: [{{reserved: {share}}}]"
        f"{f', parent: dep{at % departments}' if departments else ''}}}\n"
        for at, name in enumerate(names)
    )
    policies += "".join(f"  - {{name: dep{at}, title: Department {at}}}\n" for at in range(departments))
    return f"version: 1\npools:\n  - {{name: h100, size: {nodes * GPUS}}}\nprofiles:\n{profiles}policies:\n{policies}"


@asynccontextmanager
async def large_portal(
    state: Path,
    *,
    nodes: int = NODES,
    running_jobs: int = 3_000,
    waiting_jobs: int = 6_000,
    teams: int = TEAMS,
    departments: int = 0,
) -> AsyncIterator[Portal]:
    """Start a portal on so many nodes, with work that runs and work that waits; nothing is executed."""
    seen = [
        NodeStatus(f"node-{at:04}", "h100", tuple(range(GPUS)), model="H100", ready=at % 97 != 5) for at in range(nodes)
    ]
    people = PEOPLE | {"tess": caller("tess", "read", "submit", groups=("team07",))}
    async with running(
        state, policy(nodes, teams, departments), backend=MemoryBackend(seen, real_time=True), people=people
    ) as run:
        made = Portal(run, run.service.components.backend)  # type: ignore[arg-type]
        store = run.service.components.store
        store.add_workloads(
            [
                (
                    NewWorkload(
                        id=f"j-{at:05}",
                        kind="job",
                        team=f"team{(at * 7) % teams:02}",
                        profile=f"gpu{SIZES[at % 4] if at < running_jobs else 8}",
                        owner=f"user{at % 500}",
                        name=f"train {at}",
                        gpus=1000 * (SIZES[at % 4] if at < running_jobs else 8),
                    ),
                    (),
                    None,
                )
                for at in range(running_jobs + waiting_jobs)
            ],
            now=run.service.components.clock(),
        )
        run.service.loop.wake()
        try:
            yield made
        finally:
            await made.close()
