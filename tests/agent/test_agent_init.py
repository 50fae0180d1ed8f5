"""The init script of a machine: it runs once, and neither its output nor its end can harm the agent."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent.machine_service import MachineService
from agent.machines import TestMachine
from makeway.agent import init_script
from makeway.agent.init_script import HEAD, NOT_STARTED, TAIL, TIMED_OUT, InitScript, run_init
from makeway.launcher.attempt import boot_id
from pods import wait_until


def ran(tmp_path: Path, script: str, seconds: float = 30.0, shell: str = "/bin/sh") -> dict[str, Any]:
    """Run a script to its end and return its result."""
    init = InitScript(str(tmp_path / "init"), shell, seconds)
    init.start(script, False)
    wait_until(lambda: init.result() is not None, "the end of the init script")
    result = init.result()
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("script", "code"),
    [("", 0), (" \n", 0), ("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), ("not-a-command-at-all", 127)],
)
def test_the_end_of_a_script_is_its_exit_code(tmp_path: Path, script: str, code: int) -> None:
    assert ran(tmp_path, script)["exit_code"] == code


def test_a_script_that_hangs_is_killed_when_its_time_is_up(tmp_path: Path) -> None:
    result = ran(tmp_path, "echo started; sleep 1000 & wait", seconds=0.2)
    assert result["exit_code"] == TIMED_OUT
    assert result["output"].startswith("started\n")
    assert "killed after 0.2 s" in result["output"]


def test_a_script_that_closes_its_output_and_hangs_is_killed_too(tmp_path: Path) -> None:
    assert ran(tmp_path, "exec >&- 2>&-; sleep 1000", seconds=0.2)["exit_code"] == TIMED_OUT


def test_the_beginning_and_the_end_of_a_hundred_megabytes_are_kept(tmp_path: Path) -> None:
    result = ran(tmp_path, "echo first; head -c 100000000 /dev/zero; echo; echo last")
    assert result["exit_code"] == 0
    assert result["output"].startswith("first\n")
    assert result["output"].endswith("\nlast\n")
    assert f"… {100_000_000 + 12 - HEAD - TAIL} bytes …" in result["output"]
    assert "\0" not in result["output"]
    assert len(json.dumps(result["output"], ensure_ascii=False).encode()) < 131_072


def test_a_service_that_a_script_leaves_running_holds_up_nothing(tmp_path: Path) -> None:
    result = ran(tmp_path, "(sleep 5; echo late) & (while :; do echo noise; sleep 0.01; done) & echo done; exit 4")
    assert result["exit_code"] == 4
    assert "done" in result["output"]


def test_a_shell_that_is_not_there_is_told(tmp_path: Path) -> None:
    result = ran(tmp_path, "true", shell="/nowhere/sh")
    assert result["exit_code"] == NOT_STARTED
    assert "/nowhere/sh" in result["output"]


def test_the_next_agent_of_a_boot_waits_for_the_same_script(tmp_path: Path) -> None:
    script = f"echo run >> {tmp_path}/runs; while ! test -e {tmp_path}/go-on; do sleep 0.02; done"
    first = InitScript(str(tmp_path / "init"))
    first.start(script, False)
    wait_until(lambda: (tmp_path / "runs").exists(), "the script")
    second = InitScript(str(tmp_path / "init"))
    second.start(script, False)
    assert second.result() is None
    (tmp_path / "go-on").touch()
    wait_until(lambda: second.result() is not None and first.result() is not None, "the end of the script")
    assert second.result() == first.result() == {"exit_code": 0, "output": ""}
    third = InitScript(str(tmp_path / "init"))
    third.start(script, False)
    assert third.result() == first.result()
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_script_that_was_interrupted_has_failed_and_runs_in_another_boot_only(tmp_path: Path) -> None:
    (tmp_path / "init").mkdir()
    ended = {"pid": 2**22 + 1, "ticks": 5, "boot": boot_id()}
    (tmp_path / "init" / "runner.json").write_text(json.dumps(ended))
    assert ran(tmp_path, "true")["exit_code"] == NOT_STARTED
    (tmp_path / "init" / "runner.json").write_text(json.dumps({**ended, "boot": "before"}))
    assert ran(tmp_path, "exit 5")["exit_code"] == 5


def test_a_runner_without_an_order_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert run_init(str(tmp_path)) == NOT_STARTED
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_at_the_end_of_a_script_loses_its_output_but_not_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_script, "WRITE_TRIES", 1)
    (tmp_path / "init" / "result.json").mkdir(parents=True)
    result = ran(tmp_path, f"mkdir -p {tmp_path}/init; exit 6")
    assert result["exit_code"] == 6


def test_a_full_disk_is_reported_and_the_machine_joins_all_the_same(
    machine: TestMachine, service: MachineService
) -> None:
    """Every write to a file fails: the agent was unpacked before, or waits for room."""
    from makeway.agent.programs import unpack

    service.join_answer = {"init_script": "echo content > file"}
    unpack(str(machine.folder / "agent.pyz"), str(machine.state / "programs"))
    command = [
        sys.executable,
        str(machine.folder / "agent.pyz"),
        "--url",
        service.url,
        "--machine",
        "m-1",
        "--gpus",
        "1",
    ]
    command += ["--token-file", str(machine.token_file), "--state", str(machine.state)]
    with subprocess.Popen(["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *command], env=machine.env) as agent:
        machine.agents.append(agent)  # type: ignore[arg-type]
        machine.joined()
        assert service.newest()["init"]["exit_code"] != 0
        agent.kill()
    assert not os.path.exists(machine.state / "machine.json")
