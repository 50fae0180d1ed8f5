"""Distinguish errors of this process, such as too many open files, from errors of the file or process that is read.

From an error of this process nothing is concluded about a job: it is looked at again later.
"""

from __future__ import annotations

import errno

SERVICE_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def raise_own(error: OSError) -> None:
    """Raise an error again that says nothing about what was read."""
    if error.errno in SERVICE_FAULTS:
        raise error
