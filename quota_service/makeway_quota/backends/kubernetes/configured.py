"""Make the backend for pods from the settings of the service; called when the service is assembled."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..base import Backend
from .cluster.dead_nodes import NODE_LOST_AFTER

if TYPE_CHECKING:
    from .pods.manifest import PodSettings


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """The cluster on which jobs run as pods, and what all of those pods have; read only with that backend."""

    kubeconfig: Path | None
    context: str
    namespace: str
    instance: str
    worker_url: str
    launcher_image: str
    image: str
    service_account: str
    priority_class: str
    run_as: str
    checkpoint_claim: str
    home_claim: str
    home_path: str
    tolerations: tuple[str, ...]
    lost_after: float
    node_lost_after: float = NODE_LOST_AFTER
    disk_request: str = ""
    disk_limit: str = ""
    cpu_limits: bool = False
    launcher_resources: str = ""
    pod: str = ""


def check_worker_url(url: str) -> None:
    """Raise ValueError for an address that leads pods nowhere, or to themselves."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        address = ip_address(host)
        own = address.is_loopback or address.is_unspecified
    except ValueError:  # a name
        own = host == "localhost" or host.endswith(".localhost")
    if own or not host or parts.scheme not in ("http", "https"):
        raise ValueError(
            f"The launchers of jobs do not reach the service at {url!r} from their pods: set MAKEWAY_WORKER_URL to its "
            "address in the cluster, with the prefix, such as http://makeway.example:8765/services/makeway."
        )


def pod_settings(found: KubernetesSettings, namespace: str) -> PodSettings:
    """Return what all pods of jobs have; ValueError where a setting is wrong."""
    from .pods.disk import setting
    from .pods.manifest import PodSettings, user_and_group
    from .pods.site_template import resources_setting, template_setting

    return PodSettings(
        namespace=namespace,
        instance=found.instance,
        address=found.worker_url,
        launcher_image=found.launcher_image,
        image=found.image,
        service_account=found.service_account,
        priority_class=found.priority_class,
        run_as=user_and_group(found.run_as),
        checkpoint_claim=found.checkpoint_claim,
        disk=setting(found.disk_request, found.disk_limit),
        cpu_limits=found.cpu_limits,
        launcher_resources=resources_setting(found.launcher_resources),
        template=template_setting(found.pod),
    )


def backend_of(found: KubernetesSettings) -> Backend:
    """Return the backend; ValueError where a setting is missing or wrong."""
    from .api.client import ApiClient
    from .api.connection import connection
    from .backend import KubernetesBackend
    from .cluster.nodes import toleration
    from .pods.homes import home_setting

    if not found.launcher_image:
        raise ValueError("Pods copy their launcher from an image with Makeway: name it in MAKEWAY_KUBE_LAUNCHER_IMAGE.")
    check_worker_url(found.worker_url)
    cluster = connection(found.kubeconfig, found.context)
    pods = pod_settings(found, found.namespace or cluster.namespace)
    tolerations = [toleration(text) for text in found.tolerations]
    home = home_setting(found.home_claim, found.home_path)
    lost, node_lost = found.lost_after, found.node_lost_after
    return KubernetesBackend(
        ApiClient(cluster), pods, tolerations, lost_after=lost, node_lost_after=node_lost, home=home
    )
