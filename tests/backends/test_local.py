"""Jobs on this machine: started once, told what they need, ended with everything they began."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from makeway_quota.backends.base import BackendError, Phase
from makeway_quota.backends.local.backend import LocalBackend
from workshop import Workshop, alive

ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


async def test_a_job_runs_and_reports_its_end(shop: Workshop) -> None:
    await shop.run("j-1", "sh", "-c", "echo hello; echo trouble >&2; exit 3")
    seen = await shop.over("j-1")
    assert (seen.phase, seen.exit_code, seen.message) == (Phase.EXITED, 3, "exit code 3: trouble")
    assert seen.started_at is not None
    assert seen.ended_at is not None
    assert seen.ended_at >= seen.started_at
    assert await shop.backend.log("j-1", 1, 0, 100) == (b"hello\ntrouble\n", 14)
    assert await shop.backend.log("j-1", 1, 6, 3) == (b"tro", 14)
    assert await shop.backend.result("j-1", 1) is None
    await shop.backend.forget("j-1", 1)
    assert await shop.seen("j-1") is None
    assert (await shop.backend.log("j-1", 1, 0, 5))[0] == b"hello"


async def test_a_job_finds_its_environment(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "the service's own secret")
    mine = {"QUOTES": 'it\'s "quoted" $HOME `id` \\', "MAKEWAY_TEAM": "another", "CUDA_VISIBLE_DEVICES": "7"}
    await shop.python("j-1", ENVIRONMENT, name="a 'name' with \"quotes\" & <b>", env=mine, gpus=2)
    assert (await shop.over("j-1")).exit_code == 0
    env = json.loads(shop.log("j-1"))
    job = str(shop.path("j-1").resolve())
    assert "JUPYTERHUB_API_TOKEN" not in env
    assert env["QUOTES"] == mine["QUOTES"]
    wanted = {
        "MAKEWAY_JOB_ID": "j-1",
        "MAKEWAY_JOB_NAME": "a 'name' with \"quotes\" & <b>",
        "MAKEWAY_ATTEMPT": "1",
        "MAKEWAY_TEAM": "rnd",
        "MAKEWAY_PROFILE": "1gpu",
        "MAKEWAY_GPUS": "2",
        "MAKEWAY_JOB_DIR": job,
        "MAKEWAY_CHECKPOINT_DIR": f"{job}/checkpoints",
        "MAKEWAY_STOP_FILE": f"{job}/attempt-1/stop.json",
        "MAKEWAY_PROGRESS_FILE": f"{job}/attempt-1/progress.json",
        "MAKEWAY_RESULT_FILE": f"{job}/attempt-1/result.pkl",
        "MAKEWAY_ERROR_FILE": f"{job}/attempt-1/error.json",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "MAKEWAY_VIRTUAL_GPUS": "1",
        "PWD": env.get("PWD"),
    }
    assert {name: env.get(name) for name in wanted} == wanted
    assert Path(env["PATH"].split(":")[0]) == Path(sys.executable).parent
    assert "RANK" not in env


async def test_a_job_without_gpus_sees_none(shop: Workshop) -> None:
    await shop.python("j-1", ENVIRONMENT, gpus=0)
    await shop.over("j-1")
    env = json.loads(shop.log("j-1"))
    assert (env["CUDA_VISIBLE_DEVICES"], env["MAKEWAY_GPUS"]) == ("", "0")


async def test_a_gang_knows_its_ranks(shop: Workshop) -> None:
    code = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')))"
    await shop.python("j-1", code, workers=3)
    assert (await shop.over("j-1")).exit_code == 0
    message = sorted(shop.log("j-1").splitlines())
    assert [line.split()[:4] for line in message] == [[f"[{rank}]", str(rank), "3", "127.0.0.1"] for rank in range(3)]
    assert len({line.split()[4] for line in message}) == 1


async def test_one_failed_worker_ends_the_gang(shop: Workshop) -> None:
    code = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no'); time.sleep(60)"
    await shop.python("j-1", code, workers=3)
    seen = await shop.over("j-1")
    assert (seen.exit_code, seen.message) == (1, "exit code 1: rank 1: no")


async def test_files_are_laid_out_below_the_working_directory(shop: Workshop) -> None:
    await shop.run("j-1", "cat", "a b.txt", "sub/c.txt", files={"a b.txt": "one\n", "sub/c.txt": "two\n"})
    assert (await shop.over("j-1")).exit_code == 0
    assert shop.log("j-1") == "one\ntwo\n"
    assert b"one\n" not in (shop.root / "spool" / "j-1@1").read_bytes(), "they are kept once"
    assert shop.path("j-1").stat().st_mode & 0o777 == 0o700


async def test_a_later_attempt_finds_what_the_first_one_wrote(shop: Workshop) -> None:
    files = {"state.txt": "0"}
    script = (
        "import pathlib; f = pathlib.Path('state.txt'); f.write_text(str(int(f.read_text()) + 1)); print(f.read_text())"
    )
    for attempt in (1, 2):
        await shop.python("j-1", script, attempt=attempt, files=files)
        await shop.over("j-1", attempt)
        assert shop.log("j-1", attempt) == f"{attempt}\n"


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "a//b", "a/./b", "x\0y", "n" * 300])
async def test_files_cannot_leave_the_working_directory(shop: Workshop, path: str) -> None:
    with pytest.raises(BackendError, match=r"file (path|name)"):
        await shop.run("j-1", "true", files={path: "x"})
    assert await shop.seen("j-1") is None


@pytest.mark.parametrize("workload", ["../j", "", "a/b", ".", ".."])
async def test_job_ids_cannot_leave_the_state_directory(shop: Workshop, workload: str) -> None:
    with pytest.raises(BackendError, match="not a valid job id"):
        await shop.run(workload, "true")


async def test_an_unknown_node_and_an_empty_command_are_refused(shop: Workshop) -> None:
    with pytest.raises(BackendError, match="no node 'nowhere' here; the nodes are virtual-1, virtual-2"):
        await shop.run("j-1", "true", node="nowhere")
    with pytest.raises(BackendError, match="no command"):
        await shop.run("j-1")


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["no-such-program", "x"], 127, "could not start: no such file or program 'no-such-program'"),
        (["./here.sh"], 126, "could not start: not allowed to run or open './here.sh'"),
        (["/"], 126, "could not start: not allowed to run or open '/'"),
    ],
)
async def test_a_command_that_cannot_start_is_named(
    shop: Workshop, command: list[str], code: int, message: str
) -> None:
    await shop.run("j-1", *command, files={"here.sh": "echo"})
    seen = await shop.over("j-1")
    assert (seen.exit_code, seen.message) == (code, message)
    assert message in shop.log("j-1")


async def test_a_launcher_that_cannot_run_is_reported(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, launcher_python="/no/such/python")
    await shop.backend.open()
    await shop.run("j-1", "true")
    seen = await shop.over("j-1")
    assert seen.exit_code == 127
    assert "could not start" in seen.message
    assert "/no/such/python" in seen.message
    await shop.backend.close(stop_jobs=True)


async def test_starting_twice_at_once_starts_once(shop: Workshop) -> None:
    others = [Workshop(shop.root) for _ in range(3)]
    for other in others:
        await other.backend.open()
    order = shop.order("j-1", "sh", "-c", "echo started; sleep 60")
    await asyncio.gather(*(item.backend.start(order) for item in [shop, *others] for _ in range(5)))
    for item in [shop, *others]:
        await item.running("j-1", says="started")
    assert shop.log("j-1") == "started\n"
    assert len([pid for pid in shop.processes("j-1") if pid == shop.launcher("j-1")]) == 1
    for other in others:
        await other.backend.close(stop_jobs=False)


async def test_an_attempt_that_ran_never_runs_again(shop: Workshop) -> None:
    order = shop.order("j-1", "sh", "-c", "echo once >> ../ran; exit 5")
    await shop.backend.start(order)
    first = await shop.over("j-1")
    await shop.backend.start(order)
    await shop.backend.forget("j-1", 1)
    await shop.backend.start(order)
    assert await shop.over("j-1") == first
    assert shop.path("j-1", "ran").read_text() == "once\n"


async def test_killing_ends_the_whole_tree_at_once(shop: Workshop) -> None:
    script = "trap '' TERM; (setsid sleep 61 & (setsid sh -c 'env -i setsid sleep 62' &)); echo up; sleep 63"
    await shop.run("j-1", "sh", "-c", script)
    await shop.running("j-1", says="up")
    await shop.backend.kill("j-1", 1)
    await shop.backend.kill("j-1", 1)
    seen = await shop.over("j-1")
    assert (seen.killed, seen.message) == (True, "stopped")
    assert shop.processes("j-1") == []
    assert not [pid for pid in sleepers("62") if alive(pid)]


def sleepers(seconds: str) -> list[int]:
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes().split(b"\0")[:2] == [b"sleep", seconds.encode()]:
                    result.append(int(entry.name))
            except OSError:
                continue
    return result


async def test_nothing_is_left_of_a_job_that_forks_away(shop: Workshop) -> None:
    await shop.run("j-1", "sh", "-c", "(setsid sleep 71 >/dev/null 2>&1 &) ; echo done")
    seen = await shop.over("j-1")
    assert seen.exit_code == 0
    assert shop.processes("j-1") == []
    assert not [pid for pid in sleepers("71") if alive(pid)]


async def test_orders_for_unknown_attempts_do_nothing(shop: Workshop) -> None:
    await shop.ask("unknown")
    await shop.backend.kill("unknown", 1)
    await shop.backend.forget("unknown", 1)
    await shop.backend.purge("unknown")
    assert await shop.backend.log("unknown", 1, 0, 10) == (b"", 0)
    assert await shop.backend.error("unknown", 1) is None
    assert (await shop.backend.observe()).attempts == ()


async def test_results_and_errors_are_kept_until_they_are_purged(shop: Workshop) -> None:
    code = """
