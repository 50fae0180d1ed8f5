"""Pods get their GPUs by the claims of their profile's pod template; what does not fit is said before a pod is made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_server import PODS, ApiServer
from makeway_quota.backends.base import BackendFull
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.cluster.dra_devices import CLASSES, GROUP, IMPLICIT_RESOURCE_PREFIX, SLICES
from makeway_quota.backends.kubernetes.pods import claim_templates
from makeway_quota.backends.kubernetes.pods.manifest import PodSettings, WorkerResources, worker_pod
from makeway_quota.backends.kubernetes.pods.template import template_setting
from makeway_quota.policy import Document, PolicyInvalid, read_policy
from makeway_quota.policy.pod_template import claim_templates_of, template_problems
from makeway_quota.store.store import open_store
from pod_backend import Backend, order

pytestmark = pytest.mark.covers("F02", "F82")

CLASS = "gpu.example.com"
RESOURCE = f"{IMPLICIT_RESOURCE_PREFIX}{CLASS}"
POD: dict[str, Any] = {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]}}
POLICY = f"""
version: 1
pools: [{{name: gpu, resource: {RESOURCE}}}]
profiles:
  - name: gpu1
    gpus: 1
    pod: {{spec: {{resourceClaims: [{{name: gpus, resourceClaimTemplateName: one-gpu}}]}}}}
