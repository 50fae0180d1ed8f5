"""Iterate over the steps of a training: resume, save now and then, and leave when the job is preempted.

Used by `makeway.checkpoint.loop`, which gives it what it needs of that module.
"""

from __future__ import annotations

import contextlib
import json
import operator
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from .folder import common, step_and_revision
from .progress import Progress, replace_json
from .ranks import RankGroup, check_size, rank_and_size

UNITS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
COMPLETE = ".complete.json"
"""Written into the folder of a loop at its end"""
CURVE = ".curve.json"
"""Written beside the checkpoints of a loop: the curve of a metric up to the newest one"""
LARGEST_SEED = 2**32
"""From here on, a seed was not chosen: those that torch takes from the machine's randomness are larger than people's"""


class Runtime(Protocol):
    """What a loop needs of `makeway.checkpoint`."""

    @property
    def progress(self) -> Progress:
        """Return what is shown of the training: steps and metrics."""

    @property
    def ranks(self) -> RankGroup:
        """Return the processes of the training, which exchange what each of them knows."""

    def requested(self) -> bool:
        """Whether this process got the notice to save and end."""

    def heard(self) -> None:
        """Inform the launcher that this process follows the notice, so that it sends no signal."""

    def stop(self) -> None:
        """End the process: everything is saved."""

    def save(self, step: int, keep: int, together: bool, name: str) -> contextlib.AbstractContextManager[Path]:
        """Yield a folder for the checkpoint of `step`; `together`: all ranks write into the same one."""

    def newest(self, name: str) -> tuple[Path | None, int]:
        """Return the newest complete checkpoint of a loop and its step; None and 0 without one."""

    def folder(self, name: str) -> Path:
        """Return the folder of a loop's checkpoints."""

    def completed(self, ended: bool) -> None:
        """Report that the work of the job is done, or withdraw that report."""

    def release(self, name: str) -> None:
        """Free the name for another loop of this process."""


