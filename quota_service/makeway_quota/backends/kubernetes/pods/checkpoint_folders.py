"""Remove the checkpoints of jobs that are no longer kept from their claims, by a small pod that mounts the whole claim.

Each removal is a row in the store, and the retention pass requests it again until the folder is gone, so the state of
this module may be lost. One pod at a time per claim; its labels differ from those of job pods.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from makeway_api.durations import duration
from makeway_api.pods import INSTANCE, MANAGED_BY, MANAGER
from makeway_api.quantities import count

from ...untrusted import UnreadableJson, read_table, text, whole
from ..api.client import ApiClient, ApiStatusError, ApiUnreachable, Object
from ..cluster.nodes import Toleration
from ..cluster.pod_requests import ENDED
from .compute import limit_cpu
from .manifest import PodSettings, claim_of, container_security, pod_security, toleration_of
from .template import merged

log = logging.getLogger("makeway.kubernetes")

VOLUME = "/checkpoints"
NAME = "makeway-removal"
"""The value of the label app.kubernetes.io/name, and the name of the container."""
AT_ONCE = 100
"""Folders that one pod removes."""
MAX_WAITING = 1000
"""Folders of one claim that wait here; the retention asks again for all others."""
POLL = 2.0
GRACE = 2
PENDING_SECONDS = 600.0
"""How long a pod may wait for a node, its image and its volume."""
RUN_SECONDS = 3600
"""How long a pod may run; the next one goes on with what is left."""
GONE_SECONDS = 60.0
"""How long the pod of an earlier try may take to end."""
FIRST_PAUSE, MAX_PAUSE = 300.0, 86_400.0
"""Seconds before a removal that failed is tried again, which double from the first to the longest."""
MAX_REPORT, MAX_ID, MAX_WHY = 2**16, 300, 2000
"""Bytes of a pod's report, and characters of the id of a job and of the reason in it"""
USER = re.compile("[0-9]{1,10}")
MAX_USERS = 4
"""Pods that try one folder, each as the user whom the one before found in the way."""


class RemovalFailed(Exception):
    """A removal pod ended without a usable report, or that of an earlier try does not end; why."""


class _NotLeading(Exception):
    """Another replica goes on."""


@dataclass(slots=True)
class _Pause:
    """When something that failed is tried again (monotonic), and the seconds before that."""

    until: float
    seconds: float


@dataclass(slots=True)
class _Claim:
    """The folders of one claim that wait: as which user they are removed, and how many others have tried."""

    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    warned_of: str = ""
    """the last warning's reason"""


