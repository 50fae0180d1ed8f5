"""Measure how long the portal takes to start again: all is set up, and a notebook ran before Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import median
from subprocess import run

from .measure import Measured
from .portal import Portal, timed

STARTS = 5
HUB_ALONE = [sys.executable, "-c", "import jupyterhub.app"]


def measure() -> Iterator[Measured]:
    """Start and stop again and again; beside it, what Python takes to read JupyterHub's code."""
    starts = []
    with Portal(gpus=2) as portal:
        portal.start_server("ana", {"profile": "gpu1", "team": "rnd"})
        for _ in range(STARTS):
            portal.stop()
            starts.append(timed(portal.start))
    bare = [timed(lambda: run(HUB_ALONE, check=True)) for _ in range(STARTS)]
    yield Measured(
        "a second start, until the portal is ready",
        "s",
        starts,
        "Python importing JupyterHub",
        median(bare),
        goal=10.0,
        note="Hub, proxy and service, with a state directory that is there already.",
    )
