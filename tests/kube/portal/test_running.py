"""The portal of the chart runs on a real node: ana logs in, gets a notebook in a pod, and trains in another."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import httpx2
import pytest
from charts import JOBS
from makeway_api.models import JobRequest
from pods import wait_until
from portals import CHECKPOINTS, USERS, VALUES, WORKERS, Portal, log_in
from walk import blocks, section

from kube_cluster.api import GPU
from kube_cluster.portal import PARTS

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

ONE_GPU = {"profile": "gpu1", "team": "rnd"}
TRAIN = """
import os, pathlib, time
print("devices", os.environ["CUDA_VISIBLE_DEVICES"])
while not pathlib.Path(os.environ["MAKEWAY_CHECKPOINT_DIR"], "go").exists():
    time.sleep(0.1)
"""


@pytest.fixture(scope="module", autouse=True)
def cleaned(portal: Portal) -> Iterator[None]:
    yield
    portal.clean()


@pytest.mark.covers("F80", "N21")
def test_no_container_of_the_portal_was_started_twice(portal: Portal) -> None:
    for component in PARTS:
        for status in portal.pod(component)["status"]["containerStatuses"]:
            assert (status["ready"], status["restartCount"]) == (True, 0), component


def test_the_service_may_read_groups_and_servers_and_the_spawner_may_not(portal: Portal) -> None:
    portal.person("ana")
    users = portal.as_program("/users", "service-token").json()
    assert {user["name"] for user in users} <= {"admin", *USERS}
    assert portal.as_program("/users", "spawner-token").status_code == 403
    scopes = portal.as_program("/user", "spawner-token").json()["scopes"]
    assert {"custom:makeway:reserve", "access:services!service=makeway"} <= set(scopes)


def test_the_password_of_the_secret_logs_in_those_who_may(portal: Portal) -> None:
    secret = portal.release.secret()
    for name, key, status in (("ana", "password", 302), ("ana", "proxy-token", 403), ("eve", "password", 403)):
        with httpx2.Client(base_url=portal.url) as browser:
            assert log_in(browser, name, secret[key]).status_code == status, (name, key)


def test_ana_logs_in_and_her_notebook_is_a_pod_with_a_gpu(portal: Portal) -> None:
    ana = portal.person("ana")
    assert "One GPU" in ana.browser.get("/hub/spawn").text
    pod = ana.started(ONE_GPU)
    assert pod["spec"]["nodeName"] == "node-0"
    assert pod["spec"]["priorityClassName"] == "makeway-makeway-guaranteed"
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"][GPU] == "1"
    assert "jupyter-config-data" in ana.browser.get("/user/ana/lab").text
    assert "One GPU" in ana.browser.get("/services/makeway/").text


def test_an_upgrade_and_a_rollback_keep_her_notebook_and_her_job_running(portal: Portal) -> None:
    ana = portal.person("ana")
    notebook = ana.started(ONE_GPU)["metadata"]["uid"]
    with ana.client() as client:
        job = client.submit(JobRequest(name="fit", command=["python3", "-u", "-c", TRAIN]))
        wait_until(lambda: client.job(job.id).attempts and "devices" in client.logs(job.id).text, "the job runs")
        (worker,) = portal.api.items(WORKERS)
        changed = copy.deepcopy(VALUES)
        changed["service"] = {"settings": {"tickSeconds": 2}}
        changed["hub"]["extraConfig"] = {"site": "c.JupyterHub.active_server_limit = 100"}
        upgrade, rollback, _ = blocks(section("Upgrade, roll back, uninstall"), "sh")[0].splitlines()
        portal.walk.write_values(changed)
        with portal.renewed():
            portal.walk.run(upgrade)
        with portal.renewed():
            portal.walk.run(rollback)
        (portal.volume(CHECKPOINTS, JOBS) / job.id / "go").touch()
        wait_until(lambda: client.job(job.id).state.ended, "the job has ended")
        ended = client.job(job.id)
        assert [attempt.outcome for attempt in ended.attempts] == ["succeeded"]
    assert worker["spec"]["nodeName"] == "node-0"
    assert ana.notebook()["metadata"]["uid"] == notebook
    wait_until(lambda: ana.server().get("ready"), "the new Hub knows her notebook")
    assert ana.browser.get("/user/ana/api/status").status_code == 200


def test_her_notebook_is_stopped_with_its_pod(portal: Portal) -> None:
    ana = portal.person("ana")
    ana.started(ONE_GPU)
    ana.stop()
    assert not portal.pods("notebook")