class CheckpointFolders:
    """The removals of one installation. Not thread-safe."""

    def __init__(
        self,
        client: ApiClient,
        settings: PodSettings,
        tolerations: Sequence[Toleration],
        may_act: Callable[[], bool],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._settings = settings
        self._tolerations = tuple(tolerations)
        self._may_act = may_act
        self._monotonic = monotonic
        self._pods = f"/api/v1/namespaces/{settings.namespace}/pods"
        self._claims: dict[str, _Claim] = {}
        self._pauses: dict[str, _Pause] = {}
        """by claim where its pods failed, and by workload where its folder was left"""

    def purge(self, workload: str, team: str) -> bool:
        """Begin to remove a job's folder, and return whether it is gone.

        True once, in the first call after the folder was removed, and always for a team without a claim.
        """
        name = claim_of(self._settings, team)
        if not name:
            return True
        if not team and "{team}" in self._settings.checkpoint_claim:
            log.warning("The checkpoints of %s are left, as nothing has its team any more", workload)
            return True
        claim = self._claims.setdefault(name, _Claim())
        if workload in claim.gone:
            claim.gone.discard(workload)
            return True
        now = self._monotonic()
        paused = any(one in self._pauses and now < self._pauses[one].until for one in (f"claim {name}", workload))
        if not paused and len(claim.waiting) < MAX_WAITING:
            claim.waiting.setdefault(workload, ((self._settings.run_as or (0, 0))[0], 0))
            if claim.task is None or claim.task.done():
                claim.task = asyncio.create_task(self._work(name, claim))
        return False

    async def close(self) -> None:
        """Stop; the next leader deletes a pod that still runs, and goes on."""
        tasks = [claim.task for claim in self._claims.values() if claim.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, name: str, claim: _Claim) -> None:
        """Remove what waits, some at a time."""
        while claim.waiting:
            user, _ = next(iter(claim.waiting.values()))
            batch = [id for id, (one, _) in claim.waiting.items() if one == user][:AT_ONCE]
            try:
                remaining, why = await self._remove(name, user, batch)
            except _NotLeading:
                claim.waiting.clear()
                return
            except (ApiStatusError, ApiUnreachable, RemovalFailed) as error:
                self._warn(name, claim, [*claim.waiting], self._pause(f"claim {name}"), str(error))
                claim.waiting.clear()  # the retention asks again
                return
            self._pauses.pop(f"claim {name}", None)
            self._record_results(name, claim, batch, remaining, why)

    def _record_results(
        self, name: str, claim: _Claim, batch: Sequence[str], remaining: Mapping[str, int], why: str
    ) -> None:
        """Record what is gone; try what is left as the user who is in the way, or after a pause."""
        failed: list[str] = []
        for id in batch:
            user, tries = claim.waiting.pop(id)
            owner = remaining.get(id)
            if owner is None:
                claim.gone.add(id)
                self._pauses.pop(id, None)
            elif owner not in (user, 0, -1) and tries + 1 < MAX_USERS:
                claim.waiting[id] = (owner, tries + 1)
            else:
                failed.append(id)
        if failed:
            self._warn(name, claim, failed, max(self._pause(id) for id in failed), why)
        elif not remaining:
            claim.warned_of = ""

    def _pause(self, key: str) -> float:
        """Postpone the next try, twice as long as the last time; return the seconds."""
        seconds = min(MAX_PAUSE, 2.0 * self._pauses[key].seconds) if key in self._pauses else FIRST_PAUSE
        self._pauses[key] = _Pause(self._monotonic() + seconds, seconds)
        return seconds

    def _warn(self, name: str, claim: _Claim, ids: Sequence[str], pause: float, why: str) -> None:
        """Log that folders are still there, once for each reason."""
        level = logging.DEBUG if why == claim.warned_of else logging.WARNING
        claim.warned_of = why
        log.log(
            level,
            "The checkpoints of %s (%s) are still on the claim %s, tried again after %s: %s",
            count(len(ids), "removed job"),
            ", ".join(ids[:3]) + (", …" if len(ids) > 3 else ""),
            name,
            duration(pause),
            why,
        )

    async def _remove(self, claim: str, user: int, ids: Sequence[str]) -> tuple[Mapping[str, int], str]:
        """Run one pod; return the folders that are left, with the user in the way (-1 without one), and why."""
        pod = removing_pod(self._settings, self._tolerations, claim, user, ids)
        path = f"{self._pods}/{pod['metadata']['name']}"
        await self._clear(path)
        await self._client.create(self._pods, pod)
        result = await self._ended(path)
        with suppress(ApiStatusError, ApiUnreachable):  # the next try deletes it otherwise
            await self._client.delete(path, grace=GRACE)
        return folders_in_the_way(result)

    async def _clear(self, path: str) -> None:
        """Delete the pod of an earlier try, perhaps of an earlier leader, and wait until it is gone."""
        began = self._monotonic()
        while True:
            self._check()
            if not await self._client.delete(path, grace=GRACE):
                return
            if self._monotonic() - began > GONE_SECONDS:
                raise RemovalFailed(f"the pod {path.rpartition('/')[2]} of an earlier try is still there")
            await asyncio.sleep(POLL)

    async def _ended(self, path: str) -> Object:
        """Return the pod when it has ended, or has taken too long."""
        began = self._monotonic()
        while True:
            pod = await self._client.get(path)
            phase, waited = pod["status"].get("phase"), self._monotonic() - began
            if _container(pod["status"]).get("terminated"):  # a sidecar would run on
                return pod
            too_long = waited > (PENDING_SECONDS if phase == "Pending" else RUN_SECONDS + PENDING_SECONDS)
            if phase in ENDED or too_long:
                return pod
            self._check()
            await asyncio.sleep(POLL)

    def _check(self) -> None:
        if not self._may_act():
            raise _NotLeading


def removing_pod(
    settings: PodSettings, tolerations: Sequence[Toleration], claim: str, user: int, ids: Sequence[str]
) -> Object:
    """Return the pod that removes the folders of these jobs, as this user; its name is that of the claim alone."""
    digest = sha256(f"{settings.instance}/{claim}".encode()).hexdigest()[:16]
    command = (
        [f"{settings.launcher_source}/removal.py"] if settings.launcher_source else ["-m", "makeway.launcher.removal"]
    )
    as_user = replace(settings, run_as=settings.run_as and (user, settings.run_as[1]))
    small: Object = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "512Mi"}}
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{NAME}-{digest}",
            "namespace": settings.namespace,
            "labels": {"app.kubernetes.io/name": NAME, MANAGED_BY: MANAGER, INSTANCE: settings.instance},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": RUN_SECONDS,
            "serviceAccountName": settings.service_account,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [*map(toleration_of, tolerations), {"key": "nvidia.com/gpu", "operator": "Exists"}],
            "securityContext": pod_security(as_user),
            "containers": [
                {
                    "name": NAME,
                    "image": settings.launcher_image,
                    "imagePullPolicy": settings.pull_policy,
                    "command": ["python3", *command, VOLUME, *ids],
                    "resources": deepcopy(dict(settings.launcher_resources)) or small,
                    "securityContext": {**container_security(), "readOnlyRootFilesystem": True},
                    "volumeMounts": [{"name": "checkpoints", "mountPath": VOLUME}],
                }
            ],
            "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}],
            **({"priorityClassName": settings.priority_class} if settings.priority_class else {}),
        },
    }
    if settings.cpu_limits:
        limit_cpu(pod)
    # Of the site's template what all pods share; its containers are those of jobs.
    spec = settings.template.get("spec") or {}
    shared = {name: spec[name] for name in ("imagePullSecrets", "tolerations", "securityContext") if name in spec}
    return merged(pod, {"metadata": settings.template.get("metadata") or {}, "spec": shared})


