"""The portal of the chart runs on a real node: ana logs in, gets a notebook in a pod, and trains in another."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from charts import JOBS, NAMESPACE, Object
from makeway_api.client import Client
from makeway_api.models import JobRequest
from pods import wait_until
from releases import CLAIMS, KINDS, Installation, installation, requests, rights_used

from kube_cluster import image_build
from kube_cluster.api import GPU, Api
from kube_cluster.cluster import Cluster

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

POLICY = """
version: 1
pools: [{name: gpu, nodes: {labels: {makeway.test/real: "true"}}}]
profiles:
  - {name: gpu1, title: One GPU, gpus: 1, cpu: 0.1, memory: 512Mi, pools: [gpu], policies: [rnd], kinds: [session, job]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [gpu], reserved: 2}]}
"""
PEOPLE = {"allowed_users": ["ana"], "admin_users": ["admin"]}
VALUES: Object = {
    "images": {
        part: dict(zip(("repository", "tag"), image_build.name_of(image).split(":"), strict=True))
        for part, image in {"hub": "hub", "service": "quota-service", "notebook": "notebook", "proxy": "proxy"}.items()
    },
    "policy": POLICY,
    "hub": {
        "config": {
            "JupyterHub": {"authenticator_class": "dummy", "load_groups": {"rnd": {"users": ["ana"]}}},
            "Authenticator": PEOPLE,
        },
    },
}
VOLUMES = "/api/v1/persistentvolumes"
OWN_CLAIMS = {"makeway-hub", "makeway-service", "home-ana"}
CHECKPOINTS = "makeway-checkpoints"
STARTED = 400
"""How many seconds the programs of the portal may take to start, which is a fraction of that on an idle machine."""
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
WORKERS = f"/api/v1/namespaces/{JOBS}/pods"
TRAIN = """
import os, pathlib, time
print("devices", os.environ["CUDA_VISIBLE_DEVICES"])
while not pathlib.Path(os.environ["MAKEWAY_CHECKPOINT_DIR"]).with_name("go").exists():
    time.sleep(0.1)
"""


class Portal:
    """The running portal, as its users reach it; `folder` has its volumes."""

    def __init__(self, cluster: Cluster, release: Installation, folder: Path) -> None:
        self.cluster, self.release, self.folder, self.api = cluster, release, folder, release.api
        self.url = f"http://{self.pod('proxy')['status']['podIP']}:8000"
        self.ana = httpx2.Client(base_url=self.url, follow_redirects=True, timeout=60)
        self.told = ExitStack()
        accounts = ("makeway-hub", "makeway-service")
        self.asked = {one: self.told.enter_context(requests(cluster, one)) for one in accounts}

    def pod(self, component: str) -> Object:
        """Return the pod of one part of the chart."""
        label = f"app.kubernetes.io/component={component}"
        (found,) = [one for one in self.api.items(PODS, labelSelector=label) if not is_deleted(one)]
        return found

    def log_in(self, browser: httpx2.Client, name: str, password: str) -> httpx2.Response:
        """Send the form of the login page and return the answer."""
        browser.get("/hub/login")
        form = {"username": name, "password": password}
        return browser.post("/hub/login", params={"_xsrf": browser.cookies["_xsrf"]}, data=form)

    def hub(self, method: str, path: str, **more: Any) -> httpx2.Response:
        """Send a request to the Hub's API as ana's browser does."""
        headers = {"X-XSRFToken": self.ana.cookies.get("_xsrf", path="/hub/"), "Referer": f"{self.url}/hub/home"}
        return self.ana.request(method, f"/hub/api{path}", headers=headers, **more)

    def as_program(self, path: str, key: str) -> httpx2.Response:
        """Send a request to the Hub's API with a token of the chart's secret."""
        headers = {"Authorization": f"token {self.release.secret()[key]}"}
        return httpx2.get(f"{self.url}/hub/api{path}", headers=headers)

    def client(self) -> Client:
        """Return a client of the quota service with a new token of ana's, through the proxy."""
        token = self.hub("POST", "/users/ana/tokens", json={"note": "test"}).json()["token"]
        return Client(f"{self.url}/services/makeway", token)

    def server(self) -> Object:
        """Return the Hub's model of ana's server, empty without one."""
        return dict(self.hub("GET", "/users/ana").json()["servers"].get("", {}))

    def log(self, pod: str) -> str:
        """Return the last lines of a pod of the portal."""
        return self.api.text(f"{PODS}/{pod}/log", tailLines="60")


