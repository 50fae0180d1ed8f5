"""Two replicas of the chart's service, people who work with them, and the faults that one of the replicas has."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import Counter
from contextlib import suppress

import httpx2
from charts import JOBS, Object
from makeway_api.client import Client
from makeway_api.errors import MakewayError
from makeway_api.models import Job, JobRequest, State
from pod_faults import PodProcesses
from pods import wait_until
from portals import CHECKPOINTS, PODS, STARTED, WORKERS, Person, Portal
from replicated import address_of, endpoints

DEADLINE = 6.0
"""MAKEWAY_LEADER_SECONDS, as the chart leaves it."""
KINDS = (
    "cut off from the API server",
    "frozen",
    "deleted at once",
    "cut off from PostgreSQL",
    "killed",
    "cut off from both",
    "deleted",
    "stopped",
    "cut off from everything",
)
GPUS = 2
"""How many the node of the tests has; one is reserved for each team."""
PROBE = JobRequest(name="probe", profile="probe", command=["true"])
WORK = """
import fcntl, os, pathlib, signal, sys, time
place = pathlib.Path(os.environ["MAKEWAY_CHECKPOINT_DIR"])
place.mkdir(exist_ok=True)
me = os.environ["MAKEWAY_JOB_NAME"] + " " + os.environ["MAKEWAY_ATTEMPT"]
def note(what):
    with open(place / "book", "a") as book:
        book.write(f"{me} {what}\\n")
saved = place / "saved"
done = float(saved.read_text()) if saved.exists() else 0.0
if done >= float(sys.argv[1]):  # it ended when it was asked to make way
    sys.exit()
