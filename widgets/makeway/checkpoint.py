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

Outside of a Makeway job nothing is ever requested and no signal handler is set, so the same code runs anywhere;
checkpoints then go to `./checkpoints`. Standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Notice", "dir", "latest", "loop", "notice", "on_preempt", "requested", "saved", "saving", "step_of", "stop"]

SAVED_AND_LEFT = 75
"""The exit code of a process that saved because of a notice, and ended."""
KEEP = 2
"""The default number of checkpoints that `saving` and `loop` keep."""
_COMPLETE = re.compile(r"step-(\d+)(?:-r(\d+))?")
_PARTIAL = re.compile(r"\.saving-\d+-a(\d+)-r(\d+)-p(\d+)-\d+")

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
        self.home = os.getpid()
        self._before: dict[int, Any] = {}
        self._spared = False

    def install(self) -> None:
        """Install the handler once, in a job only (not in a notebook) and in the main thread only."""
        if self._before or not _on_cluster() or threading.current_thread() is not threading.main_thread():
            return
        self.home = os.getpid()
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
        if os.getpid() != self.home:
            self._in_a_worker(number)
            return
        self.at = self.at or time.time()
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:  # which would break off the step
            before(number, frame)

    def _in_a_worker(self, number: int) -> None:
        """Ignore the notice in a forked worker, whose batches the main process still needs; a second signal ends it."""
        for ours in self._before:
            signal.signal(ours, signal.SIG_DFL)  # the next one ends it, whatever it waits for
        if self._spared or not os.path.exists(os.environ.get("MAKEWAY_STOP_FILE", "")):
            os.kill(os.getpid(), number)
        self._spared = True


