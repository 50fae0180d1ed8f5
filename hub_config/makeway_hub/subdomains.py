"""Read where a Hub has its users' servers and services on names of their own, below `c.JupyterHub.subdomain_host`.

Called by `configure` and by `cluster`. Then a page of a notebook server is of another origin than the panel and the
Hub: what it sends cannot act there as the person who visits it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jupyterhub.utils import subdomain_hook_idna

from .access import SERVICE
from .address import CannotStart
from .site_settings import value

EXAMPLE = "https://gpus.example.com"


@dataclass(frozen=True, slots=True)
class Subdomains:
    """The origins of the Hub and of the quota service, such as https://gpus.example.com, without a slash at the end."""

    hub: str
    service: str

    @property
    def name(self) -> str:
        """The Hub's host name."""
        return urlsplit(self.hub).hostname or ""

    @property
    def secure(self) -> bool:
        """Whether browsers speak TLS with them."""
        return self.hub.startswith("https:")


def read_subdomains(hub: Mapping[str, Any]) -> Subdomains | None:
    """Return the origins that a section `c.JupyterHub` asks for, None without subdomains; CannotStart if none work."""
    given = str(hub.get("subdomain_host") or "").strip()
    if not given:
        return None
    parts = urlsplit(given if "://" in given else f"https://{given}")  # as JupyterHub completes it
    name = _checked(given, parts)
    port = f":{parts.port}" if parts.port else ""
    public = urlsplit(str(hub.get("public_url") or ""))
    if public.netloc and (public.hostname, public.scheme) != (name, parts.scheme):
        raise CannotStart(
            f"c.JupyterHub.public_url names another host than c.JupyterHub.subdomain_host = {given!r}: browsers would "
            "refuse the cookies of one of them. Remove public_url, which follows from the other."
        )
    return Subdomains(f"{parts.scheme}://{name}{port}", f"{parts.scheme}://{_service_name(hub, name)}{port}")


def _checked(given: str, parts: Any) -> str:
    try:
        port_is_valid = parts.port is None or parts.port > 0
        name = parts.hostname or ""
    except ValueError:
        port_is_valid, name = False, ""
    wrong = parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query or parts.username
    if wrong or not port_is_valid or "." not in name.strip(".") or _is_address(name) or "*" in name:
        raise CannotStart(
            f"c.JupyterHub.subdomain_host = {given!r} is no host below which users can have names: use its full "
            f"address without a path, as in {EXAMPLE!r}, where *.gpus.example.com leads to the same server, or "
            "'http://hub.localhost:8000' on one machine."
        )
    return str(name)


def _service_name(hub: Mapping[str, Any], domain: str) -> str:
    hook = hub.get("subdomain_hook") or "idna"
    if hook == "idna":
        hook = subdomain_hook_idna
    if not callable(hook):
        raise CannotStart(
            f"c.JupyterHub.subdomain_hook = {hook!r} is not supported: a user could have the name of the panel's host. "
            "Remove it; the default, 'idna', gives each user and each service a name of its own."
        )
    name, user = str(hook(SERVICE, domain, "service")), str(hook(SERVICE, domain, "user"))
    if name in (domain, user) or not name.endswith(f".{domain}"):
        raise CannotStart(
            f"c.JupyterHub.subdomain_hook has the panel at {name}: it needs a name below {domain} that no user has."
        )
    return name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def set_subdomains(c: Any, names: Subdomains, routes: Mapping[str, str]) -> None:
    """Set in a configuration what goes with the names; the site's own choice of cookies, and its routes, stay.

    A server below the same host can set cookies for all of it, but for those with the prefix __Host-, which need TLS.
    `routes` are more of the proxy, from HOST/PATH/ to a URL: programs reach the API by the Hub's own name, too. They
    send a token; a browser sends no cookie of the panel there.
    """
    c.JupyterHub.subdomain_host = names.hub
    if names.secure and "cookie_host_prefix_enabled" not in c.JupyterHub:
        c.JupyterHub.cookie_host_prefix_enabled = True
    proxy = c.ConfigurableHTTPProxy
    proxy.extra_routes = {**value(c.Proxy, "extra_routes", {}), **value(proxy, "extra_routes", {}), **routes}
