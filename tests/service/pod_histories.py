"""Random histories of a service on simulated pods, each eviction of which is compared with perfect knowledge.

Perfect knowledge: the pods as they are (as far as the API server has told), on the devices that their attempts were
planned on, the GPUs of a node whose device plugin is away, and every nomination that was ever given and not used. What
the reference engine evicts with it is needed; whatever else is evicted is needless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from makeway_api.pods import INSTANCE, MANAGED_BY, MANAGER, SESSION
from makeway_quota.control.transitions import release
from makeway_quota.engine import Plan, Snapshot, Terminating, reference
from makeway_quota.engine.snapshot import Placement
from makeway_quota.store.records import Change, Workload
from makeway_quota.values import Place
from simulated_pods import GPU, PODS, Habits, SimulatedCluster, Site

POLICY = """
version: 1
settings: {{consolidation: {moves}}}
pools: [{{name: p}}]
profiles:
  - {{name: one, gpus: 1, pools: [p], policies: [[rnd, devops, ops]], grace: 30}}
  - {{name: two, gpus: 2, pools: [p], policies: [[rnd, devops, ops]], grace: 30}}
  - {{name: gang, gpus: 1, workers: 2, pools: [p], policies: [[rnd, devops, ops]], grace: 30}}
  - {{name: patient, gpus: 1, reclaim_after: 5, pools: [p], policies: [[rnd, devops, ops]], grace: 30}}
policies:
  - {{name: rnd, groups: [rnd], quotas: [{{pools: [p], reserved: 0}}]}}
  - {{name: devops, groups: [devops], quotas: [{{pools: [p], reserved: {devops}}}]}}
  - {{name: ops, groups: [ops], quotas: [{{pools: [p], reserved: {ops}}}]}}
