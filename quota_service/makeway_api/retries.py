"""Repeat submissions that got no answer: their Idempotency-Key makes sure that each is carried out once."""

from __future__ import annotations

from typing import Any

from tenacity import RetryCallState, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random_exponential

from .errors import MakewayError

AWAY = frozenset({502, 503, 504})
"""The statuses of a service, or of a proxy before it, that can do the same request later; also of no connection."""

ATTEMPTS = 5
PATIENCE = 30.0
"""Seconds after which no further attempt is made."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 4.0
"""Seconds; random below these bounds, so that a thousand kernels do not return at once to a service that restarts."""


def retries() -> dict[str, Any]:
    """Return the settings for tenacity: repeat while the service is unavailable, then raise its last answer."""
    return {
        "retry": retry_if_exception(lambda error: isinstance(error, MakewayError) and error.status in AWAY),
        "wait": _pause,
        "stop": stop_after_attempt(ATTEMPTS) | stop_after_delay(PATIENCE),
        "reraise": True,
    }


def _pause(state: RetryCallState) -> float:
    """Return the seconds before the next attempt: random and growing, at least what Retry-After asked for."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.numbers.get("retry_after", 0) if isinstance(error, MakewayError) else 0
    least = min(float(asked), LONGEST_PAUSE) if isinstance(asked, int | float) else 0.0
    return least + wait_random_exponential(multiplier=FIRST_PAUSE, max=LONGEST_PAUSE)(state)
