"""Pack a cell as files: its code, the runner, the pickled variables, and a library for bare Pythons."""

from __future__ import annotations

import ast
import base64
import io
import pickle
import re
import sys
import zipfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from makeway_api.models import FileIn
from makeway_api.quantities import size

from .problems import Refused
from .words import did_you_mean

FOLDER = ".makeway"
COMMAND = [sys.executable or "python3", "-u", f"{FOLDER}/run.py"]
NOTEBOOK_ONLY = re.compile(r"^\s*(?:[!%?]|\w[\w, ]*=\s*[!%])")


def check_cell(source: str) -> None:
    """Raise Refused with the line, if a cell cannot run as plain Python."""
    if not source.strip():
        raise Refused("the cell is empty; write the training code below the %%train line.")
    for n, line in enumerate(source.splitlines(), 1):
        if NOTEBOOK_ONLY.match(line) and not _parses(source):
            raise Refused(
                f"line {n} of the cell, `{line.strip()[:60]}`, is notebook syntax; a job runs plain Python. "
                "Run it in a cell of its own, or call subprocess.run([...])."
            )
    try:
        tree = compile(source, "cell", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError) as error:
        where = f"line {error.lineno} of the cell" if isinstance(error, SyntaxError) and error.lineno else "the cell"
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise Refused(f"{where} is not valid Python: {what}. Nothing was submitted.") from None
    if not tree.body:
        raise Refused("the cell has only comments; write the training code below the %%train line.")


def cell_files(source: str, variables: Mapping[str, Any]) -> list[FileIn]:
    """Return the files below `.makeway/` with which any Python 3.9 or newer runs this cell."""
    files = [
        _file("cell.py", source.encode()),
        _file("run.py", Path(__file__).with_name("cellrunner.py").read_bytes()),
        _file("lib.zip", _library()),
    ]
    if variables:
        files.append(_file("variables.pkl", pickle.dumps(pickled(variables))))
    return files


def chosen(names: Iterable[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notebook's variables of these names; raise Refused for one that it does not have."""
    values: dict[str, Any] = {}
    for name in names:
        if name not in namespace:
            own = [n for n in namespace if not n.startswith("_")]
            raise Refused(f"--with {name}: this notebook has no such variable.{did_you_mean(name, own)}")
        values[name] = namespace[name]
    return values


def pickled(variables: Mapping[str, Any]) -> dict[str, bytes]:
    """Return each variable pickled by value, functions and classes of the notebook included."""
    import cloudpickle

    out: dict[str, bytes] = {}
    for name, value in variables.items():
        try:
            out[name] = cloudpickle.dumps(value)
        except Exception as error:
            what = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise Refused(
                f"--with {name}: a {type(value).__name__} cannot be pickled ({what}). "
                "Make it inside the cell, or save it to a file and send that with --files."
            ) from None
        if len(out[name]) > 50_000_000:
            raise Refused(
                f"--with {name}: {size(len(out[name]))} pickled exceeds the limit of 50 MB; "
                "save it to shared storage and read it inside the job."
            )
    return out


@lru_cache(maxsize=1)
def _library() -> bytes:
    """Return `makeway.checkpoint` and cloudpickle as a zip, which the runner puts last on sys.path."""
    import cloudpickle

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("makeway/__init__.py", '"""The part of Makeway that jobs use."""\n')
        archive.write(Path(__file__).with_name("checkpoint.py"), "makeway/checkpoint.py")
        for package in ("checkpointing", "frameworks"):
            for path in sorted(Path(__file__).with_name(package).glob("*.py")):
                archive.write(path, f"makeway/{package}/{path.name}")
        for path in sorted(Path(cloudpickle.__file__).parent.glob("*.py")):
            archive.write(path, f"cloudpickle/{path.name}")
    return buffer.getvalue()


def _file(name: str, data: bytes) -> FileIn:
    return FileIn(path=f"{FOLDER}/{name}", data=base64.b64encode(data).decode())


def _parses(source: str) -> bool:
    try:
        compile(source, "cell", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):
        return False
    return True
