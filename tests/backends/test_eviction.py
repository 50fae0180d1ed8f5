"""Making way with real processes: notice, save, leave, go on; and what happens to those who do not."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from makeway_quota.backends.base import AttemptStatus, Phase
from workshop import Workshop

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "train.py"
STEPS = 2000
COUNTED = """
import train

step = train.Training.step

def counted(self):
    step(self)
    with open("../steps", "a") as file:
        file.write(".")

train.Training.step = counted
train.main()
"""


async def train(shop: Workshop, workload: str, attempt: int, *options: str) -> None:
    """Start (or go on with) the training of the documentation."""
    files = {"train.py": EXAMPLE.read_text(), "counted.py": COUNTED}
    command = (sys.executable, "counted.py", "--steps", str(STEPS), "--every", "5000", *options)
    await shop.run(workload, *command, attempt=attempt, files=files, grace=10.0)


def weights(text: str) -> str:
    return re.findall(r"^weights ([0-9a-f]+)$", text, re.MULTILINE)[0]


@pytest.mark.covers("N11")
@pytest.mark.no_repeat
async def test_twenty_preemptions_change_nothing(shop: Workshop) -> None:
    await train(shop, "calm", 1, "--seconds", "0")
    assert (await shop.over("calm")).exit_code == 0
    steps = [0]
    for attempt in range(1, 21):
        await train(shop, "j-1", attempt, "--seconds", "0.02")
        await shop.running("j-1", attempt, says="going on" if attempt > 1 else "starting")
        await asyncio.sleep(0.03 + 0.007 * (attempt % 5))  # at another point of a step each time
        await shop.ask("j-1", attempt, grace=60.0)  # never too little on a busy machine
        seen = await shop.over("j-1", attempt)
        assert (seen.exit_code, seen.acknowledged, seen.notice_received, seen.killed) == (75, True, True, False)
        assert seen.step is not None
        assert seen.step >= steps[-1], "it went on from where it was"
        assert seen.message == f"saved at step {seen.step}"
        if attempt > 1:
            assert f"going on at step {steps[-1]} of {STEPS}" in shop.log("j-1", attempt)
        steps.append(seen.step)
        await shop.backend.forget("j-1", attempt)
    assert steps[-1] < STEPS
    await train(shop, "j-1", 21, "--seconds", "0")
    last = await shop.over("j-1", 21)
    assert (last.exit_code, last.completed, last.step) == (0, True, STEPS)
    lost = len(shop.path("j-1", "steps").read_text()) - STEPS
    assert lost <= 20, "at most one step each time"
    assert weights(shop.log("j-1", 21)) == weights(shop.log("calm"))
    folders = sorted(path.name for path in shop.path("j-1", "checkpoints").glob("step-*"))
    assert folders == [f"step-{steps[-1]:06d}", f"step-{STEPS:06d}"]


@pytest.mark.covers("F18", "N11")
async def test_the_notice_says_why_and_until_when(shop: Workshop) -> None:
    code = """
import sys, time
from makeway import checkpoint
checkpoint.on_preempt(lambda notice: print("callback", notice.by_team, round(notice.seconds_left)))
print("up")
while not checkpoint.requested():
    time.sleep(0.01)
