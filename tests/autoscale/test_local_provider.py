"""The cloud in a folder: processes that boot, run an init script, outlive the service, and end with all of theirs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from autoscale.fleet import CLOUD, GPU_TYPE, Fleet, gpu_work
from makeway_quota.autoscale.provider import (
    CallOutcomeUnknown,
    Denied,
    InvalidLaunch,
    ProviderError,
    QuotaReached,
    StockOut,
    Throttled,
)
from makeway_quota.autoscale.providers import local
from makeway_quota.autoscale.providers.local import LocalFaults, LocalProvider
from makeway_quota.autoscale.providers.local_machine import processes, read_json, start_ticks, write_json
from pods import wait_until

QUICK = LocalFaults(boot_seconds=0.0)


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalProvider]:
    provider = LocalProvider(tmp_path / "cloud")
    provider.set_faults(QUICK)
    yield provider
    provider.set_faults(QUICK)
    for folder in (provider.folder / "instances").iterdir():
        with suppress(ProviderError):
            provider.terminate(folder.name)


def request(machine: str = "m-1", **fields: object) -> str:
    return json.dumps({"machine": machine, "deployment": "cloud", "instance": "big-2"} | fields, sort_keys=True)


def initialised(cloud: LocalProvider, instance: str) -> int:
    path = cloud.folder / "instances" / instance / "init.json"
    wait_until(lambda: read_json(path), "the end of the init script")
    return int(read_json(path)["exit_code"])


def states(cloud: LocalProvider) -> list[str]:
    return [one.state for one in cloud.list("cloud", 0.0).instances]


def test_a_machine_boots_runs_its_init_script_and_shows_its_output(cloud: LocalProvider) -> None:
    made = cloud.launch(request(init_script="echo hello from $0; pwd; exit 3"), "m-1")
    assert initialised(cloud, made.id) == 3
    assert "hello from" in cloud.console(made.id)
    assert str(cloud.folder) in cloud.console(made.id)
    assert states(cloud) == ["running"]
    assert cloud.console("i-000000000000") == ""


def test_a_machine_takes_its_time_to_boot(cloud: LocalProvider) -> None:
    cloud.set_faults(replace(QUICK, boot_seconds=600))
    made = cloud.launch(request(init_script="echo early"), "m-1")
    assert states(cloud) == ["pending"]
    assert cloud.terminate(made.id)
    assert states(cloud) == ["terminated"]
    assert cloud.console(made.id) == ""


def test_ending_a_machine_ends_all_that_it_started(cloud: LocalProvider) -> None:
    made = cloud.launch(request(init_script="sleep 1000 & echo $! > pid; exit 0"), "m-1")
    pid_file = cloud.folder / "instances" / made.id / "disk/pid"
    wait_until(lambda: pid_file.exists() and pid_file.read_text().strip(), "the pid of the sleeper")
    pid = int(pid_file.read_text())
    assert start_ticks(pid)
    assert cloud.terminate(made.id)
    wait_until(lambda: start_ticks(pid) is None, "the end of the sleeper")
    assert not cloud.terminate(made.id)
    assert not cloud.terminate("i-000000000000")
    assert not cloud.terminate("../../etc")


def test_a_machine_outlives_the_process_that_launched_it(cloud: LocalProvider) -> None:
    code = (
        "import sys; from pathlib import Path; from makeway_quota.autoscale.providers.local import LocalProvider;"
        "print(LocalProvider(Path(sys.argv[1])).launch(sys.argv[2], 'm-1').id)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, cloud.folder, request()], capture_output=True, text=True, check=True
    )
    assert initialised(cloud, done.stdout.strip()) == 0
    assert states(cloud) == ["running"]


def test_a_machine_whose_process_dies_is_terminated(cloud: LocalProvider) -> None:
    made = cloud.launch(request(), "m-1")
    initialised(cloud, made.id)
    process = read_json(cloud.folder / "instances" / made.id / "process.json")
    subprocess.run(["kill", "-9", str(process["pid"])], check=True)
    wait_until(lambda: states(cloud) == ["terminated"], "the end of the machine")


CHILDREN = {
    "group": "sleep 1000 &",
    "session of its own": "setsid sleep 1000 &",
    "daemon": "(setsid sh -c 'nohup sleep 1000 >/dev/null 2>&1 &' &)",
    "without an environment": "env -i /bin/sleep 1000 &",
    "script that goes on": "sleep 1000",
}


def machine_processes(cloud: LocalProvider, instance: str) -> list[int]:
    folder = cloud.folder / "instances" / instance
    return processes(folder.resolve(), read_json(folder / "process.json"))


def with_sleepers(cloud: LocalProvider, number: int) -> str:
    """Launch a machine with all kinds of children, and return its id when they run."""
    script = "\n".join(CHILDREN.values())
    made = cloud.launch(request(f"m-{number}", init_script=script), f"m-{number}")
    wait_until(lambda: len(sleepers(cloud, made.id)) == len(CHILDREN), "the children of the init script")
    return made.id


def sleepers(cloud: LocalProvider, instance: str) -> list[int]:
    result = []
    for pid in machine_processes(cloud, instance):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"sleep\x001000\x00"):
                result.append(pid)
    return result


@pytest.mark.parametrize("end", ["terminated", "killed", "killed, and another provider", "half terminated"])
def test_nothing_that_an_init_script_started_outlives_its_machine(cloud: LocalProvider, end: str) -> None:
    machine = with_sleepers(cloud, 1)
    other = with_sleepers(cloud, 2)
    children = sleepers(cloud, machine)
    folder = cloud.folder / "instances" / machine
    seen = LocalProvider(cloud.folder) if "another" in end else cloud
    if end == "terminated":
        assert cloud.terminate(machine)
    elif end == "half terminated":  # the provider was killed after it had noted the end
        write_json(folder / "ended.json", {"at": time.time()})
    else:
        os.kill(read_json(folder / "process.json")["pid"], signal.SIGKILL)
    wait_until(lambda: sorted(states(seen)) == ["running", "terminated"], "the end of the machine")
    wait_until(lambda: not any(start_ticks(pid) for pid in children), "the end of what it started")
    assert len(sleepers(cloud, other)) == len(CHILDREN)


class Killed(BaseException):
    """The provider is killed at this line."""


def killed_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Make the provider die after so many of the lines of a launch that change something; each counts twice."""
    remaining = iter(range(steps))

    def die_if_due() -> None:
        if next(remaining, None) is None:
            raise Killed

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            die_if_due()
            result = real(*arguments, **options)
            die_if_due()
            return result

        return call

    monkeypatch.setattr(local, "write_json", counted(write_json))
    monkeypatch.setattr(Path, "mkdir", counted(Path.mkdir))
    monkeypatch.setattr(subprocess, "run", counted(subprocess.run))


