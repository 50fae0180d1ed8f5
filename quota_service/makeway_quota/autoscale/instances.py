"""Join the provider's lists with the rows: what happened to each machine, and instances without a row.

A list proves only what is on it, unless it is complete; and then only for instances that had to be visible when it was
started. The provider is listed before the rows are read: each call has a row before, so an instance on the list that
has no row belongs to no call that is still expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from .deployment import Deployment
from .machine import NO_NODE, Machine, MachineEvent, boot_of

InstanceState = Literal["pending", "running", "stopping", "stopped", "terminated"]


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance at the provider. `machine` and `deployment` are its tags; `launched_at` None where it is not told.

    No agent joins from a node of the cluster, so that its provider knows what an agent would report: `node`, once work
    can start there, with its GPUs and the attempts that it runs. `refused`: why it never will, "" where it may.
    `revoked`: whether the cluster takes it back. `queued`: whether it waits in a queue, so that nothing boots.
    """

    id: str
    machine: str
    deployment: str
    state: InstanceState = "running"
    launched_at: float | None = None
    node: str = ""
    gpus: int = 0
    attempts: int = 0
    refused: str = ""
    revoked: bool = False
    queued: bool = False


@dataclass(frozen=True, slots=True)
class InstanceList:
    """One answer of the provider: the instances with the tag of a deployment, as of some time before or after `at`.

    `at`: when it was started, by the service's clock. `complete`: all pages were read, and no zone was left out.
    """

    at: float
    instances: tuple[Instance, ...]
    complete: bool = True


@dataclass(frozen=True, slots=True)
class ListResult:
    """What a list says: events by machine, and the instances to end because no row expects them.

    `first_seen`: when each instance without a row was seen first.
    """

    events: tuple[tuple[Machine, MachineEvent], ...]
    orphans: tuple[Instance, ...]
    first_seen: Mapping[str, float]


def match_instances(
    deployment: Deployment,
    machines: Iterable[Machine],
    listed: InstanceList,
    first_seen: Mapping[str, float],
) -> ListResult:
    """Return what a list says of the machines. `first_seen`: when each instance without a row was seen first."""
    rows = {machine.id: machine for machine in machines if not machine.finished}
    ours = [instance for instance in listed.instances if instance.deployment == deployment.name]
    result: list[tuple[Machine, MachineEvent]] = []
    shown: set[str] = set()
    orphans = []
    without_row: dict[str, float] = {}
    for instance in sorted(ours, key=lambda one: (one.state == "terminated", one.id)):
        row = rows.get(instance.machine)
        if row is not None and row.id not in shown and row.instance in (None, instance.id):
            shown.add(row.id)
            result += ((row, event) for event in _events_of(instance, listed.at, deployment.drain_timeout))
        elif instance.state != "terminated":
            without_row[instance.id] = min(first_seen.get(instance.id, listed.at), listed.at)
            if _is_orphan_due(deployment, instance, listed.at, without_row[instance.id]):
                orphans.append(instance)
    empty = not any(instance.state != "terminated" for instance in ours)
    proves = listed.complete and not empty
    on_list = {instance.id for instance in ours}
    for instance_id, at in first_seen.items():  # one that is not listed may only be hidden: it is kept for the window
        if instance_id not in on_list and not (proves and listed.at - at > _window(deployment)):
            without_row[instance_id] = at
    if listed.complete:
        for row in rows.values():
            if row.id not in shown:
                result.append((row, MachineEvent("absent", at=listed.at, empty=empty)))
    return ListResult(tuple(result), tuple(orphans), without_row)


def _events_of(instance: Instance, at: float, drain_timeout: float) -> Iterator[MachineEvent]:
    if instance.state == "terminated":
        yield MachineEvent("ended", at=at, instance=instance.id)
        return
    yield MachineEvent("listed", at=at, instance=instance.id)
    if instance.refused:
        yield MachineEvent("refused", at=at, instance=instance.id, reason=NO_NODE)
    if instance.node:
        boot = boot_of(instance.node)
        yield MachineEvent("joined", at=at, instance=instance.id, boot=boot)
        yield MachineEvent("initialised", at=at, boot=boot, gpus=instance.gpus)
        yield MachineEvent("heard", at=at, boot=boot, attempts=instance.attempts)
    if instance.revoked:
        yield MachineEvent("spot_notice", at=at, instance=instance.id, deadline=at + drain_timeout)
    if instance.state in ("stopping", "stopped"):
        yield MachineEvent("stopped", at=at, instance=instance.id)


def _is_orphan_due(deployment: Deployment, instance: Instance, at: float, first_seen: float) -> bool:
    """Whether an instance is older than the window: by the provider's time, or by how long it has been seen."""
    times = [first_seen, *([] if instance.launched_at is None else [instance.launched_at])]
    return any(at - time > _window(deployment) for time in times)


def _window(deployment: Deployment) -> float:
    """Return the seconds after which an instance is on every list, from the call that launched it."""
    return deployment.request_timeout + deployment.visibility
