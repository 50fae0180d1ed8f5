"""A second release in another namespace, on PostgreSQL over TLS: neither touches the other's work.

Both have the same name, and each a notebook and a job that run, while the second one is upgraded, rolled back and
uninstalled; the story is that of the first one, beside the second one's work. The last test of the folder uninstalls
the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from charts import JOBS, NAMESPACE, Object
from kube.installs.conftest import WITH_LIMITS, values_of
from makeway_api.client import Client
from makeway_api.models import Job, JobRequest
from makeway_quota.backends.kubernetes.cluster.cluster_lease import lease_name
from pods import wait_until
from portals import CHECKPOINTS, PODS, STARTED, VALUES, WORKERS, Portal
from postgres import AUTHORITY, network_database, postgres_server
from releases import CLUSTER_WIDE, PRIORITIES, SECRETS, Installation, left_in, namespaces
from replicated import PROFILE, address_of
from site_stories import story
from walk import Walk, blocks, file_of, section

from kube_cluster.api import Api
from kube_cluster.helm import Helm

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

ELSEWHERE, FAR_JOBS = "elsewhere", "elsewhere-jobs"
FAR_WORKERS = f"/api/v1/namespaces/{FAR_JOBS}/pods"
CPU = {"profile": "cpu", "team": "rnd"}
NEW_POD = "--set service.podAnnotations.a=b"
FILES = "--values my-values.yaml --set-file policy=policy.yaml"
WAIT = "kubectl --namespace {} wait deployment --all --for condition=Available --timeout 10m"
TRUSTED = "sslmode=verify-full&sslrootcert=/etc/makeway-certificates/ca.crt"
UNTIL_TOLD = """
import os, pathlib, time
print("begins", flush=True)
while not pathlib.Path(os.environ["MAKEWAY_CHECKPOINT_DIR"], "go").exists():
    time.sleep(0.2)
"""


@contextmanager
def second(portal: Portal, walk: Walk) -> Iterator[Portal]:
    """Yield the second release, installed by the cluster's administrator, whose databases are there in the block."""
    host, api = address_of(portal), portal.api
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.create("/api/v1/namespaces", {"metadata": {"name": ELSEWHERE, "labels": labels}})
    try:
        with postgres_server(host, "10.0.0.0/8", tls=True) as folder:
            for name in ("makeway", "hub"):
                url = f"{network_database(folder, name)}?{TRUSTED}"
                api.create(SECRETS.format(ELSEWHERE), {"metadata": {"name": f"{name}-tls"}, "stringData": {"url": url}})
            small: Object = {"resources": {"requests": {"cpu": "50m"}}}  # so that a new pod fits beside the old one
            walk.write_values(
                VALUES
                | {
                    "certificateAuthorities": {"pem": Path(folder, AUTHORITY).read_text(encoding="utf-8")},
                    "database": {"existingSecret": "makeway-tls"},
                    "hub": {**VALUES["hub"], "database": {"existingSecret": "hub-tls"}, **small},
                    "service": {"replicas": 1, **small},
                    "proxy": small,
                    "prePuller": {"enabled": False},
                }
            )
            policy = yaml.safe_load(file_of(5, "policy.yaml"))
            policy["profiles"].append(PROFILE)
            (walk.folder / "policy.yaml").write_text(yaml.safe_dump(policy), encoding="utf-8")
            helm = Helm(walk.folder, portal.cluster.kubeconfig)
            walk.run(f"helm install makeway helm/makeway --namespace {ELSEWHERE} {FILES}\n{WAIT.format(ELSEWHERE)}")
            result = Portal(portal.cluster, Installation(helm, walk.folder, api, namespace=ELSEWHERE), walk)
            wait_until(result.answers, "its Hub and its service answer through its proxy", STARTED, pause=0.5)
            try:
                yield result
            finally:
                result.close()
    finally:
        for name in {ELSEWHERE, FAR_JOBS} & namespaces(api):
            api.delete(f"/api/v1/namespaces/{name}/pods", gracePeriodSeconds="0")
            api.delete(f"/api/v1/namespaces/{name}")


def submitted(client: Client, profile: str) -> Job:
    """Submit a job that goes on until it is told to end, and return it once its program runs."""
    command = ["python3", "-u", "-c", UNTIL_TOLD]
    job = client.submit(JobRequest(name="long", command=command, profile=profile, team="rnd"))
    wait_until(lambda: client.job(job.id).attempts and "begins" in client.logs(job.id).text, "the job runs", STARTED)
    return client.job(job.id)


def ended(portal: Portal, client: Client, job: Job) -> None:
    """Have such a job end, and wait until it has ended well."""
    (portal.volume(CHECKPOINTS, JOBS) / job.id / "go").touch()
    wait_until(lambda: client.job(job.id).state.ended, "the job of the first ends")
    assert [one.outcome for one in client.job(job.id).attempts] == ["succeeded"]


def holder(api: Api, namespace: str, jobs: str) -> tuple[str, int]:
    """Return the database that holds the Lease of a release, and how often it changed hands."""
    name = lease_name(f"{namespace}.makeway")
    spec = api.get(f"/apis/coordination.k8s.io/v1/namespaces/{jobs}/leases/{name}")["spec"]
    return str(spec["holderIdentity"]), int(spec.get("leaseTransitions", 0))


