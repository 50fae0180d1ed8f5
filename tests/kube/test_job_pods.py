"""Jobs run as pods of a real cluster: admitted as *restricted*, noticed, resumed, and told apart when they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from informing import client
from job_service import JOBS, NAMESPACE, PODS, RUN_AS, Serving, make_namespace, training, weights
from makeway_api.models import Job, JobRequest
from makeway_quota.backends.base import StartOrder
from makeway_quota.backends.kubernetes.api.client import ApiClient, ApiStatusError, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.attempts.pod_waits import MAX_WAIT_SECONDS
from makeway_quota.backends.kubernetes.pods.manifest import PodSettings, WorkerResources, worker_pod
from makeway_quota.main import main
from makeway_quota.values import Place

from kube_cluster.api import GPU
from kube_cluster.cluster import Cluster
from kube_cluster.host_volumes import make_claim
from kube_cluster.images import EMPTY, HOST, empty
from kube_cluster.node import Node

pytestmark = pytest.mark.kube

SETTINGS = PodSettings(NAMESPACE, "here", "http://10.0.0.1:1/services/makeway", HOST, HOST)


@pytest.fixture(scope="module")
def cluster(control_plane: Cluster) -> Cluster:
    """The shared cluster with a namespace that admits restricted pods only."""
    make_namespace(control_plane)
    return control_plane


def order(workers: int = 1) -> StartOrder:
    places = tuple(Place("node-0", (0,), (1000,)) for _ in range(workers))
    return StartOrder("j-1", 1, "fit", "ana", "rnd", "gpu1", ("true",), {}, places, grace=30.0)


# -- admission


@pytest.mark.covers("F81")
@pytest.mark.parametrize("workers", [1, 2])
async def test_pods_of_jobs_pass_the_restricted_standard(cluster: Cluster, workers: int) -> None:
    template = {"spec": {"containers": [{"name": "beside", "image": HOST}], "volumes": [{"name": "x", "emptyDir": {}}]}}
    settings = replace(SETTINGS, checkpoint_claim="checkpoints-{team}")
    given = WorkerResources(GPU, 1, (), template)
    async with client(cluster) as api:
        sized = replace(order(workers), cpu=500, memory=256)
        pod = worker_pod(settings, sized, 0, "api/v1/attempts/j-1/1/0", "tokens", given)
        stored = await api.create(f"{PODS}?dryRun=All", pod)
        names = [one["name"] for one in stored["spec"]["containers"]]
        assert sorted(names) == ["beside", "worker"]
        mounts = [one["mountPath"] for c in stored["spec"]["containers"] for one in c.get("volumeMounts", ())]
        assert not [path for path in mounts if "serviceaccount" in path], "no token of the API server"
        assert not [one for one in stored["spec"]["tolerations"] if "tolerationSeconds" in one], "it outlives its node"


async def test_pods_beyond_the_restricted_standard_are_refused_there(cluster: Cluster) -> None:
    pod = worker_pod(SETTINGS, order(), 0, "api/v1/attempts/j-1/1/0", "tokens", WorkerResources())
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    async with client(cluster) as api:
        with pytest.raises(ApiStatusError, match="allowPrivilegeEscalation") as refused:
            await api.create(f"{PODS}?dryRun=All", pod)
    assert refused.value.status == 403


# -- jobs on the real node


async def event_of(serving: Serving, pod: Object, reason: str) -> Object:
    """Return the event of a pod with this reason, as `kubectl describe` finds it, once it is there."""
    result: list[Object] = []
    uid = pod["metadata"]["uid"]

    async def there() -> bool:
        path = f"/api/v1/namespaces/{NAMESPACE}/events"
        result[:] = serving.cluster.api.items(path, fieldSelector=f"involvedObject.uid={uid},reason={reason}")
        return bool(result)

    await serving.until(there, lambda: f"{pod['metadata']['name']} has the event {reason}")
    (one,) = result
    assert one["source"] == {"component": "makeway"}
    return one


@pytest.mark.covers("F81", "F84", "F42", "F47")
async def test_a_job_is_a_pod_makes_way_and_resumes(serving: Serving, real_node: Node) -> None:
    async with serving.running():
        calm = await training(serving, "ana", "calm", "0")
        await serving.reaches(calm, "succeeded")
        first = await training(serving, "ana", "first", "0.05")
        second = await training(serving, "ana", "second", "0.05")
        for job in (first, second):
            await serving.says(job, "step 100")
        pod = serving.cluster.api.get(f"{PODS}/makeway-{second.id}-1-0")
        assert pod["spec"]["nodeName"] == real_node.name
        assert pod["metadata"]["labels"]["cost"] == "12"
        assert pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
        owner = await serving.submit("bo", "owner", "sleep", "3")
        await serving.reaches(owner, "running", "succeeded")
        evicted = await serving.reaches(second, "starting", "running", "pending", attempt=1)
        assert evicted.preemptions == 1
        shown = serving.cluster.api.text(f"{PODS}/makeway-{first.id}-1-0/log", container="worker")
        assert "step 100" in shown, "people see it by kubectl, too"
        message = {decision.verb: decision.message for decision in await serving.client().job_events(second.id)}
        notice, made_way = [await event_of(serving, pod, reason) for reason in ("Notice", "MadeWay")]
        assert notice["message"].startswith(f"{message['evict']} It may save until ")
        assert made_way["message"] == message["requeue"]
        assert (await serving.reaches(first, "running", "succeeded")).preemptions == 0
        await serving.reaches(owner, "succeeded")
        done = await serving.reaches(second, "succeeded", "failed", attempt=2)
        assert [item.outcome for item in done.attempts] == ["preempted", "succeeded"], done
        assert done.attempts[0].checkpoint is not None
        step = done.attempts[0].checkpoint.step
        assert f"going on at step {step} of 400" in await serving.log(second, 2)
        assert weights(await serving.log(second, 2)) == weights(await serving.log(calm))
        await serving.no_pod_left()


READS_CLAIMS = [{"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get"]}]


@pytest.fixture
def homes(serving: Serving, tmp_path: Path) -> Path:
    """Make a home of ana that all nodes mount, and one of bo that only one node does; the service may read claims."""
    api, folder = serving.cluster.api, tmp_path / "homes"
    for user, mode in (("ana", "ReadWriteMany"), ("bo", "ReadWriteOnce")):
        home = folder / user / "files"
        home.mkdir(parents=True)
        (home / "data.txt").write_text(f"{user}'s data")
        for path in (home, home / "data.txt"):
            os.chown(path, *RUN_AS)
        make_claim(api, NAMESPACE, f"home-{user}", folder / user, mode)
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
    name = {"metadata": {"name": "makeway-homes"}}
    api.create(f"{rbac}/roles", {**name, "rules": READS_CLAIMS})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "makeway-homes"}
    account = {"kind": "ServiceAccount", "name": "makeway", "namespace": "default"}
    api.create(f"{rbac}/rolebindings", {**name, "roleRef": role, "subjects": [account]})
    serving.environ["MAKEWAY_KUBE_HOME_CLAIM"] = "home-{user}/files"
    return folder


async def test_a_job_has_its_owners_home_where_the_claim_allows_it_else_the_answer_says_so(
    serving: Serving, homes: Path
) -> None:
    async with serving.running():
        command = ("sh", "-c", "echo $HOME; cat ~/data.txt; echo done > ~/out.txt")
        job = await serving.submit("ana", "at home", *command)
        assert not [note for note in job.notes if "home" in note], job.notes
        await serving.reaches(job, "succeeded", "failed")
        assert await serving.log(job) == "/home/jovyan\nana's data"
        assert (homes / "ana/files/out.txt").read_text() == "done\n"
        job = await serving.submit("bo", "away", "sh", "-c", "echo $HOME")
        (note,) = [note for note in job.notes if "home" in note]
        assert note.startswith("The job does not see your home folder: the claim home-bo is ReadWriteOnce")
        request = JobRequest(command=["true"], profile="gpu1", dry_run=True, team="rnd")
        assert "there is no claim home-lea in the namespace jobs" in "".join(
            (await serving.client("lea").dry_run(request)).notes
        )
        await serving.reaches(job, "succeeded", "failed")
        assert await serving.log(job) == "/makeway/job\n"


async def test_the_jobs_of_a_team_have_its_volumes_and_those_of_others_do_not(
    serving: Serving, jobs_policy: str, tmp_path: Path
) -> None:
    folder = tmp_path / "teams" / "rnd"
    folder.mkdir(parents=True)
    (folder / "data.txt").write_text("of the team")
    make_claim(serving.cluster.api, NAMESPACE, "teams", tmp_path / "teams")
    document = json.loads(jobs_policy)
    volume = {"name": "data", "claim": "teams", "path": "/data", "sub_path": "rnd", "read_only": True}
    document["policies"][0]["volumes"] = [volume]
    Path(serving.environ["MAKEWAY_POLICY_FILE"]).write_text(json.dumps(document))
    async with serving.running():
        look = "cat /data/data.txt 2>/dev/null || echo none; touch /data/x 2>/dev/null && echo written"
        jobs = [await serving.submit(person, "looks", "sh", "-c", f"{look}; true") for person in ("ana", "bo")]
        for job in jobs:
            await serving.reaches(job, "succeeded", "failed")
        assert [await serving.log(job) for job in jobs] == ["of the team", "none\n"]


async def test_a_drained_pod_saves_and_its_job_goes_on(serving: Serving) -> None:
    async with serving.running() as service:
        job = await training(serving, "ana", "drained", "0.03")
        await serving.says(job, "step 100")
        name = f"makeway-{job.id}-1-0"
        metadata = {"name": name, "namespace": NAMESPACE}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        serving.cluster.api.create(f"{PODS}/{name}/eviction", eviction)
        done = await serving.reaches(job, "succeeded", "failed", attempt=2)
        assert (done.state.value, len(done.attempts)) == ("succeeded", 2), done
        assert done.attempts[0].checkpoint is not None
        assert f"going on at step {done.attempts[0].checkpoint.step} of 400" in await serving.log(job, 2)
        row = service.components.store.workload(job.id)
        assert row is not None
        assert row.infra_failures == 0, "however often nodes are drained"


async def test_the_first_failure_of_a_gang_ends_it(serving: Serving) -> None:
    code = "import os, sys, time; rank = int(os.environ['RANK']); print(rank, os.environ['WORLD_SIZE'], flush=True); "
    code += "time.sleep(3); sys.exit(3) if rank else time.sleep(600)"
    async with serving.running():
        job = await serving.submit("ana", "gang", "python3", "-c", code, profile="gang")
        done = await serving.reaches(job, "failed")
        assert (len(done.attempts), done.attempts[0].exit_code) == (1, 3), done
        log = await serving.log(job)
        assert "0 2" in log
        assert "1 2" in log
        await serving.no_pod_left()


FAILS_AFTER_NOTICE = """
import ctypes, os, time
from makeway import checkpoint
checkpoint.requested()
print("up", flush=True)
while not os.path.exists(os.environ["MAKEWAY_STOP_FILE"]):
    time.sleep(0.05)
