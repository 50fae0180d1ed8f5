"""Read from events why the volumes of pods are not mounted, or their network is not set up: their status never says it.

The backend calls `observe` in each observation of the leader. While such a pod waits, a few lists are read for all pods
together, at intervals: each costs the API server a look at all events of the namespace. Nothing waits for the answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping

from ..api.client import ApiClient, ApiStatusError, ApiUnreachable, Object
from .attempt_pods import AttemptPods
from .pod_states import MAX_LINE, MAX_MESSAGE, seconds_of
from .pod_waits import NOT_THERE

log = logging.getLogger("makeway.kubernetes")

STEPS = {"FailedMount": 0, "FailedAttachVolume": 0, "FailedMapVolume": 0, "FailedCreatePodSandBox": 1, "Pulling": 2}
"""Reasons of the kubelet and of the controller that attaches volumes, by how far the pod has come: one whose image is
pulled has its volumes and its network, although older kubelets show it in its status only afterwards."""
PULLING = STEPS["Pulling"]
SET_UP_SECONDS = 10.0
"""How long a pod waits for its volumes or its network before events are read"""
PAUSE = 15.0
"""Seconds from one look to the next: the kubelet tries less and less often, every two minutes in the end."""
LONG_PAUSE = 600.0
"""The same where the service's account lacks the right to list events."""
VALID_SECONDS = 600.0
"""How much older than the newest event of its pod another one may be: what it says has passed else. The kubelet repeats
an event less often than it tries."""
LIMIT = 500
"""Events in one answer of the API server"""
MAX_PAGES = 4
"""Answers of each reason that are read at most; Kubernetes keeps events for an hour, one for all tries of a pod."""
NO_CAUSE = ("timed out waiting for the condition", "context deadline exceeded", "not registered")
"""In messages that only say that a volume is not mounted yet"""
ID = re.compile(r"\b[0-9a-f]{32,}\b")
"""The id of a container, another one at each try"""


class EventReader:
    """The newest cause of each pod in one namespace that its events name."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        changed: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call `changed` when another cause of some pod is known."""
        self._client = client
        self._namespace = namespace
        self._path = f"/api/v1/namespaces/{namespace}/events"
        self._changed = changed
        self._monotonic = monotonic
        self._not_before = 0.0
        self._reading: asyncio.Task[None] | None = None
        self.causes: Mapping[str, str] = {}
        """by the UID of the pod, as they were read last"""

    def observe(self, pods: AttemptPods) -> None:
        """Set the causes of pods that are known, and begin to read anew where one of them has waited for a while."""
        now = self._monotonic()
        under_way = self._reading is not None and not self._reading.done()
        if not under_way and now >= self._not_before and pods.sets_up_since(now - SET_UP_SECONDS):
            self._not_before = now + PAUSE
            self._reading = asyncio.create_task(self._read())
        pods.add_causes(self.causes)

    async def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        events: list[Object] = []
        for reason in STEPS:
            try:
                events += await self._events(reason)
            except ApiUnreachable:
                return
            except ApiStatusError as refusal:
                log.warning("Why volumes of pods are not mounted cannot be read from events: %s", refusal)
                denied = refusal.status in (401, 403, 404)
                self._not_before = self._monotonic() + (LONG_PAUSE if denied else refusal.retry_after or PAUSE)
                return
        causes = causes_of(events)
        if causes != self.causes:
            self.causes = causes
            self._changed()

    async def _events(self, reason: str) -> list[Object]:
        """Return the events of pods that have a reason."""
        query = {"fieldSelector": f"involvedObject.kind=Pod,reason={reason}", "limit": str(LIMIT)}
        result: list[Object] = []
        for _ in range(MAX_PAGES):
            page = await self._client.get(self._path, query)
            result += page.get("items") or ()
            if not (more := (page.get("metadata") or {}).get("continue")):
                break
            query = {**query, "continue": more}
        return result


def causes_of(events: Iterable[Object]) -> dict[str, str]:
    """Return what the events of pods say, by UID: what is not there before other causes, then the newest.

    What a pod has got past since is no cause any more; "" where nothing else is one.
    """
    by_pod: dict[str, list[tuple[int, float, str]]] = {}
    for event in events:
        uid = str((event.get("involvedObject") or {}).get("uid") or "")
        message = str(event.get("message") or "")[:MAX_MESSAGE]
        if uid and message.strip():
            step = STEPS.get(str(event.get("reason") or ""), 0)
            by_pod.setdefault(uid, []).append((step, _seconds_of(event), message))
    result = {}
    for uid, messages in by_pod.items():
        if min(messages)[0] == PULLING:
            continue
        reached, since, _ = max(messages)
        newest = max(seconds for _, seconds, _ in messages)
        valid = [
            (seconds, message)
            for step, seconds, message in messages
            if step < PULLING and seconds > newest - VALID_SECONDS and (step == reached or seconds > since)
        ]
        _, message = max(valid, key=lambda one: (_rank(one[1]), *one), default=(0.0, ""))
        result[uid] = _line(message)
    return result


def _line(message: str) -> str:
    """Return a message as a line for people, which names what is not there also where it is cut."""
    line = ID.sub("…", " ".join(message.split()))
    missing = NOT_THERE.search(line)
    return (line if missing is None or missing.end() <= MAX_LINE else line[missing.start() :])[:MAX_LINE]


def _rank(message: str) -> int:
    """Return how much a message says about the cause."""
    return 2 if NOT_THERE.search(message) else 0 if any(words in message for words in NO_CAUSE) else 1


def _seconds_of(event: Object) -> float:
    """Return when an event was last seen, in Unix seconds."""
    series, metadata = event.get("series") or {}, event.get("metadata") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        metadata.get("creationTimestamp"),
    )
    try:
        return seconds_of(next(filter(None, times), None))
    except ValueError:  # the year 0, which the API server takes from anybody who may write events
        return 0.0
