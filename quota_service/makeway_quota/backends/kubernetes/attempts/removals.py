"""Delete pods: those of an attempt that ends, and beside all else those of a start that was refused.

A pod that stays although it was deleted, as on a node that does not answer or for a finalizer, is deleted again and
again, less and less often, as long as it is listed; how often is kept for those who have to look at it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from makeway_api.pods import INSTANCE

from ...base import BackendError, Key
from ..api.client import ApiClient, ApiStatusError, ApiUnreachable, run_all

log = logging.getLogger("makeway.kubernetes")

AT_ONCE = 16
"""Pods that are deleted at the same time: fewer than the client has connections."""
FIRST_PAUSE, MAX_PAUSE = 15.0, 300.0
"""Seconds beyond its grace after which a pod that stays is deleted again, which double from try to try"""
USUAL_GRACE = 30
"""Seconds of grace of a pod that gets its own, as Kubernetes gives them by default"""


@dataclass(slots=True)
class PodRemoval:
    """A pod that was deleted and may still be there; `next_at` in monotonic seconds."""

    name: str
    uid: str
    grace: int | None
    tries: int = 0
    next_at: float = 0.0
    problem: str = ""
    """why the last try was refused"""

    def try_again(self, now: float) -> None:
        """Count a try, and make the next one wait for the grace, and twice as long beyond it as after the last one."""
        self.tries += 1
        pause = min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(self.tries - 1, 10))
        self.next_at = now + pause + (USUAL_GRACE if self.grace is None else self.grace)


class Removals:
    """Deletes the pods of one installation in one namespace, some at a time."""

    def __init__(
        self,
        client: ApiClient,
        pods: str,
        instance: str,
        may_act: Callable[[], bool],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pods` is the path of the namespace's pods; `may_act`: whether this replica still leads."""
        self._client = client
        self._pods = pods
        self._instance = instance
        self._may_act = may_act
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._undoing: dict[Key, asyncio.Task[None]] = {}
        self._monotonic = monotonic
        self._removals: dict[str, PodRemoval] = {}
        self._repeating: asyncio.Task[None] | None = None

    async def delete(self, pods: Iterable[tuple[str, str, int | None]], check: Callable[[], None]) -> None:
        """Delete pods by name, UID and grace in seconds (None: their own); `check` raises where no more is asked."""

        async def delete_pod(name: str, uid: str, grace: int | None) -> None:
            removal = self._removals.get(name)
            if removal is None or removal.uid != uid:
                removal = self._removals[name] = PodRemoval(name, uid, grace)
            async with self._slots:
                check()
                removal.try_again(self._monotonic())
                try:
                    await self._client.delete(f"{self._pods}/{name}", uid=uid, grace=grace)
                    removal.problem = ""
                except (ApiStatusError, ApiUnreachable) as error:
                    removal.problem = str(error)
                    raise

        await run_all([delete_pod(*pod) for pod in pods])

    def asked(self, names: Iterable[str]) -> list[PodRemoval]:
        """Return those of these pods that were deleted and may still be there."""
        return [self._removals[name] for name in names if name in self._removals]

    def retry_due(
        self, uid_of: Callable[[str], str | None], is_excepted: Callable[[str], bool], check: Callable[[], None]
    ) -> None:
        """Forget the pods that are listed no more, and begin to delete those again that stay and are due.

        `uid_of` returns the UID of a listed pod; `is_excepted`: whether another part deletes a pod again.
        """
        self._removals = {name: removal for name, removal in self._removals.items() if uid_of(name) == removal.uid}
        now = self._monotonic()
        due = [item for item in self._removals.values() if now >= item.next_at and not is_excepted(item.name)]
        if due and self._repeating is None and self._may_act():
            self._repeating = asyncio.create_task(self._repeat(due, check))

    async def _repeat(self, due: Sequence[PodRemoval], check: Callable[[], None]) -> None:
        try:
            for removal in due:
                log.warning("The pod %s is still there after %s tries to delete it", removal.name, removal.tries)
            await self.delete([(removal.name, removal.uid, removal.grace) for removal in due], check)
        except (ApiStatusError, ApiUnreachable, BackendError) as error:
            log.warning("Pods that stay could not be deleted again: %s", error)
        finally:
            self._repeating = None

    def undo(self, key: Key, names: Sequence[str]) -> None:
        """Begin to delete what there is of an attempt that could not be started as a whole: a cycle does not wait."""
        if key not in self._undoing:
            task = self._undoing[key] = asyncio.create_task(self._undo(key, names))
            task.add_done_callback(lambda _: self._undoing.pop(key, None))

    def undoing(self, key: Key) -> bool:
        """Whether pods of an attempt are being deleted after a start that was refused."""
        return key in self._undoing

    def drop(self) -> None:
        """Stop deleting what an earlier term began: the pods of these names may be those of another leader."""
        for task in self._tasks():
            task.cancel()
        self._removals.clear()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*self._undoing.values(), *([self._repeating] if self._repeating else ())]

    async def close(self) -> None:
        """Stop deleting; a later start finds what is left."""
        tasks = self._tasks()
        self.drop()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _undo(self, key: Key, names: Sequence[str]) -> None:
        outcomes = await asyncio.gather(*(self._undo_pod(name) for name in names), return_exceptions=True)
        failed = [one for one in outcomes if isinstance(one, Exception)]
        if failed:
            log.warning("%s pods of attempt %s of %s could not be deleted: %s", len(failed), key[1], key[0], failed[0])
        else:
            log.info("No pods of attempt %s of %s are left: it was not started", key[1], key[0])

    async def _undo_pod(self, name: str) -> None:
        async with self._slots:
            path = f"{self._pods}/{name}"
            try:
                result = await self._client.get(path)
            except ApiStatusError as refusal:
                if refusal.status == 404:
                    return
                raise
            ours = (result["metadata"].get("labels") or {}).get(INSTANCE) == self._instance
            if ours and self._may_act():  # a later leader goes on with what is there
                await self._client.delete(path, uid=result["metadata"]["uid"], grace=0)
