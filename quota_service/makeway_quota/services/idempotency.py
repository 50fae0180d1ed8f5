"""Recognize requests that are repeated: the same key and the same content submit nothing a second time."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from makeway_api.errors import MakewayError
from makeway_api.models import FileIn, JobRequest
from pydantic import BaseModel

from ..store.records import SubmissionKey, Workload
from .caller import Caller
from .context import Context

REFUSED = frozenset({403, 404, 409, 413, 429})
"""The statuses with which a repetition may be refused although the first request was accepted."""

LARGE = 2**18
"""Characters of files from which on a digest is computed in a thread"""


class RequestsUnderWay:
    """The requests with a key: a repetition waits for those before it, so that what they submit is found by the key."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], asyncio.Event] = {}

    @asynccontextmanager
    async def turn(self, key: SubmissionKey | None) -> AsyncIterator[None]:
        """Wait until no other request of this person with this key is under way; None waits for nothing."""
        if key is None:
            yield
            return
        name = key.sender, key.key
        while (before := self._ends.get(name)) is not None:
            await before.wait()
        end = self._ends[name] = asyncio.Event()
        try:
            yield
        finally:
            del self._ends[name]
            end.set()


def digest_of(action: str, content: str, files: Iterable[FileIn] = ()) -> str:
    """Return the SHA-256 of a request: what it does, its content without files, and its files."""
    digest = hashlib.sha256(f"{action}\n{content}\n".encode("utf-8", "replace"))
    for file in files:
        digest.update(f"{file.path}\n{file.executable}\n{len(file.data)}\n".encode("utf-8", "replace"))
        digest.update(file.data.encode("utf-8", "replace"))
    return digest.hexdigest()


async def key_of(
    context: Context, caller: Caller, key: str | None, action: str, request: BaseModel
) -> SubmissionKey | None:
    """Return the key of a request with the digest of its content; None where the caller sent none."""
    if key is None:
        return None
    files = request.files if isinstance(request, JobRequest) else ()
    content = request.model_dump_json(exclude_unset=True, exclude={"files"})
    if sum(len(file.data) for file in files) > LARGE:
        digest = await context.call(digest_of, action, content, files)
    else:
        digest = digest_of(action, content, files)
    return SubmissionKey(key, caller.name, digest)


async def clone_key(
    context: Context, caller: Caller, key: str | None, id: str, many: int, overrides: Mapping[str, Any]
) -> SubmissionKey | None:
    """Return the key of a request for copies of a job, as `key_of`."""
    if key is None:
        return None
    content = await context.call(json.dumps, dict(overrides), sort_keys=True, default=str)
    return SubmissionKey(key, caller.name, digest_of(f"clone {id} {many}", content))


async def submitted_before(
    context: Context, caller: Caller, keys: Sequence[SubmissionKey], refused: MakewayError
) -> list[Workload] | None:
    """Return what an earlier request with these keys submitted, where a repetition of it is refused.

    A limit or a changed policy refuses a repetition, although the first request was accepted. The database is asked a
    bounded number of times a minute for one person, so that many refusals do not become many reads.
    """
    if not keys or refused.status not in REFUSED or not context.limits.may_repeat_lookup(caller.name):
        return None
    return await context.call(context.store.submitted, keys)
