"""Spawn notebooks as pods with a lease: KubeSpawner on the node that the service chose.

The lease comes before the pod and is released after it. kube-scheduler checks the node again; nothing here replaces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from traitlets import Unicode

from . import listening, pod, pod_end, pod_events
from .lease import LeaseMixin
from .pod_spawner import PodSpawner
from .refusal import Refused

_MARGIN = 5.0
"""Seconds by which a start gives up before the Hub does, which does not know why the pod is not there."""


class MakewayKubeSpawner(LeaseMixin, PodSpawner):
    """A notebook in a pod whose GPUs come with a lease. Everything else is KubeSpawner's own configuration."""

    offers_images = True
    whole_gpus_only = True  # the API server refuses `nvidia.com/gpu: 0.5`
    first_step = ("node", "Creating the notebook's pod")

    instance = Unicode(
        "makeway",
        help="The installation that the pods belong to, a label; the same as the quota service's `kube_instance`.",
    ).tag(config=True)
    guaranteed_priority_class = Unicode(
        "", help="Priority class of guaranteed sessions; empty: the cluster's default."
    ).tag(config=True)
    preemptible_priority_class = Unicode(
        "", help="Priority class of preemptible sessions; empty: the cluster's default."
    ).tag(config=True)

    _problem = ""
    """Why the pod is not running yet, as Kubernetes said last."""

    @property
    def makeway_kept(self) -> list[str]:
        """The folders of the pod whose files outlive it."""
        own: Any = self
        return [str(self._expand_all(path)) for path in pod.kept(own.volumes, own.volume_mounts)]

    # -- before the pod ----------------------------------------------------------------------------------------

    async def run_pre_spawn_hook(self) -> None:
        """Delete a pod that an earlier Hub left before it knew of it, then request the lease."""
        if self._created:
            self.log.warning("Deleting a pod that an earlier start of %s left", self._log_name)
            await self.stop()
        self.started_here = True
        await super().run_pre_spawn_hook()

    async def get_pod_manifest(self) -> Any:
        """Return the pod manifest with the lease in it; KubeSpawner's settings stay as they are for the next start."""
        with self._with_lease():
            return await super().get_pod_manifest()

    @contextmanager
    def _with_lease(self) -> Iterator[None]:
        own: Any = self
        # Never: a server that was killed has lost its kernels, and its user reads why instead of finding an empty one.
        mine = {"terminationGracePeriodSeconds": self.delete_grace_period, "restartPolicy": "Never"}
        found: dict[str, Any] = {"extra_pod_config": mine | own.extra_pod_config}
        if (lease := self._lease) is not None:
            chosen = self.preemptible_priority_class if lease.preemptible else self.guaranteed_priority_class
            found["priority_class_name"] = chosen or own.priority_class_name
            if lease.image:
                found["image"] = lease.image
            site = {name: getattr(own, name) for name in pod.SITE}
            found |= pod.settings(lease, own.user.name, self.instance, site)
        before = {name: getattr(own, name) for name in found}
        try:
            for name, value in found.items():
                setattr(own, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(own, name, value)

    def get_env(self) -> dict[str, str]:
        """Return the notebook's variables without device numbers, which the device plugin sets."""
        return pod.environment(super().get_env(), self._lease)

    async def load_user_options(self) -> None:
        """Apply nothing: KubeSpawner would search its own `profile_list` for the quota service's profile."""

    # -- while the pod starts ----------------------------------------------------------------------------------

    async def start_server(self) -> Any:
        """Create the pod and wait until its server listens; raise Refused with Kubernetes' reason where it does not.

        The Hub asks the server itself afterwards, but ever less often: what it finds at once costs no such pause.
        """
        self._problem = ""
        starting = asyncio.ensure_future(self._listening_server())
        loop = asyncio.get_running_loop()
        until = loop.time() + self.start_timeout - min(_MARGIN, self.start_timeout / 10)
        said: set[tuple[str, str]] = set()
        try:
            while not starting.done():
                await asyncio.wait([starting], timeout=self.look_seconds)
                self._report_pod(said)
                if not starting.done() and (loop.time() > until or self._cannot_start()):
                    raise Refused(self._why_not(), code="pod_not_running", status=503)
            return await starting
        except TimeoutError as late:  # the Hub would say that `start_timeout` has passed
            raise Refused(self._why_not(str(late)), code="pod_not_running", status=503) from late
        finally:
            starting.cancel()

    async def _listening_server(self) -> Any:
        where = await super().start_server()
        await listening.wait(where)
        return where

    def _cannot_start(self) -> bool:
        """Whether waiting does not help: the image cannot be pulled, or the pod has ended."""
        pod = self.created_pod or {}
        return pod_events.cannot_be_pulled(pod) or pod_end.ended(pod)

    def _report_pod(self, said: set[tuple[str, str]]) -> None:
        """Report what Kubernetes said since the last look; `said` are the versions of events that were reported."""
        if not self._created:
            return  # events of an earlier pod
        events = {(one["metadata"]["uid"], one["metadata"]["resourceVersion"]): one for one in self.events}
        steps = [pod_events.step(event) for version, event in events.items() if version not in said]
        said.update(events)
        pod = self.pod or {}
        for step in [*steps, pod_events.waiting(pod)]:
            if step is not None:
                self._problem = step.message if step.problem else ""
                self.report(step.phase, step.message)
        placed = pod_events.placed(pod)  # its event may be dropped, or come late
        if placed is not None and self._progress is not None and self._progress.phase == placed.phase:
            self._problem = ""
            self.report(placed.phase, placed.message)

    def _why_not(self, said: str = "") -> str:
        pod = self.created_pod
        if pod is not None and pod_end.ended(pod):
            return f"The notebook could not be started. {pod_end.sentence(pod)}"
        if said := self._problem or said:
            return f"The notebook could not be started: {said.rstrip('.')}."
        return f"The notebook's pod was not running within {self.start_timeout} s, and Kubernetes does not say why."

    def save_state(self) -> None:
        """Write the state now: a Hub that is killed must find the pod."""
        self._store()

    def how_server_ended(self, status: int) -> str:
        """Return how the pod ended, in Kubernetes' words, too."""
        return self._end or super().how_server_ended(status)

    # -- after the pod -----------------------------------------------------------------------------------------

    async def run_post_stop_hook(self) -> None:
        """Release the lease once the pod's containers have ended: until then they hold their GPUs."""
        if self._created and not self.kept():
            await self.stop()
        await super().run_post_stop_hook()
