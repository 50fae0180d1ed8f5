"""Generate random worlds with autoscaled pools, and count by brute force what their demand may be."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from engine.facts import Facts, State, future
from engine.mixed_worlds import contended_world, for_jobs_only, in_two_pools, keep_more_back, with_holds
from makeway_quota.engine import GPU, Plan, QuotaLine, TeamQuota, Terminating, Workload
from makeway_quota.engine.plan import Demand
from worlds import World


def world_that_grows(random: Random) -> World:
    """Return a contended world with one or two pools that grow, limits on single pools, and more work that waits."""
    world = in_two_pools(contended_world(random), random)
    if random.random() < 0.4:
        keep_more_back(world, random)
    if random.random() < 0.3:
        with_holds(world, random)
    if random.random() < 0.4:
        for_jobs_only(world, random)
    _add_pools_that_grow(world, random)
    _share_out(world, random)
    for name, profile in list(world.profiles.items()):
        pools = random.sample(list(world.pools), random.randint(1, len(world.pools)))
        models = random.choice([(), (), (), ("",), ("h100",)])
        patience = random.choice([0, 0, 0, 100])
        world.profiles[name] = replace(profile, pools=tuple(pools), models=models, reclaim_after=patience)
    for at in range(random.randint(5, 25)):
        kind = random.choice(["job", "job", "job", "session"])
        name, preemptible = random.choice(list(world.profiles)), random.choice([None, None, None, True, False])
        priority, owner = random.choice([-1, 0, 0, 1]), random.choice("xyz")
        asked = {"kind": kind, "preemptible": preemptible, "priority": priority, "owner": owner}
        world.submit(f"asks{at:02}", random.choice("abc"), name, **asked)
    if random.random() < 0.4:
        _keep_ended_work(world, random)
    if random.random() < 0.2:
        world.paused = (f"a/{random.choice(list(world.profiles))}",)
    return world


def _add_pools_that_grow(world: World, random: Random) -> None:
    for name in ("cloud", "spot")[: random.randint(1, 2)]:
        world.pool(name, random.choice([0, 0, 1]), 4, cpu=random.choice([0, 6000]))
        known = random.random() < 0.5
        size = {"max_nodes": random.randint(1, 6), "node_gpus": 4, "node_cpu": 6000} if known else {}
        world.pools[name] = replace(
            world.pools[name],
            kind="autoscaled",
            capacity=random.choice([None, None, None, 6 * GPU]),
            sessions=random.random() < 0.6,
            **size,
        )
    if random.random() < 0.2:
        world.pools["q"] = replace(world.pools["q"], kind="autoscaled")


def _share_out(world: World, random: Random) -> None:
    """Assign to teams and departments lines over single pools, some of which are limits, reservations, or both."""
    for name, team in list(world.policies.items()):
        lines: list[QuotaLine] = []
        for pools in random.sample([(), ("cloud",), ("cloud", "q"), ("p", "q")], random.randint(1, 3)):
            reserved = GPU * random.choice([0, 0, 2, 6])
            limit = random.choice([None, reserved + GPU * random.randint(0, 8)])
            lines.append(QuotaLine(pools, reserved, limit, random.choice([None, None, None, 0])))
        weight = random.choice(["None", team.weight, team.weight])
        world.policies[name] = replace(team, quotas=tuple(lines), weight=weight)


def _keep_ended_work(world: World, random: Random) -> None:
    """Have attempts that ended hold devices of nodes where nothing runs, and evicted work terminate."""
    used = {placed.node for w in world.workloads.values() for placed in w.placement}
    for name, node in world.nodes.items():
        if name not in used and node.gpus:
            ended = Terminating("old", (0,), cpu=1000, deadline=world.now + random.choice([-100, 10]))
            world.nodes[name] = replace(node, terminating=(ended,))
    for name in world.named("running"):
        if random.random() < 0.3 and not world.workloads[name].non_preemptible:
            world.change(name, state="checkpointing", deadline=world.now + random.choice([-100, 10]))


class DemandFacts:
    """What the demand of a plan may be, counted from the snapshot and the plan alone."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.facts = Facts(world.snapshot())
        self.plan = plan
        self.after = future(world.snapshot(), plan)
        running = {w.id: (w, w.placement) for w in self.facts.live.values() if w.placement}
        self.now = State(self.facts, running | {s.id: (self.work(s.id), s.placement) for s in plan.start}, now=True)

    def work(self, name: str) -> Workload:
        return self.facts.live[name]

    def check(self) -> None:
        """Check every entry by itself, then all of them together against every line and capacity."""
        waits = {w.id: w for w in self.plan.pending if not w.nomination}
        assert len({demand.id for demand in self.plan.demand}) == len(self.plan.demand), "each workload once"
        for demand in self.plan.demand:
            assert demand.id in waits, f"{demand} starts, is nominated or refused"
            self._is_what_it_asks_for(demand)
            self._has_no_room(demand, waits[demand.id].code)
        for team in self.facts.policies.values():
            for line in team.quotas:
                self._is_within(team, line)
        for pool in self.facts.pools.values():
            asked = sum(self._amount(demand) for demand in self.plan.demand if pool.name in demand.pools)
            if pool.capacity is not None and asked:
                used = max(self.now.in_pool(pool.name), self.after.in_pool(pool.name))
                assert used + asked <= pool.capacity, f"capacity of {pool.name}"

    def _amount(self, each: Demand) -> int:
        return each.workers * each.gpus

    def _is_what_it_asks_for(self, each: Demand) -> None:
        w = self.work(each.id)
        profile = self.facts.profile(w)
        assert (each.workers, each.gpus) == (self.facts.least(w), profile.gpus)
        assert (each.cpu, each.memory, each.models) == (profile.cpu, profile.memory, profile.models)
        served = [pool for pool in self.facts.pools_of(w) if self.facts.pools[pool].kind == "autoscaled"]
        assert list(each.pools) == [pool for pool in served if pool in each.pools], "in the order of its profile"
        assert each.pools
        assert self.facts.may_start(w)
        assert w.kind != "session" or all(self.facts.pools[pool].sessions for pool in each.pools)

    def _has_no_room(self, each: Demand, code: str) -> None:
        """Check that it fits nowhere now, where nothing but room is in its way."""
        w = self.work(each.id)
        if code in ("held", "static_quota", "nominated", "waiting_for_node", "over_budget"):
            return
        first, then = self.now.rooms(), self.after.rooms()
        for name, room in first.items():
            room.devices = [min(pair) for pair in zip(room.devices, then[name].devices, strict=True)]
            room.cpu, room.pods = min(room.cpu, then[name].cpu), min(room.pods, then[name].pods)
        for pool in each.pools:
            assert self.facts.workers(first, w, pool) < self.facts.least(w), f"{each} fits in {pool}"

    def _is_within(self, team: TeamQuota, line: QuotaLine) -> None:
        """Check one line: its limit, and its reservation where all that is asked may only run within it."""
        asked = [
            demand
            for demand in self.plan.demand
            if team.name in [level.name for level in self.facts.family(self.work(demand.id).team)]
            and any(line.covers(pool) for pool in demand.pools)
        ]
        amount = sum(self._amount(demand) for demand in asked)
        used = max(self.now.usage(team.name, line), self.after.usage(team.name, line))
        if line.limit is not None and amount:
            assert used + amount <= line.limit, f"limit {line} of {team.name}: {used} + {amount}"
        for non_preemptible in (False, True):
            bound = [demand for demand in asked if self._is_bound(demand, team, line, non_preemptible)]
            amount = sum(self._amount(item) for item in bound)
            if amount and line.reserved:
                used = self.after.usage(team.name, line, non_preemptible)
                assert used + amount <= line.reserved, f"reservation {line} of {team.name}: {used} + {amount}"

    def _is_bound(self, each: Demand, team: TeamQuota, line: QuotaLine, non_preemptible: bool) -> bool:
        """Whether work may only run within a line: it never borrows, and can use no pool that the line leaves out."""
        w = self.work(each.id)
        never = w.non_preemptible
        if not non_preemptible:  # what is not preemptible is asked for the reservation of its kind alone
            never = not w.non_preemptible and self.facts.policies[w.team].weight == "None"
        nearest = all(self.after.guarantor(w.team, pool) == team.name for pool in each.pools)
        inside = all(line.covers(pool) for pool in each.pools)
        return never and inside and (non_preemptible or nearest) and bool(self.facts.request(w))
