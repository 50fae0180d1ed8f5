"""A site that is configured as Zero to JupyterHub configures one, with what the values `hub` and `singleuser` say.

It stands in for that chart where its source is not there; test_zero_to_jupyterhub.py takes the chart itself.
"""

from __future__ import annotations

import base64
import secrets

import yaml
from charts import NAMESPACE, Object

from kube_cluster import image_build
from kube_cluster.api import Api

CONFIG = """
import os
from pathlib import Path
import yaml

def secret(key):
    return Path("/etc/hub", key).read_text()

values = yaml.safe_load(secret("values.yaml"))
hub, singleuser = values["hub"], values["singleuser"]
c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
c.JupyterHub.hub_bind_url = "http://:8081"
c.JupyterHub.hub_connect_url = "http://hub:8081"
c.JupyterHub.db_url = "sqlite://"
c.JupyterHub.cleanup_servers = False
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}
c.JupyterHub.concurrent_spawn_limit = 64
c.JupyterHub.cookie_secret = secret("hub.config.JupyterHub.cookie_secret")
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = "http://proxy-api:8001"
c.Spawner.consecutive_failure_limit = 5
c.Spawner.cmd = "jupyterhub-singleuser"
c.KubeSpawner.namespace = os.environ["POD_NAMESPACE"]
c.KubeSpawner.common_labels = {
    "app": "jupyterhub", "app.kubernetes.io/name": "jupyterhub", "release": "jupyterhub",
    "app.kubernetes.io/instance": "jupyterhub", "app.kubernetes.io/managed-by": "kubespawner",
}
c.KubeSpawner.extra_labels = {"hub.jupyter.org/network-access-hub": "true"}
c.KubeSpawner.uid, c.KubeSpawner.fs_gid = 1000, 100
c.KubeSpawner.start_timeout = 300
c.KubeSpawner.volumes = {"home": {"name": "home", "emptyDir": {}}}
c.KubeSpawner.volume_mounts = {"home": {"name": "home", "mountPath": "/home/jovyan"}}
c.KubeSpawner.mem_guarantee = singleuser["memory"]["guarantee"]
c.KubeSpawner.image = "{name}:{tag}".format(**singleuser["image"])
c.KubeSpawner.node_affinity_preferred.append(
    {"weight": 100, "preference": {"matchExpressions": [
        {"key": "hub.jupyter.org/node-purpose", "operator": "In", "values": ["user"]}]}}
)
c.KubeSpawner.tolerations = [
    {"key": "hub.jupyter.org/dedicated", "operator": "Equal", "value": "user", "effect": "NoSchedule"}]
c.JupyterHub.services = []
c.JupyterHub.load_roles = []
for name, service in hub["services"].items():
    c.JupyterHub.services.append({"name": name, **service, "api_token": secret(f"hub.services.{name}.apiToken")})
for name, role in hub["loadRoles"].items():
    c.JupyterHub.load_roles.append({"name": name, **role})
for section, traits in hub["config"].items():
    c[section].update(traits)
for name, text in sorted(hub["extraConfig"].items()):
    exec(text)
"""
HUB = "makeway.test/hub:1"
SINGLEUSER: Object = {
    "image": dict(zip(("name", "tag"), image_build.name_of("notebook").split(":"), strict=True)),
    "memory": {"guarantee": "128M"},
}
RIGHTS = [
    {
        "apiGroups": [""],
        "resources": ["pods", "persistentvolumeclaims", "secrets", "services"],
        "verbs": ["get", "watch", "list", "create", "delete"],
    },
    {"apiGroups": [""], "resources": ["events"], "verbs": ["get", "watch", "list"]},
]


def merged(site: Object, more: Object) -> Object:
    """Return values as Helm merges those of two files."""
    result = dict(site)
    for key, value in more.items():
        result[key] = merged(site[key], value) if isinstance(value, dict) and isinstance(site.get(key), dict) else value
    return result


