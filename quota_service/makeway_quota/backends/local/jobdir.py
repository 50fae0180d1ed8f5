"""Read and write the files of a job without trusting the job's owner.

`jobs/ID/` belongs to the job's account (mode 0700): `work/`, `checkpoints/`, and one `attempt-N/` each with log,
notice, progress and report. Only the launcher, as that account, creates things there; the service opens every
folder and file without following links and checks whose it is, so that no link can redirect it.
`spool/ID@N` belongs to the service: the order of an attempt that is not yet forgotten, with its files.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from ...values import File
from ..base import BackendError
from ..untrusted import NOT_JSON, UnreadableJson, read_table
from .folder_tree import remove_tree, tree_bytes
from .service_faults import raise_own
from .users import UnixAccount

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
ORDER = re.compile(r".+@[1-9]\d{0,8}")
MAX_REPORT = 256 * 1024
"""Bytes of a report that are read at most."""
MAX_ORDER_LINE = 64 * 2**20
"""Bytes of an order's line of JSON, with the command and the environment of its job"""
LOG_PIECE = re.compile(r"log(\.[1-9]\d{0,15})?")
MAX_LOG_PIECES = 64
"""Pieces of a log that are looked at; a launcher keeps three"""
OUTPUTS = ("result.pkl", "error.json")
"""What an attempt leaves beside its log"""


class Layout:
    """The state directory of the local backend."""

    def __init__(self, root: Path, *, shared: bool) -> None:
        """`shared`: other accounts must be able to reach their own job's folder (system users mode)."""
        self.root = root.resolve()
        self.jobs = self.root / "jobs"
        self.spool = self.root / "spool"
        self.programs = self.root / "bin"
        self._shared = shared
        self._mark = self.root / "local-backend.open"

    def make(self) -> None:
        """Create the missing folders and set their access rights."""
        self.root.mkdir(parents=True, exist_ok=True)
        through = 0o711 if self._shared else 0o700
        for folder, mode in ((self.jobs, through), (self.spool, 0o700), (self.programs, 0o755)):
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        for leftover in self.spool.glob(".*"):
            if time.time() - leftover.stat().st_mtime > 3600:
                leftover.unlink(missing_ok=True)
        if self._shared:
            self.root.chmod(0o711)

    def job(self, workload: str) -> Path:
        """Return a job's folder; BackendError for an id that is not a plain name."""
        if not NAME.fullmatch(workload):
            raise BackendError(f"{workload!r} is not a valid job id.")
        return self.jobs / workload

    def make_job(self, workload: str, account: UnixAccount) -> Path:
        """Create a job's folder for its account, or check that it is that account's."""
        folder = self.job(workload)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            if account.switch:
                os.chown(folder, account.uid, account.gid)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != account.uid:
            raise BackendError(f"The folder of job {workload} belongs to another account; nothing was started.")
        return folder

    def purge(self, workload: str) -> None:
        """Remove a job's folder with everything in it."""
        folder = self.job(workload)
        if folder.exists():
            remove_tree(folder)

    def folder_bytes(self, workload: str) -> int | None:
        """Return the bytes on disk of a job's folder, without following links; None where there is none."""
        folder = self.job(workload)
        return tree_bytes(folder) if folder.exists() else None

    def order(self, workload: str, attempt: int) -> Path:
        """Return the path of an attempt's order."""
        return self.spool / f"{workload}@{attempt}"

    def is_of_another(self, folder: Path, attempt: int) -> bool:
        """Whether a service of this account ordered an attempt in a job's folder of another state directory.

        What is only the job's counts for nothing: any process can name any folder.
        """
        try:
            order = (folder.parent.parent / self.spool.name / f"{folder.name}@{attempt}").resolve(strict=True)
            return order.parent != self.spool and order.stat().st_uid == os.geteuid()
        except (OSError, RuntimeError, ValueError):
            return False

    def orders(self) -> Iterator[Path]:
        """Return the paths of all orders that are not forgotten yet."""
        return (path for path in sorted(self.spool.iterdir()) if ORDER.fullmatch(path.name))

    def opened(self) -> bool:
        """Note that a service works here; return whether the one before was killed, rather than closed."""
        crashed = self._mark.exists()
        self._mark.touch(mode=0o600)
        return crashed

    def closed(self) -> None:
        """Note that the service was closed as it should be."""
        self._mark.unlink(missing_ok=True)

    def owner(self, workload: str) -> int:
        """Return the account that a job's folder belongs to, -1 where there is none."""
        try:
            return self.job(workload).lstat().st_uid
        except OSError:
            return -1


