"""What went wrong, said in one sentence instead of a traceback."""

from __future__ import annotations

from makeway_api.errors import MakewayError


class Refused(MakewayError):
    """Something that was asked for cannot be done; notebooks show the sentence alone."""

    def __init__(self, message: str, *, code: str = "refused", status: int = 400) -> None:
        super().__init__(message, code=code, status=status)

    def _render_traceback_(self) -> list[str]:
        return [f"Makeway: {self.message}"]


class Left(KeyboardInterrupt):
    """You stopped watching; what you watched goes on."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class StillRunning(TimeoutError):
    """A job has not ended in the time that somebody wanted to wait."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class JobError(RuntimeError):
    """A job did not end well: the exception of its code, with the traceback as the job saw it."""

    def __init__(self, job: str, type: str, message: str, traceback: str = "") -> None:
        super().__init__(f"{type}: {message}" if message else type)
        self.job = job
        self.type = type
        self.message = message
        self.traceback = traceback

    def _render_traceback_(self) -> list[str]:
        if not self.traceback:
            return [str(self)]
        return [f"Job {self.job} ended with an exception:", *self.traceback.rstrip().splitlines()]
