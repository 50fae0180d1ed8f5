"""A container runtime that hangs, as docker on a machine whose disk does: it holds up no end, and nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from agent.machine_service import MachineService
from agent.machines import TestMachine
from pods import wait_until

pytestmark = pytest.mark.slow

PULLING = b"sleep\x001007"


@pytest.fixture
def pulling(machine: TestMachine, service: MachineService) -> TestMachine:
    """Return a machine whose docker hangs while it pulls the image of a job."""
    folder = machine.folder / "bin"
    folder.mkdir()
    for name in ("sh", "sleep"):
        (folder / name).symlink_to(str(shutil.which(name)))
    docker = folder / "docker"
    docker.write_text('#!/bin/sh\ntest "$1" = pull || exit 1\nsleep 1007\n')
    docker.chmod(0o755)
    machine.env["PATH"] = os.pathsep.join([str(folder), str(Path(sys.executable).parent)])
    service.order(service.worker(image="registry.example/pytorch"))
    machine.start()
    wait_until(lambda: machine.processes(PULLING), "the download of the image")
    return machine


def test_a_machine_that_stops_in_the_middle_of_a_download_does_not_wait_for_it(pulling: TestMachine) -> None:
    pulling.agents[0].send_signal(signal.SIGTERM)
    assert pulling.agents[0].wait(10) == 143
    assert not pulling.processes(PULLING)


def test_a_machine_that_is_over_in_the_middle_of_a_download_does_not_wait_for_it(
    pulling: TestMachine, service: MachineService
) -> None:
    service.order(stop=True)
    assert pulling.agents[0].wait(10) == 0
    assert not pulling.processes(PULLING)


def test_a_download_for_a_job_that_is_not_ordered_any_more_ends_with_its_worker(
    pulling: TestMachine, service: MachineService
) -> None:
    service.order()
    wait_until(lambda: service.states() == {}, "that the worker is forgotten")
    wait_until(lambda: not pulling.processes(PULLING), "the end of the download")
    assert pulling.agents[0].poll() is None


DOCKER = '''#!{python}
"""As docker, as far as an agent uses it: the launcher of a container is a process; its removal hangs."""
import json, os, subprocess, sys, time
words = sys.argv[1:]
record = os.path.join({folder!r}, "container")
if words[:2] == ["image", "inspect"]:
    sys.exit(0)
if words[0] == "run":
    env = dict(words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "--env")
    env["PATH"] = os.environ["PATH"]
    command = [sys.executable, *words[words.index("--entrypoint") + 3 :]]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=env, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    with open(record, "w") as file:
        file.write(str(process.pid))
elif words[0] == "inspect":
    print(open(record).read() if "{{{{.State.Pid}}}}" in words else "0 false")
elif words[0] == "rm" and os.path.exists(record):
    os.execvp("sleep", ["sleep", "1007"])
'''


@pytest.fixture
def removing(machine: TestMachine, service: MachineService) -> TestMachine:
    """Return a machine whose docker hangs while it removes the container of a job that has ended."""
    folder = machine.folder / "bin"
    folder.mkdir()
    for name in ("sh", "sleep"):
        (folder / name).symlink_to(str(shutil.which(name)))
    docker = folder / "docker"
    docker.write_text(DOCKER.format(python=sys.executable, folder=str(machine.folder)))
    docker.chmod(0o755)
    machine.env["PATH"] = os.pathsep.join([str(folder), str(Path(sys.executable).parent)])
    service.commands |= {"j-1": ["sh", "-c", "exit 0"], "j-2": ["sleep", "1000"], "j-3": ["sh", "-c", "exit 3"]}
    service.order(service.worker(image="registry.example/pytorch"))
    machine.start(gpus="3")
    wait_until(lambda: machine.processes(PULLING), "the removal of the container")
    return machine


def test_other_workers_start_and_end_while_the_removal_of_a_container_hangs(
    removing: TestMachine, service: MachineService
) -> None:
    ordered = [
        service.worker(image="registry.example/pytorch"),
        service.worker("j-2", devices=[1]),
        service.worker("j-3", devices=[2]),
    ]
    began = time.monotonic()
    service.order(*ordered)
    expected = {("j-2", 1, 0): "running", ("j-3", 1, 0): "exited"}
    wait_until(lambda: expected.items() <= service.states().items(), "the reports of the other workers")
    service.order(ordered[0])
    service.ended_attempts.add("j-2")
    wait_until(lambda: set(service.states()) == {("j-1", 1, 0)}, "the end of the other workers")
    assert service.states()[("j-1", 1, 0)] != "exited"
    assert removing.processes(PULLING)
    assert time.monotonic() - began < 60.0
    ended = [report["exit"] for path, report in service.worker_reports if path == "j-1/1/0" and report.get("exit")]
    assert [end["exit_code"] for end in ended] == [0]


@pytest.mark.parametrize("how", ["SIGTERM", "stop"])
def test_a_machine_that_ends_does_not_wait_for_the_removal_of_a_container(
    removing: TestMachine, service: MachineService, how: str
) -> None:
    if how == "stop":
        service.order(stop=True)
    else:
        removing.agents[0].send_signal(signal.SIGTERM)
    assert removing.agents[0].wait(20) == (0 if how == "stop" else 143)
