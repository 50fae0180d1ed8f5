"""Find the machines whose jobs would start elsewhere, by the engine, before one is emptied and before the notices.

It is asked only where a move was found that has room and pays. Used by the machine loop and by simulations.
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

ASKED_PER_PERIOD = 10
"""How often moves are looked for within `interval`, once that is over, as long as none is found"""


class MoveQuestion(NamedTuple):
    """A deployment whose jobs might be moved now. `last`: when a machine was emptied last."""

    deployment: Deployment
    machines: Sequence[Machine]
    last: float | None

    @classmethod
    def of(
        cls, deployment: Deployment, machines: Iterable[Machine], last: float | None, since_asked: float, now: float
    ) -> MoveQuestion | None:
        """Return the question that is due; None where there is none. `since_asked`: seconds since it was found last."""
        rows, rules = [row for row in machines if not row.finished], deployment.moves
        if any(row.drain == "move" for row in rows):
            return cls(deployment, rows, last)
        if rules is None or last is None or deployment.paused:
            return None
        due = now - last >= rules.interval and since_asked >= rules.interval / ASKED_PER_PERIOD
        return cls(deployment, rows, last) if due else None


def machines_to_empty(
    known: CycleDemand, questions: Iterable[MoveQuestion], now: float
) -> Mapping[str, Sequence[Machine]]:
    """Return the machines by deployment that can be emptied if their jobs start elsewhere, the best first."""
    result = {}
    for question in questions:
        demand = known.of(question.machines, moves=True)
        if demand is not None:
            result[question.deployment.name] = candidates(
                question.deployment, question.machines, demand, now, question.last
            )
    return result


def restartable(
    known: CycleDemand,
    machines: Mapping[str, Sequence[Machine]],
    restarts: Callable[[], Restarts],
    stays: Callable[[Workload], bool] = lambda row: False,
) -> CycleDemand:
    """Return what is known, with the first machine of each deployment whose jobs would all start elsewhere.

    All of them are emptied together, also with those whose jobs have their notice for that. A machine that drains
    already comes first. `restarts`: called where there is something to ask.
    `stays`: whether a job could not start again for a reason that the engine does not know.
    """
    if not any(machines.values()):
        return known
    asked = restarts()
    asked.leave((), [row.id for row in known.rows if _leaves(row)])
    result = set[str]()
    for rows in sorted(machines.values(), key=lambda rows: not any(row.drain == "move" for row in rows)):
        for row in rows:
            if _start_elsewhere(known, row.id, asked, stays):
                result.add(row.id)
                break
    return known.with_answers(restartable=known.restartable | result)


def _leaves(row: Workload) -> bool:
    """Whether a job waits again once it has left its machine, which is given back."""
    moves = row.notice is not None and row.notice.kind == "give_back"
    return moves and not row.cancel_requested and row.reason_code != TIME_LIMIT


def _start_elsewhere(known: CycleDemand, machine: str, restarts: Restarts, stays: Callable[[Workload], bool]) -> bool:
    """Whether all jobs of a machine would start at once, and on no machine that is idle: that ends by itself.

    Neither on one whose work all leaves. If so, they wait in all later questions.
    """
    nodes = {node for node, name in known.machines.items() if name == machine}
    jobs = [row for row in known.rows if any(place.node in nodes for place in row.placement)]
    if any(map(stays, jobs)):
        return False
    ids = [row.id for row in jobs]
    starts: Collection[str] | None = restarts.elsewhere(nodes, ids)
    stay = {place.node for row in known.rows if row.notice is None for place in row.placement}
    if not starts or any(node in known.machines and node not in stay for node in starts):
        return False
    restarts.leave(nodes, ids)
    return True
