"""Machines of the cloud in a folder that join a service: each downloads the real agent after its boot, and runs it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from agent.machine_service import JOIN_TOKEN, MACHINE, MachineService, answering
from autoscale.test_local_provider import QUICK, request, states
from makeway_quota.autoscale.provider import CallOutcomeUnknown, JoinData, Provider, ProviderError
from makeway_quota.autoscale.providers.local import LocalProvider
from makeway_quota.autoscale.providers.local_machine import processes, read_json, start_ticks
from makeway_quota.autoscale.providers.memory import MemoryProvider
from pods import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def service() -> Iterator[MachineService]:
    with answering() as server:
        yield server


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalProvider]:
    provider = LocalProvider(tmp_path / "cloud")
    provider.set_faults(QUICK)
    yield provider
    provider.set_faults(QUICK)
    for folder in (provider.folder / "instances").iterdir():
        with suppress(ProviderError):
            provider.terminate(folder.name)


def join_data(service: MachineService) -> JoinData:
    return JoinData(service.url, JOIN_TOKEN)


def test_a_machine_joins_after_its_boot_and_runs_a_job_which_ends_with_the_machine(
    cloud: LocalProvider, service: MachineService
) -> None:
    service.join_answer = {"init_script": "echo hello from the machine"}
    service.order(service.worker())
    made = cloud.launch(request(gpus=4, init_script="exit 1"), MACHINE, join_data(service))
    wait_until(lambda: service.states() == {("j-1", 1, 0): "running"}, "the job")
    assert service.joins[0]["gpus"] == 4
    assert service.newest()["init"] == {"exit_code": 0, "output": "hello from the machine\n"}
    wait_until(lambda: "hello from the machine" in cloud.console(made.id), "the output on the console")
    assert JOIN_TOKEN not in cloud.console(made.id)
    folder = cloud.folder / "instances" / made.id
    running = processes(folder.resolve(), read_json(folder / "process.json"))
    assert len(running) >= 4  # machine, agent, launcher, job
    assert cloud.terminate(made.id)
    assert not any(start_ticks(pid) for pid in running)


def test_a_machine_that_is_not_needed_any_more_powers_off(cloud: LocalProvider, service: MachineService) -> None:
    cloud.launch(request(), MACHINE, join_data(service))
    wait_until(lambda: service.reports, "a report")
    service.order(stop=True)
    wait_until(lambda: states(cloud) == ["terminated"], "the end of the machine")


def test_an_agent_that_dies_is_started_again_and_goes_on(cloud: LocalProvider, service: MachineService) -> None:
    service.order(service.worker())
    made = cloud.launch(request(gpus=1), MACHINE, join_data(service))
    wait_until(lambda: service.states() == {("j-1", 1, 0): "running"}, "the job")
    folder = cloud.folder / "instances" / made.id
    (agent,) = [pid for pid in processes(folder.resolve(), None) if b"--token-file" in command_of(pid)]
    os.kill(agent, signal.SIGKILL)
    reports = len(service.reports)
    wait_until(lambda: len(service.reports) > reports + 1, "reports of the next agent")
    assert service.states() == {("j-1", 1, 0): "running"}
    assert (len(service.joins), len(service.claims)) == (1, 1)
    assert states(cloud) == ["running"]


def command_of(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_spot_machine_reports_its_deadline_before_it_is_taken_back(
    cloud: LocalProvider, service: MachineService
) -> None:
    made = cloud.launch(request(), MACHINE, join_data(service))
    wait_until(lambda: service.reports, "a report")
    cloud.interrupt(made.id, 120.0)
    deadline = read_json(cloud.folder / "instances" / made.id / "spot-notice.json")["deadline"]
    wait_until(lambda: service.newest()["spot_deadline"] == deadline, "the report of the deadline")
    assert states(cloud) == ["running"]
    cloud.interrupt(made.id, 0.0)
    wait_until(lambda: states(cloud) == ["terminated"], "the end of the machine")


def test_an_init_script_fails_on_a_machine_that_joins_too(cloud: LocalProvider, service: MachineService) -> None:
    service.join_answer = {"init_script": "echo written"}
    cloud.set_faults(replace(QUICK, init_fails=True))
    cloud.launch(request(), MACHINE, join_data(service))
    wait_until(lambda: service.newest().get("init"), "the end of the init script")
    assert service.newest()["init"] == {"exit_code": 1, "output": "written\n"}


def test_a_machine_with_a_full_disk_never_joins_and_ends_all_the_same(
    cloud: LocalProvider, service: MachineService
) -> None:
    cloud.set_faults(replace(QUICK, full_disk=True))
    made = cloud.launch(request(), MACHINE, join_data(service))
    wait_until(lambda: "cannot unpack" in cloud.console(made.id), "the complaint of the agent")
    assert not service.joins
    assert cloud.terminate(made.id)


def test_a_machine_waits_for_a_service_that_is_not_there_yet(cloud: LocalProvider, service: MachineService) -> None:
    service.replies["agent.pyz"] = [(503, {}), (503, {})]
    cloud.launch(request(), MACHINE, join_data(service))
    wait_until(lambda: service.reports, "a report")


def test_join_data_belongs_to_a_launch_as_its_request_does_and_is_not_shown(
    cloud: LocalProvider, service: MachineService
) -> None:
    memory: Provider = MemoryProvider(time.time)
    join = join_data(service)
    for provider in (cloud, memory):
        wanted = request(zone="", market="on_demand")
        made = provider.launch(wanted, MACHINE, join)
        assert provider.launch(wanted, MACHINE, join).id == made.id
        for other in (None, replace(join, token="other"), replace(join, url="http://other")):
            with pytest.raises(CallOutcomeUnknown):
                provider.launch(wanted, MACHINE, other)
    assert JOIN_TOKEN not in repr(join)
    secret = [file for file in cloud.folder.rglob("*") if file.is_file() and JOIN_TOKEN.encode() in file.read_bytes()]
    assert secret
    assert not [file for file in secret if file.stat().st_mode & 0o077]
