"""A cell in a job is the same program as in its notebook: what objects share, its event loop, its child processes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from makeway import cellrunner, payload
from makeway.problems import Refused

NEXT = f"{sys.version_info[0]}.{sys.version_info[1] + 1}"
"""A minor version of Python that is not this one"""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A notebook's `__main__`, whose cells `typed` runs."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def typed(main: types.ModuleType, cell: str) -> dict[str, Any]:
    exec(compile(cell, "cell", "exec", dont_inherit=True), main.__dict__)
    return main.__dict__


class Cell:
    """A cell in a folder of its own, as the launcher runs it."""

    def __init__(self, folder: Path, source: str, variables: dict[str, Any] | None = None, first_line: int = 1) -> None:
        self.folder = folder
        for file in payload.cell_files(source, variables or {}, first_line):
            path = folder / file.path
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(base64.b64decode(file.data))

    def run(self, **env: str) -> Cell:
        """Run it to its end, and kill what it leaves behind, as the launcher does."""
        env |= {"PATH": os.environ["PATH"], "MAKEWAY_RESULT_FILE": str(self.folder / "result")}
        env["MAKEWAY_ERROR_FILE"] = str(self.folder / "error")
        with open(self.folder / "log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-u", ".makeway/run.py"],
                cwd=self.folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                self.code = process.wait(120)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.out = (self.folder / "log").read_text()
        return self

    def limited(self, seconds: float) -> Cell:
        """Shorten the time that what the cell leaves behind may run."""
        runner = self.folder / ".makeway/run.py"
        text = runner.read_text()
        assert "END_SECONDS = 60.0" in text
        text = text.replace("END_SECONDS = 60.0", f"END_SECONDS = {seconds}")
        runner.write_text(text.replace("CANCEL_SECONDS = 5.0", f"CANCEL_SECONDS = {seconds / 4}"))
        return self

    @property
    def result(self) -> Any:
        return payload.result_of((self.folder / "result").read_bytes())

    @property
    def error(self) -> dict[str, str]:
        result: dict[str, str] = json.loads((self.folder / "error").read_text())
        return result


# -- what objects share ----------------------------------------------------------------------------------------------


def test_variables_that_share_an_object_share_it_in_the_job(tmp_path: Path) -> None:
    weights = [18.0]
    model, optimizer = {"weights": weights}, {"parameters": [weights]}
    step = "optimizer['parameters'][0][0] = 0.5\nmodel['weights'][0], optimizer['parameters'][0] is model['weights']"
    ran = Cell(tmp_path, step, {"model": model, "optimizer": optimizer}).run()
    assert ran.result == (0.5, True), ran.out


@pytest.mark.parametrize(
    ("notebook", "given", "cell", "value"),
    [
        ("n = 0\ndef bump():\n    global n\n    n += 1", ["n", "bump"], "bump(); bump()\nn", 2),
        ("state = {}\ndef put(k):\n    state[k] = 1", ["put", "state"], "put('a')\nstate", {"a": 1}),
        ("rate = 1\ndef f():\n    return rate", ["f"], "rate = 5\nf()", 5),
        ("seen = []\nclass A:\n    def add(self):\n        seen.append(1)", ["A", "seen"], "A().add()\nlen(seen)", 1),
        ("xs = []\nclass A:\n    def add(self):\n        xs.append(1)\na = A()", ["a", "xs"], "a.add()\nlen(xs)", 1),
        ("def f():\n    return g()\ndef g():\n    return 1", ["f"], "def g():\n    return 2\nf()", 2),
        ("a = []\nb = [a]\na.append(b)", ["a", "b"], "a[0] is b, b[0] is a", (True, True)),
        ("xs = [1]\nadd = lambda n: xs.append(n)\nalso = lambda: xs", ["add", "also"], "add(2)\nalso()", [1, 2]),
        (
            "from functools import lru_cache\n@lru_cache(maxsize=7)\ndef fib(n):\n"
            "    return n if n < 2 else fib(n - 1) + fib(n - 2)",
            ["fib"], "fib(30), fib.cache_parameters()['maxsize'], fib.cache_info().maxsize", (832040, 7, 7),
        ),
        (
            "import functools\nclass A:\n    @functools.cached_property\n    def x(self):\n        return 3\na = A()",
            ["a"], "a.x", 3,
        ),
        (
            "from functools import singledispatch\n@singledispatch\ndef kind(x):\n    return 'any'\n"
            "@kind.register\ndef _(x: int):\n    return 'int'",
            ["kind"], "kind(1), kind('')", ("int", "any"),
        ),
        ("from typing import NewType\nId = NewType('Id', int)", ["Id"], "Id(3), Id.__name__", (3, "Id")),
        ("import math\ndef f():\n    return math.pi", ["f"], "round(f())", 3),
    ],
)  # fmt: skip
def test_functions_and_classes_use_the_variables_of_the_cell(
    tmp_path: Path, main: types.ModuleType, notebook: str, given: list[str], cell: str, value: object
) -> None:
    names = typed(main, notebook)
    ran = Cell(tmp_path, cell, {name: names[name] for name in given}).run()
    assert ran.code == 0, ran.out
    assert ran.result == value


def test_the_variable_that_cannot_be_sent_is_named(main: types.ModuleType) -> None:
    names = typed(
        main, "import threading\nlock = threading.Lock()\nx = 1\ndef train():\n    with lock:\n        return x"
    )
    with pytest.raises(Refused, match=r"^--with lock: a lock cannot be pickled"):
        payload.pickled({"x": names["x"], "lock": names["lock"]})
    with pytest.raises(
        Refused, match=r"^--with train: it uses lock, and a lock cannot be pickled .* Make it inside the"
    ):
        payload.pickled({"x": names["x"], "train": names["train"]})
    assert [*payload.brought_along(names["train"])] == ["lock", "x"]


def test_the_largest_variable_is_named() -> None:
    with pytest.raises(Refused, match=r"120 MB pickled exceeds the limit of 50 MB; the largest is big;"):
        payload.pickled({"small": bytes(50_000_000), "big": bytes(70_000_000)})
    assert len(payload.pickled({"a": (data := bytes(40_000_000)), "b": data})) < 50_000_000, "the same bytes go once"


# -- the same Python -------------------------------------------------------------------------------------------------


def renamed(folder: Path) -> None:
    """Make the variables look as if another Python had packed them."""
    path = folder / ".makeway/variables.pkl"
    path.write_bytes(pickle.dumps({**pickle.loads(path.read_bytes()), "python": NEXT}))


def test_code_of_another_python_is_refused_before_it_can_crash(tmp_path: Path, main: types.ModuleType) -> None:
    names = typed(main, "class Net:\n    def run(self): ...\nnet = Net()\ndef f(): ...\nxs = [1, 2]")
    for number, given in enumerate(("Net", "net", "f")):
        (folder := tmp_path / str(number)).mkdir()
        cell = Cell(folder, "1", {"xs": names["xs"], given: names[given]})
        renamed(folder)
        assert cell.run().code == 1
        assert f"--with xs, {given}: the notebook runs Python {NEXT}, this job Python {cellrunner.PYTHON}" in cell.out
        assert cell.error["type"] == "RuntimeError"


def test_plain_values_of_another_python_are_given(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    cell = Cell(tmp_path, "xs, float(a.sum())", {"xs": [1, {"k": {2}}], "a": numpy.ones(3)})
    renamed(tmp_path)
    assert cell.run().result == ([1, {"k": {2}}], 3.0), cell.out


def test_the_result_says_which_python_made_it(tmp_path: Path) -> None:
    ran = Cell(tmp_path, "class Net:\n    def run(self): ...\n[Net(), 1]").run()
    data = (tmp_path / "result").read_bytes()
    assert payload.result_of(data)[1] == 1
    assert type(pickle.loads(data)[0]).__name__ == "Net", "a notebook of an earlier release reads it, too"
    other = data.replace(cellrunner.PYTHON.encode(), NEXT.encode())
    with pytest.raises(Refused, match=f"made by Python {NEXT}, and this kernel runs Python {cellrunner.PYTHON}"):
        payload.result_of(other)
    plain = pickle.dumps({"loss": [0.5]}) + cellrunner.PYTHON_MARK + NEXT.encode()
    assert payload.result_of(plain) == {"loss": [0.5]}
    assert payload.result_of(pickle.dumps(7)) == 7, "of a job of an earlier release"
    assert ran.code == 0


# -- one event loop --------------------------------------------------------------------------------------------------

ASYNC = "import asyncio\nasync def later(x):\n    await asyncio.sleep(0.01)\n    return x\n"


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("task = asyncio.create_task(later(3))\nawait asyncio.sleep(0)\nawait task", 3),
        ("queue = asyncio.Queue()\nawait queue.put(1)\nawait queue.get()", 1),
        ("lock = asyncio.Lock()\nawait lock.acquire()\nlock.locked() and await later(2)", 2),
        ("loop = asyncio.get_running_loop()\nawait later(0)\nloop is asyncio.get_running_loop()", True),
        ("[await later(i) for i in range(3)]", [0, 1, 2]),
        ("async with asyncio.timeout(5):\n    x = await later(4)\nx", 4),
        (
            "async def ticks():\n    for i in range(3):\n        yield await later(i)\n[i async for i in ticks()]",
            [0, 1, 2],
        ),
        ("import contextvars\nv = contextvars.ContextVar('v', default=0)\nv.set(await later(6))\nv.get()", 6),
        ("asyncio.run(later(8))", 8),
    ],
)
def test_body_and_last_expression_share_one_event_loop(tmp_path: Path, cell: str, value: object) -> None:
    ran = Cell(tmp_path, ASYNC + cell).run()
    assert (ran.code, ran.out) == (0, "")
    assert ran.result == value


def test_tasks_that_are_left_are_cancelled_and_the_job_ends(tmp_path: Path) -> None:
    cell = ASYNC + "task = asyncio.create_task(asyncio.Event().wait())\nawait later('done')"
    ran = Cell(tmp_path, cell).run()
    assert (ran.code, ran.result) == (0, "done")
    assert "Makeway: cancelled at the end of the cell: asyncio tasks 1." in ran.out


STUBBORN = """
async def stubborn():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
task = asyncio.create_task(stubborn())
await later('done')
"""
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, name='monitor').start()\n'done'"
EXECUTOR = "import time\nwork = asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)\nawait later('done')"
BLOCKED = """
async def blocked():
    try:
        await asyncio.sleep(3600)
    finally:
        time.sleep(3600)
