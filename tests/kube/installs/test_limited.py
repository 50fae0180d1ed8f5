"""The story where the administrator of two namespaces installs the portal, and every container in them has limits."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from charts import JOBS, NAMESPACE
from kube.installs.conftest import MINIMUM, QUOTA
from makeway_api.client import Client
from makeway_api.errors import MakewayError
from makeway_quota.backends.kubernetes.api.quantities import parse_quantity
from pods import wait_until
from portals import PODS, STARTED, Portal
from site_stories import story

from kube_cluster.api import ApiProblem

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]


@pytest.mark.covers("N21")
def test_the_story_where_every_container_has_limits_for_the_administrator_of_two_namespaces(
    portal: Portal, tmp_path: Path
) -> None:
    pods = [*story(portal, tmp_path), *portal.api.items(PODS)]
    for pod in pods:
        assert pod["spec"]["enableServiceLinks"] is False, "else it has variables for every Service of its namespace"
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            for kind in ("requests", "limits"):
                assert set(MINIMUM) <= set(container["resources"][kind]), (pod["metadata"]["name"], container["name"])
    for namespace in (NAMESPACE, JOBS):
        used = portal.api.get(f"/api/v1/namespaces/{namespace}/resourcequotas/site")["status"]["used"]
        assert set(used) == set(QUOTA)
    assert all(parse_quantity(str(amount)) for amount in used.values() if amount != "0")
    portal.person("ana").stop()


@pytest.mark.covers("N21")
def test_what_the_page_says_is_needed_there_is_needed(portal: Portal) -> None:
    """Without the values of the page, pods of the chart are refused."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    small = {"requests": {"cpu": "1m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}}
    container = {"name": "pull", "image": "none", "resources": small}
    with pytest.raises(ApiProblem, match="minimum cpu usage per Container is 50m"):
        portal.api.create(path, {"metadata": {"name": "small"}, "spec": {"containers": [container]}})


@pytest.mark.covers("N21")
def test_while_the_proxy_is_replaced_clients_read_why_they_get_no_answer(portal: Portal) -> None:
    """A new proxy knows no way to the service, and sends all to the Hub, which redirects to its login."""
    message: list[str] = []
    ana = portal.person("ana")
    token = ana.hub("POST", "/users/ana/tokens", json={"note": "test"}).json()["token"]
    old = portal.pod("proxy")["metadata"]["name"]
    portal.close()
    portal.api.delete(f"{PODS}/{old}", gracePeriodSeconds="0")
    wait_until(lambda: [one["metadata"]["name"] for one in portal.pods("proxy")] not in ([old], []), "a new one starts")
    wait_until(lambda: portal.pod("proxy")["status"].get("podIP"), "it has an address")

    def answers() -> bool:
        try:
            with Client(f"{portal.url}/services/makeway", token) as client:
                return client.me().name == "ana"
        except (MakewayError, httpx2.TransportError) as error:
            message.append(str(error))
            return False

    wait_until(answers, "the new proxy knows the way to the service", STARTED, pause=0.2)
    assert not [one for one in message if "no reason given" in one], message
    assert [one for one in message if "the proxy was replaced" in one], message


@pytest.mark.covers("N21")
def test_an_upgrade_by_the_administrator_of_two_namespaces_keeps_a_notebook(portal: Portal) -> None:
    ana = portal.person("ana")
    notebook = ana.started({"profile": "gpu1", "team": "rnd"})["metadata"]["uid"]
    portal.walk.step(10)
    wait_until(portal.answers, "the Hub and the service answer through the proxy", pause=0.5)
    assert ana.notebook()["metadata"]["uid"] == notebook
    ana.stop()
