"""Define the errors of the API: a code for programs, a sentence for users."""

from __future__ import annotations

from typing import Any

from .models import Problem


class MakewayError(Exception):
    """A refusal: a code for programs, one sentence for users, and the numbers in it."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "error",
        status: int = 400,
        numbers: dict[str, Any] | None = None,
        errors: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.numbers = numbers or {}
        self.errors = errors or []

    def problem(self) -> Problem:
        """Return the error as problem+json."""
        title = self.code.replace("_", " ").capitalize()
        return Problem(
            title=title,
            status=self.status,
            code=self.code,
            detail=self.message,
            numbers=self.numbers,
            errors=self.errors,
        )

    @classmethod
    def of(cls, problem: Problem) -> MakewayError:
        """Return the error that a problem+json answer describes."""
        return cls(
            problem.detail, code=problem.code, status=problem.status, numbers=problem.numbers, errors=problem.errors
        )


class Unreachable(MakewayError):
    """The service does not answer."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(
            f"Makeway's quota service at {url} does not answer ({why}). "
            "Running jobs are not affected; try again shortly.",
            code="unreachable",
            status=503,
        )
