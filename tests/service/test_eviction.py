"""Notice, save, terminate, requeue: through the API, with real training scripts that behave well and badly."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from makeway_api.models import Decision, FileIn, Job
from running import SAMPLE, Running, python, running

ROOT = Path(__file__).parents[2]
TRAIN = FileIn(path="train.py", data=base64.b64encode((ROOT / "docs" / "examples" / "train.py").read_bytes()).decode())
IMPATIENT = SAMPLE.read_text(encoding="utf-8").replace("grace: 30", "grace: 1")

DEAF = python(
    """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print("deaf", child.pid, flush=True)
time.sleep(600)
"""
)

CRASHES = """
import os
from makeway import checkpoint
print("goes on after", checkpoint.step_of(checkpoint.latest()) if checkpoint.latest() else "nothing", flush=True)
with checkpoint.saving(int(os.environ["MAKEWAY_ATTEMPT"]) * 10) as folder:
    (folder / "weights").write_text("w" * 1000)
    if os.environ["MAKEWAY_ATTEMPT"] == "2":
        os._exit(9)
if os.environ["MAKEWAY_ATTEMPT"] == "1":
    raise SystemExit(3)
print("done", (checkpoint.latest() / "weights").read_text() == "w" * 1000, flush=True)
"""


async def log_of(run: Running, job: Job, attempt: int | None = None) -> str:
    chunk = await run.client("root").logs(job.id, attempt=attempt, limit=1_000_000)
    text: str = chunk.text
    return text


async def told(run: Running, job: Job, verb: str) -> list[Decision]:
    return [d for d in await run.client("root").job_events(job.id) if d.verb == verb]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.covers("N10", "N11", "N12", "F18", "F35")
@pytest.mark.no_repeat
async def test_twenty_preemptions_change_nothing(tmp_path: Path) -> None:
    steps = ["--steps", "1200", "--every", "5000"]
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=0.2) as run:
        calm = await run.submit(
            "ana", "calm", ["python", "train.py", *steps, "--seconds", "0"], profile="gpu1", files=[TRAIN]
        )
        rough = await run.submit(
            "ana", "rough", ["python", "train.py", *steps, "--seconds", "0.02"], profile="gpu1", files=[TRAIN]
        )
        for attempt in range(1, 21):
            job = await run.job(rough.id, "running")
            assert job.attempt == attempt
            await run.until(lambda n=attempt: at_work(run, rough, n), f"attempt {attempt} trains")
            asked = await run.client("ana").preempt_test(rough.id)
            assert asked.notice.preempt_test
            await run.until(lambda n=attempt: left(run, rough, n), f"attempt {attempt} leaves")
        done = await run.job(rough.id, "succeeded", seconds=60)
        assert (done.preemptions, done.failures, len(done.attempts)) == (20, 0, 21)
        assert [a.outcome for a in done.attempts] == ["preempted"] * 20 + ["succeeded"]
        await run.job(calm.id, "succeeded", seconds=60)
        weights = [re.search(r"weights (\w+)", await log_of(run, job)) for job in (calm, rough)]
        assert weights[0][1] == weights[1][1], "bit-identical"
        steps_saved = [a.checkpoint.step for a in done.attempts[:-1]]
        for number, saved in enumerate(steps_saved, 2):
            assert f"going on at step {saved} of 1200" in await log_of(run, rough, number), "at most one step is lost"
        assert {d.numbers["lost_seconds"] for d in await told(run, rough, "requeue")} == {0.0}


async def at_work(run: Running, job: Job, attempt: int) -> bool:
    return bool(await log_of(run, job, attempt))


async def left(run: Running, job: Job, attempt: int) -> bool:
    now = await run.client("root").job(job.id)
    return now.preemptions == attempt


@pytest.mark.covers("F18", "N11")
async def test_a_script_that_ignores_the_signal_is_killed_and_the_log_says_what_was_lost(tmp_path: Path) -> None:
    async with running(tmp_path, IMPATIENT, MAKEWAY_TICK_SECONDS=0.2) as run:
        job = await run.submit("ana", "deaf", DEAF, profile="gpu1")
        await run.until(lambda: at_work(run, job, 1), "it runs")
        child = int((await log_of(run, job)).split()[1])
        await run.client("ana").preempt_test(job.id)
        await run.until(lambda: left(run, job, 1), "it is killed", 60)
        assert not Path(f"/proc/{child}").exists(), "with everything it started"
        (requeued,) = await told(run, job, "requeue")
        assert re.fullmatch(
            r"“deaf” of ana did not leave within 1 s and was killed; no checkpoint, lost \d(\.\d)? s of work\. "
            r"It waits for GPUs again and starts from the beginning\.",
            requeued.message,
        ), requeued.message
        again = await run.job(job.id, "running")
        assert (again.attempt, again.preemptions, again.failures) == (2, 1, 0)


@pytest.mark.covers("N11")
async def test_a_crash_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=0.2) as run:
        job = await run.submit("ana", "crashes", python(CRASHES), profile="gpu1", max_failures=2)
        done = await run.job(job.id, "succeeded")
        assert [a.outcome for a in done.attempts] == ["failed", "failed", "succeeded"]
        assert "goes on after nothing" in await log_of(run, job, 1)
        assert "goes on after 10" in await log_of(run, job, 2)
        last = await log_of(run, job, 3)
        assert "goes on after 10" in last, "the one that crashed is not there"
        assert "done True" in last


SAVES = """
import time
from makeway import checkpoint
begin = checkpoint.step_of(checkpoint.latest())
print("begins after step", begin, flush=True)
while not checkpoint.requested():
    time.sleep(0.02)
