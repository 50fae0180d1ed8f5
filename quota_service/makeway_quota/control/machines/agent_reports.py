"""Read what agents reported as observations of their machines."""

from __future__ import annotations

from collections.abc import Iterator

from ...autoscale.machine import MachineObservation
from ...store.machines.reports import MachineReport


def observations(report: MachineReport) -> Iterator[MachineObservation]:
    """Yield what a report says of its machine, in the order in which it happened; nothing of one that is damaged.

    A report is the newest one of its machine, so that all of it may be observed again.
    """
    if report.damaged:
        return
    facts, at, boot = report.facts, report.heard_at, report.boot
    yield MachineObservation("joined", at=report.joined_at, boot=boot, instance=str(facts.get("instance") or ""))
    code = facts.get("init_exit_code")
    if code == 0:
        yield MachineObservation("initialised", at=at, boot=boot, gpus=_whole(facts.get("gpus")))
    elif code is not None:
        yield MachineObservation("init_failed", at=at, boot=boot, reason="init_failed")
    attempts = facts.get("attempts")
    if isinstance(attempts, list):
        running = [one for one in attempts if not (isinstance(one, dict) and one.get("state") == "exited")]
        yield MachineObservation("heard", at=at, boot=boot, attempts=len(running))
    deadline = facts.get("spot_deadline")
    if isinstance(deadline, (int, float)):
        yield MachineObservation("spot_notice", at=at, deadline=float(deadline))


def _whole(value: object) -> int:
    return value if isinstance(value, int) else -1
