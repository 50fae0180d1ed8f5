"""What an agent takes of a machine's memory, on the Python of the distribution."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent.machine_service import MachineService
from agent.machines import TestMachine
from agent.trust import hash_certificates
from pods import wait_until

from kube_cluster.certificates import Authority

MB = 1_000_000
SOURCES = Path(__file__).parents[2] / "widgets"
DEBIAN = "/usr/bin/python3"
SYSTEM_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"


def memory(pid: int) -> dict[str, int]:
    """Return the resident memory of a process in bytes, and its share of what others have mapped, too."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = (line.split() for line in lines if line.startswith(("Rss:", "Pss:")))
    return {name.rstrip(":"): 1024 * int(size) for name, size, *_ in sizes}


@pytest.mark.parametrize(
    ("trust", "most"),
    [("", 15 * MB), ("folder", 20 * MB), ("file", 21.5 * MB)],
    ids=["http", "https", "https by a file"],
)
def test_the_memory_of_an_agent_that_has_run_jobs_is_bounded(
    trust: str, most: float, machine: TestMachine, service: MachineService, tmp_path: Path
) -> None:
    """`https` as on Debian, whose certificates lie in a folder by their hashes, and as where there is one file only."""
    if trust:
        authority = Authority(tmp_path / "authority")
        service.encrypt(authority)
        machine.env |= trust_settings(authority.file, tmp_path, as_folder=trust == "folder")
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


def trust_settings(authority: Path, place: Path, *, as_folder: bool) -> dict[str, str]:
    """Return the environment of a machine that trusts an authority beside the public ones."""
    bundle = Path(SYSTEM_BUNDLE)
    trusted = (bundle.read_bytes() if os.access(bundle, os.R_OK) else b"") + authority.read_bytes()
    if not as_folder:
        (place / "trusted.pem").write_bytes(trusted)
        return {"SSL_CERT_FILE": str(place / "trusted.pem")}
    folder = place / "certificates"
    folder.mkdir()
    for number, part in enumerate(trusted.decode().split("-----BEGIN CERTIFICATE-----")[1:]):
        (folder / f"{number}.pem").write_text(f"-----BEGIN CERTIFICATE-----{part}")
    hash_certificates(folder)
    return {"SSL_CERT_DIR": str(folder)}


def test_the_agent_keeps_out_of_its_memory_what_it_does_not_need() -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from makeway.agent.light_imports import import_http_client, import_lazily
import_lazily("ipaddress", "locale")
import_http_client(tls=True)
import makeway.agent.command, makeway.agent.machine_agent
heavy = {"calendar", "datetime", "email", "hashlib", "random", "shutil", "tempfile", "typing", "zipfile"}
print(sorted(heavy & set(sys.modules)))
import email.message, http.client, ipaddress, locale
print(email.message.Message.__module__, ipaddress.ip_address("10.0.0.1"), bool(locale.getpreferredencoding(False)))
"""
    command = [DEBIAN if os.access(DEBIAN, os.X_OK) else sys.executable, "-I", "-S", "-c", code, str(SOURCES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "email.message 10.0.0.1 True"]
