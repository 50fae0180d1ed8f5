"""Read what agents reported as events of their machines."""

from __future__ import annotations

from collections.abc import Iterator

from ...autoscale.machine import MachineEvent
from ...backends import untrusted
from ...store.machines.reports import MachineReport


def events(report: MachineReport) -> Iterator[MachineEvent]:
    """Yield what a report says of its machine, in the order in which it happened; nothing of one that is damaged.

    A report is the newest one of its machine, so that all of it may be observed again.
    """
    if report.damaged:
        return
    facts, at, boot = report.facts, report.heard_at, report.boot
    yield MachineEvent("joined", at=report.joined_at, boot=boot, instance=str(facts.get("instance") or ""))
    code = facts.get("init_exit_code")
    if code == 0:
        gpus = untrusted.whole(facts.get("gpus"))
        yield MachineEvent("initialised", at=at, boot=boot, gpus=-1 if gpus is None else gpus)
    elif code is not None:
        yield MachineEvent("init_failed", at=at, boot=boot, reason="init_failed")
    attempts = facts.get("attempts")
    if isinstance(attempts, list):
        running = [one for one in attempts if not (isinstance(one, dict) and one.get("state") == "exited")]
        yield MachineEvent("heard", at=at, boot=boot, attempts=len(running))
    if (deadline := untrusted.number(facts.get("spot_deadline"))) is not None:
        yield MachineEvent("spot_notice", at=at, deadline=deadline)
