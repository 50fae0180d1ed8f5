"""Return jobs to the queue with a delay after a start that failed; kept in the row.

Used by `Actuator` (the backend has no room), `reconcile` (nothing of the attempt ran, or it failed) and `EngineView`,
which hides jobs in backoff from the engine, so that their GPUs go to others and the reason that is shown stays. It also
shows the engine which nodes a job avoids for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from makeway_api.durations import duration

from ..quarantine import Quarantine
from ..store.records import Workload
from ..values import CHECKPOINT_STORAGE
from ..wording import outcomes
from . import transitions
from .change_set import job_name
from .transitions import Transition

WAKING = "trying it again where nodes came back"
NO_ROOM = "no_room"
"""The reason code of a job for which its backend has no room, as in a quota of its namespace"""
START_DEFERRED = "start_deferred"
"""The reason code of a job that did not start on its GPUs for another reason, as its pod could not run"""
START_REFUSED = "start_refused"
"""The reason code of a job that keeps its GPUs after its node refused it, and is started on them again in seconds"""
RETRY_DELAYED = "retry_delayed"
"""The reason code of a job that failed soon after its start, and is tried again after a while"""
HELD_PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each of the further starts of a job that its node refused, in which it keeps its GPUs.

The scheduler hears of a device plugin that went away up to ten seconds later than the kubelet.
"""
HELD_SECONDS = 60.0
"""Seconds from the first refusal, after which a job that is refused again keeps its GPUs no longer."""
FIRST_RETRY, MAX_RETRY = 1.0, 300.0
"""Seconds from the start of an attempt that failed to the next one, which double with each failure."""
FIRST_DELAY, MAX_DELAY = 60.0, 900.0
"""Seconds between two tries, which double from the first to the longest: others may have to make way for each."""
MANY_TRIES = 12
"""Tries in a row after which only a change in the cluster is likely to help: others make way for fewer of them."""
RARE_DELAY = 3600.0
"""Seconds between two tries after that, except where a quota is used up: it is free again whenever others end."""
FIRST_AVOIDED = 120.0
"""Seconds, at least, for which a job avoids a node that did not start it. As a rule it is the delay twice, or MAX_DELAY
after it: a device that is not free yet is there a moment later, and others need not make way elsewhere."""
CLOCKS_DIFFER = 60.0
"""Seconds by which a replica's clock may be behind that of another, or of itself before."""

AvoidedNodes = tuple[tuple[str, float], ...]
"""Nodes that a job avoids, each until a time in Unix seconds."""


