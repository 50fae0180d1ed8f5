"""All pages and answers count the same GPUs and nodes, ready or not."""

from __future__ import annotations

from pathlib import Path

from makeway_quota.backends.base import NodeSeen
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.web.pages.nodes import STATES, NodeLine
from running import running

NODES = [
    NodeSeen("busy", "gpu", (0, 1, 2, 3)),
    NodeSeen("down", "gpu", (0, 1, 2, 3), ready=False),
    NodeSeen("drained", "gpu", (0, 1, 2, 3), cordoned=True),
    NodeSeen("others", "gpu", (0, 1, 2, 3), foreign={1: 500}, foreign_gpus=1500),
    NodeSeen("spare", "gpu", (0, 1, 2, 3)),
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
        lines = [NodeLine(node, pool.name, 0.0, ()) for node in pool.nodes]
        assert [line.node.name for line in lines if line.is_in("")] == [node.name for node in NODES]
        for state in STATES:
            for line in lines:
                if line.is_in(state) and state == "free":
                    assert devices[line.node.name] > 0
        assert [line.node.name for line in lines if line.is_in("down")] == ["down"]
        assert sum(line.is_in("free") + line.is_in("full") + line.is_in("down") for line in lines) == len(NODES)
