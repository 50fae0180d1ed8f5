"""The portal of the Helm chart on a cluster of this machine: its images, the demo's values, and its installation.

`make run-kube` runs it for people, and the tests install it the same way.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx2
import yaml
from makeway_hub.sample import SAMPLE_ADMIN, SAMPLE_GROUPS, SAMPLE_USERS
from makeway_quota.policy import rescale_text

from . import image_build, processes, programs
from .api import Api, Object
from .cluster import Cluster
from .helm import Helm
from .problems import KubeProblem
from .simulated import SIMULATED as SIMULATED_TAINT
from .stand_in_autoscaler import POOL

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "makeway"
SAMPLE_POLICY = ROOT / "hub_config" / "machines" / "policy.yaml"
RELEASE = NAMESPACE = "makeway"
JOBS = f"{NAMESPACE}-jobs"
IMAGES = {"hub": "hub", "service": "quota-service", "notebook": "notebook", "proxy": "proxy"}
"""The chart's names of the images, and their folders in helm/images."""
PARTS = ("hub", "images", "proxy", "service")
"""The parts of the chart whose pods run all the time."""
STARTED_SECONDS = 400.0
"""How long the pods may take to become ready, which is a fraction of that on an idle machine."""
LOCAL = """\
    # The GPUs of this machine. Without any, Makeway makes virtual ones, marked as such wherever they appear.
    nodes:
      local: {gpus: all}
"""
LABELLED = """\
    # The nodes of the cluster with this label.
    nodes:
      labels: {makeway.test/real: "true"}
"""
GROWS = """\
    kind: autoscaled
"""
SIMULATED = f"""\
    kind: autoscaled
    # Simulated nodes with this label: an imitated autoscaler of the cluster adds and removes them.
    nodes:
      labels: {{{POOL}: cloud}}
"""
GROUPS = {"small-2": (2, 2), "large-4": (4, 1)}
"""The imitated autoscaler's groups of nodes: the GPUs of a node, and the most nodes."""
DEPLOYMENT = """\
# The deployment that `make run-kube` starts with: nodes of two types, which an imitated autoscaler of the cluster adds
# and removes. The prices are examples; nothing is paid.
version: 1
name: demo
title: Demo cluster
provider: kubernetes
hour: 12
max_machines: 3
poll_interval: 2
machine_types:
  - {name: small, pool: cloud, instance: small-2, gpus: 2, price: 1.20, max_machines: 2, idle_timeout: 30}
  - {name: large, pool: cloud, instance: large-4, gpus: 4, price: 3.10, max_machines: 1, idle_timeout: 30}
"""
TOUR = '''
c.KubeSpawner.cmd = ["python3", "-c", """
import os, shutil, sys
from pathlib import Path
from makeway_spawner.home import TOUR
for file in TOUR.glob("*.ipynb"):
    if not Path(file.name).exists():
        shutil.copy(file, file.name)
os.execvp("jupyterhub-singleuser", ["jupyterhub-singleuser", *sys.argv[1:]])
"""]
'''
"""Configuration of the Hub that brings the tour into the home of each sample user."""

REPLACED = {
    LOCAL: LABELLED,
    GROWS: SIMULATED,
    "A job on a machine that is launched": "A simulated job of 20 s on a node that is added",
    "A job on a large machine that is launched": "A simulated job of 20 s on a large node that is added",
    ", and ended when none does.": ", and removed when none does.",
}
"""Lines of the sample, and what they are on the cluster."""


def image_values() -> Object:
    """Return the chart's value `images` for the images that are built here."""
    names = {part: image_build.name_of(image).rpartition(":") for part, image in IMAGES.items()}
    return {part: {"repository": repository, "tag": tag} for part, (repository, _, tag) in names.items()}


def demo_values(gpus: int) -> Object:
    """Return values for a look at the portal: the users, teams and policy of `make run`, scaled to these GPUs."""
    sample = SAMPLE_POLICY.read_text(encoding="utf-8")
    for lines, others in REPLACED.items():
        if lines not in sample:
            raise KubeProblem(
                f"{SAMPLE_POLICY} has no longer the lines that are replaced for nodes of a cluster: {lines}"
            )
        sample = sample.replace(lines, others)
    policy = rescale_text(sample, str(SAMPLE_POLICY), {"gpu": gpus})
    groups = {team: {"users": users} for team, users in SAMPLE_GROUPS.items()}
    return {
        "images": image_values(),
        "policy": policy,
        "clusterAutoscaler": {"enabled": True, "deployment": DEPLOYMENT},
        "jobs": {"tolerations": [SIMULATED_TAINT]},
        "proxy": {"service": {"type": "NodePort"}},
        "hub": {
            "makewayAdmins": {"users": [SAMPLE_ADMIN]},
            "config": {
                "JupyterHub": {"authenticator_class": "dummy", "load_groups": groups},
                "Authenticator": {"allowed_users": sorted(SAMPLE_USERS), "admin_users": [SAMPLE_ADMIN]},
            },
            "extraConfig": {"tour": TOUR},
        },
    }