def beside(path: Path) -> Path:
    """Return an unused temporary name in the same folder, to be renamed to `path`."""
    return path.with_name(f".{path.name}.{os.urandom(6).hex()}")


def write_order(path: Path, header: Mapping[str, Any], files: Sequence[File]) -> None:
    """Write an order: one line of JSON, then the bytes of its files; all or nothing."""
    entries = [{"path": f.path, "size": len(f.data), "executable": f.executable} for f in files]
    temporary = beside(path)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(json.dumps({**header, "files": entries}).encode() + b"\n")
        for entry in files:
            file.write(entry.data)
    temporary.replace(path)


def read_order(path: Path) -> dict[str, Any] | None:
    """Read an order's line of JSON; None when it is gone, UnreadableJson when it is damaged, as by a loss of power."""
    try:
        result = path.lstat()
        if not stat.S_ISREG(result.st_mode):
            raise UnreadableJson("it is not a plain file")
        with path.open("rb") as file:
            header = json.loads(file.readline(min(result.st_size, MAX_ORDER_LINE)))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        raise UnreadableJson(NOT_JSON) from None
    needed = {"workload": str, "attempt": int, "uid": int}
    if not isinstance(header, dict) or not all(isinstance(header.get(key), kind) for key, kind in needed.items()):
        raise UnreadableJson("it is not an order")
    return header


