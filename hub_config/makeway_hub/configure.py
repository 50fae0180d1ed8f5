"""Everything JupyterHub must be told, in one call: `configure(c)`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from jupyterhub.services import service as services
from makeway_spawner.local import MakewayLocalSpawner
from traitlets import default

from .node import proxy_command
from .pages import TEMPLATES
from .people import SampleAuthenticator, SystemAuthenticator
from .sample import SAMPLE_ADMIN, SAMPLE_GROUPS, SAMPLE_USERS
from .settings import SERVICE_PATH, Settings, read
from .state import free_port

SCOPES = {
    "custom:makeway:read": "See pools, offers, usage and the jobs of my teams",
    "custom:makeway:submit": "Submit training and manage my own jobs",
    "custom:makeway:manage": "Manage the jobs of a team",
    "custom:makeway:admin": "Change the policy and see all teams",
    "custom:makeway:reserve": "Take leases for notebooks on behalf of users (the Hub's spawner only)",
}
ACCESS = "access:services!service=makeway"
FOR_USERS = ["custom:makeway:read", "custom:makeway:submit", ACCESS]
FOR_ADMINS = ["custom:makeway:manage", "custom:makeway:admin"]
GROUPS_SECONDS = 5
"""For so long the Hub believes what the machine said about somebody's groups."""
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "TZ")
"""Of the Hub's environment the service gets these and its own MAKEWAY_ settings, nothing else."""


def configure(c: Any, settings: Settings | None = None) -> Settings:
    """Set up the Hub, its people, its proxy, the quota service and the spawner; what was set is returned."""
    settings = settings or read()
    settings.state.create()
    ports = settings.state.ports()
    _hub(c, settings, ports["hub"])
    _proxy(c, settings, ports["proxy_api"])
    _people(c, settings)
    service_url = f"http://127.0.0.1:{os.environ.get('MAKEWAY_SERVICE_PORT') or free_port()}"
    _services(c, settings, service_url)
    _spawner(c, settings, service_url)
    return settings


def _hub(c: Any, settings: Settings, port: int) -> None:
    state = settings.state
    c.JupyterHub.bind_url = settings.url
    c.JupyterHub.hub_bind_url = f"http://127.0.0.1:{port}"
    c.JupyterHub.db_url = f"sqlite:///{state.root / 'jupyterhub.sqlite'}"
    state.secret("cookie_secret")
    c.JupyterHub.cookie_secret_file = str(state.secrets / "cookie_secret")
    c.JupyterHub.pid_file = str(state.root / "hub.pid")
    # A kept notebook finds the next Hub by its address and its token; both stay the same.
    c.JupyterHub.cleanup_servers = not settings.keep
    c.JupyterHub.cleanup_proxy = not settings.keep
    # A start that waits for GPUs is pending, which must neither block other starts nor the page that shows it;
    # "no GPU for you" is no fault of the Hub, which JupyterHub 5 would stop after five of them.
    c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 1}
    c.JupyterHub.concurrent_spawn_limit = 0
    c.Spawner.consecutive_failure_limit = 0
    c.JupyterHub.allow_named_servers = True
    c.JupyterHub.named_server_limit_per_user = 3
    c.JupyterHub.template_paths = [str(TEMPLATES)]
    c.JupyterHub.template_vars = {"makeway_panel": f"{SERVICE_PATH}/"}


def _proxy(c: Any, settings: Settings, api_port: int) -> None:
    command = proxy_command()
    if command:  # else JupyterHub looks for it itself and says what is missing
        c.ConfigurableHTTPProxy.command = command
    c.ConfigurableHTTPProxy.log_level = "warn"
    c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{api_port}"
    c.ConfigurableHTTPProxy.auth_token = settings.state.secret("proxy_token")
    c.ConfigurableHTTPProxy.pid_file = str(settings.state.proxy_pid)


def _people(c: Any, settings: Settings) -> None:
    c.JupyterHub.custom_scopes = {name: {"description": text} for name, text in SCOPES.items()}
    roles = [
        {"name": "user", "scopes": ["self", *FOR_USERS]},
        {"name": "makeway-admin", "description": "Administrators of Makeway", "scopes": [*FOR_USERS, *FOR_ADMINS]},
    ]
    if settings.mode == "demo":
        c.JupyterHub.authenticator_class = SampleAuthenticator
        c.SampleAuthenticator.password = settings.state.password()
        c.Authenticator.allowed_users = set(SAMPLE_USERS)
        c.Authenticator.admin_users = {SAMPLE_ADMIN}
        c.JupyterHub.load_groups = {name: {"users": users} for name, users in SAMPLE_GROUPS.items()}
        roles[1]["users"] = [SAMPLE_ADMIN]
    else:
        c.JupyterHub.authenticator_class = SystemAuthenticator
        c.Authenticator.manage_groups = True
        c.Authenticator.auth_refresh_age = GROUPS_SECONDS
        c.Authenticator.refresh_pre_spawn = True
        if hasattr(SystemAuthenticator, "auth_refresh_strict"):  # JupyterHub 6; 5 is always strict
            c.Authenticator.auth_refresh_strict = True
        if settings.allowed_groups:
            c.LocalAuthenticator.allowed_groups = set(settings.allowed_groups)
        else:
            c.Authenticator.allow_all = True
        admins = _existing(settings.admin_groups)
        c.PAMAuthenticator.admin_groups = set(admins)
        roles[1]["groups"] = admins
    c.JupyterHub.load_roles = roles


