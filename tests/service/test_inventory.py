"""Pools as the API shows them: made once for each version of the read model, the nodes once for each change."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import pytest
from makeway_api.models import Node, Pool, Wire
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.reads.read_model import ReadModel
from makeway_quota.services.cluster.inventory import InventoryService, LatestAnswer
from pydantic import TypeAdapter
from running import PEOPLE, Running, running

ROOT = PEOPLE["root"]


def node(name: str) -> NodeStatus:
    return NodeStatus(name, "gpu", tuple(range(10)), virtual=True)


def use_new_document(run: Running) -> None:
    """Make the next version of the read model another one."""
    world = run.service.services.context.world
    world.use(replace(world.document), world.policy_version + 1)


@pytest.mark.parametrize(("public", "made_by"), [("pools", "_pools"), ("pools_json", "_json")])
async def test_requests_that_arrive_together_cost_one_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, public: str, made_by: str
) -> None:
    made: dict[Any, list[int]] = {}
    make = getattr(InventoryService, made_by)

    def counted(self: InventoryService, model: ReadModel, teams: Any) -> Any:
        made.setdefault(teams, []).append(model.version)
        return make(self, model, teams)

    monkeypatch.setattr(InventoryService, made_by, counted)
    async with running(tmp_path, backend=MemoryBackend([node("n1")], real_time=True)) as run:
        await run.converged()
        answer = getattr(run.service.services.inventory, public)
        for _ in range(3):
            use_new_document(run)
            await asyncio.gather(*(answer(caller) for caller in PEOPLE.values() for _ in range(10)))
    assert len(made) > 1, "people of other teams are shown other names"
    for versions in made.values():
        assert len(versions) >= 3
        assert versions == sorted(set(versions)), "once for each version, and none after a later one"


async def test_an_answer_is_never_replaced_by_that_of_an_older_version(tmp_path: Path) -> None:
    async with running(tmp_path, backend=MemoryBackend([node("n1")], real_time=True)) as run:
        await run.converged()
        models, slow, made = run.service.services.context.read_models, asyncio.Event(), list[int]()

        async def make(model: ReadModel) -> int:
            made.append(model.version)
            if len(made) == 1:
                await slow.wait()
            return model.version

        answer = LatestAnswer(models, make)
        first = asyncio.ensure_future(answer.get())
        await run.until(lambda: made, "the first answer is being made")
        use_new_document(run)
        newest = (await models.current()).version
        later = [asyncio.ensure_future(answer.get()) for _ in range(5)]
        slow.set()
        assert await first < newest
        assert min(await asyncio.gather(*later)) >= newest
        assert await answer.get() >= newest
        assert made == sorted(set(made))


async def test_an_answer_that_failed_is_made_again(tmp_path: Path) -> None:
    async with running(tmp_path, backend=MemoryBackend([node("n1")], real_time=True)) as run:
        await run.converged()
        made: list[int] = []

        async def make(model: ReadModel) -> str:
            made.append(model.version)
            if len(made) == 1:
                raise ValueError("broken")
            return "fine"

        answer = LatestAnswer(run.service.services.context.read_models, make)
        first, *others = await asyncio.gather(*(answer.get() for _ in range(5)), return_exceptions=True)
        assert isinstance(first, ValueError)
        assert set(others) == {"fine"}


async def test_nodes_that_are_gone_do_not_stay_in_memory(tmp_path: Path) -> None:
    """Every cloud node that an autoscaler adds has a new name."""
    backend = MemoryBackend([node("n0")], real_time=True)
    seen: list[ref[Node]] = []
    async with running(tmp_path, backend=backend) as run:
        inventory = run.service.services.inventory
        for number in range(12):
            name = f"n{number}"
            backend.nodes = {name: node(name)}
            backend._changed()

            async def shown(name: str = name) -> Sequence[Pool] | None:
                await inventory.pools_json(ROOT)
                pools = await inventory.pools(ROOT)
                return pools if [item.name for pool in pools for item in pool.nodes] == [name] else None

            pools = await run.until(shown, f"node {name} is shown")
            seen += [ref(item) for pool in pools for item in pool.nodes]
            del pools
        gc.collect()
        assert len([item for item in seen if item() is not None]) <= 3


async def test_notebooks_of_earlier_releases_read_pools_that_fill(tmp_path: Path) -> None:
    """Those know two strategies, and a third one would make the whole list unreadable to them."""

    class EarlierPool(Wire):
        name: str
        strategy: Literal["pack", "spread"] = "pack"

    pools = "{name: gpu, kind: autoscaled}, {name: even, strategy: spread}, {name: old}"
    policy = (
        f"version: 1\npools: [{pools}]\nprofiles: [{{name: one, gpus: 1}}]\npolicies: [{{name: a, users: [ana]}}]\n"
    )
    async with running(tmp_path, policy, backend=MemoryBackend([node("n1")], real_time=True)) as run:
        await run.converged()
        written = await run.service.services.inventory.pools_json(ROOT)
        earlier = TypeAdapter(list[EarlierPool]).validate_json(written)
        assert [pool.strategy for pool in earlier] == ["pack", "spread", "pack"]
        shown = await run.client("root").pools()
        assert [pool.placement for pool in shown] == ["fill", "spread", "pack"]
