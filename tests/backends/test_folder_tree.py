"""The folder of a job is measured and removed whatever the job has made of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from makeway_quota.backends.local import folder_tree
from makeway_quota.backends.local.folder_tree import remove_tree, tree_bytes
from makeway_quota.backends.local.jobdir import Layout


def deep_folder(path: Path, depth: int, size: int = 1_000_000) -> None:
    """Make folders in folders, and a file in the last one."""
    deep = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=deep)
        deeper = os.open("a", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = deeper
    with open(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=deep), "wb") as file:
        file.write(b"x" * size)
    os.close(deep)


@pytest.mark.parametrize("depth", [1, 500, 5000])
def test_what_is_deep_in_a_folder_is_counted_and_removed(tmp_path: Path, depth: int) -> None:
    layout = Layout(tmp_path, shared=False)
    layout.make()
    work = layout.job("j-1") / "work"
    work.mkdir(parents=True)
    deep_folder(work, depth)
    counted = layout.folder_bytes("j-1")
    assert counted is not None
    assert 1_000_000 <= counted < 1_100_000
    layout.purge("j-1")
    assert list(layout.jobs.iterdir()) == []


def test_links_are_neither_followed_nor_counted(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "state", shared=False)
    layout.make()
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "data").write_bytes(b"x" * 100_000)
    outside.chmod(0o500)
    work = layout.job("j-1") / "work"
    work.mkdir(parents=True)
    (work / "folder").symlink_to(outside)
    (work / "file").symlink_to(outside / "data")
    (work / "itself").symlink_to("itself")
    assert (layout.folder_bytes("j-1") or 0) < 50_000
    layout.purge("j-1")
    assert list(layout.jobs.iterdir()) == []
    assert sorted(path.name for path in outside.iterdir()) == ["data", "inner"]
    assert outside.stat().st_mode & 0o777 == 0o500


def test_a_folder_that_is_a_link_is_not_removed(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "state", shared=False)
    layout.make()
    outside = tmp_path / "outside"
    outside.mkdir()
    layout.job("j-1").symlink_to(outside)
    with pytest.raises(OSError, match="Not a directory"):
        layout.purge("j-1")
    assert outside.exists()


AS_USER = """
import os, sys
from pathlib import Path
from makeway_quota.backends.local.jobdir import Layout
layout = Layout(Path(sys.argv[1]), shared=False)
os.setgroups([])
os.setgid(100)
os.setuid(1000)
layout.purge("j-1")
"""


@pytest.mark.root
def test_folders_without_write_permission_are_removed() -> None:
    """As package managers leave them: a cache of Go modules, say."""
    state = Path("/tmp") / f"makeway-state-{os.getpid()}"
    layout = Layout(state, shared=False)
    layout.make()
    try:
        cache = layout.job("j-1") / "work" / "pkg" / "mod"
        cache.mkdir(parents=True)
        (cache / "file").touch()
        subprocess.run(["chown", "-R", "1000:100", str(state)], check=True)
        cache.chmod(0o000)
        cache.parent.chmod(0o555)
        subprocess.run([sys.executable, "-c", AS_USER, str(state)], check=True, timeout=60)
        assert list(layout.jobs.iterdir()) == []
    finally:
        subprocess.run(["rm", "-rf", str(state)], check=True)


def test_a_folder_of_any_shape_is_measured_with_a_handful_of_open_files(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    deep = os.open(tmp_path / "top", os.O_RDONLY)
    for _ in range(20):  # a path above 4,095 bytes, with many folders at its end
        os.mkdir("n" * 240, dir_fd=deep)
        deeper = os.open("n" * 240, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = deeper
    for number in range(300):
        os.mkdir(f"{number}", dir_fd=deep)
        os.close(os.open(f"{number}/file", os.O_CREAT, dir_fd=deep))
    os.close(deep)
    code = (
        "import os, resource, sys; from pathlib import Path\n"
        "from makeway_quota.backends.local.folder_tree import tree_bytes\n"
        "used = len(os.listdir('/proc/self/fd')); resource.setrlimit(resource.RLIMIT_NOFILE, (used + 5,) * 2)\n"
        "print(tree_bytes(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "top")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "0\n", done.stderr
    remove_tree(tmp_path / "top")


def test_a_lack_of_open_files_is_an_error_and_no_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match="too many open files"):
        tree_bytes(tmp_path)


@pytest.mark.parametrize("moved", ["a/b", "a"])
def test_folders_that_move_while_they_are_measured_hide_no_others(
    moved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, other = tmp_path / "top", tmp_path / "other"
    for folder in ("a/b/c", "a/z", "z"):
        (top / folder).mkdir(parents=True)
        (top / folder / "file").write_bytes(b"x" * 100_000)
    other.mkdir()
    handles = len(os.listdir("/proc/self/fd"))
    scan, scanned = folder_tree._scan, list[str]()

    def move(folder: int) -> tuple[int, list[str]]:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{folder}"))
        scanned.append(name)
        total, names = scan(folder)
        if name == "c":
            (top / moved).rename(other / "moved")
        return total, sorted(names, reverse=True)

    monkeypatch.setattr(folder_tree, "_scan", move)
    total = tree_bytes(top)
    assert total >= 200_000
    assert (top / "z").exists()
    assert scanned.count("c") == 1
    assert len(os.listdir("/proc/self/fd")) == handles