lock = open(place / "lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    note("meets-another")
leaving = []
signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
note("begins")
while done < float(sys.argv[1]):
    time.sleep(0.1)
    done += 0.1
    if leaving:
        saved.write_text(str(done))
        note("makes-way")
        sys.exit(75)
saved.write_text(str(done))
note("ends")
"""
"""Works for some seconds over all attempts, and keeps a book of what it meets."""


def lines_of(portal: Portal, jobs: list[Job]) -> Counter[str]:
    """Return the lines that the attempts of jobs wrote, as `ana-1 2 makes-way`, and how often each is there."""
    places = [portal.volume(CHECKPOINTS, JOBS) / job.id / "book" for job in jobs]
    return Counter(line for book in places if book.exists() for line in book.read_text("utf-8").splitlines())


class Submitter(threading.Thread):
    """A person who keeps a few jobs in the queue, through the proxy, and remembers those that were acknowledged."""

    def __init__(self, portal: Portal, name: str, seed: int, at_once: int, seconds: tuple[float, float]) -> None:
        super().__init__(name=name)
        self.client = portal.person(name).client()
        self.acknowledged: dict[str, str] = {}
        """the names of jobs by id"""
        self.failures: Counter[str] = Counter()
        """requests that failed, with all repetitions of the client"""
        self.at_once = at_once
        """how many jobs there are in the queue"""
        self._seconds = seconds
        self._prefix = f"{name}-{secrets.token_hex(3)}-"
        self._chance = random.Random(f"{seed} {name}")
        self._ending = threading.Event()

    def run(self) -> None:
        """Submit jobs until stopped; a request that fails is repeated."""
        number = 0
        while not self._ending.wait(self._chance.uniform(0.2, 1.5)):
            try:
                result = self.client.jobs(mine=True, limit=200).jobs
                if sum(not job.state.ended for job in result if job.name.startswith(self._prefix)) >= self.at_once:
                    continue
                name = f"{self._prefix}{number}"
                known = [job for job in result if job.name == name]
                job = known[0] if known else self._submit(name)
                self.acknowledged[job.id] = name
                number += 1
            except MakewayError as error:
                self.failures[f"{error.code} {error.status}"] += 1

    def _submit(self, name: str) -> Job:
        command = ["python3", "-u", "-c", WORK, f"{self._chance.uniform(*self._seconds):.1f}"]
        job = self.client.submit(JobRequest(name=name, profile="gpu1", command=command))
        assert isinstance(job, Job)
        return job

    def stop(self) -> None:
        """Submit no more."""
        self._ending.set()
        self.join()

    def states(self) -> list[State]:
        """Return the states of all jobs."""
        return [job.state for job in self._all()]

    def made_way(self) -> int:
        """Return how often jobs made way, or are about to."""
        return sum(job.preemptions + (job.state is State.CHECKPOINTING) for job in self._all())

    def ended(self) -> list[Job]:
        """Return all jobs that were submitted here, once they have ended, and close the client."""
        result: list[Job] = []

        def done() -> bool:
            with suppress(MakewayError):
                result[:] = [job for job in self._all() if job.name.startswith(self._prefix)]
                return all(job.state.ended for job in result)
            return False

        with self.client:
            wait_until(done, f"all jobs of {self.name} have ended", STARTED, pause=0.5)
            return [self.client.job(job.id) for job in result]

    def _all(self) -> list[Job]:
        page = self.client.jobs(mine=True, limit=200)
        result = list(page.jobs)
        while page.next:
            page = self.client.jobs(mine=True, limit=200, cursor=page.next)
            result += page.jobs
        return result


def claim(borrower: Submitter, owner: Submitter) -> None:
    """Fill all GPUs with borrowed work, and submit jobs of the owner from then on until a borrowed one makes way."""

    def lent() -> bool:
        with suppress(MakewayError):
            return sum(state in (State.STARTING, State.RUNNING) for state in borrower.states()) == GPUS
        return False

    def reclaimed() -> bool:
        with suppress(MakewayError):
            return borrower.made_way() > before
        return False

    owner.at_once = 0
    wait_until(lent, f"jobs of {borrower.name} have all GPUs", STARTED, pause=0.2)
    before = borrower.made_way()
    owner.at_once = 1
    wait_until(reclaimed, f"a job of {borrower.name} makes way", STARTED, pause=0.2)


class Follower(threading.Thread):
    """A notebook's widget: it follows the events, and goes on behind the last one whenever the stream ends."""

    def __init__(self, person: Person) -> None:
        super().__init__(daemon=True)
        self.streams = 0
        self.jobs: set[str] = set()
        self.missed = False
        self._person, self._client = person, person.client()
        self._ending = threading.Event()

    def run(self) -> None:
        """Follow until stopped."""
        last: int | None = None
        with self._client:
            while not self._ending.is_set():
                with suppress(MakewayError):
                    self.streams += 1
                    for event in self._client.events(last):
                        last = event.id
                        self.missed |= event.kind == "reset"
                        self.jobs |= {str(event.data["id"])} if event.kind == "job" else set()
                        if self._ending.is_set():
                            break
                time.sleep(0.1)

    def stop(self) -> None:
        """Follow no more, after the event of a job."""
        self._ending.set()
        with self._person.client() as client:
            client.submit(PROBE)
        self.join()


class Pair:
    """The two replicas, and what was measured of them."""

    def __init__(self, portal: Portal, seed: int) -> None:
        self.portal = portal
        with portal.person("ana").client() as client:
            self._token = client.token
        self._chance = random.Random(seed)
        server = portal.api.get("/api/v1/namespaces/default/services/kubernetes")["spec"]
        self._api_server = (server["clusterIP"], server["ports"][0]["port"])
        self._database = (address_of(portal), 5432)
        self._metrics = {"Authorization": f"Bearer {portal.release.secret()['metrics-token']}"}
        self.takeovers: list[tuple[float, str]] = []
        self.others: list[float] = []
        self.withdrawn: list[float] = []
        """seconds until a replica that is frozen got no requests any more"""
        self._kinds: list[str] = []

    def replicas(self) -> list[PodProcesses]:
        """Return both replicas, the leader first, once both are ready and one of them leads."""
        result: list[PodProcesses] = []

        def ready() -> bool:
            pods = self.portal.pods("service")
            if len(pods) != 2 or not all(map(is_ready, pods)):
                return False
            leading = [self.leads(str(pod["status"]["podIP"])) for pod in pods]
            if None not in leading and leading.count(True) == 1:
                in_order = pods if leading[0] else pods[::-1]
                result[:] = [PodProcesses(self.portal.cluster, pod) for pod in in_order]
            return bool(result)

        wait_until(ready, "two replicas are ready, and one leads", STARTED, pause=0.2)
        return result

    def leads(self, address: str) -> bool | None:
        """Whether the replica at this address leads; None where it does not answer."""
        try:
            result = httpx2.get(f"http://{address}:8765/metrics", headers=self._metrics, timeout=5)
        except httpx2.HTTPError:
            return None
        return "\nmakeway_leader 1.0" in result.text

    def harm(self) -> None:
        """Harm one replica, mostly the leader, and wait until the other one starts a job; then mend it."""
        leader, follower = self.replicas()
        self._kinds = self._kinds or list(KINDS if not self.takeovers else self._chance.sample(KINDS, len(KINDS)))
        kind = self._kinds.pop(0)
        of_leader = not self.takeovers or self._chance.random() < 0.7
        victim, other = (leader, follower) if of_leader else (follower, leader)
        who = "leader" if of_leader else "follower"
        print(f"the {who} {victim.name} is {kind}", end="", flush=True)
        time.sleep(self._chance.uniform(0.0, 2.0))
        again = restarts(self.portal.api.get(f"{PODS}/{victim.name}"))
        self._do(kind, victim)
        began = time.monotonic()
        took = self._starts_a_job(other, began, victim.name if kind.startswith("deleted") else "")
        if of_leader:
            self.takeovers.append((took, kind))
        else:
            self.others.append(took)
        print(f": the other one starts a job after {took:.1f} s", flush=True)
        if kind in ("frozen", "stopped"):
            wait_until(lambda: victim.address not in endpoints(self.portal), "it gets no requests any more")
            self.withdrawn.append(time.monotonic() - began)
        if kind.startswith(("cut", "frozen", "stopped")):
            time.sleep(max(0.0, DEADLINE + self._chance.uniform(0.5, 4.0) - (time.monotonic() - began)))
        self._undo(kind, victim)
        if kind == "killed" and again:  # the kubelet would wait longer each time before it starts the container again
            self.portal.api.delete(f"{PODS}/{victim.name}", gracePeriodSeconds="0")
        for replica in (leader, follower):
            replica.close()

    def _do(self, kind: str, victim: PodProcesses) -> None:
        if kind == "killed":
            victim.kill()
        elif kind == "frozen":
            victim.freeze()
        elif kind == "stopped":
            victim.stop()
        elif kind.startswith("deleted"):
            grace = {"gracePeriodSeconds": "0"} if kind == "deleted at once" else {}
            self.portal.api.delete(f"{PODS}/{victim.name}", **grace)
            wait_until(lambda: not victim.pids(), "the kubelet has ended the container", pause=0.01)
        else:
            places = {
                "cut off from PostgreSQL": [self._database],
                "cut off from the API server": [self._api_server],
                "cut off from both": [self._database, self._api_server],
                "cut off from everything": [],
            }
            victim.cut(*places[kind])

    def _undo(self, kind: str, victim: PodProcesses) -> None:
        if kind == "frozen":
            victim.thaw()
        elif kind == "stopped":
            victim.go_on()
        elif kind.startswith("cut"):
            victim.mend()

    def _starts_a_job(self, replica: PodProcesses, began: float, deleted: str) -> float:
        """Return the seconds until this replica leads, and there is a pod of a job that is submitted to it now.

        The replica that takes the place of a `deleted` one may lead as well: it starts while that one still answers.
        """
        job: Job | None = None

        def leads() -> bool:
            if not deleted:
                return bool(self.leads(replica.address))
            pods = [pod["status"] for pod in self.portal.pods("service") if pod["metadata"]["name"] != deleted]
            return any(self.leads(status["podIP"]) for status in pods if "podIP" in status)

        def started() -> bool:
            nonlocal job
            with suppress(MakewayError):
                job = job or client.submit(PROBE)
            pods = job and self.portal.api.items(WORKERS, labelSelector=f"makeway/job={job.id}")
            return bool(pods) and leads()

        with Client(f"http://{replica.address}:8765/services/makeway", self._token) as client:
            try:
                wait_until(started, f"{replica.name} leads and starts {PROBE.name}", 120)
            except TimeoutError as late:
                message = f"{late} ({job and job.id})\n{self.portal.log(replica.name)}"
                raise TimeoutError(message) from late
        return time.monotonic() - began


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready."""
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))


def restarts(pod: Object) -> int:
    """Return how often the container of a pod was started again."""
    return int(pod["status"]["containerStatuses"][0]["restartCount"])
