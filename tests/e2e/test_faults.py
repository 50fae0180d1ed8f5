"""Killed at any moment: the service and the Hub, several times while people work, and nothing is lost or doubled."""

from __future__ import annotations

import base64
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from makeway_api.client import Client
from makeway_api.errors import MakewayError
from makeway_api.models import Job, JobRequest

from benchmarks.portal import Portal, until

ROOT = Path(__file__).parents[2]
POLICY = (ROOT / "hub_config" / "policy.yaml").read_text(encoding="utf-8")
SEED = 20260101
KILLS = int(os.environ.get("KILLS", "8"))
HUB_KILLS = int(os.environ.get("HUB_KILLS", "2"))
"""How often each is killed; `make faults` does it 25 and 5 times."""

TRAIN = """
import os, random, sys, time
from makeway import checkpoint

book = open(os.environ["BOOK"], "a")
def note(what):
    book.write(f"{os.environ['MAKEWAY_JOB_NAME']} {os.environ['MAKEWAY_ATTEMPT']} {what}\\n"); book.flush()

note("begins")
state = {"sum": 0, "random": random.Random(7).getstate()}
def save(folder):
    (folder / "state").write_text(repr(state))
def load(folder):
    state.update(eval((folder / "state").read_text()))
for step in checkpoint.loop(40, save=save, load=load, every=5):
    generator = random.Random(); generator.setstate(state["random"])
    state["sum"] += generator.randrange(10**9); state["random"] = generator.getstate()
    time.sleep(0.1)
print("sum", state["sum"], flush=True)
note("ends")
"""


def expected_sum() -> int:
    generator = random.Random(7)
    return sum(generator.randrange(10**9) for _ in range(40))


@pytest.fixture
def portal() -> Iterator[Portal]:
    with Portal(10, policy=POLICY) as portal:
        yield portal


