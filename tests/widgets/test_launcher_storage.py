"""Before a job begins, its launcher finds out whether a checkpoint could be kept, and ends in words if not."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from container import Container
from makeway.launcher import checkpoint_check
from makeway.launcher.attempt import Attempt
from makeway.launcher.checkpoint_check import CANNOT_CREATE, PREFIX, write_failure
from makeway.launcher.report import report_of


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def refusing(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Make one system call of the check fail."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint_check.os, call, refuse)


def test_a_job_whose_checkpoints_cannot_be_kept_does_not_begin(container: Container) -> None:
    (container.root / "volume").write_text("no folder")
    began = container.root / "began"
    assert container.run("touch", str(began), checkpoints=str(container.root / "volume" / "j-1")) == CANNOT_CREATE
    status = container.status()
    assert not began.exists()
    assert status["storage_failed"]
    assert status["exit_code"] == CANNOT_CREATE
    assert status["message"] == (
        f"no checkpoint can be kept in {container.root}/volume/j-1: something that is no folder is in its place. "
        "An administrator has to act"
    )
    assert status["message"] in container.file("log").read_text()


def test_a_job_whose_checkpoints_can_be_kept_finds_its_folder_empty(container: Container) -> None:
    assert container.run("sh", "-c", 'test -z "$(ls -A "$MAKEWAY_CHECKPOINT_DIR")"') == 0
    assert not container.status()["storage_failed"]


def test_the_report_to_the_service_says_so_too(container: Container) -> None:
    (container.root / "volume").write_text("no folder")
    container.run("true", checkpoints=str(container.root / "volume"))
    attempt = Attempt({"workload": "j-1", "attempt": 1, "directory": str(container.root / "job")})
    assert report_of(attempt, container.status())["exit"]["storage_failed"] is True


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("makedirs", errno.EACCES, "may not write there; an NFS server applies no fsGroup"),
        ("open", errno.EACCES, "may not write there"),
        ("open", errno.EPERM, "may not write there"),
        ("open", errno.EROFS, "its volume is read-only"),
        ("write", errno.ENOSPC, "its volume is full"),
        ("write", errno.EDQUOT, "the quota of its volume is used up"),
        ("fsync", errno.EDQUOT, "the quota of its volume is used up"),
        ("fsync", errno.EIO, "its volume answers with an input/output error"),
        ("replace", errno.EACCES, "may not write there"),
        ("makedirs", errno.ESTALE, "its volume is gone from its server"),
        ("write", errno.EFBIG, "file too large"),
    ],
)
def test_each_way_to_refuse_a_file_has_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, words: str
) -> None:
    with monkeypatch.context() as patched:
        refusing(patched, call, number)
        message = write_failure(str(tmp_path / "checkpoints"))
    assert words in message
    assert message.endswith("An administrator has to act")
    assert "{" not in message


def test_a_failure_when_the_file_is_closed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = os.close

    def refuse(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_check.os, "close", refuse)
        message = write_failure(str(tmp_path))
    assert "its volume is full" in message


@pytest.mark.parametrize("call", ["makedirs", "open", "write", "fsync", "replace"])
def test_a_volume_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    hangs = threading.Event()

    def hang(*args: object, **kwargs: object) -> None:
        hangs.wait(30.0)
        raise OSError(errno.EIO, "the volume is gone")  # a result would be closed as a file: True is that of the output

    monkeypatch.setattr(checkpoint_check.os, call, hang)
    try:
        message = write_failure(str(tmp_path / "checkpoints"), seconds=0.02)
    finally:
        hangs.set()
    assert "its volume did not answer within" in message


def test_workers_of_a_gang_check_side_by_side_and_leave_nothing(tmp_path: Path) -> None:
    failures: list[str] = []
    threads = [
        threading.Thread(target=lambda: failures.append(write_failure(str(tmp_path / "one")))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [""] * 16
    assert os.listdir(tmp_path / "one") == []


def test_what_a_killed_check_has_left_goes_after_an_hour_and_nothing_else(tmp_path: Path) -> None:
    for name, age in ((PREFIX + "old", 4000.0), (PREFIX + "new", 0.0), ("step-7", 90_000.0)):
        path = tmp_path / name
        path.write_text("x")
        at = path.stat().st_mtime - age
        os.utime(path, (at, at))
    assert write_failure(str(tmp_path)) == ""
    assert sorted(os.listdir(tmp_path)) == [PREFIX + "new", "step-7"]


@pytest.mark.root
def test_a_folder_of_root_is_refused_to_the_user_of_jobs(tmp_path: Path) -> None:
    """As on an NFS export, where no fsGroup is applied."""
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    launcher = Path(checkpoint_check.__file__).parents[2]
    code = "from makeway.launcher.checkpoint_check import write_failure; import sys; print(write_failure(sys.argv[1]))"
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path("/tmp"):
            break
        parent.chmod(0o755)
    message = as_user(1000, code, launcher, str(volume / "j-1"))
    assert "user 1000 (group 1000) may not write there" in message
    volume.chmod(0o2775)
    os.chown(volume, 0, 1000)
    assert as_user(1000, code, launcher, str(volume / "j-1")) == ""


def as_user(user: int, code: str, path: Path, *args: str) -> str:
    become: Callable[[], None] = lambda: (os.setgroups([]), os.setgid(user), os.setuid(user))[2]  # noqa: E731
    done = subprocess.run(
        ["/usr/bin/python3", "-S", "-c", f"import sys; sys.path.insert(0, {str(path)!r}); {code}", *args],
        capture_output=True,
        text=True,
        preexec_fn=become,
        cwd="/",
        check=True,
    )
    return done.stdout.strip()
