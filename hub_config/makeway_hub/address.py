"""Decide where the portal of one machine listens, from its own settings and from those of the site.

Called by `configure`. JupyterHub has several traits for each address, whose defaults open it to all networks.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .ports import holder

ANYWHERE = frozenset({"", "*", "0.0.0.0", "::"})
"""The ways to write: on all interfaces."""
_BASE = re.compile(r"/(?:[A-Za-z0-9._~-]+/)*")
_INTERNAL_URLS = ("hub_bind_url", "hub_connect_url")
_INTERNAL_HOSTS = ("hub_ip", "hub_connect_ip")


class CannotStart(Exception):
    """The portal cannot start: what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where JupyterHub's proxy listens."""

    ip: str = "127.0.0.1"
    port: int = 8000
    base_url: str = "/"
    secure: bool = False
    """whether it speaks TLS itself, with the site's certificate"""
    public: str = ""
    """the URL for browsers where the site names it, as behind a web server with TLS"""
    panel: str = ""
    """the origin of the quota service for browsers where `subdomain_host` is set; empty: the portal's own"""

    @property
    def bind_url(self) -> str:
        """The URL by which JupyterHub has its proxy listen."""
        return f"{self._scheme}://{_netloc(self.ip, self.port)}{self.base_url}"

    @property
    def loopback_url(self) -> str:
        """The URL by which this machine reaches the portal, without a slash at its end."""
        host = "127.0.0.1" if self.ip in ANYWHERE else self.ip
        return f"{self._scheme}://{_netloc(host, self.port)}{self.base_url}".rstrip("/")

    @property
    def browser_url(self) -> str:
        """The URL for people."""
        host = socket.gethostname() if self.ip in ANYWHERE else self.ip
        return self.public or f"{self._scheme}://{_netloc(host, self.port)}{self.base_url}".rstrip("/")

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return is_local(self.ip)

    @property
    def _scheme(self) -> str:
        return "https" if self.secure else "http"

    def traits(self) -> dict[str, Any]:
        """Return the address as traits of JupyterHub: a site sets `bind_url`, or the other three."""
        return {"ip": self.ip, "port": self.port, "base_url": self.base_url, "bind_url": self.bind_url}

    def write(self, path: Path) -> None:
        """Write the address to a file, where `make run` finds it; a reader never sees a part of it."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path) -> Address | None:
        """Return the address in a file, None where there is none."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def configured_address(hub: Mapping[str, Any], default: Address, set_by_makeway: Mapping[str, Any]) -> Address:
    """Return the address that a section `c.JupyterHub` asks for; CannotStart where it makes no sense.

    `set_by_makeway` are the traits that Makeway itself has set in it: the site did not ask for them.
    """

    def site_value(name: str) -> Any:
        value = hub.get(name)
        return None if value is None or value == set_by_makeway.get(name) else value

    result = asdict(default)
    if (url := site_value("bind_url")) is not None:
        parts = _parsed("bind_url", url)
        result |= {"ip": parts.hostname or "", "base_url": parts.path or "/"}
        result["port"] = parts.port or (443 if parts.scheme == "https" else 80)
    for name in ("ip", "port", "base_url"):
        if (value := site_value(name)) is not None:
            result[name] = value
    base = "/" + str(result["base_url"]).strip("/") + "/"
    result["base_url"] = base = base.replace("//", "/")
    if not _BASE.fullmatch(base):
        raise CannotStart(
            f"c.JupyterHub.base_url = {result['base_url']!r} is no path that every part of the portal can serve: use "
            "letters, digits, and . _ ~ - between the slashes, as in '/gpus/'."
        )
    if not isinstance(result["port"], int) or not 0 < result["port"] < 65536:
        raise CannotStart(f"c.JupyterHub.port = {result['port']!r} is no port: use a whole number from 1 to 65535.")
    secure = bool(hub.get("ssl_cert") or hub.get("ssl_key"))
    public = str(hub.get("public_url") or "").rstrip("/")
    return Address(str(result["ip"]), result["port"], base, secure, public)


def check_open(address: Address, mode: str, allowed: bool) -> None:
    """Raise CannotStart for an address that opens the demo, or passwords in clear, to the network."""
    if address.is_local or allowed:
        return
    where = f"The site's configuration has the portal listen on {address.ip or 'all interfaces'}"
    if mode == "demo":
        raise CannotStart(
            f"{where}, which opens the demo to the network: its users share your account and one password. Remove "
            "c.JupyterHub.ip and bind_url, use MAKEWAY_MODE=system, or allow it with MAKEWAY_OPEN=1."
        )
    if not address.secure:
        raise CannotStart(
            f"{where} without TLS, so that passwords cross the network in clear. Set c.JupyterHub.ssl_key and "
            "ssl_cert, put a web server with TLS in front of 127.0.0.1, or allow it with MAKEWAY_OPEN=1."
        )


