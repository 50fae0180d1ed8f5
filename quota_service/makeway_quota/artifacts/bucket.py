"""Keep large contents in a bucket of S3-compatible object storage (extra `s3`).

Every upload has a key of its own, `PREFIX/SHA-256/RANDOM`, which is never written twice: refreshing a content is a new
upload, so that an old one is removed without a lock, of which S3 has none. Uploads that a newer one of the same content
supersedes are removed like leftovers. The object `PREFIX/makeway-installation` names the only installation that keeps
contents there: another one would remove them, as it has no rows for them. Credentials, region and endpoint come from
the environment or the files of the AWS SDK.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
)

from .base import (
    CHUNK,
    ORPHAN_AGE,
    ArtifactsUnavailable,
    ContentUnreadable,
    StoredContent,
    valid_digest,
    verified_chunks,
)

log = logging.getLogger("makeway.artifacts")

PART_BYTES = 8 * 2**20
"""Bytes of one part of a multipart upload, which is what is in memory of a content"""
RECENT_SECONDS = ORPHAN_AGE / 2
"""Seconds for which `put` needs no new upload: the one that is there is kept for at least as long again"""
OWNER_KEY = "makeway-installation"
"""The object that names the installation"""
MAX_TRIES = 3
"""Attempts of a reader to find a content: the key that it found may have been superseded and removed"""

CLIENT_CONFIG = Config(
    connect_timeout=5,
    read_timeout=30,
    max_pool_connections=16,
    retries={"mode": "standard", "max_attempts": 3},
    # The store verifies every content itself; older S3-compatible services refuse the SDK's own checksums.
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
    user_agent_extra="makeway",
)
TRANSFER = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, use_threads=False)


class ArtifactBucket:
    """The contents below a prefix of one bucket; see `base.Artifacts`."""

    def __init__(self, address: str, client: Any = None) -> None:
        """`address`: `s3://bucket` or `s3://bucket/prefix`; ValueError for anything else."""
        parts = urlsplit(address)
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
            raise ValueError(f"{address!r} is no bucket: write s3://bucket or s3://bucket/prefix")
        self._bucket = parts.netloc
        prefix = parts.path.strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self.where = f"the bucket s3://{self._bucket}/{prefix}".rstrip("/")
        self._has_contents, self._installation, self._is_owner = False, "", False
        with self._errors_explained():
            self._client = client or boto3.session.Session().client("s3", config=CLIENT_CONFIG)

    def put(self, digest: str, size: int, chunks: Iterable[bytes], *, refresh: bool = False) -> None:
        """Upload a content, unless there is a recent upload of it; with `refresh` also then."""
        with self._errors_explained():
            if not self._is_owner:
                self._check_owner()
            newest, now = self._newest(valid_digest(digest))
            if not refresh and newest is not None and newest.size == size and newest.at > now - RECENT_SECONDS:
                return
            key = f"{self._prefix}{digest}/{os.urandom(8).hex()}"
            self._client.upload_fileobj(_Reader(verified_chunks(digest, chunks)), self._bucket, key, Config=TRANSFER)

    def read(self, digest: str) -> Iterator[bytes]:
        """Yield a content in chunks; ContentUnreadable where it is missing or damaged."""
        yield from verified_chunks(digest, self._download(valid_digest(digest)))

    def list_pages(self) -> Iterator[list[StoredContent]]:
        """Yield uploads page by page; superseded and incomplete ones as what interrupted writes left."""
        with self._errors_explained():
            self._check_owner()
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            last_group: list[StoredContent] = []  # the last content of a page may have more uploads on the next page
            for page in pages:
                result = last_group + self._parse_objects(page)
                last_group = [stored for stored in result if stored.digest == result[-1].digest]
                yield _mark_superseded(result[: len(result) - len(last_group)])
            yield _mark_superseded(last_group)
            yield self._incomplete()

    def entries(self, digest: str) -> list[StoredContent]:
        """Return the uploads of a content."""
        with self._errors_explained():
            self._check_owner()
            return self._uploads(valid_digest(digest))[0]

    def remove(self, stored: StoredContent, before: float) -> bool:
        """Remove an upload that is older than `before` (Unix seconds); return whether it went."""
        if stored.at >= before:
            return False
        key, _, upload = stored.place.partition("?")
        with self._errors_explained():
            if upload:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
            else:
                self._client.delete_object(Bucket=self._bucket, Key=key)
        return True

    def now(self) -> float:
        """Return the time by the clock of the object storage."""
        with self._errors_explained():
            return _server_time(self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1))

    def set_up(self, used: bool, installation: str) -> None:
        """Check that the bucket can be used; a storage that does not answer now keeps no service from starting.

        ArtifactsUnavailable where it belongs to another installation, or lacks the contents that are `used`.
        """
        self._has_contents, self._installation = used, installation
        try:
            self.check()
        except ArtifactsUnavailable as error:
            if _is_temporary(error.__cause__):
                log.warning("%s", error)
            else:
                raise

    def check(self) -> None:
        """Raise ArtifactsUnavailable unless the bucket can be listed and belongs to this installation."""
        self.now()
        with self._errors_explained():
            self._check_owner()

    def _check_owner(self) -> None:
        """Raise ArtifactsUnavailable unless the bucket is of this installation, which takes one that is of none."""
        if not self._installation:
            return
        mark = {"Bucket": self._bucket, "Key": f"{self._prefix}{OWNER_KEY}"}
        try:
            with closing(self._client.get_object(**mark)["Body"]) as body:
                result = body.read(1000).decode("utf-8", "replace").strip()
        except self._client.exceptions.NoSuchKey:
            if self._has_contents:
                raise ArtifactsUnavailable(
                    f"{self.where} has no contents of this installation, which has some elsewhere; name the place "
                    f"where they are, or copy them and then write “{self._installation}” into the object {mark['Key']}"
                ) from None
            self._client.put_object(**mark, Body=self._installation.encode())
            result = self._installation
        self._is_owner = result == self._installation
        if not self._is_owner:
            raise ArtifactsUnavailable(
                f"{self.where} belongs to another installation, whose contents this one would remove; choose another "
                f"prefix, or, if no installation uses them any more, remove the object {mark['Key']}"
            )
        self._has_contents = True

    def _newest(self, digest: str) -> tuple[StoredContent | None, float]:
        """Return the newest upload of a content, and the time by the storage's clock."""
        result, now = self._uploads(digest)
        return max(result, key=lambda stored: (stored.at, stored.place), default=None), now

    def _uploads(self, digest: str) -> tuple[list[StoredContent], float]:
        answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=f"{self._prefix}{digest}/")
        return self._parse_objects(answer), _server_time(answer)

    def _download(self, digest: str) -> Iterator[bytes]:
        with self._errors_explained():
            for _ in range(MAX_TRIES):
                newest, _ = self._newest(digest)
                if newest is None:
                    break
                try:
                    body = self._client.get_object(Bucket=self._bucket, Key=newest.place)["Body"]
                except self._client.exceptions.NoSuchKey:
                    continue
                try:
                    yield from body.iter_chunks(CHUNK)
                finally:
                    body.close()
                return
        raise ContentUnreadable("its content is missing")

    def _parse_objects(self, page: dict[str, Any]) -> list[StoredContent]:
        return [stored for item in page.get("Contents", ()) if (stored := self._parse_object(item))]

    def _parse_object(self, entry: dict[str, Any]) -> StoredContent | None:
        """Return an object of the bucket as an upload; None for one that Makeway did not write."""
        digest, _, name = str(entry["Key"])[len(self._prefix) :].partition("/")
        try:
            valid_digest(digest)
        except ValueError:
            return None
        return StoredContent(digest, entry["Key"], entry["Size"], entry["LastModified"].timestamp()) if name else None

    def _incomplete(self) -> list[StoredContent]:
        """Return the multipart uploads that were never completed."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._prefix)
        return [
            StoredContent("", f"{item['Key']}?{item['UploadId']}", 0, item["Initiated"].timestamp())
            for page in pages
            for item in page.get("Uploads", ())
            if self._parse_object({"Size": 0, "LastModified": item["Initiated"], "Key": item["Key"]})
        ]

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Turn the errors of the SDK into ArtifactsUnavailable with a sentence."""
        try:
            yield
        except (ClientError, BotoCoreError, boto3.exceptions.Boto3Error) as error:
            raise ArtifactsUnavailable(f"{self.where} cannot be used: {_sentence(error)}") from error


