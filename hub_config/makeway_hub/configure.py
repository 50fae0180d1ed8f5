"""Configure JupyterHub on one machine with one call, `configure(c)`: users, proxy, quota service, spawner.

The site's settings may come before the call or after it. What the call sets are defaults; what Makeway cannot work
without is merged again into the whole configuration, and checked, once JupyterHub has read it, before anything listens.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any, NoReturn
from urllib.parse import urlsplit

from jupyterhub.app import JupyterHub
from jupyterhub.proxy import ConfigurableHTTPProxy
from jupyterhub.services import service as services
from makeway_api.open_files import raise_limit
from makeway_api.proxies import USERS_VARIABLES, without_proxy
from makeway_spawner.lease_mixin import LeaseMixin
from makeway_spawner.local import MakewayLocalSpawner
from traitlets import default

from . import address as addresses
from .access import SERVICE, SPAWNER, service_fields
from .address import Address, CannotStart
from .databases import check_hub_database
from .nodejs import proxy_command
from .sample import SAMPLE_ADMIN, SAMPLE_GROUPS, SAMPLE_USERS, set_samples
from .settings import SERVICE_PATH, Settings, read
from .site_settings import (
    check_spawn_page,
    hidden_templates,
    merge_pages,
    merge_roles,
    merge_server_scopes,
    merge_services,
    set_default,
    value,
)
from .subdomains import read_subdomains, set_subdomains
from .users import SampleAuthenticator, SystemAuthenticator

GROUPS_SECONDS = 5
"""Seconds for which the Hub keeps a user's Unix groups before it reads them again."""
SERVICE_SECONDS = 600
"""Seconds that the service gets to start; the Hub ends without it."""
PASSED_ON = (*USERS_VARIABLES, "TMPDIR")
"""Variables of the Hub's environment that the service gets, too: for its jobs, and to reach object storage."""
PASSED_ON_PREFIXES = ("MAKEWAY_", "AWS_", "LC_")
"""The same, by prefix: the service's settings, and region, endpoint and credentials of its object storage."""


def configure(c: Any, settings: Settings | None = None) -> Settings:
    """Set the Hub's traits on `c`, a JupyterHub configuration; return the settings they were made from."""
    settings = settings or read()
    settings.state.create()
    raise_limit()  # each connection to the Hub is an open file; notebooks and jobs get the limit from before
    os.environ.update(without_proxy(os.environ))  # for the Hub, the service and users' processes alike
    configuration = Configuration(settings)
    configuration.set_defaults(c)
    app = JupyterHub.instance() if JupyterHub.initialized() else None
    try:
        configuration.complete(c)
    except CannotStart as error:
        if app is None:
            raise
        configuration.end(app, error)
    if app is not None:
        configuration.complete_once_read(app)
    return settings


