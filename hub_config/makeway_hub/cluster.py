"""Configure a JupyterHub on Kubernetes for Makeway: its service, roles, spawner and pages.

Called by the Hub's configuration of the chart, and by `hub.extraConfig` of an existing Zero to JupyterHub. What the
site has set stays, except what Makeway cannot work without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jupyterhub.app import JupyterHub
from makeway_spawner.kube import MakewayKubeSpawner

from .configure import ACCESS, FOR_ADMINS, FOR_USERS, SCOPES
from .pages import TEMPLATES, with_pages
from .settings import SERVICE_PATH

SERVICE = "makeway"
SPAWNER = "makeway-spawner"
"""The names of the quota service and of the Hub's spawner among the Hub's services; each has a token of its own."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What the Hub must know of a Makeway on the same cluster."""

    service_url: str
    """where the Hub and the proxy reach the service: http://host:8765"""
    notebook_url: str
    """where notebooks reach it, through the proxy: http://proxy-public/services/makeway"""
    admin_users: Sequence[str] = ()
    admin_groups: Sequence[str] = ()
    lease_seconds: float = 15.0
    instance: str = "makeway"
    """the installation, a label of its pods, as in the service's settings"""
    guaranteed_priority_class: str = ""
    preemptible_priority_class: str = ""


def configure_cluster(c: Any, settings: ClusterSettings) -> None:
    """Set the Hub's traits on `c`; ValueError where a service has no token."""
    base = str(c.JupyterHub.get("base_url", "/")).rstrip("/")
    tokens = _services(c, settings)
    _roles(c, settings)
    _hub(c, base)
    _spawner(c, settings, tokens[SPAWNER], base)


def _services(c: Any, settings: ClusterSettings) -> dict[str, str]:
    """Complete the two services, and return their tokens."""
    services = list(c.JupyterHub.get("services", []))
    wanted: dict[str, dict[str, Any]] = {
        SERVICE: {
            "url": settings.service_url,
            "oauth_client_allowed_scopes": [name for name in SCOPES if name != "custom:makeway:reserve"],
            "oauth_no_confirm": True,
            "display": False,  # templates/page.html links to it
        },
        SPAWNER: {"display": False},
    }
    tokens = {}
    for name, fields in wanted.items():
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


def _roles(c: Any, settings: ClusterSettings) -> None:
    scopes = dict(c.JupyterHub.get("custom_scopes", {}))
    c.JupyterHub.custom_scopes = scopes | {name: {"description": text} for name, text in SCOPES.items()}
    roles = [dict(role) for role in c.JupyterHub.get("load_roles", [])]
    user = next((role for role in roles if role.get("name") == "user"), None)
    if user is None:
        user = {"name": "user", "scopes": ["self"]}
        roles.append(user)
    user["scopes"] = list(dict.fromkeys([*user.get("scopes", []), *FOR_USERS]))
    roles += [
        {
            "name": "makeway-admin",
            "description": "Administrators of Makeway",
            "scopes": [*FOR_USERS, *FOR_ADMINS],
            "users": sorted(settings.admin_users),
            "groups": sorted(settings.admin_groups),
        },
        {
            "name": "makeway-service",
            "description": "The quota service reads groups, and reconciles leases with running servers",
            "scopes": ["list:users", "read:users", "read:groups", "list:groups", "read:servers", "delete:servers"],
            "services": [SERVICE],
        },
        {
            "name": "makeway-spawner",
            "description": "The Hub's spawner requests leases on behalf of users",
            "scopes": ["custom:makeway:reserve", "custom:makeway:read", ACCESS],
            "services": [SPAWNER],
        },
    ]
    c.JupyterHub.load_roles = roles


def _hub(c: Any, base: str) -> None:
    # A start that waits for GPUs must block no other start, and a refusal is not a failure of the Hub.
    c.JupyterHub.tornado_settings = {**c.JupyterHub.get("tornado_settings", {}), "slow_spawn_timeout": 1}
    c.JupyterHub.concurrent_spawn_limit = 0
    c.Spawner.consecutive_failure_limit = 0
    c.JupyterHub.template_paths = [str(TEMPLATES), *c.JupyterHub.get("template_paths", [])]
    c.JupyterHub.template_vars = {
        **c.JupyterHub.get("template_vars", {}),
        "makeway_panel": f"{base}{SERVICE_PATH}/",
    }
    named = c.JupyterHub.get("authenticator_class", JupyterHub.authenticator_class.default_value)
    c.JupyterHub.authenticator_class = with_pages(JupyterHub.authenticator_class.validate(None, named))


def _spawner(c: Any, settings: ClusterSettings, token: str, base: str) -> None:
    c.JupyterHub.spawner_class = MakewayKubeSpawner
    c.MakewayKubeSpawner.makeway_api_url = f"{settings.service_url}{base}{SERVICE_PATH}"
    c.MakewayKubeSpawner.makeway_url = settings.notebook_url
    c.MakewayKubeSpawner.makeway_public_path = f"{base}{SERVICE_PATH}/"
    c.MakewayKubeSpawner.makeway_token = token
    c.MakewayKubeSpawner.renew_seconds = settings.lease_seconds / 3
    c.MakewayKubeSpawner.instance = settings.instance
    c.MakewayKubeSpawner.guaranteed_priority_class = settings.guaranteed_priority_class
    c.MakewayKubeSpawner.preemptible_priority_class = settings.preemptible_priority_class
    # The scopes of a notebook's own token, as far as its user has them.
    scopes = c.Spawner.get("server_token_scopes", ["users:activity!user", "access:servers!server"])
    c.Spawner.server_token_scopes = list(dict.fromkeys([*scopes, *FOR_USERS, "custom:makeway:manage"]))
