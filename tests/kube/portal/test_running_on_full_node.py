"""Notebooks of the chart's portal on a full node: a job makes way for them, whatever restarts, and they save."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import websocket
from charts import JOBS
from kernels import execute
from makeway_api.models import JobRequest, Priority
from pods import kill, wait_until
from portals import CHECKPOINTS, IMAGES, OTHER_IMAGE, PODS, STARTED, WORKERS, Object, Person, Portal

from kube_cluster.api import GPU
from kube_cluster.portal import wait_until_ready

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]

SLOW = {"name": "slow", "title": "Slow to save", "gpus": 1, "pools": ["gpu"], "policies": ["rnd"], "kinds": ["job"]}
AFTER_SAVE = 15
"""Seconds from a job's save to the running pod of the notebook that it makes way for, on a machine that also runs other
tests; benchmarks measure how long it is (F26)."""
BOS = {"profile": "gpu1", "team": "devops"}
"""What bo chooses in the picker."""
TRAIN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = pathlib.Path(os.environ["MAKEWAY_CHECKPOINT_DIR"])
print("goes on" if (folder / "step").exists() else "begins", flush=True)
while not pathlib.Path(os.environ["MAKEWAY_STOP_FILE"]).exists():
    time.sleep(0.1)
print("saves", flush=True)
while not (folder / "saved").exists():
    time.sleep(0.1)
(folder / "step").touch()
sys.exit(75)
"""
SAVE = """
import atexit, pathlib, time
def save():
    time.sleep(2)
    pathlib.Path("saved").touch()
atexit.register(save)
print("ready")
"""


@pytest.fixture(scope="module", autouse=True)
def slow_jobs(portal: Portal) -> Iterator[None]:
    """Offer a profile for jobs that take long to save."""
    with portal.offering(SLOW | {"grace": 600, "images": IMAGES}):
        yield


@pytest.mark.covers("F24", "F25", "F26", "F42", "F47", "N06", "N07", "N21")
def test_a_notebook_in_quota_starts_on_a_full_cluster_whatever_restarts_meanwhile(portal: Portal) -> None:
    ana, bo = portal.person("ana"), portal.person("bo")
    with ana.client() as client:
        first, second = (client.submit(job(name)) for name in ("first", "second"))
        for one in (first, second):
            wait_until(lambda one=one: "begins" in client.logs(one.id).text, f"{one.name} runs", STARTED)
        bo.begin(BOS)
        wait_until(lambda: bo.session().phase == "reclaim", "a job makes way")
        lost = bo.session()
        reason = lost.reason
        assert reason
        assert "R&D's job (1 GPU) makes way" in reason.message
        assert reason.numbers["terminating"] == [second.id]
        restart(portal, "hub")
        with bo.client() as own:
            wait_until(lambda: own.session(lost.id).state.ended, "the lease of the lost start has ended")
        assert bo.told() == "Your notebook has ended. The Hub was restarted while it was starting."
        bo.begin(BOS)
        with ThreadPoolExecutor(1) as reader:
            events = reader.submit(bo.progress)
            wait_until(lambda: bo.session().phase == "reclaim", "a job makes way")
            waiting = bo.session()
            restart(portal, "service")
            assert bo.session().id == waiting.id
            assert bo.server()["pending"] == "spawn"
            (portal.volume(CHECKPOINTS, JOBS) / second.id / "saved").touch()
            wait_until(lambda: runs(portal, bo), "the notebook's pod runs once the job has saved", AFTER_SAVE)
            pod = bo.wait()
            told_phases = [one for one in events.result() if "phase" in one]
        session = bo.session()
        assert (session.id, session.preemptible) == (waiting.id, False)
        assert pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
        phases = list(dict.fromkeys(one["phase"] for one in told_phases))
        assert phases[:3] == ["admission", "reclaim", "node"]
        assert phases[-1] == "server"
        assert set(told_phases[-1]["clocks"]) == set(phases)
        assert [one.outcome for one in client.job(second.id).attempts][:1] == ["preempted"]
        assert (client.job(first.id).state.value, len(client.job(first.id).attempts)) == ("running", 1)
        classes = {pod["spec"]["priorityClassName"], *(one["spec"]["priorityClassName"] for one in workers(portal))}
        assert classes == {"makeway-makeway-guaranteed", "makeway-makeway-preemptible"}
        assert {one["spec"]["containers"][0]["image"] for one in workers(portal)} == {OTHER_IMAGE}


