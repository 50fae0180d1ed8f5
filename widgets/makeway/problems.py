"""Define the errors that notebooks show as one sentence instead of a traceback."""

from __future__ import annotations

from makeway_api.errors import MakewayError


class Refused(MakewayError):
    """A request that cannot be carried out; notebooks show the message alone."""

    def __init__(self, message: str, *, code: str = "refused", status: int = 400) -> None:
        super().__init__(message, code=code, status=status)

    def _render_traceback_(self) -> list[str]:
        return [f"Makeway: {self.message}"]


class Interrupted(KeyboardInterrupt):
    """The user interrupted what a cell or command was doing; notebooks show the message alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class WatchStopped(Interrupted):
    """The user stopped watching; the job that was watched continues."""


class CellStopped(Interrupted):
    """The user stopped a cell that ran as a process of this notebook; the process has ended."""


class StillRunning(TimeoutError):
    """A job has not ended within the timeout."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class JobError(RuntimeError):
    """A job that failed: the exception of its code, with the traceback from the job."""

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
