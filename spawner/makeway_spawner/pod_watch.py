"""Watch the notebooks' pods, and keep what was seen last of each that is gone: it tells why the pod was deleted.

KubeSpawner's watch drops a deleted pod, which is often gone before the spawner looks again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kubespawner.spawner import PodReflector

_KEPT = 1000
"""Pods that are gone, at most: those of other Hubs in the namespace are kept, too, and no spawner removes them."""

Pod = dict[str, Any]


class PodWatch(PodReflector):  # type: ignore[misc]
    """KubeSpawner's watch; `gone` has the pods that are gone, by namespace and name."""

    resources: dict[str, Pod]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gone: dict[str, Pod] = {}

    async def _list_and_update(self, resource_version: str | None = None) -> Any:
        """Read all pods; those that are missing since the last time are gone."""
        before = self.resources
        version = await super()._list_and_update(resource_version)
        self.resources = _Watched(self.resources, self._keep)
        for name in before.keys() - self.resources.keys():
            self._keep(name, before[name])
        return version

    def _keep(self, name: str, pod: Pod) -> None:
        self.gone.pop(name, None)
        self.gone[name] = pod
        while len(self.gone) > _KEPT:
            del self.gone[next(iter(self.gone))]


class _Watched(dict[str, Any]):
    """The pods that the API server has; one that it removes is kept."""

    def __init__(self, pods: dict[str, Pod], keep: Callable[[str, Pod], None]) -> None:
        super().__init__(pods)
        self._keep = keep

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove a pod that was deleted."""
        pod = super().pop(name, default)
        if pod is not default:
            self._keep(name, pod)
        return pod
