"""The chart's accounts may do what the service and the Hub do, and nothing else; a real API server decides."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from charts import JOBS, NAMESPACE, ROOT
from informing import soon
from makeway_quota.backends.base import StartOrder
from makeway_quota.backends.choice import make_backend
from makeway_quota.backends.kubernetes.backend import KubernetesBackend
from makeway_quota.control.workers.channel import WorkerChannel
from makeway_quota.control.workers.tokens import AttemptTokens
from makeway_quota.policy import read_policy
from makeway_quota.settings import load
from makeway_quota.store.store import open_store
from makeway_quota.values import Place
from releases import ROLES, Installation, requests, rights_used

from kube_cluster.api import Api, ApiProblem
from kube_cluster.cluster import Cluster
from kube_cluster.simulated import SIMULATED

pytestmark = pytest.mark.kube

LEASES = {(verb, "leases", JOBS) for verb in ("get", "create", "update")}
"""What a whole service asks for, which has a database; a backend alone does not"""
DEVICES = ("deviceclasses", "resourceclaims", "resourceslices")
OF_DEVICES = {(verb, kind, "") for verb in ("list", "watch") for kind in DEVICES}
"""What it asks for where a pool has GPUs of a DeviceClass that the cluster has"""
OF_WAITING = {("list", "events", JOBS)}
"""What it asks for where a pod waits for its volumes"""
OF_CLAIMS = {("get", "resourceclaimtemplates", space) for space in (NAMESPACE, JOBS)}
"""What it asks for where a profile has claims"""
NEEDED = {
    *((verb, kind, "") for verb in ("list", "watch") for kind in ("nodes", "pods", *DEVICES)),
    *((verb, "pods", JOBS) for verb in ("get", "list", "watch", "create", "delete")),
    *((verb, kind, JOBS) for verb in ("create", "delete") for kind in ("services", "networkpolicies")),
    *(("create", kind, JOBS) for kind in ("secrets", "events")),
    *LEASES,
    *OF_CLAIMS,
    *OF_WAITING,
}
"""Verb, resource and namespace of what the service asks of the API server; no namespace: of the whole cluster."""
FOLLOWS = {
    (verb, kind, space)
    for verb in ("list", "watch")
    for kind, spaces in (("pods", (NAMESPACE, "kube-system")), ("resourceclaims", (NAMESPACE, JOBS, "kube-system")))
    for space in spaces
}
"""The same in single namespaces, which follows from rights for the whole cluster."""
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "impersonate", "escalate")
RESOURCES = (
    "nodes",
    "pods",
    "services",
    "secrets",
    "configmaps",
    "serviceaccounts",
    "persistentvolumeclaims",
    "events",
    "namespaces",
    "pods/exec",
    "pods/log",
    "pods/ephemeralcontainers",
    "serviceaccounts/token",
    "nodes/proxy",
    "networkpolicies",
    "leases",
    *DEVICES,
    "resourceclaimtemplates",
)
WITHOUT_NAMESPACE = ("nodes", "deviceclasses", "resourceslices")
GROUPS = {
    "leases": "coordination.k8s.io",
    "networkpolicies": "networking.k8s.io",
    **dict.fromkeys((*DEVICES, "resourceclaimtemplates"), "resource.k8s.io"),
    **dict.fromkeys(("roles", "clusterroles", "rolebindings", "clusterrolebindings"), "rbac.authorization.k8s.io"),
}


def may(api: Api, account: str, verb: str, resource: str, namespace: str, group: str = "") -> bool:
    """Whether the API server allows something to a service account."""
    name, _, part = resource.partition("/")
    wanted = {"verb": verb, "group": group, "resource": name, "subresource": part, "namespace": namespace}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{account}",
            "groups": [
                "system:serviceaccounts",
                f"system:serviceaccounts:{account.partition(':')[0]}",
                "system:authenticated",
            ],
            "resourceAttributes": wanted,
        },
    }
    return bool(api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)["status"]["allowed"])


def test_the_service_may_do_what_it_does_and_nothing_else(release: Installation) -> None:
    account = f"{NAMESPACE}:makeway-service"
    result = {
        (verb, resource, namespace)
        for namespace in ("", NAMESPACE, JOBS, "kube-system")
        for resource in RESOURCES
        for verb in VERBS
        if may(release.api, account, verb, resource, namespace, GROUPS.get(resource, ""))
    }
    # The API server answers the question alike for each namespace where the resource has none.
    assert {one for one in result if one[1] not in WITHOUT_NAMESPACE or not one[2]} == NEEDED | FOLLOWS
    for resource in ("roles", "rolebindings", "clusterroles", "clusterrolebindings"):
        for verb in VERBS:
            assert not may(release.api, account, verb, resource, JOBS, "rbac.authorization.k8s.io"), (verb, resource)


def test_the_hub_reads_no_secret_and_touches_no_job(release: Installation) -> None:
    account = f"{NAMESPACE}:makeway-hub"
    assert may(release.api, account, "create", "pods", NAMESPACE)
    for namespace in ("", NAMESPACE, JOBS, "kube-system"):
        assert not any(may(release.api, account, verb, "secrets", namespace) for verb in VERBS)
    assert not any(may(release.api, account, verb, "pods", JOBS) for verb in VERBS)


@pytest.mark.parametrize("account", [f"{JOBS}:makeway-job", f"{JOBS}:default", f"{NAMESPACE}:default"])
def test_jobs_notebooks_and_the_proxy_have_no_rights(release: Installation, account: str) -> None:
    for resource in ("pods", "secrets", "nodes", "configmaps"):
        for namespace in ("", NAMESPACE, JOBS):
            assert not any(may(release.api, account, verb, resource, namespace) for verb in VERBS)


def token_of(release: Installation, account: str = "makeway-service", namespace: str = NAMESPACE) -> str:
    """Return a token of an account of the chart."""
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    return str(release.api.create(path, request)["status"]["token"])


def test_the_services_own_token_is_refused_what_it_may_not(release: Installation) -> None:
    service = release.api.with_token(token_of(release))
    jobs = f"/api/v1/namespaces/{JOBS}"
    service.get("/api/v1/nodes")
    service.get("/api/v1/pods")
    service.create(f"{jobs}/secrets", {"metadata": {"name": "makeway-token"}, "stringData": {"0": "a"}})
    for path in (
        f"{jobs}/secrets/makeway-token",
        f"{jobs}/secrets",
        "/api/v1/secrets",
        f"/api/v1/namespaces/{NAMESPACE}/secrets/makeway",
    ):
        with pytest.raises(ApiProblem) as problem:
            service.get(path)
        assert problem.value.status == 403
    pod = {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "a", "image": "a"}]}}
    for namespace in (NAMESPACE, "kube-system", "default"):
        with pytest.raises(ApiProblem, match="cannot create resource"):
            service.create(f"/api/v1/namespaces/{namespace}/pods", pod)
    release.api.delete(f"{jobs}/secrets/makeway-token")


POLICY = """
version: 1
pools: [{name: gpu, nodes: {labels: {type: kwok}}}]
profiles: [{name: gpu1, gpus: 1, cpu: 2, memory: 1Gi}]
policies: []
"""


@pytest.fixture(scope="module")
def volume(release: Installation) -> Iterator[None]:
    """Make the volume that the claim of the checkpoints waits for."""
    spec = {
        "capacity": {"storage": "100Gi"},
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "hostPath": {"path": "/nowhere"},
        "claimRef": {"namespace": JOBS, "name": "makeway-checkpoints"},
    }
    release.api.create("/api/v1/persistentvolumes", {"metadata": {"name": "checkpoints-of-rights"}, "spec": spec})
    yield
    release.api.delete("/api/v1/persistentvolumes/checkpoints-of-rights")


@asynccontextmanager
async def backend_of(release: Installation, cluster: Cluster, folder: Path) -> AsyncIterator[KubernetesBackend]:
    """Yield the backend with the settings and the account that the chart gives to the service."""
    deployment = release.api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/makeway-service")
    given = {
        one["name"]: one.get("value", "") for one in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    config = json.loads(cluster.kubeconfig.read_text(encoding="utf-8"))
    config["users"][0]["user"] = {"token": token_of(release)}
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(json.dumps(config), encoding="utf-8")
    settings = load(environ=given | {"MAKEWAY_KUBECONFIG": str(kubeconfig), "MAKEWAY_KUBE_TOLERATIONS": SIMULATED})
    backend = make_backend(settings)
    assert isinstance(backend, KubernetesBackend)
    store = open_store(f"sqlite:///{folder / 'makeway.sqlite'}")
    backend.connect(WorkerChannel(store, AttemptTokens(b"secret" * 8)))
    document = read_policy(POLICY)
    backend.follow_policy(lambda: document)
    try:
        yield backend
    finally:
        await backend.close(stop_jobs=False)
        store.close()


async def test_the_backend_needs_these_rights_and_these_settings_and_no_others(
    release: Installation, volume: None, kwok_cluster: Cluster, tmp_path: Path
) -> None:
    async with backend_of(release, kwok_cluster, tmp_path) as backend:
        with requests(kwok_cluster, "makeway-service") as asked:
            await runs_a_gang(backend, release.api)
    assert not [one for one in asked if one["responseStatus"]["code"] == 403]
    assert rights_used(asked) | LEASES | OF_DEVICES | OF_CLAIMS | OF_WAITING == NEEDED


async def test_a_gang_runs_where_the_account_may_not_make_network_policies(
    release: Installation, volume: None, kwok_cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    role = f"{ROLES.format(JOBS)}/makeway-service"
    rules = release.api.get(role)["rules"]
    account = f"{NAMESPACE}:makeway-service"

    def allowed() -> bool:
        return may(release.api, account, "create", "networkpolicies", JOBS, GROUPS["networkpolicies"])

    try:
        release.api.merge(role, {"rules": [rule for rule in rules if "networkpolicies" not in rule["resources"]]})
        await soon(lambda: not allowed(), "the right is taken")
        async with backend_of(release, kwok_cluster, tmp_path) as backend:
            await runs_a_gang(backend, release.api)
    finally:
        release.api.merge(role, {"rules": rules})
        await soon(allowed, "the right is back")
    (message, *_) = [one.getMessage() for one in caplog.records if one.name == "makeway.kubernetes"]
    assert message.startswith("The gang makeway-j-1-1 gets no network policy: ")
    assert 'cannot create resource "networkpolicies"' in message


async def runs_a_gang(backend: KubernetesBackend, api: Api) -> None:
    """Start a gang twice, which creates it once, and remove it."""
    pods = f"/api/v1/namespaces/{JOBS}/pods"
    await backend.open()
    names = sorted(name for name, node in (await backend.nodes()).items() if node.pool == "gpu")[:2]
    gang = tuple(Place(name, (0,), (1000,)) for name in names)
    order = StartOrder("j-1", 1, "fit", "ana", "rnd", "gpu1", ("true",), {}, gang, 30.0)
    await backend.start(order)
    await backend.start(order)
    running = {"fieldSelector": "status.phase=Running", "labelSelector": "makeway/job=j-1"}
    of_makeway = {"fieldSelector": "source=makeway,reason=Failed"}
    await soon(lambda: len(api.items(pods, **running)) == 2, "both workers run")
    for pod in api.items(pods, **running):
        assert pod["spec"]["serviceAccountName"] == "makeway-job"
        assert pod["spec"]["priorityClassName"] == "makeway-makeway-preemptible"
    await backend.hosts()  # which takes in the pods
    backend.publish_event(("j-1", 1), "failed", "fit failed.")
    await soon(lambda: len(api.items(pods.replace("pods", "events"), **of_makeway)) == 2, "both pods have the event")
    await backend.forget("j-1", 1)
    await soon(lambda: not api.items(pods), "no pod is left")


OF_EVERY_ACCOUNT = {"authorization.k8s.io", "authentication.k8s.io", "certificates.k8s.io"}
"""API groups of what each service account may: ask who it is and what it may, and read public certificates."""
SPACES = {"every namespace": (NAMESPACE, JOBS, "kube-system"), "the release's": (NAMESPACE,), "the jobs'": (JOBS,)}
ACCOUNTS = {
    "makeway-service": NAMESPACE,
    "makeway-hub": NAMESPACE,
    "default": NAMESPACE,
    "makeway-job": JOBS,
}
CODE = re.compile(r"`([^`]+)`")


def table(head: str) -> list[list[str]]:
    """Return the cells of a table of the page by the beginning of its first line."""
    page = (ROOT / "docs/reference/chart.md").read_text(encoding="utf-8")
    rest = page[page.index(head) :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rest.splitlines()[2:]]


def rules(release: Installation, account: str, namespace: str) -> set[tuple[str, str]]:
    """Return what the API server says that an account may do in a namespace, by verb and resource."""
    api = release.api.with_token(token_of(release, account, ACCOUNTS[account]))
    group = "authorization.k8s.io/v1"
    review = {"apiVersion": group, "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
    status = api.create(f"/apis/{group}/selfsubjectrulesreviews", review)["status"]
    assert not status["incomplete"]
    given = [rule for rule in status["resourceRules"] if not set(rule["apiGroups"]) <= OF_EVERY_ACCOUNT]
    assert not [rule for rule in given if rule.get("resourceNames") or "*" in (*rule["verbs"], *rule["resources"])]
    return {(verb, resource) for rule in given for verb in rule["verbs"] for resource in rule["resources"]}


@pytest.mark.parametrize("account", ACCOUNTS)
def test_the_rights_in_the_docs_are_those_that_the_api_server_tells_each_account(
    release: Installation, account: str
) -> None:
    told: dict[str, set[tuple[str, str]]] = {space: set() for space in SPACES["every namespace"]}
    for holder, where, resources, verbs in table("| account | namespace |"):
        for space in SPACES[where] if holder == f"`{account}`" else ():
            told[space] |= {(verb, resource) for verb in CODE.findall(verbs) for resource in CODE.findall(resources)}
    assert {space: rules(release, account, space) for space in told} == told


def test_what_no_account_may_according_to_the_docs_is_refused(release: Installation) -> None:
    asked = []
    for cell, _ in table("| no account may"):
        verbs, resources = cell.split("` `")
        asked += [(verb, kind) for verb in CODE.findall(f"{verbs}`") for kind in CODE.findall(f"`{resources}")]
    assert len(asked) > 50
    allowed = [
        (account, verb, resource, namespace)
        for account, home in ACCOUNTS.items()
        for verb, resource in asked
        for namespace in ("", NAMESPACE, JOBS, "kube-system")
        if may(release.api, f"{home}:{account}", verb, resource, namespace, GROUPS.get(resource, ""))
    ]
    assert not allowed
