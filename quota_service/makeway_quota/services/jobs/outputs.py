"""Read what jobs write: logs, results and exceptions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

from makeway_api.models import LogChunk
from makeway_api.quantities import size

from ...backends.untrusted import UnreadableJson, read_table, text
from ...engine.snapshot import ADMITTED
from ...store.records import Workload
from ...wording.outcomes import RESULT_LOST, no_result
from ..caller import Caller
from ..context import MAX_WAIT, Context
from ..refusals import backend_errors, refuse
from .job_access import JobAccess

LOG_POLL = 0.1
"""Seconds after which a log without new output is read again; the pause grows by half each time."""
MAX_POLL = 1.0
MAX_LOG = 700_000
"""Bytes of a log in one answer: in JSON a control character takes six"""
MAX_CHARACTER = 4
"""Bytes of one character in UTF-8"""
RESULT_CHUNK = 1_000_000
"""Bytes of a result that are in memory at a time"""

MAX_ERROR = 2**20
"""Bytes of a report of an exception"""
ERROR_FIELDS = {"type": 500, "message": 20_000}
"""Texts of such a report, and the characters that are shown of each"""
MAX_TRACEBACK = 200_000
NO_LINES = {"traceback": ""}


class Result:
    """The result of a job: its size in bytes, and its content chunk by chunk."""

    def __init__(self, context: Context, workload: str, attempt: int, size: int) -> None:
        self.size = size
        self._context = context
        self._job = (workload, attempt)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the content; a file that shrinks meanwhile ends early."""
        offset = 0
        while offset < self.size:
            async with self._context.file_reads:
                part = await self._context.backend.result_part(
                    *self._job, offset, min(RESULT_CHUNK, self.size - offset)
                )
            if part is None or not part[0]:
                return
            offset += len(part[0])
            yield part[0]


class OutputService:
    """Logs, results and exceptions, for callers who may read the job."""

    def __init__(self, context: Context, access: JobAccess) -> None:
        self._context = context
        self._access = access

    async def log(self, caller: Caller, id: str, attempt: int | None, offset: int, limit: int, wait: float) -> LogChunk:
        """Return part of a job's log; a negative offset counts from the end; wait up to `wait` seconds for more."""
        row = await self._access.readable(caller, id)
        with self._context.limits.following(caller.name) if wait > 0 else nullcontext():
            number = attempt or max(1, await self._newest(row))
            return await self._log(caller, row, number, offset, min(max(1, limit), MAX_LOG), wait)

    async def _log(self, caller: Caller, row: Workload, number: int, offset: int, limit: int, wait: float) -> LogChunk:
        deadline = time.monotonic() + min(max(0.0, wait), MAX_WAIT)
        pause = LOG_POLL
        while True:
            over = not (row.state in ADMITTED and row.attempt == number) and not (row.live and number > row.attempt)
            data, length = await self._read(row.id, number, max(0, offset), limit)
            if offset < 0:
                offset = max(0, length + offset)
                data, length = await self._read(row.id, number, offset, limit)
                cut = _continuation(data) if offset else 0
                offset, data = offset + cut, data[cut:]
            if data and not _decode(data, final=False)[1] and offset + len(data) < length:  # a limit below a character
                data, length = await self._read(row.id, number, offset, MAX_CHARACTER)
            if _decode(data, final=False)[1] or over or time.monotonic() >= deadline:
                break
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(MAX_POLL, pause * 1.5)
            row = await self._access.visible(caller, row.id)
        skipped = False
        if not data and offset < length and (gap := await self._gap(row.id, number)) and gap[0] <= offset < gap[1]:
            offset, skipped = gap[1], True
            data, length = await self._read(row.id, number, offset, limit)
        text, used = _decode(data, final=over and offset + len(data) >= length)
        following = min(offset, length) + used
        return LogChunk(
            attempt=number,
            offset=offset,
            next_offset=following,
            text=text,
            eof=over and following >= length,
            truncated=skipped,
        )

    async def result(self, caller: Caller, id: str) -> Result | None:
        """Return the result of a job's newest attempt, or None; one above the limit of the service is refused."""
        row = await self._access.readable(caller, id)
        if not (number := await self._newest(row)):
            return None
        async with self._context.file_reads:
            with backend_errors():
                part = await self._context.backend.result_part(id, number, 0, 0)
        if part is None and row.reason_numbers.get(RESULT_LOST):
            raise refuse(f"“{row.name or row.id}” succeeded, but {no_result()}", RESULT_LOST, 410)
        if part is None:
            return None
        total, maximum = part[1], self._context.settings.max_result_bytes
        if maximum and total > maximum:
            raise refuse(
                f"The result of “{row.name}” has {size(total)}, and {size(maximum)} is the most that is sent: write "
                "large results to the shared storage and return their path.",
                "result_too_large",
                413,
                bytes=total,
                limit_bytes=maximum,
            )
        return Result(self._context, id, number, total)

    async def error(self, caller: Caller, id: str) -> dict[str, Any] | None:
        """Return the exception that ended the job, or None."""
        row = await self._access.readable(caller, id)
        if not (number := await self._newest(row)):
            return None
        async with self._context.file_reads:
            with backend_errors():
                data = await self._context.backend.error(id, number)
        return _failure(data) if data else None

    async def _newest(self, row: Workload) -> int:
        """Return the newest attempt that was started, 0 where none was: one that found no room has no record."""
        if row.state in ADMITTED or row.attempt < 2:
            return row.attempt
        attempts = await self._context.call(self._context.store.attempts, row.id)
        return max((attempt.number for attempt in attempts), default=row.attempt)

    async def _read(self, id: str, attempt: int, offset: int, limit: int) -> tuple[bytes, int]:
        async with self._context.file_reads:
            with backend_errors():
                return await self._context.backend.log(id, attempt, offset, limit)

    async def _gap(self, id: str, attempt: int) -> tuple[int, int] | None:
        async with self._context.file_reads:
            with backend_errors():
                return await self._context.backend.log_gap(id, attempt)


def _failure(data: bytes) -> dict[str, Any]:
    """Return an exception as pages show it; the job may have written anything there."""
    try:
        report = read_table(data, MAX_ERROR)
    except UnreadableJson as error:
        return {"type": "Error", "message": f"The job's report of its exception cannot be read: {error}.", **NO_LINES}
    result = {name: text(report.get(name), maximum) for name, maximum in ERROR_FIELDS.items()}
    lines = report.get("traceback")
    traceback = "".join(line for line in lines if isinstance(line, str)) if isinstance(lines, list) else lines
    result["traceback"] = text(traceback, MAX_TRACEBACK)
    return result


def _continuation(data: bytes) -> int:
    """Return how many bytes belong to a character that begins before them."""
    count = next((n for n, byte in enumerate(data[:MAX_CHARACTER]) if byte & 0xC0 != 0x80), 0)
    return count if count < MAX_CHARACTER else 0


def _decode(data: bytes, *, final: bool) -> tuple[str, int]:
    """Return the text and the bytes that it takes: a character cut in half at the end is left for the next chunk."""
    if not final:
        for cut in range(min(3, len(data))):
            byte = data[len(data) - 1 - cut]
            if byte < 0x80:
                break
            if byte >= 0xC0:
                need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
                if need > cut + 1:
                    data = data[: len(data) - 1 - cut]
                break
    return data.decode("utf-8", "replace"), len(data)
