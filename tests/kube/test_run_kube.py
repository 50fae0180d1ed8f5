"""`make run-kube` starts a portal with the users, teams and policy of `make run`, and ends without a trace."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from leftovers import left
from makeway_api.client import Client
from makeway_api.models import JobRequest, State
from makeway_hub.sample import SAMPLE_USERS
from makeway_quota.policy import read_policy
from pods import wait_until
from portals import STARTED, log_in

from kube_cluster import image_build, node
from kube_cluster.__main__ import main
from kube_cluster.api import Api
from kube_cluster.folder import Folder
from kube_cluster.portal import demo_values
from kube_cluster.problems import NotHere
from kube_cluster.stand_in_autoscaler import POOL

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "kube_cluster", "run", "--gpus", "2"]
LAST = "  Ctrl-C removes the cluster and everything in it.\n"


@pytest.fixture(scope="module")
def said() -> Iterator[str]:
    """Return what the command prints until the portal is ready; afterwards Ctrl-C leaves nothing of its cluster."""
    try:
        node.check_machine()
        image_build.check_machine()
    except NotHere as reason:
        pytest.skip(str(reason))
    with subprocess.Popen(
        COMMAND, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    ) as command:
        try:
            assert command.stdout
            result = ""
            for line in command.stdout:
                result += line
                if line == LAST:
                    break
            kubeconfig = re.search(r"export KUBECONFIG=(\S+)", result)
            assert kubeconfig, result
            folder = Folder(Path(kubeconfig[1]).parent)
            facts = folder.facts()
            assert len(left(folder, facts)) > 4
            yield result
            command.send_signal(signal.SIGINT)
            assert "Removing the cluster" in command.stdout.read()
            assert command.wait() == 130
            assert left(folder, facts) == []
        finally:
            command.kill()


@pytest.mark.covers("F80", "N28")
def test_the_sample_users_log_in_at_the_address_that_is_printed(said: str) -> None:
    assert sorted(re.findall(r"  (\w+) is ready\n", said)) == ["hub", "images", "proxy", "service"]
    (url,) = re.findall(r"Makeway is ready at  (http://\S+)", said)
    (password,) = re.findall(r"The password of all is  (\S+)", said)
    for name, text in SAMPLE_USERS.items():
        assert f"{name:<8} {text}" in said
        with httpx2.Client(base_url=url, follow_redirects=True, timeout=60) as browser:
            assert log_in(browser, name, password).status_code == 200
            queues = set(re.findall(r'data-queue="(\w+)/gpu1"', browser.get("/hub/spawn").text))
            assert queues == {team for team in ("rnd", "devops") if team in text}, name
            assert "2 GPUs" in browser.get("/services/makeway/").text


def test_a_first_notebook_has_the_tour(said: str) -> None:
    (url,) = re.findall(r"ready at  (\S+)", said)
    (password,) = re.findall(r"all is  (\S+)", said)
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


@pytest.mark.covers("F71")
def test_a_job_of_the_pool_of_machines_gets_a_simulated_node_which_goes_when_it_idles(said: str) -> None:
    (url,) = re.findall(r"ready at  (\S+)", said)
    (password,) = re.findall(r"all is  (\S+)", said)
    (kubeconfig,) = re.findall(r"export KUBECONFIG=(\S+)", said)
    with (
        closing(Api(Path(kubeconfig))) as api,
        httpx2.Client(base_url=url, follow_redirects=True, timeout=60) as browser,
    ):

        def nodes() -> list[str]:
            return [one["metadata"]["name"] for one in api.items("/api/v1/nodes", labelSelector=f"{POOL}=cloud")]

        assert not nodes()
        log_in(browser, "ana", password)
        headers = {"X-XSRFToken": browser.cookies.get("_xsrf", path="/hub/") or "", "Referer": f"{url}/hub/home"}
        token = browser.post("/hub/api/users/ana/tokens", json={"note": "test"}, headers=headers).json()["token"]
        with Client(f"{url}/services/makeway", token) as ana:
            job = ana.submit(JobRequest(profile="cloud1", team="rnd", name="away", command=["train"]))
            wait_until(lambda: ana.job(job.id).state is State.RUNNING, "the job runs", STARTED, pause=0.2)
            assert nodes() == ["auto-small-2-1"]
            wait_until(lambda: ana.job(job.id).state.ended, "the job ends", STARTED, pause=0.5)
            assert ana.job(job.id).state is State.SUCCEEDED
        wait_until(lambda: not nodes(), "its node is removed", STARTED, pause=0.5)


@pytest.mark.parametrize(("gpus", "reserved"), [(1, [1, 0]), (4, [2, 2]), (10, [5, 5])])
def test_the_policy_of_the_demo_is_that_of_make_run_for_these_gpus(gpus: int, reserved: list[int]) -> None:
    document = read_policy(demo_values(gpus)["policy"], "policy", {"gpu": gpus})
    assert [policy.quotas[0].reserved // 1000 for policy in document.policies] == reserved


@pytest.mark.parametrize("gpus", ["0", "-1", "many"])
def test_a_portal_without_gpus_is_refused_in_words(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--gpus", gpus])
    assert "1 or more" in capsys.readouterr().err
