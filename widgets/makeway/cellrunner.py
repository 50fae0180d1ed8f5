"""Run the submitted cell inside a job; write its result or its exception to files.

Standard library only, and sent with every submission as `.makeway/run.py`, so that the job's Python needs no Makeway.
Beside it are `cell.py` (the cell), `variables.pkl` (the variables of `--with`) and `lib.zip` (`makeway.checkpoint` and
cloudpickle, used only where the job's Python has none). The notebook imports it for its way of pickling.
"""

from __future__ import annotations
import __future__

import ast
import asyncio
import builtins
import contextlib
import functools
import hashlib
import inspect
import io
import json
import os
import pickle
import signal
import sys
import threading
import time
import tokenize
import traceback
import types
import typing
import weakref
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
CELL = os.path.join(HERE, "cell.py")
RUNNER = os.getpid()
MAKEWAY = ("makeway", "makeway_api")
"""What the wheel of Makeway installs"""
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
PYTHON_MARK = b"\nmakeway-python "
"""Stands with the version of Python behind the pickle of a result, where pickle itself reads no further"""
FUTURE = functools.reduce(
    lambda flags, name: flags | int(getattr(__future__, name).compiler_flag), __future__.all_feature_names, 0
)
CANCEL_SECONDS = 5.0
"""How long asyncio tasks may take to end that are cancelled after the cell"""
END_SECONDS = 60.0
"""How long threads and child processes may run that the cell has left behind"""
CACHED = type(functools.lru_cache(lambda: None))


def main() -> int:
    """Run the cell; return its exit code: 0, 1 after an exception, or that of `sys.exit`."""
    sys.path[0] = os.getcwd()
    sys.path.append(os.path.join(HERE, "lib.zip"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    with open(CELL, encoding="utf-8") as file:
        source = file.read()
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=CELL, __builtins__=builtins)
    sys.modules["__main__"] = module
    sys.argv = [CELL, *sys.argv[1:]]
    builtins.display = display  # type: ignore[attr-defined]
    _prepare_children(module.__dict__)
    ending = contextlib.ExitStack()
    code = _run(source, module.__dict__, ending)
    threading.Thread(target=_end_in_time, args=(code,), name="makeway-end", daemon=True).start()
    ending.close()
    return code


def _run(source: str, namespace: dict[str, Any], ending: contextlib.ExitStack) -> int:
    try:
        _load_variables(namespace)
        value = run_cell(source, CELL, namespace, ending)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _keep_error(error)
        _ignore_notices()
        return 1
    _ignore_notices()
    _keep_result(value)
    return 0


def run_cell(source: str, filename: str, namespace: dict[str, Any], ending: contextlib.ExitStack) -> Any:
    """Execute a cell as a notebook does; return the value of its last expression, else the variable `result`.

    A cell with `await` runs in one event loop, which `ending` closes.
    """
    tree = ast.parse(source, filename)
    last = tree.body[-1] if tree.body else None
    shown = isinstance(last, ast.Expr) and not _ends_with_semicolon(source)
    if shown:
        tree.body.pop()
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    codes = [compile(tree, filename, "exec", flags, dont_inherit=True)]
    if shown and isinstance(last, ast.Expr):
        flags |= codes[0].co_flags & FUTURE
        codes.append(compile(ast.Expression(last.value), filename, "eval", flags, dont_inherit=True))
    value = None
    if any(code.co_flags & inspect.CO_COROUTINE for code in codes):
        loop = asyncio.new_event_loop()
        ending.callback(_end_loop, loop)
        asyncio.set_event_loop(loop)
        value = loop.run_until_complete(loop.create_task(_execute(codes, namespace), name=CELL))
    else:
        for code in codes:
            value = eval(code, namespace)
    return value if value is not None else namespace.get("result")


async def _execute(codes: list[types.CodeType], namespace: dict[str, Any]) -> Any:
    value = None
    for code in codes:
        value = eval(code, namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            value = await value
    return value


def _ends_with_semicolon(source: str) -> bool:
    """Whether a semicolon hides the last value, also one before a comment."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in layout]
    return bool(tokens) and tokens[-1].string == ";"


# -- the end of the cell ---------------------------------------------------------------------------------------------


def _ignore_notices() -> None:
    """Ignore a notice from now on: the cell is over, and its result and exit code say how."""
    os.environ.pop("MAKEWAY_STOP_FILE", None)
    for name in {"SIGTERM", os.environ.get("MAKEWAY_SIGNAL", "SIGTERM")}:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks that still run and close the loop, in a bounded time."""
    with contextlib.suppress(BaseException):
        if tasks := asyncio.all_tasks(loop):
            if unfinished := [task for task in tasks if task.get_name() != CELL]:
                print(f"Makeway: cancelled at the end of the cell: asyncio tasks {len(unfinished)}.", file=sys.stderr)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_SECONDS))
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), CANCEL_SECONDS))
    asyncio.set_event_loop(None)
    with contextlib.suppress(Exception):
        loop.close()


