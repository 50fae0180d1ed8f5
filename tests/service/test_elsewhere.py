"""Jobs whose workers are elsewhere: launchers that reach the service by HTTP alone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from elsewhere import Processes
from makeway_api.errors import MakewayError
from makeway_api.models import Job, JobRequest
from makeway_quota.services.jobs import attempts
from running import SAMPLE, Running, python, running
from web.portal import serving

pytestmark = pytest.mark.slow

SAVES = """
import os, signal, sys, time
from pathlib import Path
from makeway import checkpoint
start = checkpoint.step_of(checkpoint.latest())
print("from", start, flush=True)
while not checkpoint.requested():
    time.sleep(0.02)
with checkpoint.saving(start + 5) as folder:
    (folder / "state").write_text("saved")
checkpoint.stop()
"""


class Far:
    """A service behind a socket, and its workers."""

    def __init__(self, run: Running, backend: Processes) -> None:
        self.run = run
        self.backend = backend

    async def train(self, code: str, **ask: object) -> Job:
        """Submit a job and wait until it runs."""
        job = await self.run.submit("ana", "far", python(code), profile="gpu1", **ask)
        return await self.run.job(job.id, "running", "succeeded", "failed")

    async def ended(self, job: Job) -> Job:
        return await self.run.job(job.id, "succeeded", "failed", "cancelled")

    async def log(self, job: Job, attempt: int = 1) -> str:
        """Return the whole log."""
        chunk = await self.run.client("ana").logs(job.id, attempt=attempt, offset=0, limit=2**20)
        return chunk.text

    async def said(self, job: Job, text: str, attempt: int = 1) -> None:
        """Wait until a job has written something."""

        async def there() -> bool:
            return text in await self.log(job, attempt)

        await self.run.until(there, f"{job.name} says {text}")


@asynccontextmanager
async def far(
    folder: Path, *, lost_after: float = 120.0, durable: bool = True, **settings: object
) -> AsyncIterator[Far]:
    backend = Processes(folder / "machines", "", lost_after=lost_after)
    backend.durable_checkpoints = durable
    backend.root.mkdir(parents=True)
    settings = {"MAKEWAY_TICK_SECONDS": "0.2", "MAKEWAY_TICKET_SECRET": "s" * 32, **settings}
    async with running(folder / "state", backend=backend, **settings) as run:
        async with serving(run.app) as address:
            backend.address = f"{address}/services/makeway"
            try:
                yield Far(run, backend)
                assert run.service.components.world.failure is None
            finally:
                await backend.finished()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "HEARTBEAT", 0.3)


async def test_log_result_and_environment_of_a_job(tmp_path: Path) -> None:
    code = """
import os, pickle
print(sorted(name for name in os.environ if "TOKEN" in name or "ATTEMPT_URL" in name))
print(os.environ["MAKEWAY_GPUS"], os.environ["RANK"], os.environ["GREETING"], flush=True)
pickle.dump("r" * 1_500_000, open(os.environ["MAKEWAY_RESULT_FILE"], "wb"))
"""
    async with far(tmp_path) as service:
        job = await service.train(code, env={"GREETING": "hello"})
        job = await service.ended(job)
        assert job.state.value == "succeeded", job.message
        assert await service.log(job) == "[]\n1 0 hello\n"
        result = await service.run.client("ana").result(job.id)
        assert len(result) > 1_500_000


async def test_decisions_about_attempts_that_do_not_succeed_become_pod_events(tmp_path: Path) -> None:
    async with far(tmp_path) as service:
        good = await service.ended(await service.train("pass"))
        bad = await service.ended(await service.train("raise SystemExit(3)"))
        job = await service.train(SAVES)
        await service.said(job, "from")
        await service.run.client("ana").preempt_test(job.id)
        job = await service.run.job(job.id, "pending", "starting", "running")
        await service.run.client("ana").cancel(job.id)
        await service.ended(job)
        published = [(key[0], code) for key, code, _ in service.backend.published]
        assert good.id not in [id for id, _ in published]
        assert (bad.id, "failed") in published
        assert [code for id, code in published if id == job.id][:2] == ["notice", "made_way"]
        (notice,) = [message for _, code, message in service.backend.published if code == "notice"]
        assert notice.startswith("ana tests the preemption of far")
        assert "It may save until" in notice


async def test_a_failure_keeps_its_exit_code_its_last_line_and_its_exception(tmp_path: Path) -> None:
    code = """
