"""Machines whose nodes are asked for by ProvisioningRequests: what is created, what its conditions do, what remains."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cluster_machines import DEPLOYMENT, NOW, PODS, REQUESTS, SELECTOR, SETTINGS, TEMPLATES, TYPE, Server, listed
from makeway_quota.autoscale.deployment import Deployment, provisioning_class, provisioning_parameters
from makeway_quota.autoscale.document import read_deployment
from makeway_quota.autoscale.document_edits import with_paused
from makeway_quota.autoscale.instances import match_instances
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.provider import Denied, InvalidLaunch, StockOut
from makeway_quota.autoscale.transitions import apply_event
from makeway_quota.backends.kubernetes.api.client import ApiStatusError
from makeway_quota.backends.kubernetes.machines.provider import KubernetesProvider
from makeway_quota.backends.kubernetes.machines.provisioning_requests import consumed_on
from makeway_quota.backends.machines.machine_source import MachineStatus
from makeway_quota.control.machines.booting_nodes import BootingMachines
from makeway_quota.policy import PolicyInvalid

ATOMIC = "best-effort-atomic-scale-up.autoscaling.x-k8s.io"
NAME = "makeway-machine-m-1"
CONSUMED, CLASS = "autoscaling.x-k8s.io/consume-provisioning-request", "autoscaling.x-k8s.io/provisioning-class-name"
ASKS: Deployment = replace(
    DEPLOYMENT, settings={"provisioning": "request", "provisioning_parameters": "ValidUntilSeconds=600"}
)
REQUEST = ASKS.request(TYPE, "a", "on_demand", None, "m-1")


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def provider(server: Server) -> KubernetesProvider:
    known = {"cloud": SELECTOR}
    return KubernetesProvider(lambda: server, SETTINGS, known.get, "low", decision_seconds=0.05)


def bound(server: Server, provider: KubernetesProvider) -> None:
    """Have the autoscaler provision the request of m-1, and the scheduler bind its placeholder to node-1."""
    provider.launch(REQUEST, "m-1")
    server.decides(Provisioned=("True", "CapacityIsProvisioned"))
    listed(provider)
    server.joins("node-1", gpus=8)
    server.pod()["spec"]["nodeName"] = "node-1"


@pytest.mark.covers("F83")
def test_a_machine_is_a_request_with_its_shape_and_a_placeholder_that_uses_it_once_it_is_provisioned(
    server: Server, provider: KubernetesProvider
) -> None:
    made = provider.launch(REQUEST, "m-1")
    asked, shape = server.objects[f"{REQUESTS}/{NAME}"], server.objects[f"{TEMPLATES}/{NAME}"]
    assert asked["spec"] == {
        "provisioningClassName": ATOMIC,
        "parameters": {"ValidUntilSeconds": "600"},
        "podSets": [{"podTemplateRef": {"name": NAME}, "count": 1}],
    }
    (owner,) = asked["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("ConfigMap", NAME, "u1"), "the cluster removes it with it"
    assert shape["metadata"]["ownerReferences"] == [owner]
    assert server.names() == [NAME], "no pod waits yet: the autoscaler would ignore it"
    assert provider.launch(REQUEST, "m-1") == made, "a repeated call makes nothing new"
    server.decides(Accepted=("True", "Accepted"))
    assert [one.state for one in listed(provider)] == ["pending"]
    assert server.names() == [NAME]
    server.decides(Provisioned=("True", "CapacityIsProvisioned"))
    listed(provider)
    pod = server.pod()
    annotations = pod["metadata"]["annotations"]
    assert (annotations[CONSUMED], annotations[CLASS]) == (NAME, ATOMIC)
    assert pod["spec"] == shape["template"]["spec"], "as the autoscaler has reckoned"
    server.joins("node-1", gpus=8)
    pod["spec"]["nodeName"] = "node-1"
    (result,) = listed(provider)
    assert (result.state, result.node, result.revoked) == ("running", "node-1", False)
    assert server.names() == [NAME, f"{NAME}-keep"]
    assert f"{REQUESTS}/{NAME}" in server.objects, "pods of jobs use it"


@pytest.mark.covers("F83", "N23")
def test_nothing_is_kept_idle_for_a_machine_that_waits_in_the_queue_of_the_cloud(
    server: Server, provider: KubernetesProvider
) -> None:
    """Only from `Provisioned` on it is shown to the engine, for as long as a boot may take."""
    row = Machine("m-1", "grows", "cloud", "g8", "a", "on_demand", None, 8, REQUEST, NOW, NOW)
    row = replace(row, state="booting", instance=NAME, launched_at=NOW)
    booting = BootingMachines(ASKS)
    booting.learn([row], NOW)

    def shown(now: float) -> list[str]:
        booting.take_list(provider.list("grows", now))
        booting.learn([row], now)
        return [node.name for node in booting.nodes([row], {}, now)]

    provider.launch(REQUEST, "m-1")
    assert [node.name for node in booting.nodes([row], {}, NOW + 1)] == [], "no list has said anything of it"
    assert shown(NOW + 10) == []
    server.decides(Accepted=("True", "Accepted"))
    assert shown(NOW + 40_000) == []
    server.decides(Provisioned=("True", "CapacityIsProvisioned"))
    assert shown(NOW + 50_000) == ["m-1"]
    assert shown(NOW + 51_199) == ["m-1"]

    def deny(method: str, path: str) -> None:
        if path == REQUESTS:
            raise ApiStatusError(403, "Forbidden", "no")

    server.answer = deny
    assert shown(NOW + 51_199) == ["m-1"], "a list that says nothing of it changes nothing"
    assert shown(NOW + 51_201) == []


@pytest.mark.parametrize(
    ("kind", "status", "reason", "message"),
    [
        ("Failed", "True", "Expired", "Expired it says"),
        ("Provisioned", "False", "CapacityIsNotFound", "CapacityIsNotFound it says"),
        ("CapacityRevoked", "True", "Deleted", "it has taken back what it had provisioned"),
    ],
)
@pytest.mark.covers("F83")
def test_a_request_without_capacity_is_out_of_stock_and_leaves_nothing(
    server: Server, provider: KubernetesProvider, kind: str, status: str, reason: str, message: str
) -> None:
    def answer(method: str, path: str) -> None:
        if (method, path) == ("GET", f"{REQUESTS}/{NAME}"):
            server.decides(**{kind: (status, reason)})

    server.answer = answer
    with pytest.raises(StockOut, match=f"the cluster's autoscaler adds no node: {message}") as caught:
        provider.launch(REQUEST, "m-1")
    assert caught.value.instance == NAME, "a list may have shown it meanwhile"
    assert server.objects == {}


def test_a_launch_whose_request_was_ended_meanwhile_by_a_list_is_no_lost_answer(
    server: Server, provider: KubernetesProvider
) -> None:
    def answer(method: str, path: str) -> None:
        if (method, path) == ("GET", f"{REQUESTS}/{NAME}"):
            server.objects.pop(path, None)

    server.answer = answer
    assert provider.launch(REQUEST, "m-1").id == NAME


def test_a_launch_that_is_provisioned_at_once_has_its_placeholder_wait_at_once(
    server: Server, provider: KubernetesProvider
) -> None:
    def answer(method: str, path: str) -> None:
        if (method, path) == ("GET", f"{REQUESTS}/{NAME}"):
            server.decides(Provisioned=("True", "CapacityIsProvisioned"))

    server.answer = answer
    provider.launch(REQUEST, "m-1")
    assert server.names() == [NAME, f"{NAME}-place"], "what is reserved is not reserved for long"


def test_a_list_leaves_out_a_machine_whose_launch_still_waits_for_an_answer(server: Server) -> None:
    waiting = KubernetesProvider(lambda: server, SETTINGS, {"cloud": SELECTOR}.get, "low", decision_seconds=0.05)
    waiting.launch(REQUEST, "m-1")
    server.decides(Failed=("True", "Expired"))
    provider = KubernetesProvider(lambda: server, SETTINGS, {"cloud": SELECTOR}.get, "low", decision_seconds=15)
    assert listed(provider, NOW + 10) == []
    assert [bool(one.refused) for one in listed(provider, NOW + 20)] == [True]


@pytest.mark.covers("F83")
def test_a_request_that_fails_later_ends_its_machine_so_that_the_next_type_is_tried(
    server: Server, provider: KubernetesProvider
) -> None:
    made = provider.launch(REQUEST, "m-1")
    server.decides(Accepted=("True", "Accepted"), Provisioned=("False", "NotYet"))
    assert [one.refused for one in listed(provider)] == [""], "the autoscaler has it in its queue"
    server.decides(Failed=("True", "FailedToBookCapacity"))
    (result,) = listed(provider)
    assert result.refused == "the cluster's autoscaler adds no node: FailedToBookCapacity it says"
    row = replace(_row(), instance=made.id)
    after = _after(provider, row)
    assert (after.state, after.reason) == ("terminating", "no_node")
    assert provider.terminate(made.id)
    assert server.objects == {}


def _row(state: str = "booting") -> Machine:
    row = Machine("m-1", "grows", "cloud", "g8", "a", "on_demand", None, 8, REQUEST, NOW - 60, NOW - 60)
    return replace(row, state=state)  # type: ignore[arg-type]


def _after(provider: KubernetesProvider, row: Machine) -> Machine:
    """Return a machine after one list."""
    result = match_instances(ASKS, [row], provider.list("grows", NOW + 60), {})
    for one, event in result.events:
        row = apply_event(one if row is one else row, event, NOW, ASKS.timeouts("g8"))
    return row


@pytest.mark.covers("F83")
def test_what_is_reserved_may_expire_while_the_node_boots_but_not_before_it_is_used(
    server: Server, provider: KubernetesProvider
) -> None:
    provider.launch(REQUEST, "m-1")
    server.decides(Provisioned=("True", "CapacityIsProvisioned"))
    listed(provider)
    server.decides(BookingExpired=("True", "CapacityReservationTimeExpired"))
    assert [one.refused for one in listed(provider)] == [""], "its placeholder gets the node that still boots"
    del server.objects[f"{PODS}/{NAME}-place"]
    expected = "the cluster's autoscaler adds no node: what it had reserved has expired before Makeway used it"
    assert [one.refused for one in listed(provider)] == [expected]


@pytest.mark.covers("F83")
def test_a_node_that_is_taken_back_gives_its_work_a_notice(server: Server, provider: KubernetesProvider) -> None:
    bound(server, provider)
    row = replace(_row(), instance=NAME)
    row = _after(provider, row)
    assert row.state == "ready"
    server.decides(CapacityRevoked=("True", "NodesDeleted"))
    row = _after(provider, row)
    assert (row.state, row.drain, row.deadline) == ("draining", "spot", NOW + 60 + ASKS.drain_timeout)
    assert _after(provider, row) == row, "a later list moves no deadline"


@pytest.mark.covers("F83")
def test_a_machine_with_a_request_that_is_ended_leaves_nothing(server: Server, provider: KubernetesProvider) -> None:
    bound(server, provider)
    listed(provider)
    assert provider.terminate(NAME)
    assert server.names() == [NAME]
    assert not [key for key in server.objects if key.startswith((REQUESTS, TEMPLATES))], "no node is added for it again"
    assert [one.state for one in listed(provider)] == ["stopping"]
    del server.objects["/api/v1/nodes/node-1"]
    assert [one.state for one in listed(provider)] == ["terminated"]
    assert server.names() == []


def test_a_machine_whose_request_was_removed_is_over(server: Server, provider: KubernetesProvider) -> None:
    provider.launch(REQUEST, "m-1")
    del server.objects[f"{REQUESTS}/{NAME}"]
    assert [one.state for one in listed(provider)] == ["pending"], "it may be under way"
    assert [one.state for one in listed(provider, NOW + 200)] == ["terminated"]
    assert server.objects == {}


@pytest.mark.parametrize(
    ("refusal", "expected", "message"),
    [
        (ApiStatusError(404, "NotFound", "404 page not found"), InvalidLaunch, "the cluster has no provisioningreq"),
        (ApiStatusError(403, "Forbidden", "cannot create resource"), Denied, "clusterAutoscaler.enabled and .prov"),
    ],
)
def test_a_cluster_without_requests_or_the_right_to_them_is_told_plainly_and_nothing_remains(
    server: Server, provider: KubernetesProvider, refusal: Exception, expected: type[Exception], message: str
) -> None:
    def answer(method: str, path: str) -> None:
        if path.startswith(REQUESTS) and (method != "DELETE" or expected is Denied):
            raise refusal

    server.answer = answer
    with pytest.raises(expected, match=message):
        provider.launch(REQUEST, "m-1")
    assert server.names() == [], "the cluster removes what belongs to the record"


def test_pods_of_jobs_use_the_request_of_the_machine_of_their_node() -> None:
    asked = MachineStatus("m-1", "cloud", "ready", 8, of_cluster=True, node="n-1", provisioning_class=ATOMIC)
    plain = MachineStatus("m-2", "cloud", "ready", 8, of_cluster=True, node="n-2")
    assert consumed_on("n-1", [plain, asked]) == {CONSUMED: NAME, CLASS: ATOMIC}
    assert [consumed_on(node, [plain, asked]) for node in ("n-2", "n-3")] == [{}, {}]
    assert consumed_on("n-1", [replace(asked, condition="ending")]) == {}


def document(**settings: str) -> str:
    kind = {"name": "g8", "pool": "cloud", "instance": "any", "gpus": 8}
    tree = {"version": 1, "name": "c", "provider": "kubernetes", "settings": settings, "machine_types": [kind]}
    return json.dumps(tree)


def test_the_document_says_how_a_cluster_is_asked() -> None:
    settings = {
        "provisioning": "request",
        "provisioning_class": "queued-provisioning.gke.io",
        "provisioning_parameters": "maxRunDurationSeconds=86400, noRetry = true",
    }
    result = read_deployment(document(**settings))
    assert provisioning_parameters(result.settings) == {"maxRunDurationSeconds": "86400", "noRetry": "true"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"provisioning": "requests"}, '"requests" is no way to ask for a node; did you mean "request"'),
        ({"provisioning": ""}, "provisioning is empty"),
        ({"provisioning_class": "x.example"}, "provisioning_class has no effect on placeholders"),
        ({"provisioning": "request", "provisioning_class": "A b"}, '"A b" is not a class of ProvisioningRequests'),
        ({"provisioning": "request", "provisioning_parameters": "a"}, '"a" is not a parameter; write NAME=VALUE'),
        ({"provisioning": "request", "provisioning_parameters": "a=1,a=2"}, '"a=1" is not a parameter'),
        ({"class": "x"}, '"class" is no setting of kubernetes'),
    ],
)
def test_settings_that_no_cluster_takes_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(PolicyInvalid) as caught:
        read_deployment(document(**settings))
    assert message in str(caught.value)


def test_a_stored_document_with_settings_that_earlier_releases_took_is_read_and_can_be_paused() -> None:
    text = document(owner="ml-platform", note="", provisioning="request")
    with pytest.raises(PolicyInvalid):
        read_deployment(text)
    result = read_deployment(text, stored=True)
    assert (provisioning_class(result.settings), result.settings["owner"]) == (ATOMIC, "ml-platform")
    assert read_deployment(with_paused(text, True), stored=True).paused
    with pytest.raises(PolicyInvalid, match="is no way to ask for a node"):
        read_deployment(document(owner="ml-platform", provisioning="requests"), stored=True)


@pytest.mark.parametrize("status", [403, 404])
def test_without_provisioning_requests_other_deployments_go_on_and_machines_can_be_ended(
    server: Server, provider: KubernetesProvider, status: int
) -> None:
    bound(server, provider)
    provider.launch(ASKS.request(TYPE, "a", "on_demand", None, "m-2"), "m-2")
    provider.launch(replace(DEPLOYMENT, name="plain").request(TYPE, "a", "on_demand", None, "m-3"), "m-3")

    def answer(method: str, path: str) -> None:
        if path.startswith((REQUESTS, TEMPLATES)):
            raise ApiStatusError(status, "Forbidden" if status == 403 else "NotFound", "it says so")

    server.answer = answer
    assert [one.machine for one in provider.list("plain", NOW + 300).instances] == ["m-3"]
    seen = provider.list(DEPLOYMENT.name, NOW + 300)
    assert ([one.machine for one in seen.instances], seen.complete) == (["m-1"], False), "m-2 may still come"
    assert provider.terminate(NAME)
    assert f"{NAME}-keep" not in server.names(), "the cluster may remove its node"
    assert provider.terminate("makeway-machine-m-2")
    assert not [name for name in server.names() if name.startswith("makeway-machine-m-2")]


def test_a_machine_is_listed_where_the_clock_is_behind_that_of_the_cluster(server: Server) -> None:
    known = {"cloud": SELECTOR}
    KubernetesProvider(lambda: server, SETTINGS, known.get, "low", decision_seconds=0.05).launch(REQUEST, "m-1")
    provider = KubernetesProvider(lambda: server, SETTINGS, known.get, "low", decision_seconds=15)
    assert [one.machine for one in provider.list(DEPLOYMENT.name, NOW - 600).instances] == ["m-1"]


@pytest.mark.covers("F83")
def test_a_check_names_the_rights_that_the_account_lacks_for_requests_and_those_alone(server: Server) -> None:
    def provider(wanted_class: str) -> KubernetesProvider:
        return KubernetesProvider(lambda: server, SETTINGS, {"cloud": SELECTOR}.get, provisioning_class=wanted_class)

    provider(ATOMIC).check()
    server.denied = {("create", "provisioningrequests"), ("delete", "provisioningrequests"), ("get", "podtemplates")}
    provider("").check()
    with pytest.raises(Denied) as told:
        provider(ATOMIC).check()
    assert str(told.value) == (
        "the account of the service may not create, delete provisioningrequests and get podtemplates in the namespace "
        "jobs; the chart gives these rights by clusterAutoscaler.provisioningRequests"
    )


@pytest.mark.covers("F83")
def test_a_check_names_the_kind_of_requests_where_the_cluster_has_none(server: Server) -> None:
    def answer(method: str, path: str) -> None:
        if path == REQUESTS:
            raise ApiStatusError(404, "NotFound", "the server could not find the requested resource")

    server.answer = answer
    provider = KubernetesProvider(lambda: server, SETTINGS, {"cloud": SELECTOR}.get, provisioning_class=ATOMIC)
    with pytest.raises(
        InvalidLaunch, match=r"the cluster has no provisioningrequests\.autoscaling\.x-k8s\.io: install"
    ):
        provider.check()
