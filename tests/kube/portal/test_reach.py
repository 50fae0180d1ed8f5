"""What the pods of jobs and notebooks can reach, tried from inside of them: their own, and nothing of anyone else."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from charts import JOBS, NAMESPACE, Object
from makeway_api.models import Job, JobRequest
from makeway_quota.backends.kubernetes.pods.manifest import token_key, token_secret_of
from pods import PODS as OUTSIDE
from pods import phase, wait_until
from portals import CHECKPOINTS, PODS, STARTED, WORKERS, Portal
from probing import (
    LISTEN,
    METADATA,
    PROBE,
    REFUSED,
    Answers,
    address_of_machine,
    address_of_node,
    in_pod,
    metadata_server,
    on_node,
    output_in_pod,
)
from releases import safe_pod

from kube_cluster.images import host_pod

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

SERVICE = "http://makeway-service.makeway.svc:8765"
API = f"{SERVICE}/services/makeway/api/v1"
HUB = "http://makeway-hub.makeway.svc:8081/hub/api"
PROXY = "http://makeway-proxy.makeway.svc"
GANG = """
import os, socket, time
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(("", place[1])) as listening:
        while True:
            listening.accept()[0].sendall(b"met")
while True:
    try:
        print(socket.create_connection(place, 5).recv(3).decode(), flush=True)
        time.sleep(3600)
    except OSError:
        time.sleep(0.2)
"""
CURIOUS = f"""{PROBE}
import pathlib, time

own = pathlib.Path(os.environ["MAKEWAY_CHECKPOINT_DIR"])

def read(path):
    try:
        return pathlib.Path(path).read_bytes().decode(errors="replace")
    except OSError as problem:
        return problem.strerror

seen = {{
    "environment": dict(os.environ),
    "environment of the first process": read("/proc/1/environ"),
    "memory of the first process": read("/proc/1/mem"),
    "checkpoints": os.listdir(own.parent),
    "tokens of the API server": os.path.exists("/var/run/secrets/kubernetes.io"),
}}
while not (own / "questions.json").exists():
    time.sleep(0.1)
seen["answers"] = answers(json.loads((own / "questions.json").read_text()))
(own / "seen.json").write_text(json.dumps(seen))
while not (own / "end").exists():
    time.sleep(0.1)
"""


PROFILES = """\
  - {name: pair, gpus: 1, workers: 2, cpu: 0.1, memory: 256Mi, pools: [gpu], kinds: [job]}
  - {name: small, gpus: 0, cpu: 0.1, memory: 512Mi, pools: [gpu], kinds: [session, job]}
policies:
"""
"""What the policy of the page has no profile for."""


@dataclass(slots=True)
class Reach:
    """Ana's job and notebook, which try, those of bo, and what the former found."""

    portal: Portal
    job: Job
    token: str
    """of ana's job, as the attempt API takes it"""
    other: Job
    """of bo: a gang of two"""
    targets: dict[str, str]
    """addresses of what ana's job has no business with"""
    seen: dict[str, Any]
    """what her job found out, with the answers to the questions"""
    notebook: Answers
    """what her notebook was answered"""


def place(job: str, worker: int = 0, attempt: int = 1) -> str:
    """Return the address of a worker in the attempt API."""
    return f"{API}/attempts/{job}/{attempt}/{worker}"


def worker(portal: Portal, job: str, number: int = 0) -> Object:
    """Return the pod of a worker."""
    return portal.api.get(f"{WORKERS}/makeway-{job}-1-{number}")


def first_token(portal: Portal, job: str) -> str:
    """Return the token with which the first worker of a job began, as only an administrator can read it."""
    return base64.b64decode(secret_of(portal, job)["data"][token_key(job, 1, 0)]).decode()


def secret_of(portal: Portal, job: str) -> Object:
    """Return the Secret that the first worker of a job takes its token from."""
    return portal.api.get(f"/api/v1/namespaces/{JOBS}/secrets/{token_secret_of(worker(portal, job))}")


