"""Make an answer once for each version of the read model, however many requests wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from ...control.reads.read_model import ReadModel, ReadModels

T = TypeVar("T")


class LatestAnswer(Generic[T]):
    """The answer from the latest version of the read model that was requested.

    At most one is made at a time, and none is replaced by an older one. The versions of the read model themselves are
    not kept. An answer whose making failed is made again for the next request.
    """

    def __init__(self, models: ReadModels, make: Callable[[ReadModel], Awaitable[T]]) -> None:
        self._models = models
        self._make = make
        self._one = asyncio.Lock()
        self._made: tuple[int, T] | None = None
        """The version and the answer"""

    async def get(self) -> T:
        """Return an answer that has everything that was committed and observed before the call."""
        wanted = (await self._models.current()).version
        if self._made is None or self._made[0] < wanted:
            async with self._one:
                if self._made is None or self._made[0] < wanted:
                    model = await self._models.current()
                    self._made = model.version, await self._make(model)
        return self._made[1]
