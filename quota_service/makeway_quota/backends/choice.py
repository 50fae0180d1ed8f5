"""Choose and make the backends that the settings name: one, or several behind one that routes.

Each is imported only where it is named, so that a service on one machine loads nothing of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from .base import Backend

SEPARATOR = ","


class BackendSettings(Protocol):
    """The settings that backends are made from; those of the service have them."""

    @property
    def backend(self) -> str:
        """The names of the backends, as `names` reads them."""

    @property
    def state_dir(self) -> Path:
        """The directory of the service's data."""

    @property
    def mode(self) -> str:
        """`system` where jobs run under the account of their owner."""

    @property
    def virtual_gpus(self) -> int:
        """Virtual GPUs where the machine has no real one."""

    @property
    def virtual_nodes(self) -> int:
        """Virtual nodes that share them."""

    @property
    def kubernetes(self) -> Any:
        """Those of pods, as `kubernetes.settings.backend_of` takes them."""


def _local(settings: BackendSettings) -> Backend:
    from .local.backend import LocalBackend

    return LocalBackend(
        settings.state_dir,
        virtual_gpus=settings.virtual_gpus,
        virtual_nodes=settings.virtual_nodes,
        system_users=settings.mode == "system",
    )


def _kubernetes(settings: BackendSettings) -> Backend:
    from .kubernetes.settings import backend_of

    return backend_of(settings.kubernetes)


MAKERS: Mapping[str, Callable[[BackendSettings], Backend]] = {"local": _local, "kubernetes": _kubernetes}
"""What makes each backend that a setting may name"""


def make_backend(settings: BackendSettings) -> Backend:
    """Return the backend that runs the jobs; ValueError where its settings are not complete."""
    return MAKERS[settings.backend](settings)
