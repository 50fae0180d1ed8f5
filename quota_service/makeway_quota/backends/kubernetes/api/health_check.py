"""Find out within seconds whether one cluster's API server answers this process, also when nothing else is asked of it.

A watch on which nothing arrives says nothing: a quiet cluster and a network that swallows packets look the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from .client import ApiClient, ApiStatusError, ApiUnreachable

log = logging.getLogger("makeway.kubernetes")

PATH = "/version"
"""Answered from memory, to everyone who has an account."""


@dataclass(frozen=True, slots=True)
class HealthCheckTiming:
    """Times of a health check, in seconds, and the failures in a row after which the server counts as silent."""

    interval: float = 1.0
    timeout: float = 4.0
    """for which an answer is waited; the next one is requested meanwhile, on a connection of its own"""
    failures: int = 2


HEALTH_CHECK_TIMING = HealthCheckTiming()


class HealthCheck:
    """A request that is repeated; any answer of the API server counts, a refusal too."""

    def __init__(
        self, client: ApiClient, changed: Callable[[bool], None], timing: HealthCheckTiming = HEALTH_CHECK_TIMING
    ) -> None:
        """Call `changed` with whether the API server answers, whenever that is no longer as it was."""
        self.answers = True
        self._client = client
        self._changed = changed
        self._timing = timing
        self._failures_in_a_row = 0

    async def run(self) -> None:
        """Request signs of life until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._request())
                await asyncio.sleep(self._timing.interval)

    async def _request(self) -> None:
        """Request one sign of life, and note whether it came."""
        answered = await self._ask()
        self._failures_in_a_row = 0 if answered else self._failures_in_a_row + 1
        answers = answered or (self.answers and self._failures_in_a_row < self._timing.failures)
        if answers != self.answers:
            self.answers = answers
            log.warning("The Kubernetes API server %s", "answers again" if answers else "does not answer")
            self._changed(answers)

    async def _ask(self) -> bool:
        try:
            async with asyncio.timeout(self._timing.timeout):
                await self._client.get(PATH)
        except ApiStatusError as refusal:
            return refusal.status < 500
        except (ApiUnreachable, TimeoutError):
            return False
        except Exception:  # such as a token that is no text: it may be written again
            log.exception("No sign of life could be requested of the Kubernetes API server")
            return False
        return True
