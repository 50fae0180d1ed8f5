"""Open the files of an attempt, in whose folder the job may have put anything: nothing there makes the launcher wait.

A pipe, a device, a folder or a link in the place of a file is no file, and what is larger than a report is none. What
is written is always a new file.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

MAX_SIZE = 2**20
"""Bytes of a report; as many as the service reads"""
MAX_DIGITS = 30
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MAX_TRIES = 3


def open_file(path: str, links: bool = False) -> BinaryIO:
    """Open a file for reading; OSError for what is none, and for a link, unless `links` may be followed."""
    descriptor = os.open(path, READ | (0 if links else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def create_file(path: str, mode: int = 0o666) -> int:
    """Return the descriptor of a new file to append to; whatever had its name is removed, or renamed."""
    for _ in range(MAX_TRIES):
        try:
            return os.open(path, CREATE, mode)
        except FileExistsError:
            _clear_path(path)
    return os.open(path, CREATE, mode)


def write_whole(descriptor: int, data: bytes) -> None:
    """Write all of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_json(path: str, value: dict[str, Any]) -> None:
    """Write a JSON file atomically: a reader finds the old or the new content."""
    temporary = f"{path}.{os.getpid()}"
    descriptor = create_file(temporary)
    try:
        write_whole(descriptor, json.dumps(value).encode())
    finally:
        os.close(descriptor)
    try:
        os.replace(temporary, path)
    except IsADirectoryError:
        _clear_path(path)
        os.replace(temporary, path)


def read_json(path: str) -> dict[str, Any]:
    """Return the object of a JSON file; empty if there is none, or one that cannot be understood."""
    try:
        with open_file(path) as file:
            data = file.read(MAX_SIZE + 1)
        if len(data) > MAX_SIZE:
            return {}
        value = json.loads(data.decode("utf-8"), parse_int=_whole, parse_constant=lambda name: None)
    except (OSError, ValueError, RecursionError, MemoryError):
        return {}
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        return None
    return float(value)


def seconds_between(value: Any, minimum: float, maximum: float) -> float | None:
    """Return a duration that is not shorter or longer than makes sense; None for what is none."""
    given = number(value)
    return min(maximum, max(minimum, given)) if given is not None and given > 0 else None


def exact_integer(value: Any) -> int | None:
    """Return an integer that every reader of JSON keeps exactly; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**53:
        return None
    return value


def _whole(digits: str) -> int | None:
    return int(digits) if len(digits) <= MAX_DIGITS else None


def _clear_path(path: str) -> None:
    """Remove what has a name; a folder, which may be large, is renamed."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, f"{path}.{os.urandom(4).hex()}.moved")
