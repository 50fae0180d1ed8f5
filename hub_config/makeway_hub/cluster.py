"""Configure a JupyterHub on Kubernetes for Makeway: its service, roles, spawner and pages.

Called by the Hub's configuration of the chart, and by `hub.extraConfig` of an existing Zero to JupyterHub. What the
site has set stays, except what Makeway cannot work without.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jupyterhub.app import JupyterHub
from kubespawner import KubeSpawner
from makeway_api.open_files import raise_limit
from makeway_api.proxies import without_proxy
from makeway_spawner.kube import MakewayKubeSpawner

from .access import SERVICE, SPAWNER, service_fields
from .address import CannotStart
from .databases import check_hub_database
from .settings import SERVICE_PATH
from .site_settings import check_spawn_page, merge_pages, merge_roles, merge_server_scopes, value
from .subdomains import read_subdomains, set_subdomains

__all__ = ["SERVICE", "SPAWNER", "ClusterSettings", "configure_cluster"]


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The facts about a Makeway on the same cluster that its Hub needs."""

    service_url: str
    """where the Hub and the proxy reach the service: http://host:8765"""
    notebook_url: str
    """where notebooks reach it, through the proxy: http://proxy-public/services/makeway"""
    admin_users: Sequence[str] = ()
    """users of the Hub that administer Makeway"""
    admin_groups: Sequence[str] = ()
    """groups of the Hub whose members administer Makeway"""
    lease_seconds: float = 15.0
    """seconds after which a lease ends that is not renewed, as in the service's MAKEWAY_LEASE_SECONDS"""
    instance: str = "makeway"
    """the installation, a label of its pods, as in the service's MAKEWAY_KUBE_INSTANCE"""
    guaranteed_priority_class: str = ""
    """of the pods of guaranteed notebooks; empty: the cluster's default"""
    preemptible_priority_class: str = ""
    """of the pods of preemptible notebooks; empty: the cluster's default"""


def configure_cluster(c: Any, settings: ClusterSettings) -> None:
    """Set the Hub's traits on `c`, a JupyterHub configuration.

    ValueError names a service without a token, CannotStart what Makeway cannot work with.
    """
    _check(c)
    raise_limit()
    names = read_subdomains(c.JupyterHub)
    os.environ.update(without_proxy(os.environ, _internal_hosts(c, settings)))
    base = str(c.JupyterHub.get("base_url", "/")).rstrip("/")
    tokens = _services(c, settings)
    merge_roles(c, settings.admin_users, settings.admin_groups)
    # A start that waits for GPUs must block no other start, and a refusal is not a failure of the Hub.
    c.JupyterHub.concurrent_spawn_limit = 0
    c.Spawner.consecutive_failure_limit = 0
    panel = f"{names.service if names else ''}{base}{SERVICE_PATH}/"
    merge_pages(c, panel)
    merge_server_scopes(c)
    if names:
        internal_host = urlsplit(settings.notebook_url).hostname  # by which notebooks reach it through the proxy
        paths = (f"{names.name}{base}{SERVICE_PATH}/api/", f"{internal_host}{base}{SERVICE_PATH}/")
        set_subdomains(c, names, dict.fromkeys(paths, settings.service_url))
    _spawner(c, settings, tokens[SPAWNER], base, panel)


def _check(c: Any) -> None:
    """Raise CannotStart for settings of the site that would have no effect, or with which nothing works."""
    if c.JupyterHub.get("internal_ssl"):
        raise CannotStart(
            "c.JupyterHub.internal_ssl is not supported: Hub, proxy and service reach each other by http inside of the "
            "cluster, where network policies protect them. Remove it."
        )
    check_spawn_page(c, ("Spawner", "KubeSpawner", "MakewayKubeSpawner"))
    check_hub_database(str(c.JupyterHub.get("db_url", "")))


def _spawner_class(c: Any) -> type:
    """Return the site's class where it extends Makeway's, Makeway's for KubeSpawner; CannotStart for any other."""
    if "spawner_class" not in c.JupyterHub:
        return MakewayKubeSpawner
    result: type = JupyterHub.spawner_class.validate(None, c.JupyterHub.spawner_class)
    if issubclass(result, MakewayKubeSpawner):
        return result
    if result is KubeSpawner:  # as Zero to JupyterHub sets it
        return MakewayKubeSpawner
    raise CannotStart(
        f"c.JupyterHub.spawner_class = {result.__name__} cannot be used with Makeway: have it extend "
        "makeway_spawner.kube.MakewayKubeSpawner."
    )


def _internal_hosts(c: Any, settings: ClusterSettings) -> list[str]:
    """Return the hosts that the Hub reaches inside of the cluster, with its token or theirs."""
    urls = [
        settings.service_url,
        settings.notebook_url,
        str(value(c.JupyterHub, "hub_connect_url", "")),
        str(value(c.ConfigurableHTTPProxy, "api_url", "")),
    ]
    hosts = [urlsplit(url).hostname or "" for url in urls]
    return [*hosts, os.environ.get("KUBERNETES_SERVICE_HOST", ""), "kubernetes.default.svc", ".svc", ".cluster.local"]


def _services(c: Any, settings: ClusterSettings) -> dict[str, str]:
    """Complete the entries of the two services and return their tokens by name; other services stay."""
    services = [dict(one) for one in value(c.JupyterHub, "services", [])]
    entries: dict[str, dict[str, Any]] = {
        SERVICE: service_fields(settings.service_url),
        SPAWNER: {"display": False},
    }
    tokens = {}
    for name, fields in entries.items():
        entry = next((one for one in services if one.get("name") == name), None)
        if entry is None or not entry.get("api_token"):
            raise ValueError(
                f"JupyterHub has no service {name!r} with an API token: name it in hub.services, so that Zero to "
                "JupyterHub makes one."
            )
        entry.update(fields)
        tokens[name] = str(entry["api_token"])
    c.JupyterHub.services = services
    return tokens


def _spawner(c: Any, settings: ClusterSettings, token: str, base: str, panel: str) -> None:
    c.JupyterHub.spawner_class = _spawner_class(c)
    c.MakewayKubeSpawner.makeway_api_url = f"{settings.service_url}{base}{SERVICE_PATH}"
    c.MakewayKubeSpawner.makeway_url = settings.notebook_url
    c.MakewayKubeSpawner.makeway_public_path = panel
    c.MakewayKubeSpawner.makeway_token = token
    c.MakewayKubeSpawner.renew_seconds = settings.lease_seconds / 3
    c.MakewayKubeSpawner.instance = settings.instance
    c.MakewayKubeSpawner.guaranteed_priority_class = settings.guaranteed_priority_class
    c.MakewayKubeSpawner.preemptible_priority_class = settings.preemptible_priority_class
