"""Run the submitted cell inside a job; write its result or its exception to files.

Standard library only, and sent with every submission as `.makeway/run.py`, so that the job's Python needs no Makeway.
Beside it are `cell.py` (the cell), `variables.pkl` (the variables of `--with`) and `lib.zip` (`makeway.checkpoint` and
cloudpickle, used only where the job's Python has none).
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import os
import pickle
import signal
import sys
import traceback
import types
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
CELL = os.path.join(HERE, "cell.py")
MAKEWAY = ("makeway", "makeway_api")
"""What the wheel of Makeway installs"""


def main() -> int:
    """Run the cell; return 0, or 1 after an exception."""
    sys.path[0] = os.getcwd()
    sys.path.append(os.path.join(HERE, "lib.zip"))
    with open(CELL, encoding="utf-8") as file:
        source = file.read()
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=CELL, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    sys.argv = [CELL, *sys.argv[1:]]
    try:
        _load_variables(module.__dict__)
        value = run_cell(source, CELL, module.__dict__)
    except Exception as error:
        _keep_error(error)
        _ignore_signals()
        return 1
    _keep_result(value)
    _ignore_signals()
    return 0


def _ignore_signals() -> None:
    """Ignore a notice from now on: the cell is over, and its exit code says how."""
    for name in {"SIGTERM", os.environ.get("MAKEWAY_SIGNAL", "SIGTERM")}:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def run_cell(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """Execute a cell as a notebook does; return the value of its last expression, else the variable `result`."""
    tree = ast.parse(source, filename)
    last = tree.body[-1] if tree.body else None
    shown = isinstance(last, ast.Expr) and not source.rstrip().endswith(";")
    if shown:
        tree.body.pop()
    _execute(compile(tree, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)
    value = None
    if shown and isinstance(last, ast.Expr):
        expression = ast.Expression(last.value)
        value = _execute(compile(expression, filename, "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)
    return value if value is not None else namespace.get("result")


def _execute(code: types.CodeType, namespace: dict[str, Any]) -> Any:
    if code.co_flags & inspect.CO_COROUTINE:
        return asyncio.run(types.FunctionType(code, namespace)())
    return eval(code, namespace)


def _load_variables(namespace: dict[str, Any]) -> None:
    path = os.path.join(HERE, "variables.pkl")
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        variables: dict[str, bytes] = pickle.load(file)
    for name, data in variables.items():
        try:
            namespace[name] = pickle.loads(data)
        except Exception as error:
            raise RuntimeError(
                f"the variable {name!r} (--with) cannot be read in the job's Python: {type(error).__name__}: {error}"
            ) from error


def _dumps(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    data: bytes = cloudpickle.dumps(value)
    return data


def _keep_result(value: Any) -> None:
    path = os.environ.get("MAKEWAY_RESULT_FILE")
    if not path or os.environ.get("RANK", "0") != "0":
        return
    try:
        data = _dumps(value)
    except Exception as error:
        message = f"the result, a {type(value).__name__}, cannot be pickled ({type(error).__name__}: {error})"
        print(f"Makeway: {message}; save it to a file instead.", file=sys.stderr)
        _write_json("MAKEWAY_ERROR_FILE", {"type": "ResultNotKept", "message": message, "traceback": ""})
        return
    _write(path, data)


def _keep_error(error: BaseException) -> None:
    text, message = _cell_traceback(error), str(error)[:10_000] + _missing(error)
    sys.stdout.flush()
    print(text, file=sys.stderr, end="", flush=True)
    if hint := _missing(error):
        print(f"Makeway{hint}", file=sys.stderr, flush=True)
    if os.environ.get("RANK", "0") == "0":
        entry = {"type": type(error).__name__, "message": message, "traceback": text[-100_000:]}
        _write_json("MAKEWAY_ERROR_FILE", entry)


def _missing(error: BaseException) -> str:
    """Return what to install where the job's own Python lacks Makeway; else nothing."""
    if not isinstance(error, ModuleNotFoundError) or (error.name or "").partition(".")[0] not in MAKEWAY:
        return ""
    return (
        f": the Python of this job ({sys.executable}) does not have Makeway. Install the wheel makeway-*.whl there, "
        "with its extra [notebook], or use the default image of jobs; `from makeway import checkpoint` works without."
    )


def _cell_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this file."""
    report = traceback.TracebackException.from_exception(error, limit=-200)
    own = os.path.abspath(__file__)
    seen: set[int] = set()
    parts: list[traceback.TracebackException | None] = [report]
    while parts:
        part = parts.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        part.stack = traceback.StackSummary.from_list([f for f in part.stack if os.path.abspath(f.filename) != own])
        parts += [part.__cause__, part.__context__]
    return "".join(report.format()).replace(f'File "{CELL}"', 'File "cell"')


def _write_json(variable: str, entry: dict[str, str]) -> None:
    if path := os.environ.get(variable):
        _write(path, json.dumps(entry).encode())


def _write(path: str, data: bytes) -> None:
    with open(f"{path}.part", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
