"""The live world as a file: dumped by the command, and replayed to the same plan."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from makeway_quota.engine import Snapshot, schedule
from makeway_quota.snapshot_file import plan_as_json, read_snapshot, titles, write_snapshot
from running import SAMPLE, Running, running

POLICY = SAMPLE.read_text(encoding="utf-8").replace("settings:", "settings:\n  history_half_life: 1h")


async def command(folder: Path, *words: str) -> str:
    """Run makeway-quota beside the service, on the same state directory."""
    environ = {**os.environ, "MAKEWAY_STATE_DIR": str(folder), "MAKEWAY_VIRTUAL_GPUS": "10"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "makeway_quota.main", *words, env=environ, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def live(run: Running) -> Snapshot:
    return run.service.components.world.snapshot(
        await run.service.components.world.rows(), run.service.components.clock()
    )


def by_id(snapshot: Snapshot) -> dict[str, object]:
    return {w.id: w for w in snapshot.workloads}


@pytest.mark.covers("F23")
async def test_a_dumped_pass_gives_the_same_plan(tmp_path: Path) -> None:
    """R&D borrows, past runs are known and outrun, a job waits: the file loses none of it."""
    async with running(tmp_path, POLICY, MAKEWAY_TICK_SECONDS=0.2) as run:
        for _ in range(3):
            done = await run.submit("ana", "short", [sys.executable, "-c", "pass"], profile="gpu3")
            await run.job(done.id, "succeeded")
        for at in range(3):
            await run.job((await run.submit("ana", f"r{at}", profile="gpu3")).id, "running")
        await run.submit("ana", "more", profile="gpu3", time_limit=600)
        run.service.components.world.accounting.clock = lambda: 1e9  # hours later
        await run.converged()

        snapshot = await live(run)
        assert any(policy.history for policy in snapshot.policies)
        text = await command(tmp_path, "snapshot")
        dumped = read_snapshot(text)
        assert by_id(_unforeseen(dumped)) == by_id(_unforeseen(snapshot)), "each looked at past runs at its own moment"
        same = replace(dumped, now=snapshot.now, policies=snapshot.policies, workloads=snapshot.workloads)
        assert same == snapshot, "all but the moment of the dump and what grew until then"

        # A job in quota arrives: the dumped world and the live one choose the same victims.
        waiting = replace(snapshot.workloads[0], id="b1", team="devops", owner="bo", state="pending", placement=())
        pressed = replace(snapshot, workloads=(*snapshot.workloads, waiting), paused=("rnd/gpu2",))
        plan = schedule(pressed)
        assert plan.evict
        for format in ("yaml", "json"):
            assert schedule(read_snapshot(write_snapshot(pressed, format))) == plan
        (tmp_path / "pass.json").write_text(write_snapshot(pressed, "json"), encoding="utf-8")
        told = await command(tmp_path, "plan", str(tmp_path / "pass.json"), "--format", "json")
        assert json.loads(told) == json.loads(json.dumps(plan_as_json(plan, titles(pressed))))


def _unforeseen(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, workloads=tuple(replace(w, expected=None) for w in snapshot.workloads))