def cluster_wide(api: Api) -> set[tuple[str, str]]:
    """Return the cluster roles, their bindings and the priority classes of Makeway, with their UIDs."""
    paths = (CLUSTER_WIDE.format("clusterroles"), CLUSTER_WIDE.format("clusterrolebindings"), PRIORITIES)
    result = (one["metadata"] for path in paths for one in api.items(path))
    return {(one["name"], one["uid"]) for one in result if "makeway" in one["name"]}


def uids(portal: Portal) -> set[str]:
    """Return the UIDs of the service's pods."""
    return {pod["metadata"]["uid"] for pod in portal.labelled("app.kubernetes.io/component=service")}


def changed(portal: Portal, command: str) -> None:
    """Change a release by a command, after which its service has a new pod, and wait until that answers."""
    old = uids(portal)
    portal.walk.run(command)
    wait_until(lambda: not old & uids(portal), "the service has a new pod", STARTED)
    portal.walk.run(WAIT.format(portal.release.namespace))
    wait_until(portal.answers, "it answers", STARTED, pause=0.5)


@pytest.mark.covers("N21", "F80")
def test_a_second_release_never_touches_the_work_of_the_first_and_ends_whole(
    portal: Portal, administrator: Walk, tmp_path: Path
) -> None:
    ana, api = portal.person("ana"), portal.api
    notebook = ana.started({"profile": "gpu1", "team": "rnd"})["metadata"]["uid"]
    with ana.client() as client:
        job = submitted(client, "gpu1")
        (worker,) = [pod["metadata"]["uid"] for pod in api.items(WORKERS)]
        administrator.write()
        administrator.write_values(values_of(WITH_LIMITS))
        with pytest.raises(AssertionError, match="would mount the same homes of users"):
            administrator.run(f"helm install second helm/makeway --namespace {NAMESPACE} {FILES}")
        assert not [one for one in left_in(api, NAMESPACE) if one[1].startswith("second")]
        before, lease = cluster_wide(api), holder(api, NAMESPACE, JOBS)

        with second(portal, administrator) as other:
            theirs = other.person("ana")
            kept = theirs.started(CPU)["metadata"]["uid"]
            with theirs.client() as far:
                elsewhere = submitted(far, PROFILE["name"])
                (far_worker,) = [pod["metadata"]["uid"] for pod in api.items(FAR_WORKERS)]
                assert sum(node.foreign for pool in far.pools() for node in pool.nodes) == 2, (
                    "the work of the first one"
                )
                message = administrator.run(f"helm test makeway --namespace {ELSEWHERE} --logs")
                assert not {"ERROR", "NOTE"} & set(message.split()), message
                assert "not encrypted" not in message

                ended(portal, client, job)
                story(portal, tmp_path)
                assert ana.notebook()["metadata"]["uid"] == notebook
                job = submitted(client, "gpu1")
                (worker,) = [pod["metadata"]["uid"] for pod in api.items(WORKERS)]

                holds = holder(api, ELSEWHERE, FAR_JOBS)
                chart = f"helm upgrade makeway helm/makeway --namespace {ELSEWHERE} {FILES}"
                for command in (
                    f"{chart} {NEW_POD}",
                    f"helm rollback makeway --namespace {ELSEWHERE}",
                ):
                    changed(other, command)
                    assert holder(api, ELSEWHERE, FAR_JOBS) == holds, "the same database"
                    assert theirs.notebook()["metadata"]["uid"] == kept
                    assert [pod["metadata"]["uid"] for pod in api.items(FAR_WORKERS)] == [far_worker]
                    assert len(far.job(elsewhere.id).attempts) == 1
                assert before < cluster_wide(api)

                theirs_before = uids(other)
                changed(portal, f"helm upgrade makeway helm/makeway --namespace {NAMESPACE} {FILES} {NEW_POD}")
                assert uids(other) == theirs_before, "the first one's upgrade changes nothing of the second"
                assert (holder(api, ELSEWHERE, FAR_JOBS), holder(api, NAMESPACE, JOBS)) == (holds, lease)
                assert theirs.notebook()["metadata"]["uid"] == kept
                assert [pod["metadata"]["uid"] for pod in api.items(FAR_WORKERS)] == [far_worker]
                assert len(far.job(elsewhere.id).attempts) == 1
            administrator.run(f"helm uninstall makeway --namespace {ELSEWHERE}")
            wait_until(lambda: not api.items(other.all_pods), "no pod of the second is left")
            assert not api.items(FAR_WORKERS)
            assert cluster_wide(api) == before

        assert ana.notebook()["metadata"]["uid"] == notebook
        assert "jupyter-config-data" in ana.browser.get("/user/ana/lab").text
        assert [pod["metadata"]["uid"] for pod in api.items(WORKERS)] == [worker]
        assert holder(api, NAMESPACE, JOBS) == lease
        ended(portal, client, job)
    ana.stop()


@pytest.mark.covers("N21")
def test_the_administrator_of_two_namespaces_uninstalls_it_whole(portal: Portal) -> None:
    portal.person("ana").started({"profile": "gpu1", "team": "rnd"})
    *_, uninstall = blocks(section("Upgrade, roll back, uninstall"), "sh")[0].splitlines()
    portal.walk.run(uninstall)
    wait_until(lambda: "pods" not in {kind for kind, _ in left_in(portal.api, NAMESPACE, JOBS)}, "no pod is left")
    assert not portal.api.items(PODS)
    portal.close()
