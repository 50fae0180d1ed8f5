"""KubeSpawner with a lease: the pod runs on the node that the service chose and kube-scheduler checks it again."""

from __future__ import annotations

from typing import Any

from kubespawner import KubeSpawner
from traitlets import Unicode, default

from . import pod
from .held import Held
from .lease import LeaseMixin


class MakewayKubeSpawner(LeaseMixin, KubeSpawner):  # type: ignore[misc]
    """A notebook in a pod whose GPUs come with a lease. Everything else is KubeSpawner's own configuration."""

    gpu_resource = Unicode("nvidia.com/gpu", help="The resource that pods ask for, one per GPU of the lease.").tag(
        config=True
    )
    guaranteed_priority_class = Unicode(
        "", help="Priority class of guaranteed sessions; empty: the cluster's own."
    ).tag(config=True)
    preemptible_priority_class = Unicode(
        "", help="Priority class of preemptible sessions; empty: the cluster's own."
    ).tag(config=True)

    @default("delete_grace_period")
    def _default_delete_grace_period(self) -> int:
        return 30  # KubeSpawner's own is one second, too short for a kernel to save anything

    async def get_pod_manifest(self) -> Any:
        """Put the lease into the pod, and let the pod's own events follow ours on the pending page."""
        if self._progress is not None:
            self._progress.close()
        if self._lease is not None:
            self._apply(self._lease)
        return await super().get_pod_manifest()

    def _apply(self, lease: Held) -> None:
        own: Any = self
        asked = pod.resources(lease, self.gpu_resource)
        own.extra_labels = {**own.extra_labels, **pod.labels(lease)}
        own.extra_annotations = {**own.extra_annotations, **pod.notes(lease, own.user.name)}
        own.extra_resource_limits = {**own.extra_resource_limits, **asked}
        own.extra_resource_guarantees = {**own.extra_resource_guarantees, **asked}
        own.node_affinity_required = pod.pinned(lease, list(own.node_affinity_required))
        chosen = self.preemptible_priority_class if lease.preemptible else self.guaranteed_priority_class
        own.priority_class_name = chosen or own.priority_class_name

    def get_env(self) -> dict[str, str]:
        """Leave device numbers to the container runtime."""
        return pod.environment(super().get_env(), self._lease)
