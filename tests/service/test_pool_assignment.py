"""Several pools on one machine: the policy document assigns each GPU to a pool, and may change that at any time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from makeway_api.errors import MakewayError
from makeway_quota import policy
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.world import pool_assignment
from makeway_quota.values import Place, host_of
from running import Running, python, running

TWO = """
version: 1
pools:
  - {name: h100, title: H100, nodes: {local: {gpus: [8, 9, 10, 11, 12, 13, 14, 15]}}}
  - {name: metal, title: Metal, nodes: {local: {gpus: all}}}
profiles:
  - {name: gpu4, title: 4 GPUs, gpus: 4, pools: [metal, h100], policies: [dev, research]}
  - {name: metal1, title: 1 metal GPU, gpus: 1, pools: [metal], policies: [[dev, research]]}
  - {name: cpu, title: CPU, gpus: 0, pools: [h100], kinds: [session]}
policies:
  - {name: dev, groups: [rnd], quotas: [{reserved: 8, limit: 16}]}
  - {name: research, groups: [devops], quotas: [{reserved: 8, limit: 16}]}
"""
ONE = """
version: 1
pools: [{name: h100{nodes}}]
profiles: [{name: gpu1, gpus: 1, policies: [dev]}]
policies: [{name: dev, groups: [rnd], quotas: [{reserved: 4}]}]
"""
SEES = python("import os; print('gpus', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); import time; time.sleep(600)")


async def where(run: Running) -> dict[str, list[int]]:
    """The devices in use of every pool."""
    pools = await run.client("root").pools()
    return {p.name: [d.index for n in p.nodes for d in n.devices if d.holders] for p in pools}


async def apply(run: Running, text: str) -> None:
    """Apply a document as `makeway policy apply` does."""
    root = run.client("root")
    await root.policy_apply(text, base=(await root.policy()).version)


@pytest.mark.covers("F02", "F06", "F07")
async def test_two_pools_of_one_machine(tmp_path: Path) -> None:
    """Like golden scenario G2, but one after the other, with real processes on the GPUs of one machine."""
    async with running(tmp_path, TWO, gpus=16) as run:
        pools = {pool.name: pool for pool in await run.client("root").pools()}
        assert {name: (pool.total, [n.name for n in pool.nodes]) for name, pool in pools.items()} == {
            "h100": (8, ["virtual-1"]),
            "metal": (8, ["virtual-1"]),
        }
        assert (await run.client("root").usage()).total == 16
        first = await run.submit("ana", "d0", SEES, profile="gpu4")
        assert (await run.job(first.id, "running")).placement[0].devices == [0, 1, 2, 3], "metal comes first"
        await run.until(lambda: log(run, first.id), "the job says what it sees")
        assert await log(run, first.id) == "gpus 0,1,2,3\n"
        for i in range(1, 4):
            await run.submit("ana", f"d{i}", profile="gpu4")
        await run.until(lambda: full(run, "dev", 4), "dev is on both pools while research is idle")
        assert await where(run) == {"metal": list(range(8)), "h100": list(range(8, 16))}
        for i in range(4):
            await run.submit("bo", f"r{i}", profile="gpu4")
        await run.until(lambda: full(run, "research", 2), "research has what it reserves")
        await run.converged()
        states = await run.states()
        assert {name for name, state in states.items() if state == "running"} == {"d2", "d3", "r0", "r1"}
        placed = {j.name: j.placement[0].devices for j in (await run.client("root").jobs(state="running")).jobs}
        assert sorted(placed["r0"] + placed["r1"]) == list(range(8)), "reclaimed in the pool that comes first"
        assert sorted(placed["d2"] + placed["d3"]) == list(range(8, 16))
        session = await run.session("ana", "cpu", "dev")
        granted = await run.granted(session.id)
        assert [g.node for g in granted.placement] == ["virtual-1"], "a divided machine has its one name"


async def full(run: Running, team: str, count: int) -> bool:
    return [*(await run.states(team)).values()].count("running") == count


async def log(run: Running, id: str) -> str:
    return str((await run.client("root").logs(id)).text)


@pytest.mark.covers("F02", "F12")
async def test_a_new_document_moves_gpus_between_pools(tmp_path: Path) -> None:
    one = TWO.replace("[8, 9, 10, 11, 12, 13, 14, 15]", "[14, 15]")
    async with running(tmp_path, one, gpus=16) as run:
        jobs = [await run.submit("ana", f"m{i}", profile="metal1") for i in range(15)]
        await run.until(lambda: full(run, "dev", 14), "metal is full")
        waiting = await run.job(jobs[14].id)
        assert waiting.reason is not None
        assert "metal" in waiting.reason.message
        more = await run.client("root").policy_preview(TWO.replace("[8, 9, 10, 11, 12, 13, 14, 15]", "[15]"))
        assert [effect.name for effect in more.starts] == ["m14"]
        await apply(run, TWO.replace("[8, 9, 10, 11, 12, 13, 14, 15]", "[15]"))
        await run.job(jobs[14].id, "running")
        assert (await where(run))["metal"] == list(range(15))
        await apply(run, TWO)
        assert (await where(run))["h100"] == list(range(8, 15)), "what runs there runs on"
        await run.converged()
        assert set((await run.states()).values()) == {"running"}


FREE = ONE.replace("reserved: 4", "reserved: 0, limit: 9")


def gpus(listed: str) -> str:
    return FREE.replace("{nodes}", f", nodes: {{local: {{gpus: {listed}}}}}")


@pytest.mark.covers("F02")
@pytest.mark.parametrize("left", ["[0, 1]", "[0, 1, 5]", "[5]", "[99]"])
async def test_work_on_gpus_that_leave_their_pool_is_counted_and_named_until_it_ends(tmp_path: Path, left: str) -> None:
    async with running(tmp_path, gpus("[0, 1, 2, 3]"), gpus=6) as run:
        root, ana = run.client("root"), run.client("ana")
        jobs = [await run.submit("ana", f"j{i}", profile="gpu1") for i in range(4)]
        for job in jobs:
            await run.job(job.id, "running")
        preview = await root.policy_preview(gpus(left))
        kept = {index for index in range(4) if str(index) in left}
        assert {effect.name for effect in preview.outside} == {f"j{i}" for i in range(4) if i not in kept}
        assert all("which is then in no pool, until it ends" in effect.message for effect in preview.outside)
        assert (await root.policy_preview(gpus("[0, 1, 2, 3, 4]"))).outside == []
        own = 0 if left == "[99]" else left.count(",") + 1
        await apply(run, gpus(left))
        await run.converged()
        assert (await root.policy_preview(gpus(left))).outside == [], "that is so already"
        for ended in range(5):
            usage = await root.usage()
            runs = [f"j{i}" for i in range(ended, 4)]
            out = [name for name in runs if int(name[1]) not in kept]
            assert usage.used == usage.teams[0].used == len(runs)
            assert usage.total == own + len(out)
            assert usage.free == own - (len(runs) - len(out))
            [pool] = await root.pools()
            assert (pool.used, pool.total, pool.free) == (usage.used, usage.total, usage.free)
            named = {d.index: [h.name for h in d.holders] for n in pool.nodes for d in n.devices if d.holders}
            assert named == {int(name[1]): [name] for name in runs}
            marked = {d.index for n in pool.nodes for d in n.devices if d.outside}
            assert marked == {int(name[1]) for name in out}
            offers = await ana.offers(kind="job")
            assert offers.usage[0].used == len(runs)
            assert offers.usage[0].mine == len(runs)
            if ended < 4:
                await root.cancel(jobs[ended].id)
                await run.job(jobs[ended].id, "cancelled")
                await run.converged()


@pytest.mark.parametrize("change", [{"labels": {}}, {"devices": (0,)}, {"devices": (), "labels": {}}])
async def test_work_on_a_node_or_device_that_no_pool_has_any_more_is_shown_where_it_counts(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    labels = {"gpu": "h100"}
    machines = [NodeStatus(name, "", (0, 1), labels=labels, cpu=64_000, memory=64_000) for name in ("n1", "n2")]
    backend = MemoryBackend(machines, real_time=True)
    text = FREE.replace("{nodes}", ", nodes: {labels: {gpu: h100}}")
    async with running(tmp_path, text.replace("gpus: 1,", "gpus: 2,"), backend=backend) as run:
        jobs = [await run.submit("ana", f"j{i}", profile="gpu1") for i in range(2)]
        for job in jobs:
            await run.job(job.id, "running")
        backend.nodes["n1"] = replace(machines[0], **change)
        run.service.loop.wake()
        own = {"n1": (), "n2": (0, 1)} if "labels" in change else {"n1": (0,), "n2": (0, 1)}

        async def follows() -> bool:
            [pool] = await run.client("root").pools()
            marked = {(n.name, d.index) for n in pool.nodes for d in n.devices if d.outside}
            return marked == {("n1", index) for index in (0, 1) if index not in own["n1"]}

        await run.until(follows, "the GPUs are marked")
        for _ in range(2):  # also once something else has changed
            usage, [pool] = await run.client("root").usage(), await run.client("root").pools()
            assert (usage.used, pool.used, usage.teams[0].used, usage.total, usage.free) == (4, 4, 4, 4, 0)
            assert sorted(h.name for n in pool.nodes for d in n.devices for h in d.holders) == ["j0", "j0", "j1", "j1"]
            await run.submit("ana", "waits", profile="gpu1")
            await run.converged()
        for job in jobs:
            if (await run.client("root").job(job.id)).placement[0].node == "n1":
                await run.client("root").cancel(job.id)
                await run.job(job.id, "cancelled")
        await run.converged()
        [pool] = await run.client("root").pools()
        assert not any(d.outside for n in pool.nodes for d in n.devices)
        assert pool.total == len(own["n1"]) + 2


@pytest.mark.covers("F02")
@pytest.mark.parametrize("nodes", ["", ", nodes: {local: {gpus: all}}", ", nodes: {local: {gpus: [0, 1, 2, 3]}}"])
async def test_the_only_pool_may_have_any_name(tmp_path: Path, nodes: str) -> None:
    async with running(tmp_path, ONE.replace("{nodes}", nodes), gpus=6) as run:
        job = await run.submit("ana", "j", profile="gpu1")
        await run.job(job.id, "running")
        [pool] = await run.client("root").pools()
        assert (pool.name, pool.total) == ("h100", 4 if "3" in nodes else 6)


async def test_more_than_a_pools_own_gpus_cannot_be_reserved(tmp_path: Path) -> None:
    async with running(tmp_path, TWO, gpus=16) as run:
        root = run.client("root")
        greedy = TWO.replace("[{reserved: 8, limit: 16}]", "[{pools: [h100], reserved: 5}]")
        check = await root.policy_validate(greedy)
        assert [issue.message for issue in check.issues] == [
            "10 GPUs are reserved in pool h100 (dev 5 GPUs, research 5 GPUs), but there are 8 GPUs; "
            "reserve less or add GPUs"
        ]
        for nodes in ("", ", nodes: {local: {gpus: [99]}}"):
            nowhere = greedy.replace(", nodes: {local: {gpus: [8, 9, 10, 11, 12, 13, 14, 15]}}", nodes)
            with pytest.raises(MakewayError, match=r"there are 0 GPUs; say which GPUs are in it with nodes:"):
                await apply(run, nowhere)
        assert (await root.policy()).version == 1


def test_cpu_and_memory_go_with_the_gpus_and_work_over_the_border_is_foreign() -> None:
    document = policy.read_policy(TWO)
    seen = NodeStatus("host", "", tuple(range(16)), cpu=64_000, memory=1600, foreign={3: 1000, 9: 250})
    result = pool_assignment.divide([seen], document)
    assert [(n.pool, n.cpu, n.memory, dict(n.foreign)) for n in result.nodes] == [
        ("h100", 32_000, 800, {9: 250}),
        ("metal", 32_000, 800, {3: 1000}),
    ]
    border = Place("host", (6, 7, 8), (1000,) * 3)
    [placed] = result.placement([border])
    assert host_of(placed.node) == "host"
    assert placed.node == "host/metal"
    nodes = {node.name: node for node in result.as_nodes("host", [])}
    assert nodes["host/metal"].foreign_devices == (3,)
    assert nodes["host/h100"].foreign_gpus == 250


@pytest.mark.covers("F02")
def test_a_node_is_in_the_pool_whose_labels_it_has() -> None:
    document = policy.read_policy(
        ONE.replace("{name: h100{nodes}}", "{name: h100}, {name: a100, nodes: {labels: {gpu: a100, zone: b}}}")
    )
    labels = {"gpu": "a100", "zone": "b", "other": "x"}
    nodes = [
        NodeStatus("n1", "", (0, 1), labels=labels),
        NodeStatus("n2", "", (0, 1), labels=labels | {"zone": "c"}),
        NodeStatus("n3", "h100", (0, 1), labels=labels),
    ]
    result = pool_assignment.divide(nodes, document)
    assert [(name, result.pools_of(name)) for name in ("n1", "n3")] == [
        ("n1", (("a100", (0, 1)),)),
        ("n3", (("h100", (0, 1)),)),
    ]
    assert "a100" not in dict(result.pools_of("n2")), "one label is another"


@pytest.mark.covers("F02")
def test_the_engine_sees_what_a_backend_knows_of_a_node() -> None:
    seen = NodeStatus(
        "n1",
        "gpu",
        (0, 1, 2),
        model="H100",
        cpu=64_000,
        memory=1000,
        cordoned=True,
        foreign={1: 1000, 2: 250},
        foreign_gpus=500,
        foreign_cpu=4000,
        foreign_memory=100,
        sessions=False,
    )
    (node,) = pool_assignment.divide([seen], policy.read_policy(TWO)).as_nodes("n1", [])
    assert (node.model, node.cordoned, node.foreign_cpu, node.foreign_memory) == ("H100", True, 4000, 100)
    assert not node.sessions
    assert (node.foreign_devices, node.foreign_gpus) == ((1,), 750), "on devices that are not known as well"
