"""Run attempts whose workers are no processes of the service: they speak the attempt protocol, through a channel.

`RemoteBackend` is the part that all such backends share: what workers report and send comes from the channel, and
orders reach them as the store has them, whichever replica they ask. A subclass starts and removes hosts (pods,
processes elsewhere). A worker that is not heard of for `lost_after` is lost.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal, Protocol

from makeway_api.durations import duration

from ...quarantine import Quarantine
from ...values import Notice
from ..base import (
    LOST_AFTER,
    AttemptStatus,
    Backend,
    BackendError,
    Key,
    NodeStatus,
    Observation,
    Phase,
    StartOrder,
    TerminationProgress,
)
from ..machines.machine_source import MachineSource
from ..versions import ObservationTracker
from .channel import Channel
from .remote_attempt import NOTHING, AttemptObservation, Ending, RemoteAttempt, Timeouts, conclude, cut_off
from .worker_hosts import GONE, WorkerHosts
from .workers import WorkerStatus

log = logging.getLogger("makeway.remote")

REPORT_WITHIN = 300.0
"""Seconds within which all workers of an attempt have to report, once their hosts wait for nothing."""
REPORT_GRACE = 15.0
"""Seconds after a deadline or a kill for which a worker may report its end itself before its host is removed, and
after which a host that is still there is removed again."""
OBSERVING, ENDING = "looking at its attempt", "removing its hosts"
REFUSED_PAUSE = 1.0
"""Seconds after which a removal that was refused twice is tried again; then twice as long, and so on."""


class Folders(Protocol):
    """The folders of checkpoints on a volume that outlives hosts."""

    def purge(self, workload: str, team: str) -> bool:
        """Return as `Backend.purge`."""

    async def close(self) -> None:
        """Stop removing; a later order finds what is left."""


_NONE: Mapping[int, WorkerStatus] = {}


class RemoteBackend(Backend, ABC):
    """A backend whose workers are reached by a channel; see `base.Backend` for what each method guarantees."""

    name = "remote"
    shared = True
    durable_checkpoints = True
    worker_kind: Literal["pod", "process"] = "pod"
    remote = True
    reports_begin = True

    def __init__(
        self,
        lost_after: float = LOST_AFTER,
        report_within: float = REPORT_WITHIN,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.lost_after = lost_after
        self.report_within = report_within
        self._monotonic = monotonic
        self._clock = clock
        self._known: dict[Key, RemoteAttempt] = {}
        """of attempts of which there is something to remember"""
        self._changes = ObservationTracker()
        self._hosts: dict[Key, WorkerHosts] = {}
        self._synced = False
        self._attempts: dict[Key, AttemptStatus] = {}
        """what was observed last: an observation looks only at what has changed, or may change by time"""
        self._again: set[Key] = set()
        """attempts to look at again at the next observation"""
        self._may_act: Callable[[], bool] = lambda: True
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self.channel: Channel
        self.machine_source: MachineSource | None = None
        self.folders: Folders | None = None

    def follow_machines(self, machines: MachineSource) -> None:
        """Read the machines of deployments, and what is placed there, from this."""
        self.machine_source = machines

    @property
    def problem(self) -> str:
        """Why nodes and hosts cannot be observed at the moment; "" when they can."""
        return ""

    # -- what a subclass does

    @abstractmethod
    async def nodes(self) -> Mapping[str, NodeStatus]:
        """Return the nodes by name."""

    @abstractmethod
    async def hosts(self) -> Mapping[Key, WorkerHosts] | None:
        """Return the hosts of the attempts that were started and not removed since.

        None while the list is not complete: absence from it means nothing then.
        """

    @abstractmethod
    async def start(self, order: StartOrder) -> None:
        """Start an attempt's hosts exactly once, however often it is ordered."""

    @abstractmethod
    async def remove(self, workload: str, attempt: int) -> None:
        """Remove an attempt's hosts with everything on them; a repetition does nothing."""

    def termination_progress(self, workload: str) -> TerminationProgress | None:
        """Return what was done to end what is left of a workload; None where nothing was ordered by this process."""
        keys = [key for key, known in self._known.items() if key[0] == workload and known.ending is not None]
        last = self._ending(max(keys)) if keys else None
        if last is None:
            return None
        return TerminationProgress((), last.tries, self._clock() + last.remove_at - self._monotonic(), last.problem)

    def cut_off(self) -> Mapping[Key, tuple[int, str]]:
        """Return attempts that are lost with a host before `lost_after`: the worker that is silent, and why."""
        return {}

    def unreported_message(self, key: Key, worker: int) -> str:
        """Return that a worker whose host is there did not report in time."""
        return f"worker {worker} did not report within {duration(self.report_within)}"

    # -- the protocol

    def connect(self, channel: Channel) -> None:
        """Use this channel; called once, before `open`."""
        self.channel = channel

    def quarantine_in(self, quarantine: Quarantine) -> None:
        """Add what an observation fails with to this quarantine."""
        self.quarantine = quarantine

    def fence_with(self, may_act: Callable[[], bool]) -> None:
        """Remove hosts after their time, and keep to conclusions, only while `may_act`: this replica leads."""
        self._may_act = may_act

    def begin_term(self) -> None:
        """Forget what an earlier term concluded and ordered: the new one looks at those attempts again."""
        for key, known in list(self._known.items()):
            if (later := known.in_new_term()) != known:
                self._again.add(key)
                self._remember(key, later)

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a worker reports something new."""
        self.channel.on_change(wake)

    async def open(self) -> None:
        """Read what workers reported to an earlier process."""
        await self.channel.refresh()

    async def close(self, *, stop_jobs: bool) -> None:
        """Stop observing; workers go on without this replica."""
        if self.folders is not None:
            await self.folders.close()

    async def observe(self, since: int | None = None) -> Observation:
        """Return the nodes, and the attempts that have hosts or that a worker reported about."""
        await self.channel.refresh()
        listed, reported = await self.hosts(), self.channel.worker_statuses()
        hosts, otherwise = dict(listed or {}), None if listed is None else GONE
        silent, dead = self.channel.silent(self.lost_after), self.cut_off()
        for key in self._due(hosts, listed is not None) | silent.keys() | dead.keys():
            if key not in hosts and key not in reported:
                self._attempts.pop(key, None)
                self._known.pop(key, None)
                continue
            observed = AttemptObservation(key, hosts.get(key, otherwise), reported.get(key, _NONE), silent.get(key))
            if not self._observe_attempt(observed, dead.get(key)):
                self._again.add(key)
        for key, ending in self._due_endings():
            if not self.quarantine.is_backing_off(ENDING, "workload", key[0]):
                with self.quarantine.guard(ENDING, "workload", key[0]):
                    await self._remove(key, ending)
        observation = self._changes.observation(await self.nodes(), self._attempts, since, synced=listed is not None)
        return replace(observation, problem=self.problem) if self.problem else observation

    def _observe_attempt(self, observed: AttemptObservation, lost_with: tuple[int, str] | None) -> bool:
        """Update what is known of one attempt; False where that fails, so that it stays as it was seen last."""
        key = observed.key
        if self.quarantine.is_backing_off(OBSERVING, "workload", key[0]):
            return False
        with self.quarantine.guard(OBSERVING, "workload", key[0]):
            self._attempts[key] = self._attempt_status(observed, lost_with)
            return True
        # What is there must not count as lost, or it would be started a second time.
        self._attempts.setdefault(key, AttemptStatus(*key, Phase.STARTING))
        return False

    async def _remove(self, key: Key, ending: Ending) -> None:
        """Remove hosts whose time is over; where they stay, again and again, less and less often."""
        ending.tries += 1
        try:
            await self.remove(*key)
        except BackendError as error:
            if ending.problem != str(error):
                log.warning("The hosts of attempt %s of %s could not be removed: %s", key[1], key[0], error)
            if ending.problem:
                ending.try_again(self._monotonic(), REFUSED_PAUSE)
            ending.problem = str(error)
            return
        if ending.removed:
            log.warning("The hosts of attempt %s of %s are still there, and were removed again", key[1], key[0])
        ending.removed, ending.problem = True, ""
        ending.try_again(self._monotonic(), REPORT_GRACE)
        self._again.add(key)

    def _due(self, hosts: dict[Key, WorkerHosts], synced: bool) -> set[Key]:
        """Return the attempts that may not be what they were at the last observation."""
        before, self._hosts = self._hosts, hosts
        unheard_before = self._monotonic() - self.report_within
        keys = self.channel.changed() | {key for key, known in self._known.items() if known.timed(unheard_before)}
        keys |= (before.keys() - hosts.keys()) | self._again
        self._again = set()
        keys |= {key for key, host in hosts.items() if (old := before.get(key)) is not host and old != host}
        if synced != self._synced:
            self._synced = synced
            keys |= self._attempts.keys()
        return keys

    async def notice(self, workload: str, attempt: int, notice: Notice) -> None:
        """Remove the hosts some time after the deadline; the workers read their notice from the store themselves."""
        remove_at = self._monotonic() + max(0.0, notice.deadline - notice.at) + REPORT_GRACE
        if (status := self._attempts.get((workload, attempt))) is not None and status.start_broke_off:
            remove_at = self._monotonic()  # there is nothing that could save
        self._order_end((workload, attempt), Ending(remove_at, notice))
        until = datetime.fromtimestamp(notice.deadline, UTC).strftime("%H:%M:%S UTC")
        self.publish_event((workload, attempt), "notice", f"{notice.reason} It may save until {until}.")

    async def kill(self, workload: str, attempt: int) -> None:
        """Remove the hosts unless the workers end by themselves soon: they read from the store that they must."""
        report_grace = REPORT_GRACE if (workload, attempt) in self.channel.worker_statuses() else 0.0
        self._order_end((workload, attempt), Ending(self._monotonic() + report_grace))

    async def forget(self, workload: str, attempt: int) -> None:
        """Remove the hosts and stop reporting the attempt."""
        await self.remove(workload, attempt)
        await self.channel.forget(workload, attempt)

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        """Return bytes of the log that the workers sent."""
        return await self.channel.log(workload, attempt, offset, size)

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Return the bytes of a very long log that were dropped."""
        return await self.channel.log_gap(workload, attempt)

    async def result(self, workload: str, attempt: int) -> bytes | None:
        """Return the result that a worker sent, or None."""
        return await self._whole(workload, attempt, "result")

    async def result_part(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int] | None:
        """Return part of the result and the size of the whole."""
        return await self.channel.output(workload, attempt, "result", offset, size)

    async def error(self, workload: str, attempt: int) -> bytes | None:
        """Return the JSON about the exception that a worker sent, or None."""
        return await self._whole(workload, attempt, "error")

    async def purge(self, workload: str, team: str) -> bool:
        """Remove the folder of checkpoints where there is one; what workers sent goes with the workload's row."""
        return self.folders is None or self.folders.purge(workload, team)

    # -- inside

    async def _whole(self, workload: str, attempt: int, kind: str) -> bytes | None:
        parts: list[bytes] = []
        while (part := await self.channel.output(workload, attempt, kind, sum(map(len, parts)), 2**20)) is not None:
            parts.append(part[0])
            if not part[0]:
                return b"".join(parts)
        return None

    def _order_end(self, key: Key, ending: Ending) -> None:
        self._remember(key, self._known.get(key, NOTHING).to_end(ending))

    def _due_endings(self) -> list[tuple[Key, Ending]]:
        """Return the attempts that were to end, and whose hosts are removed now."""
        if not self._may_act():
            return []
        now = self._monotonic()
        ends = [(key, known.ending) for key, known in self._known.items() if known.ending is not None]
        return [(key, ending) for key, ending in ends if now >= ending.remove_at and self._is_alive(key)]

    def _is_alive(self, key: Key) -> bool:
        status = self._attempts.get(key)
        return status is not None and status.phase not in (Phase.EXITED, Phase.LOST)

    def _attempt_status(self, observed: AttemptObservation, lost_with: tuple[int, str] | None) -> AttemptStatus:
        """Return the report of an attempt, and remember of it what the next observation needs.

        `lost_with`: the worker whose host is dead, and why. A replica that leads keeps to ends that it concluded.
        """
        key = observed.key
        conclusion = conclude(
            self._known.get(key, NOTHING),
            observed,
            self._monotonic(),
            Timeouts(self.lost_after, self.report_within, REPORT_GRACE),
            lambda worker: self.unreported_message(key, worker),
        )
        if lost_with is not None:
            conclusion = cut_off(conclusion, *lost_with)
        known, status, concluded = conclusion
        if concluded:
            status = replace(status, ended_at=self._clock())
            if self._may_act():
                known = replace(known, concluded=status)
        self._remember(key, known)
        return status

    def _remember(self, key: Key, known: RemoteAttempt) -> None:
        if known == NOTHING:
            self._known.pop(key, None)
        else:
            self._known[key] = known

    def _ending(self, key: Key) -> Ending | None:
        """Return the end of an attempt that was ordered in this term."""
        return self._known.get(key, NOTHING).ending
