"""Exchange numbers between the ranks of a distributed job: through torch.distributed, or through files.

Used by `makeway.checkpoint` for what all ranks have to do at the same step. Files are used where torch.distributed is
not initialised; they are in a folder that all ranks see, below that of the checkpoints.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .progress import replace_json
from .registration import start_ticks

WARN_SECONDS = 60.0
"""Seconds after which a rank that waits for others says so, again and again"""
RENDEZVOUS_SECONDS = 600.0
"""Seconds within which all ranks have to arrive at their first exchange: else they see different folders"""
POLL_SECONDS = (0.001, 0.05)
"""Seconds of the first and of the longest pause between two looks for the files of other ranks"""


class RanksMissing(RuntimeError):
    """Other ranks have ended, or did not arrive in time."""


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks: from torch.distributed, else RANK and WORLD_SIZE."""
    if (dist := _distributed()) is not None:
        return int(dist.get_rank()), int(dist.get_world_size())
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, size) if 0 <= rank < size else (0, 1)


def _distributed() -> Any | None:
    """Return `torch.distributed` if this process has initialised it; never imports torch."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist


def check_size(size: int, checkpoint: Path) -> None:
    """Raise ValueError where a checkpoint was saved by another number of ranks."""
    own = rank_and_size()[1]
    if size != own:
        raise ValueError(
            f"{checkpoint} was saved by {size} rank{'s' if size > 1 else ''}, and now there "
            f"{'are' if own > 1 else 'is'} {own}: each rank loads what it saved itself, and goes on with its own part "
            "of the data. Submit the job with as many workers as before."
        )


class RankGroup:
    """All ranks of a job. Every rank has to call `exchange` equally often, in the same order."""

    def __init__(self, folder: Callable[[], Path], deadline: Callable[[], float | None]) -> None:
        """Use files below `folder()`; give up at `deadline()`, in Unix seconds, None: never."""
        self._folder = folder
        self._deadline = deadline
        self._files: _FileExchange | None = None

    def exchange(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each number over all ranks; RanksMissing if one has ended without arriving.

        All ranks give equally many numbers, each below 2**63. Waits for the slowest rank.
        """
        rank, size = rank_and_size()
        if size == 1:
            return list(values)
        if (dist := _distributed()) is not None:
            return _all_reduced(dist, values)
        if self._files is None:
            self._files = _FileExchange(self._folder(), rank, size, self._deadline)
        return self._files.exchange(values)


def _all_reduced(dist: Any, values: Sequence[int]) -> list[int]:
    torch = sys.modules["torch"]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(list(values), dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [int(value) for value in tensor.tolist()]


class _FileExchange:
    """One file a rank with the numbers of its last two calls; older ones are not needed.

    Processes of an earlier start may have left files. So each rank writes a random word; rank 0 lists the words that it
    sees, and a rank whose own word is listed joins the session, which has the word of rank 0 for a name. Files of other
    sessions do not count.
    """

    def __init__(self, folder: Path, rank: int, size: int, deadline: Callable[[], float | None]) -> None:
        self.folder, self.rank, self.size, self.deadline = folder, rank, size, deadline
        self.word = os.urandom(8).hex()
        self.session = self.word if rank == 0 else ""
        self.listed: list[str] = []
        self.calls: dict[int, list[int]] = {}
        self.count = 0
        self.ended = False
        folder.mkdir(parents=True, exist_ok=True)
        atexit.register(self._leave, os.getpid())

    def exchange(self, values: Sequence[int]) -> list[int]:
        self.count += 1
        self.calls[self.count] = [int(value) for value in values]
        self.calls.pop(self.count - 2, None)
        self._write()
        return self._wait()

    def _wait(self) -> list[int]:
        started_waiting, pause = time.monotonic(), POLL_SECONDS[0]
        warn_at = started_waiting + WARN_SECONDS
        while True:
            result, ended = self._read_arrivals()
            if len(result) == self.size:
                return [max(numbers[n] for numbers in result.values()) for n in range(len(self.calls[self.count]))]
            missing = sorted(set(range(self.size)) - set(result))
            names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:10]))}"
            if ended:
                raise RanksMissing(f"rank {min(ended)} has ended while rank {self.rank} waited for it")
            deadline = self.deadline()
            if deadline is not None and time.time() >= deadline:
                waited = f"{time.monotonic() - started_waiting:.0f} s"
                raise RanksMissing(f"{names} did not arrive within {waited}, and the grace period is running out")
            if self.count == 1 and time.monotonic() - started_waiting >= RENDEZVOUS_SECONDS:
                advice = (
                    f"all ranks need the same folder of checkpoints, or torch.distributed; this one has {self.folder}"
                )
                raise RanksMissing(f"rank {self.rank} has not met {names} in {RENDEZVOUS_SECONDS:.0f} s: {advice}")
            if time.monotonic() >= warn_at:
                warn_at += WARN_SECONDS
                self._warn(f"has waited {time.monotonic() - started_waiting:.0f} s for {names}")
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_SECONDS[1])

    def _warn(self, message: str) -> None:
        needs = f"every rank has to call this at the same step, and to see the folder {self.folder}"
        print(f"Makeway: rank {self.rank} {message}; {needs}", file=sys.stderr, flush=True)

    def _read_arrivals(self) -> tuple[dict[int, list[int]], list[int]]:
        """Return the numbers of the ranks that have arrived at this call, and the ranks that never will."""
        files = {rank: self._read(rank) for rank in range(self.size) if rank != self.rank}
        self._join(files)
        result, ended = {self.rank: self.calls[self.count]}, []
        for rank, file in files.items():
            if not self.session or file.get("session") != self.session:
                continue
            numbers = file.get("calls", {}).get(str(self.count))
            if numbers is not None:
                result[rank] = numbers
            elif _has_ended(file):
                ended.append(rank)
        return result, ended

    def _join(self, files: dict[int, dict[str, Any]]) -> None:
        """List the words of the other ranks, as rank 0; join the session of a rank 0 that has listed this rank."""
        if self.rank == 0:
            listed = [str(file["word"]) for file in files.values() if file.get("word")]
            if listed != self.listed:
                self.listed = listed
                self._write()
        elif not self.session and self.word in files[0].get("listed", ()):
            self.session = files[0]["word"]
            self._write()

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def _read(self, rank: int) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            value = json.loads(self._path(rank).read_text(encoding="utf-8"))
            return value if isinstance(value, dict) else {}
        return {}

    def _write(self) -> None:
        value = {
            "word": self.word,
            "session": self.session,
            "listed": self.listed,
            "calls": self.calls,
            "ended": self.ended,
            "host": _host(),
            "pid": os.getpid(),
            "started": start_ticks(os.getpid()),
        }
        replace_json(self._path(self.rank), value)

    def _leave(self, pid: int) -> None:
        if pid == os.getpid():  # not in a forked child
            self.ended = True
            with contextlib.suppress(OSError):
                self._write()
                if all(_has_ended(self._read(rank)) for rank in range(self.size)):
                    shutil.rmtree(self.folder, ignore_errors=True)


def _has_ended(file: dict[str, Any]) -> bool:
    """Whether the process that wrote a file has said that it ends, or is gone from this machine."""
    here = file.get("host") == _host() and os.path.isdir("/proc/self")
    return bool(file.get("ended")) or (here and start_ticks(str(file.get("pid"))) != file.get("started"))


def _host() -> str:
    """Return a word for this machine and its process ids: those of another container mean nothing here."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
