"""The table of codes that do not come from the engine names those that the code gives to workloads, and no others."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "quota_service/makeway_quota"
POSITIONS = {
    "_reason": 0,
    "exclude": 1,
    "refuse_session": 1,
    "retry_launch": 1,
    "defer": 1,
    "start_again": 1,
    "_never_ran": 2,
    "_ended": 2,
    "release": 2,
    "move_queue": 2,
    "finish": 2,
    "_finish": 2,
    "_requeue": 3,
    "requeue": 4,
}
"""Function to the place of the code among its arguments; where it is a parameter, the callers of the function say it"""


def given_codes() -> set[str]:
    """Return the codes that the modules of `control` and `services` write as reasons."""
    files = (file for package in ("control", "services") for file in (SERVICE / package).rglob("*.py"))
    return {code for file in files for code in codes_in(file)}


def codes_in(file: Path) -> Iterator[str]:
    name = ".".join(file.relative_to(SERVICE.parent).with_suffix("").parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for value in values_in(node):
            yield from resolved(value, name)


def values_in(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a call or a dictionary gives as a code."""
    if isinstance(node, ast.Dict):
        yield from (value for key, value in zip(node.keys, node.values, strict=True) if is_code(key))
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        place = POSITIONS.get(called, len(node.args))
        yield from node.args[place : place + 1]
        if called == "Reason":
            yield from (word.value for word in node.keywords if word.arg == "code")
    elif isinstance(node, ast.FunctionDef) and node.name in POSITIONS:
        yield from node.args.defaults


def is_code(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == "reason_code"


def resolved(value: ast.expr, module: str) -> Iterator[str]:
    """Yield the text of a constant or of a name of the module; parameters and attributes are none."""
    if isinstance(value, ast.IfExp):
        yield from resolved(value.body, module)
        yield from resolved(value.orelse, module)
    result = value.value if isinstance(value, ast.Constant) else None
    if isinstance(value, ast.Name):
        result = getattr(importlib.import_module(module), value.id, None)
    if isinstance(result, str):
        yield result


def table(title: str) -> list[str]:
    text = (ROOT / "docs/explanation/engine.md").read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    heads = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    return [code for head in heads for code in re.findall(r"`(\w+)`", head)]


def test_the_table_has_each_code_of_the_control_loop_and_the_api_and_no_other() -> None:
    told, given = table("Codes of the control loop and the API"), given_codes()
    assert len(told) == len(set(told))
    assert given - set(told) == set()
    assert set(told) - given == set()
