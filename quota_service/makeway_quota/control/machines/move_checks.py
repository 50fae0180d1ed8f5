"""Check with the engine whether the jobs of a machine would start elsewhere, before it is drained to save cost.

The engine runs only where a move was found that has room and pays. Used by the machine loop and by simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ...autoscale.deployment import Deployment
from ...autoscale.machine import Machine
from ...autoscale.placement.moves import candidates
from ...engine.restarts import Restarts
from ...store.records import Workload
from ..transitions import TIME_LIMIT
from .cycle_demand import CycleDemand

CHECKS_PER_INTERVAL = 10
"""Searches for moves within one `interval` of the rules, once that is over, as long as none is found"""


class MoveCheck(NamedTuple):
    """A deployment whose jobs might be moved now. `last_drained_at`: when a machine was drained for that last."""

    deployment: Deployment
    machines: Sequence[Machine]
    last_drained_at: float | None

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        machines: Iterable[Machine],
        last_drained_at: float | None,
        since_checked: float,
        now: float,
    ) -> MoveCheck | None:
        """Return the check that is due, or None. `since_checked`: seconds since the last check was due."""
        rows, rules = [row for row in machines if not row.finished], deployment.moves
        if any(row.drain == "move" for row in rows):
            return cls(deployment, rows, last_drained_at)
        if rules is None or last_drained_at is None or deployment.paused:
            return None
        due = now - last_drained_at >= rules.interval and since_checked >= rules.interval / CHECKS_PER_INTERVAL
        return cls(deployment, rows, last_drained_at) if due else None


def drain_candidates(known: CycleDemand, checks: Iterable[MoveCheck], now: float) -> Mapping[str, Sequence[Machine]]:
    """Return the machines by deployment that can be emptied if their jobs start elsewhere, the best first."""
    result = {}
    for check in checks:
        demand = known.of(check.machines, moves=True)
        if demand is not None:
            result[check.deployment.name] = candidates(
                check.deployment, check.machines, demand, now, check.last_drained_at
            )
    return result


def restartable(
    known: CycleDemand,
    machines: Mapping[str, Sequence[Machine]],
    restarts: Callable[[], Restarts],
    is_pinned: Callable[[Workload], bool] = lambda row: False,
) -> CycleDemand:
    """Return what is known, with the first machine of each deployment whose jobs would all start elsewhere.

    All of them are drained together, also with those whose jobs have their notice for that. A machine that drains
    already comes first. `restarts` is called only where there is a machine to check. `is_pinned`: whether a job could
    not start again for a reason that the engine does not know.
    """
    if not any(machines.values()):
        return known
    engine_restarts = restarts()
    engine_restarts.leave((), [row.id for row in known.rows if _leaves(row)])
    result = set[str]()
    for rows in sorted(machines.values(), key=lambda rows: not any(row.drain == "move" for row in rows)):
        for row in rows:
            if _start_elsewhere(known, row.id, engine_restarts, is_pinned):
                result.add(row.id)
                break
    return known.with_answers(restartable=known.restartable | result)


def _leaves(row: Workload) -> bool:
    """Whether a job waits again once it has left its machine, which is given back."""
    moves = row.notice is not None and row.notice.kind == "give_back"
    return moves and not row.cancel_requested and row.reason_code != TIME_LIMIT


def _start_elsewhere(
    known: CycleDemand, machine: str, restarts: Restarts, is_pinned: Callable[[Workload], bool]
) -> bool:
    """Whether all jobs of a machine would start at once on other machines that stay busy.

    A machine that is idle, or whose jobs all leave, ends by itself. If they would, they are pending in later checks.
    """
    nodes = {node for node, name in known.machines.items() if name == machine}
    jobs = [row for row in known.rows if any(place.node in nodes for place in row.placement)]
    if any(map(is_pinned, jobs)):
        return False
    ids = [row.id for row in jobs]
    start_nodes: Collection[str] | None = restarts.elsewhere(nodes, ids)
    busy_nodes = {place.node for row in known.rows if row.notice is None for place in row.placement}
    if not start_nodes or any(node in known.machines and node not in busy_nodes for node in start_nodes):
        return False
    restarts.leave(nodes, ids)
    return True
