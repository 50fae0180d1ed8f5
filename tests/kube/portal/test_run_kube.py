"""What `make run-kube` installs and prints: a portal with the users, teams and policy of `make run`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from makeway_hub.sample import SAMPLE_USERS
from makeway_quota.policy import read
from pods import wait_until
from portals import STARTED, log_in
from releases import namespaces

from kube_cluster.__main__ import main
from kube_cluster.cluster import Cluster
from kube_cluster.helm import Helm
from kube_cluster.portal import RELEASE, announcement, demo_values, install, wait_until_ready

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]

NAMESPACE = "demo"


@pytest.fixture(scope="module")
def said(
    control_plane: Cluster, images: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """Return what the command prints when the portal is ready, the names of the parts first."""
    found: list[str] = []
    install(control_plane, demo_values(2), NAMESPACE)
    wait_until_ready(control_plane, NAMESPACE, found.append)
    yield [*found, announcement(control_plane, NAMESPACE)]
    helm = Helm(tmp_path_factory.mktemp("helm"), control_plane.kubeconfig)
    helm.run("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait")
    own = {NAMESPACE, f"{NAMESPACE}-jobs"}
    for name in own:
        control_plane.api.delete(f"/api/v1/namespaces/{name}")
    wait_until(lambda: not own & namespaces(control_plane.api), "the namespaces are gone")


@pytest.mark.covers("F80")
def test_the_sample_users_log_in_at_the_address_that_is_printed(said: list[str]) -> None:
    assert sorted(said[:-1]) == ["hub is ready", "images is ready", "proxy is ready", "service is ready"]
    (url,) = re.findall(r"Makeway is ready at  (http://\S+)", said[-1])
    (password,) = re.findall(r"The password of all is  (\S+)", said[-1])
    for name, text in SAMPLE_USERS.items():
        assert f"{name:<8} {text}" in said[-1]
        with httpx2.Client(base_url=url, follow_redirects=True, timeout=60) as browser:
            assert log_in(browser, name, password).status_code == 200
            queues = set(re.findall(r'data-queue="(\w+)/gpu1"', browser.get("/hub/spawn").text))
            assert queues == {team for team in ("rnd", "devops") if team in text}, name
            assert "2 GPUs" in browser.get("/services/makeway/").text


def test_a_first_notebook_has_the_tour(said: list[str]) -> None:
    (url,) = re.findall(r"ready at  (\S+)", said[-1])
    (password,) = re.findall(r"all is  (\S+)", said[-1])
    with httpx2.Client(base_url=url, follow_redirects=True, timeout=60) as browser:
        log_in(browser, "guest", password)
        headers = {"X-XSRFToken": browser.cookies.get("_xsrf", path="/hub/") or "", "Referer": f"{url}/hub/home"}
        server = "/hub/api/users/guest/server"
        assert browser.post(server, json={"profile": "cpu"}, headers=headers).status_code in (201, 202)
        user = "/hub/api/users/guest"
        wait_until(lambda: browser.get(user).json()["servers"].get("", {}).get("ready"), "it runs", STARTED, pause=0.5)
        browser.get("/user/guest/lab")  # logs in to the notebook's server
        files = browser.get("/user/guest/api/contents").json()["content"]
        assert "Welcome.ipynb" in {file["name"] for file in files}
        assert browser.delete(server, headers=headers).status_code in (202, 204)
        wait_until(lambda: not browser.get(user).json()["servers"], "it has stopped", STARTED, pause=0.5)


@pytest.mark.parametrize(("gpus", "reserved"), [(1, [1, 0]), (4, [2, 2]), (10, [5, 5])])
def test_the_policy_of_the_demo_is_that_of_make_run_for_these_gpus(gpus: int, reserved: list[int]) -> None:
    document = read(demo_values(gpus)["policy"], "policy", {"gpu": gpus})
    assert [policy.quotas[0].reserved // 1000 for policy in document.policies] == reserved


@pytest.mark.parametrize("gpus", ["0", "-1", "many"])
def test_a_portal_without_gpus_is_refused_in_words(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--gpus", gpus])
    assert "1 or more" in capsys.readouterr().err
