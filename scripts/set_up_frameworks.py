"""Sets up the frameworks that `make test-frameworks` trains with: PyTorch and what is built on it, without CUDA.

Run by `make test-frameworks` and `make test` with the environment's Python, after set_up.py. The environment is
`.venvs/frameworks`, and its packages are those of `tests/frameworks/environment/uv.lock`: 1.5 GB instead of the 5.4 GB
that PyTorch from PyPI brings with CUDA. PyTorch is linked to the libraries of CUDA all the same: stubs are compiled in
their place: they have every symbol that PyTorch looks for, and each function fails.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import set_up

PROJECT = Path("tests/frameworks/environment")
NEEDED_MIB = 3000
INTERRUPTED = 130
STUB = "libmakeway_stub.so"
CUDA = re.compile(r"lib(cu(?!dart)|nv|nccl)")
"""Libraries that are stubbed; libcudart is in the lock file"""
FAILS = 999
"""CUDA_ERROR_UNKNOWN, which is an error in the numbering of every stubbed library"""


class Frameworks(set_up.SetUp):
    """The environment of the frameworks, made anew when its lock file changes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.environment = root / ".venvs" / "frameworks"
        self.python = self.environment / "bin" / "python"

    def install(self) -> None:
        """Install the packages of the lock file, and stubs of the CUDA libraries that they do not bring."""
        with self.one_at_a_time():
            inputs = set_up.digest(self.root / PROJECT / "uv.lock", Path(__file__), also=set_up.UV_VERSION)
            self.step("the frameworks", inputs, self.python, self.packages_and_stubs)

    def packages_and_stubs(self) -> None:
        """Bring the environment to what the lock file says, and make PyTorch's libraries loadable."""
        free = shutil.disk_usage(self.root).free // 2**20
        if free < NEEDED_MIB:
            raise set_up.SetUpProblem(
                f"The frameworks need {NEEDED_MIB} MiB, and the disk that holds {self.root} has {free} MiB free."
            )
        self.other_environment(PROJECT, self.environment.name)
        for libraries in self.environment.glob("lib/python3.*/site-packages/torch/lib"):
            self.stub(libraries)
        self.run("PyTorch", [self.python, "-c", "import torch"])

    def copy(self, folder: Path, python: str) -> None:
        """Install the packages of the lock file into a folder, for a Python of this version such as 3.11."""
        export: list[str | Path] = [
            "export",
            "--frozen",
            "--quiet",
            "--no-header",
            "--no-annotate",
            "--project",
            PROJECT,
        ]
        listed = folder.with_suffix(".txt")
        self.run("The frameworks", [self.uv(), *export, "--output-file", listed])
        install = ["pip", "install", "--no-deps", "--require-hashes", "--python-version", python]
        self.run("The frameworks", [self.uv(), *install, "--target", folder, "--requirements", listed])
        self.stub(folder / "torch" / "lib")

    def stub(self, libraries: Path) -> None:
        """Compile one library with all symbols that PyTorch looks for in vain, and link every missing name to it."""
        if shutil.which("gcc") is None:
            raise set_up.SetUpProblem(
                "The frameworks need gcc, for stubs of CUDA's libraries: install it (Debian: 'apt-get install gcc')."
            )
        files = [file for file in libraries.glob("*.so") if not file.is_symlink() and file.name != STUB]
        missing = needed(files)
        symbols = undefined(files)
        source, versions = libraries / "makeway_stub.c", libraries / "makeway_stub.map"
        names = sorted({name for name, _ in symbols})
        source.write_text("".join(f"long {name}(void) {{ return {FAILS}; }}\n" for name in names), encoding="utf-8")
        versions.write_text("".join(nodes(symbols)), encoding="utf-8")
        options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,--version-script={versions}"]
        self.run("The stubs", ["gcc", *options, "-o", libraries / STUB, source])
        for name in missing:
            link = libraries / name
            link.unlink(missing_ok=True)
            link.symlink_to(STUB)


def needed(files: Iterable[Path]) -> set[str]:
    """Return the libraries of CUDA that these need."""
    listed = re.findall(r"\(NEEDED\).*\[(.+)\]", answer("readelf", "--dynamic", "--wide", *files))
    return {name for name in listed if CUDA.match(name)}


def undefined(files: Iterable[Path]) -> set[tuple[str, str]]:
    """Return the functions of CUDA that these need, each with its version or ""; libcudart has its own."""
    listed = re.findall(
        r"\bUND\s+((?:cu|nv|nccl)[A-Za-z0-9_]+)(?:@+(\S+))?", answer("readelf", "--dyn-syms", "--wide", *files)
    )
    return {(name, version) for name, version in listed if not version.startswith("libcudart")}


def nodes(symbols: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the nodes of a version script: each version with its functions."""
    by_version: dict[str, list[str]] = {}
    for name, version in sorted(symbols):
        if version:
            by_version.setdefault(version, []).append(name)
    for version, names in by_version.items():
        yield f"{version} {{ global: {' '.join(f'{name};' for name in names)} }};\n"


def answer(*command: str | Path) -> str:
    """Return the output of a program of binutils."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as problem:
        raise set_up.SetUpProblem(
            f"The frameworks need {command[0]}, which failed ({problem}): install binutils and run it again."
        ) from problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up and return the exit status."""
    parser = argparse.ArgumentParser(prog="make test-frameworks", description="Install what the trainings need.")
    parser.add_argument("--if-possible", action="store_true", help="go on without, where it cannot be installed")
    wanted = parser.parse_args(arguments)
    status = set_up.exit_status("make test-frameworks", Frameworks(set_up.ROOT).install)
    if status and wanted.if_possible and status != INTERRUPTED:
        print("The tests that train with PyTorch and others are skipped.", file=sys.stderr)
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
