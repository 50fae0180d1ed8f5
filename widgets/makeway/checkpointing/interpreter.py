"""Shorten the exit of the interpreter, during which a process that has saved still holds its GPUs.

Used by `makeway.checkpoint.stop`.
"""

from __future__ import annotations

import contextlib
import gc
import io

WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def skip_collection() -> None:
    """Leave out the garbage collections of the exit, which take seconds with large libraries; files are flushed first.

    Modules are still torn down. What only a collection would have closed is closed with the process.
    """
    for one in gc.get_objects():
        if type(one) in WRITERS:  # isinstance would ask objects of others for their class
            with contextlib.suppress(OSError, ValueError):
                one.flush()
    gc.disable()
    if freeze := getattr(gc, "freeze", None):  # not in PyPy
        freeze()
