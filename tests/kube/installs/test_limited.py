"""The story where the administrator of two namespaces installs the portal, and every container in them has limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from charts import JOBS, NAMESPACE
from kube.installs.conftest import MINIMUM, QUOTA
from makeway_quota.backends.kubernetes.api.quantities import number
from pods import wait_until
from portals import PODS, Portal
from site_stories import story

from kube_cluster.api import ApiProblem

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]


@pytest.mark.covers("N21")
def test_the_story_where_every_container_has_limits_for_the_administrator_of_two_namespaces(
    portal: Portal, tmp_path: Path
) -> None:
    pods = [*story(portal, tmp_path), *portal.api.items(PODS)]
    for pod in pods:
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            for kind in ("requests", "limits"):
                assert set(MINIMUM) <= set(container["resources"][kind]), (pod["metadata"]["name"], container["name"])
    for namespace in (NAMESPACE, JOBS):
        used = portal.api.get(f"/api/v1/namespaces/{namespace}/resourcequotas/site")["status"]["used"]
        assert set(used) == set(QUOTA)
    assert all(number(str(amount)) for amount in used.values() if amount != "0")
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
def test_an_upgrade_by_the_administrator_of_two_namespaces_keeps_a_notebook(portal: Portal) -> None:
    ana = portal.person("ana")
    notebook = ana.started({"profile": "gpu1", "team": "rnd"})["metadata"]["uid"]
    portal.walk.step(10)
    wait_until(portal.answers, "the Hub and the service answer through the proxy", pause=0.5)
    assert ana.notebook()["metadata"]["uid"] == notebook
    ana.stop()