def install(api: Api, hub: Object) -> None:
    """Create the site with the values `hub`; its namespace is there."""
    create(api, "/api/v1", "secrets", "hub", {"data": encoded(secret(hub))})
    create(api, "/api/v1", "serviceaccounts", "hub", {})
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    create(api, rbac, "roles", "hub", {"rules": RIGHTS})
    account = {"kind": "ServiceAccount", "name": "hub", "namespace": NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "hub"}
    create(api, rbac, "rolebindings", "hub", {"subjects": [account], "roleRef": role})
    for name, component, ports in (
        ("hub", "hub", {8081: 8081}),
        ("proxy-api", "proxy", {8001: 8001}),
        ("proxy-public", "proxy", {80: 8000}),
    ):
        listed = [{"port": port, "targetPort": target} for port, target in ports.items()]
        create(api, "/api/v1", "services", name, {"spec": {"selector": labels(component), "ports": listed}})
    create(api, "/apis/apps/v1", "deployments", "hub", {"spec": deployment("hub", hub_pod())})
    create(api, "/apis/apps/v1", "deployments", "proxy", {"spec": deployment("proxy", proxy_pod())})


def secret(hub: Object) -> dict[str, str]:
    """Return the Secret `hub`: the values, the services' tokens, and the Hub's own secrets."""
    values = {"hub": hub, "singleuser": SINGLEUSER}
    tokens = {f"hub.services.{name}.apiToken": secrets.token_hex(32) for name in hub["services"]}
    return {
        "values.yaml": yaml.safe_dump(values),
        "jupyterhub_config.py": CONFIG,
        "hub.config.ConfigurableHTTPProxy.auth_token": secrets.token_hex(32),
        "hub.config.JupyterHub.cookie_secret": secrets.token_hex(32),
        **tokens,
    }


def encoded(values: dict[str, str]) -> dict[str, str]:
    """Return values as a Secret holds them."""
    return {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}


def create(api: Api, group: str, kind: str, name: str, body: Object) -> None:
    """Create one object of the site."""
    api.create(f"{group}/namespaces/{NAMESPACE}/{kind}", {"metadata": {"name": name}, **body})


def labels(component: str) -> dict[str, str]:
    """Return the labels of a part of the site, the old ones and the new ones."""
    return {
        "app": "jupyterhub",
        "component": component,
        "release": "jupyterhub",
        "app.kubernetes.io/name": "jupyterhub",
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/instance": "jupyterhub",
    }


def deployment(component: str, pod: Object) -> Object:
    """Return the spec of a Deployment of one pod."""
    template = {"metadata": {"labels": labels(component)}, "spec": pod}
    return {"selector": {"matchLabels": labels(component)}, "strategy": {"type": "Recreate"}, "template": template}


def from_secret(variable: str, key: str) -> Object:
    """Return a variable with a value of the Secret `hub`."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": "hub", "key": key}}}


def hub_pod() -> Object:
    """Return the pod of the Hub."""
    return {
        "serviceAccountName": "hub",
        "securityContext": {"fsGroup": 1000},
        "containers": [
            {
                "name": "hub",
                "image": HUB,
                "args": ["--config", "/etc/hub/jupyterhub_config.py"],
                "env": [
                    {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
                    from_secret("CONFIGPROXY_AUTH_TOKEN", "hub.config.ConfigurableHTTPProxy.auth_token"),
                ],
                "readinessProbe": {"httpGet": {"path": "/hub/health", "port": 8081}, "periodSeconds": 1},
                "workingDir": "/tmp",
                "volumeMounts": [{"name": "secret", "mountPath": "/etc/hub"}],
            }
        ],
        "volumes": [{"name": "secret", "secret": {"secretName": "hub"}}],
    }


def proxy_pod() -> Object:
    """Return the pod of the proxy."""
    listening = ["--ip=", "--api-ip=", "--api-port=8001", "--default-target=http://hub:8081"]
    return {
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": "chp",
                "image": image_build.name_of("proxy"),
                "args": [*listening, "--error-target=http://hub:8081/hub/error", "--port=8000"],
                "env": [from_secret("CONFIGPROXY_AUTH_TOKEN", "hub.config.ConfigurableHTTPProxy.auth_token")],
                "readinessProbe": {"httpGet": {"path": "/_chp_healthz", "port": 8000}, "periodSeconds": 1},
            }
        ],
    }


def token_of(api: Api, service: str) -> str:
    """Return the token of one of the Hub's services."""
    data = api.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/hub")["data"]
    return base64.b64decode(data[f"hub.services.{service}.apiToken"]).decode()