notice = checkpoint.notice()
print(notice.reason, notice.by_owner, notice.by_workload, notice.preempt_test)
checkpoint.stop()
"""
    await shop.python("j-1", code)
    await shop.running("j-1", says="up")
    await shop.ask("j-1", grace=20.0, kind="preempt_test")
    seen = await shop.over("j-1")
    assert (seen.exit_code, seen.acknowledged) == (75, True)
    message = shop.log("j-1").splitlines()
    assert "devops wants its GPU back bo s-1 True" in message
    [told] = (line for line in message if line.startswith("callback devops "))
    assert 0 < int(told.split()[-1]) <= 20
    pattern = r"makeway: notice: devops wants its GPU back; it has (.+) s to save and end"
    [remaining] = (result[1] for line in message if (result := re.fullmatch(pattern, line)))
    assert 0 < float(remaining) <= 20


@pytest.mark.covers("N11")
async def test_a_job_that_ignores_the_notice_is_killed_with_all_its_children(shop: Workshop) -> None:
    script = "trap '' TERM; sleep 91 & setsid sleep 92 & (setsid sh -c 'trap : TERM; sleep 93' &); echo up; sleep 94"
    await shop.run("j-1", "sh", "-c", script)
    await shop.running("j-1", says="up")
    notice = await shop.ask("j-1", grace=0.5)
    stopping = await shop.seen("j-1")
    assert stopping is not None
    assert (stopping.phase, stopping.notice_received) == (Phase.STOPPING, True)
    seen = await shop.over("j-1")
    assert (seen.killed, seen.acknowledged, seen.exit_code) == (True, False, -9)
    assert seen.message == "did not end within 0.5 s and was killed; no checkpoint"
    assert seen.ended_at is not None
    assert 0 <= seen.ended_at - notice.deadline < 30.0
    assert shop.processes("j-1") == []


async def test_a_repeated_notice_changes_nothing_and_an_earlier_one_counts(shop: Workshop) -> None:
    code = """
import signal, time
signal.signal(signal.SIGTERM, lambda *a: print("signal", flush=True))
print("up", flush=True)
while True:
    time.sleep(1)
"""
    await shop.python("j-1", code)
    await shop.running("j-1", says="up")
    notice = await shop.ask("j-1", grace=30.0)
    await shop.until("j-1", lambda seen: "signal" in shop.log("j-1"))
    for _ in range(3):
        await shop.backend.notice("j-1", 1, notice)
    await shop.ask("j-1", grace=60.0)
    assert shop.read("j-1", "stop.json")["deadline"] == notice.deadline
    await shop.ask("j-1", grace=0.3)
    seen = await shop.over("j-1")
    assert seen.killed
    assert shop.log("j-1").count("signal\n") == 1


async def test_what_a_job_has_saved_for_its_notice_counts_after_one_that_ends_earlier(shop: Workshop) -> None:
    code = """
import json, os, signal, time
signal.signal(signal.SIGTERM, lambda *a: None)
print("up", flush=True)
def deadline():
    try:
        return json.load(open(os.environ["MAKEWAY_STOP_FILE"]))["deadline"]
    except FileNotFoundError:
        return None
while (first := deadline()) is None:
    time.sleep(0.01)
with open(os.environ["MAKEWAY_PROGRESS_FILE"], "w") as file:
    json.dump({"step": 3, "saved_at": time.time(), "acknowledged_at": time.time()}, file)
print("saved", flush=True)
while deadline() == first:
    time.sleep(0.01)
"""
    await shop.python("j-1", code)
    await shop.running("j-1", says="up")
    await shop.ask("j-1", grace=60.0)
    await shop.until("j-1", lambda seen: "saved" in shop.log("j-1"))
    await asyncio.sleep(1.2)
    await shop.ask("j-1", grace=20.0)
    seen = await shop.over("j-1")
    assert (seen.acknowledged, seen.killed, seen.step) == (True, False, 3)


async def test_a_notice_right_after_the_start_is_not_lost(shop: Workshop) -> None:
    await shop.run("j-1", "sleep", "60")
    await shop.ask("j-1")
    seen = await shop.over("j-1")
    assert (seen.exit_code, seen.notice_received, seen.acknowledged) == (-15, True, False)


async def test_a_kill_right_after_the_start_is_not_lost(shop: Workshop) -> None:
    await shop.run("j-1", "sleep", "60")
    await shop.backend.kill("j-1", 1)
    assert (await shop.over("j-1")).killed
    assert shop.processes("j-1") == []


WRAPPED = """
import sys, time
from makeway import checkpoint
print("up", flush=True)
while not checkpoint.requested():
    time.sleep(0.01)
