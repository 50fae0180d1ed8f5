"""Agent, launcher and library of jobs run on Python 3.8: neither their syntax, calls nor types need a newer one."""

from __future__ import annotations

import ast
import builtins
import importlib
import subprocess
import sys
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path

import pytest
from makeway_quota.backends.local.launch import launcher_files

OLDEST = "3.8"


def sources(root: Path) -> list[Path]:
    package = root / "widgets" / "makeway"
    launcher = [source for source, _ in launcher_files(package / "launcher")]
    return [package / "__init__.py", *sorted((package / "agent").glob("*.py")), *sorted(launcher)]


def newer_features(files: list[Path]) -> str:
    """Return what vermin finds in these files that the oldest Python does not have; "" for nothing."""
    vermin = Path(sys.executable).with_name("vermin")
    command = [vermin, "--no-tips", "--violations", "-vvv", f"-t={OLDEST}-", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a module that run: neither its annotations, nor what is for type checkers alone."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        if name == "body" and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from evaluated(child)


def is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def imported(tree: ast.Module) -> dict[str, object]:
    """Return the modules and the parts of modules of the standard library that a module imports, by their names."""
    result: dict[str, object] = dict(vars(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            tops = {alias.name.partition(".")[0] for alias in node.names if is_standard(alias.name)}
            result |= {top: importlib.import_module(top) for top in tops}
        elif isinstance(node, ast.ImportFrom) and not node.level and is_standard(str(node.module)):
            module = importlib.import_module(str(node.module))
            result |= {alias.asname or alias.name: getattr(module, alias.name, None) for alias in node.names}
    return result


def newer_types(text: str) -> list[str]:
    """Return the types that the oldest Python cannot evaluate: `list[int]` and `int | None` outside of annotations."""
    tree = ast.parse(text)
    known = imported(tree)
    parts = list(evaluated(tree))
    assigned = {node.id for node in parts if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assigned |= {node.arg for node in parts if isinstance(node, ast.arg)}

    def value(node: ast.AST) -> object:
        if isinstance(node, ast.Name):
            return None if node.id in assigned else known.get(node.id)
        return getattr(value(node.value), node.attr, None) if isinstance(node, ast.Attribute) else None

    def is_type(node: ast.AST) -> bool:
        found = value(node)
        return isinstance(found, type) and found.__module__ != "typing" and not isinstance(found, EnumType)

    def is_newer(node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript):
            return is_type(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return any(is_type(side) or is_newer(side) for side in (node.left, node.right))
        return False

    return [
        f"line {node.lineno}: {ast.unparse(node)}" for node in parts if isinstance(node, ast.expr) and is_newer(node)
    ]


def test_what_runs_on_machines_and_in_images_needs_no_newer_python(root: Path) -> None:
    files = sources(root)
    assert {file.parent.name for file in files} >= {"agent", "launcher", "checkpointing", "frameworks"}
    assert newer_features(files) == ""
    types = {str(file.relative_to(root)): newer_types(file.read_text(encoding="utf-8")) for file in files}
    assert {file: found for file, found in types.items() if found} == {}


@pytest.mark.parametrize(
    "line",
    [
        "WorkerKey = tuple[str, int]",
        "numbers = set[int]()",
        "class Names(list[str]): pass",
        "from collections.abc import Callable\nWork = Callable[[int], str]",
        "import subprocess\nprocess = subprocess.Popen[bytes](['true'])",
        "from typing import cast\nfound = cast(dict[str, int], {})",
        "Wait = float | None",
        "isinstance(1, int | str)",
        "def count(x: int = len(list[int]())) -> None: pass",
    ],
)
def test_a_type_that_only_newer_pythons_evaluate_is_found(line: str) -> None:
    assert len(newer_types(f"from __future__ import annotations\n{line}\n")) >= 1


@pytest.mark.parametrize(
    "line",
    [
        "def count(names: list[str] | None = None) -> dict[str, int]: ...",
        "names: list[str] = []",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    Key = tuple[str, int]",
        "from typing import Optional, Dict\nKey = Optional[Dict[str, int]]",
        "import os\nhome = os.environ['HOME']",
        "import os\nflags = os.O_RDONLY | os.O_CLOEXEC",
        "def first(list): return list[0]",
        "import signal\nnumber = signal.Signals['SIGTERM']",
    ],
)
def test_what_every_python_evaluates_is_no_such_type(line: str) -> None:
    assert newer_types(f"from __future__ import annotations\n{line}\n") == []


@pytest.mark.parametrize(
    "lines",
    [
        "import functools\n@functools.cache\ndef one(): return 1",
        "name = 'a.b'.removeprefix('a')",
        "with (open('a') as one, open('b') as two): pass",
        "end = {}\nend |= {'a': 1}",
        "match 1:\n    case 1: pass",
        "zip([1], [2], strict=True)",
    ],
)
def test_a_call_or_a_syntax_of_newer_pythons_is_found(lines: str, tmp_path: Path) -> None:
    (tmp_path / "newer.py").write_text(f"from __future__ import annotations\n{lines}\n")
    assert "newer.py" in newer_features([tmp_path / "newer.py"])
