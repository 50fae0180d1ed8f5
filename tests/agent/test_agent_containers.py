"""Workers in containers, by the real agent and a real podman."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent.machine_service import MachineService
from agent.machines import TestMachine
from agent.podman import DEFAULT, OTHER, Podman
from makeway.agent.containers import container_environment, gpu_flags, pass_token
from pods import wait_until

EXITED = {("j-1", 1, 0): "exited"}
RUNNING = {("j-1", 1, 0): "running"}
VIRTUAL = {"MAKEWAY_VIRTUAL_GPUS": "1"}
SHOWS = """
cat /image
echo "rank $RANK gpus $CUDA_VISIBLE_DEVICES init $$"
cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null
cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null
env | grep -c TOKEN
touch "$MAKEWAY_CHECKPOINT_DIR/saved"
exit 7
"""


@pytest.fixture
def boxes(machine: TestMachine, podman: Podman) -> Iterator[TestMachine]:
    """Yield a machine whose agent has podman."""
    machine.env |= podman.env
    yield machine
    machine.close()
    podman("rm", "--force", "--all", "--time=0")


def boxed(service: MachineService, image: str = DEFAULT, **more: Any) -> dict[str, Any]:
    """Return an order for a worker in a container; its GPU is virtual, as there is none here."""
    return service.worker(image=image, **{"env": {"RANK": "0", "MAKEWAY_VIRTUAL_GPUS": "1"}, **more})


def code(service: MachineService) -> int | None:
    result: int | None = service.newest()["attempts"][0]["exit_code"]
    return result


@pytest.mark.slow
@pytest.mark.covers("F64")
def test_a_job_runs_in_its_image_within_its_limits_and_its_container_is_removed(
    boxes: TestMachine, service: MachineService, podman: Podman, tmp_path: Path
) -> None:
    service.commands["j-1"] = ["sh", "-c", SHOWS]
    shared = tmp_path / "shared" / "j-1"
    env = {"RANK": "0", "MAKEWAY_VIRTUAL_GPUS": "1", "CUDA_VISIBLE_DEVICES": "1"}
    order = service.worker(image=OTHER, cpu=1500, memory=256, env=env, devices=[1], checkpoints=str(shared))
    service.order(order)
    boxes.start()
    wait_until(lambda: service.states() == EXITED, "the end of the job")
    assert code(service) == 7, boxes.log()
    lines = service.logs["j-1/1/0"].decode().splitlines()
    assert lines[0] == OTHER
    assert lines[1].startswith("rank 0 gpus 1 init ")
    assert int(lines[1].split()[-1]) < 100  # a process namespace of its own
    assert {"268435456"} & set(lines)
    assert {"150000", "150000 100000"} & set(lines)
    assert lines[-1] == "0"
    assert (shared / "saved").is_file()
    assert podman.containers() == []
    assert service.claims == [("j-1/1/0", "Bearer token of j-1/1/0")]
    service.order()
    wait_until(lambda: service.states() == {}, "that the worker is forgotten")


@pytest.mark.slow
@pytest.mark.covers("F64")
def test_a_job_without_an_image_runs_bare_on_a_machine_that_has_containers(
    boxes: TestMachine, service: MachineService, podman: Podman
) -> None:
    service.commands["j-1"] = ["sh", "-c", "sleep 0.5; test -e /image || echo bare"]
    service.order(service.worker(image=None))
    boxes.start()
    wait_until(lambda: service.states() == EXITED, "the end of the job")
    assert service.logs["j-1/1/0"] == b"bare\n"
    assert podman.containers() == []


@pytest.mark.slow
def test_no_token_is_in_a_file_or_in_what_the_runtime_knows(
    boxes: TestMachine, service: MachineService, podman: Podman
) -> None:
    service.order(boxed(service))
    boxes.start()
    wait_until(lambda: service.states() == RUNNING, "the start of the job")
    shown = podman("inspect", *podman.containers())
    shown += Path(f"/proc/{boxes.launchers()[0]}/environ").read_text()
    assert "token of j-1" not in shown
    for file in [*boxes.state.rglob("*"), *(podman.folder / "run").rglob("*")]:
        assert not (file.is_file() and b"token of j-1" in file.read_bytes()), file


@pytest.mark.slow
def test_a_container_goes_on_without_its_agent_and_is_adopted(
    boxes: TestMachine, service: MachineService, podman: Podman
) -> None:
    go_on = boxes.state / "workers" / "j-1" / "1" / "checkpoints" / "go-on"
    service.commands["j-1"] = ["sh", "-c", f"while ! test -e {go_on}; do sleep 0.05; done; exit 9"]
    service.order(boxed(service))
    boxes.start()
    wait_until(lambda: service.states() == RUNNING, "the start of the job")
    (launcher,), (name,) = boxes.launchers(), podman.containers()
    for _ in range(2):
        boxes.kill()
        reports = len(service.reports)
        boxes.start()
        wait_until(lambda known=reports: len(service.reports) > known + 1, "reports of the new agent")
        assert service.states() == RUNNING
    assert (boxes.launchers(), podman.containers(), len(service.claims)) == ([launcher], [name], 1)
    boxes.kill()
    go_on.touch()
    wait_until(lambda: not boxes.launchers(), "the end of the job")
    boxes.start()
    wait_until(lambda: service.states() == EXITED, "the report")
    assert code(service) == 9
    assert podman.containers() == []


@pytest.mark.slow
def test_an_agent_killed_at_any_moment_of_a_start_leaves_at_most_one_container_that_runs_the_job_once(
    boxes: TestMachine, service: MachineService, podman: Podman
) -> None:
    boxes.start()
    boxes.joined()
    for number in range(4):
        service.order(boxed(service, attempt=number + 1))
        wait_until(lambda: boxes.processes(b"--start-worker"), "the start")
        for pid in boxes.processes(b"--start-worker") if number % 2 else ():
            os.kill(pid, signal.SIGKILL)
        boxes.kill()
        boxes.start()
        key = ("j-1", number + 1, 0)
        wait_until(lambda key=key: service.states().get(key) == "running", "the start")
        assert [path for path, _ in service.claims].count(f"j-1/{number + 1}/0") == 1
        assert len(podman.containers()) == 1
        for pid in boxes.launchers():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not podman.containers(), "that the container is removed")


@pytest.mark.slow
def test_a_job_that_is_not_ordered_any_more_gets_the_signal_in_its_container(
    boxes: TestMachine, service: MachineService, podman: Podman
) -> None:
    checkpoints = boxes.state / "workers" / "j-1" / "1" / "checkpoints"
    script = f"trap 'touch {checkpoints}/noticed; exit 0' TERM; while :; do sleep 0.05; done"
    service.commands["j-1"] = ["sh", "-c", script]
    service.order(boxed(service))
    agent = boxes.start()
    wait_until(lambda: service.states() == RUNNING, "the start of the job")
    agent.terminate()
    assert agent.wait(30) == 143
    assert (checkpoints / "noticed").exists()
    assert podman.containers() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("image", "env", "words"),
    [
        ("localhost:1/team/none:1", VIRTUAL, ["localhost:1/team/none:1", "could not be reached", "connection refused"]),
        ("makeway.test/empty:1", VIRTUAL, ["has no python3"]),
        (DEFAULT, {}, ["knows no GPUs", "nvidia.com/gpu=0"]),
    ],
)
def test_an_image_that_cannot_run_is_reported_with_what_is_wrong(
    boxes: TestMachine, service: MachineService, podman: Podman, image: str, env: dict[str, str], words: list[str]
) -> None:
    if image == "makeway.test/empty:1":
        from kube_cluster import images

        (podman.folder / "empty.tar").write_bytes(images.empty())
        podman("load", "--input", str(podman.folder / "empty.tar"))
        conf = (podman.folder / "containers.conf").read_text()
        (boxes.folder / "containers.conf").write_text(
            "\n".join(line for line in conf.splitlines() if not line.startswith("volumes"))
        )
        boxes.env["CONTAINERS_CONF"] = str(boxes.folder / "containers.conf")
    service.order(boxed(service, image, env=env))
    boxes.start()
    wait_until(lambda: service.states() == EXITED, "the report")
    (attempt,) = service.newest()["attempts"]
    assert all(word in attempt["message"] for word in words), attempt
    assert attempt["exit_code"] == 126
    assert service.claims == []
    assert podman.containers() == []


@pytest.mark.slow
def test_a_machine_without_a_runtime_reports_so_and_runs_what_needs_none(
    machine: TestMachine, service: MachineService
) -> None:
    (machine.folder / "bin").mkdir()
    for name in ("sh", "sleep"):
        (machine.folder / "bin" / name).symlink_to(str(shutil.which(name)))
    machine.env["PATH"] = str(machine.folder / "bin")
    service.order(service.worker(image=DEFAULT), service.worker("j-2", devices=[1]))
    machine.start()
    wait_until(lambda: service.states() == {**EXITED, ("j-2", 1, 0): "running"}, "the reports")
    assert "neither podman nor docker is on the machine" in service.newest()["attempts"][0]["message"]


@pytest.mark.slow
def test_a_container_whose_worker_is_forgotten_is_removed(
    boxes: TestMachine, service: MachineService, podman: Podman
) -> None:
    labels = ["--label", f"makeway.agent={boxes.state}", "--label", f"makeway.folder={boxes.state}/workers/j-9/1/0"]
    podman("run", "--detach", "--network=host", "--name", "forgotten", *labels, DEFAULT, "/bin/sleep", "1000")
    other = ["--label", "makeway.agent=/other", "--label", "makeway.folder=/other/workers/j-9/1/0"]
    podman("run", "--detach", "--network=host", "--name", "other", *other, DEFAULT, "/bin/sleep", "1000")
    boxes.state.mkdir()
    (boxes.state / "containers-used").touch()
    boxes.start()
    wait_until(lambda: podman.containers() == ["other"], "that it is removed")
    podman("rm", "--force", "--time=0", "other")


@pytest.mark.slow
def test_a_job_that_forges_the_files_of_its_folder_reaches_nothing_outside_of_its_container(
    boxes: TestMachine, service: MachineService, podman: Podman
) -> None:
    victim = boxes.folder / "victim"
    victim.write_text("as before\n")
    forged = '{"runtime": "podman", "container": "--all", "pid": 1, "ticks": 1, "boot": "", "devices": []}'
    service.commands["j-1"] = [
        *("sh", "-c"),
        f"""cd "$MAKEWAY_JOB_DIR" && rm -f launcher.err worker.json lock && echo '{forged}' >worker.json &&
        ln -s {victim} launcher.err && ln -s {victim} lock && echo of the job >/proc/1/fd/2; exit 7""",
    ]
    service.order(boxed(service, job="j-2"))
    boxes.start()
    wait_until(lambda: service.states().get(("j-2", 1, 0)) == "running", "the start of the other job")
    (other,) = podman.containers()
    service.order(boxed(service, job="j-2"), boxed(service, devices=[1]))
    wait_until(lambda: service.states().get(("j-1", 1, 0)) == "exited", "the end of the job")
    assert victim.read_text() == "as before\n"
    assert podman.containers() == [other]
    assert code(service) == 7
    boxes.kill()
    boxes.start()
    expected = {("j-1", 1, 0): "exited", ("j-2", 1, 0): "running"}
    service.reports.clear()
    wait_until(lambda: service.states() == expected, "reports of the new agent")
    assert podman.containers() == [other]


def test_a_token_is_written_to_nothing_but_the_pipe_of_its_launcher(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as before")
    for forge in (lambda path: path.symlink_to(victim), lambda path: path.hardlink_to(victim)):
        folder = tmp_path / "worker"
        folder.mkdir()
        forge(folder / "token")
        with subprocess.Popen(["sleep", "1"]) as process:
            assert not pass_token(str(folder), "token of the worker", process.pid)
        assert victim.read_text() == "as before"
        shutil.rmtree(folder)


ORDER = {"devices": [1, 3], "cpu_only": False, "virtual": False}


@pytest.mark.covers("F66")
@pytest.mark.parametrize(
    ("runtime", "changes", "flags"),
    [
        ("podman", {}, ["--device=nvidia.com/gpu=1", "--device=nvidia.com/gpu=3"]),
        ("docker", {}, ["--gpus", '"device=1,3"']),
        ("podman", {"cpu_only": True}, []),
        ("docker", {"cpu_only": True}, []),
        ("podman", {"virtual": True}, []),
        ("podman", {"devices": []}, []),
    ],
)
def test_a_container_gets_the_gpus_of_its_worker_and_no_others(
    runtime: str, changes: dict[str, object], flags: list[str]
) -> None:
    assert gpu_flags(runtime, {**ORDER, **changes}) == flags


def test_gpus_are_numbered_from_0_in_a_container_and_hidden_on_a_machine_without() -> None:
    bare = {
        "PATH": "/machine/bin",
        "HOME": "/root",
        "NCCL_DEBUG": "INFO",
        "https_proxy": "http://proxy",
        "MAKEWAY_JOB_DIR": "/job",
        "MAKEWAY_WORKER_ENV": '{"CUDA_VISIBLE_DEVICES": "1,3"}',
    }
    env = container_environment(bare, ORDER)
    assert env["MAKEWAY_WORKER_ENV"] == '{"CUDA_VISIBLE_DEVICES": "0,1"}'
    assert (env["NCCL_DEBUG"], env["https_proxy"]) == ("INFO", "http://proxy")
    assert not {"PATH", "HOME", "CUDA_VISIBLE_DEVICES"} & env.keys()
    hidden = container_environment(bare, {**ORDER, "cpu_only": True})
    assert hidden["NVIDIA_VISIBLE_DEVICES"] == hidden["CUDA_VISIBLE_DEVICES"] == "none"
