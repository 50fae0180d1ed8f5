"""`doctor` on a cluster: nothing on a healthy one, each planted fault by itself, and twenty at once, worst first."""

from __future__ import annotations

import copy
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from makeway_quota.backends.kubernetes.api.access_reviews import ACCESS_REVIEWS
from makeway_quota.backends.kubernetes.api.client import ApiClient, ApiStatusError, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.api.connection import Connection
from makeway_quota.doctor import command, rights
from makeway_quota.doctor.cluster import ClusterAccess
from makeway_quota.doctor.command import address_checks, examine
from makeway_quota.doctor.findings import Finding
from makeway_quota.policy import read_policy
from makeway_quota.settings import load
from makeway_quota.store.store import open_store

CLAIM = "/api/v1/namespaces/jobs/persistentvolumeclaims/makeway-checkpoints"
ACCOUNT = "/api/v1/namespaces/jobs/serviceaccounts/makeway-job"
QUOTAS = "/api/v1/namespaces/jobs/resourcequotas"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
LOGIN = "/api/v1/namespaces/jobs/secrets/registry"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
NODES = "/api/v1/nodes"
PODS = "/api/v1/namespaces/jobs/pods?dryRun=All"
POLICY = """
version: 1
pools: [{name: a, nodes: {labels: {gpu: a}}}, {name: b, nodes: {labels: {gpu: b}}}]
profiles: [{name: gpu1, gpus: 1, cpu: 2, memory: 4Gi}, {name: gpu4, gpus: 4, pools: [b]}]
policies: [{name: rnd, groups: [rnd], quotas: [{reserved: 2}]}]
"""