def check_internal_addresses(c: Mapping[str, Any], allowed: bool) -> None:
    """Raise CannotStart where Hub, proxy API or notebooks would listen for other machines, or `internal_ssl` is set."""
    hub, proxy = c.get("JupyterHub", {}), c.get("ConfigurableHTTPProxy", {})
    if hub.get("internal_ssl"):
        raise CannotStart(
            "c.JupyterHub.internal_ssl is not supported: on one machine the parts of the portal reach each other by "
            "127.0.0.1. Remove it."
        )
    urls = [(f"c.JupyterHub.{name}", str(hub[name])) for name in _INTERNAL_URLS if hub.get(name)]
    if proxy.get("api_url"):
        urls.append(("c.ConfigurableHTTPProxy.api_url", str(proxy["api_url"])))
    hosts = [(name, _parsed(name, url).hostname or "") for name, url in urls]
    hosts += [(f"c.JupyterHub.{name}", str(hub[name])) for name in _INTERNAL_HOSTS if name in hub]
    if "proxy_api_ip" in hub:
        hosts.append(("c.JupyterHub.proxy_api_ip", str(hub["proxy_api_ip"])))
    for kind in ("Spawner", "LocalProcessSpawner", "MakewayLocalSpawner"):
        if "ip" in c.get(kind, {}):
            hosts.append((f"c.{kind}.ip", str(c[kind]["ip"])))
    for name, host in hosts:
        if not is_local(host) and not allowed:
            raise CannotStart(
                f"{name} would have an inner part of the portal listen on {host or 'all interfaces'}: on one machine "
                "only 127.0.0.1 is used. Remove it, or allow it with MAKEWAY_OPEN=1."
            )


def check_proxy(c: Mapping[str, Any]) -> None:
    """Raise CannotStart for a proxy that the portal does not start itself."""
    for kind in ("Proxy", "ConfigurableHTTPProxy"):
        if c.get(kind, {}).get("should_start") is False:
            raise CannotStart(
                f"c.{kind}.should_start = False: the portal of one machine starts its own proxy. Remove it, and put "
                "another web server in front of it where you need one."
            )


def check_certificate(hub: Mapping[str, Any]) -> None:
    """Raise CannotStart unless the site's key and certificate can be used together."""
    key, certificate = str(hub.get("ssl_key") or ""), str(hub.get("ssl_cert") or "")
    if not key and not certificate:
        return
    if not key or not certificate:
        there, missing = ("ssl_key", "ssl_cert") if key else ("ssl_cert", "ssl_key")
        raise CannotStart(f"c.JupyterHub.{there} is set without {missing}: TLS needs both, or remove it.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = error.strerror or getattr(error, "reason", "") or error if isinstance(error, OSError) else error
        raise CannotStart(
            f"The certificate {certificate} with the key {key} (c.JupyterHub.ssl_cert, ssl_key) cannot be used: {why}. "
            "Both are PEM files that this account may read, the key without a passphrase."
        ) from None


def check_free(address: Address) -> None:
    """Raise CannotStart if the portal could not listen there, with who has the port where it can be seen."""
    family = socket.AF_INET6 if ":" in address.ip else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if address.ip in ANYWHERE else address.ip, address.port))
            return
        except OSError as error:
            number, why = error.errno, error.strerror or str(error)
    if number == errno.EADDRINUSE:
        process = holder(address.port)
        raise CannotStart(
            f"Port {address.port} is taken{f' by {process}' if process else ''}: "
            "stop that program, or choose another port with PORT=8001 make run, or with c.JupyterHub.port where the "
            "site's configuration sets it."
        )
    if number == errno.EACCES:
        raise CannotStart(
            f"Port {address.port} is for root only: choose one from 1024 on with PORT=8000 make run, or with "
            "c.JupyterHub.port where the site's configuration sets it, and put a web server in front of it."
        )
    raise CannotStart(f"The portal cannot listen on {address.ip} (c.JupyterHub.ip): {why}.")


def is_local(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    if host in ANYWHERE:
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parsed(name: str, url: Any) -> Any:
    parts = urlsplit(str(url))
    try:
        _ = parts.port
        ok = parts.scheme in ("http", "https")
    except ValueError:
        ok = False
    if not ok:
        name = name if name.startswith("c.") else f"c.JupyterHub.{name}"
        raise CannotStart(f"{name} = {url!r} is not supported on one machine: use http://127.0.0.1:PORT/PREFIX/.")
    return parts


def _netloc(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def started_by_launcher() -> bool:
    """Whether `make run` started this Hub, after it stopped what an earlier one had left."""
    return bool(os.environ.get("MAKEWAY_LAUNCHED"))