class _Listener:
    """The empty files by which the launcher knows that a process reads the stop file, and needs no signal.

    `PID.START.NAMESPACE` is a process that listens; with `.heard` it has seen the notice, with `.acknowledged` it has
    called `stop()`. Each process has its own, so that forks, ranks and what a shell starts count for themselves.
    """

    def __init__(self) -> None:
        self._noted: set[tuple[int, str]] = set()

    def note(self, what: str = "") -> None:
        """Add a file of this process, once; nothing where the launcher reads none, as one of an earlier release."""
        key = (os.getpid(), what)
        if key in self._noted:
            return
        self._noted.add(key)
        if folder := os.environ.get("MAKEWAY_LISTENERS"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it gets the signal then
                path = os.path.join(folder, _process_name() + what)
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _process_name() -> str:
    """Return what identifies this process: its pid, its start in clock ticks since boot, and its pid namespace."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        started = file.read().rpartition(")")[2].split()[19]
    return f"{os.getpid()}.{int(started)}.{os.stat('/proc/self/ns/pid').st_ino}"


_signals = _Signals()
_listener = _Listener()
_saves = threading.RLock()
_callbacks: list[tuple[Callable[[Notice], object], bool]] = []
_callbacks_lock = threading.RLock()


def requested() -> bool:
    """Whether this job got the notice to save and end. Cheap: call it after every step, in evaluation loops too.

    The first call tells the launcher that this process asks for the notice, so that no signal disturbs what it started.
    """
    if not _asked():
        return False
    _listener.note(".heard")
    return True


def _asked() -> bool:
    """Whether there is a notice, without the promise to follow it."""
    if not _on_cluster():
        return False
    _signals.install()
    _listener.note()
    return _signals.at is not None or os.path.exists(os.environ["MAKEWAY_STOP_FILE"])


def notice() -> Notice | None:
    """Return the notice with its reason, its team and its deadline; None while there is none."""
    return _read_notice() if requested() else None


def _read_notice() -> Notice:
    try:
        with open(os.environ["MAKEWAY_STOP_FILE"], encoding="utf-8") as file:
            found = json.load(file)
        preemptor = (found.get("by_team"), found.get("by_owner"), found.get("by_workload"))
        at, deadline = float(found["at"]), float(found["deadline"])
        return Notice(str(found["reason"]), *preemptor, at, deadline, bool(found.get("preempt_test")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        at = _signals.at or time.time()
        grace = float(os.environ.get("MAKEWAY_GRACE", "30"))
        return Notice("the process was asked to stop", None, None, None, at, at + grace)


def latest() -> Path | None:
    """Return the newest complete checkpoint of `saving` or `loop`, or None; a half-written one never counts."""
    _signals.install()
    found = _complete()
    return found[-1] if found else None


def step_of(checkpoint: Path | None) -> int:
    """Return the number of steps done at a checkpoint, which is where to resume; 0 for None."""
    match = _COMPLETE.fullmatch(checkpoint.name) if checkpoint is not None else None
    return int(match[1]) if match else 0


@contextlib.contextmanager
def saving(step: int, *, keep: int = KEEP) -> Iterator[Path]:
    """Yield a folder to write a checkpoint into; it counts once the block has ended and everything is on disk.

    `step` is the number of steps done. The newest `keep` checkpoints stay. A crash or an exception in the block leaves
    the checkpoints before it as they were. In a gang, only one worker saves a given step (usually rank 0).
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the newest checkpoint has to stay")
    _signals.install()
    home = _directory()
    with _saves:
        home.mkdir(parents=True, exist_ok=True)
        _remove_stale(home)
        attempt, rank = _mine()
        partial = home / f".saving-{int(step):06d}-a{attempt}-r{rank}-p{os.getpid()}-{time.time_ns()}"
        partial.mkdir()
        try:
            yield partial
            _sync(partial)
            os.rename(partial, _free_name(home, int(step)))
            _flush(home)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        saved(int(step))
        for old in _complete()[:-keep]:
            shutil.rmtree(old, ignore_errors=True)


def saved(step: int) -> None:
    """Report a complete checkpoint of `step` that was not written with `saving`."""
    _report(step=int(step), saved_at=time.time())


def stop() -> None:
    """End the process with exit code 75, because everything is saved. Outside of a job it does nothing.

    A save in another thread ends first. What still runs 5 s later, such as a thread that is no daemon, is ended.
    """
    if not _on_cluster():
        return
    _run_callbacks()
    with _saves:
        _report(acknowledged_at=time.time())
        _listener.note(".acknowledged")
        if threading.current_thread() is threading.main_thread():
            _signals.ignore()
            raise SystemExit(SAVED_AND_LEFT)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(SAVED_AND_LEFT)


def loop(
    steps: int | Iterable[Any],
    save: Callable[[Path], object] | None = None,
    load: Callable[[Path], object] | None = None,
    every: int | None = None,
    keep: int = KEEP,
) -> Iterator[Any]:
    """Iterate over `steps` (a number or any iterable), starting behind the newest checkpoint.

    `load(folder)` is called first if there is a checkpoint, and the steps done are skipped. `save(folder)` is called
    after every `every` steps, at the end, and when the job is preempted; the process then ends with code 75.
    An iterable has to yield the same items in the same order each time.
    """
    if every is not None and every < 1:
        raise ValueError(f"every is {every}; it has to be at least 1 step")
    newest = latest() if save is not None else None
    done = kept = step_of(newest)
    if newest is not None and load is not None:
        load(newest)

    def keep_it() -> None:
        nonlocal kept
        if save is not None and kept != done:
            with saving(done, keep=keep) as folder:
                save(folder)
            kept = done

    for item in islice(range(steps) if isinstance(steps, int) else steps, done, None):
        if requested():
            keep_it()
            stop()
        yield item
        done += 1
        if every is not None and done % every == 0:
            keep_it()
    keep_it()
    if _on_cluster():
        _report(completed_at=time.time())


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
            _listener.note(".heard")
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


def __getattr__(name: str) -> Path:
    if name == "dir":
        return _directory()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _on_cluster() -> bool:
    """Whether this is a Makeway job; a notebook (and `%%train --local` in it) is none."""
    return bool(os.environ.get("MAKEWAY_STOP_FILE")) and bool(os.environ.get("MAKEWAY_JOB_ID"))


def _directory() -> Path:
    return Path(os.environ.get("MAKEWAY_CHECKPOINT_DIR") or Path.cwd() / "checkpoints")


def _complete() -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in _directory().iterdir():
            if (match := _COMPLETE.fullmatch(path.name)) and path.is_dir():
                found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def _free_name(home: Path, step: int) -> Path:
    """Return the checkpoint's final path; a step that is saved again gets a revision, so that the first one stays."""
    names = (f"step-{step:06d}-r{revision}" if revision else f"step-{step:06d}" for revision in count())
    return next(home / name for name in names if not (home / name).exists())


def _remove_stale(home: Path) -> None:
    """Remove half-written checkpoints of earlier attempts, and of processes of this rank that have ended."""
    for path in home.iterdir():
        if match := _PARTIAL.fullmatch(path.name):
            attempt, rank, pid = match.groups()
            gone = os.path.isdir("/proc/self") and not os.path.isdir(f"/proc/{pid}")
            if attempt != _mine()[0] or (rank == _mine()[1] and gone):
                shutil.rmtree(path, ignore_errors=True)


def _mine() -> tuple[str, str]:
    return os.environ.get("MAKEWAY_ATTEMPT", "0"), os.environ.get("RANK", "0")


def _sync(folder: Path) -> None:
    """Flush a folder and everything in it to disk."""
    for where, _, names in os.walk(folder):
        for path in [*(os.path.join(where, name) for name in names), where]:
            if not os.path.islink(path):
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


def _report(**values: Any) -> None:
    """Add to the progress file that the launcher and the service read; a failure never disturbs the training."""
    if not (path := os.environ.get("MAKEWAY_PROGRESS_FILE")):
        return
    with _saves, contextlib.suppress(OSError):
        known: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            known = json.load(file)
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({**known, **values}, file)
        os.replace(temporary, path)