def heard(ask: Callable[[], object], seconds: float = 90) -> object:
    """Return the first answer of the service; a refusal is an answer. Raise TimeoutError where none comes."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except (MakewayError, httpx2.HTTPError) as error:
            status = getattr(error, "status", 503)
            if status < 500 and status not in (401, 403, 404):
                raise
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer after {seconds:g} s: {error}") from error
            time.sleep(0.2)


def submitted(client: Client, name: str, book: Path) -> None:
    """Submit a job once: a name that is there already was heard before the answer was lost."""
    names = {job.name for job in client.jobs(mine=True, limit=500).jobs}
    if name not in names:
        command = [sys.executable, "train.py"]
        files = [{"path": "train.py", "data": base64.b64encode(TRAIN.encode()).decode()}]
        client.submit(JobRequest(name=name, profile="gpu1", command=command, files=files, env={"BOOK": str(book)}))


def story(portal: Portal, book: Path, stop: threading.Event, names: list[str]) -> None:
    """ana trains to her limit, bo takes two GPUs and gives them back; over and over."""
    ana = portal.user("ana")
    turn = 0
    while not stop.is_set():
        turn += 1
        for i in range(9):
            name = f"run-{turn}-{i}"
            heard(lambda name=name: submitted(ana, name, book))
            names.append(name)
        heard(lambda: started(portal, "bo", {"profile": "gpu2", "team": "devops"}))
        stop.wait(random.Random(SEED + turn).uniform(2, 6))
        heard(lambda: portal.stop_server("bo"))
        stop.wait(1)


def started(portal: Portal, user: str, options: dict[str, str]) -> None:
    """Start a server; one that is already starting is fine."""
    answer = portal.hub("POST", f"/users/{user}/server", json=options)
    if answer.status_code not in (201, 202, 400, 409):
        answer.raise_for_status()


def all_right(portal: Portal, book: Path, names: list[str]) -> None:
    """Every job succeeded with the right result, no attempt began twice, and nothing is held."""
    ana = portal.user("ana")

    def jobs() -> dict[str, Job]:
        result: dict[str, Job] = {}
        cursor = None
        while True:
            page = ana.jobs(mine=True, limit=200, cursor=cursor)
            for job in page.jobs:
                assert job.name not in result, f"{job.name} is there twice"
                result[job.name] = job
            cursor = page.next
            if cursor is None:
                return result

    deadline = time.monotonic() + 60 + 3 * len(names)
    while any(job.state not in ("succeeded", "failed", "cancelled") for job in heard(jobs).values()):  # type: ignore[attr-defined]
        if time.monotonic() >= deadline:
            raise TimeoutError({j.name: (j.state, j.reason) for j in jobs().values() if j.state == "pending"})
        time.sleep(0.5)
    result = jobs()
    assert set(result) == set(names)
    assert {name: job.state for name, job in result.items() if job.state != "succeeded"} == {}
    for name, job in result.items():
        text = ana.logs(job.id).text
        assert f"sum {expected_sum()}\n" in text, (name, text)
    started_now = [line for line in book.read_text().splitlines() if line.endswith("begins")]
    assert len(started_now) == len(set(started_now)), "an attempt began twice"
    ended = [line.split()[0] for line in book.read_text().splitlines() if line.endswith("ends")]
    assert sorted(ended) == sorted(names), "every job ended once"
    portal.stop_server("bo")
    deadline = time.monotonic() + 120
    while (usage := portal.user("admin").usage()).used:
        assert time.monotonic() < deadline, f"a lease leaked: {usage}"
        time.sleep(0.2)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.covers("F47", "N07")
@pytest.mark.no_repeat
def test_the_service_is_killed(portal: Portal, tmp_path: Path) -> None:
    book, stop, names = tmp_path / "book", threading.Event(), []
    chance = random.Random(SEED)
    worker = threading.Thread(target=story, args=(portal, book, stop, names))
    worker.start()
    try:
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.3, 4.0))
            pid = heard_pid(portal.service_pid)
            os.kill(pid, signal.SIGKILL)
    finally:
        stop.set()
        worker.join(240)
    if worker.is_alive():
        raise TimeoutError("the last requests were not answered")
    assert len(names) >= 9
    all_right(portal, book, names)


def heard_pid(find: Callable[[], int]) -> int:
    """Find a process that may be restarting right now."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return find()
        except RuntimeError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def guaranteed(portal: Portal, team: str) -> float:
    """GPUs that notebooks of a team hold."""
    return next(item.guaranteed for item in portal.user("admin").usage().teams if item.team == team)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.covers("N07", "F47")
@pytest.mark.no_repeat
def test_the_hub_is_killed(portal: Portal, tmp_path: Path) -> None:
    book, names = tmp_path / "book", []
    chance = random.Random(SEED)
    ana = portal.user("ana")
    heard(lambda: started(portal, "bo", {"profile": "gpu2", "team": "devops"}))
    # A Hub that is killed while it starts a notebook knows nothing of it: bo's is up before the first kill.
    until(lambda: portal.hub("GET", "/users/bo").json()["servers"].get("", {}).get("ready"), "bo's notebook is up")
    for turn in range(HUB_KILLS):
        for i in range(9):
            name = f"run-{turn}-{i}"
            heard(lambda name=name: submitted(ana, name, book))
            names.append(name)
        if turn % 2:
            heard(lambda: started(portal, "lea", {"profile": "gpu1", "team": "devops"}))
        time.sleep(chance.uniform(0.2, 3.0))
        os.kill(portal.hub_pid, signal.SIGKILL)
        portal.wait_until_dead()
        portal.start()
    heard(lambda: portal.stop_server("lea"))
    # A Hub that was killed while it started lea's notebook knows nothing of it: then the lease runs out, in 15 s.
    until(lambda: guaranteed(portal, "devops") <= 2, "lea's notebook is over", 120)
    assert guaranteed(portal, "devops") == 2, "bo's notebook was kept while the Hubs were killed"
    all_right(portal, book, names)
