"""Spawn notebooks as pods with a lease: KubeSpawner on the node that the service chose.

kube-scheduler checks the node again; nothing here replaces it.
"""

from __future__ import annotations

from typing import Any

from kubespawner import KubeSpawner
from traitlets import Unicode, default

from . import pod
from .granted import Lease
from .lease import LeaseMixin


class MakewayKubeSpawner(LeaseMixin, KubeSpawner):  # type: ignore[misc]
    """A notebook in a pod whose GPUs come with a lease. Everything else is KubeSpawner's own configuration."""

    whole_gpus_only = True  # the API server refuses `nvidia.com/gpu: 0.5`

    gpu_resource = Unicode("nvidia.com/gpu", help="The resource that pods request, one per GPU of the lease.").tag(
        config=True
    )
    guaranteed_priority_class = Unicode(
        "", help="Priority class of guaranteed sessions; empty: the cluster's default."
    ).tag(config=True)
    preemptible_priority_class = Unicode(
        "", help="Priority class of preemptible sessions; empty: the cluster's default."
    ).tag(config=True)

    @default("delete_grace_period")
    def _default_delete_grace_period(self) -> int:
        return 30  # KubeSpawner's default is one second, too short for a kernel to save anything

    async def get_pod_manifest(self) -> Any:
        """Return the pod manifest with the lease in it; from here on the pod's own events fill the pending page."""
        if self._progress is not None:
            self._progress.close()
        if self._lease is not None:
            self._apply(self._lease)
        return await super().get_pod_manifest()

    def _apply(self, lease: Lease) -> None:
        own: Any = self
        devices = pod.devices(lease, self.gpu_resource)
        own.extra_labels = {**own.extra_labels, **pod.labels(lease)}
        own.extra_annotations = {**own.extra_annotations, **pod.pod_annotations(lease, own.user.name)}
        own.extra_resource_limits = {**own.extra_resource_limits, **devices}
        own.extra_resource_guarantees = {**own.extra_resource_guarantees, **devices}
        own.node_affinity_required = pod.node_affinity(lease, list(own.node_affinity_required))
        for setting, value in pod.compute(lease).items():
            setattr(own, setting, value)
        chosen = self.preemptible_priority_class if lease.preemptible else self.guaranteed_priority_class
        own.priority_class_name = chosen or own.priority_class_name

    def get_env(self) -> dict[str, str]:
        """Return the notebook's variables without device numbers, which the device plugin sets."""
        return pod.environment(super().get_env(), self._lease)
