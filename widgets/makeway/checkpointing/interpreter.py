"""Shorten the exit of the interpreter, during which a process that has saved still holds its GPUs.

Used by `makeway.checkpoint.stop`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from typing import NoReturn

WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def leave(code: int) -> NoReturn:
    """End the process: through SystemExit in the main thread, at once in another one."""
    if threading.current_thread() is threading.main_thread():
        atexit.register(_skip_collections)
        raise SystemExit(code)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _skip_collections() -> None:
    """Leave out the garbage collections of the exit, which take seconds with large libraries; files are flushed first.

    Modules are still torn down. What only a collection would have closed is closed with the process.
    """
    for item in gc.get_objects():
        if type(item) in WRITERS:  # isinstance would ask objects of others for their class
            with contextlib.suppress(OSError, ValueError):
                item.flush()
    gc.disable()
    if freeze := getattr(gc, "freeze", None):  # not in PyPy
        freeze()
