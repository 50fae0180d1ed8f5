"""Choose the provider that a deployment names. Each is imported only where it is named."""

from __future__ import annotations

from pathlib import Path

from ..deployment import Deployment
from ..provider import Provider


def provider_of(deployment: Deployment, state_dir: Path) -> Provider:
    """Return the provider of a deployment; ValueError where the service has none of that name.

    The cloud in a folder is in `state_dir`, one for all deployments.
    """
    if deployment.provider == "local":
        from .local import LocalProvider

        return LocalProvider(state_dir / "machines")
    raise ValueError(f"There is no provider {deployment.provider!r}.")
