"""What an agent starts, adopts and ends, on a clock of the test: one look at orders and processes after the other."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent.machine_service import MachineService
from makeway.agent import workers as workers_module
from makeway.agent.init_script import is_running
from makeway.agent.machine_agent import KILLED_SECONDS, MachineAgent
from makeway.agent.machine_folder import FolderInUse, MachineFolder, MachineInUse, lock_machine
from makeway.agent.options import read_options
from makeway.agent.worker_order import MachineOrders, read_orders
from makeway.agent.workers import (
    START_SECONDS,
    STUCK_SECONDS,
    TERMINATE_SECONDS,
    UNWANTED_SECONDS,
    AgentWorker,
    MachineWorkers,
)
from makeway.launcher.attempt import boot_id, start_time
from pods import wait_until

KEY = ("j-1", 1, 0)


class Machine:
    """The workers of one agent, with a clock that the test sets and processes that stand for launchers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 1000.0
        self.lines: list[str] = []
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.folder = MachineFolder(str(path), "m-1")
        self.workers = MachineWorkers(self.folder, lambda: self.now, self.lines.append)

    def again(self) -> None:
        """Be the next agent, after this one was killed."""
        self.folder.close()
        self.folder = MachineFolder(str(self.path), "m-1")
        self.workers = MachineWorkers(self.folder, lambda: self.now, self.lines.append)

    def launcher(self, *words: str, key: tuple[str, int, int] = KEY, **record: Any) -> subprocess.Popen[bytes]:
        """Run a process as the launcher of a worker, with the folder and the record that the starter leaves."""
        home = self.home(key)
        home.mkdir(parents=True)
        process = subprocess.Popen(words or ("sleep", "1000"), env={"PATH": os.environ["PATH"]})
        own = {"pid": process.pid, "ticks": start_time(process.pid), "boot": boot_id(), "devices": [0]}
        home.with_name(f"{home.name}.json").write_text(json.dumps({**own, **record}))
        self.launchers.append(process)
        self.again()
        return process

    def home(self, key: tuple[str, int, int] = KEY) -> Path:
        return self.path / "workers" / "/".join(map(str, key))

    def sync(self, orders: MachineOrders | None, seconds: float = 0.0) -> None:
        self.now += seconds
        self.workers.sync(orders)

    @property
    def worker(self) -> AgentWorker:
        return self.workers.workers[KEY]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "state")
    yield made
    for process in made.launchers:
        process.kill()
        process.wait()
    made.folder.close()


@pytest.fixture
def wanted(service: MachineService) -> MachineOrders:
    return read_orders({"revision": "1", "attempts": [service.worker()]})


NOTHING = read_orders({"revision": "2", "attempts": []})


def ignores_term(pid: int) -> bool:
    """Whether the process ignores SIGTERM, by the mask of ignored signals that Linux shows."""
    mask = next(
        line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:")
    )
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def ended(process: subprocess.Popen[bytes]) -> int:
    return process.wait(10)


def test_without_orders_nothing_is_ended_and_nothing_is_started(machine: Machine) -> None:
    process = machine.launcher()
    for _ in range(5):
        machine.sync(None, 1000)
    assert process.poll() is None
    assert machine.workers.running


def test_a_worker_that_is_not_ordered_any_more_gets_time_then_a_signal_and_is_killed_then(machine: Machine) -> None:
    process = machine.launcher("sh", "-c", "trap '' TERM; while :; do sleep 0.05; done")
    wait_until(lambda: ignores_term(process.pid), "the launcher ignores the signal")
    machine.sync(NOTHING)
    machine.sync(NOTHING, UNWANTED_SECONDS - 1)
    assert machine.worker.terminated_at is None
    machine.sync(NOTHING, 1)
    assert machine.worker.terminated_at == machine.now
    machine.sync(NOTHING, TERMINATE_SECONDS - 1)
    assert process.poll() is None
    machine.sync(NOTHING, 1)
    assert ended(process) == -signal.SIGKILL
    machine.sync(NOTHING)
    assert machine.workers.workers == {}
    assert not machine.home().exists()


