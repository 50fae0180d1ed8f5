"""Show decisions about jobs as events of their pods, for people who look with kubectl.

The backend calls `publish_events` for the leader's decisions. Events are posted in the background: no cycle waits for
them, and no order fails with them. Those that the API server refuses, and those above the rate, are dropped: the
decision log has everything.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from ..api.client import ApiClient, ApiStatusError, ApiUnreachable, Object
from .pod_states import JobPod

log = logging.getLogger("makeway.kubernetes")

PAUSE = 0.05
"""Seconds from one event to the next: 20 a second at most, of all pods together."""
MAX_WAITING = 1000
"""Events that wait at most."""
MAX_PODS = 16
"""Pods of a gang, the first ones, that get the event of a decision about it."""
MAX_MESSAGE = 1000
"""Characters of a message at most: the API server takes 1024 bytes in newer versions of events."""
PAUSE_AFTER_FAILURE = 10.0
"""Seconds for which no event is posted after the API server refused one or did not answer."""
LONG_PAUSE_AFTER_FAILURE = 600.0
"""The same where the service's account lacks the right, or there is no such namespace."""
DEFAULT_TIMING = ("notice", "made_way", "cancelled")
"""The codes of decisions that are no warnings."""


class EventRecorder:
    """Posts events in one namespace, one after the other, while this replica leads."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        may_act: Callable[[], bool],
        *,
        pause: float = PAUSE,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`may_act`: whether this replica still leads."""
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/events"
        self._namespace = namespace
        self._may_act = may_act
        self._pause = pause
        self._monotonic = monotonic
        self._clock = clock
        self._waiting: deque[Object] = deque()
        self._posting: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._dropped = 0

    def publish_events(self, pods: Sequence[JobPod], code: str, message: str) -> None:
        """Begin to post a decision, by its code and its sentence, as an event of each of these pods."""
        if self._monotonic() < self._not_before:
            return
        at = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for pod in sorted(pods, key=lambda pod: pod.worker)[:MAX_PODS]:
            if len(self._waiting) >= MAX_WAITING:
                self._drop()
                return
            self._waiting.append(event(self._namespace, pod, code, message, at))
        if self._waiting and (self._posting is None or self._posting.done()):
            self._posting = asyncio.create_task(self._post_all())

    async def close(self) -> None:
        """Stop posting; what waits is dropped."""
        self._waiting.clear()
        if self._posting is not None:
            self._posting.cancel()
            await asyncio.gather(self._posting, return_exceptions=True)

    async def _post_all(self) -> None:
        while self._waiting:
            result = self._waiting.popleft()
            if not self._may_act():
                self._waiting.clear()
                return
            await self._post(result)
            await asyncio.sleep(self._pause)
        self._dropped = 0

    async def _post(self, event: Object) -> None:
        try:
            await self._client.create(self._path, event)
        except ApiUnreachable:
            self._pause_after_failure(PAUSE_AFTER_FAILURE)
        except ApiStatusError as refusal:
            if refusal.reason == "AlreadyExists":  # it was posted before, here or by an earlier leader
                return
            log.warning("The event of the pod %s cannot be posted: %s", event["involvedObject"]["name"], refusal)
            pause = refusal.retry_after or PAUSE_AFTER_FAILURE
            self._pause_after_failure(LONG_PAUSE_AFTER_FAILURE if refusal.status in (403, 404) else pause)

    def _pause_after_failure(self, seconds: float) -> None:
        self._waiting.clear()
        self._not_before = self._monotonic() + seconds

    def _drop(self) -> None:
        self._dropped += 1
        if self._dropped == 1:
            log.warning("More than %s events of pods wait: those of further decisions are not shown", MAX_WAITING)


def event(namespace: str, pod: JobPod, code: str, message: str, at: str) -> Object:
    """Return the event of a decision; the same decision about the same pod has the same name."""
    digest = hashlib.sha256(f"{pod.uid}\n{code}\n{message}".encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pod.name}.{digest}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": namespace,
            "name": pod.name,
            "uid": pod.uid,
        },
        "reason": "".join(part.capitalize() for part in code.split("_")),
        "message": message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…",
        "type": "Normal" if code in DEFAULT_TIMING else "Warning",
        "source": {"component": "makeway"},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
