"""Write how far a job is to the file that the launcher reads: steps, rate, metrics and one curve.

Used by `makeway.checkpoint`. A failure never disturbs the training. What is written is bounded, whatever is reported.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .registration import start_ticks

EVERY_SECONDS = 1.0
"""Seconds between two writes of steps and metrics"""
MAX_METRICS = 32
MAX_NAME = 64
MAX_POINTS = 64
"""Points of the curve; beyond, every second one is dropped"""
RATE_WRITES = 30
"""Writes over which the rate is measured"""
LARGEST_WHOLE = 2**53
ENDS = ("completed_at", "done_at", "completed_uptime")
"""What is written at the end of the work; the last in seconds since boot, as clocks may be set"""


class Progress:
    """The steps and metrics of this process, and what else it adds to the progress file."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._home = os.getpid()
        self._step: int | None = None
        self._total: int | None = None
        self._stage = ""
        self._at = 0.0
        self._due = -math.inf
        self._dirty = False
        self._pending: dict[str, Any] = {}
        self._metrics: dict[str, float | None] = {}
        self._curve = Curve()
        self._seen: deque[tuple[float, int]] = deque(maxlen=RATE_WRITES)
        self._reports = 0
        self._save_seconds: float | None = None
        self._warned: set[str] = set()
        self._continued = self._is_done = False
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held it, which is not here

    def step(self, step: Any, total: Any, stage: str = "") -> None:
        """Set the number of steps done, of `total` if that is known; `stage` is the name of a loop."""
        self.update(step, total, {}, stage)

    def update(self, step: Any, total: Any, metrics: Mapping[str, Any], stage: str = "") -> None:
        """Set the steps done and the newest values of metrics; those of a GPU are read when they are written."""
        with self._lock:
            if step is not None:
                self._set_step(step, total, _name(stage))
            if metrics:
                self._set_metrics(metrics)
            self._changed()

    def _set_step(self, step: Any, total: Any, stage: str) -> None:
        try:
            step, total = _whole(int(step)), None if total is None else _whole(int(total))
        except Exception:  # whatever their classes raise
            step = None
        if step is None:
            self._warn("report: a step, or its total, that is no whole number from 0 to 2^53 is not shown")
            return
        if stage != self._stage:
            self._curve = Curve()
        if stage != self._stage or (self._step is not None and step < self._step):
            self._seen.clear()
        self._step, self._total, self._stage = step, total, stage

    def _set_metrics(self, values: Mapping[str, Any]) -> None:
        self._reports += 1
        for name, value in list(values.items())[: MAX_METRICS * 2]:
            name = _name(str(name))
            if name not in self._names() and len(self._names()) >= MAX_METRICS:
                self._warn(f"report: only the first {MAX_METRICS} metrics are shown; {name!r} is not")
                continue
            try:
                self._pending[name] = value.detach() if getattr(value, "is_cuda", False) else number(value)
            except Exception:
                self._warn(f"report: {name!r} is a {type(value).__name__}, not a number, and is not shown")

    def _names(self) -> set[str]:
        return {*self._pending, *self._metrics}

    def _warn(self, text: str) -> None:
        kind = text.rpartition(";")[0] or text
        if kind not in self._warned and len(self._warned) < 10:
            self._warned.add(kind)
            print(f"Makeway: checkpoint.{text}.", file=sys.stderr, flush=True)

    def _changed(self) -> None:
        self._dirty, self._at = True, time.time()
        if time.monotonic() >= self._due:
            self.flush()

    def report(self, values: dict[str, Any]) -> None:
        """Write values now, beside the steps and metrics; None removes one."""
        with self._lock:
            if "save_seconds" in values:
                self._save_seconds, self._dirty = values["save_seconds"], True
            if values.get("saving_since") or ("saved_at" in values and "save_seconds" not in values):
                self._withdraw()  # with both, the save began before
            if "done_at" in values:
                self._is_done = values["done_at"] is not None
            if values.get("completed_at"):
                values = {**values, "completed_uptime": _uptime()}
            self.flush()
            _update(values)

    def begin(self) -> None:
        """Withdraw, once, an end that was reported before this process began: the work of the job goes on in it."""
        if not self._continued:
            self._continued = True  # in its forks, too: a loader that polls does not continue the work
            self._withdraw()

    def is_done(self) -> bool:
        """Whether `done()` was called in this process, or in another one of this machine since this one began."""
        known = _read(os.environ.get("MAKEWAY_PROGRESS_FILE", ""))
        return known.get("done_at") is not None and not _ended_before_this(known)

    def _withdraw(self) -> None:
        """Remove an end that an earlier process reported, or this one before a save: the work goes on."""
        known = _read(os.environ.get("MAKEWAY_PROGRESS_FILE", ""))
        if "completed_at" in known and (self._is_done or _ended_before_this(known)):
            self._is_done = False
            _update(dict.fromkeys(ENDS))

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Note that a save is under way, so that the launcher knows of one that it has to end."""
        self.report({"saving_since": time.time()})
        try:
            yield
        finally:
            self.report({"saving_since": None})

    def flush(self) -> None:
        """Write what has changed since the last time, now."""
        with self._lock:
            if self._dirty and os.getpid() == self._home:
                self._dirty = False
                self._due = time.monotonic() + EVERY_SECONDS
                _update({"progress": self._summary()})

    def _summary(self) -> dict[str, Any]:
        for name, value in self._pending.items():
            with contextlib.suppress(Exception):
                self._metrics[name] = None if value is None else number(value)
        self._pending = {}
        step = self._reports if self._step is None else self._step
        self._curve.add(step, self._metrics)
        return {
            "step": self._step,
            "total": self._total,
            "rate": self._rate(),
            "stage": self._stage,
            "at": self._at,
            "metrics": self._metrics,
            "curve": self._curve.shown(),
            "save_seconds": self._save_seconds,
        }

    def _rate(self) -> float | None:
        """Return the steps per second over the last writes of this process; None before the second one."""
        if self._step is None:
            return None
        self._seen.append((time.monotonic(), self._step))
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if ended > began and last > first else None

    def keep(self, path: Path) -> None:
        """Write the curve where the next attempt finds it."""
        with self._lock, contextlib.suppress(OSError):
            if curve := self._curve.shown():
                replace_json(path, curve)

    def resume(self, path: Path, step: int) -> None:
        """Take over the curve of an earlier attempt up to the step at which this one goes on."""
        with self._lock, contextlib.suppress(Exception):  # it may be that of another release, or damaged
            self._curve = Curve.of(json.loads(path.read_text(encoding="utf-8")), step)


class Curve:
    """The history of one metric: the loss if there is one, else the first that was reported."""

    def __init__(self, name: str = "", points: list[tuple[int, float]] | None = None) -> None:
        self.name = name
        self.points = points or []
        self.stride = 1

    @classmethod
    def of(cls, kept: Mapping[str, Any], until: int) -> Curve:
        """Return a curve that `shown` returned, without the points after a step."""
        points = [(int(step), float(value)) for step, value in kept["points"]]
        return cls(_name(str(kept["name"])), [point for point in points[:MAX_POINTS] if point[0] <= until])

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add the newest value of its metric; points at or after this step give way to it."""
        name = min(metrics, key=_likeness_to_loss, default="")
        if name and (not self.name or _likeness_to_loss(name) < _likeness_to_loss(self.name)):
            self.name, self.points, self.stride = name, [], 1
        value = metrics.get(self.name)
        if value is None:
            return
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        if len(self.points) > 1 and self.points[-1][0] - self.points[-2][0] < self.stride:
            self.points.pop()
        self.points.append((step, value))
        if len(self.points) > MAX_POINTS:
            self.points = [*self.points[:-1:2], self.points[-1]]
            self.stride = max(self.stride * 2, (self.points[-1][0] - self.points[0][0]) // MAX_POINTS)

    def shown(self) -> dict[str, Any] | None:
        """Return its name and its points; None without any."""
        return {"name": self.name, "points": self.points} if self.points else None


def _likeness_to_loss(name: str) -> int:
    lower = name.lower()
    return 0 if lower == "loss" else 1 if lower.startswith("train") and "loss" in lower else 2 if "loss" in lower else 3


def number(value: Any) -> float | None:
    """Return a number, numpy's and torch's too; None if it is not finite. TypeError for what is no number."""
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError("text is no number")
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) and abs(result) < 1e300 else None


