"""Delete pods: those of an attempt that ends, and beside all else those of a start that was refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from makeway_api.pod_labels import INSTANCE

from ..base import Key
from .client import ApiClient, ApiRefusal, together

log = logging.getLogger("makeway.kubernetes")

AT_ONCE = 16
"""Pods that are deleted at the same time: fewer than the client has connections."""


class Removals:
    """Deletes the pods of one installation in one namespace, some at a time."""

    def __init__(self, client: ApiClient, pods: str, instance: str, may_act: Callable[[], bool]) -> None:
        """`pods` is the path of the namespace's pods; `may_act`: whether this replica still leads."""
        self._client = client
        self._pods = pods
        self._instance = instance
        self._may_act = may_act
        self._room = asyncio.Semaphore(AT_ONCE)
        self._undoing: dict[Key, asyncio.Task[None]] = {}

    async def delete(self, pods: Iterable[tuple[str, str, int | None]], check: Callable[[], None]) -> None:
        """Delete pods by name, UID and grace in seconds (None: their own); `check` raises where no more is asked."""

        async def one(name: str, uid: str, grace: int | None) -> None:
            async with self._room:
                check()
                await self._client.delete(f"{self._pods}/{name}", uid=uid, grace=grace)

        await together([one(*pod) for pod in pods])

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
        for task in self._undoing.values():
            task.cancel()

    async def close(self) -> None:
        """Stop deleting; a later start finds what is left."""
        tasks = list(self._undoing.values())
        self.drop()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _undo(self, key: Key, names: Sequence[str]) -> None:
        outcomes = await asyncio.gather(*(self._undo_one(name) for name in names), return_exceptions=True)
        failed = [one for one in outcomes if isinstance(one, Exception)]
        if failed:
            log.warning("%s pods of attempt %s of %s could not be deleted: %s", len(failed), key[1], key[0], failed[0])
        else:
            log.info("No pods of attempt %s of %s are left: it was not started", key[1], key[0])

    async def _undo_one(self, name: str) -> None:
        async with self._room:
            path = f"{self._pods}/{name}"
            try:
                found = await self._client.get(path)
            except ApiRefusal as refusal:
                if refusal.status == 404:
                    return
                raise
            ours = (found["metadata"].get("labels") or {}).get(INSTANCE) == self._instance
            if ours and self._may_act():  # a later leader goes on with what is there
                await self._client.delete(path, uid=found["metadata"]["uid"], grace=0)
