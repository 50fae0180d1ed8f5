"""The one file that an agent is served as: the same bytes everywhere, all that it needs, and old Pythons."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from agent.machine_service import MachineService
from agent.machines import TestMachine
from makeway.agent.programs import unpack
from makeway_quota import agent_program as packing
from makeway_quota.agent_program import agent_program
from pods import wait_until

ROOT = Path(__file__).parents[2]


def test_the_same_sources_are_the_same_bytes_whenever_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = agent_program()
    packing.agent_program.cache_clear()
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert agent_program() == first
    assert len(first) < 300_000


def test_the_file_has_agent_launcher_and_library_and_no_more() -> None:
    with zipfile.ZipFile(io.BytesIO(agent_program())) as archive:
        names = archive.namelist()
        assert names == sorted(set(names))
        for name in names:
            if name != "__main__.py" and "/library/makeway/" not in name:
                assert archive.read(name) == (ROOT / "widgets" / name).read_bytes()
    tops = {"/".join(name.split("/")[:2]) for name in names}
    assert tops == {"__main__.py", "makeway/__init__.py", "makeway/agent", "makeway/launcher"}
    agents = {path.name for path in (ROOT / "widgets/makeway/agent").glob("*.py")}
    assert {name.rpartition("/")[2] for name in names if name.startswith("makeway/agent/")} == agents
    library = "makeway/launcher/library/makeway/"
    assert {f"{library}checkpoint.py", f"{library}checkpointing/loop.py", f"{library}__init__.py"} <= set(names)


def test_jobs_run_to_their_end_on_the_oldest_python(machine: TestMachine, service: MachineService) -> None:
    """On a machine that has one; `tests/house/test_old_pythons.py` reads the sources everywhere."""
    found = [shutil.which("python3.8"), *map(str, Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8"))]
    python = next((path for path in found if path and subprocess.run([path, "-V"], check=False).returncode == 0), None)
    if python is None:
        pytest.skip("there is no Python 3.8")
    service.commands["j-1"] = ["sh", "-c", "echo done"]
    machine.start(python=python)
    machine.joined()
    service.order(service.worker("j-1"))
    wait_until(lambda: service.states() == {("j-1", 1, 0): "exited"}, "the end of the job")
    assert service.newest()["attempts"][0]["exit_code"] == 0, machine.log()
    assert [report["exit"]["exit_code"] for _, report in service.worker_reports if report.get("exit")] == [0]


def test_the_agent_imports_nothing_but_the_standard_library(tmp_path: Path) -> None:
    folder = unpack_program(tmp_path)
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import makeway.agent.command, makeway.agent.machine_agent, makeway.agent.starter
found = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"makeway"}
print(sorted(name for name in found if not name.startswith("__")))
"""
    command = [sys.executable, "-I", "-S", "-c", code, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def unpack_program(tmp_path: Path) -> str:
    packed = tmp_path / "agent.pyz"
    packed.write_bytes(agent_program())
    return unpack(str(packed), str(tmp_path / "programs"))


def test_unpacking_again_changes_nothing_and_what_was_cut_off_is_removed(tmp_path: Path) -> None:
    folder = unpack_program(tmp_path)
    half = tmp_path / "programs" / "digest.part-5" / "makeway"
    half.mkdir(parents=True)
    before = os.stat(folder).st_ino
    assert unpack_program(tmp_path) == folder
    assert os.stat(folder).st_ino == before
    assert [path.name for path in (tmp_path / "programs").iterdir()] == [os.path.basename(folder)]


def test_a_python_that_is_too_old_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "agent.pyz").write_bytes(agent_program())
    code = """
import runpy, sys
sys.version_info = (3, 6, 9)
sys.version = "3.6.9 (of a test)"
runpy.run_path(sys.argv[1], run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "agent.pyz"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Python 3.8 or newer is needed, and this is 3.6.9" in done.stderr
