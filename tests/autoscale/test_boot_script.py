"""The script of a new machine's first boot, run by a real shell: it joins, follows orders, and powers itself off."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from agent.machine_service import JOIN_TOKEN, MACHINE, MachineService, answering
from makeway_quota.autoscale.provider import JoinData
from makeway_quota.autoscale.providers.boot_script import MAX_USER_DATA_BYTES, boot_script
from pods import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def service() -> Iterator[MachineService]:
    with answering() as server:
        yield server


class Booted:
    """A machine of this host: a folder, and all that its script started."""

    def __init__(self, folder: Path, url: str, orphan_after: float = 900.0) -> None:
        self.folder = folder
        tools = folder / "tools"
        tools.mkdir(parents=True)
        (tools / "poweroff").write_text(f"#!/bin/sh\ntouch {folder}/off\n")
        (tools / "poweroff").chmod(0o755)
        script = boot_script(JoinData(url, JOIN_TOKEN), MACHINE, "cloud", orphan_after)
        environment = {"PATH": f"{tools}:{os.environ['PATH']}", "MACHINE_FOLDER": str(folder)}
        with (folder / "console").open("wb") as console:
            done = subprocess.run(
                ["/bin/sh", "-c", script, "script", str(folder / "home")],
                env=environment,
                stdout=console,
                stderr=subprocess.STDOUT,
                timeout=30,
            )
        assert done.returncode == 0

    @property
    def console(self) -> str:
        return (self.folder / "console").read_text()

    @property
    def off(self) -> bool:
        return (self.folder / "off").exists()

    def pids(self, word: bytes = b"") -> list[int]:
        """Return what runs on the machine and has a word in its command."""
        result = []
        mark = f"MACHINE_FOLDER={self.folder}".encode()
        for name in os.listdir("/proc"):
            with suppress(OSError):
                process = Path("/proc", name)
                ours = name.isdigit() and mark in (process / "environ").read_bytes().split(b"\0")
                if ours and word in (process / "cmdline").read_bytes():
                    result.append(int(name))
        return result

    def close(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def machines() -> Iterator[list[Booted]]:
    booted: list[Booted] = []
    yield booted
    for one in booted:
        one.close()


def test_a_machine_joins_with_its_token_and_powers_off_when_it_is_not_needed_any_more(
    service: MachineService, machines: list[Booted], tmp_path: Path
) -> None:
    service.join_answer = {"init_script": "echo hello from the machine"}
    machine = Booted(tmp_path, service.url)
    machines.append(machine)
    wait_until(lambda: service.newest().get("init"), "the end of the init script")
    assert service.newest()["init"] == {"exit_code": 0, "output": "hello from the machine\n"}
    assert (tmp_path / "home/join-token").stat().st_mode & 0o777 == 0o600
    assert JOIN_TOKEN not in machine.console
    assert not any(JOIN_TOKEN.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in machine.pids())
    assert not machine.off
    service.order(stop=True)
    wait_until(lambda: machine.off, "the power to be off")


def test_a_machine_waits_for_a_service_that_is_not_there_yet(
    service: MachineService, machines: list[Booted], tmp_path: Path
) -> None:
    service.replies["agent.pyz"] = [(503, {}), (503, {})]
    machines.append(Booted(tmp_path, service.url))
    wait_until(lambda: service.reports, "a report")


def test_a_page_of_a_proxy_is_not_kept_as_the_agent(
    service: MachineService, machines: list[Booted], tmp_path: Path
) -> None:
    service.replies["agent.pyz"] = [(200, {"page": "in maintenance"})]
    machines.append(Booted(tmp_path, service.url))
    wait_until(lambda: service.reports, "a report")


def test_an_agent_that_is_killed_is_started_again(
    service: MachineService, machines: list[Booted], tmp_path: Path
) -> None:
    machine = Booted(tmp_path, service.url)
    machines.append(machine)
    wait_until(lambda: service.reports, "a report")
    [agent] = machine.pids(b"--token-file")
    os.kill(agent, signal.SIGKILL)
    before = len(service.reports)
    wait_until(lambda: len(service.reports) > before, "the report of the next agent")
    assert len(service.joins) == 1
    assert not machine.off


def test_a_machine_that_shuts_down_tells_its_agent_and_ends(
    service: MachineService, machines: list[Booted], tmp_path: Path
) -> None:
    machine = Booted(tmp_path, service.url)
    machines.append(machine)
    wait_until(lambda: service.reports, "a report")
    [script] = machine.pids(b"home/machine")
    os.kill(script, signal.SIGTERM)
    wait_until(lambda: not machine.pids(), "the end of script and agent")
    assert not machine.off, "it is shut down already"


@pytest.mark.long
def test_a_machine_that_never_reaches_the_service_powers_off(machines: list[Booted], tmp_path: Path) -> None:
    machine = Booted(tmp_path, "http://127.0.0.1:9/prefix", orphan_after=60.0)
    machines.append(machine)
    time.sleep(50)
    assert not machine.off
    wait_until(lambda: machine.off, "the power to be off", 60)


def test_the_script_is_always_the_same_and_fits_into_user_data() -> None:
    join = JoinData(f"https://{'h' * 250}.example/services/makeway", "x" * 200)
    script = boot_script(join, "m-0123456789ab", "d" * 63, 900.0, "aws")
    assert script == boot_script(join, "m-0123456789ab", "d" * 63, 900.0, "aws")
    assert len(script) < MAX_USER_DATA_BYTES // 2
    checked = subprocess.run(["/bin/sh", "-n"], input=script, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_no_value_of_the_script_is_read_as_shell() -> None:
    script = boot_script(JoinData("http://a/$(touch x)", "t'oken$(touch x)"), "m-1", "cloud", 900.0)
    assert "'http://a/$(touch x)/api/v1/agents/agent.pyz'" in script
    assert "'t'\"'\"'oken$(touch x)'" in script