time.sleep(0.3)
with checkpoint.saving(3) as folder:
    (folder / "x").write_text("x")
checkpoint.stop()
"""


@pytest.mark.parametrize("script", ["python train.py", "python train.py; echo x", "python train.py | cat"])
async def test_a_shell_in_between_does_not_cut_the_save_short(shop: Workshop, script: str) -> None:
    await shop.run("j-1", "sh", "-c", script, files={"train.py": WRAPPED})
    await shop.running("j-1", says="up")
    await shop.ask("j-1")
    seen = await shop.over("j-1")
    assert (seen.acknowledged, seen.killed, seen.step, seen.message) == (True, False, 3, "saved at step 3")


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGTERM"])
async def test_the_profile_chooses_the_signal(shop: Workshop, name: str) -> None:
    await shop.run("j-1", sys.executable, "train.py", files={"train.py": WRAPPED}, signal=name)
    await shop.running("j-1", says="up")
    await shop.ask("j-1")
    assert (await shop.over("j-1")).acknowledged


@pytest.mark.covers("N11")
@pytest.mark.parametrize("crash", ["raise RuntimeError('disk on fire')", "os._exit(9)", "os.kill(os.getpid(), 9)"])
async def test_a_crash_while_saving_keeps_the_checkpoint_before(shop: Workshop, crash: str) -> None:
    code = f"""
import os, time
from makeway import checkpoint
print("found", checkpoint.latest() and (checkpoint.latest() / "w").read_text(), flush=True)
if os.environ["MAKEWAY_ATTEMPT"] == "2":
    raise SystemExit
with checkpoint.saving(5) as folder:
    (folder / "w").write_text("whole")
while not checkpoint.requested():
    time.sleep(0.01)
with checkpoint.saving(6) as folder:
    (folder / "w").write_text("ha")
    {crash}
"""
    await shop.python("j-1", code)
    await shop.until("j-1", lambda seen: seen.step == 5)
    await shop.ask("j-1")
    seen = await shop.over("j-1")
    assert (seen.step, seen.acknowledged) == (5, False)
    assert seen.exit_code in (1, 9, -9)
    await shop.python("j-1", code, attempt=2)
    again = await shop.over("j-1", 2)
    assert "found whole" in shop.log("j-1", 2)
    assert (again.step, again.checkpoint_at) == (5, seen.checkpoint_at)


async def test_a_job_that_finishes_during_its_notice_is_finished(shop: Workshop) -> None:
    code = """
import time
from makeway import checkpoint
for step in checkpoint.loop(3, save=lambda folder: None):
    print("up", flush=True)
    while not checkpoint.requested() and step == 2:
        time.sleep(0.01)
"""
    await shop.python("j-1", code)
    await shop.running("j-1", says="up\nup\nup")
    await shop.ask("j-1")
    seen = await shop.over("j-1")
    assert (seen.exit_code, seen.completed, seen.acknowledged) == (0, True, False)


async def test_progress_is_seen_while_it_runs(shop: Workshop) -> None:
    code = "import time; from makeway import checkpoint\nfor n in range(99):\n checkpoint.saved(n); time.sleep(0.05)"
    await shop.python("j-1", code)

    def moved(seen: AttemptStatus) -> bool:
        return (seen.step or 0) >= 5 and seen.checkpoint_at is not None

    assert (await shop.until("j-1", moved)).phase is Phase.RUNNING


async def test_a_checkpoint_folder_that_cannot_be_written_is_an_error_of_the_job_alone(shop: Workshop) -> None:
    code = """
import os
from makeway import checkpoint
os.rmdir(checkpoint.dir)
open(checkpoint.dir, "w")
with checkpoint.saving(1):
    pass
"""
    await shop.python("j-1", code)
    seen = await shop.over("j-1")
    assert seen.exit_code == 1
    assert "FileExistsError" in seen.message