def install(cluster: Cluster, values: Object, namespace: str = NAMESPACE) -> None:
    """Install the chart by Helm in a new namespace, as docs/how-to/on-your-cluster.md tells."""
    folder = cluster.folder.path / "helm"
    folder.mkdir(exist_ok=True)
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    options = ("--namespace", namespace, "--create-namespace", "--values", file)
    Helm(folder, cluster.kubeconfig).run("install", RELEASE, CHART, *options)


def wait_until_ready(
    cluster: Cluster, namespace: str = NAMESPACE, say: Callable[[str], None] = lambda text: None
) -> None:
    """Return once all parts are ready, and say which are; KubeProblem with what the cluster says if they are not."""
    printed = set[str]()

    def ready() -> bool:
        result = ready_parts(cluster.api, namespace)
        for part in sorted(result - printed):
            say(f"{part} is ready")
        printed.update(result)
        return result >= set(PARTS)

    try:
        processes.wait_until(ready, "The portal", STARTED_SECONDS, cluster.check)
        # The Hub tells the proxy the routes to itself and to the service a moment later, the second one after it has
        # waited for the service; kube-proxy makes that of the Service as late.
        reached = partial(_reached, cluster.api, namespace)
        processes.wait_until(reached, "The way to the Hub and the service", STARTED_SECONDS, cluster.check)
    except KubeProblem as problem:
        raise KubeProblem(f"{problem} The cluster says:\n{pod_events(cluster.api, namespace)}") from problem


def _reached(api: Api, namespace: str) -> bool:
    """Whether the proxy's pod, and its port on the node where it has one, show the login page and the service."""
    result = [one["status"].get("podIP") for one in pods(api, namespace) if "-proxy-" in one["metadata"]["name"]]
    port = api.get(f"/api/v1/namespaces/{namespace}/services/{RELEASE}-proxy")["spec"]["ports"][0]
    urls = [f"http://{ip}:8000" for ip in result] + ([address(api, namespace)] if "nodePort" in port else [])
    try:
        paths = ("hub/login", "services/makeway/healthz")
        return all(httpx2.get(f"{url}/{path}", trust_env=False).is_success for url in urls for path in paths)
    except httpx2.TransportError:
        return False


def ready_parts(api: Api, namespace: str = NAMESPACE) -> set[str]:
    """Return the parts of the chart whose pods are all ready."""
    result: dict[str, list[bool]] = {}
    for pod in pods(api, namespace):
        if "deletionTimestamp" not in pod["metadata"]:
            conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
            part = pod["metadata"]["labels"].get("app.kubernetes.io/component", "")
            result.setdefault(part, []).append(conditions.get("Ready") == "True")
    return {part for part in PARTS if all(result.get(part, [False]))}


def pods(api: Api, namespace: str = NAMESPACE) -> list[Object]:
    """Return the pods of a namespace."""
    return api.items(f"/api/v1/namespaces/{namespace}/pods")


def pod_events(api: Api, namespace: str = NAMESPACE) -> str:
    """Return what the cluster says about the portal's pods."""
    events = api.items(f"/api/v1/namespaces/{namespace}/events")
    states = [f"{one['metadata']['name']}: {one['status'].get('containerStatuses')}" for one in pods(api, namespace)]
    return "\n".join([*states, *(f"{one['reason']}: {one.get('message')}" for one in events)])


def secret(api: Api, namespace: str = NAMESPACE) -> dict[str, str]:
    """Return the Secret that the chart made."""
    data = api.get(f"/api/v1/namespaces/{namespace}/secrets/{RELEASE}")["data"]
    return {name: base64.b64decode(value).decode() for name, value in data.items()}


def address(api: Api, namespace: str = NAMESPACE) -> str:
    """Return the URL of the portal for browsers of this machine: the port that its Service has on the node."""
    service = api.get(f"/api/v1/namespaces/{namespace}/services/{RELEASE}-proxy")
    (node, *_) = api.items("/api/v1/nodes", labelSelector="makeway.test/real=true")
    result = {one["type"]: one["address"] for one in node["status"]["addresses"]}
    return f"http://{result['InternalIP']}:{service['spec']['ports'][0]['nodePort']}"


def announcement(cluster: Cluster, namespace: str = NAMESPACE) -> str:
    """Return the text for the terminal: the address, who may log in, how to look at the cluster, how to stop."""
    lines = ["", f"  Makeway is ready at  {address(cluster.api, namespace)}", ""]
    lines += [f"    {name:<8} {text}" for name, text in SAMPLE_USERS.items()]
    lines += [
        "",
        f"  The password of all is  {secret(cluster.api, namespace)['password']}",
        "",
        "  What runs where, in another terminal:",
        "",
        f"    export KUBECONFIG={cluster.kubeconfig}",
        f"    alias kubectl={programs.kubectl()}",
        "    kubectl get pods --all-namespaces",
        "",
        "  Ctrl-C removes the cluster and everything in it.",
        "",
    ]
    return "\n".join(lines)
