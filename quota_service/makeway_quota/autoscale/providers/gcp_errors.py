"""Map errors of Compute Engine to what they mean for a call: out of stock, not allowed, too many calls, or not known.

An error is in the answer of a call (HTTP), or later in its operation. A call counts as refused where it was certainly
not done: an error of the server (5xx) without a code that is known here, and a call without an answer, may be done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from google.api_core.exceptions import Conflict, GoogleAPICallError, NotFound
from google.auth.exceptions import GoogleAuthError, TransportError
from requests.exceptions import RequestException

from ..provider import CallOutcomeUnknown, Denied, InvalidLaunch, ProviderError, QuotaReached, StockOut, Throttled

MAX_MESSAGE = 300
STOCK_OUT = frozenset(
    {
        "GPU_STOCKOUT",
        "REGION_RESOURCE_POOL_EXHAUSTED",
        "RESOURCE_POOL_EXHAUSTED",
        "STOCKOUT",
        "UNSUPPORTED_OPERATION",  # what a spot machine gets that is taken back while it is made
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "insufficientCapacity",
    }
)
QUOTA = frozenset(
    {
        "IP_SPACE_EXHAUSTED",
        "IP_SPACE_EXHAUSTED_WITH_DETAILS",
        "LIMIT_EXCEEDED",
        "QUOTA_EXCEEDED",
        "limitExceeded",
        "quotaExceeded",
    }
)
THROTTLED = frozenset(
    {
        "RATE_LIMIT_EXCEEDED",
        "RESOURCE_OPERATION_RATE_EXCEEDED",
        "concurrentLimitExceeded",
        "rateLimitExceeded",
        "resourceOperationRateExceeded",
        "userRateLimitExceeded",
    }
)
DENIED = frozenset({"PERMISSIONS_ERROR", "accessNotConfigured", "authError", "forbidden"})
UNKNOWN = frozenset({"RESOURCE_NOT_READY", "resourceNotReady", "RESOURCE_IN_USE", "OPERATION_CANCELED_BY_USER"})
"""Refusals after which an instance may exist, or may be ended yet"""
TAKEN = frozenset({"RESOURCE_ALREADY_EXISTS", "alreadyExists"})
INTERNAL = ("INTERNAL", "BACKEND_ERROR", "TIMEOUT", "SERVICE_UNAVAILABLE")
"""How the codes of failed operations begin that say nothing of what was done"""
NOT_IN_ZONE = "does not exist in zone"
KINDS = ("/machineTypes/", "/acceleratorTypes/")


class NoSuchInstance(InvalidLaunch):
    """There is no instance of that name in that zone."""


class NameTaken(CallOutcomeUnknown):
    """An instance has that name already: that of an earlier call, or another one."""


@contextmanager
def as_provider_errors(action: str) -> Iterator[None]:
    """Raise a ProviderError instead of what Google's library raises. `action`: the call, as Compute Engine names it."""
    try:
        yield
    except GoogleAPICallError as error:
        raise _answered(error)(f"{action}: {_text(error)}") from error
    except TransportError as error:
        raise CallOutcomeUnknown(f"{action}: no answer when logging in: {str(error)[:MAX_MESSAGE]}") from error
    except GoogleAuthError as error:
        lost = bool(getattr(error, "retryable", False))
        raise (CallOutcomeUnknown if lost else Denied)(f"{action}: {str(error)[:MAX_MESSAGE]}") from error
    except RequestException as error:
        raise CallOutcomeUnknown(f"{action}: no answer: {str(error)[:MAX_MESSAGE]}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a proxy's own page
        raise CallOutcomeUnknown(f"{action}: the answer cannot be read: {str(error)[:MAX_MESSAGE]}") from error


def failure_of(operation: Any, action: str) -> ProviderError | None:
    """Return why an operation that is done has failed; None if it has not."""
    errors = [(one.code, one.message) for one in operation.error.errors]
    status = int(operation.http_error_status_code or 0)
    if not errors and not status:
        return None
    codes = [code for code, _ in errors]
    meaning = _meant(codes, " ".join(message for _, message in errors))
    if meaning is None:
        unknown = not codes or any(code.startswith(INTERNAL) for code in codes)
        meaning = CallOutcomeUnknown if unknown else InvalidLaunch
    texts = [f"{code}: {message[:MAX_MESSAGE]}" for code, message in errors]
    return meaning(f"{action}: {'; '.join(texts) or operation.http_error_message or status}")


def _answered(error: GoogleAPICallError) -> type[ProviderError]:
    """Return what an answer of HTTP means."""
    status = int(error.code or 0)
    meaning = _meant(_reasons(error), str(error.message))
    if meaning is not None:
        return meaning
    if status == 429:
        return Throttled
    if status in (401, 403):
        return Denied
    if isinstance(error, Conflict):
        return NameTaken
    if isinstance(error, NotFound) and "/instances/" in str(error.message).partition("The resource ")[2]:
        return NoSuchInstance
    return InvalidLaunch if 400 <= status < 500 and status != 408 else CallOutcomeUnknown


def _meant(codes: Iterable[str], message: str) -> type[ProviderError] | None:
    known = list(codes)
    for group, meaning in (
        (STOCK_OUT, StockOut),
        (THROTTLED, Throttled),
        (QUOTA, QuotaReached),
        (DENIED, Denied),
        (UNKNOWN, CallOutcomeUnknown),
        (TAKEN, NameTaken),
    ):
        if group.intersection(known):
            return meaning
    missing = message.partition("The resource ")[2]
    no_type = "was not found" in missing and any(kind in missing for kind in KINDS)
    return StockOut if NOT_IN_ZONE in message or no_type else None  # other zones may have the type


def _reasons(error: GoogleAPICallError) -> list[str]:
    found = [one.get("reason", "") for one in error.errors or () if isinstance(one, dict)]
    return [*found, *([error.reason] if error.reason else [])]


def _text(error: GoogleAPICallError) -> str:
    """Return reasons and message of an error, without the address of the call."""
    message = str(error.message)
    if message.startswith(("GET ", "POST ", "DELETE ")):
        message = message.partition(": ")[2]
    reasons = " ".join(dict.fromkeys(_reasons(error))) or str(error.code)
    return f"{reasons}: {message[:MAX_MESSAGE]}"
