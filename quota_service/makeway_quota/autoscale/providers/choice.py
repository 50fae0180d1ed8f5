"""Choose the provider that a deployment names. Each is imported only where it is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from ..deployment import Deployment
from ..provider import Provider


def provider_of(
    deployment: Deployment,
    state_dir: Path,
    installation: Callable[[], str],
    secrets: Mapping[str, str] | None = None,
) -> Provider:
    """Return the provider of a deployment; ValueError where the service has none of that name. May block.

    The cloud in a folder is in `state_dir`, one for all deployments. `installation` returns the name that tells the
    instances of this installation from those of others in one account. `secrets`: the credentials, by the provider's
    names for them; without any, those of the service's environment.
    """
    if deployment.provider == "local":
        from .local import LocalProvider

        return LocalProvider(state_dir / "machines")
    if deployment.provider == "aws":
        if find_spec("boto3") is None:
            raise ValueError("The provider aws needs boto3 beside the service: install Makeway with its extra `aws`.")
        from .aws import AwsProvider

        return AwsProvider(deployment, installation(), secrets or {})
    if deployment.provider == "gcp":
        try:
            from .gcp import GcpProvider
        except ImportError as error:
            needed = "google-cloud-compute beside the service: install Makeway with its extra `gcp`"
            raise ValueError(f"The provider gcp needs {needed} ({error}).") from error
        return GcpProvider(deployment, installation(), secrets or {})
    raise ValueError(f"There is no provider {deployment.provider!r}.")
