"""Spawn notebooks as pods with a lease: KubeSpawner on the node that the service chose.

The lease comes before the pod and is released after it. kube-scheduler checks the node again; nothing here replaces it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kubernetes_asyncio.client.rest import ApiException
from makeway_api.durations import duration
from makeway_api.quantities import listed
from traitlets import Float, Unicode

from . import api_refusal, listening, pod, pod_end, pod_events
from .lease_mixin import LeaseMixin
from .pod_spawner import PodSpawner
from .pod_start import PodStart
from .refusal import Refused

NOTEBOOK = "notebook"
"""KubeSpawner's name of the container with the server"""
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
HELD_PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further pod of a start whose node refused the one before, as for jobs in the quota service"""
_MARGIN = 5.0
"""Seconds by which a start gives up before the Hub does, which does not know why the pod is not there."""


class _RefusedForNow(Exception):
    """A node refused the pod for a reason that passes in seconds as a rule; it has the sentence for its user."""


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

    unschedulable_seconds = Float(
        60.0,
        min=0.0,
        help="A start is given up whose pod the scheduler has not placed for this long on the node that was granted.",
    ).tag(config=True)

    node_seconds = Float(
        900.0,
        min=0.0,
        help="Seconds by which a start may exceed `start_timeout` while the cluster's autoscaler says that it "
        "adds a node for its pod.",
    ).tag(config=True)

    _added_seconds = 0
    """Seconds by which `start_timeout` is longer than the site has set it, for a node that may have to come."""
    _waited_for_nodes = 0.0
    """Seconds for which nodes were coming for earlier pods of the same start."""
    _following: PodStart
    """What Kubernetes says of the start that is under way, or was last."""
    _server_address = ""
    """The address of the server that is starting, once known."""
    _listens = False
    """Whether that server accepts connections."""

    @property
    def makeway_persistent_paths(self) -> list[str]:
        """The folders of the pod whose files outlive it."""
        own: Any = self
        return [str(self._expand_all(path)) for path in pod.persistent_paths(own.volumes, own.volume_mounts)]

    # -- before the pod ----------------------------------------------------------------------------------------

    async def run_pre_spawn_hook(self) -> None:
        """Delete a pod that an earlier Hub left before it knew of it, then request the lease."""
        if self._created:
            self.log.warning("Deleting a pod that an earlier start of %s left", self._log_name)
            await self.stop()
        self.started_here = True
        self._withdraw_seconds()
        await super().run_pre_spawn_hook()
        # The Hub reads it once, as the start begins, when nothing is known yet of a node that has to come.
        self._added_seconds = int(self.node_seconds)
        self.start_timeout += self._added_seconds

    def _withdraw_seconds(self) -> None:
        """Set `start_timeout` to what the site has set."""
        self.start_timeout -= self._added_seconds
        self._added_seconds = 0

    async def get_pod_manifest(self) -> Any:
        """Return the pod manifest with the lease in it; KubeSpawner's settings stay as they are for the next start."""
        with self._with_lease():
            manifest = await super().get_pod_manifest()
        if self._lease is not None:
            pod.add_resource_claims(self._lease, manifest, NOTEBOOK)
        # What `kubectl logs` and `exec` mean, also where a sidecar comes first.
        manifest.metadata.annotations = {DEFAULT_CONTAINER: NOTEBOOK, **(manifest.metadata.annotations or {})}
        return manifest

    @contextmanager
    def _with_lease(self) -> Iterator[None]:
        own: Any = self
        # Never: a server that was killed has lost its kernels, and its user reads why instead of finding an empty one.
        mine = {"terminationGracePeriodSeconds": self.delete_grace_period, "restartPolicy": "Never"}
        mine["enableServiceLinks"] = False  # else several variables for each Service of the namespace
        # The kubelet keeps the end of the log of a server that failed where the Hub reads it with the pod.
        log = {"terminationMessagePolicy": "FallbackToLogsOnError"}
        traits: dict[str, Any] = {
            "extra_pod_config": mine | own.extra_pod_config,
            "extra_container_config": log | own.extra_container_config,
        }
        if (lease := self._lease) is not None:
            chosen = self.preemptible_priority_class if lease.preemptible else self.guaranteed_priority_class
            traits["priority_class_name"] = chosen or own.priority_class_name
            if lease.image:
                traits["image"] = lease.image
            site = {name: getattr(own, name) for name in pod.MERGED_TRAITS}
            traits |= pod.settings(lease, own.user.name, self.instance, site)
        before = {name: getattr(own, name) for name in traits}
        try:
            for name, value in traits.items():
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

        Where its node refuses the pod for a moment, it is created again; the lease stays, or its GPUs would go to
        others, who would be evicted for the next start. The Hub asks the server itself afterwards, but ever less often:
        what it finds at once costs no such pause.
        """
        self._waited_for_nodes = 0.0
        try:
            return await self._start_where_granted()
        finally:
            self._withdraw_seconds()

    async def _start_where_granted(self) -> Any:
        began = time.monotonic()
        for pause in HELD_PAUSES:
            try:
                return await self._try_start(began)
            except _RefusedForNow as refusal:
                message = f"{str(refusal).rstrip('.')}. It keeps its GPUs, and is started again in {duration(pause)}."
                self.report("node", message)
                self.log.warning("The pod of %s is created again: %s", self._log_name, refusal)
                await self.stop()
                await asyncio.sleep(pause)
                self._check_lease()
        try:
            return await self._try_start(began)
        except _RefusedForNow as refusal:
            raise self._not_started(f"The notebook could not be started. {refusal}") from refusal

    def _check_lease(self) -> None:
        """Raise Refused where the lease has ended meanwhile: its GPUs may be those of others."""
        if self._ended:
            why = self._ended[:1].upper() + self._ended[1:].rstrip(".")
            raise self._not_started(f"The notebook could not be started. {why}.")

    async def _try_start(self, began: float) -> Any:
        """Create the pod once and wait until its server listens; `began` is when the start did (monotonic)."""
        self._following, self._server_address, self._listens = PodStart(), "", False
        starting = asyncio.ensure_future(self._listening_server())
        try:
            while not starting.done():
                await asyncio.wait([starting], timeout=self.look_seconds)
                self._report_pod()
                if not starting.done():
                    late = self._is_late(time.monotonic() - began)
                    self._check_start(late and not self._listens)
                    if late and self._listens:
                        return self._server_address  # the Hub goes on asking, for `http_timeout`
                    if await self.vanished():
                        raise self._not_started(f"The notebook could not be started. {pod_end.end_message(None)}")
            return await starting
        except TimeoutError as late:  # the Hub would say that `start_timeout` has passed
            raise self._not_started(
                self._following.failure_message(self.created_pod, self._server_address, str(late))
            ) from late
        except ApiException as error:
            raise self._not_started(api_refusal.start_sentence(error, self.namespace)) from error
        finally:
            starting.cancel()
            self._waited_for_nodes += self._following.node_wait

    def _is_late(self, seconds: float) -> bool:
        """Whether a start has taken too long: while a node is coming, its time stands still for `node_seconds`."""
        limit: float = self.start_timeout - self._added_seconds
        waited = self._waited_for_nodes + self._following.node_wait
        return seconds - min(waited, self._added_seconds) > limit - min(_MARGIN, limit / 10)

    async def _listening_server(self) -> Any:
        where = await super().start_server()
        self._server_address = str(where)
        await listening.wait(where)
        self._listens = True
        own: Any = self
        await listening.answer(where, f"{own.server.base_url if own.server else '/'}api")
        return where

    def _report_pod(self) -> None:
        """Report what Kubernetes said since the last update."""
        if self._created:  # else the events are those of an earlier pod
            for step in self._following.update(self.created_pod or {}, self.events):
                bound = f". The start waits for it for up to {duration(self._added_seconds)}."
                waits = step.coming and self._added_seconds
                self.report(step.phase, step.message.rstrip(".") + bound if waits else step.message)

    def _check_start(self, late: bool) -> None:
        """Raise Refused where the start took too long, or where waiting does not help."""
        pod, start, lease = self.created_pod, self._following, self._lease
        if (deleted := self.deleted_pod) is not None:
            raise self._not_started(start.end_message(deleted, gone=True))
        if pod is not None and pod_end.is_refused_temporarily(pod):
            raise _RefusedForNow(pod_end.end_message(pod))
        if late or pod_events.cannot_be_pulled(pod or {}) or pod_end.server_has_ended(pod or {}):
            raise self._not_started(start.failure_message(pod, self._server_address))
        granted = listed(node for node, _ in lease.placement) if lease is not None else ""
        if granted and pod is not None and start.is_unplaced(self.unschedulable_seconds):
            raise self._not_started(start.unplaced_message(pod, granted))

    def _not_started(self, message: str) -> Refused:
        return Refused(message, code="pod_not_running", status=503)

    def save_state(self) -> None:
        """Write the state now: a Hub that is killed must find the pod."""
        self._store()

    def how_server_ended(self, status: int) -> str:
        """Return how the pod ended, in Kubernetes' words, too."""
        return self._end or super().how_server_ended(status)

    async def poll(self) -> int | None:
        """Return None while the containers may run, else an exit status; Refused where a stop cannot know it."""
        try:
            return await super().poll()
        except ApiException as error:
            raise self._not_stopped(error) from error

    async def stop(self, now: bool = False) -> None:
        """Stop the pod; raise Refused with the reason where the API server does not let the Hub."""
        try:
            await super().stop(now)
        except ApiException as error:
            raise self._not_stopped(error) from error

    def _not_stopped(self, error: ApiException) -> Refused:
        self._end_sentence = api_refusal.stop_sentence(error, self._key)
        return Refused(self._end_sentence, code="not_stopped", status=503)

    # -- after the pod -----------------------------------------------------------------------------------------

    async def run_post_stop_hook(self) -> None:
        """Release the lease once the pod's containers have ended: until then they hold their GPUs."""
        if self._created and not self.kept():
            await self.stop()
        await super().run_post_stop_hook()
