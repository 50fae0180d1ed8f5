"""Pack the agent of machines without Kubernetes into one file, with the launcher and the library of jobs inside.

The same sources give the same bytes, so that every replica serves the same file. The notebook package is read, and not
imported.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from functools import cache

from .backends.local.launch import launcher_files, launcher_source

NAME = "agent.pyz"
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every file in the archive"""
MAIN = '''"""Start the agent of this archive."""

import sys

if sys.version_info < (3, 8):
    sys.exit("agent: Python 3.8 or newer is needed, and this is %s" % sys.version.split()[0])
from makeway.agent.command import main

sys.exit(main(sys.argv[1:]))
'''


@cache
def agent_program() -> bytes:
    """Return `agent.pyz`, which runs with `python3 agent.pyz`. BackendError where the notebook package is missing."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(_files()):
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return packed.getvalue()


def _files() -> Iterator[tuple[str, bytes]]:
    """Yield the files of the archive, each with its name in it."""
    launcher = launcher_source()
    package = launcher.parent
    yield "__main__.py", MAIN.encode()
    yield "makeway/__init__.py", (package / "__init__.py").read_bytes()
    for source in (package / "agent").glob("*.py"):
        yield f"makeway/agent/{source.name}", source.read_bytes()
    for source, place in launcher_files(launcher):
        yield f"makeway/launcher/{place.as_posix()}", source.read_bytes()