with checkpoint.saving(begin + 5) as folder:
    (folder / "state").write_text("saved")
checkpoint.stop()
"""


async def test_a_job_that_saved_because_makeway_stopped_goes_on_at_the_next_start(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        job = await run.submit("ana", "saves", python(SAVES), profile="gpu1")
        await run.until(lambda: log_of(run, job), "it waits for its notice")
    for attempt in range(2, 7):  # more often than losses are allowed: these are none
        async with running(tmp_path) as run:
            again = await run.job(job.id, "running")
            assert (again.attempt, again.failures) == (attempt, 0)
            requeued = (await told(run, job, "requeue"))[-1]
            message = f"“saves” of ana had to end because Makeway was stopped; saved at step {5 * attempt - 5}. "
            assert requeued.message == message + "It waits for GPUs again and goes on from there."

            async def goes_on(n: int = attempt) -> bool:
                return f"begins after step {5 * n - 5}" in await log_of(run, job, n)

            await run.until(goes_on, "it goes on from its checkpoint")


async def test_a_job_that_ends_with_0_because_makeway_stopped_has_not_succeeded(tmp_path: Path) -> None:
    handler = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); "
    quits = f"{handler}print('up', flush=True); time.sleep(600)"
    async with running(tmp_path) as run:
        job = await run.submit("ana", "quits", python(quits), profile="gpu1")
        await run.until(lambda: log_of(run, job), "it is up")
    async with running(tmp_path) as run:
        assert (await run.job(job.id, "running")).attempt == 2


@pytest.mark.parametrize("ends", ["exit 75", "exit 0", "exit 3"])
async def test_a_job_that_stops_its_own_launcher_is_started_again_a_few_times_only(tmp_path: Path, ends: str) -> None:
    async with running(tmp_path, MAKEWAY_TICK_SECONDS=0.2, MAKEWAY_MAX_FAILURES_LOST=2) as run:
        script = f"trap '{ends}' TERM; kill -TERM $PPID; while :; do sleep 0.05; done"
        job = await run.submit("ana", "stops", ["sh", "-c", script], profile="gpu1", max_failures=5)
        done = await run.job(job.id, "failed")
        assert [item.outcome for item in done.attempts] == ["lost", "lost", "failed"]
        assert done.reason is not None
        assert "was stopped on virtual-1, not by Makeway, 3 times in all" in done.reason.message
        assert "“stops” of ana was stopped on virtual-1, not by Makeway" in (await told(run, job, "requeue"))[0].message
