"""What a site with Zero to JupyterHub adds to it for Makeway, as docs/how-to/on-your-cluster.md says."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import yaml
from charts import CHART, NAMESPACE, Object
from pods import wait_until
from portals import PODS, STARTED, TEAMS, USERS, VALUES, WORKERS, Site
from releases import Installation, installation
from walk import Walk, blocks, file_of, section

from kube_cluster import programs
from kube_cluster.cluster import Cluster
from kube_cluster.portal import PARTS, pod_events, ready_parts

LEASE_SECONDS = 20
ADD_ON: Object = {
    "mode": "addOn",
    "policy": file_of(5, "policy.yaml"),
    "images": {name: VALUES["images"][name] for name in ("service", "notebook")},
    "service": {"settings": {"leaseSeconds": LEASE_SECONDS}},
}
"""The values of Makeway's chart."""
ADMIN = "root"
SITE: Object = {
    "config": {
        "JupyterHub": {
            "authenticator_class": "dummy",
            "load_groups": {team: {"users": users} for team, users in TEAMS.items()},
        },
        "Authenticator": {"allowed_users": USERS, "admin_users": [ADMIN]},
        "DummyAuthenticator": {"password": "secret of the site"},
        "KubeSpawner": {"http_timeout": 120},  # a notebook starts slowly where many tests run
    },
    "loadRoles": {"site": {"scopes": ["read:users:name"], "users": USERS[:1]}},
    "extraConfig": {"site": 'c.JupyterHub.authenticator_class = "dummy"'},
}
"""The site's own `hub` of its values."""
PASSWORD = SITE["config"]["DummyAuthenticator"]["password"]


def overlay(image: str) -> Object:
    """Return z2jh-values.yaml with what its reader has to write: the Hub's image, administrators, and seconds."""
    text = (CHART / "z2jh-values.yaml").read_text(encoding="utf-8")
    text = replaced(text, "lease_seconds=15,", f"lease_seconds={LEASE_SECONDS},")
    values: Object = yaml.safe_load(replaced(text, 'admin_users=["admin"]', f'admin_users=["{ADMIN}"]'))
    values["hub"]["image"] = dict(zip(("name", "tag"), image.split(":"), strict=True))
    return values


def removal() -> Object:
    """Return z2jh-removal-values.yaml."""
    values: Object = yaml.safe_load((CHART / "z2jh-removal-values.yaml").read_text(encoding="utf-8"))
    return values


def dockerfile() -> str:
    """Return the Dockerfile of the guide, by which Makeway's package comes into the Hub's image of a site."""
    (result,) = blocks(section("Add it to a Zero to JupyterHub"), "dockerfile")
    return result


def replaced(text: str, old: str, new: str) -> str:
    """Return a text in which what is there once is something else."""
    assert text.count(old) == 1, old
    return text.replace(old, new)


def in_pod(cluster: Cluster, pod: str, *command: str) -> str:
    """Run a command in the container of a pod of the site and return what it printed."""
    kubectl = [programs.kubectl(), "--kubeconfig", cluster.kubeconfig, "--namespace", NAMESPACE]
    done = subprocess.run([*kubectl, "exec", pod, "--", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def namespace_of_site(cluster: Cluster, folder: Path) -> Iterator[Installation]:
    """Yield the release of Makeway's chart, not installed, in the site's namespace; the nodes have their label."""
    api = cluster.api
    Walk(cluster, folder).step(3)
    # Zero to JupyterHub's own pods do not pass the restricted standard.
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE, "labels": labels}})
    with installation(cluster, folder, make_namespace=False) as release:
        yield release
        for pods in (WORKERS, PODS):
            api.delete(pods, gracePeriodSeconds="0")


def wait_until_ready(site: Site, parts: Iterable[str] = PARTS) -> None:
    """Return once all pods of these parts are ready and the proxy shows the login page."""
    try:
        wait_until(lambda: set(parts) <= ready_parts(site.api), "all parts are ready", STARTED, pause=0.5)
        wait_until(lambda: shows_login(site), "the proxy shows the login page", STARTED, pause=0.5)
    except TimeoutError as late:
        raise TimeoutError(f"{late}\n{pod_events(site.api)}") from late


def shows_login(site: Site) -> bool:
    """Whether the proxy shows the login page."""
    try:
        return httpx2.get(f"{site.url}/hub/login").is_success
    except httpx2.TransportError:
        return False
