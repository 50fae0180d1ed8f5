"""The bucket: its address, what it says where it cannot be used, and the service that keeps its files there."""

from __future__ import annotations

import base64
import hashlib
import logging
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest
from makeway_api.models import FileIn
from makeway_quota.artifacts.base import ORPHAN_AGE, ArtifactsUnavailable, put_bytes, read_whole
from makeway_quota.artifacts.bucket import OWNER_KEY, ArtifactBucket
from makeway_quota.artifacts.choice import make_artifacts
from makeway_quota.artifacts.folder import ArtifactFolder
from makeway_quota.main import main
from makeway_quota.store import StoreError, open_store
from makeway_quota.store.records import NewWorkload
from running import python, running
from storage import keys, make_older


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


REFUSED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@pytest.mark.parametrize("address", ["bucket", "http://bucket", "s3://", "s3:///prefix", "s3://bucket?region=x"])
def test_an_address_that_is_no_bucket_is_refused(environment: dict[str, str], address: str) -> None:
    with pytest.raises(ValueError, match=r"MAKEWAY_ARTIFACTS_S3: .* is no bucket: write s3://bucket/?"):
        make_artifacts(None, address)


def test_a_folder_and_a_bucket_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unset MAKEWAY_ARTIFACTS_DIR or MAKEWAY_ARTIFACTS_S3"):
        make_artifacts(tmp_path, "s3://bucket")


def test_objects_of_others_are_left_alone(bucket: str) -> None:
    data = b"mine"
    place = ArtifactBucket(f"s3://{bucket}")
    put_bytes(place, digest(data), data)
    for key in ("notes.txt", f"{digest(data)}", f"backups/{digest(data)}/1", "checkpoints/job/step-1"):
        place._client.put_object(Bucket=bucket, Key=key, Body=b"theirs")
    make_older(bucket, 2 * ORPHAN_AGE)
    assert [stored.digest for part in place.list_pages() for stored in part] == [digest(data)]
    assert read_whole(place, digest(data)) == data


def test_uploads_of_one_content_on_two_pages_are_seen_together(bucket: str) -> None:
    place = ArtifactBucket(f"s3://{bucket}")
    place._client.meta.events.register(
        "provide-client-params.s3.ListObjectsV2", lambda params, **_: {**params, "MaxKeys": 3}
    )
    names = [digest(str(at).encode()) for at in range(4)]
    for name in names:
        for copy in ("1", "2"):
            place._client.put_object(Bucket=bucket, Key=f"{name}/{copy}", Body=b"")
    parts = list(place.list_pages())
    assert len(parts) > 3
    result = [stored.digest for part in parts for stored in part]
    assert sorted(item for item in result if item) == sorted(names)
    assert result.count("") == len(names)


def test_a_bucket_without_the_contents_that_rows_refer_to_stops_the_start(bucket: str, tmp_path: Path) -> None:
    url, data = f"sqlite:///{tmp_path / 'db.sqlite'}", b"x" * 10
    store = open_store(url, ArtifactFolder(tmp_path / "artifacts"), 10)
    store.add_workload(NewWorkload("j1", "job", "rnd", "gpu1", "ana"), [("a", data, False)], now=0.0)
    store.close()
    place = ArtifactBucket(f"s3://{bucket}/prefix")
    with pytest.raises(StoreError, match="has no contents of this installation, which has some elsewhere") as refused:
        open_store(url, place, 10)
    assert keys(bucket) == {}
    name = str(refused.value).partition("write “")[2].partition("”")[0]
    put_bytes(ArtifactBucket(f"s3://{bucket}/prefix"), digest(data), data)
    place._client.put_object(Bucket=bucket, Key=f"prefix/{OWNER_KEY}", Body=f"{name}\n".encode())
    store = open_store(url, ArtifactBucket(f"s3://{bucket}/prefix"), 10)
    assert [file.data for file in store.files("j1")] == [data]
    store.close()


def test_a_second_installation_on_the_same_prefix_is_refused(bucket: str, tmp_path: Path) -> None:
    address = f"s3://{bucket}/prefix"
    first = open_store(f"sqlite:///{tmp_path / 'first.sqlite'}", ArtifactBucket(address), 10)
    again = open_store(f"sqlite:///{tmp_path / 'first.sqlite'}", ArtifactBucket(address), 10)
    with pytest.raises(StoreError, match=r"belongs to another installation.* remove the object prefix/"):
        open_store(f"sqlite:///{tmp_path / 'second.sqlite'}", ArtifactBucket(address), 10)
    beside = open_store(f"sqlite:///{tmp_path / 'second.sqlite'}", ArtifactBucket(f"{address}-2"), 10)
    for store in (first, again, beside):
        store.contents.keep([("a", b"x" * 10, False)])
        store.contents.probe()
        assert store.contents.failure() is None
        store.close()


