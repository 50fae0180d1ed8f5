"""What a cell cannot do in a job is found when it is submitted, with its line and the option that helps."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from makeway import payload
from makeway.cellcheck import CellCheck
from makeway.problems import Refused


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A notebook's folder with a module, a package, a program and a table beside the notebook."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "beside_net.py").write_text("depth = 3")
    (tmp_path / "beside_package").mkdir()
    (tmp_path / "beside_package/__init__.py").write_text("")
    (tmp_path / "prepare.sh").write_text("#!/bin/sh\n")
    (tmp_path / "table.csv").write_text("a,b\n")
    return tmp_path


def refused(source: str, **details: Any) -> str:
    with pytest.raises(Refused) as caught:
        CellCheck(source, **details).run()
    return caught.value.message


def notes(source: str, **details: Any) -> str:
    return "\n".join(CellCheck(source, **details).run())


@pytest.mark.parametrize(
    ("cell", "line", "what"),
    [
        ("x = 1\n!nvidia-smi", 2, "`!nvidia-smi`, is notebook syntax"),
        ("files = !ls\nx = = 1", 1, "`files = !ls`, is notebook syntax"),
        ("x = = 1\n!nvidia-smi", 1, "is not valid Python: invalid syntax"),
        ("text = '''\n!not a command\n'''\nx = = 1", 4, "is not valid Python"),
        ("x = 5 \\\n  % 3\ny = (", 3, "is not valid Python: '(' was never closed"),
        ("import os\nos.path?", 2, "`os.path?`, is notebook syntax"),
        ("for i in range(3):\n    %time i", 2, "`%time i`, is notebook syntax"),
        ("if True:\nx = 1", 2, "is not valid Python: expected an indented block"),
    ],
)
def test_the_line_to_blame_is_named_as_the_notebook_numbers_it(cell: str, line: int, what: str) -> None:
    for first in (1, 2, 5):
        with pytest.raises(Refused) as caught:
            payload.check_cell(cell, first)
        assert caught.value.message.startswith(f"line {line + first - 1} of the cell")
        assert what in caught.value.message


def test_a_warning_about_the_syntax_is_left_to_the_cells_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        payload.check_cell("1 is 1\n'\\d'")
        CellCheck("1 is 1\n'\\d'").run()


NOTEBOOK = {"data": [1, 2], "np": math, "math": math, "total": 0, "step": lambda: 0, "input": 5}


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("sum(data)", "the cell uses data of the notebook; a job sees only its cell and what is given"),
        ("def f():\n    return data\nf()", "Add --with data"),
        ("[x for x in data]", "Add --with data"),
        ("total += 1", "Add --with total"),
        ("for i in range(3):\n    total += i", "Add --with total"),
        ("def bump():\n    global total\n    total += 1\nbump()", "Add --with total"),
        ("x = total\ntotal = 1", "Add --with total"),
        ("class A:\n    size = len(data)", "Add --with data"),
        ("lambda: step()", "Add --with step"),
        ("if True:\n    print(data)", "Add --with data"),
        ("print(data, total)", "Add --with data,total, or define them in the cell."),
        ("input + 1", "Add --with input"),
        ("np.pi", "Write `import math as np` into the cell."),
        ("math.pi", "Write `import math` into the cell."),
    ],
)  # fmt: skip
def test_variables_of_the_notebook_that_are_not_given_are_named(cell: str, says: str) -> None:
    assert says in refused(cell, namespace=NOTEBOOK)


@pytest.mark.parametrize(
    "cell",
    [
        "data = [3]\nsum(data)",
        "def f(data):\n    return data\nf(1)",
        "from os import path as data\ndata",
        "for data in range(3):\n    print(data)",
        "with open('x', 'w') as data:\n    data.write('')",
        "import math\nmath.pi",
        "try:\n    data\nexcept NameError:\n    data = 1",
        "if 'data' in globals():\n    print(data)",
        "[data for data in range(3)]",
        "def f():\n    global total\n    total = 0\nf()\ntotal",
        "total = 0\ntotal += 1",
        "(data := 3)\ndata",
        "match 5:\n    case data:\n        print(data)",
        "def f():\n    total = 0\n    total += 1\nf()",
        "class data:\n    pass\ndata()",
        "undefined_everywhere",
        "from os.path import *\ndata",
        "for i in range(2):\n    if i:\n        print(data)\n    data = i",
    ],
)
def test_names_that_the_cell_defines_are_its_own(cell: str) -> None:
    CellCheck(cell, namespace=NOTEBOOK).run()


def test_what_is_given_and_what_it_brings_along_is_not_missed() -> None:
    CellCheck("sum(data)", namespace=NOTEBOOK, given=["data"]).run()


@pytest.mark.parametrize(
    ("cell", "option"),
    [
        ("import beside_net", "Add --files beside_net.py."),
        ("from beside_net import depth", "Add --files beside_net.py."),
        ("def f():\n    import beside_package.deep", "Add --files beside_package."),
        ("import os, beside_net as net", "Add --files beside_net.py."),
    ],
)
def test_a_module_beside_the_notebook_has_to_be_sent(cell: str, option: str) -> None:
    assert option in refused(cell)
    CellCheck(cell, sent=["beside_net.py", "beside_package/__init__.py"]).run()


def test_a_module_that_only_this_notebook_finds_is_said(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("elsewhere")
    (other / "far_module.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other)])
    assert "which only this notebook finds" in refused("import far_module")


@pytest.mark.parametrize(
    "cell",
    [
        "try:\n    import beside_net\nexcept ImportError:\n    pass",
        "import json, makeway, pytest",
        "from makeway import checkpoint",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import beside_net",
    ],
)
def test_a_module_that_the_job_has_or_may_lack_is_fine(cell: str) -> None:
    assert notes(cell) == ""


def test_what_is_missing_here_is_a_note_because_the_jobs_image_may_have_it() -> None:
    assert "The cell imports no_such_module, which is not installed here" in notes("import no_such_module")
    cell = "import subprocess\nsubprocess.run(['no-such-program'])"
    assert "The program no-such-program is not found here" in notes(cell)
    assert "no-such-program" in notes("import os\nos.system('no-such-program --help')")
    assert "no-such-program" in notes("import subprocess\nsubprocess.run('no-such-program | cat', shell=True)")
    assert notes("import no_such_module", image="torch") == ""
    assert notes("import subprocess\nsubprocess.run(['sh', '-c', 'true'])") == ""


def test_programs_and_tables_beside_the_notebook_are_named() -> None:
    assert "Add --files prepare.sh" in refused("import subprocess\nsubprocess.run(['./prepare.sh'])")
    CellCheck("import subprocess\nsubprocess.run(['./prepare.sh'])", sent=["prepare.sh"]).run()
    assert "add --files table.csv" in notes("open('table.csv').read()")
    assert "add --files table.csv" in notes("import csv\nfrom pandas import read_csv\nread_csv('table.csv')")
    assert notes("open('table.csv', 'w').write('')") == ""
    assert notes("open('table.csv').read()", sent=["table.csv"]) == ""


def test_a_command_that_is_missing_is_a_note() -> None:
    assert "no-such-program" in CellCheck("pass").command(["no-such-program", "-v"])[0]
    assert CellCheck("pass").command([sys.executable, "-V"]) == []


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("x = 1\nget_ipython().run_line_magic('matplotlib', 'inline')", "line 3 of the cell calls get_ipython()"),
        ("from IPython import get_ipython\nget_ipython().kernel", "calls get_ipython(), which only a notebook has"),
        ("name = input('name')", "line 2 of the cell calls input(), and a job has no keyboard."),
        ("breakpoint()", "a job has no keyboard"),
        ("import asyncio\nasync def f(): ...\nasyncio.create_task(f())", "line 4 of the cell starts a task"),
    ],
)  # fmt: skip
def test_what_only_a_notebook_has_is_refused(cell: str, says: str) -> None:
    assert says in refused(cell, first_line=2)


@pytest.mark.parametrize(
    "cell",
    [
        "try:\n    get_ipython()\nexcept NameError:\n    pass",
        "if 'get_ipython' in globals():\n    get_ipython()",
        "def get_ipython(): ...\nget_ipython()",
        "def input(text): return 1\ninput('')",
        "display(1)",
        "import asyncio\nasync def f(): ...\ntask = asyncio.create_task(f())\nawait task",
    ],
)
def test_what_a_job_can_do_is_accepted(cell: str) -> None:
    CellCheck(cell).run()


def test_threads_that_the_cell_does_not_join_are_a_note() -> None:
    assert "joins none of its threads" in notes("import threading\nthreading.Thread(target=print).start()")
    assert notes("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()") == ""
    assert notes("import threading\nthreading.Thread(target=print, daemon=True).start()") == ""