"""
GPUS = {"one": 1000, "two": 2000, "gang": 1000, "patient": 1000}
EVENTS = (
    "borrow",
    "borrow",
    "claim",
    "claim",
    "claim",
    "notebook",
    "stop",
    "finish",
    "cancel",
    "blip",
    "plugin",
    "restart",
    "wait",
)


@dataclass(slots=True)
class Evictions:
    """The evictions of a history, and those of them that perfect knowledge would not plan."""

    total: int = 0
    needless: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Oracle:
    """What is known about a site that the service has to find out; it compares each plan before it is carried out."""

    site: Site
    evictions: Evictions = field(default_factory=Evictions)
    nominations: dict[str, Placement] = field(default_factory=dict)
    planned: dict[tuple[str, int], tuple[Place, ...]] = field(default_factory=dict)

    def watch(self) -> None:
        """Compare the plans of the service that runs now."""
        planner, plan_of = self.site.loop._planner, self.site.loop._planner.plan

        async def plan(rows: Mapping[str, Workload], now: float, explain: bool = True) -> Plan:
            result = await plan_of(rows, now, explain)
            self._look(dict(rows), now, result)
            return result

        planner.plan = plan  # type: ignore[method-assign]

    def _look(self, rows: dict[str, Workload], now: float, plan: Plan) -> None:
        for row in rows.values():
            if row.placement:
                self.planned[row.id, row.attempt if row.kind == "job" else 0] = row.placement
        victims = [*plan.evict, *plan.move]
        if victims:
            self.evictions.total += len(victims)
            perfect = self.snapshot(rows, now)
            needed = reference.schedule(perfect)
            if len(victims) > len(needed.evict) + len(needed.move):
                told = [f"{item.id} for {item.preemptor}" for item in victims]
                wanted = [f"{item.id} for {item.preemptor}" for item in (*needed.evict, *needed.move)]
                self.evictions.needless.append(f"at {now:.2f}: {told}, needed: {wanted}")
        pending = {row.id for row in rows.values() if row.state == "pending"}
        self.nominations = {id: result for id, result in self.nominations.items() if id in pending}
        self.nominations |= {item.id: item.nomination for item in plan.pending if item.nomination}

    def snapshot(self, rows: dict[str, Workload], now: float) -> Snapshot:
        """Return the world as who knows everything sees it."""
        world = self.site.service.components.world
        shown = world.snapshot(rows, now)
        nodes = []
        for node in shown.nodes:
            held = {d for row in rows.values() for p in row.placement if p.node == node.name for d in p.devices}
            result = [
                Terminating(id, tuple(d for d in place.devices if d not in held), deadline=now)
                for id, place in self._outliving(rows, node.name)
            ]
            many = self.site.cluster.gpus[node.name]  # also while its device plugin is away
            nodes.append(replace(node, gpus=many, cordoned=False, foreign_gpus=0, terminating=tuple(result)))
        workloads = [
            replace(w, nomination=self.nominations[w.id]) if w.id in self.nominations and w.state == "pending" else w
            for w in shown.workloads
        ]
        return replace(shown, nodes=tuple(nodes), workloads=tuple(workloads))

    def _outliving(self, rows: dict[str, Workload], node: str) -> list[tuple[str, Place]]:
        result = []
        backend = self.site.cluster.backend
        told = backend.inventory.pods.objects if backend is not None else {}  # the end of a pod takes time to arrive
        for pod in self.site.cluster.pods.values():
            if pod.node != node or (pod.over and f"jobs/{pod.name}" not in told):
                continue
            id, attempt, worker = pod.key
            row = rows.get(id)
            if row is not None and row.placement and attempt in (0, row.attempt):
                continue
            places = self.planned.get((id, attempt), ())
            result += [(id, places[worker])] if worker < len(places) else []
        return result


@dataclass(slots=True)
class History:
    """One random history."""

    site: Site
    random: Random
    oracle: Oracle
    number: int = 0
    notebooks: dict[str, bool] = field(default_factory=dict)
    """the notebooks that were submitted, and whether their pods were made"""

    async def live(self, events: int) -> None:
        """Go through so many events, and come to rest."""
        for _ in range(sum(self.site.cluster.free(node) for node in self.site.cluster.nodes)):
            await self._happen("borrow")
            await self.run(self.random.choice([0.0, 0.5]))
        await self.run(3.0)
        for _ in range(events):
            await self._happen(self.random.choice(EVENTS))
            await self.run(self.random.choice([0.0, 0.05, 0.5, 3.0]))
        for node in self.site.cluster.nodes:
            self.site.cluster.set_ready(node, True)
        await self.run(60.0)

    async def run(self, seconds: float) -> None:
        """Spend time in small steps, and start the notebooks that were granted."""
        end = self.site.cluster.now + seconds
        while True:
            await self._notebooks()
            await self.site.run(min(2.0, max(0.01, end - self.site.cluster.now)))
            if self.site.cluster.now >= end:
                return

    async def _happen(self, event: str) -> None:
        cluster, rows = self.site.cluster, await self.site.rows()
        live = [row for row in rows.values() if row.kind == "job"]
        if event in ("borrow", "claim") and len(live) < 30:
            team = "rnd" if event == "borrow" else self.random.choice(["devops", "ops"])
            profile = self.random.choice(list(GPUS))
            id = self._name(team)
            workers = 2 if profile == "gang" else 1
            self.site.submit(id, team, profile, gpus=GPUS[profile], workers=workers)
        elif event == "notebook" and len(self.notebooks) < 3:
            id = self._name("s")
            profile = self.random.choice(["one", "patient"])
            self.site.submit(id, "devops", profile, kind="session", preemptible=False, server=id, expires_at=None)
            self.notebooks[id] = False
        elif event == "stop" and self.notebooks:
            await self._stop(self.random.choice(sorted(self.notebooks)), rows)
        elif event == "finish" and live:
            cluster.finish(self.random.choice(live).id)
        elif event == "cancel" and live:
            self._commit(Change(self.random.choice(live).id, {"cancel_requested": True}))
        elif event == "blip":
            node = self.random.choice(sorted(cluster.nodes))
            cluster.set_ready(node, False)
            cluster.at(self.random.choice([0.1, 2.0, 20.0]), lambda: cluster.set_ready(node, True))
        elif event == "plugin":
            node = self.random.choice(sorted(cluster.nodes))
            if node not in cluster.without_plugin:
                cluster.lose_plugin(node, self.random.choice([0.5, 3.0, 12.0]), self.random.choice([0.1, 2.0, 9.0]))
        elif event == "restart" and self.random.random() < 0.5:
            await self.site.restart()
            self.oracle.watch()

    def _name(self, team: str) -> str:
        self.number += 1
        id = f"{team}{self.number}"
        saves = self.random.choice([0.0, 0.1, 1.0, 4.0, 12.0, 100.0])
        lingers = self.random.choice([0.0, 0.0, 0.0, 0.3, 3.0])
        self.site.cluster.habits[id] = Habits(saves, self.random.choice([0.0, 0.02, 1.0]), lingers)
        return id

    async def _notebooks(self) -> None:
        rows = await self.site.rows()
        for id, made in list(self.notebooks.items()):
            row = rows.get(id)
            if row is None:
                del self.notebooks[id]
                continue
            self.site.service.components.leases.renew(id)
            if row.state == "starting" and not made:
                await self.site.cluster.create(PODS, _notebook(row))
                self.notebooks[id] = True
                self._commit(Change(id, {"state": "running"}, expect_states=("starting",)))

    async def _stop(self, id: str, rows: Mapping[str, Workload]) -> None:
        if (row := rows.get(id)) is None:
            return
        if self.notebooks.pop(id):
            await self.site.cluster.delete(f"{PODS}/{id}", grace=30)
        self._commit(release(row, "release", "released", "stopped", self.site.cluster.now).change)

    def _commit(self, change: Change) -> None:
        components = self.site.service.components
        components.store.commit([change], [], now=self.site.cluster.now)


def _notebook(row: Workload) -> dict[str, object]:
    labels = {MANAGED_BY: MANAGER, INSTANCE: "here", SESSION: row.id}
    node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [row.placement[0].node]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [node]}}}
    container = {"name": "notebook", "resources": {"requests": {GPU: "1"}}}
    return {
        "metadata": {"name": row.id, "namespace": "jobs", "labels": labels},
        "spec": {"affinity": affinity, "containers": [container], "terminationGracePeriodSeconds": 30},
    }


async def lived(folder: Path, seed: int, events: int = 25) -> Evictions:
    """Live through one history and return its evictions."""
    random = Random(seed)
    sizes = random.choice([[4], [4], [2, 2], [3, 4], [8], [1, 1, 2]])
    nodes = {f"n{at}": gpus for at, gpus in enumerate(sizes)}
    devops = random.randint(1, max(1, sum(sizes) // 2))
    moves = "true" if random.random() < 0.3 else "false"
    policy = POLICY.format(moves=moves, devops=devops, ops=random.randint(0, sum(sizes) - devops))
    cluster = SimulatedCluster(nodes, random, lag=random.choice([0.0, 0.01, 0.3]))
    site = Site(cluster, folder, policy)
    await site.start()
    oracle = Oracle(site)
    oracle.watch()
    try:
        await History(site, random, oracle).live(events)
    finally:
        await site.stop()
    return oracle.evictions
