"""The repository names no machine, registry host or unfinished work, and keeps to the vocabulary of its field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# Written in pieces, so that this file does not find itself.
MACHINE = re.compile(r"(?<![\w.])/" + "work/|/root/" + r"\.|/tmp/" + "(uvt|contract)")
REGISTRY = re.compile("pypi" + r"\.org|pythonhosted" + r"\.org|registry\." + r"npmjs|registry\." + "yarnpkg")
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
LOCKS = {"uv.lock", "package-lock.json"}
PICTURES = {".png", ".jpg", ".ico", ".woff2", ".gz"}
# Words that no reader from Kubernetes, Kueue or JupyterHub knows, also as parts of identifiers.
PIECES = [
    ("tenan", "c(y|ies)"),
    ("seek", "ers?"),
    ("des", "ks?"),
    ("esta", "tes?"),
    ("door", "m[ae]n"),
    ("stran", "gers?"),
    ("hope", "less"),
    ("home", "less"),
    ("she", "lf"),
    ("furn", "ish(ed|es)?"),
    ("hon", "our(ed|s|ing)?"),
    ("re", "seat(ed|s)?"),
    ("ta", "pes?"),
    ("tel", "ling"),
    ("boo", "ks"),
    ("set", "tle[sd]?"),
    ("some", "body"),
    ("no", "body"),
    ("who", "ever"),
    ("be", "gun"),
]
PRIVATE = re.compile(
    "(?<![a-z])(" + "|".join(head + tail for head, tail in PIECES) + ")(?![a-z])",
    re.IGNORECASE,
)
QUOTING = {"features.yaml", "features.md"}
"""Files that quote the founding documents in their own words."""
ACCOUNT = re.compile('user = "no' + 'body"')
"""The Unix account of that name."""
OPENINGS = {"Say", "Tell", "Let", "Name", "Give", "Put", "Ask", "Look", "Know"}
"""Verbs that do not open a docstring, also in the third person: "Return …" and "Whether …" do."""
VERBS = OPENINGS | {f"{verb}s" for verb in OPENINGS - {"Name"}}
"""Without "Names", which is a noun where it opens a docstring"""


def lines(tracked: list[Path]) -> list[tuple[str, str]]:
    return [
        (f"{file.name}:{number}", line)
        for file in tracked
        if file.suffix not in PICTURES and file.name not in LOCKS
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    ]


def test_no_machine_path_and_no_registry_host(tracked: list[Path]) -> None:
    assert not [place for place, line in lines(tracked) if MACHINE.search(line) or REGISTRY.search(line)]


def test_nothing_is_left_unfinished(tracked: list[Path]) -> None:
    assert not [f"{place} {line.strip()}" for place, line in lines(tracked) if UNFINISHED.search(line)]


def test_the_lock_files_name_no_private_registry(root: Path) -> None:
    python = (root / "uv.lock").read_text(encoding="utf-8")
    hosts = set(re.findall(r"https?://([^/\"]+)", python))
    assert hosts <= {"pypi" + ".org", "files.python" + "hosted.org"}
    npm = (root / "package-lock.json").read_text(encoding="utf-8")
    assert '"resolved"' not in npm
    assert '"integrity"' in npm


def vocabulary_lines(tracked: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield the lines that keep to the vocabulary: all but quotations and the released sections of the changelog."""
    for place, line in lines([file for file in tracked if file.name not in QUOTING | {"CHANGELOG.md"}]):
        if not ACCOUNT.search(line):
            yield place, line
    for file in tracked:
        if file.name == "CHANGELOG.md":
            unreleased = re.split(r"^## \[?\d", file.read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE)[0]
            yield from ((f"{file.name}:{number}", line) for number, line in enumerate(unreleased.splitlines(), 1))


def test_private_words_occur_nowhere(tracked: list[Path]) -> None:
    assert not [f"{place} {line.strip()}" for place, line in vocabulary_lines(tracked) if PRIVATE.search(line)]


def test_private_words_are_found_in_identifiers_too() -> None:
    assert PRIVATE.search("def test_no" + "body_starves() -> None:")
    assert PRIVATE.search("The des" + "k of the service")
    assert not PRIVATE.search("a desktop, a bookshelf, an organizer")


def test_docstrings_open_with_a_plain_verb(tracked: list[Path]) -> None:
    result = []
    for file in tracked:
        if file.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split(" ", 1)[0]
                if first in VERBS:
                    result.append(f"{file.name} {getattr(node, 'name', 'module')}: {first}")
    assert not result


BOUNDS = re.compile(r"\b_?(?:MO" + "ST|LEA" + r"ST)_[A-Z][A-Z0-9_]*")
"""Bounds are MAX_… and MIN_…"""
MOVED = re.compile(
    r"\bsession_" + r"check\b|\bAct" + r"uator\.give\b|\bWor" + r"ld\.see\b|\bdef _j" + r"ob\(row"
    r"|\b(Attempt|Node|Worker)?Se" + r"en\(|\bApiRef" + r"usal\b|\blost_bud" + r"get\b|\bPresentTi" + r"mes\b"
)
"""Names that were replaced: postgres_check, Actuator.actuate, World.observe, job_name, Observation, AttemptStatus,
ApiStatusError, max_infra_failures, CorrectedTimes"""


def test_bounds_are_called_min_and_max(root: Path, tracked: list[Path]) -> None:
    assert not {
        (file.relative_to(root).as_posix(), name)
        for file in tracked
        if file.suffix == ".py"
        for name in BOUNDS.findall(file.read_text(encoding="utf-8"))
    }


def test_replaced_names_are_gone(tracked: list[Path]) -> None:
    assert not [f"{place} {line.strip()}" for place, line in vocabulary_lines(tracked) if MOVED.search(line)]


WORN = re.compile(
    r"_*(found|each|least|most|left|said|longest|look|looked|told)|(most|least|longest)_\w+|\w+_left", re.IGNORECASE
)
"""Names for results, items, bounds, what remains and messages, which have names of their own"""
KEPT = {"most", "seconds_left", "SAVED_AND_LEFT"}
"""A field of the API, a function of `makeway.checkpoint`, and the exit code that goes with it"""
PACKAGES = (
    "hub_config",
    "kube_cluster",
    "device_plugin",
    "spawner",
    "widgets",
    "quota_service",
    "benchmarks",
    "scripts",
)


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, parameters, attributes, fields and constants, not of local variables."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
            ):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
        for item in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
            targets = [item.target] if isinstance(item, ast.AnnAssign) else getattr(item, "targets", [])
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_results_items_and_bounds_are_named_as_such(root: Path, tracked: list[Path]) -> None:
    python = [file for file in tracked if file.suffix == ".py" and file.relative_to(root).parts[0] in PACKAGES]
    worn = {
        f"{file.relative_to(root)} {name}"
        for file in python
        for name in defined(ast.parse(file.read_text(encoding="utf-8")))
        if WORN.fullmatch(name) and name not in KEPT
    }
    assert not worn


def test_names_are_found_wherever_they_are_defined() -> None:
    code = "class A:\n    a: int\n    def b(self, c): self.d = 1\nE, F = 1, 2\nG = 3\ndef h(*i): j = 4"
    assert set(defined(ast.parse(code))) == {"A", "a", "b", "self", "c", "d", "G", "h", "i"}


def test_no_two_packages_have_modules_of_one_name_for_opposite_directions(tracked: list[Path]) -> None:
    """The spawner reads the events of its pods; the backend records events of them."""
    assert [file.parent.name for file in tracked if file.name == "pod_events.py"] == ["makeway_spawner"]
