"""Measure what a reclaim costs beyond the job's own save."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterator

from makeway_api.models import FileIn, Job, JobRequest, SessionRequest

from .measure import Measured
from .portal import TIMEOUT, Portal

ROUNDS = 12
SAVE_SECONDS = 0.5

TRAINING = f"""
import json, time
from makeway import checkpoint

while not checkpoint.requested():
    time.sleep(0.002)
began = time.time()
with checkpoint.saving(1) as folder:
    time.sleep({SAVE_SECONDS})
    (folder / "weights").write_text("1")
print("SAVED", json.dumps([began, time.time()]), flush=True)
checkpoint.stop()
"""


def measure() -> Iterator[Measured]:
    """Fill both GPUs with one team's training and reclaim one for the other team, again and again."""
    with Portal(gpus=2) as portal:
        data = base64.b64encode(TRAINING.encode()).decode()
        for _ in range(2):
            portal.user("ana").submit(
                JobRequest(
                    name="filler",
                    team="rnd",
                    profile="gpu1",
                    command=[sys.executable, "train.py"],
                    files=[FileIn(path="train.py", data=data)],
                )
            )
        rounds = [reclaim(portal) for _ in range(ROUNDS)]
    saves = [save for _, save in rounds]
    yield Measured(
        "a reclaim beyond the job's own save",
        "s",
        [total - save for total, save in rounds],
        "the job's own save",
        sorted(saves)[len(saves) // 2],
        goal=1.0,
        note="From the owner's request to devices in hand, less the time the job took from noticing to having saved.",
    )


def reclaim(portal: Portal) -> tuple[float, float]:
    """Take one GPU back: the seconds in all, and those of the save."""
    wait_for_two_running(portal)
    spawner, ana = portal.spawner(), portal.user("ana")
    begin = time.time()
    session = spawner.request_session(SessionRequest(user="bo", server="bench", profile="gpu1", team="devops"))
    while not session.placement:
        session = spawner.session(session.id, wait=10, version=session.version)
    total = time.time() - begin
    remaining = [job for job in ana.jobs(mine=True).jobs if job.state == "pending"]
    spawner.release(session.id)
    return total, save_seconds(portal, remaining[0])


def save_seconds(portal: Portal, job: Job) -> float:
    """How long the save of the attempt that left took, by its own log."""
    return saved_in(portal.user("ana").logs(job.id, attempt=job.attempt).text)


def saved_in(log: str) -> float:
    """Return the seconds that TRAINING took to save, by its log."""
    line = next(line for line in log.splitlines() if line.startswith("SAVED"))
    began, ended = json.loads(line.removeprefix("SAVED"))
    return float(ended - began)


def wait_for_two_running(portal: Portal) -> None:
    """Wait until both jobs train, and have had the time to import what they need."""
    deadline = time.monotonic() + TIMEOUT
    while sum(job.state == "running" for job in portal.user("ana").jobs(mine=True).jobs) < 2:
        if time.monotonic() > deadline:
            raise RuntimeError("The jobs did not start.")
        time.sleep(0.05)
    time.sleep(1.0)