def database() -> Object:
    """Return a pod like that of a PostgreSQL in the release's namespace."""
    pod = safe_pod("postgres", app="postgres")
    (container,) = pod["spec"]["containers"]
    container |= {"image": "makeway.test/quota-service:1", "command": ["python3", "-c", LISTEN, "", "5432"]}
    container["securityContext"]["runAsUser"] = 10001
    pod["spec"] |= {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 0}
    return pod


@pytest.fixture(scope="module")
def reach(portal: Portal) -> Iterator[Reach]:
    """Start what ana and bo run, and let hers try; afterwards it is stopped."""
    api = portal.api
    ana, bo = portal.person("ana"), portal.person("bo")
    with ExitStack() as ending, ana.client() as hers, bo.client() as his:
        ending.enter_context(more_profiles(portal))
        ending.callback(portal.clean)
        for path, pod in ((PODS, database()), (OUTSIDE, host_pod("outside", ["sleep", "infinity"]))):
            api.create(path, pod)
            ending.callback(api.delete, f"{path}/{pod['metadata']['name']}", gracePeriodSeconds="0")
        ending.enter_context(metadata_server(portal.cluster))
        for person, team in ((ana, "rnd"), (bo, "devops")):
            person.begin({"profile": "small", "team": team})
        mine = hers.submit(JobRequest(name="curious", profile="small", command=["python3", "-u", "-c", CURIOUS]))
        other = his.submit(JobRequest(name="bos-own", profile="pair", command=["python3", "-u", "-c", GANG]))
        notebooks = [person.wait() for person in (ana, bo)]
        folder = portal.volume(CHECKPOINTS, JOBS) / mine.id
        for true, what in (
            (lambda: his.job(other.id).attempts and "met" in his.logs(other.id).text, "bo's gang has met"),
            (folder.exists, "ana's job has its folder"),
            (lambda: phase(api, "postgres", PODS) == "Running", "the database runs"),
            (lambda: phase(api, "outside") == "Running", "the pod outside runs"),
        ):
            wait_until(true, what, STARTED)
        targets = targets_of(portal, notebooks[1], worker(portal, other.id))
        token = first_token(portal, mine.id)
        questions = job_questions(mine, other, token) | {name: {"to": to} for name, to in targets.items()}
        ask = folder / "questions.new"
        ask.write_text(json.dumps(questions), encoding="utf-8")
        ask.rename(folder / "questions.json")
        wait_until((folder / "seen.json").exists, "ana's job has tried everything", STARTED)
        wait_until(lambda: (folder / "seen.json").read_text(encoding="utf-8").endswith("}"), "and told it")
        name = notebooks[0]["metadata"]["name"]
        own = {one["name"]: one.get("value", "") for one in notebooks[0]["spec"]["containers"][0]["env"]}
        yield Reach(
            portal,
            mine,
            token,
            other,
            targets,
            json.loads((folder / "seen.json").read_text(encoding="utf-8")),
            in_pod(portal.cluster, NAMESPACE, name, notebook_questions(other, f"token {own['JUPYTERHUB_API_TOKEN']}")),
        )


@contextmanager
def more_profiles(portal: Portal) -> Iterator[None]:
    """Add the profiles that these tests need to the policy until the end of the block."""
    with portal.person("admin").client() as client:
        before = client.policy().document
        client.policy_apply(before.replace("policies:\n", PROFILES), "for a test")
    try:
        yield
    finally:
        with portal.person("admin").client() as client:
            client.policy_apply(before, "as before")


def targets_of(portal: Portal, notebook: Object, gang: Object) -> dict[str, str]:
    """Return what pods of jobs have no business with, by name."""
    part = {name: portal.pod(name)["status"]["podIP"] for name in ("hub", "proxy")}
    return {
        "bo's notebook": f"{notebook['status']['podIP']}:8888",
        "bo's gang": f"{gang['status']['podIP']}:29500",
        "hub": f"{part['hub']}:8081",
        "hub by its service": "makeway-hub.makeway.svc:8081",
        "proxy": f"{part['proxy']}:8000",
        "proxy's API": f"{part['proxy']}:8001",
        "PostgreSQL": f"{portal.api.get(f'{PODS}/postgres')['status']['podIP']}:5432",
        "kubelet": f"{address_of_node(portal.cluster)}:10250",
        "API server": "kubernetes.default.svc:443",
        "API server by its address": f"{address_of_machine(portal.cluster)}:6443",
        "metadata": f"{METADATA}:80",
    }


