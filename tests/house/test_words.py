"""Nothing in the repository names a machine, a registry host or unfinished work."""

from __future__ import annotations

import re
from pathlib import Path

# Written in pieces, so that this file does not find itself.
MACHINE = re.compile(r"(?<![\w.])/" + "work/|/root/" + r"\.|/tmp/" + "(uvt|contract)")
REGISTRY = re.compile("pypi" + r"\.org|pythonhosted" + r"\.org|registry\." + r"npmjs|registry\." + "yarnpkg")
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
LOCKS = {"uv.lock", "package-lock.json"}
PICTURES = {".png", ".jpg", ".ico", ".woff2"}


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
