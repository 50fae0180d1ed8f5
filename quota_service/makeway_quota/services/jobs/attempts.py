"""Answer workers that are no processes of the service: start order, files, orders, reports and outputs.

A worker may use any replica. What it is told follows from the store alone, so that it is the same everywhere; what it
reports is written to the store, and read by the leader's next cycle.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from functools import partial

from makeway_api.models.attempts import (
    FailedWorker,
    OutputReceipt,
    ReportReceipt,
    WorkerFile,
    WorkerNotice,
    WorkerOrders,
    WorkerReportIn,
    WorkerStart,
)
from makeway_api.quantities import size

from ...control.workers.channel import WorkerChannel
from ...engine.snapshot import ADMITTED
from ...store.errors import FilesUnavailable, FileUnreadable, StorageLimitExceeded
from ...store.records import Workload
from ...store.reports.worker_reports import AlreadyClaimed, WorkerKey
from ...store.storage.outputs import Kind, OutOfPlace, TooLong
from ...values import Notice
from ..context import MAX_WAIT, Context
from ..limits.output_rates import RESULT_BURST, RESULT_RATE, OutputRates
from ..machines.credentials import CredentialService
from ..refusals import busy, refuse

HEARTBEAT = 10.0
"""Seconds between two reports of a worker, where there are few."""
REPORTS_A_SECOND = 200
"""Reports of unchanged workers that all together are to send: where there are thousands, each sends fewer"""
MAX_HEARTBEAT = 60.0
"""Seconds between two reports of a worker, at most; its requests for orders show, too, that it lives"""
LOG_PIECES_A_SECOND = 300
"""Pieces of logs that all workers together are to send, as each is a transaction"""
MAX_LOG_INTERVAL = 30.0
"""Seconds between two pieces of a log, at most"""
LOG_LIMIT = 64 * 2**20
"""Bytes of an attempt's log that are kept"""
MAX_RESULT = 2**31
"""Bytes of a result where the service has no limit of its own"""
MAX_ERROR = 2**20
MIN_LOG = 2**20
"""Bytes of an attempt's log that are kept where nothing more of its owner fits"""
MIN_COUNTED = 64 * 1024
"""Bytes that each write of a worker counts for at least: it is a transaction"""
POLL_SECONDS = 5.0
"""Seconds after which a long poll looks for a failure in the gang, which may have been reported elsewhere."""