class _Reader(io.RawIOBase):
    """Chunks as a file that can be read once, for the SDK."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes; fewer only at the end."""
        parts, length = [self._rest], len(self._rest)
        while size < 0 or length < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            parts.append(chunk)
            length += len(chunk)
        whole = b"".join(parts)
        end = len(whole) if size < 0 else size
        self._rest = whole[end:]
        return whole[:end]


def _mark_superseded(uploads: list[StoredContent]) -> list[StoredContent]:
    """Return uploads, all but the newest of each content without their digest, so that no row keeps them."""
    newest: dict[str, StoredContent] = {}
    for stored in uploads:
        known = newest.get(stored.digest)
        if known is None or (stored.at, stored.place) > (known.at, known.place):
            newest[stored.digest] = stored
    return [stored if newest[stored.digest] is stored else stored._replace(digest="") for stored in uploads]


def _is_temporary(error: BaseException | None) -> bool:
    """Whether the storage does not answer now, or answers that it cannot serve now; not that a request is wrong."""
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return status >= 500 or status == 429
    return isinstance(error, (ConnectionError, HTTPClientError))


def _server_time(answer: dict[str, Any]) -> float:
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()


def _sentence(error: Exception) -> str:
    """Return what is wrong and what to do about it; never a credential."""
    if isinstance(error, NoCredentialsError):
        return (
            "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE"
        )
    if isinstance(error, NoRegionError):
        return "there is no region; set AWS_DEFAULT_REGION"
    cause = error if isinstance(error, ClientError) else error.__cause__ or error.__context__
    if isinstance(cause, ClientError):
        known = {
            "NoSuchBucket": "there is no such bucket; create it, or correct its name",
            "AccessDenied": "access is denied; the credentials need s3:ListBucket, s3:ListBucketMultipartUploads, "
            "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload",
        }
        code = str(cause.response.get("Error", {}).get("Code", ""))
        return known.get(code) or str(cause.response.get("Error", {}).get("Message") or code)
    return str(error)
