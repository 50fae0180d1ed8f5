"""The portal that Helm installs on a real node, as its users reach it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import yaml
from charts import JOBS, NAMESPACE, Object
from makeway_api.client import Client
from makeway_api.errors import MakewayError
from makeway_api.models import Session
from pods import wait_until
from releases import CLAIMS, Installation, installation, requests
from walk import Walk, file_of, values

from kube_cluster import image_build
from kube_cluster.api import Api
from kube_cluster.cluster import Cluster
from kube_cluster.portal import wait_until_ready
from kube_cluster.provisioner import name_of

VALUES = values()
TEAMS = {team: group["users"] for team, group in VALUES["hub"]["config"]["JupyterHub"]["load_groups"].items()}
USERS = [user for users in TEAMS.values() for user in users]
CHECKPOINTS = "makeway-checkpoints"
OWN_CLAIMS = {"makeway-hub", "makeway-service", "makeway-files"}
HOMES = {f"home-{user}" for user in USERS}
STARTED = 400
"""How many seconds the programs of the portal may take to start, which is a fraction of that on an idle machine."""
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
WORKERS = f"/api/v1/namespaces/{JOBS}/pods"
OTHER_IMAGE = "site.test/notebook:2"
"""Another name of the notebook's image."""
IMAGES = [{"name": "usual", "image": image_build.name_of("notebook")}, {"name": "other", "image": OTHER_IMAGE}]


class Site:
    """A running JupyterHub whose users all have one password; `release`: where the namespace has several."""

    def __init__(self, api: Api, password: str, release: str = "", namespace: str = NAMESPACE) -> None:
        self.api, self.password, self.namespace = api, password, namespace
        self.all_pods = f"/api/v1/namespaces/{namespace}/pods"
        self._own = f"app.kubernetes.io/instance={release}," if release else ""
        self._people: dict[str, Person] = {}

    @property
    def url(self) -> str:
        """The address of the proxy that runs now."""
        return f"http://{self.pod('proxy')['status']['podIP']}:8000"

    def person(self, name: str) -> Person:
        """Return a person, who is logged in."""
        if name not in self._people:
            result = Person(self, name)
            answer = log_in(result.browser, name, self.password)
            assert answer.status_code == 200, answer.text
            self._people[name] = result
        return self._people[name]

    def pods(self, component: str) -> list[Object]:
        """Return the pods of one part of the chart that are not being deleted."""
        return [one for one in self.labelled(f"app.kubernetes.io/component={component}") if not is_deleted(one)]

    def labelled(self, label: str) -> list[Object]:
        """Return the pods of this site with a label."""
        return self.api.items(self.all_pods, labelSelector=f"{self._own}{label}")

    def pod(self, component: str) -> Object:
        """Return the only pod of one part of the chart."""
        (result,) = self.pods(component)
        return result

    def log(self, pod: str) -> str:
        """Return the last lines of a pod of the portal."""
        return self.api.text(f"{self.all_pods}/{pod}/log", tailLines="60")

    def close(self) -> None:
        """End the sessions of all people, who log in again when they are asked for."""
        while self._people:
            self._people.popitem()[1].browser.close()


class Portal(Site):
    """The running portal."""

    def __init__(self, cluster: Cluster, release: Installation, walk: Walk) -> None:
        super().__init__(release.api, release.secret()["password"], release.name, release.namespace)
        self.cluster, self.release, self.walk = cluster, release, walk
        self.told = ExitStack()
        accounts = (f"{release.prefix}-hub", f"{release.prefix}-service")
        self.asked = {one: self.told.enter_context(requests(cluster, one, release.namespace)) for one in accounts}

    def as_program(self, path: str, key: str) -> httpx2.Response:
        """Send a request to the Hub's API with a token of the chart's secret."""
        headers = {"Authorization": f"token {self.release.secret()[key]}"}
        return httpx2.get(f"{self.url}/hub/api{path}", headers=headers)

    def volume(self, claim: str, namespace: str = "") -> Path:
        """Return the folder of this machine that a claim got."""
        path = CLAIMS.format(namespace or self.namespace)
        return self.cluster.volumes / name_of(self.api.get(f"{path}/{claim}"))

    @contextmanager
    def renewed(self, *parts: str) -> Iterator[None]:
        """Wait after the block until these parts, else the Hub and the service, have new pods, which answer."""
        old = {pod["metadata"]["uid"] for part in parts or ("hub", "service") for pod in self.pods(part)}
        yield
        wait_until(lambda: not old & uids(self.api), "the old pods are gone", STARTED, pause=0.5)
        wait_until_ready(self.cluster)
        wait_until(self.answers, "the Hub and the service answer through the proxy", STARTED, pause=0.5)

    def answers(self) -> bool:
        """Whether the proxy reaches the Hub and the service, and the service reaches the Hub."""
        try:
            if not httpx2.get(f"{self.url}/hub/api/").is_success:
                return False
            with self.person(USERS[0]).client() as client:
                return client.me().name == USERS[0]
        except (MakewayError, httpx2.TransportError):
            return False

    @contextmanager
    def offering(self, *profiles: Object) -> Iterator[None]:
        """Have more profiles than those of the page during the block; they may offer `IMAGES`."""
        for node in self.cluster.nodes:
            node.tag_image(image_build.name_of("notebook"), OTHER_IMAGE)
        policy = yaml.safe_load(file_of(5, "policy.yaml"))
        policy["profiles"] += profiles
        with self.person("admin").client() as admin:
            before = admin.policy().document
            admin.policy_apply(yaml.safe_dump(policy))
            yield
            self.clean()
            admin.policy_apply(before)

    def runs(self, session: Session) -> bool:
        """Whether a session has a pod whose containers may run."""
        pods = self.api.items(self.all_pods, labelSelector=f"makeway/session={session.id}")
        return any(pod["status"]["phase"] in ("Pending", "Running") for pod in pods)

    def clean(self) -> None:
        """Stop all notebooks, and cancel all jobs."""
        for person in map(self.person, USERS):
            person.stop()
            with person.client() as client:
                for job in client.jobs(mine=True).jobs:
                    if not job.state.ended:
                        client.cancel(job.id)
        wait_until(lambda: not self.api.items(WORKERS), "no job has a pod", pause=0.5)


