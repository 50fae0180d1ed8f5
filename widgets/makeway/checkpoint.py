"""Save checkpoints and resume from them, so that a preemption loses no work.

    from makeway import checkpoint

    for step in checkpoint.loop(10_000, save=save, load=load, every=500):
        train(step)

`save(folder)` writes the whole state (weights, optimiser, random generators) into `folder`; `load(folder)` reads it.
When the job is preempted, the loop saves and ends the process; the job resumes at the same step later. By hand:

    for step in range(checkpoint.step_of(checkpoint.latest()), 10_000):
        train(step)
        if checkpoint.requested():
            with checkpoint.saving(step + 1) as folder:
                save(folder)
            checkpoint.stop()

Outside of a Makeway job nothing is ever requested, no signal handler is set, and `loop` neither saves nor loads, so the
same code runs anywhere; what `saving` writes goes to `./checkpoints` then. Standard library only; the modules of
`makeway.checkpointing` are imported when they are used.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from makeway.checkpointing.folder import Folder
    from makeway.checkpointing.progress import Progress
    from makeway.checkpointing.ranks import RankGroup
    from makeway.checkpointing.registration import Registration

__all__ = [
    "Notice",
    "agreed",
    "dir",
    "done",
    "latest",
    "loop",
    "notice",
    "on_preempt",
    "report",
    "requested",
    "saved",
    "saving",
    "step_of",
    "stop",
]

SAVED_AND_LEFT = 75
"""The exit code of a process that saved because of a notice, and ended."""
KEEP = 2
"""The default number of checkpoints that `saving` and `loop` keep."""
_CHECKPOINT_NAME = re.compile(r"step-(\d+)(?:-r(\d+))?")

dir: Path
"""The folder of the checkpoints, the same for all attempts of a job. Outside of a job `saving` creates it."""


@dataclass(frozen=True)
class Notice:
    """The notice of a preemption. Times are Unix seconds; `preempt_test` is true for `%job ID --preempt-test`."""

    reason: str
    by_team: str | None
    by_owner: str | None
    by_workload: str | None
    at: float
    deadline: float
    preempt_test: bool = False

    @property
    def seconds_left(self) -> float:
        """Seconds until the job is killed; 0 after the deadline."""
        return max(0.0, self.deadline - time.time())


class _Signals:
    """The signal handler: it sets a flag and calls the handler that was there before, nothing else."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.main_pid = os.getpid()
        self._before: dict[int, Any] = {}
        self._ignored_one = False

    def install(self) -> None:
        """Install the handler once, in a job only (not in a notebook) and in the main thread only."""
        if self._before or not _on_cluster() or threading.current_thread() is not threading.main_thread():
            return
        self.main_pid = os.getpid()
        _parts.registration.watch_forks()
        for name in {"SIGTERM", os.environ.get("MAKEWAY_SIGNAL", "SIGTERM")}:
            number = getattr(signal, name, signal.SIGTERM)
            if (before := signal.getsignal(number)) is not None:  # None: written in C, cannot be called from ours
                self._before[number] = before
                signal.signal(number, self._handle)
        atexit.register(self.ignore)

    def ignore(self) -> None:
        """Ignore the signals of a notice from now on: the process ends, and its exit code says how."""
        with contextlib.suppress(ValueError):  # outside of the main thread
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.main_pid:
            self._handle_in_fork(number)
            return
        self.at = self.at or time.time()
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:  # which would break off the step
            before(number, frame)

    def _handle_in_fork(self, number: int) -> None:
        """Ignore the notice in a forked worker, whose batches the main process still needs; another signal ends it."""
        for ours in self._before:
            signal.signal(ours, signal.SIG_DFL)  # the next one ends it, whatever it waits for
        if self._ignored_one or not _parts.registration.is_notice():
            os.kill(os.getpid(), number)
        self._ignored_one = True


class _StopInSave(SystemExit):
    """A `stop()` in the block of `saving`, which ends the process once the checkpoint is complete."""


