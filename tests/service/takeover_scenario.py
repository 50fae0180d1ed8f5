"""Leave a service in the middle of its work, as a killed one does: run by `scripts/record_takeover.py`, on older code.

It uses little of the tests' own, so that it runs with the code of many commits: `running`, and the API's client.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from running import running

POLICY = """
version: 1
pools: [{name: gpu, nodes: {local: {gpus: all}}}]
profiles:
  - {name: gpu1, gpus: 1, policies: [[rnd], [devops]], grace: 20}
  - {name: gpu2, gpus: 2, policies: [[rnd]]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [gpu], reserved: 3}]}
  - {name: devops, groups: [devops]}
"""
SETTINGS = {"MAKEWAY_LEASE_SECONDS": "3600", "MAKEWAY_KEEP": "1"}
RUNS = "echo up; while [ ! -e ../go ]; do sleep 0.1; done; echo done"
MAKES_WAY = """
if [ -e "$MAKEWAY_CHECKPOINT_DIR/saved" ]; then echo resumed; exit 0; fi
trap 'touch "$MAKEWAY_CHECKPOINT_DIR/saved"; exit 75' TERM
echo up
while :; do sleep 0.1; done
"""


async def scenario(folder: Path) -> None:
    """Have jobs that ended, failed, run, made way and wait, and a session; write their ids down and be killed."""
    async with running(folder, POLICY, gpus=3, **SETTINGS) as run:
        jobs = {
            "succeeded": await run.submit("ana", "succeeded", ["sh", "-c", "echo over"], profile="gpu1"),
            "failed": await run.submit("ana", "failed", ["sh", "-c", "exit 3"], profile="gpu1"),
        }
        await run.job(jobs["succeeded"].id, "succeeded")
        await run.job(jobs["failed"].id, "failed")
        jobs["runs"] = await run.submit("ana", "runs", ["sh", "-c", RUNS], profile="gpu1")
        jobs["makes_way"] = await run.submit("bo", "makes way", ["sh", "-c", MAKES_WAY], profile="gpu1")

        async def both_up() -> bool:
            result = [await run.client("root").logs(jobs[name].id, attempt=1, offset=0, limit=100) for name in jobs]
            return all("up" in page.text for page in result[2:])

        for name in ("runs", "makes_way"):
            await run.job(jobs[name].id, "running")
        while not await both_up():  # noqa: ASYNC110 - its log is a file
            await asyncio.sleep(0.1)
        session = await run.session("ana", "gpu2", "rnd")
        await run.granted(session.id)
        jobs["waits"] = await run.submit("bo", "waits", ["sh", "-c", "echo late"], profile="gpu1")
        for name in ("makes_way", "waits"):
            await run.job(jobs[name].id, "pending")
        launcher = run.service.components.backend._launcher
        result = {
            "jobs": {name: job.id for name, job in jobs.items()},
            "session": session.id,
            "root": str(folder),
            "launcher": str(launcher.relative_to(folder)),
        }
        (folder / "scenario.json").write_text(json.dumps(result))
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(scenario(Path(sys.argv[1])))