policies: [{{name: rnd, groups: [rnd]}}]
"""


def template(*requests: Object, name: str = "one-gpu") -> Object:
    return {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": list(requests)}}}}


def exactly(device_class: str = CLASS, **more: Any) -> Object:
    return {"name": "gpu", "exactly": {"deviceClassName": device_class, **more}}


class Server(ApiServer):
    """A cluster with claim templates of the namespaces of jobs, and of notebooks."""

    def __init__(self, **templates: Object) -> None:
        super().__init__()
        self.templates: dict[tuple[str, str], Object] = {("jobs", name): one for name, one in templates.items()}
        self.made: list[Object] = []
        expression = f"device.driver == '{CLASS}'"
        spec = {"selectors": [{"cel": {"expression": expression}}]}
        self.lists[CLASSES] = [{"metadata": {"name": CLASS, "resourceVersion": "1"}, "spec": spec}]
        devices = {"driver": CLASS, "nodeName": "n0", "pool": {"name": "n0"}, "devices": [{"name": "g0"}]}
        self.lists[SLICES] = [{"metadata": {"name": "s", "resourceVersion": "1"}, "spec": devices}]

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        if "/resourceclaimtemplates/" not in path:
            return await super().get(path, query)
        self._hear("GET", path)
        _, _, space, _, name = path.removeprefix(f"{GROUP}").split("/")
        if (space, name) not in self.templates:
            raise ApiStatusError(404, "NotFound", f'resourceclaimtemplates.resource.k8s.io "{name}" not found')
        return self.templates[space, name]

    async def create(self, path: str, body: Object) -> Object:
        if path == PODS:
            self.made.append(body)
        return await super().create(path, body)


def fitting() -> Server:
    return Server(**{"one-gpu": template(exactly())})


async def opened(server: Server, folder: Path) -> AsyncIterator[Backend]:
    store = open_store(f"sqlite:///{folder / 'makeway.sqlite'}")
    backend = Backend(server, store)
    document = read_policy(POLICY)
    backend.follow_policy(lambda: document)
    await backend.open()
    await backend.nodes()
    yield backend
    await backend.close(stop_jobs=False)
    store.close()


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    async for result in opened(fitting(), tmp_path):
        yield result


def server_of(backend: Backend) -> Server:
    assert isinstance(backend.server, Server)
    return backend.server


async def test_a_job_gets_its_gpus_by_claims_and_not_by_the_resource_of_its_pool(backend: Backend) -> None:
    await backend.start(order("j1", workers=2))
    for pod in server_of(backend).made:
        (worker,) = pod["spec"]["containers"]
        assert pod["spec"]["resourceClaims"] == POD["spec"]["resourceClaims"]
        assert worker["resources"]["claims"] == [{"name": "gpus"}]
        assert RESOURCE not in worker["resources"]["limits"] | worker["resources"]["requests"]
    assert len(server_of(backend).made) == 2


async def test_a_template_is_read_once_for_many_starts_and_again_after_a_minute(backend: Backend) -> None:
    def reads() -> int:
        return sum("resourceclaimtemplates" in asked for asked in server_of(backend).asked)

    for name in ("j1", "j2", "j3"):
        await backend.start(order(name))
    assert reads() == 1
    backend.now += claim_templates.KEPT_SECONDS + 1
    await backend.start(order("j4"))
    assert reads() == 2


WRONG: list[tuple[Object | None, str]] = [
    (None, "there is no ResourceClaimTemplate one-gpu in the namespace jobs"),
    (template(exactly(count=2)), "its claims request 2 of gpu.example.com, and the profile has 1 GPU"),
    (template(exactly("nic.example.com")), "its claims request 1 of nic.example.com, and the profile has 1 GPU"),
    (template(), "its claims request no device"),
    (template(exactly(adminAccess=True)), "its claims request no device"),
    (template(exactly(), exactly()), "its claims request 2 of gpu.example.com"),
    (template(exactly(allocationMode="All")), "for all devices of a node; set a count"),
    (template(exactly(selectors=[{"cel": {"expression": "true"}}])), "has selectors of its own"),
    (template(exactly(capacity={"requests": {"memory": "1Gi"}})), "for a part of a device"),
    (template({"name": "gpu", "firstAvailable": [{"name": "a", "deviceClassName": CLASS}]}), "has alternatives"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG)
async def test_what_does_not_fit_is_the_reason_why_a_job_waits_and_its_gpus_are_for_others(
    wrong: Object | None, words: str, backend: Backend
) -> None:
    server = server_of(backend)
    server.templates = {("jobs", "one-gpu"): wrong} if wrong is not None else {("elsewhere", "one-gpu"): template()}
    with pytest.raises(BackendFull) as refused:
        await backend.start(order("j1"))
    assert words in str(refused.value)
    assert str(refused.value).startswith("Its pods would not get their GPUs, and an administrator has to act: ")
    assert server.made == []
    server.templates = fitting().templates
    backend.now += claim_templates.REFUSED_SECONDS
    await backend.start(order("j1"))
    assert len(server.made) == 1, "once it fits, with the tokens that it had"


NIC = "nic.example.com"


def no_driver(name: str) -> str:
    return f"no driver offers devices of the DeviceClass {name}: install it on the nodes, or see its log"


def with_cards(server: Server, *, driver: bool = True, device_class: bool = True) -> None:
    """Have the template of jobs request network cards, too, which the cluster may have."""
    server.templates["jobs", "one-gpu"] = template(exactly(), exactly(NIC, count=2))
    if device_class:
        spec = {"selectors": [{"cel": {"expression": f"device.driver == '{NIC}'"}}]}
        server.lists[CLASSES].append({"metadata": {"name": NIC, "resourceVersion": "2"}, "spec": spec})
    if driver:
        cards = {"driver": NIC, "nodeName": "n0", "pool": {"name": "nics"}, "devices": [{"name": "c0"}]}
        server.lists[SLICES].append({"metadata": {"name": "nics", "resourceVersion": "2"}, "spec": cards})


async def test_network_cards_beside_the_gpus_are_the_affair_of_the_template(backend: Backend) -> None:
    with_cards(server_of(backend))
    await backend.start(order("j1"))
    assert len(server_of(backend).made) == 1


async def test_a_class_of_any_device_that_is_missing_keeps_no_gpus(backend: Backend) -> None:
    server = server_of(backend)
    with_cards(server, driver=False, device_class=False)
    words = f"the DeviceClass {NIC}, which is not there"
    with pytest.raises(BackendFull, match=words):
        await backend.start(order("j1"))
    assert words in await backend.notebook_problem("gpu1")
    assert server.made == []


async def test_nothing_is_refused_as_no_node_has_the_devices_at_the_moment(backend: Backend) -> None:
    """A pool without nodes, or whose nodes start again, has no slices: work is queued as for any other pool."""
    server = server_of(backend)
    with_cards(server, driver=False)
    server.lists[SLICES] = []
    assert await backend.notebook_problem("gpu1") == ""
    await backend.start(order("j1"))
    assert len(server.made) == 1
    for _ in range(2):
        assert await backend.policy_notices(read_policy(POLICY)) == [("gpu1", no_driver(name)) for name in (NIC, CLASS)]


@pytest.mark.parametrize(
    "device",
    [
        {"name": "c0", "consumesCounters": [{"counterSet": "card", "counters": {"parts": {"value": "1"}}}]},
        {"name": "c0", "taints": [{"key": "reserved", "effect": "NoSchedule"}]},
        {"name": "c0", "taints": [{"key": "reserved", "effect": "NoExecute"}]},
    ],
)
async def test_parts_of_cards_and_tainted_ones_are_devices_of_a_driver(device: Object, backend: Backend) -> None:
    server = server_of(backend)
    with_cards(server)
    server.lists[SLICES][-1]["spec"]["devices"] = [device]
    assert await backend.policy_notices(read_policy(POLICY)) == []
    server.lists[SLICES][0]["spec"]["devices"] = [device]
    assert await backend.policy_notices(read_policy(POLICY)) == [("gpu1", no_driver(CLASS))], "no pool counts such GPUs"


async def test_many_who_ask_for_what_is_refused_are_answered_by_few_requests(backend: Backend) -> None:
    server = server_of(backend)
    for templates in ({}, {("jobs", "one-gpu"): template(exactly(count=2))}):
        server.templates = dict(templates)
        backend.now += claim_templates.REFUSED_SECONDS
        assert await backend.notebook_problem("gpu1")
        before = len(server.asked)
        for _ in range(5):
            assert await backend.notebook_problem("gpu1")
        assert len(server.asked) == before


async def test_answers_are_kept_of_so_many_templates_at_most(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_templates, "MAX_KEPT", 3)
    result = claim_templates.ClaimTemplates(server_of(backend), lambda: backend.now)
    for gpus in (*range(1, 9), 8, 8):
        assert bool(await result.problem(POD, gpus, RESOURCE, "jobs")) is (gpus != 1)
    assert [key[-1] for key in result._kept] == [6, 7, 8]


async def test_two_claims_of_one_template_are_not_taken_for_one(backend: Backend) -> None:
    claims = [{"name": name, "resourceClaimTemplateName": "one-gpu"} for name in ("a", "b")]
    two: Object = {"spec": {"resourceClaims": claims}}
    result = claim_templates.ClaimTemplates(server_of(backend))
    assert await result.problem(POD, 1, RESOURCE, "jobs") == ""
    assert "its claims request 2 of" in await result.problem(two, 1, RESOURCE, "jobs")


@pytest.mark.parametrize(("wrong", "words"), WRONG)
async def test_a_notebook_is_refused_for_each_reason_for_which_a_job_waits(
    wrong: Object | None, words: str, backend: Backend
) -> None:
    server = server_of(backend)
    server.connection = replace(server.connection, namespace="hub")
    server.templates = {("jobs", "one-gpu"): template(exactly())}
    if wrong is not None:
        server.templates["hub", "one-gpu"] = wrong
    assert words.replace("jobs", "hub") in await backend.notebook_problem("gpu1")
    server.templates["hub", "one-gpu"] = template(exactly())
    backend.now += claim_templates.REFUSED_SECONDS
    assert await backend.notebook_problem("gpu1") == "", "within seconds, as it is read again"


async def test_a_notebook_of_several_pools_is_refused_only_where_its_claims_fit_none(backend: Backend) -> None:
    pools = f"[{{name: plain}}, {{name: gpu, resource: {RESOURCE}}}]"
    several = read_policy(POLICY.replace(f"[{{name: gpu, resource: {RESOURCE}}}]", pools))
    backend.follow_policy(lambda: several)
    assert await backend.notebook_problem("gpu1") == ""
    plain = read_policy(POLICY.replace(f", resource: {RESOURCE}", ""))
    backend.follow_policy(lambda: plain)
    backend.now += claim_templates.REFUSED_SECONDS
    assert "nvidia.com/gpu, is of no DeviceClass" in await backend.notebook_problem("gpu1")
    assert await backend.notebook_problem("other") == ""


@pytest.mark.parametrize(
    "error",
    [ApiUnreachable("no answer"), ApiStatusError(500, "", "etcd is down"), ApiStatusError(403, "Forbidden", "no")],
)
async def test_a_notebook_starts_where_nothing_is_known_of_its_claims(error: Exception, backend: Backend) -> None:
    def fail(method: str, path: str) -> None:
        raise error

    server_of(backend).templates = {}
    server_of(backend).answer = fail
    assert await backend.notebook_problem("gpu1") == ""


@pytest.mark.parametrize("path", ["resourceclaimtemplates", "deviceclasses"])
@pytest.mark.parametrize("status", [401, 403])
async def test_an_account_that_may_not_look_at_templates_makes_pods_all_the_same(
    path: str, status: int, backend: Backend
) -> None:
    def refuse(method: str, asked: str) -> None:
        if path in asked:
            raise ApiStatusError(status, "Forbidden", "no")

    server_of(backend).answer = refuse
    await backend.start(order("j1"))
    assert len(server_of(backend).made) == 1


async def test_the_check_of_a_policy_names_what_does_not_fit_in_the_namespaces_of_jobs_and_notebooks(
    backend: Backend,
) -> None:
    server, document = server_of(backend), read_policy(POLICY)
    assert await backend.policy_notices(document) == []
    backend._claim_templates._kept.clear()
    server.connection = replace(server.connection, namespace="hub")
    (result,) = await backend.policy_notices(document)
    assert result == ("gpu1", "there is no ResourceClaimTemplate one-gpu in the namespace hub (version v1)")
    server.templates["hub", "one-gpu"] = template(exactly())
    backend.now += claim_templates.REFUSED_SECONDS
    server.lists[SLICES] = []
    assert await backend.policy_notices(document) == [("gpu1", no_driver(CLASS))]
    server.lists[CLASSES] = []
    assert ("gpu1", f"there is no DeviceClass {CLASS}: install its driver") in await backend.policy_notices(
        read_policy(POLICY.replace("gpus: 1", "gpus: 2"))
    )
    plugin = read_policy(POLICY.replace(RESOURCE, "nvidia.com/gpu"))
    ((_, why), *_) = await backend.policy_notices(plugin)
    assert "nvidia.com/gpu, is of no DeviceClass" in why


async def test_the_check_of_a_policy_looks_once_for_the_driver_of_its_profiles(backend: Backend) -> None:
    server, pod = (
        server_of(backend),
        "pod: {spec: {resourceClaims: [{name: gpus, resourceClaimTemplateName: one-gpu}]}}",
    )
    more = "".join(f"\n  - {{name: more{at}, gpus: 1, {pod}}}" for at in range(5))
    document = read_policy(POLICY.replace("\npolicies:", f"{more}\npolicies:"))
    before = server.asked.count(f"GET {SLICES}")
    assert await backend.policy_notices(document) == []
    assert server.asked.count(f"GET {SLICES}") == before + 1


@pytest.mark.parametrize("error", [ApiUnreachable("no answer"), ApiStatusError(500, "", "etcd is down")])
async def test_an_api_server_that_does_not_answer_adds_nothing_to_the_check(error: Exception, backend: Backend) -> None:
    def fail(method: str, path: str) -> None:
        raise error

    server_of(backend).answer = fail
    assert await backend.policy_notices(read_policy(POLICY)) == []


def checked(pod: str, kinds: str = "[session, job]", gpus: int = 1) -> Document:
    entry = f"{{name: gpu1, gpus: {gpus}, kinds: {kinds}, pod: {pod}}}"
    return read_policy(f"{{version: 1, pools: [{{name: gpu}}], profiles: [{entry}], policies: []}}")


ENTRY = "{name: gpus, resourceClaimTemplateName: one-gpu}"


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ("[{name: gpus, resourceClaimName: shared}]", "resourceClaimName is not for a template: pods would share"),
        ("[{name: gpus}]", "names a ResourceClaimTemplate"),
        ("[{name: Gpus, resourceClaimTemplateName: a}]", "needs a name of small letters"),
        ("[{resourceClaimTemplateName: a}]", "needs a name of small letters"),
        ("[{name: gpus, resourceClaimTemplateName: a/b}]", "names a ResourceClaimTemplate"),
        (f"[{ENTRY}, {ENTRY}]", "is there twice"),
        ("[{name: gpus, resourceClaimTemplateName: a, count: 2}]", "count is not known"),
        ("gpus", "has to be a list of objects"),
    ],
)
def test_a_claim_that_kubernetes_would_refuse_or_pods_would_share_is_refused_in_the_document(
    claims: str, words: str
) -> None:
    with pytest.raises(PolicyInvalid) as invalid:
        checked(f"{{spec: {{resourceClaims: {claims}}}}}")
    assert words in str(invalid.value.issues[0])


def test_claims_are_for_gpus_and_for_notebooks_too() -> None:
    pod = f"{{spec: {{resourceClaims: [{ENTRY}]}}}}"
    document = checked(pod, "[session]")
    assert claim_templates_of(document.profile_facts["gpu1"].pod) == {"gpus": "one-gpu"}
    for wrong, words in ((f"{{metadata: {{labels: {{a: b}}}}, {pod[1:]}", "kinds has none"), (pod, "gpus is 0")):
        with pytest.raises(PolicyInvalid) as invalid:
            checked(wrong, "[session]", 0 if wrong is pod else 1)
        assert words in str(invalid.value.issues[0])


def test_a_container_may_name_the_claims_that_it_uses_and_no_others() -> None:
    container = {"name": "worker", "resources": {"claims": [{"name": "gpus"}]}}
    assert list(template_problems({"spec": {**POD["spec"], "containers": [container]}})) == []
    (wrong,) = template_problems({"spec": {"containers": [container]}})
    assert wrong == "spec.containers[worker].resources.claims: spec.resourceClaims has no gpus"
    sidecar = {"name": "exporter", "resources": {"claims": [{"name": "gpus"}]}}
    given = WorkerResources(RESOURCE, 1, template={"spec": {**POD["spec"], "containers": [sidecar]}})
    settings = PodSettings("jobs", "here", "http://10.0.0.1:1/services/makeway", "makeway:1", "notebook:1")
    made = worker_pod(settings, order("j1"), 0, "path", "tokens", given)
    claims = [one["resources"].get("claims") for one in made["spec"]["containers"]]
    assert claims == [[{"name": "gpus"}], [{"name": "gpus"}]]


def test_the_template_of_a_site_has_no_claims_as_no_profile_counts_them() -> None:
    with pytest.raises(ValueError, match="is for the pod template of a profile"):
        template_setting('{"spec": {"resourceClaims": [{"name": "a", "resourceClaimTemplateName": "b"}]}}')