@pytest.mark.covers("N07", "F24")
def test_a_notebook_saves_when_it_is_stopped_and_holds_its_gpu_meanwhile(portal: Portal) -> None:
    bo = portal.person("bo")
    bo.started(BOS)
    assert run(bo, SAVE) == "ready\n"
    session = bo.session()
    bo.hub("DELETE", "/users/bo/server")
    with bo.client() as client:

        def saved() -> bool:
            """Whether the notebook has saved; before, its lease lasts."""
            ended = client.session(session.id).state.ended
            there = (portal.volume("home-bo") / "saved").exists()
            assert there or not ended
            return there

        wait_until(saved, "the notebook has saved")
        wait_until(lambda: client.session(session.id).state.ended, "the lease has ended")
        assert not portal.runs(session)
    assert bo.told() == ""
    with portal.person("ana").client() as client:
        for job in client.jobs(mine=True).jobs:
            if len(job.attempts) > 1:
                wait_until(lambda job=job: "goes on" in client.logs(job.id).text, "the job resumes", STARTED)


@pytest.mark.covers("F25")
def test_guaranteed_notebooks_keep_their_gpus_whatever_jobs_are_submitted(portal: Portal) -> None:
    portal.clean()
    people = {portal.person("ana"): "rnd", portal.person("bo"): "devops"}
    kept = {}
    for person, team in people.items():
        kept[person] = person.started({"profile": "gpu1", "team": team})["metadata"]["uid"]
        wait_until(lambda person=person: person.session().phase == "running", "the service knows that it runs")
        assert not person.session().preemptible
    jobs = {person: [submit_urgent(person, team) for _ in range(2)] for person, team in people.items()}
    for person, ids in jobs.items():
        with person.client() as client:
            for job in map(client.job, ids):
                assert (job.state.value, job.attempts) == ("pending", [])
                assert job.reason
                assert "GPU" in job.reason.message
    assert not workers(portal)
    for person, pod in kept.items():
        assert person.notebook()["metadata"]["uid"] == pod
        assert (person.session().phase, person.session().notice) == ("running", None)
    ana, bo = people
    ana.stop()
    with ana.client() as client:
        wait_until(lambda: client.job(jobs[ana][0]).state.ended, "a job has the GPU that ana gave back", STARTED)
        assert client.job(jobs[ana][0]).state.value == "succeeded"
    assert (bo.notebook()["metadata"]["uid"], bo.session().phase) == (kept[bo], "running")


def submit_urgent(person: Person, team: str) -> str:
    """Submit a job of the highest priority and return its id."""
    request = JobRequest(command=["true"], profile="gpu1", team=team, priority=Priority.HIGH)
    with person.client() as client:
        return str(client.submit(request).id)


def runs(portal: Portal, person: Person) -> bool:
    """Whether a notebook's pod of this person runs."""
    pods = portal.api.items(PODS, labelSelector=f"hub.jupyter.org/username={person.name}")
    return any(pod["status"]["phase"] == "Running" for pod in pods)


def run(person: Person, cell: str) -> str:
    """Run a cell in a new kernel of a person's notebook and return what it prints."""
    base = f"{person.portal.url}/user/{person.name}"
    token = person.hub("POST", f"/users/{person.name}/tokens", json={"note": "kernel"}).json()["token"]
    headers = {"Authorization": f"token {token}"}
    answer = person.browser.post(f"{base}/api/kernels", json={}, headers=headers)
    assert answer.status_code == 201, answer.text
    address = f"{base}/api/kernels/{answer.json()['id']}/channels".replace("http", "ws", 1)
    socket = websocket.create_connection(address, header=headers, timeout=STARTED)
    try:
        return execute(socket, cell)
    finally:
        socket.close()


def restart(portal: Portal, part: str) -> None:
    """Kill the process of one part of the portal, and wait until that part answers again."""
    pod = portal.pod(part)
    kill(pod)
    wait_until(lambda: times_started(portal.pod(part)) > times_started(pod), f"the {part} is started again", STARTED)
    wait_until_ready(portal.cluster)
    wait_until(portal.answers, "the Hub and the service answer through the proxy", STARTED, pause=0.5)


def times_started(pod: Object) -> int:
    """Return how often the container of a pod was started again."""
    (status,) = pod["status"]["containerStatuses"]
    return int(status["restartCount"])


def workers(portal: Portal) -> list[Object]:
    """Return the pods of jobs."""
    return portal.api.items(WORKERS)


def job(name: str) -> JobRequest:
    """Return a job that saves when the test allows it."""
    return JobRequest(name=name, command=["python3", "-u", "-c", TRAIN], profile="slow", image="other")
