"""Follow the start of one pod: what Kubernetes said last, since when, and why the pod's server is not there.

Called with the pod and its events at every update; makes no requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from makeway_api.durations import duration
from makeway_api.quantities import listed

from . import pod_end, pod_events
from .pod_events import StartStatus

Pod = Mapping[str, Any]
CLAIMS_SECONDS = 600.0
"""How long Kubernetes may take to make the claims of a pod's devices, unless it says that it cannot: some ten a second,
for all pods of the cluster"""
_ADVICE = {
    "node": "Start it again; if that does not help, an administrator can look at the pod's events.",
    "volume": "An administrator has to look at that volume, or at the Secret or ConfigMap that it names.",
    "claim": "An administrator has to look at that claim, at its storage class, and at what makes volumes of it.",
    "image": "Start it again: its node may have the image by then. An administrator can have images pulled beforehand, "
    "or raise the start_timeout of the Hub's KubeSpawner.",
    "no image": "Check the name of the image and the registry's credentials, or choose another image.",
    "coming": "Start it again: the node may be there by then. An administrator can raise the node_seconds of the "
    "Hub's MakewayKubeSpawner beyond the time that a new node takes.",
    "server": "Check that the image starts a notebook server on that port, and that the Hub may reach it there. Where "
    "it is only slow, an administrator can raise the start_timeout of the Hub's KubeSpawner.",
    "gate": "An administrator has to look at what sets and removes these gates, as a rule Kueue, and take the "
    "namespace of notebooks and jobs out of it: Makeway has given them their GPUs already.",
    "device claim": "An administrator has to look at the claims of the profile's pod template, at the "
    "ResourceClaimTemplates and DeviceClasses that they name, and at the drivers of these.",
    "unseen": "An administrator can check that the Hub's account may list and watch pods and events.",
}


class PodStart:
    """The statuses of one start. `update` returns what is new; the sentences are for the user whose start fails."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = self._since = clock()
        self._seen: set[tuple[str, str]] = set()
        self._last: StartStatus | None = None
        self._placed = False
        self._unscheduled: float | None = None
        self._claims_failed = self._claims_due = False
        self._coming_since: float | None = None
        """since when an autoscaler has said that it adds a node; None while it does not, and once there is one"""
        self._came_for = 0.0
        """seconds for which nodes were coming before that"""

    def update(self, pod: Pod, events: Iterable[Pod]) -> list[StartStatus]:
        """Return the statuses since the last update, in their order; where the pod runs is one of them, once."""
        versions = {(event["metadata"]["uid"], event["metadata"]["resourceVersion"]): event for event in events}
        from_events = [
            pod_events.event_status(event) for version, event in versions.items() if version not in self._seen
        ]
        self._seen.update(versions)
        self._note_scaling(from_events)
        result: list[StartStatus] = []
        gated = None if self._last is not None and self._last.gated else pod_events.gated(pod)
        claims = pod_events.without_resource_claims(pod)
        if claims is None and self._last is pod_events.MAKES_RESOURCE_CLAIMS:  # what follows may have no event
            self._last = None
        first = self._last is None and not any(from_events)
        for status in (*from_events, gated, claims if first else None, pod_events.waiting(pod)):
            if status is not None and not self._is_outdated(status):
                result.append(self._remember(status))
        place = pod_events.placed(pod)  # its event may be dropped, or come late
        if place is not None and not self._placed:
            self._placed = True
            self._set_coming(False)
            if self._last is None or self._last.unscheduled or (self._last.phase == "node" and not self._last.problem):
                result.append(self._remember(place))
        if (runs := pod_events.running(pod)) is not None and (self._last is None or self._last.phase != runs.phase):
            result.append(self._remember(runs))
        self._claims_failed |= any(event.get("reason") == pod_events.NO_RESOURCE_CLAIM for event in versions.values())
        before, self._claims_due = self._claims_due, claims is not None and not self._claims_failed
        if not pod_events.unschedulable(pod):
            self._unscheduled = None
        elif self._unscheduled is None or before != self._claims_due:
            self._unscheduled = self._clock()
        return result

    def _is_outdated(self, status: StartStatus) -> bool:
        """Whether the pod has a node, or one is coming: the scheduler goes on saying that there is none."""
        waits = self._coming_since is not None and status.problem and status.coming is None
        return status.unscheduled and (self._placed or waits)

    def _note_scaling(self, statuses: Iterable[StartStatus | None]) -> None:
        """Note whether a node is coming; once it is not, the pod has its whole time to be placed again."""
        for status in statuses:
            if status is not None and status.coming is not None and not self._placed:
                self._set_coming(status.coming)

    def _set_coming(self, coming: bool) -> None:
        since, now = self._coming_since, self._clock()
        if coming == (since is not None):
            return
        self._unscheduled = None
        self._came_for += 0.0 if since is None else now - since
        self._coming_since = now if coming else None

    def _remember(self, status: StartStatus) -> StartStatus:
        """Remember the status; one that repeats or adds to one of the same kind is as old as that one."""
        last = self._last
        if last is None or (last.phase, last.problem) != (status.phase, status.problem):
            self._since = self._clock()
        self._last = status
        return status

    @property
    def unscheduled_for(self) -> float:
        """The seconds for which the scheduler has said that the pod fits nowhere; 0 where it does not."""
        return 0.0 if self._unscheduled is None else self._clock() - self._unscheduled

    @property
    def node_wait(self) -> float:
        """The seconds for which a node has been coming for the pod, which are none of the start."""
        return self._came_for + (0.0 if self._coming_since is None else self._clock() - self._coming_since)

    def is_unplaced(self, seconds: float) -> bool:
        """Whether the pod fits nowhere for longer than this, and no node is coming.

        Kubernetes has more time to make claims of devices.
        """
        if self._coming_since is not None:
            return False
        return self.unscheduled_for > (max(seconds, CLAIMS_SECONDS) if self._claims_due else seconds)

    def unplaced_message(self, pod: Pod, nodes: str) -> str:
        """Return the sentence for a pod that the scheduler does not place on the granted nodes."""
        words = pod_events.unschedulable(pod).rstrip(".")
        waited = duration(self.unscheduled_for)
        message = f"Kubernetes has not placed the notebook on {nodes} for {waited}: {words}."
        if "volume node affinity" in words or "node affinity conflict" in words:
            return (
                f"{message} The volume of its home is bound to another zone or node. An administrator can move it, or "
                "use homes that every node can mount."
            )
        if pod_events.waits_for_volume_claim(words):
            return f"{message} {_ADVICE['claim']}"
        if pod_events.gates(pod):
            return f"{message} {_ADVICE['gate']}"
        if pod_events.waits_for_resource_claim(words):
            return f"{message} {_ADVICE['device claim']}"
        return (
            f"{message} Start it again or choose another profile. An administrator can check what else runs on {nodes}."
        )

    @staticmethod
    def end_message(pod: Pod, gone: bool = False) -> str:
        """Return how the pod of a start ended, for which there is no use in waiting; `gone`: it was deleted."""
        return f"The notebook could not be started. {pod_end.end_message(pod, gone)}"

    def failure_message(self, pod: Pod | None, address: str = "", message: str = "") -> str:
        """Return why the server is not there, with what to do.

        `address` is where it listens, once known; `message` is why KubeSpawner gave up by itself.
        """
        if pod is not None and pod_end.server_has_ended(pod):
            return self.end_message(pod)
        waited, last = duration(self._clock() - self._started_at), self._last
        if last is not None and pod_events.cannot_be_pulled(pod or {}):
            return f"The notebook could not be started: {last.message.rstrip('.')}. {_advice(last)}"
        begin = f"The notebook did not start within {waited}"
        if last is None:
            if pod is None and message:
                return f"{begin}: {message.rstrip('.')}. {_ADVICE['node']}"
            if claims := pod_events.silent_volume_claims(pod or {}):
                return (
                    f"{begin}: Kubernetes has not placed it on a node and gives no reason, as while a volume is made. "
                    f"It needs a volume for {listed(claims)}. {_ADVICE['claim']}"
                )
            what = "the Hub does not see its pod" if pod is None else "Kubernetes says nothing about its pod"
            return f"{begin}, and {what}. {_ADVICE['unseen']}"
        lasts = duration(self._clock() - self._since)
        if last.phase == "server" and not last.problem:
            at = f" at {address}" if address else ""
            return f"{begin}: its container has run for {lasts}, but accepts no connection{at}. {_ADVICE['server']}"
        return f"{begin}. Kubernetes has reported for {lasts}: {last.message.rstrip('.')}. {_advice(last)}"


def _advice(status: StartStatus) -> str:
    if status.phase == "image":
        return _ADVICE["no image" if status.problem else "image"]
    if status.coming:
        return _ADVICE["coming"]
    if status.gated:
        return _ADVICE["gate"]
    if status.volume_claim:
        return _ADVICE["claim"]
    return _ADVICE["volume" if status.volume else "node"]
