"""Storages of large contents for tests, which tests also change from outside."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from makeway_quota.artifacts.base import Artifacts
from makeway_quota.artifacts.bucket import ArtifactBucket
from makeway_quota.artifacts.folder import ArtifactFolder
from moto.s3.models import s3_backends

ACCOUNT = "123456789012"


@dataclass(slots=True)
class Place:
    """A storage, and how a test changes it from outside."""

    artifacts: Artifacts
    age: Callable[[float], None]
    """make everything there so many seconds old"""
    overwrite: Callable[[bytes], None]
    """damage every content"""


def keys(bucket: str) -> dict[str, Any]:
    """Return the objects of a bucket as the storage has them."""
    result: dict[str, Any] = s3_backends[ACCOUNT]["aws"].buckets[bucket].keys
    return result


def make_older(bucket: str, seconds: float) -> None:
    """Make every object of a bucket older."""
    for key in keys(bucket).values():
        key.last_modified -= datetime.timedelta(seconds=seconds)


def of_folder(root: Path) -> Place:
    """Return a folder as a storage."""

    def files() -> list[Path]:
        return [path for path in root.glob("??/*") if path.is_file()]

    def age(seconds: float) -> None:
        for path in files():
            at = path.stat().st_mtime - seconds
            os.utime(path, (at, at))

    def overwrite(data: bytes) -> None:
        for path in files():
            path.write_bytes(data)

    return Place(ArtifactFolder(root), age, overwrite)


def of_bucket(name: str) -> Place:
    """Return a bucket as a storage."""

    def overwrite(data: bytes) -> None:
        for key in list(keys(name)):
            boto3.client("s3").put_object(Bucket=name, Key=key, Body=data)

    return Place(ArtifactBucket(f"s3://{name}/some/prefix"), lambda seconds: make_older(name, seconds), overwrite)
