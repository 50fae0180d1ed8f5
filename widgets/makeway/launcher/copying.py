"""Copy the launcher, and the library of jobs, to where an image without Makeway can use them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

LIBRARY = os.path.join("library", "makeway")
"""The folder of the package that jobs import, below the launcher's"""
MODULES = ("checkpoint.py", "checkpointing", "frameworks")
"""What jobs can import of Makeway; as in `makeway_quota.backends.local.launch`"""


def copy_launcher(folder: str) -> None:
    """Copy the launcher to a folder that it can be run from; a file that is there is replaced as a whole."""
    here = os.path.dirname(os.path.abspath(__file__))
    own = os.path.join(here, LIBRARY)
    copied = os.path.exists(os.path.join(own, MODULES[0]))  # this is a copy already
    for source, place in [*_modules(here), *_modules(own), *_library(own if copied else os.path.dirname(here))]:
        target = os.path.join(folder, os.path.relpath(source, here) if not place else os.path.join(LIBRARY, place))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(source, f"{target}.new")
        os.replace(f"{target}.new", target)


def _modules(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the modules that lie in a folder of the launcher."""
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py"):
            yield os.path.join(folder, name), ""


def _library(package: str) -> Iterator[tuple[str, str]]:
    """Yield the modules that jobs can import, each with its place in their package."""
    for name in MODULES:
        path = os.path.join(package, name)
        if os.path.isfile(path):
            yield path, name
        for folder, _, names in os.walk(path):
            for module in sorted(names):
                if module.endswith(".py"):
                    source = os.path.join(folder, module)
                    yield source, os.path.relpath(source, package)
