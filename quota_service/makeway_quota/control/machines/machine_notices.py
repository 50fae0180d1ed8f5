"""Notify jobs whose machine is to go: those that are moved, and those whose machine ends at a deadline.

What is noticed follows from the rows of machines and jobs alone, in each cycle anew: a leader that is killed between
the drain of a machine and the notices leaves them to the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ...autoscale.demand import MachineDemand
from ...autoscale.deployment import Deployment
from ...autoscale.machine import Machine
from ...autoscale.placement.moves import can_be_moved
from ...engine.snapshot import ADMITTED
from ...quarantine import Quarantine
from ...store.records import Workload
from ...wording import outcomes
from .. import transitions
from ..change_set import ChangeSet

MARGIN = 10.0
"""Seconds before the deadline of a machine at which its jobs have to have saved: their launchers still report it"""
NOTICING = "giving notice that its machine is to go"


def moving(
    deployments: Iterable[Deployment], machines: Collection[Machine], demand: Mapping[str, MachineDemand]
) -> frozenset[str]:
    """Return the machines that drain for a move whose jobs get their notices now. `demand`: by deployment.

    Either one of them has its notice for that already, or all still start elsewhere and nothing waits.
    """
    result = set()
    for deployment in deployments:
        known = demand.get(deployment.name)
        rows = [row for row in machines if row.deployment == deployment.name]
        for row in rows if known is not None else ():
            if known is not None and row.state == "draining" and row.drain == "move" and row.id not in known.nominated:
                leave = any(job.is_leaving for job in known.placed_on(row.id))
                if leave or can_be_moved(deployment, row, rows, known):
                    result.add(row.id)
    return frozenset(result)


def notices(
    machines: Iterable[Machine],
    rows: Iterable[Workload],
    names: Mapping[str, str],
    moved: Collection[str],
    now: float,
    quarantine: Quarantine | None = None,
) -> ChangeSet:
    """Return the notices of jobs on machines that drain. `names`: of machines, by node; `moved`: by `moving`.

    A notice that is there already only ends earlier, if the machine does. What is not preemptible never moves.
    """
    change_set, quarantine = ChangeSet(), quarantine or Quarantine()
    leaving = {
        row.id: row
        for row in machines
        if row.state == "draining" and (row.id in moved if row.drain == "move" else row.deadline is not None)
    }
    if not leaving:
        return change_set
    for row in rows:
        ends = [leaving[name] for place in row.placement if (name := names.get(place.node, "")) in leaving]
        if ends and row.kind == "job" and row.state in ADMITTED and not row.cancel_requested:
            with quarantine.guard(NOTICING, "workload", row.id):
                _notice(change_set, row, min(ends, key=lambda one: one.deadline or float("inf")), now)
    return change_set


def _notice(change_set: ChangeSet, row: Workload, machine: Machine, now: float) -> None:
    limit = None if machine.deadline is None else max(now, machine.deadline - MARGIN)
    if row.notice is not None:
        if limit is not None and row.notice.deadline > limit:
            change_set.add(*transitions.hasten(row, limit, now))
        return
    if machine.drain == "move" and not row.preemptible:
        return
    until = now + row.grace if limit is None else min(now + row.grace, limit)
    cause = machine.drain or "idle"
    change_set.add(*transitions.leave_machine(row, cause, outcomes.leaves_machine(cause), until, now))
