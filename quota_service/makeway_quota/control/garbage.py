"""Run Python's garbage collector less often while the engine works.

By default it runs after every 700 new objects, which a cycle makes in a moment; it then takes a third of the
cycle's time, and more the larger the cluster is.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

COLLECT_AFTER = (50_000, 10, 50)
"""Python's thresholds: new objects before the youngest are looked through, then how often the older ones are."""


def collect_less() -> None:
    """Set the thresholds for the rest of the process: for the service's loop."""
    gc.set_threshold(*COLLECT_AFTER)


@contextmanager
def collecting_less() -> Iterator[None]:
    """Set the thresholds for a while."""
    before = gc.get_threshold()
    collect_less()
    try:
        yield
    finally:
        gc.set_threshold(*before)
