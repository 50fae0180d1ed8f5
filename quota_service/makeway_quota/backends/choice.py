"""Choose and make the backends that the settings name: one, or several behind one that routes.

Each is imported only where it is named, so that a service on one machine loads nothing of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from .base import Backend
from .routing.backend import RoutingBackend


class BackendSettings(Protocol):
    """The settings that backends are made from; those of the service have them."""

    @property
    def backend(self) -> str:
        """The names of the backends, separated by commas."""

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

    @property
    def machines(self) -> Any:
        """Those of machines, as `machines.settings.backend_of` takes them."""


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


def _machines(settings: BackendSettings) -> Backend:
    from .machines.settings import backend_of

    return backend_of(settings.machines)


BACKEND_FACTORIES: Mapping[str, Callable[[BackendSettings], Backend]] = {
    "local": _local,
    "kubernetes": _kubernetes,
    "machines": _machines,
}
"""The function that makes each backend, by the name in the setting"""


def backend_names(setting: str) -> tuple[str, ...]:
    """Return the names of the backends in a setting, separated by commas."""
    return tuple(name for part in setting.split(",") if (name := part.strip()))


def checked_names(setting: str) -> str:
    """Return the setting without spaces; ValueError where it names an unknown backend, none, or one twice."""
    names = backend_names(setting)
    if not names or len(set(names)) < len(names) or any(name not in BACKEND_FACTORIES for name in names):
        raise ValueError(
            f"MAKEWAY_BACKEND={setting!r} is not accepted: use {' or '.join(BACKEND_FACTORIES)}, or several of them, "
            "each once, separated by commas."
        )
    if names[0] == "machines":
        raise ValueError(
            f"MAKEWAY_BACKEND={setting!r} is not accepted: notebooks start on the nodes of the first backend, and none "
            "starts on machines of deployments. Name another one first, such as local,machines."
        )
    return ",".join(names)


def make_backend(settings: BackendSettings) -> Backend:
    """Return the backend that runs the jobs, or one that routes to several; ValueError where settings are missing."""
    backends = [BACKEND_FACTORIES[name](settings) for name in backend_names(settings.backend)]
    return backends[0] if len(backends) == 1 else RoutingBackend(backends)


def with_removed(backend: Backend, placed_on: Iterable[str]) -> Backend:
    """Return a backend that keeps apart what runs on others, where attempts were placed on some that are not its own.

    `placed_on` are the backends of the attempts that have not ended; "" for those of a service with one backend.
    """
    removed = {name for name in placed_on if name and name not in backend.names}
    return RoutingBackend([backend]) if removed and len(backend.names) == 1 else backend
