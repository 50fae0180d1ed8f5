"""Show outputs that change by themselves: HTML, Markdown and text, updated by display id from any thread.

They need no widget manager and are saved with their last state. Each consists of parts; only a part whose text has
changed is sent again, so that what a reader has selected elsewhere stays. Called by the cards of jobs and the usage of
teams.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Protocol
from weakref import ref

from IPython import get_ipython
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.display import display

Bundle = Mapping[str, str]
COLLABORATION = ("jupyter_server_ydoc", "jupyter_collaboration")
"""Packages with which several people edit one notebook: of jupyter-collaboration 3 and later, and of earlier releases.
One of them has to be installed where the kernel runs, too."""

IDLE = 3600.0
"""Seconds without a cell after which outputs are updated only when a state changes. Each update counts as activity of
the kernel, so that otherwise the Hub's culler would never end an idle server while a job trains for days."""


class OutputUpdater(Protocol):
    """Something that keeps an output up to date."""

    def close(self) -> None:
        """Stop updating; the last state stays visible."""

    def redraw(self) -> None:
        """Show the newest state; called before each cell."""


class LiveOutput:
    """The parts of one output. It is shown when it is made, below the cell that runs.

    Where jupyter-collaboration is installed it has one part, and is shown at the end of its cell, in one output with
    others of that cell. For JupyterLab moves an output that is updated to the end of its cell in all windows but the
    one that ran it, and replaces another output there at the next update.
    """

    def __init__(self, parts: Sequence[Bundle]) -> None:
        self._merges_parts = any(find_spec(name) is not None for name in COLLABORATION)
        parts = self._merged_if_needed(parts)
        self._ids = [f"makeway-{uuid.uuid4().hex}" for _ in parts]
        self._shown = [dict(part) for part in parts]
        self._missed: set[int] = set()
        self._lock = threading.Lock()
        self._publisher: Any = CELLS.publisher()
        self._merged_output: MergedOutput | None = None
        if (
            self._merges_parts
            and parts
            and self._publisher is not None
            and (merged := CELLS.merged_output()) is not None
        ):
            self._merged_output = merged
            merged.add(self)
            return
        for id, part in zip(self._ids, parts, strict=True):
            display(dict(part), raw=True, display_id=id)  # type: ignore[no-untyped-call]

    @property
    def updatable(self) -> bool:
        """Whether the front end can replace it; a terminal cannot, nor can an output that was captured."""
        return self._publisher is not None

    def update(self, parts: Sequence[Bundle]) -> bool:
        """Show the parts whose text differs from what is shown; return whether there was one."""
        if self._publisher is None:
            return False
        parts = self._merged_if_needed(parts)
        with self._lock:
            changed = [n for n, part in enumerate(parts) if dict(part) != self._shown[n]]
            for n in changed:
                self._shown[n] = dict(parts[n])
                self._send(n)
            return bool(changed)

    def _merged_if_needed(self, parts: Sequence[Bundle]) -> Sequence[Bundle]:
        """Return the parts, merged into one where collaboration is installed."""
        if not self._merges_parts or not parts:
            return parts
        return [_joined(parts)]

    @property
    def shown(self) -> Bundle:
        """The bundle that is shown, or will be at the end of the cell; only for an output of one part."""
        return self._shown[0]

    def repeat_missed(self) -> None:
        """Send again what changed between two cells: programs that run notebooks read updates only during a cell."""
        with self._lock:
            missed, self._missed = sorted(self._missed), set()
            for n in missed if self._publisher is not None else ():
                self._send(n)

    def _send(self, n: int) -> None:
        if CELLS.running:
            self._missed.discard(n)
        else:
            self._missed.add(n)
        if self._merged_output is not None:
            self._merged_output.update()
            return
        # A front end that is gone must not end the thread that follows the jobs.
        with suppress(Exception):
            self._publisher.publish(self._shown[n], {}, transient={"display_id": self._ids[n]}, update=True)


