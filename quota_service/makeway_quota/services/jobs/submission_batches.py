"""Write submissions in batches: those that arrive within a few milliseconds of each other go into one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from ...quarantine import concerns_all
from ...store.records import (
    ByteLimits,
    NewDecision,
    NewWorkload,
    SharedFiles,
    Submission,
    SubmissionKey,
    Workload,
)
from ...store.store import Store

MAX_BATCH = 200
"""Submissions in one transaction, so that none waits long for it."""

MAX_BATCH_FILES = 10_000
"""Rows of files in one transaction, or those of a single submission: no other write is possible meanwhile."""

MIN_INTERVAL = 0.008
"""Seconds from the beginning of one transaction to the next, at least. One costs as much as a few submissions; a
client that waits for each answer before it sends the next submission hardly notices."""

MAX_WRITING_SHARE = 0.2
"""The part of the time that writing may take: one that takes 4 ms, on a busy machine, starts every 20 ms and holds
what arrived in between."""

MAX_INTERVAL = 0.02
"""Seconds from the beginning of one transaction to the next, at most, unless one takes longer."""

Files = Sequence[tuple[str, bytes, bool]] | SharedFiles


class SubmissionBatcher:
    """Every submission is in the store before it is answered; one that cannot be taken hinders no other."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._thread: Executor = ThreadPoolExecutor(1, "submissions")
        self._waiting: list[tuple[Submission, asyncio.Future[Workload]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._not_before = 0.0

    async def submit(
        self,
        new: NewWorkload,
        files: Files = (),
        decision: NewDecision | None = None,
        key: SubmissionKey | None = None,
        kept: ByteLimits | None = None,
    ) -> Workload:
        """Write a submission, or return what its key submitted before; raises what `Store.add_workload` would."""
        answer: asyncio.Future[Workload] = asyncio.get_running_loop().create_future()
        self._waiting.append((Submission(new, files, decision, key=key, kept=kept), answer))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return await answer

    async def _write_batch(self, submissions: Sequence[Submission]) -> list[Workload | Exception]:
        """Write submissions together; where that fails by one of them, the others are written without it."""
        add = partial(self._store.add_workloads, submissions, now=self._clock())
        try:
            return [*await asyncio.get_running_loop().run_in_executor(self._thread, add)]
        except Exception as error:
            if len(submissions) < 2 or concerns_all(error):
                return [error] * len(submissions)
        middle = len(submissions) // 2
        return [*await self._write_batch(submissions[:middle]), *await self._write_batch(submissions[middle:])]

    def close(self) -> None:
        """End the thread that writes."""
        self._thread.shutdown(wait=False)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            if (pause := self._not_before - loop.time()) > 0:
                await asyncio.sleep(pause)
            started_at = loop.time()
            end = batch_size([_file_count(submission) for submission, _ in self._waiting])
            batch, self._waiting = self._waiting[:end], self._waiting[end:]
            answers = await self._write_batch([submission for submission, _ in batch])
            self._not_before = started_at + batch_interval(loop.time() - started_at)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():  # the request was cancelled; the submission stands
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)


def _file_count(submission: Submission) -> int:
    files = submission.files
    return files.count if isinstance(files, SharedFiles) else len(files)


def batch_size(file_counts: Sequence[int]) -> int:
    """Return how many of the first submissions, each with so many files, one transaction writes: one at least."""
    total = 0
    for index, count in enumerate(file_counts[:MAX_BATCH]):
        total += count
        if index and total > MAX_BATCH_FILES:
            return index
    return min(len(file_counts), MAX_BATCH)


def batch_interval(duration: float) -> float:
    """Return the seconds from the beginning of a transaction, which took so many seconds, to that of the next."""
    return max(MIN_INTERVAL, min(MAX_INTERVAL, duration / MAX_WRITING_SHARE))
