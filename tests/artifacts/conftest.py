"""The places of large contents: a folder, and a bucket of a moto server that is reached over HTTP."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from storage import Place, of_bucket, of_folder


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """Start an object storage of our own; return its address."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def environment(moto: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set what the AWS SDK needs to reach that storage, and nothing else of its kind."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    values = {
        "AWS_ENDPOINT_URL_S3": moto,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


@pytest.fixture
def bucket(environment: dict[str, str]) -> str:
    """Make an empty bucket; return its name."""
    name = f"large-{uuid.uuid4().hex}"
    boto3.client("s3").create_bucket(Bucket=name)
    return name


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return each of the places, ready and empty."""
    made = of_folder(tmp_path / "a") if request.param == "folder" else of_bucket(request.getfixturevalue("bucket"))
    made.artifacts.set_up(used=False, installation="one")
    return made
