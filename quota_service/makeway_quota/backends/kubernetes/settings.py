"""Make the backend for pods from the settings of the service; called when the service is assembled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from makeway_api.settings import path_or_none, setting

from ..base import Backend
from .cluster.dead_nodes import NODE_LOST_AFTER

if TYPE_CHECKING:
    from ...autoscale.provider import Provider
    from ...policy import Document
    from .pods.manifest import PodSettings


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """The cluster on which jobs run as pods, and what all of those pods have; read only with that backend."""

    kubeconfig: Path | None = setting(
        "",
        "Kubeconfig of the cluster; empty: KUBECONFIG, else the service account of the service's own pod.",
        name="kubeconfig",
        convert=path_or_none,
        scope="machine",
    )
    context: str = setting(
        "",
        "Context of the kubeconfig; empty: its current one.",
        scope="machine",
    )
    namespace: str = setting(
        "",
        "Namespace of the jobs' pods; empty: that of the kubeconfig's context, or of the service's own pod.",
        scope="chart",
    )
    instance: str = setting(
        "makeway",
        "Name of this installation, a label of its pods; each installation on a cluster needs its own.",
        scope="chart",
    )
    worker_url: str = setting(
        "",
        "The address at which pods reach the service, with its prefix. Not localhost or 0.0.0.0, by which a "
        "pod reaches itself. Empty: MAKEWAY_URL.",
        name="worker_url",
        scope="chart",
    )
    launcher_image: str = setting(
        "",
        "Image with Python and Makeway, from which each pod copies its launcher.",
        scope="chart",
    )
    image: str = setting(
        "",
        "Image of jobs whose profile names none; empty: that of the launcher.",
        scope="chart",
    )
    service_account: str = setting(
        "default",
        "Service account of the jobs' pods, which get no token of it.",
        scope="chart",
    )
    priority_class: str = setting(
        "",
        "Priority class of the jobs' pods.",
        scope="chart",
    )
    run_as: str = setting(
        "1000:100",
        "User and group that jobs run as, not root; `platform`: the platform assigns them, as OpenShift does.",
        scope="chart",
    )
    checkpoint_claim: str = setting(
        "",
        "PersistentVolumeClaim in which jobs keep checkpoints, with {team} for the team's name; empty: a "
        "checkpoint ends with its pod.",
        scope="chart",
    )
    home_claim: str = setting(
        "",
        "PersistentVolumeClaim with the home of a job's owner, in the namespace of the jobs: home-{user}, or "
        "a claim and a folder on it, homes/{user}; {escaped_user} writes the name as KubeSpawner's "
        "slug_scheme 'escape'. Empty: jobs have no homes.",
        convert=str.strip,
        scope="chart",
    )
    home_path: str = setting(
        "/home/jovyan",
        "Where the pods of jobs have the home of their owner, as notebooks have it.",
        scope="chart",
    )
    tolerations: tuple[str, ...] = setting(
        "",
        "Taints that jobs and notebooks tolerate besides those named like their pool's resource, as key, "
        "key=value or key=value:NoSchedule, with commas between.",
        convert=_listed,
        scope="chart",
    )
    lost_after: float = setting(
        3600.0,
        "A pod of a job that is silent for this long is lost. Shortly before, its launcher has the job save and end."
        " Until then jobs go on without the service, and a job whose node cannot be reached waits for that node,"
        " unless MAKEWAY_NODE_LOST_SECONDS applies.",
        name="lost_after_seconds",
        min=60.0,
        max=43200.0,
    )
    node_lost_after: float = setting(
        NODE_LOST_AFTER,
        "If a job's node is not ready and its pod is silent for this long, the job starts elsewhere. This does not"
        " apply if its whole pool or zone went down, or if no other node was ready. Choose as much as"
        " MAKEWAY_LOST_AFTER_SECONDS where single nodes may be cut off and still write to the checkpoints.",
        name="node_lost_seconds",
        min=30.0,
        max=43200.0,
    )
    disk_request: str = setting(
        "1Gi",
        "What the pod of a job requests of its node's disk where its profile has no disk; a job that used "
        "more may be to blame for a full disk.",
        scope="chart",
    )
    disk_limit: str = setting(
        "50Gi",
        "The most that the pod of a job may write to its node's disk where its profile has no disk, and never"
        " more than half of that disk; empty: no limit.",
        scope="chart",
    )
    cpu_limits: bool = setting(
        False,
        "Whether containers of jobs' pods get the CPU that they request as a limit, as a quota on limits.cpu "
        "or a LimitRange with a default limit needs.",
        scope="chart",
    )
    launcher_resources: str = setting(
        "",
        "Requests and limits of the container that copies the launcher, and of that which removes "
        'checkpoints, in JSON: {"requests": {"cpu": "100m"}}; empty: small ones.',
        scope="chart",
    )
    placeholder_class: str = setting(
        "",
        "Priority class of the pods for which the cluster's autoscaler adds nodes, as deployments with the provider "
        "`kubernetes` create them; below that of all work, and not below -10, which Cluster Autoscaler ignores.",
        scope="chart",
    )
    pod: str = setting(
        "",
        "Pod template of all jobs in JSON, with what `pod` of a profile may have; a profile's comes on top.",
        scope="chart",
    )


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


def pod_settings(settings: KubernetesSettings, namespace: str) -> PodSettings:
    """Return what all pods of jobs have; ValueError where a setting is wrong."""
    from .pods.disk import parse_disk
    from .pods.manifest import PodSettings, user_and_group
    from .pods.template import resources_setting, template_setting

    return PodSettings(
        namespace=namespace,
        instance=settings.instance,
        address=settings.worker_url,
        launcher_image=settings.launcher_image,
        image=settings.image,
        service_account=settings.service_account,
        priority_class=settings.priority_class,
        run_as=user_and_group(settings.run_as),
        checkpoint_claim=settings.checkpoint_claim,
        disk=parse_disk(settings.disk_request, settings.disk_limit),
        cpu_limits=settings.cpu_limits,
        launcher_resources=resources_setting(settings.launcher_resources),
        template=template_setting(settings.pod),
    )


def backend_of(settings: KubernetesSettings) -> Backend:
    """Return the backend; ValueError where a setting is missing or wrong."""
    from .api.client import ApiClient
    from .api.connection import connection
    from .backend import KubernetesBackend
    from .cluster.nodes import toleration
    from .pods.homes import home_setting

    if not settings.launcher_image:
        raise ValueError("Pods copy their launcher from an image with Makeway: name it in MAKEWAY_KUBE_LAUNCHER_IMAGE.")
    check_worker_url(settings.worker_url)
    cluster = connection(settings.kubeconfig, settings.context)
    pods = pod_settings(settings, settings.namespace or cluster.namespace)
    tolerations = [toleration(text) for text in settings.tolerations]
    home = home_setting(settings.home_claim, settings.home_path)
    lost, node_lost = settings.lost_after, settings.node_lost_after
    return KubernetesBackend(
        ApiClient(cluster), pods, tolerations, lost_after=lost, node_lost_after=node_lost, home=home
    )


def machine_provider(
    settings: KubernetesSettings, document: Callable[[], Document | None], deployment: Mapping[str, str]
) -> Provider:
    """Return the provider of a deployment whose machines the cluster's autoscaler adds; ValueError as `backend_of`.

    `deployment`: its settings.
    """
    from ...autoscale.deployment import provisioning_class
    from .api.client import ApiClient
    from .api.connection import connection
    from .cluster.nodes import NodeSelector, selectors, toleration
    from .machines.provider import KubernetesProvider

    cluster = connection(settings.kubeconfig, settings.context)
    pods = pod_settings(settings, settings.namespace or cluster.namespace)
    tolerations = [toleration(text) for text in settings.tolerations]

    def selector(pool: str) -> NodeSelector | None:
        policy = document()
        return (
            None if policy is None else next((one for one in selectors(policy, tolerations) if one.pool == pool), None)
        )

    return KubernetesProvider(
        lambda: ApiClient(cluster),
        pods,
        selector,
        settings.placeholder_class,
        provisioning_class=provisioning_class(deployment),
    )
