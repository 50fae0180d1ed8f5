"""Show machines that boot to the engine as nodes, for the service and for simulations alike.

What the engine keeps idle for such a node is bounded: the service shows each machine only once its provider has
confirmed it, no longer than a boot may be expected to take, and not while the boots of its type fail.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from ...autoscale.deployment import REQUEST, Deployment, MachineType
from ...autoscale.instances import InstanceList
from ...autoscale.machine import STARTING, Machine
from ...engine.snapshot import Node

SHOWN_WITHIN = 30.0
"""Seconds after which a machine that is ready and no node yet is not counted on any more"""
LATE_SECONDS = 60.0
"""Seconds beyond the usual time of a boot for which a machine is shown at least: what is ready is listed later"""
MAX_SECONDS = 1800.0
"""Seconds for which a machine is shown while it boots, at most"""
WITHDRAWN = frozenset({"not_needed", "pause", "budget", "removed"})
"""The causes of ends that say nothing of the boot: the machine was not wanted any more"""


def booting_node(machine: Machine, machine_type: MachineType, ready_at: float, *, sessions: bool = False) -> Node:
    """Return a machine as the node that it will be, with the size of its type; `sessions`: whether notebooks run on it.

    It is named like its machine, as the node of an agent is.
    """
    return Node(
        machine.id,
        machine.pool,
        0 if machine_type.cpu_only else machine.gpus,
        machine_type.cpu,
        machine_type.memory,
        ready=False,
        model=machine_type.model,
        sessions=sessions,
        ready_at=ready_at,
    )


class BootingMachines:
    """The machines of one deployment that boot, as far as the engine may keep anything idle for them."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.learned = deployment, False
        """`learned`: whether `learn` was called, so that all machines are known"""
        self.usual: Mapping[str, float] = {}
        """how long a boot takes, by type"""
        self._failing: set[str] = set()
        """The types whose newest boot that ended has failed"""
        self._ended: dict[str, bool] = {}
        """Machine whose boot has ended, or is late, to whether it was ready"""
        self._provisioned: dict[str, float] = {}
        """Machine whose ProvisioningRequest is not in the queue any more, to when that was seen first"""

    def take_list(self, listed: InstanceList) -> None:
        """Note which instances wait in no queue."""
        named = {one.machine for one in listed.instances}
        known = {id: at for id, at in self._provisioned.items() if not listed.complete and id not in named}
        known |= {
            one.machine: self._provisioned.get(one.machine, listed.at) for one in listed.instances if not one.queued
        }
        self._provisioned = known

    def learn(self, machines: Iterable[Machine], now: float) -> None:
        """Note which boots have ended since the last call: `machines` are all that are not over, and some that are."""
        known, news = {one.id: one for one in machines}, list[tuple[float, Machine, bool]]()
        for one in known.values():
            before = self._ended.get(one.id)
            if one.ready_at is not None and not before:
                news.append((one.ready_at, one, True))
            elif one.ready_at is None and before is None and (at := self._failed_at(one, now)) is not None:
                news.append((at, one, False))
        for _, one, ready in sorted(news, key=lambda item: item[0]):
            self._ended[one.id] = ready
            (self._failing.discard if ready else self._failing.add)(one.type)
        self.learned = True
        self._ended = {id: ready for id, ready in self._ended.items() if id in known}

    def clock_was_set(self, seconds: float) -> None:
        """Move all times by so many seconds."""
        self._provisioned = {id: at + seconds for id, at in self._provisioned.items()}

    def nodes(self, rows: Iterable[Machine], observed: Container[str], now: float) -> Iterator[Node]:
        """Yield those of the machines that are shown as nodes, each until it is observed as a node."""
        for row in rows:
            machine_type = self.deployment.type(row.type)
            if machine_type is None or row.id in observed or row.cluster_node in observed:
                continue
            if self._is_shown(row, now):
                usual = self.usual.get(row.type, machine_type.spin_up_timeout)
                yield booting_node(row, machine_type, row.requested_at + usual, sessions=self.deployment.runs_sessions)

    def _is_shown(self, row: Machine, now: float) -> bool:
        if row.state == "ready":
            return row.ready_at is not None and now < row.ready_at + SHOWN_WITHIN
        return row.state in STARTING and row.type not in self._failing and now < (self._late_at(row) or now)

    def _late_at(self, row: Machine) -> float | None:
        """Return until when a machine is shown while it boots; None before its provider has confirmed it."""
        at = row.launched_at
        if self.deployment.settings.get("provisioning") == REQUEST:
            at = self._provisioned.get(row.id)
        if at is None or row.launched_at is None:
            return None
        usual = self.usual.get(row.type)
        longest = self.deployment.timeouts(row.type).spin_up_timeout
        return at + min(MAX_SECONDS, longest if usual is None else usual + max(usual, LATE_SECONDS))

    def _failed_at(self, row: Machine, now: float) -> float | None:
        """Return when the boot of a machine that was never ready has failed, or when it was late; None for neither."""
        late_at = self._late_at(row)
        if row.state in STARTING:
            return late_at if late_at is not None and late_at <= now else None
        if row.launched_at is None or row.reason in WITHDRAWN:
            return None
        return row.state_since if late_at is None else min(row.state_since, late_at)
