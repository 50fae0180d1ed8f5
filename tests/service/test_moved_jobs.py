"""Jobs whose machine is to go, with real machines, agents and launchers: they save, and go on elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_api.models import Job
from makeway_quota.autoscale import document
from makeway_quota.autoscale.placement import moves as moves_module
from running import python
from service.test_deployments_of_machines import DOCUMENT, Site, site

pytestmark = pytest.mark.slow

SAVES = """
import time
from makeway import checkpoint
start = checkpoint.step_of(checkpoint.latest())
print("from", start, flush=True)
time.sleep(0.2)
saved = 0.0
while not checkpoint.requested():
    if time.monotonic() > saved + 1:  # what has not saved for longer than `every` is not moved
        with checkpoint.saving(start + 1) as folder:
            (folder / "state").write_text("saved")
        saved = time.monotonic()
    time.sleep(0.02)
print("told:", checkpoint.notice().reason, flush=True)
with checkpoint.saving(start + 5) as folder:
    (folder / "state").write_text("saved")
checkpoint.stop()
"""
ENDS = """
import pathlib, sys, time
while not pathlib.Path({end!r}).exists():
    time.sleep(0.05)
"""
MOVES = "moves: {every: 5, headroom: 0, most: 1}\nmachine_types"
MOVED = "It is moved to another machine so that this one can be given back."


async def said(world: Site, job: Job, text: str, attempt: int) -> None:
    async def there() -> bool:
        chunk = await world.run.client("ana").logs(job.id, attempt=attempt, offset=0, limit=2**20)
        return text in chunk.text

    await world.run.until(there, f"attempt {attempt} of {job.id} writes {text}", 60)


async def test_a_job_is_moved_so_that_its_machine_is_given_back_and_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "MIN_MOVE_EVERY", 1.0)
    monkeypatch.setattr(moves_module, "MOVE_SECONDS", 1.0)  # else it pays after two minutes only
    async with site(tmp_path, DOCUMENT.replace("machine_types", MOVES)) as world:
        end = tmp_path / "end"
        short = await world.run.submit("ana", "short", python(ENDS.format(end=str(end))), profile="gpu1")
        stays = await world.run.submit("ana", "stays", python(ENDS.format(end=str(tmp_path / "later"))), profile="gpu1")
        for job in (short, stays):
            await world.run.job(job.id, "running", seconds=60)
        moves = await world.run.submit("ana", "moves", python(SAVES), profile="gpu1")
        await said(world, moves, "from 0", 1)
        assert len({*world.nodes_of(stays.id), *world.nodes_of(moves.id)}) == 2
        [left] = world.nodes_of(moves.id)
        end.touch()
        await world.run.job(short.id, "succeeded", seconds=30)
        await said(world, moves, "from 5", 2)
        await said(world, moves, f"told: {MOVED}", 1)
        assert world.nodes_of(moves.id) == world.nodes_of(stays.id)
        await world.until_machines("ready")
        assert [machine.id for machine in world.machines] != [left]
        events = [(one.state, one.reason) for one in world.store.machine_log.events() if one.machine == left]
        assert ("draining", "move") in events
        outcomes = [one.outcome for one in world.store.attempts(moves.id)]
        assert outcomes[0] == "moved"
        (tmp_path / "later").touch()
        await world.run.job(stays.id, "succeeded", seconds=30)
        await world.run.client("ana").cancel(moves.id)
        await world.run.job(moves.id, "cancelled", seconds=30)


async def test_a_pause_has_the_job_save_before_its_machine_is_ended(tmp_path: Path) -> None:
    async with site(tmp_path, DOCUMENT + "drain_timeout: 30\n") as world:
        job = await world.run.submit("ana", "saves", python(SAVES), profile="gpu1")
        await said(world, job, "from 0", 1)
        world.store.deployments.save("demo", DOCUMENT + "drain_timeout: 30\npaused: true\n", 1, "root", 0.0)
        await said(world, job, "told: Its machine is ended, as its deployment is paused or being deleted.", 1)
        await world.until_machines()
        row = await world.run.job(job.id, "pending", seconds=30)
        assert [one.outcome for one in world.store.attempts(row.id)] == ["preempted"]
        [attempt] = world.store.attempts(row.id)
        assert attempt.checkpoint_step == 5
        await world.run.client("ana").cancel(job.id)
