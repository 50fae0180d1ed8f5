"""Configure JupyterHub with one call, `configure(c)`: users, proxy, quota service, spawner."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from jupyterhub.services import service as services
from makeway_api.proxies import USERS_VARIABLES, without_proxy
from makeway_spawner.local import MakewayLocalSpawner
from traitlets import default

from .access import CUSTOM_SCOPES, FOR_SERVERS, FOR_USERS, SERVER_SCOPES, SERVICE, SPAWNER, roles, service_fields
from .nodejs import proxy_command
from .pages import TEMPLATES
from .sample import SAMPLE_ADMIN, SAMPLE_GROUPS, SAMPLE_USERS
from .settings import SERVICE_PATH, Settings, read
from .state_directory import free_port
from .users import SampleAuthenticator, SystemAuthenticator

GROUPS_SECONDS = 5
"""Seconds for which the Hub keeps a user's Unix groups before it reads them again."""
PASSED_ON = (*USERS_VARIABLES, "TMPDIR")
"""Variables of the Hub's environment that the service gets, too: for its jobs, and to reach object storage."""
PASSED_ON_PREFIXES = ("MAKEWAY_", "AWS_", "LC_")
"""The same, by prefix: the service's settings, and region, endpoint and credentials of its object storage."""


def configure(c: Any, settings: Settings | None = None) -> Settings:
    """Set the Hub's traits on `c`, a JupyterHub configuration; return the settings they were made from."""
    settings = settings or read()
    settings.state.create()
    os.environ.update(without_proxy(os.environ))  # for the Hub, the service and users' processes alike
    ports = settings.state.ports()
    _hub(c, settings, ports["hub"])
    _proxy(c, settings, ports["proxy_api"])
    _users(c, settings)
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
    # Kept notebooks find the next Hub by its address and their token; both stay the same.
    c.JupyterHub.cleanup_servers = not settings.keep
    c.JupyterHub.cleanup_proxy = not settings.keep
    # A start that waits for GPUs must block neither other starts nor its own page, and a refusal is not a failure:
    # JupyterHub 5 would stop after five failures in a row.
    c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 1}
    c.JupyterHub.concurrent_spawn_limit = 0
    c.Spawner.consecutive_failure_limit = 0
    c.JupyterHub.allow_named_servers = True
    c.JupyterHub.named_server_limit_per_user = 3
    c.JupyterHub.template_paths = [str(TEMPLATES)]
    c.JupyterHub.template_vars = {"makeway_panel": f"{SERVICE_PATH}/"}


def _proxy(c: Any, settings: Settings, api_port: int) -> None:
    command = proxy_command()
    if command:  # otherwise JupyterHub searches for the proxy itself and reports what is missing
        c.ConfigurableHTTPProxy.command = command
    c.ConfigurableHTTPProxy.log_level = "warn"
    c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{api_port}"
    c.ConfigurableHTTPProxy.auth_token = settings.state.secret("proxy_token")
    c.ConfigurableHTTPProxy.pid_file = str(settings.state.proxy_pid)


def _users(c: Any, settings: Settings) -> None:
    c.JupyterHub.custom_scopes = CUSTOM_SCOPES
    admin_users: list[str] = []
    admin_groups: list[str] = []
    if settings.mode == "demo":
        c.JupyterHub.authenticator_class = SampleAuthenticator
        c.SampleAuthenticator.password = settings.state.password()
        c.Authenticator.allowed_users = set(SAMPLE_USERS)
        c.Authenticator.admin_users = {SAMPLE_ADMIN}
        c.JupyterHub.load_groups = {name: {"users": users} for name, users in SAMPLE_GROUPS.items()}
        admin_users = [SAMPLE_ADMIN]
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
        admin_groups = _existing(settings.admin_groups)
        c.PAMAuthenticator.admin_groups = set(admin_groups)
    c.JupyterHub.load_roles = [{"name": "user", "scopes": ["self", *FOR_USERS]}, *roles(admin_users, admin_groups)]


def _existing(groups: frozenset[str]) -> list[str]:
    import grp

    known = {entry.gr_name for entry in grp.getgrall()}
    return sorted(groups & known)


def _services(c: Any, settings: Settings, service_url: str) -> None:
    state = settings.state
    watch_services_closely()
    c.JupyterHub.services = [
        {
            "name": SERVICE,
            **service_fields(service_url),
            "command": [sys.executable, "-m", "makeway_quota.main", "serve"],
            "cwd": str(state.root),
            "api_token": state.secret("service_token"),
            "environment": _service_environment(settings),
        },
        {"name": SPAWNER, "api_token": state.secret("spawner_token"), "display": False},
    ]


def watch_services_closely(seconds: int = 1) -> None:
    """Poll the quota service every second instead of every 30, so that a dead one is restarted at once.

    JupyterHub has no setting for this: it creates the service's process object without a configuration.
    """
    if services._ServiceSpawner.__name__ == "Watched":
        return

    class Watched(services._ServiceSpawner):  # type: ignore[misc]
        @default("poll_interval")
        def _default_poll_interval(self) -> int:
            return seconds

    services._ServiceSpawner = Watched


def _service_environment(settings: Settings) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON_PREFIXES) or key in PASSED_ON}
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
    for sample in (here.parent / "policy.yaml", here / "policy.yaml"):  # in a checkout, in a wheel
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
    c.Spawner.server_token_scopes = [*SERVER_SCOPES, *FOR_SERVERS]
