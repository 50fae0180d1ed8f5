"""Generate random worlds with nodes that boot, and check what holds for the work that waits for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from engine.changing_worlds import ChangingHistory
from engine.demand_worlds import world_that_grows
from engine.facts import Facts, State, future
from engine.mixed_worlds import (
    contended_world,
    in_two_pools,
    keep_more_back,
    with_a_department,
    with_foreign_pods,
    with_holds,
    with_lost_nodes,
)
from makeway_quota.engine import Node, Plan, Workload, schedule
from worlds import World


def with_booting_nodes(world: World, random: Random) -> World:
    """Return a world with up to three more nodes that boot, some of them late, and gangs in quota for them."""
    pools = list(world.pools)
    for at in range(random.randint(1, 3)):
        pool = random.choice(pools)
        like = next((node for node in world.nodes.values() if node.pool == pool and node.ready), None)
        made = Node("", pool, like.gpus if like else 4, like.cpu if like else 0, like.memory if like else 0)
        name = random.choice(["a", "z"]) + f"boots-{at}"  # before the others in the order of names, or after them
        after = random.choice([-30.0, 10.0, 60.0, 60.0, 600.0])
        made = replace(made, gpus=random.choice([made.gpus, 2]), model=like.model if like else "")
        world.nodes[name] = replace(made, name=name, ready=False, ready_at=world.now + after)
        if random.random() < 0.1:
            world.nodes[name] = replace(world.nodes[name], cordoned=True)
        if random.random() < 0.2:
            world.nodes[name] = replace(world.nodes[name], sessions=False)
    for name in list(world.policies):
        if name != "top" and random.random() < 0.5:
            line = world.policies[name].quotas[0]
            more = replace(line, reserved=line.reserved + 1000 * random.choice([2, 4, 8]), limit=None)
            world.policies[name] = replace(world.policies[name], quotas=(more, *world.policies[name].quotas[1:]))
    gang = world.profile("boots", random.choice([1, 2, 4]), workers=random.randint(2, 3)).profiles["boots"]
    world.profiles["boots"] = replace(gang, reclaim_after=random.choice([0, 0, 100]))
    for at in range(random.randint(1, 4)):
        name = random.choice(["boots", "boots", *world.profiles])
        preemptible = random.choice([None, None, True, False])
        world.submit(f"late{at}", random.choice("abc"), name, preemptible=preemptible, owner=random.choice("xy"))
    return world


Make = Callable[[Random], World]
BOOTING: dict[str, Make] = {
    "contended": contended_world,
    "two pools": lambda random: in_two_pools(contended_world(random), random),
    "static quotas": lambda random: keep_more_back(contended_world(random), random),
    "departments": lambda random: with_a_department(contended_world(random), random),
    "lost nodes": lambda random: with_lost_nodes(contended_world(random), random),
    "holds": lambda random: with_holds(in_two_pools(contended_world(random), random), random),
    "foreign pods": lambda random: with_foreign_pods(contended_world(random), random),
    "growing": world_that_grows,
}


def booting_world(kind: str, seed: int) -> World:
    """Return one of these worlds with nodes that boot."""
    random = Random(seed)
    return with_booting_nodes(BOOTING[kind](random), random)


def check_awaiting(world: World, plan: Plan) -> int:
    """Check the work that waits for nodes that boot; return how much of it there is."""
    facts, after = Facts(world.snapshot()), future(world.snapshot(), plan)
    waits = [waiting for waiting in plan.pending if waiting.awaits]
    for waiting in waits:
        w, nodes = facts.live[waiting.id], [facts.nodes[placed.node] for placed in waiting.awaits]
        booting = [node.ready_at or 0.0 for node in nodes if node.boots]
        assert waiting.code in ("waiting_for_node", "patience", "protected")
        assert booting, f"it waits for no node: {waiting}"
        assert waiting.code != "waiting_for_node" or waiting.not_before == max(booting)
        assert all(node.boots or facts.usable(node.name) for node in nodes)
        assert len(waiting.awaits) == facts.least(w), "a gang is nominated as a whole, with its least number of workers"
        pool = facts.pools[nodes[0].pool]
        if {placed.node for _, place in after.held.values() for placed in place} <= facts.nodes.keys():
            others = State(facts, {name: item for name, item in after.held.items() if name != w.id})
            rooms = others.rooms()
            free = sum(sum(rooms[name].devices) for name in rooms if _is_ready_in(facts, name, pool.name))
            fits = facts.workers(rooms, w, pool.name) >= facts.least(w)
            if fits and free - facts.request(w) >= _kept_at_most(others, w, pool.name):
                raise AssertionError(f"it has room on nodes that are ready: {waiting}")
        assert sum(demand.id == w.id for demand in plan.demand) <= 1, "its need counts once"
        if pool.kind == "autoscaled" and not facts.static and (pool.sessions or w.kind != "session"):
            [demand] = [demand for demand in plan.demand if demand.id == w.id]
            assert (demand.pools, demand.workers) == ((nodes[0].pool,), sum(node.boots for node in nodes))
            assert demand.awaits == tuple(node.name for node in nodes)
    for start in plan.start:
        assert all(facts.usable(placed.node) for placed in start.placement), "nothing starts on a node that boots"
    return len(waits)


def _is_ready_in(facts: Facts, node: str, pool: str) -> bool:
    return facts.usable(node) and facts.nodes[node].pool == pool


def _kept_at_most(state: State, w: Workload, pool: str) -> int:
    """Return at least what static quotas keep free of a workload in a pool: what all keep, if one of others does."""
    certain, family = state.without_awaiting(), {team.name for team in state.facts.family(w.team)}
    total, covers = 0, False
    for team in state.facts.snapshot.policies:
        for line in team.quotas:
            unlent = line.reserved - (line.reserved if line.lend is None else line.lend)
            idle = max(0, unlent - certain.usage(team.name, line))
            covers = covers or (idle > 0 and team.name not in family and line.covers(pool))
            total += idle
    return total if covers else 0


class BootingHistory(ChangingHistory):
    """A history in which nodes also boot: they become ready, are late, and never become ready."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.awaited = 0
        self.changes = (*self.changes, self._boot, self._boot, self._end_boot)

    def compare(self) -> None:
        """Compare the plans of both engines, and check the work that waits for nodes."""
        super().compare()
        self.awaited += check_awaiting(self.world, schedule(self.world.snapshot()))

    def _boot(self) -> None:
        boot(self.world, self.random)
        self.first |= {name: node for name, node in self.world.nodes.items() if name not in self.first}

    def _end_boot(self) -> None:
        end_boot(self.world, self.random)


def boot(world: World, random: Random) -> None:
    """Have one more node boot."""
    name = random.choice(["a", "z"]) + f"boots-{len(world.nodes)}"
    after = random.choice([-1.0, 30.0, 600.0])
    made = Node(name, random.choice(list(world.pools)), random.choice([2, 4, 8]), ready=False)
    world.nodes[name] = replace(made, ready_at=world.now + after)


def end_boot(world: World, random: Random) -> None:
    """Have a node that boots become ready, or vanish."""
    booting = [node for node in world.nodes.values() if node.boots]
    if booting:
        node = random.choice(booting)
        if random.random() < 0.7:
            world.nodes[node.name] = replace(node, ready=True, ready_at=random.choice([None, node.ready_at]))
        else:
            del world.nodes[node.name]