if os.environ["RANK"] == "1":
    raise RuntimeError("no more memory")
while True:
    ctypes.CDLL(None).sleep(600)  # no Python code runs, as in a collective
"""


@pytest.mark.covers("N12")
async def test_a_pod_does_not_wait_until_the_deadline_for_a_rank_that_failed_after_the_notice(serving: Serving) -> None:
    async with serving.running():
        job = await serving.submit("ana", "gang", "python3", "-u", "-c", FAILS_AFTER_NOTICE, profile="gang")
        for rank in range(2):
            await serving.says(job, f"[{rank}] up")
        await serving.client().preempt_test(job.id)
        again = await serving.reaches(job, "pending", "starting", "running", "failed", attempt=2)
        assert again.attempts[0].message == (
            "exit code 1 after the notice: rank 1: RuntimeError: no more memory; no checkpoint"
        )
        assert "rank 1 failed (exit code 1), and the others have not ended" in await serving.log(job)
        await serving.client().cancel(job.id)
        await serving.no_pod_left()


async def test_a_snapshot_shows_the_cluster(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving.running():
        job = await serving.submit("ana", "shown", "sleep", "600")
        await serving.reaches(job, "running")
    config = Path(serving.environ["MAKEWAY_STATE_DIR"]) / "config.py"
    config.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in serving.environ.items():
            patch.setenv(name, value)
        assert await asyncio.to_thread(main, ["snapshot", "--config", str(config)]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    (node,) = [node for node in shown["nodes"] if node["gpus"]]
    assert (node["name"], node["pool"], node["gpus"]) == ("node-0", "gpu", 2)
    assert [one["id"] for one in shown["workloads"]] == [job.id]


async def test_a_first_start_takes_the_document_as_it_is(serving: Serving, jobs_policy: str) -> None:
    """A pool without labels has all nodes, and the policy says how large it is, not what is there at the start."""
    document = json.loads(jobs_policy)
    del document["pools"][0]["nodes"]
    text = json.dumps(document)
    Path(serving.environ["MAKEWAY_POLICY_FILE"]).write_text(text)
    async with serving.running() as service:
        current = service.components.store.policies.current()
        assert current is not None
        assert current.document == text
        job = await serving.submit("ana", "first", "true")
        await serving.reaches(job, "succeeded")


@pytest.mark.covers("N07")
async def test_a_pod_outlives_the_service_and_is_adopted(serving: Serving) -> None:
    async with serving.running():
        job = await serving.submit("ana", "long", "sh", "-c", "echo one; sleep 15; echo two")
        await serving.says(job, "one")
        before = serving.pods()
    assert serving.pods() == before
    async with serving.running():
        done = await serving.reaches(job, "succeeded", "failed")
        assert (done.state.value, len(done.attempts)) == ("succeeded", 1)
        assert await serving.log(job) == "one\ntwo\n"


@pytest.mark.covers("N07")
async def test_a_job_whose_service_ends_before_its_token_is_there_starts_again(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_WAIT_SECONDS, "token", 15.0)  # type: ignore[misc]
    create = ApiClient.create

    async def loses(self: ApiClient, path: str, body: Object) -> Object:
        if path.endswith("/secrets"):
            raise ApiUnreachable("no answer")
        return await create(self, path, body)

    with monkeypatch.context() as patch:
        patch.setattr(ApiClient, "create", loses)
        async with serving.running():
            job = await serving.submit("ana", "interrupted", "echo", "once")

            async def there() -> bool:
                return bool(serving.pods())

            await serving.until(there, lambda: "its pod is there")
    (before,) = serving.cluster.api.items(PODS, labelSelector=JOBS)
    async with serving.running() as service:
        done = await serving.reaches(job, "succeeded", "failed")
        assert (done.state.value, len(done.attempts), done.failures) == ("succeeded", 1, 0), done
        assert await serving.log(job) == "once\n"
        row = service.components.store.workload(job.id)
        assert row is not None
        assert row.infra_failures == 0
    after = serving.cluster.api.items(PODS, labelSelector=JOBS)
    assert before["metadata"]["uid"] not in [pod["metadata"]["uid"] for pod in after]


SAVES = """
cd "$MAKEWAY_CHECKPOINT_DIR"
test -e saved && exit 0
trap 'touch saved; exit 75' TERM
echo up
while :; do sleep 0.1; done
"""


@pytest.mark.covers("N07")
async def test_jobs_that_end_while_the_service_is_away_for_long_have_ended(serving: Serving) -> None:
    """Their launchers are killed as they try to report: they give up after a quarter of an hour at least."""
    serving.environ["MAKEWAY_LOST_AFTER_SECONDS"] = "60"  # from 30 s of silence on, jobs save and end
    async with serving.running():
        finished = await serving.submit("ana", "finished", "sh", "-c", "echo up; sleep 5; echo once")
        saved = await serving.submit("ana", "saved", "sh", "-c", SAVES)
        for job in (finished, saved):
            await serving.says(job, "up")
    for job in (finished, saved):
        await serving.until(partial(has_termination_message, job), lambda: "the job has ended")
        os.kill(launcher_of(job), signal.SIGKILL)

    async def ended() -> bool:
        return set(serving.pods().values()) == {"Failed"}

    await serving.until(ended, lambda: "the pods have ended")
    for job, output in ((finished, "\nonce\n"), (saved, "\nmakeway: notice: the service was not reached for ")):
        shown = serving.cluster.api.text(f"{PODS}/makeway-{job.id}-1-0/log", container="worker")
        assert output in shown, "what happened is told by kubectl, too"
        assert f"the service at {serving.url.removesuffix('/services/makeway')} was not reached" in shown
    async with serving.running() as service:
        done = await serving.reaches(finished, "succeeded", "failed")
        assert (done.state.value, len(done.attempts), done.failures) == ("succeeded", 1, 0), done
        assert "did not reach the service any more" in done.message
        again = await serving.reaches(saved, "succeeded", "failed")
        assert (again.state.value, len(again.attempts), again.failures) == ("succeeded", 2, 0), again
        for job in (finished, saved):
            row = service.components.store.workload(job.id)
            assert row is not None
            assert row.infra_failures == 0
        await serving.no_pod_left()


@pytest.mark.covers("F81")
async def test_a_job_whose_pod_is_cut_off_saves_when_its_pod_is_deleted(serving: Serving) -> None:
    async with serving.running() as service:
        job = await serving.submit("ana", "cut off", "sh", "-c", SAVES)
        await serving.says(job, "up")
        await asyncio.to_thread(cut_off, launcher_of(job))
        await serving.client("ana").preempt_test(job.id)
        again = await serving.reaches(job, "succeeded", "failed", attempt=2)
        assert (again.state.value, [one.outcome for one in again.attempts]) == ("succeeded", ["preempted", "succeeded"])
        assert again.attempts[0].exit_code == 75, "it was told by its pod that it saved"
        row = service.components.store.workload(job.id)
        assert row is not None
        assert (row.infra_failures, row.failures) == (0, 0)


def cut_off(process: int) -> None:
    """Take the network of a pod down, of which this is a process."""
    inside = ["nsenter", f"--net=/proc/{process}/ns/net"]
    subprocess.run([*inside, "ip", "link", "set", "eth0", "down"], check=True)


async def has_termination_message(job: Job) -> bool:
    """Whether a job's launcher has written how the job ended."""
    return Path(f"/proc/{launcher_of(job)}/root/dev/termination-log").stat().st_size > 0


