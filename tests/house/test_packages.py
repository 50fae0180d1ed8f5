"""Wheel and source distribution carry everything, and a notebook needs only its own part of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGES = ("htmx.min.js", "hx-sse.min.js", "uPlot.iife.min.js", "uPlot.min.css", "htmx.LICENSE", "uPlot.LICENSE")
PACKAGES = ("makeway_hub", "makeway_spawner", "makeway_api", "makeway_quota", "makeway", "makeway_device_plugin")
KINDS = {".py", ".html", ".j2", ".css", ".js", ".svg", ".yaml", ".mako", ".ini", ".typed"}


def built(root: Path, into: Path, what: str) -> Path:
    """Build one distribution of a folder and return it."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{what}", "--outdir", str(into), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return next(into.glob("*.whl" if what == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(root, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(root, tmp_path_factory.mktemp("sdist"), "sdist")


def test_the_wheel_carries_code_pages_migrations_and_types(root: Path, tracked: list[Path], wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    assert "makeway_hub/policy.yaml" in names, "a portal without a checkout begins with the sample policy"
    for page in PAGES:
        assert f"makeway_quota/web/static/vendor/{page}" in names
    for file in tracked:
        parts = file.relative_to(root).parts
        if len(parts) > 2 and parts[0] != "helm" and parts[1] in PACKAGES and file.suffix in KINDS:
            assert "/".join(parts[1:]) in names, "a file of a package is missing from the wheel"
    assert any(re.fullmatch(r"makeway_quota/store/migrations/versions/\w+\.py", name) for name in names)
    assert not [
        name
        for name in names
        if name.startswith(("tests/", "scripts/", "benchmarks/", "kube_cluster/", "node_modules/"))
    ]


def test_the_wheel_names_its_commands(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    entries = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "makeway = makeway.cli:main" in archive.read(entries).decode()
    assert "makeway-quota = makeway_quota.main:main" in archive.read(entries).decode()
    assert "makeway-device-plugin = makeway_device_plugin.__main__:main" in archive.read(entries).decode()


def test_a_source_distribution_becomes_the_same_wheel_without_npm(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    assert not (source / "node_modules").exists()
    assert (source / "LICENSE").exists()
    assert (source / "hub_config/policy.yaml").exists()
    again = built(source, tmp_path / "dist", "wheel")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_without_npm_parts_the_build_says_what_to_run(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    (source / "quota_service/makeway_quota/web/static/vendor/htmx.min.js").unlink()
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "run `make setup` first" in done.stdout + done.stderr


@pytest.mark.covers("F51")
def test_a_notebook_needs_only_its_own_extra(
    root: Path, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = tmp_path / "env"
    uv = root / ".venvs/uv/bin/uv"
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHON", "MAKEWAY"))
    }
    locked = tmp_path / "locked.txt"
    export = [uv, "export", "--frozen", "--extra", "notebook", "--no-emit-project", "--output-file", locked, "--quiet"]
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, environment],
        export,
        [uv, "pip", "install", "--quiet", "--python", environment, "--requirements", locked],
        [
            uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            environment,
            "--offline",
            f"makeway[notebook] @ {wheel.as_uri()}",
        ],
    ):
        done = subprocess.run(command, cwd=root, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    program = (
        "import makeway\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'makeway')\n"
        "assert 'train' in shell.magics_manager.magics['cell'], 'no %%train'\n"
        "assert 'gpus' in shell.magics_manager.magics['line'], 'no %gpus'\n"
        "from importlib.util import find_spec\n"
        "for heavy in ('sqlalchemy', 'fastapi', 'jupyterhub', 'kubespawner'):\n"
        "    assert find_spec(heavy) is None, heavy\n"
    )
    done = subprocess.run(
        [environment / "bin/python", "-c", program],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    packages = next(environment.glob("lib/python3.*/site-packages"))
    size = sum(file.stat().st_size for file in packages.rglob("*") if file.is_file() and not file.is_symlink())
    count = len(list(packages.glob("*.dist-info")))
    with capsys.disabled():
        print(f"\n  makeway[notebook] is {size / 1e6:.0f} MB in {count} packages")