def _joined(parts: Sequence[Bundle]) -> dict[str, str]:
    """Return one bundle of several."""
    between = {"text/html": "", "text/markdown": "\n\n"}
    return {kind: between.get(kind, "\n").join(part[kind] for part in parts) for kind in parts[0]}


class MergedOutput:
    """One output at the end of a cell that contains all live outputs of the cell."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher
        self._outputs: list[LiveOutput] = []
        self._id = f"makeway-{uuid.uuid4().hex}"
        self._is_shown = False
        self._lock = threading.Lock()

    def add(self, output: LiveOutput) -> None:
        """Add an output of the cell that runs."""
        self._outputs.append(output)

    def show(self) -> None:
        """Show the merged output as the last output of the cell."""
        with self._lock:
            self._is_shown = True
            display(_joined([output.shown for output in self._outputs]), raw=True, display_id=self._id)  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Show the newest state of its outputs, once it is shown."""
        with self._lock, suppress(Exception):  # as in LiveOutput
            if self._is_shown:
                data = _joined([output.shown for output in self._outputs])
                self._publisher.publish(data, {}, transient={"display_id": self._id}, update=True)


class Cells:
    """The cells of this kernel: which one runs, when the last one did, and the live outputs of each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used = clock()
        self._shell: Callable[[], Any] = lambda: None
        self._updaters: list[tuple[str, OutputUpdater]] = []
        self._cell = ""
        self._merged_output: MergedOutput | None = None
        self.running = False
        """whether a cell runs now"""

    @property
    def idle(self) -> bool:
        """Whether no cell was run for IDLE seconds."""
        return not self.running and self._clock() - self._used > IDLE

    @property
    def in_kernel(self) -> bool:
        """Whether this process is the kernel of a notebook, and no terminal."""
        return getattr(get_ipython(), "kernel", None) is not None

    def publisher(self) -> Any:
        """Return what sends updates to the front end; None without them, as in a terminal and under `%%capture`."""
        shell = get_ipython()
        result = getattr(shell, "display_pub", None)
        if not self.in_kernel or isinstance(result, CapturingDisplayPublisher):
            return None
        self.watch(shell)
        return result

    def watch(self, shell: Any) -> None:
        """Follow every cell from now on."""
        if shell is None or self._shell() is shell:
            return
        self._shell = ref(shell)
        shell.events.register("pre_run_cell", self.begin)
        shell.events.register("post_run_cell", self.end)
        parent = getattr(shell, "parent_header", None) or {}
        self._cell = str((parent.get("metadata") or {}).get("cellId") or "")
        self.running = True  # this is called by a cell

    def merged_output(self) -> MergedOutput | None:
        """Return the merged output of the cell that runs; None while none does."""
        if self.running and self._merged_output is None:
            self._merged_output = MergedOutput(self.publisher())
        return self._merged_output

    def keep(self, updater: OutputUpdater) -> None:
        """Keep an output up to date until it is closed, or its cell is run again."""
        self._updaters = [*self._updaters, (self._cell, updater)]

    def drop(self, updater: OutputUpdater) -> None:
        """Keep an output no longer."""
        self._updaters = [(cell, other) for cell, other in self._updaters if other is not updater]

    def begin(self, info: Any = None) -> None:
        """Note that a cell begins: the outputs that it made before are gone from the page."""
        self._used, self.running = self._clock(), True
        self._cell = str(getattr(info, "cell_id", None) or "")
        for cell, updater in list(self._updaters):
            if cell and cell == self._cell:
                updater.close()
            else:
                updater.redraw()

    def end(self, *_: object) -> None:
        """Note that the cell has ended."""
        self._used, self.running = self._clock(), False
        merged, self._merged_output = self._merged_output, None
        if merged is not None:
            merged.show()


CELLS = Cells()
"""The cells of this kernel"""