def test_a_worker_whose_order_vanishes_for_a_moment_is_not_touched(machine: Machine, wanted: MachineOrders) -> None:
    process = machine.launcher()
    for _ in range(10):
        machine.sync(NOTHING, 1)
        machine.sync(NOTHING, UNWANTED_SECONDS - 1)
        machine.sync(wanted, 1)
    assert process.poll() is None
    assert machine.worker.terminated_at is None
    assert machine.worker.state == "starting"


def test_a_worker_that_got_the_signal_and_is_ordered_again_may_save_and_does_not_start_twice(
    machine: Machine, wanted: MachineOrders
) -> None:
    process = machine.launcher("sh", "-c", "trap '' TERM; while :; do sleep 0.05; done")
    wait_until(lambda: ignores_term(process.pid), "the launcher ignores the signal")
    machine.sync(NOTHING)
    machine.sync(NOTHING, UNWANTED_SECONDS)
    machine.sync(wanted, TERMINATE_SECONDS + 100)
    machine.sync(wanted, 100)
    process.kill()
    process.wait()
    machine.sync(wanted, 100)
    assert machine.worker.state == "exited"
    machine.sync(wanted, 100)
    assert machine.worker.process is None


def test_orders_that_cannot_be_read_end_and_start_nothing(machine: Machine, service: MachineService) -> None:
    process = machine.launcher()
    order = service.worker()
    for attempts in (
        None,
        "none",
        {},
        [None],
        [{}],
        [{**order, "job": "../x"}],
        [{**order, "attempt": "1"}],
        [{**order, "worker": -1}],
        [{**order, "job": "x" * 200}],
        [{**order, "token": None}],
        [{**order, "env": ["a"]}],
        [{**order, "devices": ["one"]}],
        [{key: value for key, value in order.items() if key != "url"}],
    ):
        orders = read_orders({"revision": "3", "attempts": attempts})
        for _ in range(4):
            machine.sync(orders, 100)
        assert process.poll() is None, attempts
        assert list(machine.workers.workers) == [KEY]


def test_an_order_with_a_number_that_is_none_harms_no_other(service: MachineService) -> None:
    entries = [service.worker(devices=[float("inf")]), service.worker("j-2")]
    orders = read_orders({"revision": "1", "attempts": entries})
    assert (set(orders.workers), orders.unreadable) == ({("j-2", 1, 0)}, {KEY})


def test_a_process_with_the_pid_of_a_launcher_of_before_is_neither_adopted_nor_killed(machine: Machine) -> None:
    other = subprocess.Popen(["sleep", "1000"])
    machine.launchers.append(other)
    machine.launcher(pid=other.pid, ticks=start_time(other.pid) + 1)
    machine.sync(NOTHING, 0)
    machine.sync(NOTHING, 1000)
    assert other.poll() is None
    assert machine.workers.workers == {}


def test_a_launcher_of_another_boot_has_ended(machine: Machine, wanted: MachineOrders) -> None:
    process = machine.launcher(boot="another-boot")
    machine.sync(wanted)
    assert machine.worker.state == "exited"
    assert process.poll() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "ticks": null}', '{"pid": true}', "\0" * 50])
def test_a_damaged_record_is_no_launcher(machine: Machine, text: str) -> None:
    machine.home().mkdir(parents=True)
    machine.home().with_name("0.json").write_text(text)
    machine.again()
    machine.sync(NOTHING, 1)
    machine.sync(NOTHING, UNWANTED_SECONDS)
    machine.sync(NOTHING, 1)
    assert machine.workers.workers == {}


def test_the_launcher_of_an_agent_of_an_earlier_release_is_adopted(machine: Machine, wanted: MachineOrders) -> None:
    process = machine.launcher()
    os.rename(machine.home().with_name("0.json"), machine.home() / "worker.json")
    machine.again()
    machine.sync(wanted)
    assert (machine.worker.record["pid"], machine.worker.process) == (process.pid, None)


