"""Choose the storage of large contents by the settings; called when the service opens its store."""

from __future__ import annotations

from pathlib import Path

from .base import Artifacts
from .folder import ArtifactFolder


def make_artifacts(folder: Path | None, s3: str) -> Artifacts | None:
    """Return the bucket or the folder that the settings name, None where they name neither; ValueError for both."""
    if not s3:
        return None if folder is None else ArtifactFolder(folder)
    if folder is not None:
        raise ValueError(
            "Large files are kept in a folder or in a bucket, not in both: unset MAKEWAY_ARTIFACTS_DIR or "
            "MAKEWAY_ARTIFACTS_S3."
        )
    try:
        from .bucket import ArtifactBucket
    except ModuleNotFoundError as error:
        raise ValueError(
            f"MAKEWAY_ARTIFACTS_S3 needs the extra `s3` of the package makeway ({error}): install it."
        ) from None
    try:
        return ArtifactBucket(s3)
    except ValueError as error:
        raise ValueError(f"MAKEWAY_ARTIFACTS_S3: {error}.") from None