class Configuration:
    """The configuration of one Hub: defaults, and what is completed once the site has set everything."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._ports = settings.state.ports()
        self._service_url = f"http://127.0.0.1:{os.environ.get('MAKEWAY_SERVICE_PORT') or self._ports['service']}"
        self._address = settings.address
        self._ours: dict[str, Any] = {}
        """The traits of the address that were set here, and not by the site."""

    def set_defaults(self, c: Any) -> None:
        """Set what the site has not set; its later assignments replace it."""
        for section, name, trait in _defaults(self.settings, self._ports):
            set_default(c[section], name, trait)
        _set_users(c, self.settings)
        _set_spawner(c, self.settings)

    def complete(self, c: Any) -> Address:
        """Set what follows from the address, and merge what Makeway cannot work without; the same each time."""
        hub = c.JupyterHub
        self._take_inner_port(hub)
        self._address = result = addresses.configured_address(hub, self._address, self._ours)
        self._ours |= result.traits()
        hub.update(result.traits())
        names = read_subdomains(hub)
        if names:
            api = f"{result.base_url}{SERVICE_PATH.strip('/')}/api/"
            hosts = {names.name, urlsplit(result.loopback_url).hostname}
            set_subdomains(c, names, {f"{host}{api}": self._service_url for host in hosts})
            result = replace(result, public=names.hub + result.base_url.rstrip("/"), panel=names.service)
        path = f"{result.base_url.rstrip('/')}{SERVICE_PATH}"
        direct = self._service_url + path
        # The proxy's own certificate, and the names of subdomains, are those by which browsers know it.
        inside = direct if result.secure or names else result.loopback_url + SERVICE_PATH
        watch_services_closely()
        merge_services(c, _services(self.settings, self._service_url, inside))
        merge_roles(c, *_administrators(self.settings))
        merge_pages(c, f"{result.panel}{path}/")
        merge_server_scopes(c)
        c.MakewayLocalSpawner.makeway_api_url = direct
        c.MakewayLocalSpawner.makeway_url = inside
        c.MakewayLocalSpawner.makeway_public_path = f"{result.panel}{path}/"
        c.MakewayLocalSpawner.makeway_token = self.settings.state.secret("spawner_token")
        return result

    def _take_inner_port(self, hub: Any) -> None:
        """Make the port that a site chose for the Hub itself a part of its URL, beside which it counts for nothing."""
        if "hub_port" in hub and hub.get("hub_bind_url") == self._ours.get("hub_bind_url"):
            hub.hub_bind_url = f"http://127.0.0.1:{hub.hub_port}"
        self._ours["hub_bind_url"] = hub.get("hub_bind_url")

    def complete_once_read(self, app: Any) -> None:
        """Complete and check the configuration when JupyterHub has read all of it; end the Hub where it cannot be.

        JupyterHub has no hook for this: it hands what it has read, with its command line, to `update_config`.
        """
        update = app.update_config

        def complete_and_update(c: Any) -> None:
            app.update_config = update
            try:
                result = self.complete(c)
                self.check(c, result)
            except CannotStart as error:
                self.end(app, error)
            for path in hidden_templates(c):
                app.log.warning("The template %s has no effect: Makeway's of the same name comes first", path)
            update(c)
            result.write(self.settings.state.address_file)

        app.update_config = complete_and_update

    def end(self, app: Any, error: CannotStart) -> NoReturn:
        """End the Hub with a sentence that `make run` shows."""
        self.settings.state.problem_file.write_text(f"{error}\n", encoding="utf-8")
        app.log.critical("Makeway cannot start. %s", error)
        sys.exit(1)

    def check(self, c: Any, result: Address) -> None:
        """Raise CannotStart where the portal would be open to others, or could not work, with the site's settings."""
        settings = self.settings
        check_hub_database(str(c.JupyterHub.get("db_url", "")))
        addresses.check_certificate(c.JupyterHub)
        addresses.check_open(result, settings.mode, settings.open)
        addresses.check_internal_addresses(c, settings.open)
        addresses.check_proxy(c)
        _check_classes(c)
        _check_traits(c)
        if addresses.started_by_launcher():
            addresses.check_free(result)


def _defaults(settings: Settings, ports: dict[str, int]) -> list[tuple[str, str, Any]]:
    """Return the section, name and value of the traits that a site may set to something else."""
    state = settings.state
    state.secret("cookie_secret")
    command = proxy_command()
    return [
        ("JupyterHub", "hub_bind_url", f"http://127.0.0.1:{ports['hub']}"),
        ("JupyterHub", "db_url", f"sqlite:///{state.root / 'jupyterhub.sqlite'}"),
        ("JupyterHub", "upgrade_db", True),  # from a copy beside it, as in the chart
        ("JupyterHub", "cookie_secret_file", str(state.secrets / "cookie_secret")),
        ("JupyterHub", "pid_file", str(state.root / "hub.pid")),
        # Kept notebooks find the next Hub by its address and their token; both stay the same.
        ("JupyterHub", "cleanup_servers", not settings.keep),
        ("JupyterHub", "cleanup_proxy", not settings.keep),
        # A start that waits for GPUs must block no other start, and a refusal is not a failure: JupyterHub 5 would
        # stop after five failures in a row.
        ("JupyterHub", "concurrent_spawn_limit", 0),
        ("Spawner", "consecutive_failure_limit", 0),
        ("JupyterHub", "allow_named_servers", True),
        ("JupyterHub", "named_server_limit_per_user", 3),
        # otherwise JupyterHub searches for the proxy itself and reports what is missing
        *([("ConfigurableHTTPProxy", "command", command)] if command else []),
        ("ConfigurableHTTPProxy", "log_level", "warn"),
        ("ConfigurableHTTPProxy", "api_url", f"http://127.0.0.1:{ports['proxy_api']}"),
        ("ConfigurableHTTPProxy", "auth_token", state.secret("proxy_token")),
        ("ConfigurableHTTPProxy", "pid_file", str(state.proxy_pid)),
    ]


