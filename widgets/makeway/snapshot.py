"""Collect the files of a submission: a snapshot of what the globs match, checked before anything is read."""

from __future__ import annotations

import base64
import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from makeway_api.models import FileIn
from makeway_api.quantities import count, listed, size

from .problems import Refused

LIMIT = 50_000_000
"""Bytes of one submission, files and variables together."""
MAX_FILES = 9_000
"""Files of one submission."""
SKIPPED = frozenset({"__pycache__", ".git", ".ipynb_checkpoints", ".makeway", ".venv", "node_modules"})


def take(patterns: Sequence[str], root: Path | None = None) -> list[FileIn]:
    """Return the files that the patterns match, relative to `root` (default: the working directory); folders whole."""
    result = paths(patterns, root)
    sizes = {name: path.stat().st_size for name, path in result.items()}
    check_size(sizes)
    return [_read(name, result[name]) for name in sorted(result)]


def paths(patterns: Sequence[str], root: Path | None = None) -> dict[str, Path]:
    """Return the files that the patterns match by their paths relative to `root` (default: the working directory)."""
    if not patterns:
        return {}
    base = (root or _working_directory()).resolve()
    result: dict[str, Path] = {}
    for pattern in patterns:
        for path in _matching(pattern, base):
            result[_relative(path, base, pattern)] = path
    return result


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise Refused(
            "the folder of this notebook was deleted, so its files cannot be sent. Make it again and restart the "
            "kernel, or change to another folder with %cd."
        ) from None


def check_size(sizes: dict[str, int], limit: int = LIMIT) -> None:
    """Raise Refused with the largest files, if there are too many or they are too large."""
    total = sum(sizes.values())
    if len(sizes) > MAX_FILES:
        raise Refused(f"{count(len(sizes), 'file')} exceed the limit of {MAX_FILES}; match fewer with --files.")
    if total > limit:
        largest = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:3]
        named = listed(f"{name} ({size(n)})" for name, n in largest)
        raise Refused(
            f"the files are {size(total)} in all, and the limit of a submission is {size(limit)}. Largest: {named}. "
            "Leave them out of --files and read them from shared storage inside the job."
        )


def _matching(pattern: str, base: Path) -> list[Path]:
    expanded = os.path.expanduser(pattern)
    hits = sorted(glob.glob(expanded, root_dir=base, recursive=True))
    if not hits:
        raise Refused(f"--files {pattern}: no such file in {base}; the pattern is relative to the notebook's folder.")
    files = [file for hit in hits for file in _below(base / hit)]
    if not files:
        raise Refused(f"--files {pattern}: there are only empty folders.")
    return files


def _below(path: Path) -> Iterable[Path]:
    if path.is_dir():
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(f for f in folders if f not in SKIPPED)
            yield from (Path(folder, name) for name in sorted(names) if Path(folder, name).is_file())
    elif path.is_file():
        yield path
    else:
        raise Refused(f"--files: {path.name} is neither a file nor a folder.")


def _relative(path: Path, base: Path, pattern: str) -> str:
    try:
        name = Path(os.path.normpath(path)).relative_to(base).as_posix()
    except ValueError:
        raise Refused(
            f"--files {pattern}: {path} lies outside the notebook's folder {base}; copy it there, "
            "or read it from shared storage inside the job."
        ) from None
    if name.split("/")[0] == ".makeway":
        raise Refused(f"--files {pattern}: inside a job the folder .makeway is reserved for Makeway; use another name.")
    return name


def _read(name: str, path: Path) -> FileIn:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Refused(f"--files: {name} cannot be read ({error.strerror}).") from None
    return FileIn(path=name, data=base64.b64encode(data).decode(), executable=os.access(path, os.X_OK))