def test_a_record_in_the_folder_of_a_worker_says_nothing_beside_that_of_the_agent(machine: Machine) -> None:
    other = subprocess.Popen(["sleep", "1000"])
    machine.launchers.append(other)
    process = machine.launcher()
    forged = {"pid": other.pid, "ticks": start_time(other.pid), "boot": boot_id(), "devices": [0]}
    (machine.home() / "worker.json").write_text(json.dumps(forged))
    machine.again()
    machine.sync(NOTHING)
    machine.sync(NOTHING, UNWANTED_SECONDS)
    assert ended(process) == -signal.SIGTERM
    assert other.poll() is None


def test_odd_folders_among_those_of_workers_are_left_alone(machine: Machine) -> None:
    odd = ["lost+found", "j-1/x/0", "j-1/1/y", "UPPER/1/1", "j-1/1/0/deep"]
    for name in odd[:-1]:
        (machine.path / "workers" / name).mkdir(parents=True)
    (machine.path / "workers" / "file").write_text("")
    machine.again()
    machine.sync(NOTHING, 1000)
    assert machine.workers.workers == {}
    assert all((machine.path / "workers" / name).is_dir() for name in odd[:-1])


def test_a_start_that_fails_is_tried_again_and_counts_as_ended_then(
    machine: Machine, wanted: MachineOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def full(*_: object, **__: object) -> None:
        tries.append(machine.now)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(workers_module.os, "makedirs", full)
    for _ in range(int(START_SECONDS) + 2):
        machine.sync(wanted, 1)
        assert not machine.workers.running
    assert len(tries) == pytest.approx(START_SECONDS / 5, abs=1)
    assert (machine.worker.state, machine.worker.exit_code) == ("exited", 126)
    assert "No space left" in machine.lines[-1]


def test_a_disk_that_is_full_for_a_moment_delays_a_start_only(
    machine: Machine, wanted: MachineOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(workers_module.os, "makedirs", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full")))
        machine.sync(wanted)
    machine.sync(wanted, 10)
    started = machine.worker.process
    assert started is not None
    machine.launchers.append(started)
    wait_until(lambda: machine.home().with_name("0.json").exists(), "the record of the launcher")


def test_ends_without_a_report_of_the_launcher_have_no_exit_code_after_an_adoption(machine: Machine) -> None:
    process = machine.launcher()
    process.kill()
    process.wait()
    machine.sync(None)
    assert machine.workers.as_report() == [
        {"job": "j-1", "attempt": 1, "worker": 0, "state": "exited", "exit_code": None, "devices": [0]}
    ]


def test_two_workers_of_an_attempt_share_its_folder_of_checkpoints_until_the_last_one_goes(machine: Machine) -> None:
    second = ("j-1", 1, 1)
    for key in (KEY, second):
        machine.launcher("true", key=key)
    for process in machine.launchers:
        process.wait()
    checkpoints = machine.path / "workers" / "j-1" / "1" / "checkpoints"
    checkpoints.mkdir()
    machine.sync(read_orders({"attempts": [{"job": "j-1", "attempt": 1, "worker": 1}]}))
    assert checkpoints.is_dir()
    machine.sync(NOTHING)
    assert not (machine.path / "workers" / "j-1").exists()
    machine.folder.empty_trash()
    assert not list((machine.path / "trash").iterdir())


def test_folders_that_a_job_has_made_read_only_are_removed(machine: Machine) -> None:
    machine.launcher("true").wait()
    deep = machine.home() / "work" / "deep"
    deep.mkdir(parents=True)
    (deep / "file").write_text("")
    deep.chmod(0o500)
    machine.sync(NOTHING)
    machine.folder.empty_trash()
    assert not list((machine.path / "trash").iterdir())


def leave_credentials(machine: Machine) -> Path:
    """Leave what a launcher has written and not removed, as one that was killed."""
    folder = machine.home() / "attempt-1" / "credentials"
    folder.mkdir(parents=True)
    (folder / "git-credentials").write_text("https://deploy:hunter2@git.example.org\n")
    return folder


def test_credentials_go_when_their_launcher_was_killed_and_not_before(machine: Machine, wanted: MachineOrders) -> None:
    process = machine.launcher()
    folder = leave_credentials(machine)
    machine.sync(wanted)
    machine.again()
    machine.sync(wanted)
    assert (folder / "git-credentials").exists()
    folder.chmod(0o500)
    process.kill()
    process.wait()
    machine.sync(None)
    assert machine.worker.state == "exited"
    assert not folder.exists()
    assert folder.parent.is_dir(), "what it wrote about itself is kept as long as it is ordered"


def test_an_agent_that_starts_removes_what_a_launcher_of_another_boot_has_left(machine: Machine) -> None:
    machine.launcher(boot="another-boot")
    folder = leave_credentials(machine)
    machine.again()
    machine.sync(None)
    assert not folder.exists()


@pytest.mark.parametrize("link", ["attempt-1", "attempt-1/credentials"])
def test_a_link_in_place_of_credentials_leads_to_no_other_folder(machine: Machine, tmp_path: Path, link: str) -> None:
    victim = tmp_path / "victim" / "credentials"
    victim.mkdir(parents=True)
    (victim / "file").write_text("as before")
    machine.launcher("true").wait()
    (machine.home() / link).parent.mkdir(exist_ok=True)
    (machine.home() / link).symlink_to(victim.parent if link == "attempt-1" else victim)
    machine.sync(None)
    assert machine.worker.state == "exited"
    assert (victim / "file").read_text() == "as before"


def test_a_process_that_does_not_die_is_told_and_holds_up_no_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test can make a process of state D: SIGKILL that does nothing stands for it."""
    machine.launcher()
    machine.launcher(key=("j-2", 1, 0)).kill()
    machine.launchers[1].wait()
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    machine.sync(NOTHING)
    machine.sync(NOTHING, UNWANTED_SECONDS)
    machine.sync(NOTHING, TERMINATE_SECONDS)
    machine.sync(NOTHING, STUCK_SECONDS)
    machine.sync(NOTHING, 5.0)
    told = [line for line in machine.lines if "does not end" in line]
    assert len(told) == 1
    assert f"job j-1, attempt 1, worker 0: killed, and does not end: process {machine.launchers[0].pid}" in told[0]
    assert list(machine.workers.workers) == [KEY]
    assert machine.workers.running
    assert machine.worker.as_report()["state"] != "exited"
    assert machine.workers.stuck_for() == STUCK_SECONDS + 5.0
    monkeypatch.undo()
    machine.sync(NOTHING)
    machine.launchers[0].wait(5)
    machine.sync(NOTHING)
    machine.sync(NOTHING)
    assert machine.workers.workers == {}


def test_what_does_not_die_is_no_reason_to_leave_others_that_may(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.launcher()
    machine.launcher(key=("j-2", 1, 0))
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    machine.workers._kill(machine.worker)
    machine.now += 100.0
    assert machine.workers.stuck_for() == 0.0


@pytest.mark.parametrize("reason", ["the service has stopped it", ""], ids=["stop", "SIGTERM"])
def test_a_machine_ends_without_what_does_not_die(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    """After a SIGTERM, launchers that run are waited for; here only a process of the job is left, its launcher died."""
    home = machine.home()
    launcher = machine.launcher("sleep" if reason else "true", "1000")
    if not reason:
        launcher.wait()
        env = {"PATH": os.environ["PATH"], "MAKEWAY_JOB_DIR": str(home)}
        machine.launchers.append(subprocess.Popen(["sleep", "1000"], env=env))
    words = ["--url", "http://127.0.0.1:1", "--machine", "m-1", "--token-file", str(tmp_path / "token"), "--gpus", "1"]
    seconds = itertools.count()
    with monkeypatch.context() as unkillable:
        unkillable.setattr(os, "kill", lambda pid, number: None)
        unkillable.setattr(time, "sleep", lambda seconds: None)
        options = read_options([*words, "--state", str(machine.path)])
        agent = MachineAgent(options, machine.folder, log=machine.lines.append, clock=lambda: float(next(seconds)))
        agent._end_reason = reason
        assert agent._end() == (0 if reason else 143)
    assert KILLED_SECONDS <= next(seconds) < 1000
    assert machine.launchers[-1].poll() is None
    assert [line for line in machine.lines if "killed, and does not end: process" in line]
    assert machine.lines[-1].startswith("ends without them")


@pytest.fixture
def hung_start(machine: Machine, wanted: MachineOrders) -> Iterator[subprocess.Popen[bytes]]:
    """Return a start that hangs before it is on record, as one of a disk that hangs: it waits for its lock."""
    home = machine.home()
    home.mkdir(parents=True)
    with home.with_name(f"{home.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        machine.sync(wanted)
        process = machine.worker.process
        assert process is not None
        machine.launchers.append(process)
        yield process
        process.kill()
        process.wait()


@pytest.mark.parametrize("reason", ["the service has stopped it", ""], ids=["stop", "SIGTERM"])
def test_a_machine_ends_without_a_start_that_does_not_die(
    machine: Machine, hung_start: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    if reason:  # after a SIGTERM, it is waited for launchers that run
        machine.workers.workers |= running_beside(machine)
    words = ["--url", "http://127.0.0.1:1", "--machine", "m-1", "--token-file", str(tmp_path / "token"), "--gpus", "1"]
    seconds = iter(range(1000))
    with monkeypatch.context() as unkillable:
        unkillable.setattr(os, "kill", lambda pid, number: None)
        unkillable.setattr(os, "killpg", lambda group, number: None)
        unkillable.setattr(time, "sleep", lambda seconds: None)
        options = read_options([*words, "--state", str(machine.path)])
        agent = MachineAgent(options, machine.folder, log=machine.lines.append, clock=lambda: float(next(seconds)))
        agent._workers.workers = machine.workers.workers
        agent._end_reason = reason
        assert agent._end() == (0 if reason else 143)
    assert next(seconds) >= KILLED_SECONDS
    assert hung_start.poll() is None
    told = [line for line in machine.lines if "killed, and does not end: process" in line]
    assert len(told) == (2 if reason else 1)
    assert f"process {hung_start.pid} in state" in "".join(told)
    assert machine.lines[-1].startswith("ends without them")


def running_beside(machine: Machine) -> dict[tuple[str, int, int], AgentWorker]:
    """Return one more worker, whose launcher runs."""
    home = machine.home(("j-2", 1, 0))
    home.mkdir(parents=True)
    process = subprocess.Popen(["sleep", "1000"], env={"PATH": os.environ["PATH"]})
    machine.launchers.append(process)
    own = {"pid": process.pid, "ticks": start_time(process.pid), "boot": boot_id()}
    home.with_name(f"{home.name}.json").write_text(json.dumps(own))
    return {("j-2", 1, 0): AgentWorker(("j-2", 1, 0), str(home), machine.now)}


def test_a_start_that_dies_of_the_kill_is_not_stuck(machine: Machine, hung_start: subprocess.Popen[bytes]) -> None:
    machine.workers.terminate()
    hung_start.wait(10)
    machine.now += 100.0
    machine.workers.sync(None)
    assert machine.worker.killed_at is None
    assert not machine.workers.running


def test_the_removal_of_a_container_has_its_time_after_what_did_not_die_for_long(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.launcher("true", container="makeway-j-1", runtime="podman").wait()
    env = {"PATH": os.environ["PATH"], "MAKEWAY_JOB_DIR": str(machine.home())}
    left = subprocess.Popen(["sleep", "1000"], env=env)
    machine.launchers.append(left)
    with monkeypatch.context() as unkillable:
        unkillable.setattr(os, "kill", lambda pid, number: None)
        machine.sync(None)
        machine.sync(None, KILLED_SECONDS)
    assert machine.workers.stuck_for() == KILLED_SECONDS
    left.kill()
    left.wait()
    removal = subprocess.Popen(["sleep", "1000"])
    machine.launchers.append(removal)
    monkeypatch.setattr(workers_module, "_process", lambda *_, **__: removal)
    machine.sync(None)
    assert machine.workers.running
    assert machine.workers.stuck_for() == 0.0
    removal.kill()
    removal.wait()
    machine.sync(None)
    assert machine.worker.state == "exited"


def test_a_machine_has_one_agent_whatever_its_folders_are(tmp_path: Path) -> None:
    places = (str(tmp_path),)
    held = lock_machine("m-1", "http://portal.test/a", places)
    assert held is not None
    with pytest.raises(MachineInUse, match=f"another agent is m-1 already.*end process {os.getpid()} first"):
        lock_machine("m-1", "http://portal.test/a", places)
    others = [lock_machine("m-2", "http://portal.test/a", places), lock_machine("m-1", "http://portal.test/b", places)]
    os.close(held)
    again = lock_machine("m-1", "http://portal.test/a", places)
    for descriptor in (*others, again):
        assert descriptor is not None
        os.close(descriptor)


def test_what_others_have_put_in_the_place_of_the_lock_keeps_no_agent_from_its_machine(tmp_path: Path) -> None:
    """Everybody may write to the folder of the locks."""
    victim = tmp_path / "victim"
    victim.write_text("as before")
    name = "makeway-agent-m-1-http_portal.test.lock"
    for folder in ("link", "hard link", "folder", "pipe", "foreign"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link" / name).symlink_to(victim)
    (tmp_path / "hard link" / name).hardlink_to(victim)
    (tmp_path / "folder" / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / name)
    places = [tmp_path / folder for folder in ("link", "hard link", "folder", "pipe", "none")]
    if os.geteuid() == 0:
        (tmp_path / "foreign" / name).write_text("as before")
        os.chown(tmp_path / "foreign" / name, 12345, 12345)
        places.append(tmp_path / "foreign")
    assert lock_machine("m-1", "http://portal.test", tuple(map(str, places))) is None
    assert victim.read_text() == "as before"
    held = lock_machine("m-1", "http://portal.test", (*map(str, places), str(tmp_path)))
    assert held is not None
    os.close(held)


def test_a_folder_serves_one_agent_at_a_time(machine: Machine) -> None:
    with pytest.raises(FolderInUse, match="another agent"):
        MachineFolder(str(machine.path), "m-1")
    machine.again()


def test_an_agent_knows_only_what_its_own_machine_and_boot_have_kept(machine: Machine, tmp_path: Path) -> None:
    machine.folder.keep({"token": "t-1", "orphan_after": 5})
    machine.again()
    assert machine.folder.joined == {"token": "t-1", "orphan_after": 5}
    machine.folder.close()
    other = MachineFolder(str(machine.path), "m-2")
    assert other.joined == {}
    other.close()
    kept = json.loads((machine.path / "machine.json").read_text())
    for damage in ({"boot": "before"}, {"joined": []}, {"joined": {"token": 5}}):
        (machine.path / "machine.json").write_text(json.dumps({**kept, **damage}))
        machine.folder = MachineFolder(str(machine.path), "m-1")
        assert machine.folder.joined == {}
        if damage != {"joined": {"token": 5}}:  # the fixture closes the last one
            machine.folder.close()


def test_what_a_full_disk_did_not_take_is_written_later(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from makeway.agent import machine_folder

    with monkeypatch.context() as patch:
        patch.setattr(machine_folder, "write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        machine.folder.keep({"token": "t-2"})
        assert machine.folder.joined == {"token": "t-2"}
        assert not machine.folder.write_again()
    assert machine.folder.write_again()
    machine.again()
    assert machine.folder.joined == {"token": "t-2"}


def test_a_record_is_running_only_with_pid_start_and_boot_alike() -> None:
    own = {"pid": os.getpid(), "ticks": start_time(os.getpid()), "boot": boot_id()}
    assert is_running(own)
    assert not any(is_running({**own, **other}) for other in ({"ticks": 1}, {"boot": ""}, {"pid": "1"}, {"pid": None}))
    assert not is_running({})