READS = ("me", "jobs", "usage", "decisions", "sessions", "offers", "policies", "policy", "pools", "retention")


def job_questions(mine: Job, other: Job, token: str) -> dict[str, dict[str, Any]]:
    """Return what ana's job asks of the service."""
    forms = {"bearer": f"Bearer {token}", "token": f"token {token}", "nothing": "", "invented": "Bearer invented"}
    asked: dict[str, dict[str, Any]] = {"own": {"url": f"{place(mine.id)}/orders", "token": forms["bearer"]}}
    others = {
        "other worker": f"{place(mine.id, 1)}/orders",
        "other attempt": f"{place(mine.id, attempt=2)}/orders",
        "bo's attempt": f"{place(other.id)}/orders",
        "bo's files": f"{place(other.id)}/files/{'0' * 64}",
        "bo's job": f"{API}/jobs/{other.id}",
        "bo's log": f"{API}/jobs/{other.id}/logs",
        "metrics": f"{SERVICE}/metrics",
        "metrics below the prefix": f"{SERVICE}/services/makeway/metrics",
        **{f"API {name}": f"{API}/{name}" for name in READS},
    }
    changes: dict[str, dict[str, Any]] = {
        "claim bo's": {"url": f"{place(other.id)}/claim", "body": {"instance": "x"}},
        "report for bo's": {"url": f"{place(other.id)}/report", "body": {"phase": "ended", "exit_code": 0}},
        "write bo's log": {"url": f"{place(other.id)}/outputs/log?offset=0", "body": "forged"},
        "cancel bo's": {"url": f"{API}/jobs/{other.id}/cancel", "body": {}},
        "submit": {"url": f"{API}/jobs", "body": {"name": "x", "profile": "gpu1", "command": ["true"]}},
        "lease": {"url": f"{API}/sessions", "body": {"user": "bo", "server": "", "profile": "small"}},
    }
    for form, sent in forms.items():
        asked |= {f"{name}, {form}": {"url": url, "token": sent} for name, url in others.items()}
        asked |= {f"{name}, {form}": {"method": "POST", "token": sent, **ask} for name, ask in changes.items()}
        policy = {"url": f"{API}/policy", "method": "PUT", "body": {"document": "version: 1"}, "token": sent}
        asked[f"change policy, {form}"] = policy
    asked["own attempt, nothing"] = {"url": f"{place(mine.id)}/orders"}
    asked["page, nothing"] = {"url": f"{SERVICE}/services/makeway/"}
    return asked | {f"probe {name}": {"url": f"{SERVICE}/{name}"} for name in ("healthz", "readyz")}


def notebook_questions(other: Job, token: str) -> dict[str, dict[str, Any]]:
    """Return what ana's notebook asks with its own token."""
    api = f"{PROXY}/services/makeway/api/v1"
    urls = {
        "own jobs": f"{api}/jobs",
        "own name": f"{HUB}/user",
        "bo's job": f"{api}/jobs/{other.id}",
        "bo's log": f"{api}/jobs/{other.id}/logs",
        "bo's attempt": f"{api}/attempts/{other.id}/1/0/orders",
        "bo's notebook": f"{PROXY}/user/bo/api/contents",
        "metrics": f"{PROXY}/services/makeway/metrics",
        "bo": f"{HUB}/users/bo",
        "all users": f"{HUB}/users",
        "routes": f"{HUB}/proxy",
        "the Hub's metrics": f"{HUB.removesuffix('/api')}/metrics",
    }
    posts: dict[str, tuple[str, Any]] = {
        "cancel bo's": (f"{api}/jobs/{other.id}/cancel", {}),
        "lease for bo": (f"{api}/sessions", {"user": "bo", "server": "", "profile": "small"}),
        "token of bo": (f"{HUB}/users/bo/tokens", {}),
        "bo's server": (f"{HUB}/users/bo/server", {}),
    }
    asked: dict[str, dict[str, Any]] = {name: {"url": url, "token": token} for name, url in urls.items()}
    asked |= {name: {"url": url, "method": "POST", "body": body, "token": token} for name, (url, body) in posts.items()}
    asked["policy"] = {"url": f"{api}/policy", "method": "PUT", "body": {"document": "version: 1"}, "token": token}
    return asked