@dataclass(frozen=True)
class Interval:
    """When a loop saves between its ends: after some steps, or after some seconds."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, every: int | str | None) -> Interval:
        """Return the interval of 500 (steps) or "5m", "90 s", "1h30m"; ValueError with the accepted forms."""
        if every is None:
            return cls()
        if isinstance(every, str):
            return cls(seconds=_seconds(every))
        steps = int(every)
        if steps != every:
            raise ValueError(f"every is {every}; give a whole number of steps, or a time such as '5m'")
        if steps < 1:
            raise ValueError(f"every is {every}; it has to be at least 1 step")
        return cls(steps=steps)

    def is_due(self, step: int, saved_step: int, saved_at: float) -> bool:
        """Whether to save after `step`; the last save was at `saved_step`, at `saved_at` in monotonic seconds."""
        if step <= saved_step:
            return False
        if self.seconds is not None:
            return time.monotonic() - saved_at >= self.seconds
        return self.steps is not None and step % self.steps == 0


def _seconds(text: str) -> float:
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.strip().lower())
    whole = "".join(re.sub(r"\s", "", number + unit) for number, unit in parts)
    if not parts or whole != re.sub(r"\s", "", text.lower()) or any(unit not in UNITS for _, unit in parts):
        raise ValueError(f"every is {text!r}; give a number of steps, or a time such as '30s', '5m' or '1h30m'")
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if seconds <= 0:
        raise ValueError(f"every is {text!r}; it has to be longer than 0 s")
    return seconds


def claim(taken: set[str], name: str, caller: str) -> None:
    """Take a name for a loop or state of this process; RuntimeError where another one has it."""
    if name in taken:
        which = f"has the name {name!r}" if name else "has no name"
        raise RuntimeError(
            f"checkpoint.{caller}: a loop or state of this process {which} already: it could not tell after a resume "
            'which of them is done. Give each a name of its own, such as name=f"epoch-{epoch}", or make one loop over '
            "all steps."
        )
    taken.add(name)


class Loop:
    """One loop. `items` is its generator; what cannot be resumed is refused when it is made (`_steps_of`)."""

    def __init__(
        self,
        runtime: Runtime,
        steps: int | Iterable[Any],
        save: Callable[[Path], object] | None,
        load: Callable[[Path], object] | None,
        interval: Interval,
        keep: int,
        name: str,
    ) -> None:
        self.runtime, self.save, self.load = runtime, save, load
        self.interval, self.keep, self.name = interval, keep, name
        self.steps, self.total = _steps_of(steps)
        if save is not None:
            _warn_about_order(steps)
        self.rank, self.size = rank_and_size()
        self.done = 0
        self.saved_step = 0
        self.saved_at = time.monotonic()
        self.failed_saves = 0
        self.ended = False

    def items(self) -> Iterator[Any]:
        """Yield the items that are not done yet."""
        newest, self.done = self._newest()
        if self._is_complete(newest):
            return
        self.runtime.completed(False)  # steps are left, also where an earlier attempt had reported its end
        if newest is not None:
            self.done = self._own_step(newest, self.done)
        iterator = iter(self.steps)
        for _ in islice(iterator, self.done):  # before the load: skipping may use random numbers, `load` restores them
            pass
        if newest is not None:
            self._load(newest)
        self.saved_step, self.saved_at = self.done, time.monotonic()
        self.runtime.progress.resume(self.runtime.folder(self.name) / CURVE, self.done)
        self._show()
        while self._between_steps():
            if self.ended:
                continue  # other ranks still have steps
            try:
                item = next(iterator)
            except StopIteration:
                self.ended = True
                continue
            yield item
            self.done += 1
            self._show()
        self._finish()

    def _show(self) -> None:
        if self.rank == 0:
            self.runtime.progress.step(self.done, self.total, self.name)

    def _between_steps(self) -> bool:
        """Save if that is due, save and stop if the job is preempted; return whether any rank has steps left."""
        self.ended = self.ended or (self.total is not None and self.done >= self.total)
        stop, due, more = self.runtime.requested(), self._is_due(), not self.ended
        if self.size > 1:
            stop, due, more = map(bool, self.runtime.ranks.exchange([stop, due, more]))
        if not more:
            return False
        if stop:
            self.runtime.heard()  # where it was another rank that has seen the notice
            self._save()
            self.runtime.release(self.name)
            self.runtime.stop()
        elif due:
            self._save_and_go_on()
        return True

    def _is_due(self) -> bool:
        return self.save is not None and self.interval.is_due(self.done, self.saved_step, self.saved_at)

    def _save(self) -> None:
        if self.save is None or (self.size == 1 and self.done == self.saved_step):
            return
        with self.runtime.save(self.done, self.keep, self.size > 1, self.name) as folder:
            if self.size > 1:
                replace_json(folder / f".rank-{self.rank}.json", {"size": self.size, "step": self.done})
            self.save(self._own(folder, make=True))
        self.saved_step, self.saved_at, self.failed_saves = self.done, time.monotonic(), 0
        if self.rank == 0:
            self.runtime.progress.keep(self.runtime.folder(self.name) / CURVE)

    def _save_and_go_on(self) -> None:
        """Save; a failure is a warning, because the training is well and older checkpoints are as they were."""
        try:
            self._save()
        except Exception as error:
            self.failed_saves += 1
            self.saved_at = time.monotonic()  # try again after the interval, not after each step
            times = f", {self.failed_saves} failures in a row" if self.failed_saves > 1 else ""
            kept = 0
            with contextlib.suppress(OSError):  # those that are left may all be damaged
                _, kept = self.runtime.newest(self.name)
            before = f"the newest checkpoint is that of step {kept}" if kept else "there is no checkpoint yet"
            text = f"Makeway: step {self.done} was not saved{times}; {before}, and the training goes on"
            print(f"{text}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _own(self, folder: Path, make: bool = False) -> Path:
        """Return this rank's folder of a checkpoint: that of rank 0 is the checkpoint itself, as with one rank."""
        own = folder if self.rank == 0 else folder / f"rank-{self.rank}"
        if make:
            own.mkdir(exist_ok=True)
        return own

    def _own_step(self, newest: Path, step: int) -> int:
        """Return the steps that this rank had done; ValueError where the number of ranks has changed."""
        size = 1
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            size = int(json.loads((newest / ".rank-0.json").read_text(encoding="utf-8"))["size"])
        check_size(size, newest)
        if self.size == 1:
            return step
        return int(json.loads((newest / f".rank-{self.rank}.json").read_text(encoding="utf-8"))["step"])

    def _load(self, newest: Path) -> None:
        if self.load is not None:
            self.load(self._own(newest))

    def _newest(self) -> tuple[Path | None, int]:
        """Return the checkpoint to resume from, the same on all ranks, and its step; None and 0 without one."""
        if self.save is None:
            return None, 0
        newest = common(lambda: self.runtime.newest(self.name)[0], self.runtime.ranks)
        return newest, max(0, step_and_revision(newest)[0])

    def _is_complete(self, newest: Path | None) -> bool:
        """Whether an earlier attempt has finished this loop; its last state is loaded then."""
        folder = self.runtime.folder(self.name)
        try:
            steps = int(json.loads((folder / COMPLETE).read_text(encoding="utf-8"))["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if (self.total is not None and steps < self.total) or (self.save is not None and self.done < steps):
            return False
        if newest is not None:
            self._own_step(newest, steps)
            self._load(newest)
        self.done = steps
        self._show()
        self.runtime.completed(not self.name)  # a loop with a name is only a part of the job's work
        return True

    def _finish(self) -> None:
        """Save the last state, and mark the loop as complete."""
        if self.save is not None and (self.size > 1 or self.done != self.saved_step):
            self._save()
        if self.rank == 0 and (self.name or self.save is not None):
            folder = self.runtime.folder(self.name)
            folder.mkdir(parents=True, exist_ok=True)
            replace_json(folder / COMPLETE, {"steps": self.done})
        self.runtime.progress.flush()
        self.runtime.completed(not self.name)  # a loop with a name is only a part of the job's work


def _steps_of(steps: int | Iterable[Any]) -> tuple[Iterable[Any], int | None]:
    """Return what to iterate over, and its length if it is known; TypeError for what has no order."""
    try:
        number = operator.index(steps)  # type: ignore[arg-type]
    except TypeError:
        if isinstance(steps, (set, frozenset)):
            raise TypeError(
                "loop got a set, whose order is another one after a resume; give it a list, for example sorted(…)"
            ) from None
        if not hasattr(steps, "__iter__") and not hasattr(steps, "__getitem__"):
            raise TypeError(
                f"loop needs a number of steps or something to iterate over, not a {type(steps).__name__}"
            ) from None
        try:
            return steps, len(steps)  # type: ignore[return-value, arg-type]
        except (TypeError, NotImplementedError, OverflowError):
            return steps, None  # type: ignore[return-value]
    return range(number), max(0, number)


def _warn_about_order(steps: Any) -> None:
    """Warn about a torch DataLoader whose order is certain to be another one after a resume."""
    sampler = getattr(steps, "sampler", None)
    torch = sys.modules.get("torch")
    if torch is None or not type(steps).__module__.startswith("torch.utils.data") or sampler is None:
        return
    random = "Random" in type(sampler).__name__
    if random and getattr(sampler, "generator", None) is None and torch.initial_seed() >= LARGEST_SEED:
        warnings.warn(
            "loop got a DataLoader that shuffles without a seed: after a resume its order is another one, so that some "
            "samples come twice and others never. Call torch.manual_seed(…) first, give the DataLoader a generator, or "
            "use checkpoint.torch_state(…).batches(loader).",
            RuntimeWarning,
            stacklevel=4,
        )
