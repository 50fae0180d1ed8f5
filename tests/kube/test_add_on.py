"""Makeway joins a Hub that is configured as Zero to JupyterHub configures one, by its chart and z2jh-values.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from kube import imitated_site
from portals import Site
from sites import ADD_ON, LEASE_SECONDS, PASSWORD, SITE, in_pod, namespace_of_site, overlay, wait_until_ready

from kube_cluster.api import GPU
from kube_cluster.cluster import Cluster

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

CALL = """
import os, time
from makeway_api.client import Client
from makeway_api.errors import MakewayError
with Client(os.environ["MAKEWAY_URL"], os.environ["JUPYTERHUB_API_TOKEN"]) as client:
    for left in reversed(range(60)):  # a busy Hub does not answer the service in time
        try:
            client.me()
            break
        except MakewayError:
            if not left:
                raise
            time.sleep(1)
    print(os.environ["MAKEWAY_URL"], client.me().name, [session.user for session in client.sessions()])
"""


@pytest.fixture(scope="module")
def site(control_plane: Cluster, images: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return a site with Makeway, once all its pods are ready."""
    with namespace_of_site(control_plane, tmp_path_factory.mktemp("helm")) as release:
        message = release.run("install", values=ADD_ON)
        assert "upgrade your Zero to JupyterHub" in message
        assert f"Write lease_seconds={LEASE_SECONDS} there" in message
        imitated_site.install(release.api, imitated_site.merged(SITE, overlay(imitated_site.HUB)["hub"]))
        result = Site(release.api, PASSWORD)
        wait_until_ready(result)
        yield result
        result.close()


def test_the_services_have_the_tokens_that_the_site_made_and_the_rights_that_they_need(site: Site) -> None:
    def asked(service: str, path: str) -> httpx2.Response:
        headers = {"Authorization": f"token {imitated_site.token_of(site.api, service)}"}
        return httpx2.get(f"{site.url}/hub/api{path}", headers=headers)

    assert asked("makeway", "/user").json()["name"] == "makeway"
    assert asked("makeway", "/users").status_code == 200
    assert asked("makeway-spawner", "/users").status_code == 403
    assert "custom:makeway:reserve" in asked("makeway-spawner", "/user").json()["scopes"]


@pytest.mark.covers("F80", "N21")
def test_a_user_finds_the_panel_picks_a_profile_and_gets_a_pod_that_is_the_sites_and_has_a_lease(
    control_plane: Cluster, site: Site
) -> None:
    ana = site.person("ana")
    assert 'href="/services/makeway/"' in ana.browser.get("/hub/home").text
    assert "One GPU" in ana.browser.get("/hub/spawn").text
    pod = ana.started({"profile": "gpu1", "team": "rnd"})
    assert pod["spec"]["priorityClassName"] == "makeway-makeway-guaranteed"
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"][GPU] == "1"
    labels = pod["metadata"]["labels"]
    theirs = ("app", "component", "release", "hub.jupyter.org/network-access-hub", "makeway/instance")
    assert [labels[name] for name in theirs] == [
        "jupyterhub",
        "singleuser-server",
        "jupyterhub",
        "true",
        "makeway.makeway",
    ]
    (preferred,) = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchExpressions"][0]["key"] == "hub.jupyter.org/node-purpose"
    assert "jupyter-config-data" in ana.browser.get("/user/ana/lab").text
    assert "One GPU" in ana.browser.get("/services/makeway/").text
    message = in_pod(control_plane, pod["metadata"]["name"], "python3", "-c", CALL)
    assert message.split("\n")[0] == "http://proxy-public/services/makeway ana ['ana']"


def test_what_the_site_has_set_stays(site: Site) -> None:
    ana = site.person("ana")
    scopes = ana.hub("GET", "/user").json()["scopes"]
    assert {"read:users:name", "custom:makeway:submit"} <= set(scopes)
    # The site's own extraConfig sets its authenticator; Makeway's pages are with it all the same.
    assert ana.browser.get("/hub/makeway-static/makeway.css").status_code == 200