def _end_in_time(code: int) -> None:
    """End the process although threads, child processes or `atexit` handlers of the cell do not end."""
    time.sleep(min(5.0, END_SECONDS))
    if names := _running_threads_and_tasks():
        wait = f"They may run for {END_SECONDS:g} s; join those whose work you need."
        print(f"Makeway: the cell has ended, but still running are {', '.join(names)}. {wait}", file=sys.stderr)
    time.sleep(max(0.0, END_SECONDS - 5.0))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def _running_threads_and_tasks() -> list[str]:
    main_thread = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main_thread]
    if processes := sys.modules.get("multiprocessing.process"):
        names += [child.name for child in processes.active_children() if not child.daemon]
    return names


# -- variables, result, exception ------------------------------------------------------------------------------------


class OtherPython(Exception):
    """A function or class was pickled by another minor version of Python, whose code this one cannot run."""


class _Portable(pickle.Unpickler):
    """Reads a pickle of another Python: everything but code, which would crash the interpreter."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "cloudpickle" and name != "subimport":
            raise OtherPython
        return super().find_class(module, name)


def loads(data: bytes, python: str) -> Any:
    """Return what a pickle of that Python holds; OtherPython if it holds code that this Python cannot run."""
    return pickle.loads(data) if python in ("", PYTHON) else _Portable(io.BytesIO(data)).load()


def dumps(value: Any, namespace: dict[str, Any] | None = None, *, tolerant: bool = False) -> bytes:
    """Return a pickle of `value` that holds functions and classes of `__main__` by value.

    Functions whose globals are `namespace` get the reader's `__main__` as their globals, and bring along the globals
    that they use. With `tolerant`, what cannot be pickled is replaced by an object that raises when it is used.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            reduced = _reduced(obj)
            if reduced is None:
                reduced = super().reducer_override(obj)
            by_name = isinstance(obj, (type, types.FunctionType)) or type(obj) in self.dispatch_table
            if tolerant and reduced is NotImplemented and not by_name:
                try:
                    obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
                except Exception as error:
                    return _NotSent, (f"a {type(obj).__name__} cannot be sent to a child process ({error})",)
            return reduced

    buffer = io.BytesIO()
    pickler = Pickler(buffer)
    if namespace is not None:
        pickler.globals_ref[id(namespace)] = _MainGlobals()
    pickler.dump(value)
    return buffer.getvalue()


class _MainGlobals(dict):  # type: ignore[type-arg]
    """Becomes, when it is read, the namespace of the reader's `__main__`."""

    def __reduce__(self) -> Any:
        return vars, (sys.modules["__main__"],)


class _NotSent:
    """Stands in a child process for what could not be sent there."""

    def __init__(self, reason: str) -> None:
        self.__dict__["_reason"] = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(self.__dict__.get("_reason", ""))

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(self.__dict__["_reason"])


def _reduced(obj: Any) -> Any:
    """Return the reduction of what pickle would only name, or refuse, though it is defined in a cell; else None."""
    kind = type(obj)
    if kind is CACHED and obj.__module__ == "__main__":
        parameters = obj.cache_parameters() if hasattr(obj, "cache_parameters") else {"maxsize": 128, "typed": False}
        state = {**obj.__dict__, "cache_parameters": functools.partial(dict, **parameters)}
        info: Any = functools._CacheInfo
        made = (obj.__wrapped__, parameters["maxsize"], parameters["typed"], info)
        return CACHED, made, state
    if kind is functools.cached_property:
        return functools.cached_property, (obj.func,), {"attrname": obj.attrname, "__doc__": obj.__doc__}
    if kind is weakref.WeakKeyDictionary:
        return weakref.WeakKeyDictionary, (dict(obj),)
    if isinstance(typing.NewType, type) and kind is typing.NewType and obj.__module__ == "__main__":
        return typing.NewType, (obj.__name__, obj.__supertype__)
    return None


