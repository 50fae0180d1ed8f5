"""Hold checkpoints in a folder: written aside, renamed when they are whole, the oldest removed.

Used by `makeway.checkpoint`. Whatever is interrupted leaves no checkpoint that looks complete and is not. Beside them
is a list of the files of each with their sizes, so that one that lost some of its bytes later, as on a disk that
failed, is not taken for whole: the one before it is.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from .progress import replace_json
from .ranks import RankGroup, rank_and_size

_COMPLETE = re.compile(r"step-(\d+)(?:-r(\d+))?")
_PARTIAL = re.compile(r"\.saving-\d+-a(\d+)-r(\d+)-p(\d+)-\d+")
_REMOVED = ".removed-"
SIZES = ".sizes"
"""The folder, beside the checkpoints, with a file for each of them: its files with their sizes in bytes"""
_NFS_PREFIX = ".nfs"
"""How the names of files begin that an NFS client keeps only because they were open when they were removed"""
_VISIBLE_SECONDS = 60.0
"""Seconds within which a folder that rank 0 has made has to be seen by all ranks"""
_MAX_STEP = 2**53
"""Beyond it not every reader of JSON keeps a number"""
_MAX_REVISIONS = 1000
"""Revisions of a step that ranks tell apart"""
_FEW_BYTES = 16 * 2**20
"""So little free space counts as a full disk where nothing else tells how much is needed"""


class Folder:
    """The checkpoints of one loop, or those of a job that has one."""

    def __init__(self, home: Path, name: str = "") -> None:
        """Take the folder of a job, or that of a loop in it; a name that is no plain file name gets a hash."""
        plain = re.sub(r"[^a-z0-9_-]", "-", name.lower())[:60]
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        self.home = home / (f"loop-{plain}" if plain == name else f"loop-{plain}.{digest}") if name else home
        self.committed: int | None = None
        """The step of the checkpoint that was added"""

    def complete(self) -> list[Path]:
        """Return the complete checkpoints, oldest first, without those that have lost bytes since or cannot be read."""
        return [path for path in self._all() if self._is_whole(path)]

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, or None; write to standard error why it is not the last one saved.

        OSError where there are only damaged ones: a training that began anew would remove what is left of them. Also
        where one cannot be read: it may be whole, and other ranks may read it.
        """
        found = self._all()
        damaged = []
        while found and (what := self._damage(found[-1])):
            if not found[-1].exists():  # another process has removed it in between, with a newer one complete
                return self.newest()
            damaged.append(f"{found.pop().name} in {self.home} is damaged: {what}")
        newest = found[-1] if found else None
        if not damaged:
            return newest
        if newest is None:
            raise OSError(
                errno.EIO,
                f"{'; '.join(damaged)}. There is no other checkpoint; move it away to begin the training anew",
            )
        if not _REPORTED.issuperset(damaged):
            _REPORTED.update(damaged)
            text = f"Makeway: {'; '.join(damaged)}. The training resumes from the one before, {newest.name}"
            print(text, file=sys.stderr, flush=True)
        return newest

    def _all(self) -> list[Path]:
        """Return the checkpoints that were complete once, oldest first."""
        result = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in self.home.iterdir():
                if (match := _COMPLETE.fullmatch(path.name)) and path.is_dir():
                    result.append((int(match[1]), int(match[2] or 0), path))
        return [path for *_, path in sorted(result)]

    @contextlib.contextmanager
    def adding(self, step: int, keep: int) -> Iterator[Path]:
        """Yield a folder to write into, and make it a checkpoint; an empty one of another rank than 0 is none.

        `keep` complete ones stay. OSError with numbers if the disk is full.
        """
        if not 0 <= step < _MAX_STEP:
            shown = str(step)[:30]
            raise ValueError(f"step is {shown}; a checkpoint has the number of steps done, from 0")
        attempt, rank = _attempt(), os.environ.get("RANK", "0")
        partial = self.home / _partial_name(step, attempt, rank, os.getpid(), time.time_ns())
        try:
            self._begin(partial, keep)
            yield partial
            _sync(partial)
            if _is_empty(partial) and (rank != "0" or (self.home / f"step-{step:06d}").exists()):
                shutil.rmtree(partial)
            else:
                self._commit(partial, step, keep)
                self.committed = step
        except BaseException as error:
            explained = self._full_disk(error, step, partial)
            shutil.rmtree(partial, ignore_errors=True)
            if explained is not None:
                raise explained from error
            raise

    @contextlib.contextmanager
    def adding_together(self, step: int, keep: int, ranks: RankGroup, *, same_step: bool) -> Iterator[Path]:
        """Yield one folder to all ranks; rank 0 makes it a checkpoint when all have left the block without exception.

        With `same_step` ranks at different steps are refused with ValueError; else the checkpoint gets the highest one.
        RuntimeError where another rank failed.
        """
        rank, _ = rank_and_size()
        mine = (os.getpid(), time.time_ns()) if rank == 0 else (0, 0)
        highest, lowest, pid, now = ranks.exchange([step, -step, *mine])
        if same_step and highest != -lowest:
            raise ValueError(f"the ranks save together at different steps, {-lowest} to {highest}; it has to be one")
        partial = self.home / _partial_name(highest, _attempt(), "0", pid, now)
        try:
            with self._phase(ranks, highest, partial):
                if rank == 0:
                    self._begin(partial, keep)
            with self._phase(ranks, highest, partial):
                _wait_for(partial)
                yield partial
                _sync(partial)
            with self._phase(ranks, highest, partial):
                if rank == 0:
                    self._commit(partial, highest, keep)
            self.committed = highest
        except BaseException:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    @contextlib.contextmanager
    def _phase(self, ranks: RankGroup, step: int, partial: Path) -> Iterator[None]:
        """Leave the block when all ranks have; raise if it failed in any."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
            if (explained := self._full_disk(error, step, partial)) is not None:
                explained.__cause__, problem = error, explained
        failed = ranks.exchange([rank_and_size()[0] + 1 if problem is not None else 0])[0]
        if problem is not None:
            raise problem
        if failed:
            raise RuntimeError(f"rank {failed - 1} could not save step {step}, so no rank has saved it")

    def _begin(self, partial: Path, keep: int) -> None:
        """Make room, and the folder: one complete checkpoint stays at least."""
        self.home.mkdir(parents=True, exist_ok=True)
        self._remove_stale()
        self._drop(max(1, keep - 1))
        partial.mkdir()

    def _commit(self, partial: Path, step: int, keep: int) -> None:
        """Rename a checkpoint to its final name; a step saved again gets a revision, and the first one stays."""
        sizes = _sizes(partial)
        names = (_name(step, revision) for revision in count())
        for name in names:
            if (self.home / name).exists():
                continue
            try:
                os.rename(partial, self.home / name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another rank took the name in between
                    raise
            else:
                break
        self._write_sizes(name, sizes)
        _flush(self.home)
        self._warn_of_later_steps(step)
        self._drop(keep)

    def _warn_of_later_steps(self, step: int) -> None:
        """Write to standard error, once, that the training would not resume from what was saved just now."""
        rank, size = rank_and_size()
        newest = self.complete()[-1:]
        latest, _ = step_and_revision(newest[0]) if newest else (-1, 0)
        if latest > step and rank == 0 and size == 1 and _LATER_STEPS not in _REPORTED:
            _REPORTED.add(_LATER_STEPS)
            text = (
                f"Makeway: step {step} was saved, but there is a checkpoint of step {latest}, from which the training "
                "resumes: count the steps over the whole training, not anew in each epoch, or remove what is in "
                f"{self.home} to begin anew"
            )
            print(text, file=sys.stderr, flush=True)

    def _drop(self, keep: int) -> None:
        """Remove what is older than the newest complete checkpoints; none that is half removed looks complete."""
        found = self._all()  # once: other processes may add to it
        complete = [path for path in found if self._is_whole(path)]
        for old in found[: found.index(complete[-keep])] if len(complete) >= keep else []:
            removed = self.home / f"{_REMOVED}{old.name}-{time.time_ns()}"
            with contextlib.suppress(OSError):
                os.rename(old, removed)
                with contextlib.suppress(OSError):
                    self._list_of(old.name).unlink()
                shutil.rmtree(removed, ignore_errors=True)

    def _remove_stale(self) -> None:
        """Remove half-written checkpoints of earlier attempts, and of processes of this rank that have ended."""
        for path in self.home.iterdir():
            if match := _PARTIAL.fullmatch(path.name):
                attempt, rank, pid = match.groups()
                gone = os.path.isdir("/proc/self") and not os.path.isdir(f"/proc/{pid}")
                if attempt != _attempt() or (rank == os.environ.get("RANK", "0") and gone):
                    shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(_REMOVED):
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # of checkpoints that were moved away, and of killed saves
            for path in (self.home / SIZES).iterdir():
                if not (self.home / path.name.partition(".")[0]).exists():
                    path.unlink()

    def _list_of(self, name: str) -> Path:
        """Return the file with the sizes of a checkpoint's files."""
        return self.home / SIZES / f"{name}.json"

    def _write_sizes(self, name: str, sizes: dict[str, int]) -> None:
        """Write the sizes of a complete checkpoint's files; it is kept without them where that fails."""
        with contextlib.suppress(OSError):
            (self.home / SIZES).mkdir(exist_ok=True)
            replace_json(self._list_of(name), sizes, flush=True)

    def _damage(self, checkpoint: Path) -> str:
        """Return which file of a checkpoint is missing or shorter than it was; "" if none, or without a list of them.

        OSError where that cannot be seen now: it says nothing about the checkpoint.
        """
        listed = self._list_of(checkpoint.name)
        try:
            sizes = dict(json.loads(listed.read_text(encoding="utf-8")))
            for name, size in sizes.items():
                now = _size_of(checkpoint / name)
                if now is None:
                    return f"its file {name} is missing"
                if now < int(size):
                    return f"its file {name} has {now:,} of {size:,} bytes"
        except (FileNotFoundError, NotADirectoryError):
            return ""  # of an earlier release, or killed before it was written
        except (ValueError, TypeError):
            return f"the list of its files, {listed}, is damaged"
        except OSError as error:
            what = f"{checkpoint} cannot be read, so that nothing tells whether it is whole: {error.strerror}"
            raise OSError(error.errno, f"{what}. Start the job again once it can be, or move it away") from error
        return ""

    def _is_whole(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is known to be whole."""
        with contextlib.suppress(OSError):
            return not self._damage(checkpoint)
        return False

    def _full_disk(self, error: BaseException, step: int, partial: Path) -> OSError | None:
        """Return an error with the numbers if the disk is full; a framework's own error may not say so."""
        if not isinstance(error, Exception):
            return None
        codes = {code for cause in _chain(error) if isinstance(cause, OSError) for code in [cause.errno]}
        try:
            complete = self.complete()
            written, needed = _bytes(partial), _bytes(complete[-1]) if complete else 0
            disk = _mount_of(self.home)
            usage = shutil.disk_usage(disk)
        except (OSError, RuntimeError):  # the error itself is what matters
            return None
        short = isinstance(error, (OSError, RuntimeError)) and usage.free < max(needed - written, _FEW_BYTES)
        if not codes & {errno.ENOSPC, errno.EDQUOT} and not (short and not codes - {None, errno.EIO}):
            return None
        code = errno.EDQUOT if errno.EDQUOT in codes else errno.ENOSPC
        what = f"the quota on {disk} is used up" if code == errno.EDQUOT else f"the disk {disk} is full"
        size = f", the newest checkpoint has {_size(needed)}" if needed else ""
        before = (
            f"the newest complete checkpoint is {complete[-1].name}" if complete else "there is no other checkpoint"
        )
        free = f"{_size(usage.free)} of {_size(usage.total)} are free"
        return OSError(
            code,
            f"{what}: step {step} was not saved in {self.home}. {_size(written)} were written{size}; {free}; {before}. "
            "Remove files, save less (keep=1), or use a larger disk",
        )


_REPORTED: set[str] = set()
"""What this process has written of damaged checkpoints"""
_LATER_STEPS = "later steps"
"""Stands in `_REPORTED` for a checkpoint with fewer steps than one before it"""


def common(find: Callable[[], Path | None], ranks: RankGroup) -> Path | None:
    """Return the newest checkpoint, which `find` returns, where that is the same one on all ranks.

    All ranks have to call it. RuntimeError where another rank finds another one, or cannot look.
    """
    newest, problem = None, None
    try:
        newest = find()
    except OSError as error:
        problem = error
    step, revision = step_and_revision(newest)
    own = step * _MAX_REVISIONS + min(revision, _MAX_REVISIONS - 1)
    high, low, failed = ranks.exchange([own, -own, rank_and_size()[0] + 1 if problem is not None else 0])
    if problem is not None:
        raise problem
    if failed:
        raise RuntimeError(f"rank {failed - 1} cannot read the newest checkpoint, so no rank resumes from one")
    if high != -low:
        names = [_name(*divmod(number, _MAX_REVISIONS)) if number >= 0 else "none" for number in (high, -low)]
        raise RuntimeError(
            f"the ranks would resume from different checkpoints, one from {names[0]} and another one from {names[1]}: "
            "all of them need the same folder of checkpoints, and have to find the same one whole"
        )
    return newest


def step_and_revision(checkpoint: Path | None) -> tuple[int, int]:
    """Return the step of a checkpoint, and how often that was saved before; -1 and 0 for None and what is none."""
    match = _COMPLETE.fullmatch(checkpoint.name) if checkpoint is not None else None
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _name(step: int, revision: int = 0) -> str:
    return f"step-{step:06d}-r{revision}" if revision else f"step-{step:06d}"


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file in a folder, by its path there."""
    sizes = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            size = _size_of(path)
            if size is not None and not name.startswith(_NFS_PREFIX):
                sizes[os.path.relpath(path, folder)] = size
    return sizes


def _size_of(path: str | Path) -> int | None:
    """Return the bytes of a file, or of a link itself; None if it is missing."""
    try:
        return os.lstat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def _attempt() -> str:
    return os.environ.get("MAKEWAY_ATTEMPT", "0")


def _partial_name(step: int, attempt: str, rank: str, pid: int, at: int) -> str:
    return f".saving-{step:06d}-a{attempt}-r{rank}-p{pid}-{at}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and what caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _mount_of(path: Path) -> Path:
    """Return where the disk of a path is mounted."""
    path = path.resolve()
    while not path.exists() or not os.path.ismount(path):
        if path.parent == path:
            break
        path = path.parent
    return path


def _bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 if there is none."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def _is_empty(folder: Path) -> bool:
    return not any(names for _, _, names in os.walk(folder))


def _wait_for(folder: Path) -> None:
    """Wait until a folder that rank 0 has made is seen here: network file systems take their time."""
    ends = time.monotonic() + _VISIBLE_SECONDS
    while not folder.is_dir():
        if time.monotonic() >= ends:
            raise RuntimeError(f"{folder}, which rank 0 has made, is not seen here: all ranks need the same folder")
        time.sleep(0.01)


def _sync(folder: Path) -> None:
    """Flush a folder and everything in it to disk; what another rank removes meanwhile is none of ours."""
    for where, _, names in os.walk(folder):
        for path in [*(os.path.join(where, name) for name in names), where]:
            if not os.path.islink(path):
                with contextlib.suppress(FileNotFoundError):
                    _flush(path)


def _flush(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not os.path.isdir(path):  # some file systems cannot sync folders, and need not
            raise
    finally:
        os.close(handle)
