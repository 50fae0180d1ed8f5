"""Keep the pods of jobs by their attempts, and read what those of each attempt are together.

Only attempts are looked at whose pods changed, that wait, or that are over while the nodes change: there may be
thousands of others. No requests to the API server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from makeway_api.durations import duration

from ....quarantine import Quarantine
from ...base import Key
from ...remote.machines import Machines
from ...remote.workers import WorkerSeen
from .pod_ends import NO_COMMAND, gone, machines_of, never_ran
from .pod_states import JobPod
from .pod_waits import LIMITS, with_cause

SORTING, READING = "sorting its pod", "reading its pods"
UNFINISHED = Machines(0, unfinished=True)
MOST_REMADE = 3
"""How often the pods of an attempt are made again that others deleted before they ran; then its job waits longer."""
NO_REPORTS: Mapping[Key, Mapping[int, WorkerSeen]] = {}


@dataclass(slots=True)
class _Left:
    """The last states of the pods of an attempt that others deleted, by name, and since when they are there."""

    since: float
    pods: dict[str, JobPod] = field(default_factory=dict)


class AttemptPods:
    """The pods by attempt, as the informer showed them last. Not thread-safe."""

    def __init__(self, limits: Mapping[str, float] = LIMITS, clock: Callable[[], float] = time.monotonic) -> None:
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self._limits = limits
        self._clock = clock
        self._unsorted: set[str] = set()
        """pods that changed and could not be sorted"""
        self._by_key: dict[Key, dict[str, JobPod]] = {}
        self._key_of: dict[str, Key] = {}
        """the attempt of each pod in `_by_key`, by the pod's name"""
        self._left: dict[Key, _Left] = {}
        self._remade: dict[Key, int] = {}
        """how often the pods of an attempt were made again"""
        self._forgotten: set[Key] = set()
        """attempts whose pods are deleted and still listed"""
        self._unfinished: set[Key] = set()
        """attempts whose start broke off"""
        self._stranded: set[Key] = set()
        """attempts whose pods show that their start broke off"""
        self._started: dict[Key, int] = {}
        """the workers of attempts that were started again, until their pods are listed"""
        self._waiting: dict[Key, tuple[Machines, float]] = {}
        """what the pods of an attempt wait for, and since when"""
        self._found: dict[Key, Machines] = {}
        self._torn: set[Key] = set()
        """attempts that are over as a pod ended without a report, which may still come, while others run"""
        self._with_final_report: set[Key] = set()
        """attempts of which a pod has a final report of its worker that may not have been read in this term"""
        self._read_reports: dict[Key, dict[str, str]] = {}
        """the final reports that were read in this term, by the UID of the pod"""
        self._stale: set[Key] = set()
        self._usable: Mapping[str, bool] = {}

    def gone(self, pod: JobPod) -> None:
        """Remember the last state of a pod that is listed no more."""
        self._left.setdefault(pod.key, _Left(self._clock())).pods[pod.name] = pod
        if pod.termination_message:
            self._with_final_report.add(pod.key)
        self._stale.add(pod.key)

    def sort(self, changed: Iterable[str], pods: Mapping[str, JobPod]) -> None:
        """Take the pods that changed, by the keys that the informer has them under."""
        changed, self._unsorted = self._unsorted.union(changed), set()
        for one in sorted(changed):
            name = one.partition("/")[2]
            if self.quarantine.rests(SORTING, "pod", name):
                self._unsorted.add(one)
                continue
            sorted_in = False
            with self.quarantine.guard(SORTING, "pod", name):
                self._sort_in(name, pods.get(one))
                sorted_in = True
            if not sorted_in:
                self._unsorted.add(one)

    def _sort_in(self, name: str, pod: JobPod | None) -> None:
        """Take one pod as it is now; None: it is gone."""
        if pod is not None:
            of_key = self._by_key.setdefault(pod.key, {})
            before, of_key[name] = of_key.get(name), pod  # it is there, whatever else is understood of it
            self._key_of[name] = pod.key
            self._stale.add(pod.key)
            if pod.termination_message:
                self._with_final_report.add(pod.key)
            of_key[name] = with_cause(pod, before)
        elif (key := self._key_of.pop(name, None)) is not None:
            self._stale.add(key)
            del self._by_key[key][name]
            if not self._by_key[key]:
                del self._by_key[key]
                if key in self._forgotten:
                    self._forgotten.discard(key)
                    self._left.pop(key, None)

    def of(self, key: Key) -> list[JobPod]:
        """Return the pods of an attempt that are listed."""
        return list(self._by_key.get(key, {}).values())

    def key_of(self, name: str) -> Key | None:
        """Return the attempt of a pod that is listed."""
        return self._key_of.get(name)

    def keys_of(self, workload: str) -> list[Key]:
        """Return the attempts of a workload that have pods, in order."""
        return sorted(key for key in self._by_key if key[0] == workload)

    def known(self, key: Key) -> list[JobPod]:
        """Return the pods of an attempt that are listed, and the last states of those that are no more."""
        left = self._left.get(key)
        return [*self.of(key), *(left.pods.values() if left is not None else ())]

    def with_final_report(self) -> list[JobPod]:
        """Return the pods, and last states of pods, with a final report of their worker that was not read."""
        unread = {key: found for key in self._with_final_report if (found := self._unread(key))}
        self._with_final_report = set(unread)
        # One that had the name of a listed pod may be of an attempt that a restored database does not know.
        listed = {pod.name: pod.uid for key in unread for pod in self.of(key)}
        return [pod for found in unread.values() for pod in found if listed.get(pod.name, pod.uid) == pod.uid]

    def _unread(self, key: Key) -> list[JobPod]:
        read = self._read_reports.get(key, {})
        return [pod for pod in self.known(key) if pod.termination_message not in ("", read.get(pod.uid))]

    def final_report_read(self, pod: JobPod) -> None:
        """Return the final report of a pod no more in this term."""
        self._read_reports.setdefault(pod.key, {})[pod.uid] = pod.termination_message

    def end_term(self) -> None:
        """Forget what only a leader counts: how often it made pods again, and the final reports that it read."""
        self._remade.clear()
        self._with_final_report.update(self._read_reports)
        self._with_final_report = {key for key in self._with_final_report if key in self._by_key or key in self._left}
        self._read_reports.clear()

    def forget(self, key: Key) -> None:
        """Report an attempt no more; its pods are deleted."""
        if key in self._by_key:
            self._forgotten.add(key)
        for by_key in (self._left, self._waiting, self._remade, self._read_reports):
            by_key.pop(key, None)
        self.show(key)

    def break_off(self, key: Key) -> None:
        """Report an attempt as unfinished until it is started, whatever pods it has."""
        self.show(key)
        self._unfinished.add(key)
        self._waiting.pop(key, None)

    @property
    def unfinished(self) -> Set[Key]:
        """The attempts whose start broke off here."""
        return self._unfinished

    def stranded(self, key: Key) -> bool:
        """Whether the pods of an attempt never ran, and wait for something that nothing creates any more."""
        return key in self._stranded

    def started(self, key: Key, workers: int) -> None:
        """Report an attempt as started, also before its pods are listed if it was reported before."""
        if key in self._unfinished or key in self._left:
            if key in self._left:
                self._remade[key] = self._remade.get(key, 0) + 1
            self.show(key)
            self._started[key] = workers
            self._left.pop(key, None)

    def show(self, key: Key) -> None:
        """Report an attempt as its pods are."""
        self._unfinished.discard(key)
        self._stranded.discard(key)
        self._started.pop(key, None)
        self._stale.add(key)

    def drop_left(self, seconds: float, but: Collection[Key]) -> None:
        """Drop what is left of attempts whose pods are gone for so long, except of those in `but`."""
        before = self._clock() - seconds
        for key in [key for key, left in self._left.items() if left.since <= before and key not in but]:
            if key not in self._by_key:
                del self._left[key]
                self._remade.pop(key, None)
                self._stale.add(key)

    def machines(
        self, usable: Mapping[str, bool], reported: Mapping[Key, Mapping[int, WorkerSeen]] = NO_REPORTS
    ) -> dict[Key, Machines]:
        """Return what the pods of each attempt are together; `usable` are the nodes, and whether they run.

        `reported` is what the workers say: one that has reported its end needs no pod any more.
        """
        if usable != self._usable:
            self._usable = usable
            self._stale.update(key for key, machines in self._found.items() if not machines.present)
        now = self._clock()
        due, self._stale = self._stale | self._waiting.keys() | self._torn, set()
        for key in due:
            if self.quarantine.rests(READING, "workload", key[0]):
                self._stale.add(key)
                continue
            read = False
            with self.quarantine.guard(READING, "workload", key[0]):
                self._keep(key, self._read(key, now, reported.get(key, {})))
                read = True
            if not read:  # what is there is not gone, and is not started a second time
                self._stale.add(key)
                self._found.setdefault(key, Machines(1))
        return dict(self._found)

    def _keep(self, key: Key, machines: Machines | None) -> None:
        if machines is None:
            self._found.pop(key, None)
            self._waiting.pop(key, None)
            self._torn.discard(key)
        elif self._found.get(key) != machines:
            self._found[key] = machines

    def _read(self, key: Key, now: float, workers: Mapping[int, WorkerSeen]) -> Machines | None:
        """Return what an attempt's pods are together; None where it is not reported."""
        if key in self._unfinished:
            return UNFINISHED
        left = self._left.get(key)
        last = left.pods.values() if left is not None else ()
        if (pods := self._by_key.get(key)) is not None:
            if key in self._forgotten:
                return None
            self._started.pop(key, None)
            over = [number for number, worker in workers.items() if worker.ended]
            machines = machines_of(_as_reported(pods.values(), workers), self._usable, over, last, self._limits)
            torn = not machines.present and any(pod.present for pod in pods.values())
            (self._torn.add if torn else self._torn.discard)(key)
            self._stranded.discard(key)
            return self._in_time(key, machines, now, reported=bool(workers))
        if last:
            again = self._remade.get(key, 0) < MOST_REMADE and not workers and never_ran(last, self._usable)
            return UNFINISHED if again else gone(last, self._usable)
        return Machines(self._started[key]) if key in self._started else None

    def _in_time(self, key: Key, machines: Machines, now: float, *, reported: bool) -> Machines:
        """Return the machines of an attempt; those that waited too long count as absent, with the reason."""
        if not machines.present or not machines.waiting_reason:
            self._waiting.pop(key, None)
            return machines
        before, since = self._waiting.get(key, (machines, now))
        if before.waiting_reason != machines.waiting_reason:
            since = now
        self._waiting[key] = machines, since
        limit = self._limits[machines.waiting_reason]
        if now - since < limit:
            return machines
        left = self._left.get(key)
        broken_off = machines.waiting_reason == "token" or (
            machines.waiting_reason == "incomplete" and (left is None or never_ran(left.pods.values(), self._usable))
        )
        if broken_off and not reported:
            self._stranded.add(key)
            return replace(machines, unfinished=True)
        if machines.waiting_reason == "incomplete" and left is not None:
            return gone(left.pods.values(), self._usable)
        over = replace(machines, present=False, waiting_reason="")
        if machines.waiting_reason == "no_image":
            return replace(over, exit_code=NO_COMMAND)
        storage_failed = machines.waiting_reason == "checkpoint_storage"
        message = f"its pod waited for {duration(limit)}: {machines.message}"
        return replace(over, never_ran=True, storage_failed=storage_failed, message=message)


def _as_reported(pods: Iterable[JobPod], workers: Collection[int]) -> list[JobPod]:
    """Return pods, of which those of workers that report run, although their nodes have not said so yet."""
    return [replace(pod, phase="Running") if pod.phase == "Pending" and pod.worker in workers else pod for pod in pods]
