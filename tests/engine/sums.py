"""Count usage and free resources of a snapshot, independently of the engine."""

from __future__ import annotations

from collections.abc import Iterable

from makeway_quota.engine import GPU, Profile, QuotaLine, Snapshot, Workload
from makeway_quota.engine.snapshot import ADMITTED, LIVE, Placement


class Sums:
    """Usage and free resources of a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.nodes = {n.name: n for n in snapshot.nodes}
        self.profiles = {p.name: p for p in snapshot.profiles}
        self.policies = {p.name: p for p in snapshot.policies}
        self.live = {w.id: w for w in snapshot.workloads if w.state in LIVE}

    def gpus(self, w: Workload) -> int:
        return w.gpus if w.gpus is not None else self.profiles[w.profile].gpus

    def workers(self, w: Workload) -> int:
        profile = self.profiles[w.profile]
        return profile.min_workers or profile.workers

    def request(self, w: Workload) -> int:
        return self.gpus(w) * self.workers(w)

    def is_stuck(self, w: Workload) -> bool:
        """Whether an evicted workload should have ended long ago, so that its GPUs count as gone."""
        late = self.snapshot.now - self.snapshot.settings.stuck_after
        return w.state == "checkpointing" and w.deadline is not None and w.deadline <= late

    def held(self, w: Workload) -> int:
        return held(w.placement)

    def pool(self, placement: Placement) -> str:
        return self.nodes[placement[0].node].pool

    def usage(self, team: str, line: QuotaLine, non_preemptible: bool = False) -> int:
        return sum(
            self.held(w)
            for w in self.live.values()
            if w.state in ADMITTED
            and w.placement
            and team in self.family(w.team)
            and line.covers(self.pool(w.placement))
            and (w.non_preemptible or not non_preemptible)
        )

    def nominated(self, team: str, line: QuotaLine, non_preemptible: bool = False) -> int:
        """Count the nominations of pending workloads; a workload that is still to move holds as much already."""
        return sum(
            held(w.nomination)
            for w in self.live.values()
            if w.state == "pending"
            and w.nomination
            and team in self.family(w.team)
            and line.covers(self.pool(w.nomination))
            and (w.non_preemptible or not non_preemptible)
        )

    def family(self, team: str) -> list[str]:
        result: list[str] = []
        at: str | None = team
        while at is not None and at in self.policies and at not in result:
            result.append(at)
            at = self.policies[at].parent
        return result or [team]

    def left(self, gone: Iterable[str] = ()) -> dict[str, list[int]]:
        """Return the milli-GPUs left per node and device, without the workloads in `gone`."""
        gone = set(gone)
        free = {n.name: [GPU] * n.gpus for n in self.nodes.values()}
        for w in self.live.values():
            if w.state in ADMITTED and w.id not in gone:
                for placed in w.placement:
                    for device in placed.devices:
                        free[placed.node][device] -= placed.milli_per_device
        return free


def held(placement: Placement) -> int:
    return sum(p.milli_per_device * len(p.devices) for p in placement)


def take(free: dict[str, list[int]], placement: Placement) -> None:
    for placed in placement:
        for device in placed.devices:
            free[placed.node][device] -= placed.milli_per_device


def fits(profile: Profile, sums: Sums, free: dict[str, list[int]], pool: str) -> bool:
    """Whether the least number of workers fits on usable nodes of a pool (GPUs only)."""
    count = 0
    for name, devices in free.items():
        node = sums.nodes[name]
        if node.pool != pool or not node.ready or node.cordoned:
            continue
        if profile.gpus >= GPU:
            count += devices.count(GPU) // (profile.gpus // GPU)
        else:
            count += sum(item // profile.gpus for item in devices if item > 0)
    return count >= (profile.min_workers or profile.workers)
