"""Modules are short and begin with a sentence; a newcomer who reads only first lines knows the system."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = (
    "hub_config/makeway_hub",
    "spawner/makeway_spawner",
    "quota_service/makeway_api",
    "quota_service/makeway_quota",
    "widgets/makeway",
    "device_plugin/makeway_device_plugin",
)
CHECKED = (*PACKAGES, "kube_cluster")
"""The packages of the wheel, and the test cluster, which is used from a checkout alone."""
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
LONGEST_MODULE = 500
LONGEST_FUNCTION = 60
REFERENCE = "reference"
"""The folder of the reference engine, whose classes are named like those of the engine that it is compared with."""
TWO_SIDES = {"Workload", "Room"}
"""A workload in the store and in the engine; the room in a pool and the room that a search tries."""


def modules(root: Path) -> Iterator[Path]:
    for package in CHECKED:
        for file in sorted((root / package).rglob("*.py")):
            if "versions" not in file.parts and "__pycache__" not in file.parts:
                yield file


def test_every_module_begins_with_a_sentence(root: Path) -> None:
    wrong = []
    for file in [*modules(root), *(root / "scripts").glob("*.py"), *(root / "benchmarks").glob("*.py")]:
        first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").strip().splitlines()[:1]
        if not first or len(first[0].split()) < 3 or not (first[0][0].isupper() or first[0][0] in "`%"):
            wrong.append(str(file.relative_to(root)))
    assert not wrong


def test_no_module_or_function_is_too_long(root: Path) -> None:
    wrong = []
    for file in modules(root):
        text = file.read_text(encoding="utf-8")
        if len(text.splitlines()) > LONGEST_MODULE:
            wrong.append(f"{file.relative_to(root)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    wrong.append(f"{file.relative_to(root)}:{node.lineno} {node.name}: {length} lines")
    assert not wrong


def test_no_module_has_an_empty_name(root: Path) -> None:
    assert not [str(file.relative_to(root)) for file in modules(root) if file.stem in BANNED_NAMES]


@pytest.mark.parametrize("package", CHECKED)
def test_no_package_has_two_classes_of_one_name(root: Path, package: str) -> None:
    found: dict[str, list[str]] = {}
    for file in modules(root):
        if file.is_relative_to(root / package) and REFERENCE not in file.parts:
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(str(file.relative_to(root)))
    assert found
    assert not {name: files for name, files in found.items() if len(files) > 1 and name not in TWO_SIDES}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(root: Path, package: str) -> None:
    assert (root / package / "py.typed").exists()


def test_one_module_writes_the_states_of_workloads(root: Path) -> None:
    package = root / "quota_service/makeway_quota"
    writers = []
    for file in sorted(package.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        if any(isinstance(call.func, ast.Name) and call.func.id == "Change" for call in calls):
            writers.append(file.relative_to(package).as_posix())
    assert writers == ["control/transitions.py"]
