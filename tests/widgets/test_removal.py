"""Folders of checkpoints are removed with what jobs left in them, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from makeway.launcher.removal import remove_all


def folder_of(volume: Path, job: str) -> Path:
    """Make a folder with a checkpoint."""
    made = volume / job / "step-000500"
    made.mkdir(parents=True)
    (made / "weights").write_bytes(b"w" * 10_000)
    return volume / job


def test_folders_are_removed_as_the_pod_removes_them(tmp_path: Path) -> None:
    for job in ("j-1", "j-2", "j-3"):
        folder_of(tmp_path, job)
    program = [sys.executable, "-m", "makeway.launcher.removal", str(tmp_path), "j-1", "j-3", "j-gone"]
    assert subprocess.run(program, check=False).returncode == 0
    assert [one.name for one in tmp_path.iterdir()] == ["j-2"]


def test_links_are_removed_and_what_they_point_to_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "data").write_text("kept")
    mode = outside.stat().st_mode
    volume = tmp_path / "volume"
    job = folder_of(volume, "j-1")
    (job / "folder").symlink_to(outside)
    (job / "file").symlink_to(outside / "data")
    (job / "up").symlink_to("..")
    stuck = job / "read-only"
    stuck.mkdir()
    (stuck / "folder").symlink_to(outside)
    stuck.chmod(0o555)
    other = folder_of(volume, "j-2")
    assert remove_all(str(volume), ["j-1"], str(tmp_path / "report")) == 0
    assert (list(volume.iterdir()), (outside / "data").read_text()) == ([other], "kept")
    assert outside.stat().st_mode == mode
    assert (other / "step-000500" / "weights").exists()


def test_a_folder_is_removed_however_deep_it_is(tmp_path: Path) -> None:
    folder_of(tmp_path, "j-2")
    deep = os.open(folder_of(tmp_path, "j-1"), os.O_RDONLY)
    for _ in range(5000):
        os.mkdir("a", dir_fd=deep)
        deeper = os.open("a", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = deeper
    os.close(deep)
    assert remove_all(str(tmp_path), ["j-1"], str(tmp_path / "report")) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["j-2"]


def test_a_folder_that_is_a_link_itself_stays(tmp_path: Path) -> None:
    kept = folder_of(tmp_path, "kept")
    (tmp_path / "j-1").symlink_to(kept)
    assert remove_all(str(tmp_path), ["j-1"], str(tmp_path / "report")) == 1
    assert (kept / "step-000500" / "weights").exists()


@pytest.mark.parametrize("name", ["..", ".", "", "/etc", "j-1/step-000500", ".snapshot", "lost+found", "j-1\n"])
def test_only_ids_are_removed(tmp_path: Path, name: str) -> None:
    folder_of(tmp_path, "j-1")
    report = tmp_path / "report"
    assert remove_all(str(tmp_path), [name], str(report)) == 1
    assert "is not the id of a job" in json.loads(report.read_text())["why"]
    assert (tmp_path / "j-1" / "step-000500" / "weights").exists()


AS_USER = """
import os, sys
from makeway.launcher.removal import remove_all
os.setgroups([])
os.setgid(100)
os.setuid(int(sys.argv[1]))
sys.exit(remove_all(sys.argv[2], sys.argv[4:], sys.argv[3]))
"""


@pytest.mark.root
def test_folders_without_write_permission_are_removed_and_those_of_another_user_name_it(tmp_path: Path) -> None:
    """What one user has to leave, the one that it names removes; in between nothing of others is lost."""
    report = Path("/tmp") / f"makeway-removal-{os.getpid()}"
    volume = Path("/tmp") / f"makeway-volume-{os.getpid()}"
    volume.mkdir()
    os.chown(volume, 1000, 100)
    try:
        closed, mixed = folder_of(volume, "j-1"), folder_of(volume, "j-2")
        (mixed / "others").mkdir()
        (mixed / "others" / "file").touch()
        for path in [*volume.rglob("*")]:
            os.chown(path, 1000, 100, follow_symlinks=False)
        for path in (mixed / "others", mixed / "others" / "file"):
            os.chown(path, 1234, 100)
        (closed / "step-000500").chmod(0o000)
        closed.chmod(0o555)
        report.touch(mode=0o666)
        report.chmod(0o666)

        def run(user: int, *jobs: str) -> int:
            program = [sys.executable, "-c", AS_USER, str(user), str(volume), str(report), *jobs]
            return subprocess.run(program, check=False, timeout=60).returncode

        assert run(1000, "j-1", "j-2") == 1
        assert json.loads(report.read_text())["left"] == {"1234": ["j-2"]}
        assert [path.name for path in mixed.iterdir()] == ["others"], "all the rest is gone"
        assert not closed.exists()
        assert run(1234, "j-2") == 1
        assert json.loads(report.read_text())["left"] == {"1000": ["j-2"]}
        assert run(1000, "j-2") == 0
        assert list(volume.iterdir()) == []
    finally:
        subprocess.run(["rm", "-rf", str(volume), str(report)], check=True)