import json, os, sys
json.dump({"type": "ValueError", "message": "bad", "traceback": "…"}, open(os.environ["MAKEWAY_ERROR_FILE"], "w"))
print("it went wrong")
sys.exit(3)
"""
    async with far(tmp_path) as service:
        job = await service.ended(await service.train(code))
        assert (job.state.value, job.exit_code) == ("failed", 3)
        assert job.message == "exit code 3: it went wrong"
        assert (await service.run.service.services.outputs._context.backend.error(job.id, 1) or b"").startswith(b"{")


async def test_a_command_that_cannot_be_started_fails_with_the_cause(tmp_path: Path) -> None:
    async with far(tmp_path) as service:
        job = await service.run.submit("ana", "far", ["/no/such/program"], profile="gpu1")
        job = await service.ended(job)
        assert job.state.value == "failed"
        assert job.message == "could not start: no such file or program '/no/such/program'"


async def test_a_notice_saves_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    async with far(tmp_path) as service:
        job = await service.train(SAVES)
        await service.said(job, "from 0")
        await service.run.client("ana").preempt_test(job.id)
        await service.said(job, "from 5", attempt=2)
        job = await service.run.job(job.id, "running")
        assert (job.attempt, job.preemptions) == (2, 1)
        assert job.checkpoint is not None
        assert job.checkpoint.step == 5
        await service.run.client("ana").cancel(job.id)
        assert (await service.ended(job)).state.value == "cancelled"


async def test_without_a_place_for_checkpoints_a_job_is_told_that_it_starts_from_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with far(tmp_path, durable=False) as service:
        assert caplog.text.count("in MAKEWAY_KUBE_CHECKPOINT_CLAIM") == 1
        job = await service.train(SAVES)
        await service.said(job, "from 0")
        await service.run.client("ana").preempt_test(job.id)
        await service.said(job, "from 0", attempt=2)
        decisions = await service.run.client("ana").job_events(job.id)
        (message,) = [item.message for item in decisions if item.verb == "requeue"]
        assert re.fullmatch(
            r"“far” of ana made way for a test of preemption; saved at step 5, \d+(\.\d)? s of work is lost\. "
            r"Its checkpoint was not kept, so it starts from the beginning when it gets GPUs again\.",
            message,
        ), message
        result = await service.run.job(job.id, "running")
        assert (result.durable_checkpoints, result.checkpoint) == (False, None)
        first = result.attempts[0]
        assert first.ended_at is not None
        assert first.checkpoint is not None
        assert first.lost_seconds is not None
        ran = (first.ended_at - first.started_at).total_seconds()  # of whole microseconds
        assert 0 < first.lost_seconds <= ran + 0.001
        wanted = JobRequest(command=["true"], profile="gpu1", dry_run=True)
        for _ in range(4):  # until the reservation is used up
            dry = await service.run.client("ana").dry_run(wanted)
            if dry.risk:
                break
            await service.train("import time; time.sleep(600)")
        assert dry.risk.endswith("and then starts from the beginning, because checkpoints are not kept here.")
        over = await service.train("import time; time.sleep(600)")
        assert over.reason is not None
        assert re.fullmatch(
            r"Runs over quota on \d GPUs?: it makes way when a team needs GPUs that it reserved, and then "
            r"starts from the beginning, because checkpoints are not kept here\.",
            over.reason.message,
        ), over.reason.message
        for item in (await service.run.client("ana").jobs(limit=50)).jobs:
            await service.run.client("ana").cancel(item.id)
            await service.ended(item)


async def test_a_sigterm_is_a_notice_and_the_job_is_not_to_blame(tmp_path: Path) -> None:
    async with far(tmp_path) as service:
        job = await service.train(SAVES)
        await service.said(job, "from 0")
        service.backend.launcher(job.id).send_signal(signal.SIGTERM)
        await service.said(job, "from 5", attempt=2)
        log = await service.log(job)
        assert "makeway: notice: the machine is stopping" in log
        decisions = await service.run.client("ana").job_events(job.id)
        assert any("was stopped on far-1, not by Makeway; saved at step 5" in item.message for item in decisions)
        job = await service.run.job(job.id, "running")
        assert job.failures == 0
        await service.run.client("ana").cancel(job.id)
        await service.ended(job)


async def test_a_job_that_ends_on_a_drain_with_a_result_that_takes_too_long_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "RESULT_RATE", 1)
    monkeypatch.setattr(attempts, "RESULT_BURST", 600_000)
    code = """
