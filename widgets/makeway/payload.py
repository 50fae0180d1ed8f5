"""Pack a cell as files: its code, the runner, the pickled variables, and a library for bare Pythons."""

from __future__ import annotations

import base64
import io
import pickle
import re
import sys
import types
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from makeway_api.models import FileIn
from makeway_api.quantities import listed, size

from . import cellrunner
from .cellcheck import check_cell as check_cell
from .problems import Refused
from .words import did_you_mean

FOLDER = ".makeway"
COMMAND = [sys.executable or "python3", "-u", f"{FOLDER}/run.py"]
LIMIT = 50_000_000
"""Bytes of the pickled variables"""
MADE_BY = re.compile(re.escape(cellrunner.PYTHON_MARK) + rb"(\d+\.\d+)\Z")


def cell_files(source: str, variables: Mapping[str, Any], first_line: int = 1) -> list[FileIn]:
    """Return the files below `.makeway/` with which any Python 3.9 or newer runs this cell.

    `first_line` is the number of its first line in the notebook, which tracebacks and warnings show.
    """
    files = [
        _file("cell.py", ("\n" * (first_line - 1) + source).encode()),
        _file("run.py", Path(cellrunner.__file__).read_bytes()),
        _file("lib.zip", _library()),
    ]
    if variables:
        packed = {"python": cellrunner.PYTHON, "names": [*variables], "data": pickled(variables)}
        files.append(_file("variables.pkl", pickle.dumps(packed)))
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


def pickled(variables: Mapping[str, Any]) -> bytes:
    """Return the variables in one pickle, so that what they share stays shared.

    Functions and classes of the notebook go by value and bring the variables that they use along.
    Raises Refused with the variable that cannot be sent.
    """
    try:
        data = _dumps(dict(variables))
    except Exception as error:
        raise _unpicklable(variables, error) from None
    if len(data) > LIMIT:
        largest = max(variables, key=lambda name: _pickled_size(variables[name]))
        raise Refused(
            f"--with {listed(variables)}: {size(len(data))} pickled exceeds the limit of {size(LIMIT)}"
            f"{f'; the largest is {largest}' if len(variables) > 1 else ''}; "
            "save it to shared storage and read it inside the job."
        )
    for module, name in sorted(references(data)):
        if module == "__main__":
            raise Refused(
                f"--with {listed(variables)}: {name}, which is defined in the notebook, cannot be sent: pickle only "
                "stores its name. Define it inside the cell, or in a file sent with --files."
            )
    return data


def references(data: bytes) -> set[tuple[str, str]]:
    """Return the (module, name) of everything that a pickle refers to by name; (module, "") for whole modules."""
    result: set[tuple[str, str]] = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module.partition(".")[0], name) == ("cloudpickle", "subimport"):
                return lambda imported: result.add((imported, ""))
            result.add((module, name))
            return _Anything

    # A pickle that only works with the real classes is not judged.
    with suppress(Exception), io.BytesIO(data) as file:
        Reader(file).load()
    # `vars` of the module __main__ is the job's own namespace.
    return result - {("__main__", "")}


def result_of(data: bytes) -> Any:
    """Return the result that a cell left; raise Refused where it needs another Python, or modules that are not here."""
    made_by = MADE_BY.search(data[-64:])
    python = made_by[1].decode() if made_by else ""
    try:
        return cellrunner.loads(data, python)
    except cellrunner.OtherPython:
        raise Refused(
            f"the result was made by Python {python}, and this kernel runs Python {cellrunner.PYTHON}: it holds "
            "functions or classes of the cell, which another minor version cannot read. Return plain values, arrays or "
            "data frames, or define the classes in a file sent with --files, which this notebook imports, too."
        ) from None
    except Exception as error:
        raise Refused(
            f"the result cannot be read in this kernel ({type(error).__name__}: {error}); "
            "import the modules of its classes, then try again."
        ) from None


class _Anything:
    """Stands for every class and function of a pickle that is only looked at."""

    def __new__(cls, *_: Any, **__: Any) -> _Anything:
        return object.__new__(cls)

    def _ignore(self, *_: Any, **__: Any) -> Any:
        return self

    __call__ = __setitem__ = __setstate__ = append = extend = add = update = _ignore


def _dumps(value: Any) -> bytes:
    return cellrunner.dumps(value, vars(sys.modules["__main__"]))


def _pickled_size(value: Any) -> int:
    return len(_dumps(value))


def _unpicklable(variables: Mapping[str, Any], error: Exception) -> Refused:
    """Return which variable, or which global of a function, cannot be pickled."""
    for name, value in variables.items():
        if cause := _failure(value):
            for used, brought in brought_along(value).items():
                if reason := _failure(brought):
                    return Refused(
                        f"--with {name}: it uses {used}, and a {type(brought).__name__} cannot be pickled "
                        f"({_first_line(reason)}). Make it inside the function, or pass it as an argument."
                    )
            error = cause
            break
    else:
        name, value = listed(variables), variables
    return Refused(
        f"--with {name}: a {type(value).__name__} cannot be pickled ({_first_line(error)}). "
        "Make it inside the cell, or save it to a file and send that with --files."
    )


def _failure(value: Any) -> Exception | None:
    try:
        _dumps(value)
    except Exception as error:
        return error
    return None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def brought_along(value: Any) -> dict[str, Any]:
    """Return the notebook's variables that a function or class of the notebook uses, and so brings along."""
    namespace = vars(sys.modules["__main__"])
    result: dict[str, Any] = {}
    ahead = [value]
    while ahead:
        for code in _codes(ahead.pop(), namespace):
            for name in code.co_names:
                if name in namespace and name not in result:
                    result[name] = namespace[name]
                    ahead.append(namespace[name])
    return result


def _codes(value: Any, namespace: dict[str, Any]) -> Iterable[types.CodeType]:
    """Yield the code of a function, or of a class's methods, whose globals are the notebook's variables."""
    if isinstance(value, type):
        if value.__module__ == "__main__":
            for member in vars(value).values():
                yield from _codes(
                    getattr(member, "__func__", None) or getattr(member, "fget", None) or member, namespace
                )
        return
    while (wrapped := getattr(value, "__wrapped__", None)) is not None and not isinstance(value, types.FunctionType):
        value = wrapped
    if isinstance(value, types.FunctionType) and value.__globals__ is namespace:
        codes = [value.__code__]
        while codes:
            code = codes.pop()
            yield code
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


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
