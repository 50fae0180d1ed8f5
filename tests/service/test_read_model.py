"""The read model: equal to what the engine counts, updated by deltas, shared by simultaneous requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from makeway_quota.backends.base import NodeStatus, Observation
from makeway_quota.control.reads import read_model
from makeway_quota.control.reads.read_model import ReadModels
from makeway_quota.control.world.world import World
from makeway_quota.engine.index.cluster import Cluster
from makeway_quota.engine.rules.usage import TeamCount, usage_by_team
from makeway_quota.engine.snapshot import Snapshot, TeamQuota
from makeway_quota.engine.snapshot import Workload as EngineWorkload
from makeway_quota.policy import read_policy
from makeway_quota.store.errors import StoreError
from makeway_quota.store.records import Change, NewWorkload, Workload
from makeway_quota.store.store import Store, open_store
from makeway_quota.values import Place

POLICY = """\
version: 1
pools:
  - {name: big, nodes: {local: {gpus: [0, 1, 2, 3]}}, profiles: [one, half, session]}
  - {name: small, nodes: {local: {gpus: [4, 5, 6, 7]}}, profiles: [one, half, session]}
  - {name: far, nodes: {labels: {a: b}}, profiles: [one]}
profiles:
  - {name: one, title: One, gpus: 1, pools: [big, small]}
  - {name: half, title: Half, gpus: 0.5, pools: [small]}
  - {name: session, title: Session, gpus: 1, pools: [far, big]}
policies:
  - {name: dep, title: Department, groups: [dep], quotas: [{pools: [big, small], reserved: 3}]}
  - {name: a, title: A, groups: [a], parent: dep, quotas: [{pools: [big], reserved: 1}]}
  - {name: b, title: B, groups: [b], parent: dep}
  - {name: c, title: C, groups: [c], quotas: [{pools: [far], reserved: 2, limit: 4}, {pools: [small], reserved: 1}]}
  - {name: d, title: D, groups: [d], quotas: [{reserved: 1}]}
