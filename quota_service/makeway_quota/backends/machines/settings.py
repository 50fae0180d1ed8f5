"""Declare the settings of machines, and make their backend; called when the service is assembled."""

from __future__ import annotations

from dataclasses import dataclass

from makeway_api.settings import setting

from ..base import Backend
from .backend import MachinesBackend


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """How machines of deployments reach the service and what they share; read only with the backend `machines`."""

    url: str = setting(
        "",
        "The address at which machines of deployments reach the service, with its prefix. Empty: MAKEWAY_URL.",
        convert=str.strip,
        scope="machine",
    )
    checkpoint_dir: str = setting(
        "",
        "Folder on a file system that all machines of deployments mount, in which jobs keep checkpoints. Empty: a "
        "checkpoint stays on its machine, and a job that goes on elsewhere starts from the beginning.",
        convert=str.strip,
        scope="machine",
    )


def backend_of(settings: MachineSettings) -> Backend:
    """Return the backend for machines; ValueError where a setting is wrong."""
    if settings.checkpoint_dir and not settings.checkpoint_dir.startswith("/"):
        raise ValueError(
            f"MAKEWAY_MACHINE_CHECKPOINT_DIR={settings.checkpoint_dir!r} is not accepted: use the absolute path at "
            "which each machine mounts the folder."
        )
    return MachinesBackend(durable_checkpoints=bool(settings.checkpoint_dir))