def node(name: str, **labels: str) -> Object:
    status = {
        "allocatable": {"nvidia.com/gpu": "8", "cpu": "64", "memory": "256Gi"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}


@dataclass
class Server:
    """What an API server has and answers; the healthy one."""

    objects: dict[str, Any] = field(
        default_factory=lambda: copy.deepcopy(
            {
                "/version": {"major": "1", "minor": "34+"},
                NODES: {"items": [node("n1", gpu="a"), node("n2", gpu="b")]},
                "/api/v1/pods": {"items": []},
                PODS.partition("?")[0]: {"items": []},
                CLAIM: {
                    "metadata": {"name": "makeway-checkpoints"},
                    "spec": {"storageClassName": "nfs", "accessModes": ["ReadWriteMany"]},
                    "status": {"phase": "Bound", "accessModes": ["ReadWriteMany"]},
                },
                ACCOUNT: {"metadata": {"name": "makeway-job"}, "imagePullSecrets": [{"name": "registry"}]},
                LOGIN: {"metadata": {"name": "registry"}},
                QUOTAS: {"items": []},
                CLASSES: {"items": [{"metadata": {"name": "nfs"}}]},
            }
        )
    )
    denied: set[tuple[str, str]] = field(default_factory=set)
    """resource and verb"""
    refuses: str = ""
    """what the dry run of a pod is answered"""
    status: int = 403
    ahead: float = 0.0
    down: bool = False
    unwatched: Exception | None = None
    """what watches are refused with"""
    events: list[bytes] = field(default_factory=list)
    """of each watch, which then ends"""

    @property
    def nodes(self) -> list[Object]:
        return self.objects[NODES]["items"]  # type: ignore[no-any-return]


class Client(ApiClient):
    """A client of such a server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.connection = Connection("http://127.0.0.1:1", ssl.create_default_context(), namespace="makeway")

    async def close(self) -> None:
        """Nothing is open."""

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        if self.server.down:
            raise ApiUnreachable("the Kubernetes API server does not answer")
        self.date = formatdate(time.time() + self.server.ahead, usegmt=True)
        result = self.server.objects.get(path)
        if isinstance(result, int):
            raise ApiStatusError(result, "", "refused")
        if result is None:
            raise ApiStatusError(404, "NotFound", f"{path} not found")
        return result  # type: ignore[no-any-return]

    @asynccontextmanager
    async def stream(self, path: str, query: Mapping[str, str], silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        async def lines() -> AsyncIterator[bytes]:
            for event in self.server.events:
                yield event

        if self.server.unwatched is not None:
            raise self.server.unwatched
        yield lines()

    async def create(self, path: str, body: Object) -> Object:
        if path == ACCESS_REVIEWS:
            asked = body["spec"]["resourceAttributes"]
            return {"status": {"allowed": (asked["resource"], asked["verb"]) not in self.server.denied}}
        assert path in (PODS, PODS.replace("jobs", "makeway"))
        if self.server.refuses:
            raise ApiStatusError(self.server.status, "Forbidden", self.server.refuses)
        return body


def settings(**changes: Any) -> Any:
    environ = {
        "MAKEWAY_BACKEND": "kubernetes",
        "MAKEWAY_KUBE_NAMESPACE": "jobs",
        "MAKEWAY_KUBE_LAUNCHER_IMAGE": "makeway:1",
        "MAKEWAY_KUBE_CHECKPOINT_CLAIM": "makeway-checkpoints",
        "MAKEWAY_KUBE_SERVICE_ACCOUNT": "makeway-job",
        "MAKEWAY_WORKER_URL": "http://makeway.example:8765/services/makeway",
    }
    return replace(load(environ=environ).kubernetes, **changes)


async def findings(server: Server, policy: str | None = POLICY, **changes: Any) -> list[Finding]:
    document = None if policy is None else read_policy(policy)
    return await examine(ClusterAccess(Client(server), settings(**changes), document, time.time), [], 10.0)


async def test_the_records_of_machines_need_a_right_only_where_the_cluster_adds_nodes() -> None:
    server = Server()
    before = await findings(server)
    denying(("configmaps", "update"), ("configmaps", "delete"))(server)
    assert await findings(server) == before, "no deployment launches nodes here"
    (right,) = [one for one in await findings(server, placeholder_class="low") if one.check == "rights"]
    assert "may not update, delete configmaps: deployments with the provider kubernetes launch no nodes" in right.what


@pytest.mark.covers("F83")
async def test_provisioning_requests_need_rights_only_where_a_deployment_asks_by_them() -> None:
    server = Server()
    before = await findings(server)
    denying(("provisioningrequests", "create"), ("podtemplates", "delete"))(server)
    assert await findings(server) == before, "no deployment asks by them"
    cluster = ClusterAccess(Client(server), settings(), read_policy(POLICY), time.time, asks_for_nodes=True)
    first, second = [one for one in await examine(cluster, [], 10.0) if one.check == "rights"]
    assert "may not create provisioningrequests.autoscaling.x-k8s.io: deployments with `provisioning: req" in first.what
    assert "may not delete podtemplates" in second.what
    assert first.severity == second.severity == "warning"


@pytest.mark.covers("F83")
async def test_the_deployments_that_are_stored_decide_whether_rights_to_requests_are_checked(tmp_path: Path) -> None:
    types = "machine_types: [{name: small, pool: gpu, instance: any, gpus: 2}]"
    text = f"version: 1\nname: grows\nprovider: kubernetes\n{types}\n"
    asks = text + "settings: {provisioning: request}\n"
    known = load(environ={"MAKEWAY_DB_URL": f"sqlite:///{tmp_path}/makeway.sqlite"})
    assert not command._asks_for_nodes(known), "there is no database yet"
    store = open_store(known.db_url)
    try:
        store.deployments.save("grows", text, 0, "root", 1.0)
        assert not command._asks_for_nodes(known), "it has placeholders"
        store.deployments.save("grows", asks, 1, "root", 2.0)
        assert command._asks_for_nodes(known)
    finally:
        store.close()
    (tmp_path / "grows.yaml").write_text(asks)
    fresh = {"MAKEWAY_DB_URL": f"sqlite:///{tmp_path}/none.sqlite"}
    assert command._asks_for_nodes(load(environ=fresh | {"MAKEWAY_DEPLOYMENT_FILE": str(tmp_path / "grows.yaml")}))


async def test_the_account_of_the_hub_need_not_see_nodes() -> None:
    server = Server()
    server.objects |= {NODES: 403, "/api/v1/namespaces/makeway/resourcequotas": {"items": []}}
    cluster = ClusterAccess(Client(server), settings(), read_policy(POLICY), time.time, as_hub=True)
    assert await examine(cluster, [], 10.0) == []


@pytest.mark.parametrize(
    ("disks", "asked"), [(("200Gi", "90Gi"), "1024Mi"), (("200Gi", None), "1024Mi"), ((None, None), "0Mi")]
)
async def test_the_pod_of_the_dry_run_has_the_disk_that_it_has_on_the_smallest_node(
    monkeypatch: pytest.MonkeyPatch, disks: tuple[str | None, ...], asked: str
) -> None:
    """A LimitRange with a minimum of ephemeral-storage refused it, and takes those of jobs."""
    server = Server()
    for node, disk in zip(server.nodes, disks, strict=True):
        node["status"]["allocatable"] |= {"ephemeral-storage": disk} if disk else {}
    result, requests = await with_disk(monkeypatch, server)
    assert result == []
    assert requests == {asked}


@pytest.mark.parametrize("nodes", [{"items": []}, {"items": [node("n1", gpu="c")]}, 403])
async def test_without_a_node_of_the_pools_the_pod_of_the_dry_run_has_the_disk_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, nodes: Object | int
) -> None:
    """A LimitRange with a minimum of ephemeral-storage refused it, beside the finding that there is no node."""
    server = Server()
    server.objects[NODES] = nodes
    result, requests = await with_disk(monkeypatch, server)
    assert result
    assert requests == {"1024Mi"}


async def with_disk(monkeypatch: pytest.MonkeyPatch, server: Server) -> tuple[list[Finding], set[str]]:
    """Return what is found with a disk in the settings, and the disk that pods of the dry run request."""
    requests = set[str]()

    async def create(self: Client, path: str, body: Object) -> Object:
        if path != ACCESS_REVIEWS:
            requests.add(body["spec"]["containers"][0]["resources"]["requests"].get("ephemeral-storage", ""))
        return {"status": {"allowed": True}}

    monkeypatch.setattr(Client, "create", create)
    return await findings(server, disk_request="1Gi", disk_limit="50Gi"), requests


async def test_an_administrator_need_not_name_the_images_or_the_address_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images: list[str] = []

    async def create(self: Client, path: str, body: Object) -> Object:
        images.extend(one["image"] for kind in ("initContainers", "containers") for one in body["spec"].get(kind, ()))
        return {"status": {"allowed": True}}

    async def granted(cluster: ClusterAccess) -> list[Finding]:
        return []

    monkeypatch.setattr(Client, "create", create)
    monkeypatch.setattr(rights, "check_rights", granted)
    assert await findings(Server(), launcher_image="", image="") == []
    assert images
    assert all(images)
    assert address_checks(load(environ={"MAKEWAY_BACKEND": "kubernetes"}), hub=True) == []


async def test_a_healthy_cluster_has_no_findings() -> None:
    assert await findings(Server()) == []


async def test_what_the_account_may_not_look_at_is_one_note() -> None:
    server = Server()
    server.objects |= dict.fromkeys([CLAIM, ACCOUNT, QUOTAS, SLICES], 403)
    (note,) = await findings(server)
    assert (note.severity, note.where) == ("note", "namespace jobs")
    assert note.what == (
        "Not checked: the account may not read persistentvolumeclaims, resourcequotas, resourceslices and "
        "serviceaccounts."
    )
    server = Server()
    server.objects |= dict.fromkeys([CLASSES, LOGIN], 403)
    pending(server)
    (note,) = await findings(server)
    assert note.what == "Not checked: the account may not read secrets and storageclasses."


BUSY = (
    "requested: pods=1,requests.nvidia.com/gpu=2, used: pods=8,requests.nvidia.com/gpu=7, "
    "limited: pods={},requests.nvidia.com/gpu={}"
)


@pytest.mark.parametrize(
    ("pods", "gpus", "severity"),
    [("8", "8", "warning"), ("8", "1", "error"), ("0", "8", "error"), ("9", "7500m", "warning")],
)
async def test_a_quota_that_others_use_up_is_a_warning_and_one_that_is_too_small_an_error(
    pods: str, gpus: str, severity: str
) -> None:
    server = Server()
    server.refuses = f'pods "x" is forbidden: exceeded quota: q, {BUSY.format(pods, gpus)}'
    (result,) = await findings(server)
    assert (result.severity, "exceeded quota" in result.what) == (severity, True)
    assert ("Wait until" in result.remedy) is (severity == "warning")


async def test_a_webhook_that_takes_no_dry_run_is_not_checked() -> None:
    server = Server()
    server.refuses, server.status = 'admission webhook "inject.example.com" does not support dry run', 400
    (result,) = await findings(server)
    assert result.severity == "note"
    assert result.what.startswith("Not checked whether pods of jobs are admitted")


async def test_each_kind_of_refusal_is_named_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers differ by profile, and what is too large for ever is not hidden behind what is used up."""
    answers = [BUSY.format(8, 8), BUSY.format(8, 1)]

    async def create(self: Client, path: str, body: Object) -> Object:
        if path != PODS:
            return {"status": {"allowed": True}}
        raise ApiStatusError(403, "Forbidden", f'pods "x" is forbidden: exceeded quota: q, {answers.pop(0)}')

    monkeypatch.setattr(Client, "create", create)
    assert [one.severity for one in await findings(Server())] == ["error", "warning"]


def taint(server: Server) -> None:
    server.nodes[0]["spec"]["taints"] = [{"key": "team", "value": "other", "effect": "NoSchedule"}]


def not_ready(server: Server) -> None:
    server.nodes[0]["status"]["conditions"][0]["status"] = "False"


def slices(server: Server) -> None:
    server.nodes[0]["status"]["allocatable"]["nvidia.com/mig-1g.5gb"] = "7"


def drivers(server: Server) -> None:
    spec = {"driver": "gpu.nvidia.com", "nodeName": "n1", "devices": [{}, {}]}
    server.objects[SLICES] = {"items": [{"spec": spec}]}


def pending(server: Server, **spec: Any) -> None:
    server.objects[CLAIM]["status"] = {"phase": "Pending"}
    server.objects[CLAIM]["spec"] |= spec


def unlabelled(server: Server) -> None:
    server.nodes[1]["metadata"]["labels"] = {}


def without_gpus(server: Server) -> None:
    del server.nodes[1]["status"]["allocatable"]["nvidia.com/gpu"]


def two_gpus(server: Server) -> None:
    server.nodes[1]["status"]["allocatable"]["nvidia.com/gpu"] = "2"


def small(server: Server) -> None:
    for item in server.nodes:
        item["status"]["allocatable"]["cpu"] = "1"


def once(server: Server) -> None:
    server.objects[CLAIM]["status"]["accessModes"] = ["ReadWriteOnce"]


def quota(server: Server, used: str = "8", hard: str = "8") -> None:
    status = {"hard": {"requests.nvidia.com/gpu": hard}, "used": {"requests.nvidia.com/gpu": used}}
    server.objects[QUOTAS]["items"] = [{"metadata": {"name": "gpus"}, "status": status}]


def old(server: Server) -> None:
    server.objects["/version"] = {"major": "1", "minor": "27"}


def unwatched(error: Exception) -> Callable[[Server], None]:
    return lambda server: setattr(server, "unwatched", error)


def watching(*events: bytes) -> Callable[[Server], None]:
    return lambda server: setattr(server, "events", list(events))


def claims(server: Server) -> None:
    """Offer the pool a by a DeviceClass, whose GPUs a profile requests by a claim template that is not there."""
    server.objects[DEVICE_CLASSES] = {"items": [{"metadata": {"name": "a"}, "spec": {"extendedResourceName": GPU}}]}


def odd_class(server: Server) -> None:
    claims(server)
    expression = "device.attributes['x.com'].model.matches('H100')"
    server.objects[DEVICE_CLASSES]["items"][0]["spec"]["selectors"] = [{"cel": {"expression": expression}}]
    server.objects["/apis/resource.k8s.io/v1/resourceclaims"] = {"items": []}


GPU = "nvidia.com/gpu"
DEVICE_CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"


def without(path: str) -> Callable[[Server], None]:
    return lambda server: server.objects.pop(path)


def refusing(message: str, status: int = 403) -> Callable[[Server], None]:
    def plant(server: Server) -> None:
        server.refuses, server.status = message, status

    return plant


def denying(*pairs: tuple[str, str]) -> Callable[[Server], None]:
    return lambda server: server.denied.update(pairs)


NOT_FOLLOWED = "cannot be followed, and nothing starts"
UNFOLLOWED = "can be listed and not followed, and nothing starts"
FAULTS: list[tuple[str, Callable[[Server], Any], str, str]] = [
    ("no watch of nodes", denying(("nodes", "watch")), f"may not watch nodes: the cluster {NOT_FOLLOWED}", "error"),
    ("no watch of pods", denying(("pods", "watch")), f"may not watch pods: the cluster {NOT_FOLLOWED}", "error"),
    ("silent watches", unwatched(ApiUnreachable("it is silent")), f"The nodes of the cluster {UNFOLLOWED}", "error"),
    ("failing watches", unwatched(ApiStatusError(502, "", "bad gateway")), "nothing starts: bad gateway.", "error"),
    (
        "watches that end with an error",
        watching(b'{"type": "ERROR", "object": {"message": "too old"}}'),
        "The pods of jobs of the cluster can be listed and not followed, and nothing starts: too old.",
        "error",
    ),
    ("no events", watching(b"<html>"), "what is answered is no stream of events", "error"),
    ("selectors", odd_class, "The selectors of the DeviceClass a cannot be evaluated", "error"),
    ("rights on pods", denying(("pods", "create"), ("pods", "delete")), "may not create, delete pods", "error"),
    ("rights on nodes", denying(("nodes", "list")), "may not list nodes", "error"),
    ("rights on secrets", denying(("secrets", "create")), "may not create secrets", "error"),
    ("rights on services", denying(("services", "create")), "jobs with several workers do not start", "warning"),
    ("rights on leases", denying(("leases", "update")), "may not update leases.coordination.k8s.io", "warning"),
    ("rights on events", denying(("events", "create")), "pods show no events", "warning"),
    ("rights to causes", denying(("events", "list")), "jobs do not say why their volumes are not mounted", "warning"),
    ("rights on policies", denying(("networkpolicies", "create")), "gangs have no network policy", "warning"),
    (
        "pod security",
        refusing('pods "x" is forbidden: violates PodSecurity "restricted:latest"'),
        "PodSecurity",
        "error",
    ),
    ("LimitRange", refusing('pods "x" is forbidden: maximum cpu usage per Container is 1'), "maximum cpu", "error"),
    ("quota", refusing('pods "x" is forbidden: exceeded quota: q, requested: pods=1'), "exceeded quota", "error"),
    ("webhook", refusing('admission webhook "policy" denied the request: no'), "denied the request", "error"),
    ("priority class", refusing('pods "x" is forbidden: no PriorityClass with name low'), "no PriorityClass", "error"),
    ("namespace", refusing('namespaces "jobs" not found', 404), "namespaces", "error"),
    ("used up", quota, "is used up: 8 of 8 requests.nvidia.com/gpu", "warning"),
    ("closed", lambda server: quota(server, "0", "0"), "allows no requests.nvidia.com/gpu", "warning"),
    ("taint", taint, "team=other:NoSchedule keeps jobs away", "warning"),
    ("node not ready", not_ready, "No node of the pool a takes work", "error"),
    ("pool without nodes", unlabelled, "No node has the labels of the pool b", "error"),
    ("pool without GPUs", without_gpus, "No node of the pool b offers nvidia.com/gpu", "error"),
    ("unassigned", slices, "No pool takes 7 nvidia.com/mig-1g.5gb of n1", "warning"),
    ("dynamic allocation", drivers, "gpu.nvidia.com offers 2 devices of n1", "warning"),
    ("too few GPUs on a node", two_gpus, "No node is large enough for a worker of the profile gpu4", "error"),
    ("too few CPUs on a node", small, "No node is large enough for a worker of the profile gpu1", "error"),
    ("claim", without(CLAIM), "The claim makeway-checkpoints of checkpoints does not exist", "error"),
    ("class", lambda s: pending(s, storageClassName="fast"), "waits for the StorageClass fast", "error"),
    ("no class", lambda s: pending(s, storageClassName=None), "no default one", "error"),
    ("unbound", pending, "is not bound to a volume", "error"),
    ("lost", lambda s: s.objects[CLAIM].update(status={"phase": "Lost"}), "is gone", "error"),
    ("once", once, "is ReadWriteOnce, and 2 nodes run jobs", "error"),
    ("account", without(ACCOUNT), "The ServiceAccount makeway-job of jobs does not exist", "error"),
    ("login", without(LOGIN), "The Secret registry with the login for images does not exist", "error"),
    ("version", old, "Kubernetes 1.27 is older than 1.30", "error"),
    ("clock", lambda server: setattr(server, "ahead", 90.0), "s apart", "error"),
    ("clock behind", lambda server: setattr(server, "ahead", -12.0), "s apart", "warning"),
]


@pytest.mark.parametrize(("plant", "words", "severity"), [fault[1:] for fault in FAULTS], ids=[f[0] for f in FAULTS])
async def test_each_fault_is_named_with_a_remedy(plant: Callable[[Server], Any], words: str, severity: str) -> None:
    server = Server()
    plant(server)
    result = await findings(server)
    named = [one for one in result if words in one.what]
    assert named, [one.what for one in result]
    assert named[0].severity == severity
    assert all(one.remedy.endswith((".", ")")) and one.where and one.check for one in result)


CLAIMS = POLICY.replace(
    "memory: 4Gi",
    "memory: 4Gi, pod: {spec: {resourceClaims: [{name: g, resourceClaimTemplateName: one}]}}, pools: [a]",
)


async def test_claims_of_a_profile_that_do_not_fit_are_named() -> None:
    server = Server()
    claims(server)
    server.objects[SLICES] = {
        "items": [{"spec": {"driver": "x.com", "nodeName": "n1", "devices": [{"name": "g0"}], "pool": {"name": "n1"}}}]
    }
    template = {"spec": {"spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "a"}}]}}}}
    path = "/apis/resource.k8s.io/v1/namespaces/jobs/resourceclaimtemplates/one"
    (result,) = [one for one in await findings(server, CLAIMS) if one.check == "claims"]
    assert (result.severity, result.where) == ("error", "profile gpu1")
    assert result.what == (
        "Pods of the profile gpu1 would not get their GPUs: there is no ResourceClaimTemplate one in the namespace "
        "jobs (version v1)."
    )
    server.objects[path] = template
    assert [one for one in await findings(server, CLAIMS) if one.check == "claims"] == []
    denying(("resourceclaimtemplates", "get"))(server)
    (right,) = [one for one in await findings(server, CLAIMS) if one.check == "rights"]
    assert "may not get resourceclaimtemplates.resource.k8s.io: claims of profiles are not checked" in right.what


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_watch_that_the_account_may_not_open_is_named_by_its_rights_alone(status: int) -> None:
    server = Server()
    server.unwatched = ApiStatusError(status, "Forbidden", "no")
    denying(("nodes", "watch"), ("pods", "watch"))(server)
    assert {one.check for one in await findings(server)} == {"rights"}


async def test_twenty_at_once_are_all_named_worst_first() -> None:
    server = Server()
    names = (
        "rights on pods",
        "rights on nodes",
        "rights on secrets",
        "rights on services",
        "rights on leases",
        "rights on events",
        "rights on policies",
        "pod security",
        "used up",
        "taint",
        "node not ready",
        "unassigned",
        "too few GPUs on a node",
        "too few CPUs on a node",
        "class",
        "once",
        "account",
        "version",
        "clock",
    )
    chosen = [fault for fault in FAULTS if fault[0] in names]
    for _, plant, _, _ in chosen:
        plant(server)
    wanted = [*(words for _, _, words, _ in chosen), "The pool c names no labels"]
    assert len(wanted) == 20
    result = await findings(server, POLICY.replace("{name: b,", "{name: c}, {name: b,"))
    texts = [one.what for one in result]
    assert [words for words in wanted if not any(words in text for text in texts)] == []
    severities = [one.severity for one in result]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)


async def test_a_node_that_cannot_be_read_leaves_the_other_checks_alone() -> None:
    server = Server()
    server.nodes.append({"metadata": {"name": "odd"}, "status": {"conditions": [{"status": "True"}]}})
    denying(("secrets", "create"))(server)
    result = await findings(server)
    assert {"rights", "nodes"} <= {one.check for one in result}
    assert any("The check failed" in one.what for one in result)


async def test_homes_need_the_right_to_read_claims() -> None:
    server = Server()
    denying(("persistentvolumeclaims", "get"))(server)
    assert await findings(server) == []
    (result,) = await findings(server, home_claim="home-{user}")
    assert (result.severity, result.what) == (
        "warning",
        "The account may not get persistentvolumeclaims: jobs have no home.",
    )


DEVICE_CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
DEVICE_CLAIMS = "/apis/resource.k8s.io/v1/resourceclaims"
IMPLICIT = POLICY.replace("{name: a,", "{name: a, resource: deviceclass.resource.kubernetes.io/whole,")


def claimed(server: Server) -> None:
    """Have a DRA driver offer the GPUs of n1, by a class."""
    server.nodes[0]["status"]["allocatable"].pop("nvidia.com/gpu")
    device = {"driver": "gpu.nvidia.com", "nodeName": "n1", "devices": [{"name": str(n)} for n in range(8)]}
    selector = {"cel": {"expression": 'device.driver == "gpu.nvidia.com"'}}
    kind = {"metadata": {"name": "whole"}, "spec": {"selectors": [selector], "extendedResourceName": "nvidia.com/gpu"}}
    server.objects |= {SLICES: {"items": [{"spec": device}]}, DEVICE_CLASSES: {"items": [kind]}}
    server.objects[DEVICE_CLAIMS] = {"items": []}


@pytest.mark.parametrize("policy", [POLICY, IMPLICIT])
async def test_gpus_of_a_dra_driver_count_with_all_rights_to_them(policy: str) -> None:
    server = Server()
    claimed(server)
    assert await findings(server, policy) == []


@pytest.mark.parametrize("policy", [POLICY, IMPLICIT])
@pytest.mark.parametrize("resource", ["deviceclasses", "resourceclaims", "resourceslices"])
@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_each_right_that_gpus_of_a_dra_driver_need_is_named(policy: str, resource: str, verb: str) -> None:
    server = Server()
    claimed(server)
    denying((resource, verb))(server)
    result = [one for one in await findings(server, policy) if one.check == "rights"]
    assert [(one.severity, one.where, one.what) for one in result] == [
        (
            "warning",
            "all namespaces",
            f"The account may not {verb} {resource}.resource.k8s.io: GPUs of DRA drivers do not count.",
        )
    ]


async def test_gpus_of_a_dra_driver_do_not_count_where_the_service_cannot_read_claims() -> None:
    server = Server()
    claimed(server)
    server.objects[DEVICE_CLAIMS] = 403
    message = [one.what for one in await findings(server)]
    assert "No node of the pool a offers nvidia.com/gpu." in message
    assert "Not checked: the account may not read resourceclaims." in message


async def test_without_classes_the_rights_to_devices_are_not_needed() -> None:
    server = Server()
    for resource in ("deviceclasses", "resourceclaims", "resourceslices"):
        denying((resource, "list"), (resource, "watch"))(server)
    assert await findings(server) == []
    server.objects |= dict.fromkeys([SLICES, DEVICE_CLASSES, DEVICE_CLAIMS], 403)
    (note,) = await findings(server)
    assert note.what == "Not checked: the account may not read deviceclasses and resourceslices."


async def test_without_an_api_server_that_is_said_once() -> None:
    server = Server()
    server.down = True
    (result,) = await findings(server)
    assert (result.severity, result.where) == ("error", "http://127.0.0.1:1")
    assert result.what == "The Kubernetes API server does not answer."


async def test_without_a_volume_checkpoints_end_with_their_pods() -> None:
    (result,) = await findings(Server(), checkpoint_claim="")
    assert (result.severity, result.what.split(",")[0]) == ("warning", "Checkpoints end with their pods")


async def test_each_team_has_its_claim() -> None:
    (result,) = await findings(Server(), checkpoint_claim="checkpoints-{team}")
    assert "The claim checkpoints-rnd of checkpoints does not exist" in result.what


async def test_a_claim_that_waits_for_its_first_job_is_no_finding() -> None:
    server = Server()
    pending(server)
    server.objects[CLASSES]["items"][0]["volumeBindingMode"] = "WaitForFirstConsumer"
    assert await findings(server) == []


async def test_once_is_enough_on_one_node() -> None:
    server = Server()
    once(server)
    server.nodes.pop()
    server.nodes[0]["metadata"]["labels"] = {"gpu": "a"}
    policy = POLICY.replace(", {name: b, nodes: {labels: {gpu: b}}}", "").replace("pools: [b]", "pools: [a]")
    assert await findings(server, policy) == []


def test_the_rights_are_those_of_the_chart() -> None:
    from makeway_quota.doctor.rights import DEVICES, HUB, SERVICE

    folder = Path(__file__).parents[2] / "helm" / "makeway" / "templates"
    for chosen, file in (((*SERVICE, *DEVICES), "service"), (HUB, "hub")):
        text = (folder / file / "rights.yaml").read_text(encoding="utf-8")
        for right in chosen:
            line = f'apiGroups: ["{right.group}"]' if not right.group else f"apiGroups: [{right.group}]"
            assert any(
                line in one and right.resource in one and all(verb in one for verb in right.verbs)
                for one in text.splitlines()
            ), right
