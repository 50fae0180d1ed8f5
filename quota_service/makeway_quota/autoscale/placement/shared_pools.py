"""Count the machines of other deployments that launch for the same pools, so that each need is served once.

What counts is committed: a machine counts from its request. One whose deployment has ended its launches, or does not
look after it any more, is not waited for. Used by `sizing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..demand import MachineDemand
from ..deployment import Deployment, MachineType
from ..machine import Machine


@dataclass(frozen=True, slots=True)
class OtherDeployment:
    """A deployment that launches for a pool of the one that is sized. `boot_seconds`: usual boot times by type."""

    deployment: Deployment
    machines: tuple[Machine, ...]
    boot_seconds: Mapping[str, float] = field(default_factory=dict)

    def counted(self, demand: MachineDemand, now: float) -> Iterator[tuple[Machine, MachineType]]:
        """Yield the machines that may have room for what waits, or get some, with their types."""
        if self.deployment.paused:
            return
        for row in self.machines:
            machine_type = self.deployment.type(row.type)
            if machine_type is None or row.finished:
                continue
            late = row.starting and now - row.requested_at > self.deployment.timeouts(row.type).start_timeout
            if not late and not (row.state == "draining" and row.id in demand.accepting_machines):
                yield row, machine_type
