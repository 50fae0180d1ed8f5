"""The agent of a machine, as a real process with real launchers, against a service that speaks its protocol."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
from agent.machine_service import JOIN_TOKEN, MACHINE, MachineService, problem
from agent.machines import TestMachine
from makeway.launcher.attempt import boot_id
from pods import wait_until

pytestmark = pytest.mark.slow

RUNNING = {("j-1", 1, 0): "running"}
EXITED = {("j-1", 1, 0): "exited"}


def running(machine: TestMachine, *names: str) -> None:
    """Wait until these jobs run, each by one launcher."""
    wait_until(lambda: len(machine.launchers()) == len(names or ("j-1",)), "the launchers")
    wait_until(
        lambda: (
            set(machine.service.states().values()) == {"running"}
            and len(machine.service.states()) == len(names or ("j-1",))
        ),
        "a report that the jobs run",
    )


@pytest.mark.covers("F65")
def test_a_machine_joins_runs_its_init_script_and_reports_what_it_has(
    machine: TestMachine, service: MachineService
) -> None:
    service.join_answer = {"init_script": "echo hello; echo error >&2; exit 3"}
    machine.start(gpus="4")
    machine.joined()
    (joined,) = service.joins
    assert (joined["machine"], joined["boot"], joined["gpus"]) == (MACHINE, boot_id(), 4)
    assert joined["cpu"] == len(os.sched_getaffinity(0)) * 1000
    assert joined["memory"] > 100
    assert joined["address"] == "127.0.0.1"
    assert (joined["model"], joined["virtual"]) == ("virtual GPU", True)
    report = service.newest()
    assert report["init"] == {"exit_code": 3, "output": "hello\nerror\n"}
    assert (report["boot"], report["gpus"], report["attempts"]) == (boot_id(), 4, [])
    assert report["spot_deadline"] is None


def test_a_worker_is_started_runs_and_reports_its_end(machine: TestMachine, service: MachineService) -> None:
    script = 'echo "$RANK $CUDA_VISIBLE_DEVICES $MAKEWAY_CHECKPOINT_DIR"; test -w "$MAKEWAY_CHECKPOINT_DIR" && exit 7'
    service.commands["j-1"] = ["sh", "-c", script]
    service.order(service.worker(devices=[1, 3]))
    machine.start()
    wait_until(lambda: service.states() == EXITED, "the end of the job")
    (attempt,) = service.newest()["attempts"]
    assert attempt == {"job": "j-1", "attempt": 1, "worker": 0, "state": "exited", "exit_code": 7, "devices": [1, 3]}
    assert service.claims == [("j-1/1/0", "Bearer token of j-1/1/0")]
    checkpoints = machine.state / "workers" / "j-1" / "1" / "checkpoints"
    assert f"0 1,3 {checkpoints}\n".encode() in service.logs["j-1/1/0"]
    service.order()
    wait_until(lambda: service.states() == {}, "that the worker is forgotten")
    wait_until(lambda: not list((machine.state / "workers").iterdir()), "that its folder is removed")
    wait_until(lambda: not list((machine.state / "trash").iterdir()), "that its files are removed")


def test_no_secret_of_the_machine_reaches_a_job_a_command_line_or_an_environment(
    machine: TestMachine, service: MachineService
) -> None:
    machine.env["SECRET_OF_THE_MACHINE"] = "hunter2"
    service.join_answer = {"init_script": "env; sleep 1000 >/dev/null 2>&1 &"}
    service.commands["j-1"] = ["sh", "-c", "env; exec sleep 1000"]
    service.order(service.worker())
    machine.start()
    running(machine)
    wait_until(lambda: b"MAKEWAY_JOB_ID" in service.logs.get("j-1/1/0", b""), "the environment in the log")
    secrets = ("hunter2", JOIN_TOKEN, "token-1", "token of j-1", "second token")
    shown = [service.logs["j-1/1/0"].decode(), service.newest()["init"]["output"], machine.log()]
    for pid in {machine.agents[0].pid, *machine.launchers(), *machine.processes(b"sleep")}:
        shown.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode())
        if pid != machine.agents[0].pid:
            shown.append(Path(f"/proc/{pid}/environ").read_bytes().decode())
    assert not [secret for secret in secrets if any(secret in text for text in shown)]
    for file in machine.state.rglob("*"):
        if file.is_file() and any(secret.encode() in file.read_bytes() for secret in secrets):
            assert file.name == "machine.json"
            assert file.stat().st_mode & 0o077 == 0


@pytest.mark.covers("F66")
def test_a_machine_without_gpus_hides_them_from_script_and_job(machine: TestMachine, service: MachineService) -> None:
    service.join_answer = {"init_script": "env", "cpu_only": True}
    service.commands["j-1"] = ["env"]
    service.order(service.worker(cpu_only=True, devices=[]))
    machine.start(gpus="0")
    wait_until(lambda: service.states() == EXITED, "the end of the job")
    for text in (service.newest()["init"]["output"], service.logs["j-1/1/0"].decode()):
        assert "CUDA_VISIBLE_DEVICES=none\n" in text
        assert "NVIDIA_VISIBLE_DEVICES=none\n" in text


def test_an_agent_that_is_killed_and_started_again_goes_on_with_the_job_which_starts_once(
    machine: TestMachine, service: MachineService
) -> None:
    service.order(service.worker(), service.worker("j-2"))
    machine.start()
    running(machine, "j-1", "j-2")
    before = sorted(machine.launchers())
    for _ in range(3):
        machine.kill()
        reports = len(service.reports)
        machine.start()
        wait_until(lambda known=reports: len(service.reports) > known + 1, "reports of the new agent")
        assert set(service.states().values()) == {"running"}
    assert sorted(machine.launchers()) == before
    assert len(service.claims) == 2
    assert len(service.joins) == 1
    os.kill(before[0], signal.SIGTERM)
    wait_until(lambda: sorted(service.states().values()) == ["exited", "running"], "the end of an adopted job")
    assert {one["exit_code"] for one in service.newest()["attempts"] if one["state"] == "exited"} == {-15}


def test_a_job_that_ends_while_no_agent_runs_is_reported_with_its_exit_code(
    machine: TestMachine, service: MachineService
) -> None:
    go_on = machine.folder / "go-on"
    service.commands["j-1"] = ["sh", "-c", f"while ! test -e {go_on}; do sleep 0.05; done; exit 9"]
    service.order(service.worker())
    machine.start()
    running(machine)
    machine.kill()
    go_on.touch()
    wait_until(lambda: not machine.launchers(), "the end of the job")
    machine.start()
    wait_until(lambda: service.states() == EXITED, "the report")
    assert service.newest()["attempts"][0]["exit_code"] == 9
    assert len(service.claims) == 1


def test_an_agent_killed_at_any_moment_of_a_start_leaves_one_launcher(
    machine: TestMachine, service: MachineService
) -> None:
    machine.start()
    machine.joined()
    for number in range(25):
        service.order(service.worker(attempt=number + 1))
        time.sleep(number * 0.012)  # the moment of the kill, not a wait for something
        machine.kill()
        machine.start()
        key = ("j-1", number + 1, 0)
        wait_until(lambda key=key: service.states().get(key) == "running", "the start")
        assert [path for path, _ in service.claims].count(f"j-1/{number + 1}/0") == 1
        for pid in machine.launchers():
            os.kill(pid, signal.SIGKILL)


def test_a_launcher_that_is_killed_takes_all_that_it_started_with_it_before_it_counts_as_ended(
    machine: TestMachine, service: MachineService
) -> None:
    service.commands["j-1"] = ["sh", "-c", "setsid sleep 1001 & setsid sleep 1002 & sleep 1003"]
    service.order(service.worker())
    machine.start()
    running(machine)
    wait_until(lambda: len(machine.processes(b"sleep\x00100")) == 3, "what the job starts")
    os.kill(machine.launchers()[0], signal.SIGKILL)
    wait_until(lambda: service.states() == EXITED, "the end of the job")
    assert not machine.processes(b"sleep\x00100")
    assert len(service.claims) == 1


@pytest.mark.covers("F77")
@pytest.mark.parametrize("agent", ["goes on", "was killed, too"])
def test_a_launcher_that_is_killed_leaves_no_credentials_on_its_machine(
    machine: TestMachine, service: MachineService, agent: str
) -> None:
    service.credentials = {"storage": "hunter2"}
    service.commands["j-1"] = ["sh", "-c", 'cat "$MAKEWAY_CREDENTIALS/storage"; exec sleep 1000']
    service.order(service.worker())
    machine.start()
    running(machine)
    wait_until(lambda: b"hunter2" in service.logs.get("j-1/1/0", b""), "that the job reads its credential")
    [written] = machine.state.rglob("storage")
    if agent != "goes on":
        machine.kill()
    for pid in [*machine.launchers(), *machine.processes(b"sleep")]:
        os.kill(pid, signal.SIGKILL)
    if agent != "goes on":
        assert written.read_text() == "hunter2"
        machine.start()
    wait_until(lambda: service.states() == EXITED, "the end of the job")
    assert not written.parent.exists()


def test_the_answer_to_a_join_may_be_lost(machine: TestMachine, service: MachineService) -> None:
    service.lost["join"] = 2
    machine.start()
    machine.joined()
    assert len(service.joins) == 3
    assert len({facts["boot"] for facts in service.joins}) == 1


def test_a_machine_that_joins_while_the_service_is_silent_joins_later(
    machine: TestMachine, service: MachineService
) -> None:
    service.replies["join"] = [(502, "a proxy"), (503, {"code": "starting", "detail": "not yet"})]
    machine.start()
    machine.joined()
    assert len(service.joins) == 1


@pytest.mark.parametrize(("status", "code"), [(409, "joined"), (410, "machine_over")])
def test_a_machine_that_another_boot_has_joined_or_that_is_over_is_not_needed(
    machine: TestMachine, service: MachineService, status: int, code: str
) -> None:
    service.replies["join"] = [problem(status, code)]
    assert machine.start().wait(20) == 0
    assert code in machine.log()
    assert not service.joins


@pytest.mark.parametrize("where", ["report", "orders"])
def test_a_machine_that_is_over_ends_its_jobs_and_is_not_needed(
    machine: TestMachine, service: MachineService, where: str
) -> None:
    service.order(service.worker())
    agent = machine.start()
    running(machine)
    service.replies[where] = [problem(410, "machine_over")]
    service.order(service.worker(), service.worker("j-2"))
    assert agent.wait(30) == 0
    assert not machine.launchers()
    assert not machine.processes(b"sleep")


def test_a_proxy_that_answers_410_ends_no_machine(machine: TestMachine, service: MachineService) -> None:
    service.order(service.worker())
    agent = machine.start()
    running(machine)
    service.replies["report"] = [(410, "a proxy"), (404, "a proxy"), (401, "a proxy")]
    reports = len(service.reports)
    wait_until(lambda: len(service.reports) > reports + 2, "further reports")
    assert agent.poll() is None
    assert service.states() == RUNNING


def test_an_order_to_stop_ends_the_jobs_and_the_agent(machine: TestMachine, service: MachineService) -> None:
    service.order(service.worker())
    agent = machine.start()
    running(machine)
    service.order(service.worker(), stop=True)
    assert agent.wait(30) == 0
    assert not machine.launchers()


def test_a_machine_that_stops_has_its_jobs_save_and_reports_their_ends(
    machine: TestMachine, service: MachineService
) -> None:
    saved = machine.folder / "saved"
    service.commands["j-1"] = ["sh", "-c", f"trap 'touch {saved}; exit 75' TERM; while :; do sleep 0.05; done"]
    service.order(service.worker())
    agent = machine.start()
    running(machine)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(30) == 143
    assert saved.exists()
    assert service.states() == EXITED
    assert service.newest()["attempts"][0]["exit_code"] == 75


def test_a_new_token_is_kept_for_the_next_agent(machine: TestMachine, service: MachineService) -> None:
    machine.start()
    machine.joined()
    service.next_token = "token-of-later"
    wait_until(lambda: service.token == "token-of-later", "the new token")
    reports = len(service.reports)
    wait_until(lambda: len(service.reports) > reports + 1, "reports with the new token")
    machine.kill()
    machine.start()
    reports = len(service.reports)
    wait_until(lambda: len(service.reports) > reports + 1, "reports of the next agent")
    assert len(service.joins) == 1


def test_a_second_agent_with_a_folder_of_its_own_does_not_join(machine: TestMachine, service: MachineService) -> None:
    """Both would get the same orders, and start the same workers."""
    machine.start()
    machine.joined()
    second = machine.start("--state", str(machine.folder / "other"))
    assert second.wait(20) == 3
    assert (
        f"another agent is m-1 already, with a folder of its own: end process {machine.agents[0].pid}" in machine.log()
    )
    assert len(service.joins) == 1
    assert machine.agents[0].poll() is None
    machine.agents[0].kill()
    machine.agents[0].wait(10)
    machine.start("--state", str(machine.folder / "other"))
    wait_until(lambda: len(service.joins) == 2, "the next agent")


def test_an_agent_that_gets_no_lock_says_so_and_is_the_machine(machine: TestMachine) -> None:
    machine.env["LOCAL_MACHINE_FOLDER"] = str(machine.folder / "none")
    machine.start()
    machine.joined()
    assert f"no lock can be had in {machine.folder / 'none'}: a second agent of this machine" in machine.log()


@pytest.mark.parametrize(
    ("seconds", "least", "most"),
    [(0, 0, 1), (-5, 0, 1), (1e-9, 5, 12), (1e9, 0, 1), (1e12, 0, 1), (math.nan, 0, 1), ("soon", 0, 1)],
    ids=str,
)
def test_the_service_is_not_flooded_and_the_machine_not_silent_whatever_it_asks_for(
    machine: TestMachine, service: MachineService, seconds: object, least: int, most: int
) -> None:
    """Reports are due every 10 s where it says nothing sensible; each change is reported at once."""
    service.report_seconds = seconds
    service.join_answer = {"report_seconds": seconds}
    machine.start()
    machine.joined()
    time.sleep(1.0)
    before = len(service.reports)
    time.sleep(2.0)
    assert least <= len(service.reports) - before <= most
    service.order(service.worker())
    wait_until(lambda: service.states() == {("j-1", 1, 0): "running"}, "a report of the change")


def test_a_second_agent_refuses_a_folder_that_is_in_use(machine: TestMachine, service: MachineService) -> None:
    machine.start()
    machine.joined()
    second = machine.start()
    assert second.wait(20) == 3
    assert "another agent" in machine.log()
    assert machine.agents[0].poll() is None


def test_a_token_that_cannot_be_read_is_read_again(machine: TestMachine, service: MachineService) -> None:
    machine.token_file.unlink()
    machine.start()
    wait_until(lambda: "has not joined" in machine.log(), "the complaint")
    machine.token_file.write_text("")
    wait_until(lambda: "has no token" in machine.log(), "the complaint about an empty file")
    machine.token_file.write_text(JOIN_TOKEN)
    machine.joined()


def test_a_machine_that_cannot_join_ends_after_a_while(machine: TestMachine) -> None:
    machine.token_file.write_text("another token")
    assert machine.start("--orphan-after", "0.5").wait(20) == 0
    assert not machine.service.joins


def test_a_machine_without_a_service_and_without_jobs_is_an_orphan(
    machine: TestMachine, service: MachineService
) -> None:
    service.join_answer = {"orphan_after": 0.5}
    agent = machine.start()
    machine.joined()
    service.silent.set()
    assert agent.wait(30) == 0
    assert "nothing runs" in machine.log()


def test_a_machine_with_a_job_is_no_orphan_and_goes_on_when_the_service_is_back(
    machine: TestMachine, service: MachineService
) -> None:
    service.join_answer = {"orphan_after": 0.3}
    service.order(service.worker())
    agent = machine.start()
    running(machine)
    launchers = machine.launchers()
    service.silent.set()
    silent_since = time.monotonic()
    wait_until(lambda: time.monotonic() > silent_since + 1.5, "that the silence is longer than orphan_after")
    assert agent.poll() is None
    assert machine.launchers() == launchers
    service.silent.clear()
    reports = len(service.reports)
    wait_until(lambda: len(service.reports) > reports, "a report after the silence")
    assert service.states() == RUNNING
    assert len(service.claims) == 1


def test_a_launcher_that_cannot_report_the_end_of_its_job_keeps_no_machine_alive(
    machine: TestMachine, service: MachineService
) -> None:
    """It would try for a quarter of an hour."""
    service.join_answer = {"orphan_after": 0.5}
    service.commands["j-1"] = ["sleep", "1"]
    service.order(service.worker())
    agent = machine.start()
    running(machine)
    service.silent.set()
    assert agent.wait(60) == 0
    assert "nothing runs" in machine.log()
    assert not machine.launchers()


def test_a_service_that_is_silent_for_ten_seconds_loses_nothing(machine: TestMachine, service: MachineService) -> None:
    service.order(service.worker())
    agent = machine.start()
    running(machine)
    launchers = machine.launchers()
    service.silent.set()
    silent_since = time.monotonic()
    wait_until(lambda: time.monotonic() > silent_since + 10, "ten seconds of silence")
    service.order(service.worker(), service.worker("j-2"))
    service.silent.clear()
    running(machine, "j-1", "j-2")
    assert agent.poll() is None
    assert set(launchers) < set(machine.launchers())
    assert len(service.claims) == 2


def test_an_order_for_an_image_is_reported_as_one_that_cannot_start(
    machine: TestMachine, service: MachineService
) -> None:
    service.order(service.worker(image="registry.example/pytorch"))
    machine.start()
    wait_until(lambda: service.states() == EXITED, "the refusal")
    assert service.newest()["attempts"][0]["exit_code"] == 126
    assert not service.claims


def test_a_spot_notice_is_reported_with_its_deadline(machine: TestMachine, service: MachineService) -> None:
    notice = machine.folder / "spot-notice.json"
    machine.start("--spot", f"file:{notice}")
    machine.joined()
    notice.write_text(json.dumps({"deadline": 1767268830.5}))
    wait_until(lambda: service.newest()["spot_deadline"] == 1767268830.5, "the deadline")


def test_wrong_options_are_told_with_what_is_expected(machine: TestMachine) -> None:
    for words, complaint in (
        (("--gpus", "many"), "--gpus 'many' is no number of GPUs"),
        (("--spot", "azure"), "--spot 'azure' is neither"),
        (("--wrong",), "there is no option --wrong"),
        (("--state",), "--state needs a value"),
        (("--url", "ftp://x"), "is no address"),
        (("--machine", "../m"), "is no id"),
        (("--orphan-after", "soon"), "is no number of seconds"),
    ):
        assert machine.start(*words).wait(20) == 2
        assert complaint in machine.log()