"""
OTHER = POLICY.replace("reserved: 3", "reserved: 2").replace("parent: dep, quotas", "quotas")


class Setting:
    """A store, a world with a divided and two plain nodes, and its read models."""

    def __init__(self, folder: Path) -> None:
        self.store: Store = open_store(f"sqlite:///{folder / 'db.sqlite'}")
        self.clock = 1000.0
        self.world = World(self.store, read_policy(POLICY, "p.yaml"), 1, lambda: self.clock)
        self.models = ReadModels(self.world, self.store, lambda: self.clock)
        self.nodes = {
            "here": NodeStatus("here", "", tuple(range(8)), cpu=8000, memory=8000),
            "n1": NodeStatus("n1", "far", (0, 1, 2, 3)),
            "n2": NodeStatus("n2", "far", (0, 1, 2, 3), foreign={3: 500}),
        }
        self.see()

    def see(self) -> None:
        self.world.observe(Observation(tuple(self.nodes.values()), ()))

    async def check(self) -> None:
        """Compare the model with a count by the engine."""
        model = await self.models.current()
        rows = await self.world.rows()
        expected = {
            usage.team: TeamCount(
                usage.reserved,
                usage.limit,
                usage.guaranteed,
                usage.in_quota,
                usage.borrowed,
                usage.lent,
                usage.borrowed_from,
            )
            for usage in usage_by_team(self.world.snapshot(rows, self.clock))
        }
        assert {team: count for team, count in model.usage.items() if team in expected} == expected
        assert sum(load.waiting for load in model.loads.values()) == sum(r.state == "pending" for r in rows.values())
        assert 0 not in model.held_by.values(), "people who hold nothing any more"
        assert sum(model.held_by.values()) == sum(r.size for r in rows.values() if r.state == "running")
        assert sum(model.workloads.values()) == len(rows)
        assert model.sessions == {id: row for id, row in rows.items() if row.kind == "session"}
        assert model.over_quota == over_quota(self.world.snapshot(rows, self.clock))
        for use in (use for uses in model.nodes.values() for use in uses):
            assert {row.id: row.over_quota for row in use.holders} == {
                r.id: model.over_quota[r.id] for r in use.holders
            }
        engine = Cluster(self.world.snapshot(rows, self.clock))
        for pool, uses in model.nodes.items():
            free = sum(use.free for use in uses)
            assert free == max(0, engine.pools[pool].free), "what is free to people is free to the engine"
            assert free == sum(sum(use.free_on.values()) for use in uses)
        assert model.free == sum(use.free for uses in model.nodes.values() for use in uses)
        held = {(use.status.name, row.id) for uses in model.nodes.values() for use in uses for row in use.holders}
        assert held == {
            (place.node, row.id)
            for row in rows.values()
            if row.state == "running"
            for place in row.placement
            if any(place.node == use.status.name for uses in model.nodes.values() for use in uses)
        }


def over_quota(snapshot: Snapshot) -> dict[str, bool]:
    """Return what is over quota, by the rules: the least protected leave until a policy uses what it reserves."""
    policies = {policy.name: policy for policy in snapshot.policies}
    pools = {
        id: allocation.shares or ((allocation.pool, allocation.milli_gpus),)
        for id, allocation in Cluster(snapshot).allocations.items()
    }

    def levels(name: str | None) -> list[TeamQuota]:
        return [policies[name], *levels(policies[name].parent)] if name in policies else []

    def covered(workload: EngineWorkload, left: list[EngineWorkload]) -> bool:
        for pool, _ in pools[workload.id]:
            result = [
                (level, line)
                for level in levels(workload.team)
                for line in level.quotas
                if line.reserved and line.covers(pool.pool.name)
            ]
            nearest = [line for level, line in result if level is result[0][0]]
            for line in nearest:
                members = (w for w in left if result[0][0] in levels(w.team))
                used = sum(milli for w in members for at, milli in pools[w.id] if line.covers(at.pool.name))
                if used > line.reserved:
                    return False
            if not nearest:
                return False
        return True

    order = sorted(
        (w for w in snapshot.workloads if w.id in pools),
        key=lambda w: (not w.non_preemptible, -policies[w.team].priority, -w.priority, w.started_at or w.submitted_at,
                       w.submitted_at, w.id),
    )  # fmt: skip
    return {w.id: not w.non_preemptible and not covered(w, order[: at + 1]) for at, w in enumerate(order)}


def submitted(number: int, random: Random) -> NewWorkload:
    kind = random.choice(("job", "job", "session"))
    profile = "session" if kind == "session" else random.choice(("one", "half"))
    return NewWorkload(
        id=f"{'s' if kind == 'session' else 'j'}-{number:08d}",
        kind="session" if kind == "session" else "job",
        team=random.choice("abcd"),
        profile=profile,
        owner=random.choice(("ana", "bo")),
        server=f"{number}",
        preemptible=kind == "job",
        gpus=500 if profile == "half" else 1000,
        workers=random.choice((1, 1, 2)) if kind == "job" else 1,
    )


def place(gpus: int, free: dict[tuple[str, int], int], random: Random) -> Place | None:
    """Take room on a random device; now and then on a node that is gone."""
    if random.random() < 0.05:
        return Place("gone", (0,), (gpus,))
    able = [key for key, remaining in free.items() if remaining >= gpus]
    if not able:
        return None
    key = random.choice(able)
    free[key] -= gpus
    return Place(key[0], (key[1],), (gpus,))


@pytest.mark.parametrize("seed", range(12))
async def test_random_histories_count_as_the_engine_counts(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    setting = Setting(tmp_path)
    running: dict[str, tuple[Place, ...]] = {}
    pending: dict[str, NewWorkload] = {}
    for number in range(120):
        setting.clock += 1
        free = {(n.name, d): 1000 - n.foreign.get(d, 0) for n in setting.nodes.values() for d in n.devices}
        for taken in running.values():
            for item in taken:
                if (item.node, item.devices[0]) in free:
                    free[item.node, item.devices[0]] -= item.milli[0]
        roll = random.random()
        if roll < 0.4:
            new = submitted(number, random)
            setting.store.add_workload(new, now=setting.clock)
            pending[new.id] = new
        elif roll < 0.7 and pending:
            id = random.choice(sorted(pending))
            new = pending[id]
            result = [place(new.gpus, free, random) for _ in range(new.workers)]
            places = tuple(item for item in result if item is not None)
            if len(places) == new.workers:
                del pending[id]
                running[id] = places
                setting.store.commit([Change(id, {"state": "running", "placement": places})], now=setting.clock)
        elif roll < 0.85 and running:
            id = random.choice(sorted(running))
            del running[id]
            setting.store.commit([Change(id, {"state": "succeeded"})], now=setting.clock)
        elif roll < 0.9:
            node = setting.nodes["n1"]
            change = random.choice(({"ready": not node.ready}, {"cordoned": not node.cordoned}, {"foreign_gpus": 700}))
            setting.nodes["n1"] = replace(node, **change)  # type: ignore[arg-type]
            setting.see()
        elif roll < 0.95:
            gone = setting.nodes.pop("n2", None)
            if gone is None:
                setting.nodes["n2"] = NodeStatus("n2", "far", (0, 1, 2, 3))
            setting.see()
        else:
            document = read_policy(random.choice((POLICY, OTHER)), "p.yaml")
            setting.world.use(document, number)
        if random.random() < 0.5:
            await setting.check()
    await setting.check()
    setting.store.close()


async def test_simultaneous_requests_share_one_version(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    first = await setting.models.current()
    assert await setting.models.current() is first
    setting.store.add_workload(submitted(1, Random(1)), now=1.0)
    versions = await asyncio.gather(*(setting.models.current() for _ in range(50)))
    assert len({model.version for model in versions}) == 1
    assert versions[0].version == first.version + 1
    assert sum(load.waiting for load in first.loads.values()) == 0, "an older version does not change"
    assert sum(load.waiting for load in versions[0].loads.values()) == 1
    setting.store.close()


async def test_nodes_that_do_not_change_stay_the_same_objects(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    before = await setting.models.current()
    setting.nodes["n1"] = replace(setting.nodes["n1"], ready=False)
    setting.see()
    after = await setting.models.current()
    assert [a is b for a, b in zip(before.nodes["far"], after.nodes["far"], strict=True)] == [False, True]
    assert after.nodes["big"][0] is before.nodes["big"][0]
    setting.store.close()


async def test_a_model_that_was_not_read_for_long_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_model, "MAX_UNREAD", 3)
    setting = Setting(tmp_path)
    random = Random(1)
    ids = []
    for round in range(3):
        await setting.check()
        for number in range(8):
            new = submitted(10 * round + number, random)
            ids.append(new.id)
            setting.store.add_workload(new, now=setting.clock)
        for id in ids[::3]:
            setting.store.commit([Change(id, {"state": "cancelled"}, expect_states=("pending",))], now=setting.clock)
        assert len(setting.models._unread) == 3, "no more is kept"
    await setting.check()
    setting.store.close()


async def test_one_commit_of_more_rows_than_may_wait_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_model, "MAX_UNREAD", 3)
    setting = Setting(tmp_path)
    jobs = [submitted(number, Random(1)) for number in range(8)]
    for new in jobs:
        setting.store.add_workload(new, now=setting.clock)
    await setting.check()
    changes = [Change(new.id, {"state": "cancelled"}, expect_states=("pending",)) for new in jobs]
    setting.store.commit(changes, now=setting.clock)
    assert sum(map(len, setting.models._unread)) <= 3
    await setting.check()
    setting.store.close()


async def test_a_first_read_that_fails_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(tmp_path)
    setting.store.add_workload(NewWorkload("j1", "job", "a", "one", "ana"), now=1.0)
    rows = setting.world.rows

    async def fails() -> dict[str, Workload]:
        raise StoreError("the database is away")

    monkeypatch.setattr(setting.world, "rows", fails)
    with pytest.raises(StoreError):
        await setting.models.current()
    monkeypatch.setattr(setting.world, "rows", rows)
    assert sum((await setting.models.current()).workloads.values()) == 1