def is_deleted(pod: Object) -> bool:
    """Whether a pod is being deleted."""
    return "deletionTimestamp" in pod["metadata"]


@contextmanager
def volumes(api: Api, folder: Path, **claims: str) -> Iterator[None]:
    """Make the volumes that claims wait for, of folders of this machine; `claims` are the namespaces of the claims."""
    for claim, namespace in claims.items():
        place = folder / claim
        place.mkdir()
        place.chmod(0o777)
        spec = {
            "capacity": {"storage": "100Gi"},
            "accessModes": ["ReadWriteMany", "ReadWriteOnce"],
            "storageClassName": "",
            "hostPath": {"path": str(place)},
            "claimRef": {"namespace": namespace, "name": claim},
        }
        api.create(VOLUMES, {"metadata": {"name": claim}, "spec": spec})
    try:
        yield
    finally:
        for claim in claims:
            api.delete(f"{VOLUMES}/{claim}")
        wait_until(
            lambda: not set(claims) & {one["metadata"]["name"] for one in api.items(VOLUMES)}, "no volume is left"
        )


@pytest.fixture(scope="module")
def portal(
    control_plane: Cluster, images: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Portal]:
    """Return the portal that Helm installed, once all its pods are ready."""
    folder = tmp_path_factory.mktemp("volumes")
    api = control_plane.api
    with (
        volumes(api, folder, **dict.fromkeys(OWN_CLAIMS, NAMESPACE), **{CHECKPOINTS: JOBS}),
        installation(control_plane, tmp_path_factory.mktemp("helm")) as release,
    ):
        release.run("install", values=VALUES)
        try:
            wait_until(lambda: are_ready(api), "all pods of the chart are ready", STARTED, pause=0.5)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{told(api)}") from late
        found = Portal(control_plane, release, folder)
        answer = found.log_in(found.ana, "ana", release.secret()["password"])
        assert answer.status_code == 200, answer.text
        yield found
        found.ana.close()
        for pods in (WORKERS, PODS):
            api.delete(pods, gracePeriodSeconds="0")


def are_ready(api: Api) -> bool:
    """Whether the pods of all parts of the chart are ready."""
    found = [pod for pod in api.items(PODS) if not is_deleted(pod)]
    parts = {one["metadata"]["labels"].get("app.kubernetes.io/component") for one in found}
    conditions = [{one["type"]: one["status"] for one in pod["status"].get("conditions", ())} for pod in found]
    return {"hub", "proxy", "service", "images"} <= parts and all(one.get("Ready") == "True" for one in conditions)


@contextmanager
def renewed(portal: Portal) -> Iterator[None]:
    """Wait until the Hub and the service have new pods, and all are ready."""
    old = {portal.pod(part)["metadata"]["uid"] for part in ("hub", "service")}
    yield
    wait_until(lambda: are_ready(portal.api) and not old & uids(portal.api), "new pods are ready", STARTED, pause=0.5)


def uids(api: Api) -> set[str]:
    """Return the UIDs of the portal's pods."""
    return {one["metadata"]["uid"] for one in api.items(PODS)}


def told(api: Api) -> str:
    """Return what the cluster says about the portal's pods."""
    events = api.items(f"/api/v1/namespaces/{NAMESPACE}/events")
    states = [f"{one['metadata']['name']}: {one['status'].get('containerStatuses')}" for one in api.items(PODS)]
    return "\n".join([*states, *(f"{one['reason']}: {one.get('message')}" for one in events)])


def started(portal: Portal) -> Object:
    """Start ana's server, if it does not run, and return its pod."""
    if not portal.server().get("ready"):
        answer = portal.hub("POST", "/users/ana/server", json={"profile": "gpu1", "team": "rnd"})
        assert answer.status_code in (201, 202), answer.text
        wait_until(lambda: portal.server().get("pending") != "spawn", "the start has ended", STARTED, pause=0.5)
        assert portal.server().get("ready"), portal.log(portal.pod("hub")["metadata"]["name"])
    return portal.pod("notebook")


@pytest.mark.covers("F80", "N21")
def test_no_container_of_the_portal_was_started_twice(portal: Portal) -> None:
    for component in ("hub", "proxy", "service", "images"):
        for status in portal.pod(component)["status"]["containerStatuses"]:
            assert (status["ready"], status["restartCount"]) == (True, 0), component


