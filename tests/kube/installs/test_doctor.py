"""`helm test` on a real cluster: it finds nothing on a healthy one, and each fault that is planted, worst first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from charts import JOBS, NAMESPACE, Object
from pods import wait_until
from portals import Portal
from releases import ROLES
from walk import Walk

from kube_cluster.api import Api

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]

TEST = "helm test makeway --namespace makeway --logs"
LIMITS = f"/api/v1/namespaces/{JOBS}/limitranges"
QUOTAS = f"/api/v1/namespaces/{JOBS}/resourcequotas"
ACCOUNT = f"/api/v1/namespaces/{JOBS}/serviceaccounts/makeway-job"
ROLE = f"{ROLES.format(JOBS)}/makeway-service"
HUB = f"/api/v1/namespaces/{NAMESPACE}/services/makeway-hub"
NODE = "/api/v1/nodes/node-0"
LABEL = "nvidia.com/gpu.present"
CLUSTER_WIDE = re.compile(r"Not checked: the account may not read ((deviceclasses|resourceslices)(, | and )?)+\.")
"""Only an administrator of the cluster can give these rights, and the page asks for none that DRA alone needs."""
FOUND = re.compile(r"^(ERROR|WARNING|NOTE)  (.*)$", re.MULTILINE)


def findings(said: str) -> list[tuple[str, str]]:
    """Return severity and sentence of each finding that a command printed."""
    return FOUND.findall(said)


def is_healthy(said: str) -> bool:
    """Whether nothing was found, and nothing left out that the administrator of two namespaces can have checked."""
    assert "POD LOGS" in said
    return all(severity == "NOTE" and CLUSTER_WIDE.fullmatch(sentence) for severity, sentence in findings(said))


def test_nothing_is_found_on_a_healthy_cluster(portal: Portal) -> None:
    message = portal.walk.run(TEST)
    assert is_healthy(message), message


def test_the_service_itself_finds_nothing_either_though_its_own_service_leads_back_to_it(portal: Portal) -> None:
    message = portal.walk.run(
        f"kubectl --namespace {NAMESPACE} exec deployment/makeway-service -- makeway-quota doctor"
    )
    assert {severity for severity, _ in findings(message)} <= {"NOTE"}, message


@contextmanager
def planted(api: Api) -> Iterator[Object]:
    """Have five faults during the block, each in another part, and yield words of what should be said of each."""
    rules = api.get(ROLE)["rules"]
    range = {"type": "Container", "min": {"memory": "3Gi"}, "default": {"memory": "4Gi"}}
    api.create(LIMITS, {"metadata": {"name": "fault"}, "spec": {"limits": [range]}})
    api.create(QUOTAS, {"metadata": {"name": "fault"}, "spec": {"hard": {"count/configmaps": "0", "services": "0"}}})
    api.merge(ROLE, {"rules": [rule for rule in rules if "secrets" not in rule["resources"]]})
    secrets = api.get(ACCOUNT).get("imagePullSecrets")
    api.merge(ACCOUNT, {"imagePullSecrets": [{"name": "forgotten"}]})
    selector = api.get(HUB)["spec"]["selector"]
    api.merge(HUB, {"spec": {"selector": {"app.kubernetes.io/component": "nothing"}}})
    api.merge(NODE, {"spec": {"taints": [{"key": "maintenance", "effect": "PreferNoSchedule"}]}})
    api.merge(NODE, {"metadata": {"labels": {LABEL: None}}})
    wait_until(lambda: "used" in api.get(f"{QUOTAS}/fault").get("status", {}), "the quota is in force")
    try:
        yield {
            "minimum memory usage per Container is 3Gi": "ERROR",
            "The account may not create secrets": "ERROR",
            "The Hub is not reached": "ERROR",
            "No node has the labels of the pool gpu": "ERROR",
            "The ResourceQuota fault allows no services": "WARNING",
        }
    finally:
        api.merge(NODE, {"metadata": {"labels": {LABEL: "true"}}, "spec": {"taints": None}})
        api.merge(HUB, {"spec": {"selector": selector}})
        api.merge(ACCOUNT, {"imagePullSecrets": secrets})
        api.merge(ROLE, {"rules": rules})
        api.delete(f"{LIMITS}/fault")
        api.delete(f"{QUOTAS}/fault")


@pytest.mark.covers("N21")
def test_each_fault_that_is_planted_is_named_and_the_worst_come_first(portal: Portal, administrator: Walk) -> None:
    with planted(portal.api) as expected:
        with pytest.raises(AssertionError) as failed:
            administrator.run(TEST)
        message = findings(str(failed.value))
        for words, severity in expected.items():
            assert [one for one, sentence in message if words in sentence] == [severity], (words, message)
    order = ["ERROR", "WARNING", "NOTE"]
    assert [one for one, _ in message] == sorted((one for one, _ in message), key=order.index)
    wait_until(portal.answers, "the Hub and the service answer through the proxy", pause=0.5)
    assert is_healthy(portal.walk.run(TEST))
