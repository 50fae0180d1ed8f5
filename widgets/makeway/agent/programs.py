"""Unpack the one file that an agent is served as: a launcher, and the library of jobs, are run from a folder.

The agent itself goes on from there, too: modules of an archive are compiled at each start, and take memory for it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

AGENT = os.path.join("makeway", "agent")
LAUNCHER = os.path.join("makeway", "launcher")
FLAGS = ("-I", "-S")
"""Of Python, for programs of the standard library alone: what is installed on the machine changes nothing of them"""


def archive() -> str | None:
    """Return the archive that this process was started from; None where it was started from a folder."""
    path = os.path.abspath(sys.path[0] if sys.path else "")
    return path if os.path.isfile(path) and __file__.startswith(path + os.sep) else None


def source_folder() -> str:
    """Return the folder that has the package `makeway` which this module belongs to."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def unpack(archive_path: str, folder: str) -> str:
    """Unpack an archive below a folder, unless it is there; return where.

    Those of earlier agents stay, because launchers that run may load modules of them.
    """
    import compileall  # these are not kept in the memory of the agent, which goes on in another process
    import hashlib
    import shutil
    import zipfile

    with open(archive_path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()[:16]
    target = os.path.join(folder, digest)
    if not os.path.isdir(target):
        os.makedirs(folder, mode=0o755, exist_ok=True)
        part = f"{target}.part-{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        with zipfile.ZipFile(archive_path) as content:
            content.extractall(part)
        compileall.compile_dir(part, ddir=target, quiet=2)  # also a compiler takes memory, which it does not give back
        os.rename(part, target)
    for name in os.listdir(folder):
        if ".part-" in name:
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    return target


def go_on_unpacked(folder: str, words: list[str]) -> NoReturn:
    """Replace this process by the agent of a folder, with the same command line.

    Its threads share the memory that the C library keeps ready; launchers and scripts get nothing of this variable.
    """
    env = {"MALLOC_ARENA_MAX": "1", **os.environ}
    os.execve(sys.executable, [sys.executable, *FLAGS, os.path.join(folder, AGENT), *words], env)
