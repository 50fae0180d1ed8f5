"""A container runtime that hangs, as docker on a machine whose disk does: it holds up no end, and nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import sys
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
