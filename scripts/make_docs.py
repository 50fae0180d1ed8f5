"""Writes the pages of docs/ that are made from the code and its tests, and says which ones are out of date.

`make docs` writes them; `python scripts/make_docs.py --check` only compares, as tests/house does.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Made by `make docs`; edit {source} instead. -->\n"


@dataclass(frozen=True, order=True, slots=True)
class Proof:
    """A test that names a row in its `covers` mark."""

    row: str
    file: str
    test: str


def proofs(tests: Path) -> list[Proof]:
    """Collect every `covers` mark below a folder by reading the tests, without running them."""
    result = []
    for file in sorted(tests.rglob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        module = [row for statement in tree.body if is_pytestmark(statement) for row in covered(statement)]
        name = file.relative_to(tests.parent).as_posix()
        result += [Proof(row, name, test) for test, rows in tests_in(tree, module, "") for row in rows]
    return sorted(set(result))


def tests_in(scope: ast.Module | ast.ClassDef, above: list[str], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each test of a module or class with the rows of its own marks and of those around it."""
    for item in scope.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name.startswith("test"):
            yield prefix + item.name, above + [row for mark in item.decorator_list for row in covered(mark)]
        elif isinstance(item, ast.ClassDef):
            own = [row for mark in item.decorator_list for row in covered(mark)]
            own += [row for statement in item.body if is_pytestmark(statement) for row in covered(statement)]
            if is_state_machine(item):
                yield prefix + item.name, above + own
            yield from tests_in(item, above + own, f"{prefix}{item.name}::")
        elif isinstance(item, ast.Assign) and not is_pytestmark(item):
            rows = list(covered(item))  # TestHistories = pytest.mark.covers("F10")(Machine.TestCase)
            if rows and isinstance(item.targets[0], ast.Name):
                yield prefix + item.targets[0].id, above + rows


def is_pytestmark(statement: ast.stmt) -> bool:
    """Whether a statement marks all tests of its module or class."""
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "pytestmark" for target in statement.targets
    )


def is_state_machine(item: ast.ClassDef) -> bool:
    """Whether hypothesis runs this class as one test."""
    return any("StateMachine" in ast.unparse(base) for base in item.bases)


def covered(node: ast.AST) -> Iterator[str]:
    """Yield the rows of every `covers(…)` call inside a piece of code."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "covers":
            for argument in call.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def feature_rows(root: Path) -> list[dict[str, Any]]:
    """Read the sections of docs/features.yaml, each with its rows."""
    sections: list[dict[str, Any]] = yaml.safe_load((root / "docs/features.yaml").read_text(encoding="utf-8"))
    return sections


def features_page(sections: list[dict[str, Any]], proofs: list[Proof]) -> str:
    """Lay every row out with its tests, or with what it still waits for."""
    tests: dict[str, list[Proof]] = {}
    for proof in proofs:
        tests.setdefault(proof.row, []).append(proof)
    breadth = Counter((proof.file, proof.test) for proof in proofs)
    rows = [row for section in sections for row in section["rows"]]
    proven = sum(row["id"] in tests for row in rows)
    lines = [
        NOTE.format(source="docs/features.yaml or the `covers` marks of the tests"),
        "# What Makeway does, and the test of each feature\n",
        f"{proven} of {len(rows)} rows have a test today. A row without a test says so and names the part of the "
        "project that brings it. A row with a test and a *later* note works as far as its tests say. "
        "The best proof stands first: the test that is about the row, with as much of the portal as possible. "
        "Run one with `make test ARGS='-k name'`.\n",
    ]
    for section in sections:
        lines += [f"## {section['section']}\n", "| row | what it does | the check | proven by |", "|---|---|---|---|"]
        lines += [
            feature_line(row, best_first(tests.get(row["id"], []), breadth, row.get("proof", "")))
            for row in section["rows"]
        ]
        lines.append("")
    return "\n".join(lines)


TIERS = (
    ("kube", "e2e", "hub", "frameworks"),
    ("service", "web", "widgets", "spawner", "doctor", "device_plugin", "helm"),
)
"""Folders of tests by how much of the portal runs in them, the most first; all others come last."""
BROAD = 8
"""A test that covers more rows than this proves none of them as well as one that is about it."""


def best_first(proofs: list[Proof], breadth: Mapping[tuple[str, str], int], best: str = "") -> list[Proof]:
    """Sort the proofs of a row: the one that the row names as its `best`, then precise tests before broad ones.

    Of those the ones in which most of the portal runs come first, and of these the ones of the fewest rows.
    """

    def key(proof: Proof) -> tuple[bool, bool, int, int, Proof]:
        folder = proof.file.removeprefix("tests/").partition("/")[0]
        tier = next((n for n, folders in enumerate(TIERS) if folder in folders), len(TIERS))
        rows = breadth.get((proof.file, proof.test), 1)
        named = f"{proof.file.removeprefix('tests/')}::{proof.test}" == best
        return not named, rows > BROAD, tier, rows, proof

    return sorted(proofs, key=key)


def feature_line(row: dict[str, Any], proofs: list[Proof]) -> str:
    """Lay one row out as a line of the table; the first proof has a line of its own, the others follow by file."""
    by_file: dict[str, list[str]] = {}
    for proof in proofs[1:]:
        by_file.setdefault(proof.file, []).append(proof.test)
    cells = [tests_of(proofs[0].file, [proofs[0].test])] if proofs else []
    if by_file:
        cells.append("also " + "; ".join(tests_of(file, by_file[file]) for file in by_file))
    later = row.get("later")
    if later:
        cells.append(f"*later: {later}*" if proofs else f"not yet: comes with {later}")
    elif not proofs:
        cells.append("not yet")
    return f"| {row['id']} | {cell(row['behaviour'])} | {cell(row['check'])} | {'<br>'.join(cells)} |"


def tests_of(file: str, tests: list[str]) -> str:
    """List tests of one file, with a link to it."""
    return f"[{file.removeprefix('tests/')}](../{file}): {', '.join(map(code, tests))}"


def code(name: str) -> str:
    """Set a name as code."""
    return f"`{name}`"


def cell(text: str) -> str:
    """Escape what would end a table's cell."""
    return text.replace("|", "\\|")


def pages(root: Path) -> dict[Path, str]:
    """Make every generated page: its path → its text."""
    sys.path.insert(0, str(root / "scripts"))
    import make_reference

    made = {root / "docs/features.md": features_page(feature_rows(root), proofs(root / "tests"))}
    for name, text in make_reference.pages(root / "docs/reference").items():
        made[root / "docs/reference" / name] = text
    schema = root / "helm/makeway/values.schema.json"
    made[schema] = make_reference.chart_schema(schema.read_text(encoding="utf-8"))
    return made


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or only compare them."""
    parser = argparse.ArgumentParser(prog="make docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when a page is out of date")
    wanted = parser.parse_args(arguments)
    stale = [
        (file, text)
        for file, text in pages(ROOT).items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    for file, text in stale:
        if not wanted.check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        print(f"{file.relative_to(ROOT)}: {'is out of date, run make docs' if wanted.check else 'written'}")
    return 1 if stale and wanted.check else 0


if __name__ == "__main__":
    sys.exit(main())