def remove_order(path: Path) -> None:
    """Remove an order, or what is in its place."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            remove_tree(path)
        else:
            path.unlink()


def check_files(files: Sequence[File]) -> None:
    """Refuse files that would land outside of the working directory, or twice in the same place."""
    seen = set()
    for file in files:
        parts = file.path.split("/")
        if not file.path or file.path.startswith("/") or "\0" in file.path or {"", ".", ".."} & set(parts):
            raise BackendError(
                f"The file path {file.path!r} is not below the job's folder; use plain paths like data/a.txt."
            )
        if any(len(part.encode()) > 250 for part in parts):
            raise BackendError(f"The file name {file.path[:80]!r}… is too long: 250 bytes a name at most.")
        if file.path in seen:
            raise BackendError(f"The file {file.path!r} was given twice.")
        seen.add(file.path)


class AttemptFiles:
    """The folder `attempt-N` of one job, read and written on behalf of the service."""

    def __init__(self, layout: Layout, workload: str, attempt: int, uid: int, gid: int) -> None:
        self.job = layout.job(workload)
        self.number = attempt
        self.uid = uid
        self.gid = gid
        self.path = self.job / f"attempt-{attempt}"

    def stamp(self, name: str) -> tuple[int, int] | None:
        """Return a file's change time and size, to see whether it is new; None when there is none."""
        try:
            result = os.lstat(self.path / name)
        except OSError as error:
            raise_own(error)
            return None
        return result.st_mtime_ns, result.st_size

    def read(self, name: str, limit: int) -> bytes | None:
        """Read a file of the job's account; None when there is none, or when it is not a plain file of that account."""
        with self._open(name) as file:
            return None if file is None else file.read(limit)

    def part(self, name: str, offset: int, size: int) -> tuple[bytes, int] | None:
        """Return bytes of a file of the job's account from `offset`, and its size; None as for `read`."""
        with self._open(name) as file:
            if file is None:
                return None
            file.seek(offset)
            return file.read(size), os.fstat(file.fileno()).st_size

    def report(self, name: str) -> dict[str, Any] | None:
        """Read a report; None when there is none, UnreadableJson when something else is in its place.

        OSError where the service itself cannot open files at the moment.
        """
        data = self.read(name, MAX_REPORT + 1)
        if data is not None:
            return read_table(data, MAX_REPORT)
        if self.stamp(name) is None:
            return None
        raise UnreadableJson("it is not a plain file of the job's account")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a report; an absent or unreadable one counts as empty."""
        try:
            return self.report(name) or {}
        except UnreadableJson:
            return {}

    def write_json(self, name: str, value: Mapping[str, Any]) -> bool:
        """Write a file for the launcher, atomically; False when the attempt has no folder."""
        with self._folder() as folder:
            if folder is None:
                return False
            temporary = f".{name}.{os.getpid()}"
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            handle = os.open(temporary, flags, 0o600, dir_fd=folder)
            with open(handle, "w", encoding="utf-8") as file:
                if self.uid != os.geteuid():
                    os.fchown(handle, self.uid, self.gid)
                json.dump(dict(value), file)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        return True

    def log(self, offset: int, size: int) -> tuple[bytes, int]:
        """Read from the log, which may lack its middle (`log_gap`); return the bytes and the log's length."""
        pieces = self._log_pieces()
        length = max((start + held for start, held, _ in pieces), default=0)
        for start, held, name in pieces:
            if start <= offset < start + held:
                with self._open(name) as file:
                    if file is None:
                        return b"", length
                    file.seek(offset - start)
                    return file.read(max(0, size)), length
        return b"", length

    def log_gap(self) -> tuple[int, int] | None:
        """Return the bytes of a very long log that were dropped (from, to); None when it is whole."""
        pieces = self._log_pieces()
        for (start, held, _), (following, _, _) in pairwise(pieces):
            if start + held < following:
                return start + held, following
        return None

    def output_bytes(self) -> tuple[int, int]:
        """Return the bytes of the log, and of the result and the report of an exception."""
        written = sum(stamp[1] for name in OUTPUTS if (stamp := self.stamp(name)) is not None)
        return sum(held for _, held, _ in self._log_pieces()), written

    def remove_output(self) -> None:
        """Remove the log, the result and the report of an exception."""
        with self._folder() as folder:
            for name in os.listdir(folder) if folder is not None else ():
                if name in OUTPUTS or LOG_PIECE.fullmatch(name):
                    with suppress(OSError):
                        os.unlink(name, dir_fd=folder)

    def _log_pieces(self) -> list[tuple[int, int, str]]:
        """List (first byte, length, file name) of the log's pieces, in order."""
        result = []
        with self._folder() as folder:
            names = os.listdir(folder) if folder is not None else ()
            pieces = sorted((int(name[4:] or 0), name) for name in names if LOG_PIECE.fullmatch(name))
            for start, name in pieces[:MAX_LOG_PIECES]:
                with suppress(OSError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        result.append((start, status.st_size, name))
        return result

    @contextmanager
    def _folder(self) -> Iterator[int | None]:
        """Open the attempt's folder without following a link; None unless it is a folder of the job's account."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        handles: list[int] = []
        try:
            try:
                handles.append(os.open(self.job, flags))
                handles.append(os.open(self.path.name, flags, dir_fd=handles[0]))
            except OSError as error:
                raise_own(error)
            yield handles[1] if len(handles) == 2 and os.fstat(handles[1]).st_uid == self.uid else None
        finally:
            for handle in handles:
                os.close(handle)

    @contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO | None]:
        """Open a plain file of the job's account in the attempt's folder; None for anything else."""
        with self._folder() as folder:
            if folder is None:
                yield None
                return
            try:
                handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            except OSError as error:
                raise_own(error)
                yield None
                return
            result = os.fstat(handle)
            if not stat.S_ISREG(result.st_mode) or result.st_uid != self.uid:
                os.close(handle)
                yield None
                return
            with open(handle, "rb") as file:
                yield file
