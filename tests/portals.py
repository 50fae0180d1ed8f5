"""The portal that Helm installs on a real node, as its users reach it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
from charts import JOBS, NAMESPACE, Object
from makeway_api.client import Client
from makeway_api.errors import MakewayError
from pods import wait_until
from releases import Installation, installation, requests

from kube_cluster import image_build
from kube_cluster.api import Api
from kube_cluster.cluster import Cluster

POLICY = """
version: 1
pools: [{name: gpu, nodes: {labels: {makeway.test/real: "true"}}}]
profiles:
  - {name: gpu1, title: One GPU, gpus: 1, cpu: 0.1, memory: 512Mi, pools: [gpu], policies: [rnd, devops],
     kinds: [session, job]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [gpu], reserved: 1}]}
  - {name: devops, groups: [devops], quotas: [{pools: [gpu], reserved: 1}]}
"""
TEAMS = {"rnd": ["ana"], "devops": ["bo"]}
USERS = [user for users in TEAMS.values() for user in users]
VALUES: Object = {
    "images": {
        part: dict(zip(("repository", "tag"), image_build.name_of(image).split(":"), strict=True))
        for part, image in {"hub": "hub", "service": "quota-service", "notebook": "notebook", "proxy": "proxy"}.items()
    },
    "policy": POLICY,
    "hub": {
        "config": {
            "JupyterHub": {
                "authenticator_class": "dummy",
                "load_groups": {team: {"users": users} for team, users in TEAMS.items()},
            },
            "Authenticator": {"allowed_users": USERS, "admin_users": ["admin"]},
        },
    },
}
VOLUMES = "/api/v1/persistentvolumes"
CHECKPOINTS = "makeway-checkpoints"
OWN_CLAIMS = {"makeway-hub", "makeway-service"}
HOMES = {f"home-{user}" for user in USERS}
STARTED = 400
"""How many seconds the programs of the portal may take to start, which is a fraction of that on an idle machine."""
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
WORKERS = f"/api/v1/namespaces/{JOBS}/pods"
PARTS = ("hub", "proxy", "service", "images")


class Portal:
    """The running portal; `folder` has its volumes, a folder for each claim."""

    def __init__(self, cluster: Cluster, release: Installation, folder: Path) -> None:
        self.cluster, self.release, self.folder, self.api = cluster, release, folder, release.api
        self.url = f"http://{self.pod('proxy')['status']['podIP']}:8000"
        self._people: dict[str, Person] = {}
        self.told = ExitStack()
        accounts = ("makeway-hub", "makeway-service")
        self.asked = {one: self.told.enter_context(requests(cluster, one)) for one in accounts}

    def person(self, name: str) -> Person:
        """Return a person, who is logged in."""
        if name not in self._people:
            found = Person(self, name)
            answer = self.log_in(found.browser, name, self.release.secret()["password"])
            assert answer.status_code == 200, answer.text
            self._people[name] = found
        return self._people[name]

    def log_in(self, browser: httpx2.Client, name: str, password: str) -> httpx2.Response:
        """Send the form of the login page and return the answer."""
        browser.get("/hub/login")
        form = {"username": name, "password": password}
        return browser.post("/hub/login", params={"_xsrf": browser.cookies["_xsrf"]}, data=form)

    def as_program(self, path: str, key: str) -> httpx2.Response:
        """Send a request to the Hub's API with a token of the chart's secret."""
        headers = {"Authorization": f"token {self.release.secret()[key]}"}
        return httpx2.get(f"{self.url}/hub/api{path}", headers=headers)

    def pods(self, component: str) -> list[Object]:
        """Return the pods of one part of the chart that are not being deleted."""
        label = f"app.kubernetes.io/component={component}"
        return [one for one in self.api.items(PODS, labelSelector=label) if not is_deleted(one)]

    def pod(self, component: str) -> Object:
        """Return the only pod of one part of the chart."""
        (found,) = self.pods(component)
        return found

    def log(self, pod: str) -> str:
        """Return the last lines of a pod of the portal."""
        return self.api.text(f"{PODS}/{pod}/log", tailLines="60")

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Wait after the block until the Hub and the service have new pods, which answer."""
        old = {pod["metadata"]["uid"] for part in ("hub", "service") for pod in self.pods(part)}
        yield
        wait_until(lambda: are_ready(self.api) and not old & uids(self.api), "new pods are ready", STARTED, pause=0.5)
        wait_until(self.answers, "the Hub and the service answer through the proxy", STARTED, pause=0.5)

    def answers(self) -> bool:
        """Whether the proxy reaches the Hub and the service, and the service reaches the Hub."""
        if not httpx2.get(f"{self.url}/hub/api/").is_success:
            return False
        try:
            with self.person(USERS[0]).client() as client:
                return client.me().name == USERS[0]
        except MakewayError:
            return False

    def clean(self) -> None:
        """Stop all notebooks, and cancel all jobs."""
        for person in self._people.values():
            person.stop()
            with person.client() as client:
                for job in client.jobs(mine=True).jobs:
                    if not job.state.ended:
                        client.cancel(job.id)
        wait_until(lambda: not self.api.items(WORKERS), "no job has a pod", pause=0.5)

    def close(self) -> None:
        """End the sessions of all people."""
        for person in self._people.values():
            person.browser.close()