def is_data(answer: dict[str, Any], reach: Reach) -> bool:
    """Whether an answer is anything but a refusal that tells nothing of others."""
    refused = answer.get("status") in (401, 403, 404)
    return not refused or any(word in answer["text"] for word in ("bos-own", "devops", "makeway_gpus", reach.token))


def test_all_of_it_answers_where_no_policy_is_in_the_way(reach: Reach) -> None:
    everything = {name: {"to": to} for name, to in reach.targets.items() if not name.endswith("svc")}
    addresses = {name: ask for name, ask in everything.items() if "svc" not in ask["to"]}
    assert on_node(reach.portal.cluster, addresses) == {key: {"open": True} for key in addresses}
    open_to_all = ("PostgreSQL", "kubelet", "API server", "API server by its address", "proxy", "metadata")
    wanted = {name: everything[name] for name in open_to_all} | {"answer": {"url": f"http://{METADATA}/"}}
    result = in_pod(reach.portal.cluster, "default", "outside", wanted)
    assert result.pop("answer") == {"status": 200, "text": "secrets of the machine"}
    assert result == {key: {"open": True} for key in open_to_all}


def test_a_jobs_token_opens_its_own_attempt(reach: Reach) -> None:
    answer = reach.seen["answers"]["own"]
    assert answer["status"] == 200, answer
    assert "notice" in json.loads(answer["text"])


def test_a_job_gets_nothing_else_from_the_service_with_its_token_or_without(reach: Reach) -> None:
    asked = {name: one for name, one in reach.seen["answers"].items() if ", " in name and not name.startswith("page")}
    assert len(asked) > 80
    assert {name: one for name, one in asked.items() if is_data(one, reach)} == {}
    page = reach.seen["answers"]["page, nothing"]
    assert (page["status"], page["text"]) == (302, "")


def test_the_probes_tell_nothing_about_anyone(reach: Reach) -> None:
    ready = {"database": "writes", "files": "available", "loop": "decides", "backend": "observed"}
    for name, checks in (("healthz", {"process": "answers"}), ("readyz", ready)):
        answer = reach.seen["answers"][f"probe {name}"]
        assert (answer["status"], json.loads(answer["text"])) == (200, {"ok": True, "checks": checks})


def test_a_job_reaches_the_service_and_nothing_else(reach: Reach) -> None:
    result = {name: reach.seen["answers"][name] for name in reach.targets}
    assert result == {key: {"problem": REFUSED} for key in reach.targets}


def test_a_job_sees_no_token_and_no_checkpoints_of_others(reach: Reach) -> None:
    seen = reach.seen
    assert seen["checkpoints"] == [reach.job.id]
    assert (reach.portal.volume(CHECKPOINTS, JOBS) / reach.other.id).is_dir(), "bo's are in the same volume"
    assert not seen["tokens of the API server"]
    assert "MAKEWAY_ATTEMPT_TOKEN" not in seen["environment"]
    assert seen["environment of the first process"] == seen["memory of the first process"] == "Permission denied"
    for value in (reach.token, first_token(reach.portal, reach.other.id)):
        assert value not in json.dumps({key: one for key, one in seen.items() if key != "answers"})


def test_tokens_are_in_no_pod_and_go_with_their_attempt(reach: Reach) -> None:
    pods = reach.portal.api.items(WORKERS)
    assert len(pods) == 3
    for job in (reach.job, reach.other):
        assert first_token(reach.portal, job.id) not in json.dumps(pods)
        owners = {owner["uid"] for owner in secret_of(reach.portal, job.id)["metadata"]["ownerReferences"]}
        assert worker(reach.portal, job.id)["metadata"]["uid"] in owners
        assert owners <= {pod["metadata"]["uid"] for pod in pods}


