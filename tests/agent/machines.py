"""Machines for tests: the real agent in a process of its own, packed as it is served, and all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from agent.machine_service import JOIN_TOKEN, MACHINE, MachineService
from makeway.launcher.processes import stat
from makeway_quota.agent_program import agent_program
from pods import wait_until


class TestMachine:
    """A machine: a folder, and agents that run there one after the other."""

    __test__ = False

    def __init__(self, folder: Path, service: MachineService) -> None:
        self.folder = folder
        self.service = service
        self.state = folder / "state"
        self.token_file = folder / "token"
        folder.mkdir(parents=True)
        (folder / "agent.pyz").write_bytes(agent_program())
        self.token_file.write_text(JOIN_TOKEN)
        self.env = {"PATH": os.environ["PATH"], "HOME": str(folder), "LOCAL_MACHINE_FOLDER": str(folder)}
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, gpus: str = "2", python: str = sys.executable) -> subprocess.Popen[bytes]:
        """Start an agent."""
        command = [python, str(self.folder / "agent.pyz"), "--url", self.service.url, "--machine", MACHINE]
        command += ["--token-file", str(self.token_file), "--state", str(self.state), "--gpus", gpus, *words]
        with (self.folder / "agent.log").open("ab") as log:
            process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.folder)
        self.agents.append(process)
        return process

    def kill(self) -> None:
        """Kill the newest agent as a lack of memory does."""
        self.agents[-1].kill()
        self.agents[-1].wait(10)

    def log(self) -> str:
        """Return what the agents have written."""
        return (self.folder / "agent.log").read_text(encoding="utf-8", errors="replace")

    def processes(self, *words: bytes) -> list[int]:
        """Return what runs on this machine, by the mark in its environment, with these words in its command line."""
        mark, result = f"LOCAL_MACHINE_FOLDER={self.folder}".encode(), []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                marked = mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                known = stat(int(name))
                if marked and known is not None and known.is_alive and all(word in command for word in words):
                    result.append(int(name))
        return result

    def launchers(self) -> list[int]:
        """Return the launchers that run: no job can read their environment, so by those of root or their command."""
        result = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                known = stat(int(name))
                ours = str(self.state).encode() in command and command.endswith(b"\0--remote\0")
                if ours and known is not None and known.is_alive:
                    result.append(int(name))
        return result

    def joined(self) -> None:
        """Wait until the machine has reported that its init script has ended."""
        wait_until(lambda: self.service.newest().get("init"), "a report with the end of the init script")

    def close(self) -> None:
        """Kill all that runs."""
        for process in self.agents:
            process.kill()
            process.wait(10)
        self.service.silent.clear()
        for pid in [*self.launchers(), *self.processes()]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.launchers() and not self.processes(), "the end of all processes")
