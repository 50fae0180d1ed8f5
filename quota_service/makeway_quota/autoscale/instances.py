"""Match the instances that a provider lists with the rows of machines: events for machines, and orphaned instances.

Absence from a list means something only if the list is complete, and only for instances that were launched so long
before it that they had to be visible. The provider is listed before the rows are read, and a row is written before each
launch: so a listed instance without a row belongs to no launch that is under way.
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
    """The outcome of a list: events of machines, and `orphans`, the instances without a row that are to be terminated.

    `first_seen`: when each instance without a row was listed first, to be passed to the next `match_instances`.
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
    """Return the events and orphans of a list. `first_seen`: of the last result, empty at first."""
    rows = {machine.id: machine for machine in machines if not machine.finished}
    own = [instance for instance in listed.instances if instance.deployment == deployment.name]
    result: list[tuple[Machine, MachineEvent]] = []
    matched: set[str] = set()
    orphans = []
    without_row: dict[str, float] = {}
    for instance in sorted(own, key=lambda item: (item.state == "terminated", item.id)):
        row = rows.get(instance.machine)
        if row is not None and row.id not in matched and row.instance in (None, instance.id):
            matched.add(row.id)
            result += ((row, event) for event in _events_of(instance, listed.at, deployment.drain_timeout))
        elif instance.state != "terminated":
            without_row[instance.id] = min(first_seen.get(instance.id, listed.at), listed.at)
            if _is_orphan_due(deployment, instance, listed.at, without_row[instance.id]):
                orphans.append(instance)
    empty = not any(instance.state != "terminated" for instance in own)
    absence_counts = listed.complete and not empty
    listed_ids = {instance.id for instance in own}
    for instance_id, at in first_seen.items():  # one that is not listed now may be listed again: kept for a while
        gone = absence_counts and listed.at - at > _visibility_window(deployment)
        if instance_id not in listed_ids and not gone:
            without_row[instance_id] = at
    if listed.complete:
        for row in rows.values():
            if row.id not in matched:
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
    """Whether an instance without a row has existed for longer than the visibility window, so that no row will come."""
    known_since = [first_seen, *([] if instance.launched_at is None else [instance.launched_at])]
    return any(at - time > _visibility_window(deployment) for time in known_since)


def _visibility_window(deployment: Deployment) -> float:
    """Return the seconds from the start of a launch call after which its instance is on every complete list."""
    return deployment.request_timeout + deployment.visibility
