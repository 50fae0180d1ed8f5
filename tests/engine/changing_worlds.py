"""Generate histories in which everything changes at once: nodes and their devices, the policy document, and what runs.

Two pools, limits and reservations over one or both, departments, fractions, gangs, elastic ones, and both modes of
`fair_share`. Nodes move to another pool under their work, devices vanish and return, nodes are lost and heal.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from random import Random

from engine.cascades import come_to_rest
from engine.engines import ENGINES, differences
from engine.mixed_worlds import happen_mixed
from engine.pooled_worlds import pooled_world, quota_lines
from engine.properties import check
from makeway_quota.engine import Node, TeamQuota, reference, schedule
from makeway_quota.engine.snapshot import LIVE


class ChangingHistory:
    """One history, whose devices return as they were at first."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = pooled_world(self.random)
        self.engine = ENGINES["fast" if seed % 2 else "reference"]
        if self.random.random() < 0.3:
            self._name_devices()
        self.first = dict(self.world.nodes)
        self.starts_slowly = Random(seed) if seed % 4 == 2 else None
        self.changes = (self._relabel, self._vanish, self._return, self._edit_quotas, self._edit_family)

    def live(self, events: int) -> None:
        """Check the invariants of every plan, both engines compared; and that the world comes to rest now and then."""
        for number in range(events):
            self._happen()
            self.compare()
            check(self.world, self.engine, Random(7))
            if self.starts_slowly:
                self._start_slowly(self.starts_slowly)
            self.world.now += self.random.choice([1, 5, 40, 600])
            if number % 5 == 4:
                self.rest()
            self.world.workloads = {i: w for i, w in self.world.workloads.items() if w.state in LIVE}

    def compare(self) -> None:
        """Compare the plans of both engines."""
        snapshot = self.world.snapshot()
        differing = differences(schedule(snapshot), reference.schedule(snapshot))
        assert not differing, f"fast and reference differ: {differing}"

    def rest(self) -> None:
        """Check that a copy of the world comes to rest. What terminates ends first: its end is an event."""
        other = copy(self.world)
        other.nodes, other.workloads, other.plans = dict(other.nodes), dict(other.workloads), []
        if terminating := other.named("checkpointing"):
            other.release(*terminating)
        come_to_rest(other, self.engine)

    def _start_slowly(self, random: Random) -> None:
        """Keep some of what was started in the state `starting`, in which an eviction loses nothing."""
        for w in list(self.world.workloads.values()):
            if w.state in ("starting", "running"):
                young = w.started_at is not None and w.started_at >= self.world.now - 1
                slow = random.random() < (0.5 if young else 0.9) and (young or w.state == "starting")
                self.world.change(w.id, state="starting" if slow else "running")

    def _name_devices(self) -> None:
        nodes = self.world.nodes
        for name in self.random.sample(sorted(nodes), self.random.randint(1, len(nodes))):
            nodes[name] = replace(nodes[name], devices=tuple(range(nodes[name].gpus)))

    def _happen(self) -> None:
        if self.random.random() < 0.7:
            happen_mixed(self.world, self.random)
        else:
            self.random.choice(self.changes)()

    def _node(self) -> Node:
        return self.world.nodes[self.random.choice(list(self.world.nodes))]

    def _relabel(self) -> None:
        node = self._node()
        self.world.nodes[node.name] = replace(node, pool=self.random.choice(list(self.world.pools)))

    def _vanish(self) -> None:
        node, random = self._node(), self.random
        if node.devices:
            shown = tuple(device for device in node.devices if random.random() < 0.7)
            node = replace(node, devices=shown, gpus=len(shown)) if shown else replace(node, ready=False)
        else:
            node = replace(node, gpus=random.choice([0, *range(node.gpus), max(0, node.gpus - 1)]))
        self.world.nodes[node.name] = node

    def _return(self) -> None:
        for node in list(self.world.nodes.values()):
            first = self.first[node.name]
            self.world.nodes[node.name] = replace(node, gpus=first.gpus, devices=first.devices)

    def _team(self) -> TeamQuota:
        return self.world.policies[self.random.choice([name for name in self.world.policies if name != "top"])]

    def _edit_quotas(self) -> None:
        team = self._team()
        self.world.policies[team.name] = replace(team, quotas=quota_lines(self.random))

    def _edit_family(self) -> None:
        team, random = self._team(), self.random
        if "top" not in self.world.policies:
            self.world.team("top", reserved=random.choice([0, 3, 6]), limit=random.choice([None, 6, 10]))
        parent = None if team.parent else "top"
        weight = random.choice(["None", "Lowest", "Medium", "High"])
        self.world.policies[team.name] = replace(team, parent=parent, weight=weight)