import os
open(os.environ["MAKEWAY_RESULT_FILE"], "wb").write(b"42")
open(os.environ["MAKEWAY_ERROR_FILE"], "w").write("{}")
"""
    await shop.python("j-1", code)
    assert (await shop.over("j-1")).completed
    await shop.backend.forget("j-1", 1)
    assert await shop.backend.result("j-1", 1) == b"42"
    assert await shop.backend.error("j-1", 1) == b"{}"
    await shop.backend.purge("j-1")
    assert await shop.backend.result("j-1", 1) is None
    assert not shop.path("j-1").exists()


async def test_purging_stops_what_still_runs(shop: Workshop) -> None:
    await shop.run("j-1", "sleep", "60")
    await shop.running("j-1")
    launcher = shop.launcher("j-1")
    await shop.backend.purge("j-1")
    assert not alive(launcher)
    assert not shop.path("j-1").exists()


async def test_a_link_in_place_of_a_result_is_not_followed(shop: Workshop, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    code = f"""
import os
os.symlink({str(secret)!r}, os.environ["MAKEWAY_RESULT_FILE"])
os.mkfifo(os.environ["MAKEWAY_ERROR_FILE"])
"""
    await shop.python("j-1", code)
    await shop.over("j-1")
    assert await shop.backend.result("j-1", 1) is None
    assert await shop.backend.error("j-1", 1) is None


async def test_a_very_long_log_keeps_its_head_and_its_tail(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, log_limit=40_000)
    await shop.backend.open()
    await shop.python("j-1", "for n in range(20000): print(f'line {n:06d}')")
    assert (await shop.over("j-1")).exit_code == 0
    kept = sum(file.stat().st_size for file in shop.path("j-1", "attempt-1").glob("log*"))
    assert kept <= 40_000
    gap = await shop.backend.log_gap("j-1", 1)
    assert gap is not None
    head, length = await shop.backend.log("j-1", 1, 0, 1_000_000)
    assert head.startswith(b"line 000000\n")
    assert (len(head), length) == (gap[0], 240_000)
    assert await shop.backend.log("j-1", 1, gap[0] + 5, 100) == (b"", length)
    at, tail = gap[1], b""
    while at < length:
        piece, _ = await shop.backend.log("j-1", 1, at, 1000)
        tail, at = tail + piece, at + len(piece)
    assert tail.endswith(b"line 019999\n")
    assert len(tail) >= 10_000
    await shop.backend.close(stop_jobs=True)


async def test_a_time_limit_ends_the_job_with_a_notice(shop: Workshop) -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(75)); time.sleep(60)"
    await shop.python("j-1", code, time_limit=0.3)
    seen = await shop.over("j-1")
    assert (seen.timed_out, seen.acknowledged, seen.notice_received, seen.killed) == (True, False, False, False)
    assert seen.message == "time limit of 0.3 s reached"
    assert shop.read("j-1", "stop.json")["reason"] == "time limit of 0.3 s reached"


async def test_a_time_limit_is_kept_against_a_job_that_ignores_it(shop: Workshop) -> None:
    await shop.run("j-1", "sh", "-c", "trap '' TERM; sleep 60", time_limit=0.2, grace=0.3)
    seen = await shop.over("j-1")
    assert (seen.timed_out, seen.killed, seen.message) == (True, True, "time limit of 0.2 s reached; killed")


async def test_changes_wake_the_loop(shop: Workshop) -> None:
    await shop.run("j-1", "sleep", "60")
    await shop.running("j-1")
    shop.changed.clear()
    os.kill(shop.launcher("j-1"), signal.SIGKILL)
    await asyncio.wait_for(shop.changed.wait(), 30)
    assert (await shop.over("j-1")).phase is Phase.LOST


async def test_closing_with_the_jobs_lets_them_save(shop: Workshop) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(75)); print('up'); time.sleep(60)"
    )
    await shop.python("good", code)
    await shop.run("bad", "sh", "-c", "trap '' TERM; echo up; sleep 60", grace=0.3)
    for name in ("good", "bad"):
        await shop.running(name, says="up")
    await shop.backend.close(stop_jobs=True)
    seen = {attempt.workload: attempt for attempt in (await shop.backend.observe()).attempts}
    assert (seen["good"].acknowledged, seen["bad"].killed) == (True, True)
    assert shop.read("good", "stop.json")["reason"] == "Makeway is stopping"
    assert shop.processes("good") + shop.processes("bad") == []


def test_virtual_nodes_share_the_gpus(tmp_path: Path) -> None:
    from makeway_quota.backends.local.gpus import virtual_nodes

    nodes = virtual_nodes(10, 4, "lab")
    assert [(node.name, len(node.devices)) for node in nodes] == [
        ("virtual-1", 3),
        ("virtual-2", 3),
        ("virtual-3", 2),
        ("virtual-4", 2),
    ]
    assert all(node.virtual and node.pool == "lab" for node in nodes)
    assert LocalBackend(tmp_path, nodes=nodes).virtual


async def test_a_state_directory_that_cannot_be_written_is_named(shop: Workshop) -> None:
    (shop.root / "spool").rmdir()
    with pytest.raises(BackendError, match=r"could not be written to .*: .*No such file"):
        await shop.run("j-1", "true")


async def test_a_job_has_the_limit_of_open_files_that_the_service_was_started_with(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makeway_quota.backends.local.launch.soft_limit_of_jobs", lambda: 777)
    await shop.run("j-1", "sh", "-c", "ulimit -Sn")
    await shop.over("j-1")
    assert shop.log("j-1") == "777\n"