class Person:
    """A user of the portal, with a browser that renders nothing."""

    def __init__(self, portal: Site, name: str) -> None:
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

    def server(self, name: str = "") -> Object:
        """Return the Hub's model of a server of the person, empty without one."""
        return dict(self.hub("GET", f"/users/{self.name}").json()["servers"].get(name, {}))

    def session(self, server: str = "") -> Session:
        """Return the live session of a server of the person."""
        with self.client() as client:
            (result,) = [one for one in client.sessions() if one.server == server]
        assert isinstance(result, Session)
        return result

    def notebook(self, server: str = "") -> Object:
        """Return the pod of a server of the person."""
        pods = self.portal.labelled(f"hub.jupyter.org/username={self.name}")
        name = "hub.jupyter.org/servername"
        (result,) = [one for one in pods if one["metadata"]["annotations"].get(name, "") == server]
        return result

    def begin(self, options: Mapping[str, Any], server: str = "") -> None:
        """Have the Hub start a server with these options."""
        answer = self.hub("POST", self._path(server), json=dict(options))
        assert answer.status_code in (201, 202), answer.text

    def wait(self, server: str = "") -> Object:
        """Wait until a server has started, and return its pod."""
        wait_until(lambda: self.server(server).get("pending") != "spawn", "the start has ended", STARTED, pause=0.5)
        assert self.server(server).get("ready"), self.portal.log(self.portal.pod("hub")["metadata"]["name"])
        return self.notebook(server)

    def started(self, options: Mapping[str, Any]) -> Object:
        """Start the person's default server with these options, if it neither runs nor starts, and return its pod."""
        if not self.server():
            self.begin(options)
        return self.wait()

    def progress(self, server: str = "") -> list[Object]:
        """Return all events of a start, once it has ended."""
        answer = self.hub("GET", f"{self._path(server)}/progress", timeout=STARTED)
        answer.raise_for_status()
        return [json.loads(line.removeprefix("data:")) for line in answer.text.splitlines() if line.startswith("data:")]

    def stop(self, server: str = "") -> None:
        """Stop a server of the person, and wait until its pod is gone."""
        if self.server(server):
            answer = self.hub("DELETE", self._path(server))
            assert answer.status_code in (202, 204), answer.text
            wait_until(lambda: not self.server(server), "the server has stopped", STARTED, pause=0.5)

    def told(self, server: str = "") -> str:
        """Return what the Hub's page says of a server that has ended, once the Hub has noticed it."""
        wait_until(lambda: not self.server(server), "the Hub lists the server no more")
        result = re.search(r'id="mw-end">(.*?)</div>', self.page(server))
        return result[1].strip() if result else ""

    def page(self, server: str = "") -> str:
        """Return the Hub's page for a server that does not run, with single spaces."""
        return " ".join(self.browser.get(f"/hub/user/{self.name}/{server}{'/' if server else ''}lab").text.split())

    def _path(self, server: str) -> str:
        return f"/users/{self.name}/server" + (f"s/{server}" if server else "")


def log_in(browser: httpx2.Client, name: str, password: str) -> httpx2.Response:
    """Send the form of the login page and return the answer."""
    browser.get("/hub/login")
    form = {"username": name, "password": password}
    return browser.post("/hub/login", params={"_xsrf": browser.cookies["_xsrf"]}, data=form)


def is_deleted(pod: Object) -> bool:
    """Whether a pod is being deleted."""
    return "deletionTimestamp" in pod["metadata"]


@contextmanager
def installed(cluster: Cluster, folder: Path) -> Iterator[Portal]:
    """Yield the portal that steps 3 to 7 of the page install, once all its pods are ready; afterwards it is gone."""
    walk = Walk(cluster, folder)
    with installation(cluster, folder, make_namespace=False) as release:
        walk.write()
        for number in range(3, 8):
            walk.step(number)
        wait_until_ready(cluster)
        portal = Portal(cluster, release, walk)
        wait_until(portal.answers, "the Hub and the service answer through the proxy", STARTED, pause=0.5)
        yield portal
        portal.close()
        for pods in (WORKERS, PODS):
            cluster.api.delete(pods, gracePeriodSeconds="0")


def uids(api: Api) -> set[str]:
    """Return the UIDs of the portal's pods."""
    return {one["metadata"]["uid"] for one in api.items(PODS)}
