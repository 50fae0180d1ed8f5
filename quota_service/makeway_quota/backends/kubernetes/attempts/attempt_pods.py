"""Keep the pods of jobs by their attempts, and one record for each attempt with what they are together.

Only attempts are looked at whose pods changed, that wait, or that are over while the nodes change: there may be
thousands of others. No requests to the API server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from ....quarantine import Quarantine
from ...base import Key
from ...remote.worker_hosts import WorkerHosts
from ...remote.workers import WorkerStatus
from .pod_attempt import AttemptPhase, ClusterConditions, PodAttempt, step
from .pod_states import JobPod
from .pod_waits import MAX_WAIT_SECONDS, with_cause

SORTING, READING = "sorting its pod", "reading its pods"
NO_REPORTS: Mapping[Key, Mapping[int, WorkerStatus]] = {}
NOTHING = PodAttempt()


class AttemptPods:
    """The pods by attempt, as the informer showed them last. Not thread-safe."""

    def __init__(
        self, limits: Mapping[str, float] = MAX_WAIT_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self._cluster = ClusterConditions({}, limits)
        self._clock = clock
        self._unsorted: set[str] = set()
        """pods that changed and could not be sorted"""
        self._pods: dict[Key, dict[str, JobPod]] = {}
        self._key_of: dict[str, Key] = {}
        """the attempt of each pod in `_pods`, by the pod's name"""
        self._attempts: dict[Key, PodAttempt] = {}
        """those of which there is something to remember"""
        self._due: set[Key] = set()
        """attempts to look at: something of them changed, or may change by time"""
        self._reporting: set[Key] = set()
        """attempts of which a pod has a final report of its worker that may not have been read in this term"""

    def attempt(self, key: Key) -> PodAttempt:
        """Return what is remembered of an attempt."""
        return self._attempts.get(key, NOTHING)

    def _put(self, key: Key, attempt: PodAttempt) -> None:
        if attempt == NOTHING:
            self._attempts.pop(key, None)
        else:
            self._attempts[key] = attempt

    def gone(self, pod: JobPod) -> None:
        """Remember the last state of a pod that is listed no more."""
        self._put(pod.key, self.attempt(pod.key).pod_gone(pod, self._clock()))
        self._changed(pod)

    def sort(self, changed: Iterable[str], pods: Mapping[str, JobPod]) -> None:
        """Take the pods that changed, by the keys that the informer has them under."""
        changed, self._unsorted = self._unsorted.union(changed), set()
        for item in sorted(changed):
            name = item.partition("/")[2]
            if self.quarantine.is_backing_off(SORTING, "pod", name):
                self._unsorted.add(item)
                continue
            sorted_in = False
            with self.quarantine.guard(SORTING, "pod", name):
                self._sort_in(name, pods.get(item))
                sorted_in = True
            if not sorted_in:
                self._unsorted.add(item)

    def _sort_in(self, name: str, pod: JobPod | None) -> None:
        """Take one pod as it is now; None: it is gone."""
        if pod is not None:
            of_key = self._pods.setdefault(pod.key, {})
            before, of_key[name] = of_key.get(name), pod  # it is there, whatever else is understood of it
            self._key_of[name] = pod.key
            self._changed(pod)
            of_key[name] = with_cause(pod, before)
        elif (key := self._key_of.pop(name, None)) is not None:
            self._due.add(key)
            del self._pods[key][name]
            if not self._pods[key]:
                del self._pods[key]
                if self.attempt(key).phase is AttemptPhase.FORGOTTEN:
                    self._put(key, NOTHING)

    def _changed(self, pod: JobPod) -> None:
        self._due.add(pod.key)
        if pod.termination_message:
            self._reporting.add(pod.key)

    def of(self, key: Key) -> list[JobPod]:
        """Return the pods of an attempt that are listed."""
        return list(self._pods.get(key, {}).values())

    def sets_up_since(self, before: float) -> bool:
        """Whether a pod has waited for its volumes or its network since `before` (monotonic seconds)."""
        waits = (key for key in self._due if self.attempt(key).waits_for and self.attempt(key).waits_since <= before)
        return any(pod.sets_up for key in waits for pod in self.of(key))

    def add_causes(self, causes: Mapping[str, str]) -> None:
        """Take why the volumes of pods are not mounted, by UID, as their events say it."""
        for key in self._due if causes else ():
            for name, pod in self._pods.get(key, {}).items():
                if pod.sets_up and pod.cause != (cause := causes.get(pod.uid, pod.cause)):
                    self._pods[key][name] = replace(pod, cause=cause)

    def key_of(self, name: str) -> Key | None:
        """Return the attempt of a pod that is listed."""
        return self._key_of.get(name)

    def keys_of(self, workload: str) -> list[Key]:
        """Return the attempts of a workload that have pods, in order."""
        return sorted(key for key in self._pods if key[0] == workload)

    def known(self, key: Key) -> list[JobPod]:
        """Return the pods of an attempt that are listed, and the last states of those that are no more."""
        return [*self.of(key), *self.attempt(key).last.values()]

    def with_final_report(self) -> list[JobPod]:
        """Return the pods, and last states of pods, with a final report of their worker that was not read."""
        unread = {key: pods for key in self._reporting if (pods := self._unread(key))}
        self._reporting = set(unread)
        # One that had the name of a listed pod may be of an attempt that a restored database does not know.
        listed = {pod.name: pod.uid for key in unread for pod in self.of(key)}
        return [pod for pods in unread.values() for pod in pods if listed.get(pod.name, pod.uid) == pod.uid]

    def _unread(self, key: Key) -> list[JobPod]:
        read = self.attempt(key).read_reports
        return [pod for pod in self.known(key) if pod.termination_message not in ("", read.get(pod.uid))]

    def final_report_read(self, pod: JobPod) -> None:
        """Return the final report of a pod no more in this term."""
        attempt = self.attempt(pod.key)
        read = {**attempt.read_reports, pod.uid: pod.termination_message}
        self._put(pod.key, replace(attempt, read_reports=read))

    def end_term(self) -> None:
        """Forget what only a leader counts: how often it made pods again, and the final reports that it read."""
        for key, attempt in list(self._attempts.items()):
            if attempt.read_reports:
                self._reporting.add(key)
            if (later := attempt.next_term()) is not attempt:
                self._put(key, later)
        self._reporting = {key for key in self._reporting if self.known(key)}

    def forget(self, key: Key) -> None:
        """Report an attempt no more; its pods are deleted."""
        phase = AttemptPhase.FORGOTTEN if key in self._pods else AttemptPhase.UNSEEN
        self._put(key, PodAttempt(phase, self.attempt(key).hosts))
        self._due.add(key)

    def break_off(self, key: Key) -> None:
        """Report that the start of an attempt broke off until it is started, whatever pods it has."""
        self._put(key, self.attempt(key).broken_off())
        self._due.add(key)

    def stranded(self, key: Key) -> bool:
        """Whether the pods of an attempt never ran, and wait for something that nothing creates any more."""
        return self.attempt(key).phase is AttemptPhase.UNRECOVERABLE

    def started(self, key: Key, workers: int) -> None:
        """Report an attempt as started, also before its pods are listed if it was reported before."""
        attempt = self.attempt(key)
        if attempt.last or attempt.phase in (AttemptPhase.BROKEN_OFF, AttemptPhase.FORGOTTEN):
            self._put(key, attempt.started(workers))
            self._due.add(key)

    def show(self, key: Key) -> None:
        """Report an attempt as its pods are."""
        self._put(key, self.attempt(key).without_start())
        self._due.add(key)

    def drop_last(self, seconds: float, but: Collection[Key]) -> None:
        """Drop the last states of pods of attempts whose pods are gone for so long, except of those in `but`."""
        before = self._clock() - seconds
        for key, attempt in list(self._attempts.items()):
            if attempt.last and attempt.last_since <= before and key not in but and key not in self._pods:
                self._put(key, replace(attempt, last={}, last_since=0.0, recreations=0))
                self._due.add(key)

    def hosts(
        self, usable: Mapping[str, bool], reported: Mapping[Key, Mapping[int, WorkerStatus]] = NO_REPORTS
    ) -> dict[Key, WorkerHosts]:
        """Return what the pods of each attempt are together; `usable` are the nodes, and whether they run.

        `reported` is what the workers say: one that has reported its end needs no pod any more.
        """
        if usable != self._cluster.usable:
            self._cluster = self._cluster._replace(usable=usable)
            over = [key for key, at in self._attempts.items() if at.hosts is not None and not at.hosts.present]
            self._due.update(over)
        now = self._clock()
        due, self._due = self._due, set()
        for key in due:
            if self.quarantine.is_backing_off(READING, "workload", key[0]):
                self._due.add(key)
                continue
            read = False
            with self.quarantine.guard(READING, "workload", key[0]):
                self._observe_attempt(key, reported.get(key, {}), now)
                read = True
            if not read:  # what is there is not gone, and is not started a second time
                self._due.add(key)
                attempt = self.attempt(key)
                self._put(key, replace(attempt, hosts=attempt.hosts or WorkerHosts(1)))
        return {key: at.hosts for key, at in self._attempts.items() if at.hosts is not None}

    def _observe_attempt(self, key: Key, reports: Mapping[int, WorkerStatus], now: float) -> None:
        before = self.attempt(key)
        after = step(before, self.of(key), reports, now, self._cluster)
        if after != before:
            self._put(key, after)
        if after.depends_on_time:
            self._due.add(key)