class Person:
    """A user of the portal, with a browser that renders nothing."""

    def __init__(self, portal: Portal, name: str) -> None:
        self.portal, self.name = portal, name
        self.browser = httpx2.Client(base_url=portal.url, follow_redirects=True, timeout=60)

    def hub(self, method: str, path: str, **more: Any) -> httpx2.Response:
        """Send a request to the Hub's API as the browser does."""
        token = self.browser.cookies.get("_xsrf", path="/hub/")
        headers = {"X-XSRFToken": token, "Referer": f"{self.portal.url}/hub/home"}
        return self.browser.request(method, f"/hub/api{path}", headers=headers, **more)

    def client(self) -> Client:
        """Return a client of the quota service with a new token, through the proxy."""
        token = self.hub("POST", f"/users/{self.name}/tokens", json={"note": "test"}).json()["token"]
        return Client(f"{self.portal.url}/services/makeway", token)

    def server(self) -> Object:
        """Return the Hub's model of the person's default server, empty without one."""
        return dict(self.hub("GET", f"/users/{self.name}").json()["servers"].get("", {}))

    def notebook(self) -> Object:
        """Return the pod of the person's notebook."""
        label = f"app.kubernetes.io/component=notebook,hub.jupyter.org/username={self.name}"
        (found,) = self.portal.api.items(PODS, labelSelector=label)
        return found

    def started(self, options: Mapping[str, Any]) -> Object:
        """Start the person's server with these options, if it does not run, and return its pod."""
        if not self.server().get("ready"):
            answer = self.hub("POST", f"/users/{self.name}/server", json=dict(options))
            assert answer.status_code in (201, 202), answer.text
            wait_until(lambda: self.server().get("pending") != "spawn", "the start has ended", STARTED, pause=0.5)
            assert self.server().get("ready"), self.portal.log(self.portal.pod("hub")["metadata"]["name"])
        return self.notebook()

    def stop(self) -> None:
        """Stop the person's server, and wait until its pod is gone."""
        if self.server():
            answer = self.hub("DELETE", f"/users/{self.name}/server")
            assert answer.status_code in (202, 204), answer.text
            wait_until(lambda: not self.server(), "the server has stopped", STARTED, pause=0.5)


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


@contextmanager
def installed(cluster: Cluster, volume_folder: Path, helm_folder: Path) -> Iterator[Portal]:
    """Yield the portal that Helm installed, once all its pods are ready; afterwards all of it is gone."""
    api = cluster.api
    claims = dict.fromkeys(OWN_CLAIMS | HOMES, NAMESPACE) | {CHECKPOINTS: JOBS}
    with volumes(api, volume_folder, **claims), installation(cluster, helm_folder) as release:
        release.run("install", values=VALUES)
        try:
            wait_until(lambda: are_ready(api), "all pods of the chart are ready", STARTED, pause=0.5)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{told(api)}") from late
        portal = Portal(cluster, release, volume_folder)
        yield portal
        portal.close()
        for pods in (WORKERS, PODS):
            api.delete(pods, gracePeriodSeconds="0")


def are_ready(api: Api) -> bool:
    """Whether the pods of all parts of the chart are ready."""
    found = [pod for pod in api.items(PODS) if not is_deleted(pod)]
    parts = {one["metadata"]["labels"].get("app.kubernetes.io/component") for one in found}
    conditions = [{one["type"]: one["status"] for one in pod["status"].get("conditions", ())} for pod in found]
    return set(PARTS) <= parts and all(one.get("Ready") == "True" for one in conditions)


def uids(api: Api) -> set[str]:
    """Return the UIDs of the portal's pods."""
    return {one["metadata"]["uid"] for one in api.items(PODS)}


def told(api: Api) -> str:
    """Return what the cluster says about the portal's pods."""
    events = api.items(f"/api/v1/namespaces/{NAMESPACE}/events")
    states = [f"{one['metadata']['name']}: {one['status'].get('containerStatuses')}" for one in api.items(PODS)]
    return "\n".join([*states, *(f"{one['reason']}: {one.get('message')}" for one in events)])