_save_depth = threading.local()
_signals = _Signals()
_saves = threading.RLock()
_callbacks: list[tuple[Callable[[Notice], object], bool]] = []
_callbacks_lock = threading.RLock()


def requested() -> bool:
    """Whether this job got the notice to save and end. Cheap: call it after every step, in evaluation loops too.

    The first call tells the launcher that this process asks for the notice, so that no signal disturbs what it started.
    """
    if not _asked():
        return False
    _parts.heard()
    return True


def _asked() -> bool:
    """Whether there is a notice, without the promise to follow it."""
    if not _on_cluster():
        return False
    _signals.install()
    _parts.registration.note()
    _parts.progress.begin()
    return _signals.at is not None or os.path.exists(os.environ["MAKEWAY_STOP_FILE"])


def notice() -> Notice | None:
    """Return the notice with its reason, its team and its deadline; None while there is none."""
    return _read_notice() if requested() else None


def _read_notice() -> Notice:
    try:
        with open(os.environ["MAKEWAY_STOP_FILE"], encoding="utf-8") as file:
            result = json.load(file)
        preemptor = (result.get("by_team"), result.get("by_owner"), result.get("by_workload"))
        at, deadline = float(result["at"]), float(result["deadline"])
        return Notice(str(result["reason"]), *preemptor, at, deadline, bool(result.get("preempt_test")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        at = _signals.at or time.time()
        grace = float(os.environ.get("MAKEWAY_GRACE", "30"))
        return Notice("the process was asked to stop", None, None, None, at, at + grace)


def agreed() -> bool:
    """Whether any rank of this job got the notice: all ranks get the same answer, and have to call it at the same step.

    Through torch.distributed where that is initialised, else through files below `dir`. A rank that has ended, or does
    not come until half of the grace period is over, is a RuntimeError in the others. Without ranks it is `requested()`.
    """
    if not _on_cluster():
        return False
    if result := bool(_parts.ranks.exchange([requested()])[0]):
        _parts.heard()
    return result


def latest(name: str = "") -> Path | None:
    """Return the newest complete checkpoint of `saving` or `loop` (of that name), or None; never a half-written one.

    A checkpoint that has lost bytes since is passed over with a message; OSError if no other is left, or if one cannot
    be read. Several ranks may get different ones then: only those of a `loop` are compared.
    """
    _signals.install()
    return _folder(name).newest()


def step_of(checkpoint: Path | None) -> int:
    """Return the number of steps done at a checkpoint, which is where to resume; 0 for None."""
    match = _CHECKPOINT_NAME.fullmatch(checkpoint.name) if checkpoint is not None else None
    return int(match[1]) if match else 0


@contextlib.contextmanager
def saving(step: int, *, keep: int = KEEP, together: bool = False, name: str = "") -> Iterator[Path]:
    """Yield a folder to write a checkpoint into; it counts once the block has ended and everything is on disk.

    `step` is the number of steps done. The newest `keep` checkpoints stay; the oldest goes before this one is written,
    so that the disk needs no room for one more, but never the only one. A crash or an exception in the block leaves the
    others as they were. An OSError tells if the disk is full, with numbers. `name`: as that of a `loop`.

    Where a job has several ranks, one of them saves a given step (usually rank 0), and an empty folder of another rank
    is no checkpoint. With `together` all ranks enter the block at the same step and write files of different names into
    one folder, which counts once all have left the block; if one fails, all get an exception.
    """
    with _parts.save(int(step), keep, together, name, same_step=True) as folder:
        yield folder


def saved(step: int) -> None:
    """Report a complete checkpoint of `step` that was not written with `saving`."""
    _report(step=int(step), saved_at=time.time())


def done() -> None:
    """Report that the work of this job is done: an end with exit code 0 is then its success, also after a notice.

    Call it after the last step of a training that has no `loop`. It may be called again. A `stop()` after it, of any
    rank on this machine, ends the process with code 0. Its next save, or a process that begins later, withdraws it.
    """
    _signals.install()
    now = time.time()
    _report(completed_at=now, done_at=now)


def report(*, step: int | None = None, total: int | None = None, **metrics: Any) -> None:
    """Show metrics, such as `report(loss=loss)`, and the number of steps done where no `loop` counts them.

    Numbers of any kind, also of numpy and torch. Cheap: it writes once a second at most. Only rank 0 reports.
    """
    if os.environ.get("MAKEWAY_PROGRESS_FILE") and _rank_and_size()[0] == 0:
        _parts.progress.update(step, total, metrics)


def stop() -> None:
    """End the process with exit code 75, because everything is saved; with 0 after `done()`. Outside of a job: nothing.

    A save in another thread ends first, and so does that in whose block it is called. What still runs 5 s later, such
    as a thread that is no daemon, is ended.
    """
    if not _on_cluster():
        return
    if getattr(_save_depth, "value", 0):
        raise _StopInSave(SAVED_AND_LEFT)
    _run_callbacks()
    with _saves:
        code = 0 if _parts.is_done() else SAVED_AND_LEFT
        _signals.ignore()
        if code:
            _report(acknowledged_at=time.time())
            _parts.acknowledged()
        from makeway.checkpointing.interpreter import leave

        _parts.progress.flush()
        leave(code)


def loop(
    steps: int | Iterable[Any],
    save: Callable[[Path], object] | None = None,
    load: Callable[[Path], object] | None = None,
    every: int | str | None = None,
    keep: int = KEEP,
    *,
    name: str = "",
) -> Iterator[Any]:
    """Iterate over `steps` (a number or any iterable), starting behind the newest checkpoint.

    `load(folder)` is called if there is a checkpoint, after the steps done were skipped. `save(folder)` is called every
    500 steps (`every=500`) or 5 minutes (`every="5m"`), at the end, and when the job is preempted; the process then
    ends with code 75. An iterable has to yield the same items in the same order each time.

    A process has one loop, or several of different names: a finished one is not run again after a resume, only its last
    state is loaded. The end of the loop without a name is that of the job; after named ones call `done()`. Where a job
    has several ranks, each runs the loop, all save and stop at the same step, and each loads what it saved itself.
    """
    from makeway.checkpointing.loop import Interval, Loop, claim

    _check_keep(keep)
    one = Loop(_parts, steps, save, load, Interval.of(every), keep, name)
    if not _on_cluster():
        return iter(one.steps)
    claim(_parts.loops, name, "loop")
    return one.items()


def on_preempt(callback: Callable[[Notice], object], *, leave: bool = False) -> None:
    """Call `callback(notice)` once, in a thread of its own, as soon as this job is preempted.

    For code that cannot call `requested()` in its loop. With `leave`, the process then ends with exit code 75.
    """
    with _callbacks_lock:
        _callbacks.append((callback, leave))
        if not _on_cluster():
            return
        _signals.install()
        if len(_callbacks) == 1:
            threading.Thread(target=_watch, name="makeway-checkpoint", daemon=True).start()


def _watch() -> None:
    while not _asked():
        time.sleep(0.1)
    with _callbacks_lock:
        if any(leave for _, leave in _callbacks):  # other callbacks may only look on, while the signal does the work
            _parts.heard()
    _run_callbacks()


def _run_callbacks() -> None:
    """Run the callbacks that have not run yet; a second caller waits until the first has finished."""
    with _callbacks_lock:
        received = _read_notice() if _asked() else None
        while received is not None and _callbacks:
            callback, leave = _callbacks.pop(0)
            try:
                callback(received)
            except Exception:
                sys.excepthook(*sys.exc_info())
                continue
            if leave:
                stop()


_ADAPTERS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "lightning_path": "lightning",
    "resumable": "lightning",
    "torch_state": "state",
    "transformers": "transformers",
    "transformers_dir": "transformers",
    "transformers_path": "transformers",
}
"""What `makeway.frameworks` adds, with its module there; a framework is imported when its adapter is used."""


def __getattr__(attribute: str) -> Any:
    if attribute == "dir":
        return _directory()
    if attribute in _ADAPTERS:
        return getattr(importlib.import_module(f"makeway.frameworks.{_ADAPTERS[attribute]}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")


class _Parts:
    """What `makeway.checkpointing` needs of this module; its parts are imported when they are used."""

    def __init__(self) -> None:
        self.loops: set[str] = set()
        self._registration: Registration | None = None
        self._progress: Progress | None = None
        self._ranks: RankGroup | None = None

    @property
    def registration(self) -> Registration:
        if self._registration is None:
            from makeway.checkpointing.registration import Registration

            self._registration = Registration()
        return self._registration

    def heard(self) -> None:
        self.registration.note(".heard")

    def acknowledged(self) -> None:
        self.registration.note(".acknowledged")
        if _rank_and_size()[1] > 1:
            self.registration.wait_for_siblings(_rank_deadline)

    @property
    def progress(self) -> Progress:
        if self._progress is None:
            from makeway.checkpointing.progress import Progress

            self._progress = Progress()
            atexit.register(self._progress.flush)
        return self._progress

    @property
    def ranks(self) -> RankGroup:
        if self._ranks is None:
            from makeway.checkpointing.ranks import RankGroup

            self._ranks = RankGroup(lambda: _directory() / ".ranks", _rank_deadline)
        return self._ranks

    def requested(self) -> bool:
        return requested()

    def stop(self) -> None:
        stop()

    @contextlib.contextmanager
    def save(self, step: int, keep: int, together: bool, name: str, same_step: bool = False) -> Iterator[Path]:
        _check_keep(keep)
        _signals.install()
        folder, began = _folder(name), time.monotonic()
        with _saves, self.registration.saving(), self.progress.saving():
            if together and _rank_and_size()[1] > 1:
                adding = folder.adding_together(step, keep, self.ranks, same_step=same_step)
            else:
                adding = folder.adding(step, keep)
            stopped = False
            with adding as partial:
                _save_depth.value = getattr(_save_depth, "value", 0) + 1
                try:
                    yield partial
                except _StopInSave:
                    stopped = True
                finally:
                    _save_depth.value -= 1
            if (newest := folder.committed) is not None:
                _report(step=newest, saved_at=time.time(), save_seconds=round(time.monotonic() - began, 3))
        if stopped:
            stop()

    def newest(self, name: str) -> tuple[Path | None, int]:
        newest = latest(name)
        return newest, step_of(newest)

    def folder(self, name: str) -> Path:
        return _folder(name).home

    def release(self, name: str) -> None:
        self.loops.discard(name)

    def completed(self, ended: bool) -> None:
        _report(completed_at=time.time() if ended else None, **({} if ended else {"done_at": None}))

    def is_done(self) -> bool:
        return self.progress.is_done()


_parts = _Parts()


def _rank_deadline() -> float | None:
    """Return until when a rank waits for others: half of the grace period, in Unix seconds; None without a notice."""
    received = notice()
    return None if received is None else (received.at + received.deadline) / 2


def _on_cluster() -> bool:
    """Whether this is a Makeway job; a notebook (and `%%train --local` in it) is none."""
    return bool(os.environ.get("MAKEWAY_STOP_FILE")) and bool(os.environ.get("MAKEWAY_JOB_ID"))


def _directory() -> Path:
    return Path(os.environ.get("MAKEWAY_CHECKPOINT_DIR") or Path.cwd() / "checkpoints")


def _folder(name: str = "") -> Folder:
    """Return the checkpoints of the job, or of a loop in it."""
    from makeway.checkpointing.folder import Folder

    return Folder(_directory(), name)


def _rank_and_size() -> tuple[int, int]:
    from makeway.checkpointing.ranks import rank_and_size

    return rank_and_size()


def _check_keep(keep: int) -> None:
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the newest checkpoint has to stay")


def _report(**values: Any) -> None:
    """Add to the progress file that the launcher and the service read; a failure never disturbs the training."""
    if os.environ.get("MAKEWAY_PROGRESS_FILE"):
        _parts.progress.report(values)
