"""Runs the tests of the Hub and of the spawners with another JupyterHub than that of uv.lock.

Run by `make jupyterhub VERSION=5.5` with the environment's Python. The other packages are those of uv.lock; the second
environment is `.venvs/jupyterhub-5.5`, and is made anew when uv.lock or pyproject.toml has changed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import set_up

ROOT = set_up.ROOT
UV = ROOT / ".venvs" / "uv" / "bin" / "uv"
TESTS = ("tests/hub", "tests/spawner")
EXPORT = ("export", "--frozen", "--quiet", "--all-extras", "--no-emit-project", "--no-hashes", "--no-annotate")


def environment(version: str) -> Path:
    """Return a virtual environment with this JupyterHub, such as 5.5."""
    place = ROOT / ".venvs" / f"jupyterhub-{version}"
    done = place / "done"
    wanted = set_up.digest(ROOT / "uv.lock", ROOT / "pyproject.toml")
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        print(f"Making {place.relative_to(ROOT)} …", flush=True)
        run(UV, "venv", "--quiet", "--clear", "--python", sys.executable, place)
        requirements = place / "requirements.txt"
        run(UV, *EXPORT, "--no-emit-package", "jupyterhub", "--output-file", requirements)
        install = (UV, "pip", "install", "--quiet", "--python", place / "bin" / "python")
        run(*install, "--requirements", requirements, f"jupyterhub=={version}.*")
        run(*install, "--no-deps", "--editable", ROOT)
        done.write_text(wanted, encoding="utf-8")
    return place


def run(*command: str | Path) -> None:
    """Run a command of uv, and end with its status when it fails."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"UV_PYTHON_DOWNLOADS": "never"}, check=False)
    if done.returncode:
        sys.exit(f"make jupyterhub: `uv {command[1]}` failed; what it said is above.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and return pytest's status."""
    parser = argparse.ArgumentParser(prog="make jupyterhub", description="Run tests with another JupyterHub.")
    parser.add_argument("version", help="such as 5.5")
    wanted, more = parser.parse_known_args(arguments)
    programs = environment(wanted.version) / "bin"
    environ = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    pytest = (programs / "python", "-m", "pytest", "-q", "-n", "auto", "--dist", "loadgroup")
    named = any((ROOT / word.partition("::")[0]).exists() for word in more)
    return subprocess.run([*pytest, *(() if named else TESTS), *more], cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