def test_a_bucket_that_others_took_over_is_neither_cleaned_up_nor_written_to(bucket: str, tmp_path: Path) -> None:
    place = ArtifactBucket(f"s3://{bucket}")
    store = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}", place, 10)
    store.contents.keep([("a", b"x" * 10, False)])
    make_older(bucket, 2 * ORPHAN_AGE)
    before = set(keys(bucket))
    for result in (b"another", None):
        if result is None:
            place._client.delete_object(Bucket=bucket, Key=OWNER_KEY)
        else:
            place._client.put_object(Bucket=bucket, Key=OWNER_KEY, Body=result)
        with pytest.raises(ArtifactsUnavailable):
            store.contents.collect(2e9)
        store.contents.probe()
        assert "installation" in (store.contents.failure() or "")
        with pytest.raises(StoreError, match="installation"):
            store.contents.keep([("b", b"y" * 10, False)])
    assert before - set(keys(bucket)) == {OWNER_KEY}
    store.close()


def test_a_bucket_that_is_not_there_stops_the_start(environment: dict[str, str], tmp_path: Path) -> None:
    place = ArtifactBucket("s3://not-there")
    with pytest.raises(ArtifactsUnavailable, match="no such bucket; create it, or correct its name"):
        read_whole(place, "0" * 64)
    with pytest.raises(StoreError, match=r"s3://not-there cannot be used: there is no such bucket"):
        open_store(f"sqlite:///{tmp_path / 'db.sqlite'}", place)


def test_missing_credentials_are_named(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="there are no credentials; set AWS_ACCESS_KEY_ID"):
        open_store(f"sqlite:///{tmp_path / 'db.sqlite'}", ArtifactBucket("s3://some"))


def test_a_storage_that_is_away_hinders_no_start_and_is_reported(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with caplog.at_level(logging.WARNING, "makeway.artifacts"):
            store = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}", ArtifactBucket("s3://some"), 10)
        store.contents.probe()
        assert "cannot be used" in (store.contents.failure() or "")
        with pytest.raises(StoreError, match="large files cannot be written"):
            store.contents.keep([("a", b"x" * 10, False)])
        store.close()
    assert "very-secret" not in caplog.text
    assert "cannot be used" in caplog.text


class Overloaded(BaseHTTPRequestHandler):
    """Answers as S3 does when it has to shed load."""

    def do_GET(self) -> None:
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def test_a_storage_that_answers_with_an_error_of_its_own_hinders_no_start(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Overloaded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_address[1]}")
        with caplog.at_level(logging.WARNING, "makeway.artifacts"):
            open_store(f"sqlite:///{tmp_path / 'db.sqlite'}", ArtifactBucket("s3://some"), 10).close()
        server.shutdown()
    assert "cannot be used" in caplog.text


def test_the_commands_of_operators_use_the_bucket(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAKEWAY_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("MAKEWAY_ARTIFACTS_S3", f"s3://{bucket}")
    assert main(["upgrade-db"]) == 0
    assert not (tmp_path / "artifacts").exists()
    monkeypatch.setenv("MAKEWAY_ARTIFACTS_S3", "s3://not-there")
    assert main(["upgrade-db"]) == 2
    assert "there is no such bucket" in capsys.readouterr().err


class Refuses(BaseHTTPRequestHandler):
    """A storage that lets no one in."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", str(len(REFUSED)))
        self.end_headers()
        self.wfile.write(REFUSED)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


@pytest.fixture
def refusing() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Refuses)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_missing_rights_are_named(
    environment: dict[str, str], refusing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", refusing)
    with pytest.raises(StoreError, match="access is denied; the credentials need s3:ListBucket"):
        open_store(f"sqlite:///{tmp_path / 'db.sqlite'}", ArtifactBucket("s3://some"))


async def test_a_job_gets_its_large_files_from_the_bucket(bucket: str, tmp_path: Path) -> None:
    big = FileIn(path="weights.bin", data=base64.b64encode(b"w" * 300_000).decode())
    size = python("import os; print(os.path.getsize('weights.bin'))")
    async with running(tmp_path, MAKEWAY_ARTIFACTS_S3=f"s3://{bucket}/makeway") as run:
        first = await run.submit("ana", "first", profile="gpu1", command=size, files=[big])
        assert (await run.job(first.id, "succeeded", "failed")).state.value == "succeeded"
        [key] = [key for key in keys(bucket) if key != f"makeway/{OWNER_KEY}"]
        assert key.startswith("makeway/")
        assert not (tmp_path / "artifacts").exists()
        contents = run.service.components.store.contents
        make_older(bucket, 2 * ORPHAN_AGE)
        assert contents.collect(run.service.components.clock()).remaining == 1
        assert (await run.service.services.audit.ready()).checks["files"] == "available"
