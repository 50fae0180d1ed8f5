"""What an agent takes of a machine's memory, on the Python of the distribution."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from agent.machine_service import MachineService
from agent.machines import TestMachine
from pods import wait_until

from kube_cluster.certificates import Authority

MB = 1_000_000
DEBIAN = "/usr/bin/python3"
SYSTEM_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"


def memory(pid: int) -> dict[str, int]:
    """Return the resident memory of a process in bytes, and its share of what others have mapped, too."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = (line.split() for line in lines if line.startswith(("Rss:", "Pss:")))
    return {name.rstrip(":"): 1024 * int(size) for name, size, *_ in sizes}


@pytest.mark.parametrize(("scheme", "most"), [("http", 20 * MB), ("https", 24 * MB)])
def test_the_memory_of_an_agent_that_has_run_jobs_is_bounded(
    scheme: str, most: int, machine: TestMachine, service: MachineService, tmp_path: Path
) -> None:
    if scheme == "https":
        authority = Authority(tmp_path / "authority")
        service.encrypt(authority)
        trusted = Path(SYSTEM_BUNDLE).read_bytes() if os.access(SYSTEM_BUNDLE, os.R_OK) else b""
        (tmp_path / "trusted.pem").write_bytes(trusted + authority.file.read_bytes())  # as on a machine
        machine.env["SSL_CERT_FILE"] = str(tmp_path / "trusted.pem")
    service.join_answer = {"init_script": "head -c 20000000 /dev/zero | tr '\\0' x"}
    names = [f"j-{number}" for number in range(4)]
    for name in names:
        service.commands[name] = ["sh", "-c", "echo done"]
    agent = machine.start(gpus="4", python=DEBIAN if os.access(DEBIAN, os.X_OK) else sys.executable)
    machine.joined()
    service.order(*(service.worker(name, devices=[at]) for at, name in enumerate(names)))
    wait_until(lambda: list(service.states().values()) == ["exited"] * len(names), "the ends of the jobs")
    used = memory(agent.pid)
    assert used["Pss"] <= used["Rss"] < most, used