def test_the_service_may_read_groups_and_servers_and_the_spawner_may_not(portal: Portal) -> None:
    users = portal.as_program("/users", "service-token").json()
    assert sorted(user["name"] for user in users) == ["admin", "ana"]
    assert portal.as_program("/users", "spawner-token").status_code == 403
    scopes = portal.as_program("/user", "spawner-token").json()["scopes"]
    assert {"custom:makeway:reserve", "access:services!service=makeway"} <= set(scopes)


def test_the_password_of_the_secret_logs_in_those_who_may(portal: Portal) -> None:
    secret = portal.release.secret()
    for name, key, status in (("ana", "password", 302), ("ana", "proxy-token", 403), ("eve", "password", 403)):
        with httpx2.Client(base_url=portal.url) as browser:
            assert portal.log_in(browser, name, secret[key]).status_code == status, (name, key)


def test_ana_logs_in_and_her_notebook_is_a_pod_with_a_gpu(portal: Portal) -> None:
    assert "One GPU" in portal.ana.get("/hub/spawn").text
    pod = started(portal)
    assert pod["spec"]["nodeName"] == "node-0"
    assert pod["spec"]["priorityClassName"] == "makeway-makeway-guaranteed"
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"][GPU] == "1"
    assert "jupyter-config-data" in portal.ana.get("/user/ana/lab").text
    assert "One GPU" in portal.ana.get("/services/makeway/").text


def test_an_upgrade_and_a_rollback_keep_her_notebook_and_her_job_running(portal: Portal) -> None:
    notebook = started(portal)["metadata"]["uid"]
    with portal.client() as client:
        job = client.submit(JobRequest(name="fit", command=["python3", "-u", "-c", TRAIN]))
        wait_until(lambda: client.job(job.id).attempts and "devices" in client.logs(job.id).text, "the job runs")
        (worker,) = portal.api.items(WORKERS)
        changed = copy.deepcopy(VALUES)
        changed["service"] = {"settings": {"tickSeconds": 2}}
        changed["hub"]["extraConfig"] = {"site": "c.JupyterHub.active_server_limit = 100"}
        with renewed(portal):
            portal.release.run("upgrade", values=changed)
        with renewed(portal):
            portal.release.run("rollback", "1")
        (portal.folder / CHECKPOINTS / "go").touch()
        wait_until(lambda: client.job(job.id).state.ended, "the job has ended")
        ended = client.job(job.id)
        assert [attempt.outcome for attempt in ended.attempts] == ["succeeded"]
    assert worker["spec"]["nodeName"] == "node-0"
    assert portal.pod("notebook")["metadata"]["uid"] == notebook
    wait_until(lambda: portal.server().get("ready"), "the new Hub knows her notebook")
    assert portal.ana.get("/user/ana/api/status").status_code == 200


def test_her_notebook_is_stopped_and_the_hub_has_used_its_rights(portal: Portal) -> None:
    started(portal)
    assert portal.hub("DELETE", "/users/ana/server").status_code in (202, 204)
    wait_until(lambda: not portal.server(), "her server has stopped", STARTED, pause=0.5)
    assert not portal.api.items(PODS, labelSelector="app.kubernetes.io/component=notebook")
    portal.told.close()
    for account, seen in portal.asked.items():
        assert not [one for one in seen if one["responseStatus"]["code"] == 403], account
    pods = {(verb, "pods", NAMESPACE) for verb in ("get", "list", "watch", "create", "delete")}
    events = {(verb, "events", NAMESPACE) for verb in ("list", "watch")}
    # Claims are read where they are there already, and deleted with their user.
    assert rights_used(portal.asked["makeway-hub"]) == pods | events | {("create", "persistentvolumeclaims", NAMESPACE)}


def test_uninstalled_the_portal_leaves_the_data(portal: Portal) -> None:
    portal.release.run("uninstall", "--wait")
    assert {one["metadata"]["name"] for one in portal.api.items(CLAIMS.format(NAMESPACE))} == OWN_CLAIMS
    assert portal.release.names(CLAIMS, JOBS) == {CHECKPOINTS}
    assert (portal.folder / "makeway-hub" / "jupyterhub.sqlite").stat().st_size
    assert not portal.release.names(KINDS[0])
