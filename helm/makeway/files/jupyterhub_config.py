"""The Hub's configuration in the chart: values.json beside this file holds what the chart's values say."""

import json
import os
from pathlib import Path

from makeway_hub.cluster import SERVICE, SPAWNER, ClusterSettings, configure_cluster
from traitlets.config.loader import LazyConfigValue

values = json.loads(Path(__file__).with_name("values.json").read_text(encoding="utf-8"))

c = get_config()  # noqa: F821 (JupyterHub provides it)

c.JupyterHub.hub_bind_url = "http://:8081"
c.JupyterHub.hub_connect_url = values["hubUrl"]
c.JupyterHub.db_url = os.environ.get("HUB_DB_URL", "").strip() or "sqlite:////data/jupyterhub.sqlite"
c.JupyterHub.cleanup_servers = False  # notebooks go on while the Hub is replaced
c.JupyterHub.allow_named_servers = True
c.JupyterHub.named_server_limit_per_user = 3
c.JupyterHub.last_activity_interval = 30  # then a proxy that was restarted gets its routes again, too
c.JupyterHub.services = []
c.JupyterHub.load_roles = []
c.JupyterHub.template_paths = []
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = values["proxyApi"]
c.DummyAuthenticator.password = os.environ["DUMMY_PASSWORD"]
if values["firstLook"]:
    c.Authenticator.admin_users = {"admin"}

c.KubeSpawner.namespace = os.environ["POD_NAMESPACE"]
if ":" in os.environ.get("POD_IP", ""):
    c.KubeSpawner.ip = "::"  # pods of this cluster have IPv6 addresses, and notebooks listen on IPv4 alone by default
c.KubeSpawner.image = values["notebookImage"]
c.KubeSpawner.image_pull_policy = values["pullPolicy"]
c.KubeSpawner.image_pull_secrets = values["pullSecrets"]
c.KubeSpawner.cmd = ["jupyterhub-singleuser"]
c.KubeSpawner.default_url = "/lab"
c.KubeSpawner.common_labels = {**values["labels"], "app.kubernetes.io/managed-by": "kubespawner"}
c.KubeSpawner.component_label = "notebook"
# Of this release alone: another Hub of the namespace would delete a pod of the same name before it creates its own.
c.KubeSpawner.pod_name_template = values["podName"]
c.KubeSpawner.automount_service_account_token = False
c.KubeSpawner.pod_security_context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
c.KubeSpawner.container_security_context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
if not values["platformUsers"]:
    c.KubeSpawner.uid = 1000
    c.KubeSpawner.fs_gid = 1000
    c.KubeSpawner.pod_security_context.update(fsGroup=1000, fsGroupChangePolicy="OnRootMismatch")
    c.KubeSpawner.container_security_context["runAsUser"] = 1000
c.KubeSpawner.storage_pvc_ensure = True
c.KubeSpawner.storage_access_modes = ["ReadWriteOnce"]
c.KubeSpawner.storage_capacity = values["home"]["size"]
c.KubeSpawner.storage_class = values["home"].get("storageClass")
c.KubeSpawner.delete_pvc = False  # no click of a user deletes files: not that which deletes a named server, either
c.KubeSpawner.pvc_name_template = "home-{user_server}"
c.KubeSpawner.volumes = {
    "home": {"name": "home", "persistentVolumeClaim": {"claimName": "{pvc_name}"}},
    "shm": {"name": "shm", "emptyDir": {"medium": "Memory"}},
}
c.KubeSpawner.volume_mounts = {
    "home": {"name": "home", "mountPath": "/home/jovyan"},
    # Else it has 64 MB, too few for workers of PyTorch's DataLoader. What is in it counts as the container's memory.
    "shm": {"name": "shm", "mountPath": "/dev/shm"},
}
c.KubeSpawner.environment = {}
c.KubeSpawner.extra_labels = {}
c.KubeSpawner.extra_annotations = {}
c.KubeSpawner.start_timeout = 300  # the image may have to be pulled first
c.KubeSpawner.http_timeout = 120

for section, traits in values["config"].items():
    c[section].update(traits)
names = {"c": c, "get_config": get_config}  # noqa: F821
for name, text in sorted(values["extraConfig"].items()):
    exec(compile(text, f"hub.extraConfig.{name}", "exec"), names)


def add(trait, entries):
    """Add entries by name to what the site has set; the site's win."""
    found = c.KubeSpawner.get(trait) or c.Spawner.get(trait) or {}
    if isinstance(found, LazyConfigValue):  # c.Spawner.environment.update(…), for which there is no value yet
        found = found.get_value({})
    if isinstance(found, dict):
        setattr(c.KubeSpawner, trait, {**entries, **found})
    else:
        setattr(c.KubeSpawner, trait, [*found, *entries.values()])


# A user that the image does not know has no name: then getpass.getuser() fails, which PyTorch calls.
add("environment", {"USER": "jovyan", "LOGNAME": "jovyan", **values["environment"]})
add("volumes", {one["name"]: one for one in values["volumes"]})
add("volume_mounts", {one["name"]: one for one in values["volumeMounts"]})
add("extra_labels", values["podLabels"])
add("extra_annotations", values["podAnnotations"])
if values["firstLook"] and c.JupyterHub.authenticator_class not in ("dummy", "jupyterhub.auth.DummyAuthenticator"):
    # Code chose another authenticator: its user "admin" is no administrator, unless the site says so.
    if c.Authenticator.admin_users == {"admin"}:
        c.Authenticator.admin_users = set()
    if values["defaultAdmins"]:
        values["admins"]["users"] = []

c.JupyterHub.services = [
    {"name": SERVICE, "api_token": os.environ["SERVICE_TOKEN"]},
    {"name": SPAWNER, "api_token": os.environ["SPAWNER_TOKEN"]},
    *c.JupyterHub.services,
]
configure_cluster(
    c,
    ClusterSettings(
        service_url=values["serviceUrl"],
        notebook_url=values["makewayUrl"],
        admin_users=values["admins"]["users"],
        admin_groups=values["admins"]["groups"],
        lease_seconds=values["leaseSeconds"],
        instance=values["instance"],
        guaranteed_priority_class=values["priorityClasses"]["guaranteed"],
        preemptible_priority_class=values["priorityClasses"]["preemptible"],
    ),
)