import os, signal, sys, threading
stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())
first = os.environ["MAKEWAY_ATTEMPT"] == "1"
print("up", flush=True)
if first:
    stopped.wait()
with open(os.environ["MAKEWAY_RESULT_FILE"], "wb") as file:
    file.write(b"r" * (2_000_000 if first else 1_000))
"""
    async with far(tmp_path, policy=SAMPLE.read_text(encoding="utf-8").replace("grace: 30", "grace: 1")) as service:
        job = await service.train(code)
        await service.said(job, "up")
        service.backend.launcher(job.id).send_signal(signal.SIGTERM)
        job = await service.ended(job)
        assert [(one.outcome, one.exit_code) for one in job.attempts] == [("lost", 0), ("succeeded", 0)]
        assert job.attempts[0].message == "its result could not be sent in time"
        assert await service.run.client("ana").result(job.id) == b"r" * 1_000
        assert "its result could not be sent in time" in await service.log(job)


async def test_a_job_whose_result_was_lost_has_succeeded_and_says_so(tmp_path: Path) -> None:
    code = 'import os; open(os.environ["MAKEWAY_RESULT_FILE"], "wb").write(b"r" * 2_000_000)'
    async with far(tmp_path, MAKEWAY_MAX_RESULT_MB=1) as service:
        job = await service.ended(await service.train(code))
        assert job.state.value == "succeeded"
        assert job.reason is not None
        assert "but its result was lost: the service did not receive the whole of it" in job.reason.message
        assert job.reason.message.endswith("1 GPU is free again.")
        assert "the result was not kept: The output is longer than 1.0 MB" in job.message
        with pytest.raises(MakewayError, match="succeeded, but its result was lost") as lost:
            await service.run.client("ana").result(job.id)
        assert (lost.value.status, lost.value.code) == (410, "result_lost")


async def test_a_cancelled_job_ends_at_once_whatever_it_does(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    async with far(tmp_path) as service:
        job = await service.train(code)
        await service.said(job, "up")
        await service.run.client("ana").cancel(job.id)
        assert (await service.ended(job)).state.value == "cancelled"


async def test_a_silent_worker_is_lost_fenced_and_its_job_starts_again(tmp_path: Path, fast: None) -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"
    async with far(tmp_path, lost_after=12.0) as service:
        kept = service.backend.remove

        async def unreachable(workload: str, attempt: int) -> None:
            if attempt > 1:  # the first machine cannot be reached
                await kept(workload, attempt)

        service.backend.remove = unreachable  # type: ignore[method-assign]
        job = await service.train(code)
        await service.said(job, "up")
        first = service.backend.launcher(job.id)
        os.kill(first.pid, signal.SIGSTOP)
        await service.said(job, "up", attempt=2)
        decisions = await service.run.client("ana").job_events(job.id)
        [lost] = [item.message for item in decisions if item.code == "lost"]
        assert "worker 0 was not heard of for 12 s" in lost
        row = await service.run.service.components.world.row(job.id)
        assert row is not None
        assert (row.failures, row.infra_failures, row.attempt) == (0, 1, 2), "a job can stop its own launcher"
        os.kill(first.pid, signal.SIGCONT)
        await asyncio.to_thread(first.wait, 60)  # nothing it sends is taken any more, and it ends its worker
        second = await service.run.job(job.id, "running")
        assert second.attempt == 2
        await service.run.client("ana").cancel(job.id)
        await service.ended(second)


async def test_a_launcher_that_vanishes_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("makeway_quota.backends.remote.backend.REPORT_GRACE", 1.0)
    async with far(tmp_path) as service:
        job = await service.train("import time; print('up', flush=True); time.sleep(600)")
        await service.said(job, "up")
        os.kill(service.backend.launcher(job.id).pid, signal.SIGKILL)
        await service.said(job, "up", attempt=2)
        row = await service.run.service.components.world.row(job.id)
        assert row is not None
        assert (row.infra_failures, row.attempt) == (1, 2), "this counts: it may be the job's own doing"
        await service.run.client("ana").cancel(job.id)
        await service.ended(job)


async def test_a_second_launcher_of_a_worker_ends_at_once(tmp_path: Path) -> None:
    async with far(tmp_path) as service:
        job = await service.train("import time; print('up', flush=True); time.sleep(600)")
        await service.said(job, "up")
        home = service.backend.root / f"{job.id}-1-0"
        first = service.backend.launcher(job.id)
        other = home.with_name(f"{job.id}-1-0-again")
        other.mkdir()
        path, token = service.backend.channel.credentials(job.id, 1, 0)
        env = {
            "PATH": os.environ["PATH"],
            "MAKEWAY_ATTEMPT_URL": f"{service.backend.address}/{path}",
            "MAKEWAY_ATTEMPT_TOKEN": token,
            "MAKEWAY_JOB_DIR": str(other),
        }
        process = await asyncio.create_subprocess_exec(
            *Path(f"/proc/{first.pid}/cmdline").read_text().split("\0")[:-1],
            env=env, cwd=other, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, message = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 1
        assert b"Another launcher runs this worker" in message
        assert not (other / "attempt-1").exists()
        await service.run.client("ana").cancel(job.id)
        await service.ended(job)


async def test_a_gang_has_one_log_and_a_failure_ends_all_of_it(tmp_path: Path) -> None:
    code = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists(os.environ["MAKEWAY_CHECKPOINT_DIR"] + "/go"):
    time.sleep(0.02)
if os.environ["RANK"] == "1":
    sys.exit("rank 1 fails")
time.sleep(600)
"""
    async with far(tmp_path) as service:
        job = await service.run.submit("ana", "gang", python(code), profile="gpu1", workers=2)
        await service.run.job(job.id, "running")
        await service.said(job, "[0] rank 0 of 2")
        await service.said(job, "[1] rank 1 of 2")
        (service.backend.root / "volume" / job.id / "go").touch()
        job = await service.ended(job)
        assert (job.state.value, job.exit_code) == ("failed", 1)
        assert job.message == "exit code 1: rank 1: rank 1 fails"


