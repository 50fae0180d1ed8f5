"""A mixed-MIG node beside a time-sliced one, through the whole service: a pool for each resource, CPU shared (K3)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import Device
from makeway_quota.backends.base import NodePart, NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.values import MAX_DEVICES
from running import Running, running

POLICY = """
version: 1
pools:
- {name: whole, title: Whole GPUs, nodes: {labels: {gpu: h100}}}
- {name: slices, title: MIG slices, resource: nvidia.com/mig-1g.10gb, nodes: {labels: {gpu: h100}}}
- {name: shared, title: Shared GPUs, resource: nvidia.com/gpu.shared, nodes: {labels: {gpu: a10}}}
profiles:
- {name: gpu1, gpus: 1, cpu: 8, pools: [whole], policies: [[rnd, devops]]}
- {name: slice1, gpus: 1, cpu: 2, pools: [slices], policies: [[rnd, devops]]}
- {name: shared1, gpus: 1, cpu: 1, pools: [shared], policies: [[rnd, devops]]}
policies:
- {name: rnd, groups: [rnd], quotas: [{pools: [whole], reserved: 1}, {pools: [slices], reserved: 3}, {pools: [shared], reserved: 2}]}
- {name: devops, groups: [devops], quotas: [{pools: [whole], reserved: 1}, {pools: [slices], reserved: 2}, {pools: [shared], reserved: 2}]}
"""  # noqa: E501


def mixed(whole: int = 2, slices: int = 7) -> NodeStatus:
    """Return a node with whole GPUs and slices, 24 cores for both."""
    parts = (
        NodePart("whole", tuple(range(5 * MAX_DEVICES, 5 * MAX_DEVICES + whole))),
        NodePart("slices", tuple(range(9 * MAX_DEVICES, 9 * MAX_DEVICES + slices))),
    )
    devices = parts[0].devices + parts[1].devices
    return NodeStatus("mixed", "whole", devices, cpu=24_000, max_pods=110, anonymous_devices=True, parts=parts)


def shared() -> NodeStatus:
    """Return a node whose 4 GPUs are shared by time."""
    return NodeStatus("timed", "shared", (0, 1, 2, 3), cpu=8000, max_pods=110, anonymous_devices=True)


async def in_use(run: Running) -> dict[str, dict[str, list[int]]]:
    """Return the devices in use by pool and node."""
    pools = await run.client("root").pools()
    return {p.name: {n.name: [d.index for d in n.devices if d.holders] for n in p.nodes} for p in pools}


@pytest.mark.covers("F02", "F15")
async def test_notebooks_and_jobs_run_in_each_pool_of_a_node_and_a_reclaim_takes_no_more_than_it_lacks(
    tmp_path: Path,
) -> None:
    backend = MemoryBackend([mixed(), shared()], real_time=True)
    async with running(tmp_path, POLICY, backend=backend) as run:
        pools = {
            pool.name: (pool.total, [node.name for node in pool.nodes]) for pool in await run.client("root").pools()
        }
        assert pools == {"whole": (2, ["mixed"]), "slices": (7, ["mixed"]), "shared": (4, ["timed"])}
        session = await run.granted((await run.session("ana", "slice1", "rnd")).id)
        assert (session.placement[0].node, session.placement[0].devices) == ("mixed", [0])
        assert session.resource == "nvidia.com/mig-1g.10gb"
        for name, profile in (("w", "gpu1"), ("t", "shared1"), *((f"s{at}", "slice1") for at in range(6))):
            job = await run.submit("ana", name, profile=profile)
            await run.job(job.id, "running")
        assert await in_use(run) == {
            "whole": {"mixed": [0]},
            "slices": {"mixed": list(range(7))},
            "shared": {"timed": [0]},
        }
        mine = await run.submit("bo", "b", profile="slice1")
        await run.until(lambda: left(run, 1), "a job of the slices makes way")
        await run.job(mine.id, "running")
        states = await run.states()
        assert states["w"] == states["t"] == "running", "no work of another pool"
        whole = await run.submit("bo", "cpu", profile="gpu1")
        await run.job(whole.id, "running")
        assert await left(run, 4), "8 + 7 x 2 of 24 cores were in use, and rnd keeps the 3 slices that it reserved"
        states = await run.states()
        assert states["w"] == "running"


@pytest.mark.covers("F02", "F09", "N03")
async def test_jobs_over_quota_of_one_pool_make_way_for_a_guaranteed_job_that_lacks_only_cores_in_another(
    tmp_path: Path,
) -> None:
    backend = MemoryBackend([mixed(), shared()], real_time=True)
    async with running(tmp_path, POLICY, backend=backend) as run:
        first = await run.submit("ana", "w", profile="gpu1")
        await run.job(first.id, "running")
        slices = [await run.submit("ana", f"s{at}", profile="slice1") for at in range(7)]
        for job in slices:
            await run.job(job.id, "running")
        offer = next(item for item in (await run.client("bo").offers("bo", "job")).offers if item.profile == "gpu1")
        assert offer.code == "ready_after_reclaim"
        assert "3 of rnd's jobs (1 GPU each) make way" in offer.message, "8 + 7 x 2 of 24 cores are in use"
        mine = await run.submit("bo", "b", profile="gpu1")
        await run.job(mine.id, "running")
        states = await run.states()
        gone = [job for job in slices if states[job.name] != "running"]
        assert len(gone) == 3
        assert states["w"] == "running"
        told = [line.message for line in await run.client("ana").job_events(gone[0].id)]
        assert any("It makes way for a start in pool whole that needs CPU of mixed" in message for message in told), (
            told
        )
        usage = {team.team: team for team in (await run.client("root").usage()).teams}
        assert (usage["rnd"].used, usage["devops"].used) == (5, 1)


@pytest.mark.covers("F02", "F15")
async def test_a_guaranteed_job_waits_and_names_the_pool_whose_guaranteed_work_uses_the_cores(tmp_path: Path) -> None:
    policy = POLICY.replace("{pools: [slices], reserved: 3}", "{pools: [slices], reserved: 7}")
    backend = MemoryBackend([mixed(), shared()], real_time=True)
    async with running(tmp_path, policy.replace("{pools: [slices], reserved: 2}, ", ""), backend=backend) as run:
        for name, profile in (("w", "gpu1"), *((f"s{at}", "slice1") for at in range(7))):
            job = await run.submit("ana", name, profile=profile)
            await run.job(job.id, "running")
        waits = await run.submit("bo", "cpu", profile="gpu1")
        await run.converged()
        reason = (await run.job(waits.id, "pending")).reason
        assert reason is not None
        assert "Its nodes offer GPUs in pool slices, too" in reason.message


async def left(run: Running, many: int) -> bool:
    """Whether so many jobs of slices made way."""
    states = await run.states()
    return sum(states[f"s{at}"] != "running" for at in range(6)) == many


@pytest.mark.covers("F02")
async def test_a_job_keeps_its_pool_while_its_gpus_are_cut_up(tmp_path: Path) -> None:
    backend = MemoryBackend([mixed(), shared()], real_time=True)
    async with running(tmp_path, POLICY, backend=backend) as run:
        job = await run.submit("ana", "w", profile="gpu1")
        await run.job(job.id, "running")
        backend.nodes["mixed"] = mixed(whole=0, slices=14)
        backend.node_back("mixed")
        await run.until(lambda: total(run, "slices", 14), "the slices are there")
        assert (await run.job(job.id, "running")).placement[0].node == "mixed"
        usage = {team.team: team for team in (await run.client("root").usage()).teams}
        assert usage["rnd"].used == 1
        other = await run.submit("bo", "b", profile="slice1")
        await run.job(other.id, "running")
        states = await run.states()
        assert states == {"w": "running", "b": "running"}
        backend.nodes["mixed"] = replace(mixed(slices=14), parts=(), pool="slices", devices=tuple(range(14)))
        backend.node_back("mixed")
        await run.until(lambda: total(run, "whole", 0), "the pool is gone from the node")
        assert (await run.states())["w"] == "running"


def renumbered(whole: int, slices: int | None) -> NodeStatus:
    """Return a node with GPUs and slices; without slices (None) its GPUs have the indices from 0 on."""
    if slices is not None:
        return replace(mixed(whole, slices), cpu=80_000)
    return NodeStatus("mixed", "whole", tuple(range(whole)), cpu=80_000, max_pods=110, anonymous_devices=True)


@pytest.mark.covers("F02", "F15")
@pytest.mark.parametrize(("first", "second"), [((8, None), (8, 7)), ((8, 7), (8, None))])
async def test_devices_that_get_other_indices_under_running_jobs_are_counted_and_shown_once(
    tmp_path: Path, first: tuple[int, int | None], second: tuple[int, int | None]
) -> None:
    backend = MemoryBackend([renumbered(*first), shared()], real_time=True)
    async with running(tmp_path, POLICY, backend=backend) as run:
        jobs = [await run.submit("ana", f"w{at}", profile="gpu1") for at in range(4)]
        for job in jobs:
            await run.job(job.id, "running")
        for shown, total, outside in ((second, 8, 0), ((4, second[1]), 4, 0), ((2, second[1]), 4, 2), (first, 8, 0)):
            backend.nodes["mixed"] = renumbered(*shown)
            backend.node_back("mixed")
            await run.until(lambda total=total, outside=outside: is_shown(run, total, outside), f"{shown} is shown")
            [devices] = await devices_of(run, "whole")
            assert len({device.index for device in devices}) == len(devices) == total, "each ordinal once"
            assert sorted(h.name for d in devices for h in d.holders) == ["w0", "w1", "w2", "w3"]
            assert max(len(device.holders) for device in devices) == 1
            pool = {p.name: p for p in await run.client("root").pools()}["whole"]
            assert (pool.used, pool.free) == (4, total - 4)
            assert sum(device.free for device in devices) == pool.free
        backend.nodes["mixed"] = renumbered(*second)
        backend.node_back("mixed")
        more = [await run.submit("ana", f"x{at}", profile="gpu1") for at in range(4)]
        for job in more:
            await run.job(job.id, "running")
        [devices] = await devices_of(run, "whole")
        assert [len(device.holders) for device in devices] == [1] * 8, "those that started since are beside them"


async def devices_of(run: Running, pool: str) -> list[list[Device]]:
    """Return the devices of each node of a pool."""
    return [node.devices for item in await run.client("root").pools() if item.name == pool for node in item.nodes]


async def is_shown(run: Running, total: int, outside: int) -> bool:
    """Whether the whole GPUs are so many, of which so many are held beyond those that the node shows."""
    [devices] = await devices_of(run, "whole")
    return (len(devices), sum(device.outside for device in devices)) == (total, outside)


async def total(run: Running, pool: str, many: int) -> bool:
    """Whether a pool has so many GPUs."""
    return {p.name: p.total for p in await run.client("root").pools()}[pool] == many


CLAIMS = "pod: {spec: {resourceClaims: [{name: gpus, resourceClaimTemplateName: one-slice}]}}"


@pytest.mark.covers("F02", "F82")
@pytest.mark.parametrize("platform", ["kubernetes", "local"])
async def test_the_lease_of_a_notebook_has_the_claims_of_its_profile_on_a_cluster(
    platform: str, tmp_path: Path
) -> None:
    policy = POLICY.replace("name: slice1,", f"name: slice1, {CLAIMS},")
    assert policy != POLICY
    backend = MemoryBackend([mixed(), shared()], real_time=True)
    async with running(tmp_path, policy, backend=backend, MAKEWAY_BACKEND=platform) as run:
        session = await run.granted((await run.session("ana", "slice1", "rnd")).id)
        assert session.claims == ({"gpus": "one-slice"} if platform == "kubernetes" else {})


@pytest.mark.covers("F25", "F82", "N05")
async def test_a_notebook_whose_claims_cannot_be_given_is_refused_and_no_job_makes_way_for_it(tmp_path: Path) -> None:
    policy = POLICY.replace("name: slice1,", f"name: slice1, {CLAIMS},")
    backend = MemoryBackend([mixed(), shared()], real_time=True)
    wrong = ["there is no ResourceClaimTemplate one-slice in the namespace hub"]

    async def problem(profile: str) -> str:
        return wrong[0] if wrong and profile == "slice1" else ""

    backend.notebook_problem = problem  # type: ignore[method-assign]
    async with running(tmp_path, policy, backend=backend, MAKEWAY_BACKEND="kubernetes") as run:
        before = await run.used()
        for _ in range(3):
            with pytest.raises(MakewayError) as refused:
                await run.session("ana", "slice1", "rnd")
            assert (refused.value.status, refused.value.code) == (409, "no_claims")
            assert f"an administrator has to act: {wrong[0]}." in str(refused.value)
        assert await run.used() == before
        assert not await run.client("spawner").sessions()
        wrong.clear()
        assert (await run.granted((await run.session("ana", "slice1", "rnd")).id)).phase == "granted"
