"""Make the errors of refused requests."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from makeway_api.errors import MakewayError
from makeway_api.models import PolicyIssue
from makeway_api.quantities import count

from ..backends.base import BackendUnavailable
from ..policy import Issue, PolicyInvalid
from ..store.errors import (
    Conflict,
    KeyReused,
    NotLeading,
    OutcomeUnknown,
    Removed,
    StorageLimitExceeded,
    StoreError,
    TooMany,
)

log = logging.getLogger("makeway.requests")

MAX_NAMED = 5
"""Jobs that a sentence names"""
DATABASE_PAUSE = 3.0
"""Seconds after which a request may be repeated that the database did not answer."""
BACKEND_PAUSE = 5.0
"""Seconds after which a request may be repeated that one of several backends did not answer."""


def refuse(message: str, code: str, status: int = 400, **numbers: object) -> MakewayError:
    """Make the error of a request that cannot be done; `numbers` are those of the sentence."""
    return MakewayError(message, code=code, status=status, numbers=numbers)


def wire_issues(issues: Iterable[Issue]) -> list[PolicyIssue]:
    """Return what is wrong with a document as the API shows it."""
    return [PolicyIssue(file=i.file, line=i.line, where=i.where, message=i.message) for i in issues]


def invalid_document(invalid: PolicyInvalid, what: str, code: str, command: str) -> MakewayError:
    """Make the error of a document with mistakes: the first of them, and the command that lists all."""
    issues = wire_issues(invalid.issues)
    first = issues[0]
    where = "".join(f"{part}: " for part in (first.line and f"line {first.line}", first.where) if part)
    more = "" if len(issues) == 1 else f" (`{command}` lists all.)"
    return MakewayError(
        f"{what} has {count(len(issues), 'mistake')}; {where}{first.message}.{more}",
        code=code,
        status=422,
        errors=[issue.model_dump() for issue in issues],
    )


def removed(what: str, days: float) -> MakewayError:
    """Make the error of a question for a workload that was removed `days` after its end."""
    message = (
        f"{what} was deleted, or was removed {days:g} days after its end, with its log, its result and its checkpoints."
    )
    return refuse(message, "removed", 410, days=days)


def busy(message: str, code: str, status: int, retry_after: float, **numbers: object) -> MakewayError:
    """Make the error of a request that can be done later: `retry_after` seconds become the header Retry-After."""
    return MakewayError(
        message, code=code, status=status, numbers={**numbers, "retry_after": max(1, round(retry_after))}
    )


@contextmanager
def database_errors() -> Iterator[None]:
    """Turn a database that does not answer into a refusal (503) that can be repeated; other errors pass through."""
    try:
        yield
    except (Conflict, TooMany, StorageLimitExceeded, NotLeading):
        raise
    except KeyReused as error:
        message = (
            "This Idempotency-Key was used for another submission: repeat a request with the same content, and give "
            "each new submission a key of its own."
        )
        raise refuse(message, "key_reused", 422) from error
    except Removed as error:
        message = f"The submission with this Idempotency-Key was taken as {error.workload}, which was removed since."
        raise refuse(message, "removed", 410, workload=error.workload) from error
    except OutcomeUnknown as error:
        log.warning("A request was answered without its outcome: %s", error)
        message = (
            "Makeway's database went silent while this was written, so it is not known yet whether it counts. "
            "Look before you repeat it; with the same Idempotency-Key a submission can be repeated at any time."
        )
        raise busy(message, "outcome_unknown", 503, DATABASE_PAUSE) from error
    except StoreError as error:
        log.warning("A request could not use the database: %s", error)
        message = "Makeway's database does not answer, so nothing was changed. Running work goes on; try again shortly."
        raise busy(message, "database_unavailable", 503, DATABASE_PAUSE) from error


@contextmanager
def backend_errors() -> Iterator[None]:
    """Turn a backend that cannot be reached into a refusal (503) that can be repeated; other errors pass through."""
    try:
        yield
    except BackendUnavailable as error:
        message = f"What this job wrote cannot be reached at the moment: {error}. Try again shortly."
        raise busy(message, "backend_unavailable", 503, BACKEND_PAUSE) from error


def some_failed(done: str, failed: Mapping[str, Exception]) -> MakewayError:
    """Return the error of a request that was carried out (`done`: cancelled, deleted) but for some jobs."""
    for id, error in failed.items():
        log.error("The job %s could not be %s", id, done, exc_info=error)
    jobs, more = ", ".join(list(failed)[:MAX_NAMED]), " and others" if len(failed) > MAX_NAMED else ""
    message = (
        f"{count(len(failed), 'job')} could not be {done} ({jobs}{more}), and all others were. "
        "The log of the service has the reason: repeat the request once that is fixed."
    )
    return refuse(message, "some_failed", 500)
