"""Measure how long a cell with %%train takes until the notebook goes on."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from statistics import median

import makeway
from IPython.core.interactiveshell import InteractiveShell
from makeway_api.models import JobRequest

from .measure import Measured
from .portal import Portal, timed

ROUNDS = 30
CELL = "total = sum(range(1000))\ntotal\n"


def measure() -> Iterator[Measured]:
    """Submit the same cell again and again; the jobs wait or run, which is nothing to the notebook."""
    with Portal(gpus=2) as portal:
        ana = portal.user("ana")
        ask = JobRequest(name="bare", team="rnd", profile="gpu1", command=[sys.executable, "-c", "pass"])
        bare = [1000 * timed(lambda: ana.submit(ask)) for _ in range(ROUNDS)]
        makeway.connect(portal.url, portal.user_token("ana"))
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "makeway")
        cells = [1000 * timed(lambda: train(shell)) for _ in range(ROUNDS)]
    yield Measured(
        "%%train, until the notebook goes on",
        "ms",
        cells,
        "a bare request to submit",
        median(bare),
        goal=200.0,
        note="Through the proxy; the cell, its runner and makeway.checkpoint travel with it.",
    )


def train(shell: InteractiveShell) -> None:
    """Run the cell as a notebook does."""
    with contextlib.redirect_stdout(io.StringIO()):
        shell.run_cell_magic("train", "--team rnd --profile gpu1 --name bench", CELL)  # type: ignore[no-untyped-call]