def _load_variables(namespace: dict[str, Any]) -> None:
    path = os.path.join(HERE, "variables.pkl")
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        packed: dict[str, Any] = pickle.load(file)
    names = ", ".join(packed["names"])
    try:
        namespace.update(loads(packed["data"], packed["python"]))
    except OtherPython:
        raise RuntimeError(
            f"--with {names}: the notebook runs Python {packed['python']}, this job Python {PYTHON}, and functions and "
            "classes of a notebook cannot be read by another minor version. Define them in the cell, or in a file sent "
            "with --files; plain values, arrays and data frames can be given."
        ) from None
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"--with {names} cannot be read in the job's Python {PYTHON}: {what}") from error


def _keep_result(value: Any) -> None:
    path = os.environ.get("MAKEWAY_RESULT_FILE")
    if not path or os.environ.get("RANK", "0") != "0" or os.getpid() != RUNNER:
        return
    try:
        data = dumps(value)
    except Exception as error:
        message = f"the result, a {type(value).__name__}, cannot be pickled ({type(error).__name__}: {error})"
        print(f"Makeway: {message}; save it to a file instead.", file=sys.stderr)
        _write_json("MAKEWAY_ERROR_FILE", {"type": "ResultNotKept", "message": message, "traceback": ""})
        return
    _write(path, data + PYTHON_MARK + PYTHON.encode())


def _keep_error(error: BaseException) -> None:
    text, message = _cell_traceback(error), str(error)[:10_000] + _missing(error)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    print(text, file=sys.stderr, end="", flush=True)
    if hint := _missing(error):
        print(f"Makeway{hint}", file=sys.stderr, flush=True)
    if os.environ.get("RANK", "0") == "0" and os.getpid() == RUNNER:
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
    """Return the traceback from the cell's first line on, without the frames of this file and of its event loop."""
    report = traceback.TracebackException.from_exception(error, limit=-200)
    own = os.path.abspath(__file__)
    seen: set[int] = set()
    parts: list[traceback.TracebackException | None] = [report]
    while parts:
        part = parts.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        frames = list(part.stack)
        last = max((n for n, frame in enumerate(frames) if os.path.abspath(frame.filename) == own), default=-1)
        part.stack = traceback.StackSummary.from_list(frames[last + 1 :])
        parts += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or [])]
    return "".join(report.format()).replace(f'File "{CELL}"', 'File "cell"')


def _write_json(variable: str, entry: dict[str, str]) -> None:
    if path := os.environ.get(variable):
        _write(path, json.dumps(entry).encode())


def _write(path: str, data: bytes) -> None:
    part = f"{path}.{os.getpid()}.part"
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


# -- what the cell uses ----------------------------------------------------------------------------------------------


class Display:
    """The handle that `display(…, display_id=True)` returns: an update is printed, too."""

    def display(self, *objects: Any, **_: Any) -> None:
        """Print objects as a notebook shows them in plain text."""
        for item in objects:
            print(repr(item))

    update = display


def display(*objects: Any, display_id: Any = None, **_: Any) -> Display | None:
    """Print objects, as there is no notebook to show them in."""
    shown = Display()
    shown.display(*objects)
    return shown if display_id is not None else None


CHILD_MAIN = '''"""Becomes __main__ of a child process that multiprocessing starts by spawn or forkserver."""

import pickle
import sys
import types


def definitions(path):
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    with open(path, "rb") as file:
        module.__dict__.update(pickle.load(file))
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


globals().update(definitions(__file__[:-3] + ".pkl"))
'''


def _prepare_children(namespace: dict[str, Any]) -> None:
    """Provide processes that multiprocessing starts afresh with the functions and classes of the cell.

    Without this each would run the cell again as its own main program.
    """
    from multiprocessing import spawn

    prepare = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = prepare(name)
        data.pop("init_main_from_name", None)
        data["init_main_from_path"] = _child_main(namespace)
        return data

    spawn.get_preparation_data = prepared


def _child_main(namespace: dict[str, Any]) -> str:
    """Return the file of a module that defines what the cell has defined so far."""
    kinds = (types.FunctionType, type, CACHED)
    result = {
        name: value
        for name, value in list(namespace.items())
        if isinstance(value, kinds) and getattr(value, "__module__", None) == "__main__"
    }
    try:
        data = dumps(result, namespace)
    except Exception:
        data = dumps(result, namespace, tolerant=True)
    # A name for each content: a fork server that has loaded one would not look into the same file again.
    path = os.path.join(HERE, f"main-{hashlib.sha256(data).hexdigest()[:16]}")
    if not os.path.exists(f"{path}.py"):
        _write(f"{path}.pkl", data)
        _write(f"{path}.py", CHILD_MAIN.encode())
    return f"{path}.py"


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    sys.exit(code)