def test_a_notebook_reaches_its_own_and_nothing_of_others_with_its_token(reach: Reach) -> None:
    result = dict(reach.notebook)
    jobs, name = result.pop("own jobs"), result.pop("own name")
    assert (jobs["status"], name["status"]) == (200, 200)
    assert reach.job.id in jobs["text"]
    assert reach.other.id not in jobs["text"]
    assert json.loads(name["text"])["name"] == "ana"
    assert {key: one for key, one in result.items() if is_data(one, reach)} == {}


def test_a_notebook_reaches_hub_and_proxy_only(reach: Reach) -> None:
    notebook = reach.portal.person("ana").notebook()["metadata"]["name"]
    allowed = {"hub", "hub by its service", "proxy"}
    wanted = {name: {"to": to} for name, to in reach.targets.items()}
    wanted["service"] = {"to": "makeway-service.makeway.svc:8765"}
    wanted["own job"] = {"to": f"{worker(reach.portal, reach.job.id)['status']['podIP']}:8888"}
    result = in_pod(reach.portal.cluster, NAMESPACE, notebook, wanted)
    assert {name for name, answer in result.items() if answer == {"open": True}} == allowed
    assert {answer.get("problem") for name, answer in result.items() if name not in allowed} == {REFUSED}
    look = "import os; print(os.path.exists('/var/run/secrets/kubernetes.io'))"
    assert output_in_pod(reach.portal.cluster, NAMESPACE, notebook, look) == "False\n"


def test_prometheus_reads_the_metrics_with_the_token_of_the_secret(reach: Reach) -> None:
    api = reach.portal.api
    pods = "/api/v1/namespaces/monitoring/pods"
    api.create("/api/v1/namespaces", {"metadata": {"name": "monitoring"}})
    try:
        account = "/api/v1/namespaces/monitoring/serviceaccounts"
        wait_until(lambda: api.items(account), "the namespace has its service account")
        api.create(pods, host_pod("prometheus", ["sleep", "infinity"]))
        wait_until(lambda: phase(api, "prometheus", pods) == "Running", "Prometheus runs")
        token = f"Bearer {reach.portal.release.secret()['metrics-token']}"
        wanted = {"with": {"url": f"{SERVICE}/metrics", "token": token}, "without": {"url": f"{SERVICE}/metrics"}}
        result = in_pod(reach.portal.cluster, "monitoring", "prometheus", wanted)
        assert result["with"]["status"] == 200
        assert "makeway_team_gpus" in result["with"]["text"]
        assert is_data(result["with"], reach)
        assert result["without"]["status"] == 401
    finally:
        api.delete("/api/v1/namespaces/monitoring")


def test_a_template_that_asks_for_privilege_is_refused_in_words_to_the_administrator(reach: Reach) -> None:
    with reach.portal.person("admin").client() as client:
        document = client.policy().document
        security = "pod: {spec: {containers: [{name: worker, securityContext: {privileged: true}}]}}"
        wrong = document.replace("{name: gpu1,", f"{{name: gpu1, {security},")
        assert wrong != document
        check = client.policy_validate(wrong)
    assert not check.ok
    assert "the restricted pod security standard forbids it" in check.issues[0].message


def test_the_token_of_an_ended_attempt_is_refused(reach: Reach) -> None:
    url = f"{reach.portal.url}/services/makeway/api/v1/attempts/{reach.job.id}/1/0/orders"
    headers = {"Authorization": f"Bearer {reach.token}"}
    assert httpx2.get(url, headers=headers).status_code == 200
    (reach.portal.volume(CHECKPOINTS, JOBS) / reach.job.id / "end").touch()
    with reach.portal.person("ana").client() as client:
        wait_until(lambda: client.job(reach.job.id).state.ended, "ana's job has ended")
    answer = httpx2.get(url, headers=headers)
    assert answer.status_code == 410, answer.text