def _ended_before_this(known: Mapping[str, Any]) -> bool:
    """Whether the end of the work that a progress file has was reported before this process began."""
    at, ticks = known.get("completed_uptime"), os.sysconf("SC_CLK_TCK")
    return isinstance(at, (int, float)) and int(at * ticks) <= start_ticks("self")  # which counts whole ticks, too


def _uptime() -> float | None:
    """Return the seconds since boot, from which the starts of processes count; None where there is no such clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.clock_gettime(clock)


def _whole(value: int) -> int | None:
    return value if 0 <= value < LARGEST_WHOLE else None


def _name(text: str) -> str:
    clean = "".join(c if c.isprintable() else "\ufffd" for c in text[: MAX_NAME * 2])
    return clean.encode("utf-8", "replace").decode("utf-8")[:MAX_NAME]


def _update(values: dict[str, Any]) -> None:
    """Add values to the file that the launcher and the service read; None removes one."""
    if not (path := os.environ.get("MAKEWAY_PROGRESS_FILE")):
        return
    with contextlib.suppress(OSError), _locked(path):
        replace_json(path, {key: value for key, value in {**_read(path), **values}.items() if value is not None})


def _read(path: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError), open(path, encoding="utf-8") as file:
        known = json.load(file)
        return known if isinstance(known, dict) else {}
    return {}


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock of the progress file, which the ranks on this machine share."""
    with contextlib.ExitStack() as held:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            import fcntl

            lock = held.enter_context(open(f"{path}.lock", "w", encoding="utf-8"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def replace_json(path: str | Path, value: Any, *, flush: bool = False) -> None:
    """Write a JSON file atomically: a reader finds the old or the new content; `flush`: also after a power failure."""
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