@pytest.mark.slow
def test_a_launch_that_is_killed_at_any_line_is_one_machine_for_its_token(
    cloud: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in range(20):
        token = f"m-{steps}"
        with monkeypatch.context() as patch:
            killed_after(patch, steps)
            try:
                cloud.launch(request(token), token)
                finished = True
            except Killed:
                finished = False
        again = LocalProvider(cloud.folder)
        made = again.launch(request(token), token)
        assert again.launch(request(token), token).id == made.id
        assert (made.machine, made.deployment, made.state) == (token, "cloud", "running")
        assert initialised(cloud, made.id) == 0
        ours = [one for one in again.list("cloud", 0.0).instances if one.machine == token]
        assert [(one.id, one.state) for one in ours] == [(made.id, "running")]
        wait_until(lambda one=made.id: len(machine_processes(cloud, one)) == 1, "the end of all processes but one")
        assert cloud.terminate(made.id)
        if finished:
            break
    assert steps >= 8  # four lines


def test_a_process_of_another_one_with_the_same_pid_is_not_killed(cloud: LocalProvider) -> None:
    made = cloud.launch(request(), "m-1")
    initialised(cloud, made.id)
    path = cloud.folder / "instances" / made.id / "process.json"
    process = read_json(path)
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as other:
        write_json(path, process | {"pid": other.pid, "ticks": (start_ticks(other.pid) or 0) + 1})
        wait_until(lambda: states(cloud) == ["terminated"], "the end of the machine")
        assert not cloud.terminate(made.id)
        assert other.poll() is None
        other.kill()


def test_one_token_is_one_machine_also_after_its_end(cloud: LocalProvider) -> None:
    made = cloud.launch(request(), "m-1")
    assert cloud.launch(request(), "m-1").id == made.id
    with pytest.raises(CallOutcomeUnknown):
        cloud.launch(request(init_script="another"), "m-1")
    cloud.terminate(made.id)
    repeated = cloud.launch(request(), "m-1")
    assert (repeated.id, repeated.state) == (made.id, "terminated")


def test_a_lost_answer_is_a_machine_or_none(cloud: LocalProvider) -> None:
    cloud.set_faults(replace(QUICK, lost_before=1, lost_after=1))
    with pytest.raises(CallOutcomeUnknown):
        cloud.launch(request(), "m-1")
    assert states(cloud) == []
    with pytest.raises(CallOutcomeUnknown):
        cloud.launch(request(), "m-1")
    assert len(states(cloud)) == 1
    assert cloud.launch(request(), "m-1").id == cloud.list("cloud", 0.0).instances[0].id


def test_refusals_are_told_apart(cloud: LocalProvider) -> None:
    for faults, error in (
        (LocalFaults(stock={"big-2": 0}), StockOut),
        (LocalFaults(quota=0), QuotaReached),
        (LocalFaults(throttled=1), Throttled),
        (LocalFaults(denied=True), Denied),
    ):
        cloud.set_faults(faults)
        with pytest.raises(error):
            cloud.launch(request(), "m-1")
    cloud.set_faults(QUICK)
    for wrong in ("", "{}", "[]", request(instance="")):
        with pytest.raises(InvalidLaunch):
            cloud.launch(wrong, "m-1")
    with pytest.raises(InvalidLaunch):
        cloud.launch(request(), "../m-1")
    assert states(cloud) == []


def test_stock_is_counted_by_type_and_comes_back(cloud: LocalProvider) -> None:
    cloud.set_faults(replace(QUICK, stock={"big-2": 1}))
    made = cloud.launch(request("m-1"), "m-1")
    with pytest.raises(StockOut):
        cloud.launch(request("m-2"), "m-2")
    cloud.terminate(made.id)
    assert cloud.launch(request("m-2"), "m-2").machine == "m-2"


def test_lists_can_be_partial_late_and_old(cloud: LocalProvider) -> None:
    for number in range(2):
        cloud.launch(request(f"m-{number}"), f"m-{number}")
    cloud.set_faults(replace(QUICK, partial=True))
    assert (len(states(cloud)), cloud.list("cloud", 0.0).complete) == (1, False)
    cloud.set_faults(replace(QUICK, hidden=600))
    assert (states(cloud), cloud.list("cloud", 0.0).complete) == ([], True)
    cloud.set_faults(replace(QUICK, stale=600))
    assert states(cloud) == []
    cloud.set_faults(QUICK)
    assert len(states(cloud)) == 2
    assert cloud.list("other", 0.0).instances == ()


def test_a_spot_machine_is_taken_back_at_its_deadline(cloud: LocalProvider) -> None:
    made = cloud.launch(request(), "m-1")
    initialised(cloud, made.id)
    before = time.time()
    cloud.interrupt(made.id, 0.2)
    assert read_json(cloud.folder / "instances" / made.id / "spot-notice.json")["deadline"] >= before
    wait_until(lambda: states(cloud) == ["terminated"], "the end of the spot machine")


@pytest.mark.parametrize("fault", ["init_fails", "full_disk"])
def test_an_init_script_can_fail(cloud: LocalProvider, fault: str) -> None:
    cloud.set_faults(replace(QUICK, **{fault: True}))
    made = cloud.launch(request(init_script="echo content > file && echo written"), "m-1")
    assert initialised(cloud, made.id) != 0
    assert ("written" in cloud.console(made.id)) == (fault == "init_fails")


def test_a_script_that_writes_for_ever_does_not_fill_the_disk(cloud: LocalProvider) -> None:
    made = cloud.launch(request(init_script="yes | head -c 3000000"), "m-1")
    assert initialised(cloud, made.id) == 0
    assert (cloud.folder / "instances" / made.id / "console.log").stat().st_size == 1_000_000
    assert len(cloud.console(made.id)) == 65_536


def test_a_machine_without_gpus_hides_them_and_no_machine_sees_the_environment_of_the_service(
    cloud: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "hunter2")
    made = cloud.launch(request(cpu_only=True, init_script="env"), "m-1")
    initialised(cloud, made.id)
    shown = cloud.console(made.id)
    assert "CUDA_VISIBLE_DEVICES=none\n" in shown
    assert "NVIDIA_VISIBLE_DEVICES=none\n" in shown
    assert "hunter2" not in shown


def test_ended_machines_are_forgotten_after_a_while(cloud: LocalProvider) -> None:
    made = cloud.launch(request(), "m-1")
    cloud.terminate(made.id)
    assert states(cloud) == ["terminated"]
    write_json(cloud.folder / "instances" / made.id / "ended.json", {"at": time.time() - 4000})
    assert states(cloud) == []
    assert not list((cloud.folder / "instances").iterdir())
    assert not list((cloud.folder / "tokens").iterdir())


def test_steps_drive_the_cloud_in_a_folder(cloud: LocalProvider) -> None:
    fleet = Fleet(replace(CLOUD, types=(GPU_TYPE,)), now=time.time(), pending=[gpu_work("a"), gpu_work("b")])
    fleet.provider = cloud  # type: ignore[assignment]
    fleet.listening = fleet.now
    cloud.set_faults(replace(QUICK, lost_after=1))
    fleet.run(30)
    assert sorted(fleet.states) == ["booting", "booting"]
    assert states(cloud) == ["running", "running"]
    fleet.pending = []
    fleet.run(150)
    assert states(cloud) == ["terminated", "terminated"]
    assert fleet.states == []
