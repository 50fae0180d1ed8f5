"""All pages and answers count the same GPUs and nodes, ready or not."""

from __future__ import annotations

from pathlib import Path

from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.policy import read_policy
from makeway_quota.web.pages.nodes import STATES, NodeLine
from running import running

NODES = [
    NodeStatus("busy", "gpu", (0, 1, 2, 3)),
    NodeStatus("down", "gpu", (0, 1, 2, 3), ready=False),
    NodeStatus("drained", "gpu", (0, 1, 2, 3), cordoned=True),
    NodeStatus("others", "gpu", (0, 1, 2, 3), foreign={1: 500}, foreign_gpus=1500),
    NodeStatus("spare", "gpu", (0, 1, 2, 3)),
]


async def test_free_and_all_are_the_same_everywhere(tmp_path: Path) -> None:
    async with running(tmp_path, backend=MemoryBackend(NODES, real_time=True)) as run:
        await run.job((await run.submit("ana", "j", profile="gpu3")).id, "running")
        client = run.client("root")
        usage, (pool,) = await client.usage(), await client.pools()
        devices = {node.name: sum(device.free for device in node.devices) for node in pool.nodes}
        assert sum(devices.values()) == pool.free == usage.free == 8 + 2 - 3
        assert (devices["down"], devices["drained"], devices["others"]) == (0, 0, 2)
        assert pool.total == usage.total == 20
        assert {node.name: node.foreign for node in pool.nodes if node.foreign} == {"others": 2}
        lines = [NodeLine(node, pool.name, 0.0, ()) for node in pool.nodes]
        assert [line.node.name for line in lines if line.is_in("")] == [node.name for node in NODES]
        for state in STATES:
            for line in lines:
                if line.is_in(state) and state == "free":
                    assert devices[line.node.name] > 0
        assert [line.node.name for line in lines if line.is_in("down")] == ["down"]
        assert sum(line.is_in("free") + line.is_in("full") + line.is_in("down") for line in lines) == len(NODES)


POLICY = """
version: 1
pools: [{name: gpu, size: 10, nodes: {local: {gpus: all}}}]
profiles:
  - {name: gpu2, title: 2 GPUs, gpus: 2, pools: [gpu], policies: [[a, b]], kinds: [job]}
policies:
  - {name: a, title: Team A, groups: [rnd], quotas: [{pools: [gpu], reserved: 4}]}
  - {name: b, title: Team B, groups: [devops], quotas: [{pools: [gpu], reserved: 4}]}
"""
WITHOUT_B = POLICY[: POLICY.index("  - {name: b,")].replace("[[a, b]]", "[[a]]")


async def test_what_a_removed_team_runs_is_a_line_of_its_own_until_it_ends(tmp_path: Path) -> None:
    async with running(tmp_path, POLICY) as run:
        mine = await run.submit("ana", "mine", profile="gpu2")
        remaining = await run.submit("bo", "left", profile="gpu2")
        for job in (mine, remaining):
            await run.job(job.id, "running")
        client, world = run.client("root"), run.service.services.context.world
        assert [(team.team, team.removed) for team in (await client.usage()).teams] == [("a", False), ("b", False)]
        world.use(read_policy(WITHOUT_B, "p.yaml"), world.policy_version + 1)
        usage, (pool,) = await client.usage(), await client.pools()
        assert [(team.team, team.removed, team.used) for team in usage.teams] == [("a", False, 2), ("b", True, 2)]
        removed = usage.teams[1]
        assert (removed.title, removed.reserved, removed.borrowed) == ("b (removed)", 0, 2)
        assert sum(team.used for team in usage.teams) == usage.used == pool.used == 4
        assert usage.used + usage.free == usage.total
        assert (await client.job(remaining.id)).over_quota, "no reservation covers it any more"
        others = (await run.client("ana").usage()).teams
        assert [team.team for team in others] == ["a"], "it is no team of hers"
        await client.cancel(remaining.id)
        await run.job(remaining.id, "cancelled")
        assert [team.team for team in (await client.usage()).teams] == ["a"]
