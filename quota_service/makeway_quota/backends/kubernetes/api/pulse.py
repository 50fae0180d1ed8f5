"""Find out within seconds whether one cluster's API server answers this process, also when nothing else is asked of it.

A watch on which nothing arrives says nothing: a quiet cluster and a network that swallows packets look the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from .client import ApiClient, ApiRefusal, ApiUnreachable

log = logging.getLogger("makeway.kubernetes")

PATH = "/version"
"""Answered from memory, to everyone who has an account."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Times of a pulse, in seconds, and after how many answers in a row that are missing there is none."""

    every: float = 1.0
    answer: float = 4.0
    """for which an answer is waited; the next one is requested meanwhile, on a connection of its own"""
    missing: int = 2


BEAT = Beat()


class Pulse:
    """A sign of life that is requested again and again; any answer of the API server is one, a refusal too."""

    def __init__(self, client: ApiClient, changed: Callable[[bool], None], beat: Beat = BEAT) -> None:
        """Call `changed` with whether the API server answers, whenever that is no longer as it was."""
        self.answers = True
        self._client = client
        self._changed = changed
        self._beat = beat
        self._missing = 0

    async def run(self) -> None:
        """Request signs of life until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._request())
                await asyncio.sleep(self._beat.every)

    async def _request(self) -> None:
        """Request one sign of life, and note whether it came."""
        answered = await self._ask()
        self._missing = 0 if answered else self._missing + 1
        answers = answered or (self.answers and self._missing < self._beat.missing)
        if answers != self.answers:
            self.answers = answers
            log.warning("The Kubernetes API server %s", "answers again" if answers else "does not answer")
            self._changed(answers)

    async def _ask(self) -> bool:
        try:
            async with asyncio.timeout(self._beat.answer):
                await self._client.get(PATH)
        except ApiRefusal as refusal:
            return refusal.status < 500
        except (ApiUnreachable, TimeoutError):
            return False
        except Exception:  # such as a token that is no text: it may be written again
            log.exception("No sign of life could be requested of the Kubernetes API server")
            return False
        return True
