"""Builders of snapshots in a line, and a world that carries plans out the way the service does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from makeway_quota.engine import (
    GPU,
    Node,
    Plan,
    Pool,
    Profile,
    QuotaLine,
    Settings,
    Snapshot,
    TeamQuota,
    Workload,
    schedule,
)
from makeway_quota.engine.plan import Evict, Move, Offer, Refusal, Start, Waiting
from makeway_quota.engine.snapshot import ADMITTED
from makeway_quota.wording import Names, sentence


def milli(gpus: float | None) -> int | None:
    """Return milli-GPUs."""
    return None if gpus is None else round(gpus * GPU)


class World:
    """A cluster, its teams and its workloads; `step` plans and applies once, `reconcile` until nothing moves."""

    def __init__(self, **settings: Any) -> None:
        self.now = 1_000_000.0
        self.settings = Settings(**settings)
        self.pools: dict[str, Pool] = {}
        self.nodes: dict[str, Node] = {}
        self.profiles: dict[str, Profile] = {}
        self.policies: dict[str, TeamQuota] = {}
        self.workloads: dict[str, Workload] = {}
        self.paused: tuple[str, ...] = ()
        self.plans: list[Plan] = []
        self.engine: Callable[[Snapshot], Plan] = schedule
        """What plans: the fast engine, or the reference."""

    # Builders

    def pool(self, name: str, nodes: int = 1, gpus: int = 8, cpu: int = 0, memory: int = 0, **more: Any) -> World:
        """Add a pool of `nodes` equal nodes named `name-1`, `name-2`…"""
        self.pools[name] = Pool(name, **more)
        for at in range(1, nodes + 1):
            self.nodes[f"{name}-{at}"] = Node(f"{name}-{at}", name, gpus, cpu, memory)
        return self

    def team(
        self,
        name: str,
        reserved: float = 0,
        limit: float | None = None,
        lend: float | None = None,
        pools: Iterable[str] = (),
        **more: Any,
    ) -> World:
        """Add a team with one quota line."""
        line = QuotaLine(tuple(pools), milli(reserved) or 0, milli(limit), milli(lend))
        self.policies[name] = TeamQuota(name, (line,), **more)
        return self

    def profile(self, name: str, gpus: float, policies: Iterable[Any] = (), **more: Any) -> World:
        """Add a profile; `policies` are names, a nested tuple shares a rank; none named: all teams, same rank."""
        ranks = tuple((p,) if isinstance(p, str) else tuple(p) for p in policies) or (tuple(self.policies),)
        self.profiles[name] = Profile(name, milli(gpus) or 0, policies=ranks, **more)
        return self

    def submit(self, name: str, team: str, profile: str, **more: Any) -> World:
        """Submit a job (or with `kind="session"` a session), a second after the one before."""
        self.now += 1
        more.setdefault("owner", f"{team}-user")
        self.workloads[name] = Workload(name, team, profile, submitted_at=self.now, **more)
        return self

    def jobs(self, names: str, team: str, profile: str, **more: Any) -> World:
        """Submit several jobs, by names with spaces between."""
        for name in names.split():
            self.submit(name, team, profile, **more)
        return self

    def session(self, name: str, team: str, profile: str, **more: Any) -> World:
        """Submit a session."""
        return self.submit(name, team, profile, kind="session", **more)

    def run(self, name: str, team: str, profile: str, *nodes: str, **more: Any) -> World:
        """Add a running workload with one worker on each of the nodes."""
        from makeway_quota.engine import Placed

        self.submit(name, team, profile, **more)
        placement = tuple(Placed(at, node) for at, node in enumerate(nodes))
        self.change(name, state="running", started_at=self.now, placement=placement)
        return self

    # The life of a world

    def snapshot(self) -> Snapshot:
        """Return the world as the engine sees it."""
        return Snapshot(
            self.now,
            self.settings,
            tuple(self.pools.values()),
            tuple(self.nodes.values()),
            tuple(self.profiles.values()),
            tuple(self.policies.values()),
            tuple(self.workloads.values()),
            self.paused,
        )

    def plan(self) -> Plan:
        """Return the engine's plan."""
        return self.engine(self.snapshot())

    def step(self) -> Plan:
        """Plan once and apply it; evicted workloads are still terminating afterwards."""
        plan = self.plan()
        self.apply(plan)
        self.plans.append(plan)
        self.now += 1
        return plan

    def apply(self, plan: Plan) -> None:
        """Carry a plan out the way the service does."""
        for waiting in plan.pending:
            self.change(waiting.id, nomination=waiting.nomination)
        for start in plan.start:
            self.now += 0.001
            self.change(start.id, state="running", started_at=self.now, placement=start.placement, nomination=())
        for evict in plan.evict:
            self.change(evict.id, state="checkpointing", evicted_for=evict.preemptor, deadline=evict.deadline)
        for move in plan.move:
            self.change(
                move.id, state="checkpointing", evicted_for=move.preemptor, deadline=move.deadline, nomination=move.to
            )
        for refusal in plan.refused:
            self.change(refusal.id, state="stopped")

    def release(self, *names: str) -> World:
        """Requeue terminating workloads: the named ones, or all."""
        self.now += 1
        for w in list(self.workloads.values()):
            if w.state == "checkpointing" and (not names or w.id in names):
                self.change(
                    w.id,
                    state="pending",
                    attempt=w.attempt + 1,
                    placement=(),
                    evicted_for=None,
                    deadline=None,
                    last_checkpoint_at=self.now,
                )
        return self

    def reconcile(self, rounds: int = 50) -> list[Plan]:
        """Plan, apply and requeue the terminating until nothing changes; return the plans that did something."""
        done = []
        for _ in range(rounds):
            plan = self.step()
            if not plan.acts and not self.named("checkpointing"):
                return done
            done.append(plan)
            self.release()
        raise AssertionError("the world does not come to rest")

    def end(self, *names: str, state: str = "succeeded") -> World:
        """End workloads."""
        self.now += 1
        for name in names:
            self.change(name, state=state, placement=(), nomination=(), evicted_for=None)
        return self

    def lose(self, node: str) -> World:
        """Lose a node: its workloads are pending again."""
        self.nodes[node] = replace(self.nodes[node], ready=False)
        for w in list(self.workloads.values()):
            if w.state in ADMITTED and any(p.node == node for p in w.placement):
                self.change(
                    w.id,
                    state="pending",
                    placement=(),
                    nomination=(),
                    evicted_for=None,
                    attempt=w.attempt + 1,
                    failed_node=node,
                )
        return self

    def change(self, name: str, **changes: Any) -> None:
        """Change fields of a workload."""
        self.workloads[name] = replace(self.workloads[name], **changes)

    # Looking

    def named(self, state: str = "running", team: str | None = None) -> list[str]:
        """List the ids of workloads in a state."""
        return sorted(w.id for w in self.workloads.values() if w.state == state and team in (None, w.team))

    def used(self, team: str | None = None, node: str | None = None) -> float:
        """Count the GPUs that are held, by a team, on a node, or at all."""
        total = 0.0
        for w in self.workloads.values():
            if w.state in ADMITTED and team in (None, w.team):
                total += sum(
                    (len(p.devices) * p.milli_per_device if p.devices else self.profiles[w.profile].gpus) / GPU
                    for p in w.placement
                    if node in (None, p.node)
                )
        return total

    def reason(self, name: str) -> tuple[str, str]:
        """Return code and sentence of a waiting workload, as of now."""
        return next((w.code, self.say(w)) for w in self.plan().pending if w.id == name)

    def say(self, decision: Start | Evict | Move | Refusal | Waiting | Offer) -> str:
        """Return the sentence of a decision, with the titles of teams."""
        titles = {team.name: team.label for team in self.policies.values()}
        return sentence(decision.facts, Names(team=lambda name: titles.get(name, name)))