async def test_a_gang_saves_and_starts_again_where_one_of_its_workers_is_stopped(tmp_path: Path) -> None:
    async with far(tmp_path) as service:
        first_saves = SAVES.replace(
            "with checkpoint", 'if os.environ["RANK"] == "1":\n    checkpoint.stop()\nwith checkpoint'
        )
        job = await service.run.submit("ana", "gang", python(first_saves), profile="gpu1", workers=2)
        await service.run.job(job.id, "running")
        await service.said(job, "[0] from 0")
        await service.said(job, "[1] from 0")
        service.backend.launcher(job.id, worker=1).send_signal(signal.SIGTERM)
        await service.said(job, "[0] from 5", attempt=2)
        assert "makeway: notice: another worker of the gang was stopped" in await service.log(job)
        job = await service.run.job(job.id, "running")
        assert (job.attempt, job.failures) == (2, 0)
        await service.run.client("ana").cancel(job.id)
        await service.ended(job)


async def test_a_rank_that_fails_after_the_notice_takes_no_time_to_save_from_the_others(tmp_path: Path) -> None:
    async with far(tmp_path) as service:
        one_fails = SAVES.replace(
            "with checkpoint",
            'if os.environ["RANK"] == "1":\n    raise RuntimeError("rank 1 fails")\ntime.sleep(4)\nwith checkpoint',
        )
        job = await service.run.submit("ana", "gang", python(one_fails), profile="gpu1", workers=2)
        await service.run.job(job.id, "running")
        await service.said(job, "[0] from 0")
        await service.said(job, "[1] from 0")
        await service.run.client("ana").preempt_test(job.id)
        await service.said(job, "[0] from 5", attempt=2)
        job = await service.run.job(job.id, "running")
        assert "exit code 1 after the notice: rank 1: RuntimeError: rank 1 fails" in job.attempts[0].message
        await service.run.client("ana").cancel(job.id)
        await service.ended(job)


async def test_what_a_job_writes_about_itself_keeps_no_end_from_being_reported(tmp_path: Path) -> None:
    code = """
import json, os
with open(os.environ["MAKEWAY_PROGRESS_FILE"], "w") as file:
    json.dump({"step": "many", "saved_at": 1e300, "junk": "\\u0000" * 10}, file)
os.write(1, b"\\xff\\x00 no text\\n")
os._exit(9)
"""
    async with far(tmp_path) as service:
        job = await service.ended(await service.train(code))
        assert (job.state.value, job.exit_code) == ("failed", 9)


@pytest.mark.parametrize("token", ["", "t" * 32])
async def test_a_service_without_a_lasting_secret_takes_no_workers_elsewhere(tmp_path: Path, token: str) -> None:
    with pytest.raises(ValueError, match="set MAKEWAY_TICKET_SECRET"):
        async with far(tmp_path, MAKEWAY_TICKET_SECRET="", JUPYTERHUB_API_TOKEN=token):
            pass
