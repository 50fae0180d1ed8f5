"""Make the errors of refused requests."""

from __future__ import annotations

from makeway_api.errors import MakewayError


def refuse(message: str, code: str, status: int = 400, **numbers: object) -> MakewayError:
    """Make the error of a request that cannot be done; `numbers` are those of the sentence."""
    return MakewayError(message, code=code, status=status, numbers=numbers)


def busy(message: str, code: str, status: int, retry_after: float, **numbers: object) -> MakewayError:
    """Make the error of a request that can be done later: `retry_after` seconds become the header Retry-After."""
    return MakewayError(
        message, code=code, status=status, numbers={**numbers, "retry_after": max(1, round(retry_after))}
    )