class AttemptService:
    """What one worker of one attempt may do, and nothing else. `key` is the worker that the address names."""

    def __init__(self, context: Context, channel: WorkerChannel, credentials: CredentialService) -> None:
        self._context = context
        self._channel = channel
        self._credentials = credentials
        self._rates = OutputRates()
        self._result_rates = OutputRates(RESULT_RATE, RESULT_BURST)

    def check_token(self, token: str, key: WorkerKey, *, renewing: bool = False) -> bool:
        """Refuse a token that is not this worker's or is too old; return whether it is to be replaced."""
        validity = self._channel.tokens.check(token, key)
        if validity == "void":
            message = "This token opens no worker, or another one than the address names."
            raise refuse(message, "unauthorized", 401)
        if validity == "expired" and not renewing:
            raise refuse("This token has expired: a report of the worker gets a new one.", "token_expired", 401)
        return validity != "valid"

    async def claim(self, token: str, key: WorkerKey, instance: str) -> WorkerStart:
        """Make a launcher the only one of its worker, and return what it is to start.

        The token may have expired while the machine was made ready.
        """
        self.check_token(token, key, renewing=True)
        row = await self._live_row(key)
        if key[2] >= len(row.placement):
            raise refuse(f"The attempt has {len(row.placement)} workers.", "not_found", 404)
        context = self._context
        credentials = await self._credentials.files(row.team or "")  # before anything is claimed
        try:
            await context.call(context.store.worker_reports.claim, key, instance, context.clock())
        except AlreadyClaimed as error:
            raise refuse("Another launcher runs this worker: end this one.", "claimed", 409) from error
        self._channel.record_contact(key)
        self._channel.wake()
        whole = await context.call(context.store.workload, row.id) or row
        listed = await context.call(context.store.contents.list_files, row.id)
        files = [WorkerFile(path=p, executable=x, digest=d) for p, x, d in listed]
        start = _start(whole, key, files, self._lost_after(key), self._new_token(key))
        return start.model_copy(update={"credentials": credentials})

    async def file(self, token: str, key: WorkerKey, digest: str) -> AsyncIterator[bytes]:
        """Return the content of one of the job's files, chunk by chunk."""
        self.check_token(token, key)
        row = await self._live_row(key)
        self._channel.record_contact(key)
        contents = self._context.store.contents
        chunks = await self._context.call(contents.chunks, row.id, digest)
        if chunks is None:
            raise refuse("The job has no file with this content.", "not_found", 404)
        first = await self._context.call(_first, chunks)
        if isinstance(first, FileUnreadable):
            raise refuse(str(first), "file_lost", 404) from first
        if isinstance(first, FilesUnavailable):
            raise busy(
                "The storage of large files is unavailable: try again.", "files_unavailable", 503, 5.0
            ) from first
        return self._stream(key, first, chunks)

    async def _stream(self, key: WorkerKey, first: bytes, chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
        chunk = first
        while chunk:
            self._channel.record_contact(key)
            yield chunk
            chunk = await self._context.call(next, chunks, b"")

    async def orders(self, token: str, key: WorkerKey, known: str, wait: float) -> WorkerOrders:
        """Return the orders for a worker; wait up to `wait` seconds until they are not what it knows."""
        self.check_token(token, key)
        deadline = time.monotonic() + min(max(0.0, wait), MAX_WAIT)
        self._channel.record_contact(key)
        with self._context.world.follow(key[0]) as follower:
            while True:
                row = await self._live_row(key)
                stopped_at = self._channel.gang_stopped_at(key)
                stopping = row.notice is not None or stopped_at is not None
                # A rank that fails after the notice takes no time to save from the others.
                stop = row.cancel_requested or (not stopping and self._channel.gang_failed(key))
                failed = self._channel.failed_worker(key, row.signal) if stopping else None
                orders = _orders(row, stopped_at, failed, stop=stop)
                remaining = deadline - time.monotonic()
                if orders.known != known or remaining <= 0:
                    return orders
                await follower.wait_for_change(min(remaining, POLL_SECONDS) if len(row.placement) > 1 else remaining)

    async def report(self, token: str, key: WorkerKey, report: WorkerReportIn) -> ReportReceipt:
        """Store how far a worker is, or how it ended. An expired token is renewed while its attempt lives."""
        old = self.check_token(token, key, renewing=True)
        await self._live_row(key)
        self._channel.record_contact(key)
        self._context.progress.note(key[0], key[1], report.progress)
        stored = self._channel.stored_report(report)
        if stored != self._channel.report(key):
            self._limit_rate(key, MIN_COUNTED, self._rates)
            context = self._context
            if report.exit is not None:  # another replica may decide what becomes of it
                await context.call(context.progress.write, key[:1])
            written = await context.call(context.store.worker_reports.write, key, stored, context.clock())
            if written is None:
                raise refuse("This worker has no launcher yet: claim it first.", "not_claimed", 409)
            self._channel.wake()
        pace = min(MAX_LOG_INTERVAL, max(1.0, self._channel.workers / LOG_PIECES_A_SECOND))
        renewed, lost_after = self._new_token(key) if old else None, self._lost_after(key)
        return ReportReceipt(heartbeat=self._heartbeat(lost_after), pace=pace, token=renewed, lost_after=lost_after)

    def _lost_after(self, key: WorkerKey) -> float:
        """Return the seconds of silence after which its backend starts this worker elsewhere."""
        return self._context.backend.lost_after_of(key[0], key[1])

    def _heartbeat(self, lost_after: float) -> float:
        """Return the seconds between two reports of a worker: the more there are, the more of them."""
        max_heartbeat = max(HEARTBEAT, min(MAX_HEARTBEAT, lost_after / 5))
        return min(max_heartbeat, max(HEARTBEAT, self._channel.workers / REPORTS_A_SECOND))

    async def output(
        self, token: str, key: WorkerKey, kind: Kind, offset: int, data: bytes, *, dropped: bool
    ) -> OutputReceipt:
        """Store bytes of a log, a result or an exception; a repetition changes nothing."""
        self.check_token(token, key)
        row = await self._live_row(key)
        self._channel.record_contact(key)
        self._limit_rate(key, max(len(data), MIN_COUNTED), self._rates if kind == "log" else self._result_rates)
        append = partial(self._context.store.outputs.append, key, kind, offset, data, dropped=dropped)
        storage = self._context.storage
        limit = await self._context.call(self._room, row, kind, len(data))
        kept = storage.limits if kind == "result" or (kind == "log" and limit > MIN_LOG) else None
        try:
            try:
                end = await self._context.call(append, limit=limit, kept=kept)
            except StorageLimitExceeded:  # others have taken the room since it was read
                if kind == "result":
                    raise
                end = await self._context.call(append, limit=MIN_LOG)
        except StorageLimitExceeded as error:
            beyond = await self._context.call(storage.refusal, row.owner, row.team or "", error)
            raise refuse(beyond.message, "storage_quota", 413, **beyond.numbers) from None
        except OutOfPlace as error:
            message = f"The output is known up to offset {error.expected}: send what follows."
            raise refuse(message, "out_of_place", 409, expected=error.expected) from error
        except TooLong as error:
            await self._context.call(self._context.store.outputs.drop, key, kind)
            message = f"The output is longer than {size(error.limit)}, the most that is kept."
            raise refuse(message, "too_large", 413, limit_bytes=error.limit) from error
        return OutputReceipt(end=end)

    def _limit_rate(self, key: WorkerKey, size: int, rates: OutputRates) -> None:
        """Refuse what a worker sends faster than it is taken."""
        if wait := rates.take(key, size):
            raise busy("This worker sends faster than it is taken: send the rest later.", "too_fast", 429, wait)

    def _room(self, row: Workload, kind: Kind, size: int) -> int:
        """Return how many bytes of an output are kept at most, as the job's owner, or the disk, may be at a limit.

        What is beyond is refused: of a result for good (413), on a disk with little room until it has more (507). Of a
        log as much is kept in any case as tells why a job failed; exceptions are that small.
        """
        storage = self._context.storage
        if kind == "error":
            return MAX_ERROR
        if kind == "result":
            storage.check_disk(size)
        beyond = storage.quota_refusal(row.owner, row.team or "", size)
        if beyond is not None and kind == "result":
            raise refuse(beyond.message, "storage_quota", 413, **beyond.numbers)
        room = storage.disk_space()
        short = beyond is not None or (room is not None and room.free - size < room.reserve)
        return MIN_LOG if short else self._limit(kind)

    def _limit(self, kind: Kind) -> int:
        if kind == "log":
            return LOG_LIMIT
        return MAX_ERROR if kind == "error" else self._context.settings.max_result_bytes or MAX_RESULT

    def _new_token(self, key: WorkerKey) -> str:
        return self._channel.tokens.token(key)

    async def _live_row(self, key: WorkerKey) -> Workload:
        """Return the job of a worker whose attempt is not over; 410 otherwise, which ends the worker.

        A replica without its database knows neither, and could not tell the leader that the worker reported.
        """
        if self._channel.stale:
            raise busy("The database does not answer this replica: ask another one.", "database_unavailable", 503, 1.0)
        row = await self._context.world.row(key[0])
        if not _is_of(row, key):  # a replica may know of an attempt later than its worker
            row = await self._context.call(self._context.store.workload, key[0])
        if row is None or not _is_of(row, key):
            message = f"Attempt {key[1]} of {key[0]} is over: end the worker, nothing more is taken from it."
            raise refuse(message, "attempt_ended", 410)
        return row


def _is_of(row: Workload | None, key: WorkerKey) -> bool:
    return row is not None and row.kind == "job" and row.attempt == key[1] and row.state in ADMITTED


def _first(chunks: Iterator[bytes]) -> bytes | FileUnreadable | FilesUnavailable:
    """Return the first chunk, or why there is none."""
    try:
        return next(chunks, b"")
    except (FileUnreadable, FilesUnavailable) as error:
        return error


def _start(row: Workload, key: WorkerKey, files: list[WorkerFile], lost_after: float, token: str) -> WorkerStart:
    return WorkerStart(
        workload=row.id,
        attempt=row.attempt,
        worker=key[2],
        gang=len(row.placement),
        name=row.name,
        team=row.team or "",
        profile=row.profile,
        gpus=sum(sum(place.milli) for place in row.placement) / 1000,
        command=list(row.command),
        env=dict(row.env),
        files=files,
        grace=row.grace,
        signal=row.signal,
        time_limit=row.time_limit,
        log_limit=LOG_LIMIT,
        step=row.checkpoint_step,
        saved_at=row.checkpoint_at,
        heartbeat=HEARTBEAT,
        lost_after=lost_after,
        token=token,
    )


def _orders(
    row: Workload, gang_stopped_at: float | None, failed: tuple[int, int] | None, *, stop: bool
) -> WorkerOrders:
    """Return what a worker has to do; where something else stopped one of a gang, the others save and end, too.

    `failed`: the worker of the gang that failed after the notice, and its exit code.
    """
    if stop:
        return WorkerOrders(known="stop", stop=True)
    notice = row.notice
    if notice is None and gang_stopped_at is not None:
        notice = Notice("another worker of the gang was stopped", gang_stopped_at, gang_stopped_at + row.grace)
    if notice is None:
        return WorkerOrders(known="")
    orders = WorkerOrders(known=f"notice {notice.deadline}", notice=WorkerNotice(**notice.for_launcher()))
    if failed is not None:
        orders.known += f", {failed[0]} failed"
        orders.failed = FailedWorker(worker=failed[0], exit_code=failed[1])
    return orders