def _existing(groups: frozenset[str]) -> list[str]:
    import grp

    known = {entry.gr_name for entry in grp.getgrall()}
    return sorted(groups & known)


def _services(c: Any, settings: Settings, service_url: str) -> None:
    state = settings.state
    watch_services_closely()
    c.JupyterHub.services = [
        {
            "name": "makeway",
            "url": service_url,
            "command": [sys.executable, "-m", "makeway_quota.main", "serve"],
            "cwd": str(state.root),
            "api_token": state.secret("service_token"),
            "environment": _service_environment(settings),
            "oauth_client_allowed_scopes": [name for name in SCOPES if name != "custom:makeway:reserve"],
            "oauth_no_confirm": True,
            "display": False,  # every page of the Hub links to it by its own name: templates/page.html
        },
        {"name": "makeway-spawner", "api_token": state.secret("spawner_token"), "display": False},
    ]
    c.JupyterHub.load_roles = [
        *c.JupyterHub.load_roles,
        {
            "name": "makeway-service",
            "description": "The quota service reads who is in which group and keeps leases and servers in step",
            "scopes": ["list:users", "read:users", "read:groups", "list:groups", "read:servers", "delete:servers"],
            "services": ["makeway"],
        },
        {
            "name": "makeway-spawner",
            "description": "The Hub's spawner takes leases on behalf of users",
            "scopes": ["custom:makeway:reserve", "custom:makeway:read", ACCESS],
            "services": ["makeway-spawner"],
        },
    ]


def watch_services_closely(seconds: int = 1) -> None:
    """Let the Hub notice within a second that the quota service died and start it again; its own default is 30.

    JupyterHub has no setting for this: it makes the service's process object without passing a configuration.
    """
    if services._ServiceSpawner.__name__ == "Watched":
        return

    class Watched(services._ServiceSpawner):  # type: ignore[misc]
        @default("poll_interval")
        def _default_poll_interval(self) -> int:
            return seconds

    services._ServiceSpawner = Watched


def _service_environment(settings: Settings) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key.startswith("MAKEWAY_") or key in PASSED_ON}
    env.update(
        MAKEWAY_STATE_DIR=str(settings.state.root),
        MAKEWAY_MODE=settings.mode,
        MAKEWAY_KEEP="1" if settings.keep else "",
        MAKEWAY_LEASE_SECONDS=f"{settings.lease_seconds:g}",
        MAKEWAY_TICKET_SECRET=settings.state.secret("ticket_secret"),
        MAKEWAY_URL=settings.url + SERVICE_PATH,
        MAKEWAY_HUB_PID=str(os.getpid()),
    )
    here = Path(__file__).resolve().parent
    for sample in (here.parent / "policy.yaml", here / "policy.yaml"):  # a checkout has it beside, a wheel inside
        if sample.is_file():
            env.setdefault("MAKEWAY_POLICY_FILE", str(sample))
    return env


def _spawner(c: Any, settings: Settings, service_url: str) -> None:
    c.JupyterHub.spawner_class = MakewayLocalSpawner
    c.MakewayLocalSpawner.mode = settings.mode
    c.MakewayLocalSpawner.homes = str(settings.state.homes)
    c.MakewayLocalSpawner.logs = str(settings.state.notebook_logs)
    c.MakewayLocalSpawner.sockets = str(settings.state.sockets)
    c.MakewayLocalSpawner.makeway_api_url = service_url + SERVICE_PATH
    c.MakewayLocalSpawner.makeway_url = settings.url + SERVICE_PATH
    c.MakewayLocalSpawner.makeway_public_path = f"{SERVICE_PATH}/"
    c.MakewayLocalSpawner.makeway_token = settings.state.secret("spawner_token")
    c.MakewayLocalSpawner.renew_seconds = settings.lease_seconds / 3
    c.Spawner.poll_interval = 5
    c.Spawner.poll_jitter = 0
    c.Spawner.http_timeout = 120
    # What a notebook's own token may do; of these it gets what its user has.
    c.Spawner.server_token_scopes = [
        "users:activity!user",
        "access:servers!server",
        *FOR_USERS,
        "custom:makeway:manage",
    ]
