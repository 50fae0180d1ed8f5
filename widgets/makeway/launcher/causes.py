"""Write in words why a command could not start, and how it ended."""

from __future__ import annotations

import errno
import signal


def reason_of(error: OSError) -> str:
    """Return why a program or a file could not be used."""
    name = f"{error.filename!r}" if error.filename else ""
    known: dict[int | None, tuple[str, str]] = {
        errno.ENOENT: ("no such file or program", ""),
        errno.EACCES: ("not allowed to run or open", ""),
        errno.ENOEXEC: ("not a program", " (a script needs a first line like #!/bin/sh)"),
        errno.ENOSPC: ("the disk is full", ""),
    }
    what, hint = known.get(error.errno, ((error.strerror or str(error)).lower(), ""))
    return " ".join(filter(None, [what, name])) + hint


def end_of(code: int) -> str:
    """Return an exit code, negative for a signal, in words."""
    if code >= 0:
        return f"exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"