def _container(status: Object) -> Mapping[str, Any]:
    """Return the state of the container that removes folders, empty before it has one."""
    states = {one.get("name"): one.get("state") or {} for one in status.get("containerStatuses") or ()}
    return states.get(NAME, {})


def folders_in_the_way(pod: Object) -> tuple[Mapping[str, int], str]:
    """Return what a pod left, by its report, with the user in the way, and why; RemovalFailed without a report."""
    status = pod["status"]
    ended: Mapping[str, Any] = _container(status).get("terminated") or {}
    if status.get("phase") == "Succeeded" or ended.get("exitCode") == 0:
        return {}, ""
    states = [one.get("state") or {} for one in status.get("containerStatuses") or ()]
    with suppress(UnreadableJson, AttributeError, TypeError, KeyError):
        report = read_table(str(ended.get("message") or ""), MAX_REPORT)
        users = [(whole(int(user) if USER.fullmatch(user) else None), ids) for user, ids in report["left"].items()]
        user_by_id = {text(id, MAX_ID): user for user, ids in users for id in ids if user is not None}
        return user_by_id, text(report["why"], MAX_WHY)
    raise RemovalFailed(f"the pod {pod['metadata']['name']} {text(_why(status, states, ended), MAX_WHY)}")


def _why(status: Object, states: Sequence[Object], ended: Mapping[str, Any]) -> str:
    """Return what Kubernetes says about a pod that did not do its work."""
    if ended:
        message = ended.get("message") or ended.get("reason") or ""
        return f"ended with exit code {ended.get('exitCode')}: {message}".rstrip(": ")
    messages = [status.get("message") or status.get("reason") or ""]
    messages += [
        one["waiting"].get("message") or one["waiting"].get("reason") or "" for one in states if "waiting" in one
    ]
    messages += [one.get("message") or "" for one in status.get("conditions") or () if one["status"] == "False"]
    return f"did not run to its end: {next(filter(None, messages), status.get('phase'))}"