class StartBackoff:
    """How often in a row each job was refused, and by which nodes, as the rows have it.

    The tries are those of the rows as they are committed, by whichever replica: one that was not committed is none.
    """

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}
        self._avoided: dict[str, AvoidedNodes] = {}

    def committed(self, rows: Sequence[Workload]) -> None:
        """Take the tries of jobs as they were read, or committed by the thread that calls."""
        for row in rows:
            tries = max(row.start_tries, _tries(row) or 0) if row.live and row.state != "running" else 0
            if tries:
                self.refused[row.id] = tries
            else:
                self.refused.pop(row.id, None)
            if row.live and row.avoids:
                self._avoided[row.id] = row.avoids
            else:
                self._avoided.pop(row.id, None)

    def avoid(self, id: str, nodes: Iterable[str], now: float) -> None:
        """Remember the nodes that a job avoids from now on, instead of those that it avoided before."""
        before = dict(self.avoided_nodes(id, now))
        delay = delay_after(self.refused.get(id, 0) + 1, START_DEFERRED)
        until = now + max(FIRST_AVOIDED, delay + min(delay, MAX_DELAY))
        self._avoided[id] = tuple((node, before.get(node, until)) for node in sorted(nodes))

    def avoided_for_row(self, id: str) -> AvoidedNodes:
        """Return the nodes that the row of a job has to name from now on."""
        return self._avoided.get(id, ())

    def avoided_nodes(self, id: str, now: float) -> AvoidedNodes:
        """Return the nodes that a job avoids at the moment."""
        latest = now + RARE_DELAY + MAX_DELAY  # where the clock was set back, it avoided them for as long
        return tuple((node, until) for node, until in self._avoided.get(id, ()) if now < until <= latest)

    def start_again(self, row: Workload, job: str, cause: str, now: float) -> Transition | None:
        """Return the change by which a job is started on its GPUs again, which stay its own meanwhile.

        None where that was done often enough: since it ran last, or was in backoff, for HELD_SECONDS at most. So what
        is refused for ever keeps its GPUs from others once, and not at each of its tries.
        """
        if row.start_tries or row.id in self.refused:
            return None
        count, since = (row.reason_numbers.get(name) for name in ("refusals", "refused_since"))
        refusals = count if isinstance(count, int) else 0
        first = float(since) if isinstance(since, int | float) else now
        if refusals >= len(HELD_PAUSES) or not 0.0 <= now - first <= HELD_SECONDS:
            return None
        pause = HELD_PAUSES[refusals]
        numbers = {"refusals": refusals + 1, "refused_since": first}
        message = outcomes.start_refused(job, cause, refusals + 1, duration(pause))
        return transitions.start_again(row, START_REFUSED, message, numbers, now + pause, now)

    def requeue(self, row: Workload, job: str, cause: str, now: float, code: str) -> Transition:
        """Return the change by which a job returns to the queue, with a delay, and the decision about it.

        `code` is NO_ROOM, START_DEFERRED or CHECKPOINT_STORAGE. The try is no attempt: there may be 34 of them on the
        first day.
        """
        tries = self.refused.get(row.id, 0) + 1
        delay = delay_after(tries, code)
        message = outcomes.start_delayed(job, cause, tries, duration(delay))
        return transitions.defer(row, code, message, tries, now + delay, self.avoided_for_row(row.id))

    def wake(
        self, rows: Mapping[str, Workload], returned: Iterable[str], now: float, quarantine: Quarantine | None = None
    ) -> list[Transition]:
        """Return the changes by which jobs in backoff are tried soon, as these nodes came back, or were repaired.

        A job is tried FIRST_DELAY seconds after its last try at the soonest, so that a node that comes and goes does
        not have others make way for it all the time. It no longer avoids these nodes.
        """
        nodes, quarantine, changes = frozenset(returned), quarantine or Quarantine(), list[Transition]()
        for id in sorted(self.refused if nodes else ()):
            with quarantine.guard(WAKING, "workload", id):
                if (row := rows.get(id)) is not None and (change := self._woken(row, nodes, now)) is not None:
                    changes.append(change)
        return changes

    def _woken(self, row: Workload, nodes: frozenset[str], now: float) -> Transition | None:
        """Return the change by which one job is tried soon; None where it is not in such a backoff."""
        if row.reason_code != START_DEFERRED or row.reason_numbers.get("soon"):
            return None
        if (until := backoff_until(row, now)) is None:
            return None
        tried = until - delay_after(self.refused[row.id], START_DEFERRED)
        soon = max(now, tried + FIRST_DELAY)
        if soon >= until:
            return None
        job = job_name(row)
        message = outcomes.start_soon(job, sorted(nodes), row.reason_message)
        return transitions.try_soon(row, soon, message, tuple(one for one in row.avoids if one[0] not in nodes))


def retry_delay(failures: int, ran: float) -> float:
    """Return the seconds before a job is tried again that failed so often, and ran so long the last time.

    What ran longer than the delay is tried at once: it takes a machine no more often than the delay allows.
    """
    return max(0.0, min(MAX_RETRY, FIRST_RETRY * 2.0 ** min(failures - 1, 20)) - ran)


def delay_after(tries: int, code: str) -> float:
    """Return the seconds that a job waits after so many tries in a row, the last of which ended with this code."""
    if tries > MANY_TRIES and code != NO_ROOM:
        return RARE_DELAY
    return min(MAX_DELAY, FIRST_DELAY * 2.0 ** min(tries - 1, 10))


def backoff_until(row: Workload, now: float) -> float | None:
    """Return until when a job is in backoff, in Unix seconds; None if it is not (any more).

    A delay that seems longer than it was made ended with the clock that it was made by, which has been set back.
    """
    tries = _tries(row)
    delayed = row.state == "pending" and row.reason_code == RETRY_DELAYED
    if (tries is None and not delayed) or row.not_before is None:
        return None
    max_delay = MAX_RETRY if tries is None else max(MAX_DELAY, delay_after(tries, row.reason_code))
    max_delay += CLOCKS_DIFFER
    return row.not_before if now < row.not_before <= now + max_delay else None


def _tries(row: Workload) -> int | None:
    """Return how often in a row a job was tried that is delayed; None if it is not, 1 where its row does not tell."""
    if row.state != "pending" or row.reason_code not in (NO_ROOM, START_DEFERRED, CHECKPOINT_STORAGE):
        return None
    tries = row.reason_numbers.get("tries")
    return max(1, tries) if isinstance(tries, int) else 1