def _set_users(c: Any, settings: Settings) -> None:
    if settings.mode == "demo":
        set_default(c.JupyterHub, "authenticator_class", SampleAuthenticator)
        set_default(c.SampleAuthenticator, "password", settings.state.password())
        set_default(c.Authenticator, "allowed_users", set(SAMPLE_USERS))
        set_default(c.Authenticator, "admin_users", {SAMPLE_ADMIN})
        groups = {name: {"users": users} for name, users in SAMPLE_GROUPS.items()}
        set_default(c.JupyterHub, "load_groups", groups)
        return
    set_default(c.JupyterHub, "authenticator_class", SystemAuthenticator)
    set_default(c.Authenticator, "manage_groups", True)
    set_default(c.Authenticator, "auth_refresh_age", GROUPS_SECONDS)
    set_default(c.Authenticator, "refresh_pre_spawn", True)
    if hasattr(SystemAuthenticator, "auth_refresh_strict"):  # JupyterHub 6; 5 is always strict
        set_default(c.Authenticator, "auth_refresh_strict", True)
    if settings.allowed_groups:
        set_default(c.LocalAuthenticator, "allowed_groups", set(settings.allowed_groups))
    else:
        set_default(c.Authenticator, "allow_all", True)
    set_default(c.PAMAuthenticator, "admin_groups", set(_existing(settings.admin_groups)))


def _administrators(settings: Settings) -> tuple[list[str], list[str]]:
    """Return the users, and the groups, that administer Makeway."""
    return ([SAMPLE_ADMIN], []) if settings.mode == "demo" else ([], _existing(settings.admin_groups))


def _existing(groups: frozenset[str]) -> list[str]:
    import grp

    known = {entry.gr_name for entry in grp.getgrall()}
    return sorted(groups & known)


def _services(settings: Settings, service_url: str, inside: str) -> list[dict[str, Any]]:
    state = settings.state
    return [
        {
            "name": SERVICE,
            **service_fields(service_url),
            "command": [sys.executable, "-m", "makeway_quota.main", "serve"],
            "cwd": str(state.root),
            "api_token": state.secret("service_token"),
            "environment": _service_environment(settings, inside),
            **({"timeout": SERVICE_SECONDS} if hasattr(services.Service, "timeout") else {}),  # JupyterHub 6
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


def _service_environment(settings: Settings, inside: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON_PREFIXES) or key in PASSED_ON}
    env.update(
        MAKEWAY_STATE_DIR=str(settings.state.root),
        MAKEWAY_MODE=settings.mode,
        MAKEWAY_KEEP="1" if settings.keep else "",
        MAKEWAY_LEASE_SECONDS=f"{settings.lease_seconds:g}",
        MAKEWAY_TICKET_SECRET=settings.state.secret("ticket_secret"),
        MAKEWAY_URL=inside,
        MAKEWAY_HUB_PID=str(os.getpid()),
    )
    set_samples(env, settings)
    return env


def _set_spawner(c: Any, settings: Settings) -> None:
    set_default(c.JupyterHub, "spawner_class", MakewayLocalSpawner)
    spawner = c.MakewayLocalSpawner
    set_default(spawner, "mode", settings.mode)
    set_default(spawner, "homes", str(settings.state.homes))
    set_default(spawner, "logs", str(settings.state.notebook_logs))
    set_default(spawner, "sockets", str(settings.state.sockets))
    set_default(spawner, "renew_seconds", settings.lease_seconds / 3)
    set_default(c.Spawner, "poll_interval", 5)
    set_default(c.Spawner, "poll_jitter", 0)
    set_default(c.Spawner, "http_timeout", 120)


def _check_classes(c: Any) -> None:
    """Raise CannotStart for a spawner without leases, and for a proxy that the portal does not know how to start."""
    for name, needed, what in (
        ("spawner_class", LeaseMixin, "makeway_spawner.local.MakewayLocalSpawner or a class of yours that extends it"),
        ("proxy_class", ConfigurableHTTPProxy, "JupyterHub's configurable-http-proxy, which is the default"),
    ):
        if name in c.JupyterHub:
            chosen = getattr(JupyterHub, name).validate(None, c.JupyterHub[name])
            if not issubclass(chosen, needed):
                raise CannotStart(f"c.JupyterHub.{name} = {chosen.__name__} cannot be used with Makeway: use {what}.")


def _check_traits(c: Any) -> None:
    """Raise CannotStart for traits that take the place of what the portal does."""
    check_spawn_page(c, ("Spawner", "LocalProcessSpawner", "MakewayLocalSpawner"))
    manages = value(c.Authenticator, "manage_groups", False)
    if manages and value(c.JupyterHub, "load_groups", {}):
        raise CannotStart(
            "c.JupyterHub.load_groups lists groups, and c.Authenticator.manage_groups has the authenticator manage "
            "them: set c.Authenticator.manage_groups = False for groups of your own, or remove load_groups."
        )