task = asyncio.create_task(blocked())
await later('done')
"""
CHILD = (
    "import multiprocessing as mp, time\nmp.get_context('fork').Process(target=time.sleep, args=[3600]).start()\n'done'"
)
AT_EXIT = "import atexit, time\natexit.register(time.sleep, 3600)\n'done'"


@pytest.mark.parametrize("cell", [STUBBORN, THREAD, EXECUTOR, BLOCKED, CHILD, AT_EXIT])
def test_nothing_that_a_cell_leaves_behind_keeps_its_gpu(tmp_path: Path, cell: str) -> None:
    ran = Cell(tmp_path, ASYNC + cell).limited(1.0).run()
    assert (ran.code, ran.result) == (0, "done"), ran.out


def test_a_thread_that_the_cell_leaves_behind_is_named_and_may_end_its_work(tmp_path: Path) -> None:
    cell = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(1.5), print('saved'))).start()\n1"
    ran = Cell(tmp_path, cell).run()
    assert (ran.code, ran.out) == (0, "saved\n")
    (tmp_path / "two").mkdir()
    assert "still running are monitor" in Cell(tmp_path / "two", THREAD).limited(1.0).run().out


@pytest.mark.parametrize(
    ("cell", "kind", "code"),
    [
        ("raise KeyboardInterrupt", "KeyboardInterrupt", 1),
        ("import asyncio\nraise asyncio.CancelledError('gone')", "CancelledError", 1),
        (
            "import asyncio\nasync def f():\n    raise ValueError('in f')\nawait asyncio.gather(f(), f())",
            "ValueError",
            1,
        ),
        ("import asyncio\nawait asyncio.sleep(0)\nraise KeyboardInterrupt", "KeyboardInterrupt", 1),
        (
            "import asyncio\ntask = asyncio.create_task(asyncio.sleep(9))\ntask.cancel()\nawait task",
            "CancelledError",
            1,
        ),
        ("class Stop(BaseException): pass\nraise Stop('now')", "Stop", 1),
        ("def f(): f()\nf()", "RecursionError", 1),
    ],
)
def test_every_exception_is_kept_with_the_frames_of_the_cell_only(
    tmp_path: Path, cell: str, kind: str, code: int
) -> None:
    ran = Cell(tmp_path, cell, first_line=3).run()
    assert (ran.code, ran.error["type"]) == (code, kind), ran.out
    frames = [line for line in ran.error["traceback"].splitlines() if line.startswith("  File ")]
    assert frames[0].startswith('  File "cell", line ')
    assert "run.py" not in ran.out
    assert "run_until_complete" not in ran.out
    last = cell.count("\n") + 3
    numbered = frames[0].startswith(f'  File "cell", line {last}, in <module>')
    assert numbered or kind == "RecursionError", "numbered as in the notebook"


def test_exceptions_in_a_group_show_the_cell_only(tmp_path: Path) -> None:
    cell = "async def f():\n    raise ValueError('one')\n"
    cell += "import asyncio\nasync with asyncio.TaskGroup() as g:\n    g.create_task(f())"
    ran = Cell(tmp_path, cell).run()
    assert ran.error["type"] == "ExceptionGroup"
    assert "ValueError: one" in ran.error["traceback"]
    assert "run.py" not in ran.error["traceback"]


@pytest.mark.parametrize(
    ("cell", "code", "says"),
    [
        ("import sys\nsys.exit('no data')", 1, "no data\n"),
        ("import sys\nsys.exit()", 0, ""),
        ("import asyncio, sys\nawait asyncio.sleep(0)\nsys.exit(75)", 75, ""),
        ("import asyncio, sys\nasync def f():\n    sys.exit(7)\nawait asyncio.gather(f())", 7, ""),
    ],
)
def test_the_exit_code_of_the_cell_is_the_jobs_also_in_its_loop(
    tmp_path: Path, cell: str, code: int, says: str
) -> None:
    ran = Cell(tmp_path, cell).run()
    assert (ran.code, ran.out) == (code, says)
    assert not (tmp_path / "error").exists()


def test_a_notice_after_the_last_line_does_not_throw_the_result_away(tmp_path: Path) -> None:
    cell = "import os, signal\nclass Slow:\n    def __reduce__(self):\n        os.kill(os.getpid(), signal.SIGTERM)\n"
    ran = Cell(tmp_path, cell + "        return int, (5,)\nSlow()").run()
    assert (ran.code, ran.result) == (0, 5)


# -- the cell's own syntax -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("from dataclasses import dataclass, fields\n@dataclass\nclass P:\n    x: int\nfields(P)[0].type", int),
        (
            "from functools import singledispatch\n@singledispatch\ndef f(x):\n    return 'any'\n"
            "@f.register\ndef _(x: int):\n    return 'int'\nf(1)",
            "int",
        ),
        ("from __future__ import annotations\ndef f(x: int): ...\nf.__annotations__", {"x": "int"}),
        ("from __future__ import annotations\n(lambda: 1, [c for c in [1]])[1]", [1]),
        ("5;  # hidden", None),
        ("5  # shown;", 5),
        ("';'", ";"),
    ],
)
def test_a_cell_is_compiled_as_it_is_written(tmp_path: Path, cell: str, value: object) -> None:
    ran = Cell(tmp_path, cell).run()
    assert (ran.code, ran.out) == (0, "")
    assert ran.result == value


def test_display_prints_in_a_job(tmp_path: Path) -> None:
    cell = (
        "def show(x):\n    display(x, 2)\nshow('one')\nshown = display([3], display_id=True)\nshown.update({'four': 4})"
    )
    assert Cell(tmp_path, cell).run().out == "'one'\n2\n[3]\n{'four': 4}\n"


def test_any_text_can_be_printed(tmp_path: Path) -> None:
    ran = Cell(tmp_path, "print('ü漢🎉', '\\udce9')").run(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (ran.code, ran.out) == (0, "ü漢🎉 \\udce9\n")


# -- child processes -------------------------------------------------------------------------------------------------

START = "import multiprocessing as mp\ncontext = mp.get_context('{method}')\n"
POOL = "with context.Pool(2) as pool:\n    done = pool.map({function}, range(3))\ndone"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("scale = 3\ndef work(n):\n    return n * scale\n" + POOL.format(function="work"), [0, 3, 6]),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    def twice(self):\n"
            "        return Point(self.x * 2)\ndef work(n):\n    return Point(n).twice()\n"
            + POOL.format(function="work") + "\n[type(p) is Point and p.x for p in done]", [0, 2, 4],
        ),
        (
            "def prepare(n):\n    global offset\n    offset = n\ndef work(n):\n    return n + offset\n"
            "with context.Pool(2, prepare, (10,)) as pool:\n    done = pool.map(work, range(3))\ndone", [10, 11, 12],
        ),
        (
            "import threading\nlock = threading.Lock()\nbase = 5\ndef work(n):\n    return n + base\ndef other():\n"
            "    with lock:\n        pass\n" + POOL.format(function="work"), [5, 6, 7],
        ),
        (
            "from concurrent.futures import ProcessPoolExecutor\ndef fails(n):\n    raise KeyError(n)\n"
            "with ProcessPoolExecutor(1, mp_context=context) as pool:\n"
            "    error = pool.submit(fails, 7).exception()\ntype(error).__name__, error.args", ("KeyError", (7,)),
        ),
        (
            "def work(queue):\n    queue.put(__name__)\nqueue = context.Queue()\n"
            "child = context.Process(target=work, args=(queue,))\nchild.start()\nname = queue.get(timeout=60)\n"
            "child.join()\nname, child.exitcode", ("__main__", 0),
        ),
    ],
)  # fmt: skip
def test_child_processes_know_what_the_cell_defines(tmp_path: Path, method: str, cell: str, value: object) -> None:
    ran = Cell(tmp_path, START.format(method=method) + cell).run()
    assert ran.code == 0, ran.out
    assert ran.result == value


def test_child_processes_know_functions_that_were_given(tmp_path: Path, main: types.ModuleType) -> None:
    names = typed(main, "scale = 4\ndef work(n):\n    return n * scale")
    cell = START.format(method="spawn") + POOL.format(function="work")
    assert Cell(tmp_path, cell, {"work": names["work"]}).run().result == [0, 4, 8]


def test_a_child_of_a_bare_fork_leaves_no_result(tmp_path: Path) -> None:
    cell = "import os\nchild = os.fork()\nif child:\n    os.waitpid(child, 0)\n'parent' if child else 'child'"
    assert Cell(tmp_path, cell).run().result == "parent"