def launcher_of(job: Job) -> int:
    """Return the process of the launcher of a job's first attempt, on this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words, environ = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            if b"--remote" in words and f"/attempts/{job.id}/1/0".encode() in environ:
                return int(folder.name)
    raise AssertionError(f"no launcher of {job.name} runs")


async def test_a_job_is_cancelled_with_its_pod(serving: Serving) -> None:
    async with serving.running():
        job = await serving.submit("ana", "endless", "sleep", "600")
        await serving.reaches(job, "running")
        await serving.client("ana").cancel(job.id)
        await serving.reaches(job, "cancelled")
        await serving.no_pod_left()


REGISTRY = """
import http.server
class Empty(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self): self.send_error(404)
    do_GET = do_HEAD
http.server.HTTPServer(("127.0.0.1", 5999), Empty).serve_forever()
"""


async def test_an_image_that_does_not_exist_fails_its_job_and_a_registry_that_is_down_does_not(
    serving: Serving, real_node: Node, control_plane: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_WAIT_SECONDS, "no_image", 5.0)  # type: ignore[misc]
    async with serving.running():
        job = await serving.submit("ana", "nothing", "true", profile="other")

        async def told() -> bool:
            result: Job = await serving.client("ana").job(job.id)
            return result.reason is not None and "connection refused" in result.reason.message

        await serving.until(told, lambda: "the reason is the registry")
        inside = ["nsenter", f"--net={json.loads((real_node.path / 'node.json').read_text())['netns']}"]
        registry = await asyncio.create_subprocess_exec(*inside, sys.executable, "-c", REGISTRY)
        try:
            done = await serving.reaches(job, "failed")
        finally:
            registry.kill()
            await registry.wait()
        assert len(done.attempts) == 1, done
        assert "its image cannot be pulled" in done.message
        assert "not found" in done.message


async def test_a_job_that_uses_too_much_memory_fails_with_that_reason(serving: Serving) -> None:
    async with serving.running():
        code = "x = []\nwhile True: x.append(bytearray(2**20))"
        job = await serving.submit("ana", "large", "python3", "-c", code, profile="small")
        done = await serving.reaches(job, "failed")
        assert len(done.attempts) == 1
        assert done.message == (
            "it used more memory than the 64 MiB that its container may use: choose a profile with more memory, "
            "or use less"
        )


@pytest.mark.parametrize("folder", ["/tmp", "/makeway/job"])
async def test_a_job_that_fills_the_disk_fails_with_that_reason_and_ends_no_other(
    serving: Serving, folder: str
) -> None:
    async with serving.running():
        calm = await serving.submit("bo", "calm", "sleep", "600")
        await serving.reaches(calm, "running")
        code = f"import time\nopen('{folder}/large', 'wb').write(bytes(200 * 2**20))\ntime.sleep(600)"
        job = await serving.submit("ana", "large", "python3", "-c", code, profile="scratch")
        done = await serving.reaches(job, "failed")
        assert len(done.attempts) == 1, done
        assert done.message.startswith("it wrote more to the disk of its node than its pod may: write large files to")
        assert "64Mi" in done.message
        pod = serving.cluster.api.get(f"{PODS}/makeway-{calm.id}-1-0")["spec"]["containers"][0]["resources"]
        assert pod["requests"]["ephemeral-storage"] == "1Gi", "the default"
        assert "ephemeral-storage" in pod["limits"]
        assert (await serving.reaches(calm, "running")).attempt == 1
        await serving.client("bo").cancel(calm.id)


async def delayed_because(serving: Serving, job: Job, *words: str) -> Job:
    """Wait until a job was tried in vain at least twice, for a reason with these words."""
    result: list[Job] = []

    async def told() -> bool:
        result.append(await serving.client("root").job(job.id))
        reason = result[-1].reason
        message = reason is not None and all(word in reason.message for word in ("cannot be started yet", *words))
        return message and result[-1].state.value == "pending" and result[-1].attempt >= 2

    await serving.until(told, lambda: f"it is delayed because of {words}: {result[-1]}")
    return result[-1]


@pytest.mark.covers("F82")
@pytest.mark.parametrize("lacks", ["claim", "secret", "volume"])
async def test_a_job_whose_pod_lacks_something_waits_with_the_reason_until_it_is_there(
    serving: Serving, jobs_policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacks: str
) -> None:
    monkeypatch.setitem(MAX_WAIT_SECONDS, "unschedulable", 2.0)  # type: ignore[misc]
    monkeypatch.setitem(MAX_WAIT_SECONDS, "container", 2.0)  # type: ignore[misc]
    monkeypatch.setitem(MAX_WAIT_SECONDS, "volume_source", 2.0)  # type: ignore[misc]
    monkeypatch.setattr("makeway_quota.backends.kubernetes.attempts.event_reader.SET_UP_SECONDS", 2.0)
    monkeypatch.setattr("makeway_quota.backends.kubernetes.attempts.event_reader.PAUSE", 1.0)
    monkeypatch.setattr("makeway_quota.backends.remote.backend.REPORT_GRACE", 1.0)
    monkeypatch.setattr("makeway_quota.control.start_backoff.FIRST_DELAY", 2.0)
    monkeypatch.setattr("makeway_quota.control.start_backoff.MAX_DELAY", 4.0)
    document, secrets = json.loads(jobs_policy), f"/api/v1/namespaces/{NAMESPACE}/secrets"
    pod = document["profiles"][0]["pod"]["spec"]
    if lacks == "claim":
        pod["volumes"].append({"name": "data", "persistentVolumeClaim": {"claimName": "later"}})
        pod["containers"][0]["volumeMounts"].append({"name": "data", "mountPath": "/data"})
    elif lacks == "volume":
        pod["volumes"].append({"name": "data", "secret": {"secretName": "later"}})
        pod["containers"][0]["volumeMounts"].append({"name": "data", "mountPath": "/data"})
    else:
        key = {"secretKeyRef": {"name": "later", "key": "password"}}
        pod["containers"][0]["env"].append({"name": "PASSWORD", "valueFrom": key})
    Path(serving.environ["MAKEWAY_POLICY_FILE"]).write_text(json.dumps(document))
    async with serving.running() as service:
        job = await serving.submit("ana", "patient", "true")
        waits = await delayed_because(serving, job, '"later" not found')
        assert (waits.failures, waits.attempts) == (0, []), "what never ran is no attempt"
        if lacks == "claim":
            make_claim(serving.cluster.api, NAMESPACE, "later", tmp_path)
        else:
            secret = {"metadata": {"name": "later"}, "stringData": {"password": "x"}}
            serving.cluster.api.create(secrets, secret)
        done = await serving.reaches(job, "succeeded", "failed")
        assert (done.state.value, done.failures, len(done.attempts)) == ("succeeded", 0, 1), done
        row = service.components.store.workload(job.id)
        assert row is not None
        assert row.infra_failures == 0
    if lacks != "claim":
        serving.cluster.api.delete(f"{secrets}/later")


async def test_a_job_whose_image_has_no_python_fails_and_says_so(
    serving: Serving, jobs_policy: str, real_node: Node, tmp_path: Path
) -> None:
    (tmp_path / "empty.tar").write_bytes(empty())
    real_node.import_image(tmp_path / "empty.tar")
    document = json.loads(jobs_policy)
    worker = document["profiles"][0]["pod"]["spec"]["containers"][0]
    worker["volumeMounts"] = [one for one in worker["volumeMounts"] if one["name"] != "usr"]
    document["profiles"][0]["image"] = EMPTY
    Path(serving.environ["MAKEWAY_POLICY_FILE"]).write_text(json.dumps(document))
    async with serving.running():
        job = await serving.submit("ana", "empty", "true")
        done = await serving.reaches(job, "failed")
        assert (len(done.attempts), done.exit_code) == (1, 127), done
        assert done.message.startswith('its image does not start python3: exec: "python3"')


async def test_a_launcher_image_that_is_not_there_lets_jobs_wait_for_an_administrator(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_WAIT_SECONDS, "site_image", 2.0)  # type: ignore[misc]
    monkeypatch.setattr("makeway_quota.backends.remote.backend.REPORT_GRACE", 1.0)
    monkeypatch.setattr("makeway_quota.control.start_backoff.FIRST_DELAY", 2.0)
    monkeypatch.setattr("makeway_quota.control.start_backoff.MAX_DELAY", 4.0)
    right = serving.environ["MAKEWAY_KUBE_LAUNCHER_IMAGE"]
    serving.environ["MAKEWAY_KUBE_LAUNCHER_IMAGE"] = wrong = "makeway.test/Wrong:1"
    async with serving.running():
        job = await serving.submit("ana", "patient", "true")
        message = f"the image {wrong} of its container launcher cannot be pulled, and an administrator has to change it"
        await delayed_because(serving, job, message)
    serving.environ["MAKEWAY_KUBE_LAUNCHER_IMAGE"] = right
    async with serving.running():
        done = await serving.reaches(job, "succeeded", "failed")
        assert (done.state.value, len(done.attempts)) == ("succeeded", 1), done
