"""Users' servers on names of their own: what a site may set, and what Hub, service and spawner are then told."""

from __future__ import annotations

from typing import Any

import pytest
from hub.test_cluster import SETTINGS, zero_to_jupyterhub
from hub.test_site_settings import BOTH, READ, address, read, refusal
from makeway_hub.address import CannotStart
from makeway_hub.cluster import configure_cluster
from makeway_hub.subdomains import Subdomains, read_subdomains

__all__ = ["read"]
GPUS = "https://gpus.example.com"
PANEL = "makeway--service.gpus.example.com"


@pytest.mark.covers("N22")
@pytest.mark.parametrize(
    ("given", "hub", "service"),
    [
        (GPUS, GPUS, f"https://{PANEL}"),
        ("gpus.example.com", GPUS, f"https://{PANEL}"),
        (f"{GPUS}:8443/", f"{GPUS}:8443", f"https://{PANEL}:8443"),
        ("http://hub.localhost:8000", "http://hub.localhost:8000", "http://makeway--service.hub.localhost:8000"),
        ("HTTPS://GPUS.example.com", GPUS, f"https://{PANEL}"),
    ],
)
def test_the_panel_has_a_name_that_no_user_has(given: str, hub: str, service: str) -> None:
    assert read_subdomains({"subdomain_host": given}) == Subdomains(hub, service)


@pytest.mark.parametrize("given", ["", "  ", None])
def test_without_a_host_there_are_none(given: str | None) -> None:
    assert read_subdomains({"subdomain_host": given}) is None


@pytest.mark.parametrize(
    ("hub", "words"),
    [
        ({"subdomain_host": "http://127.0.0.1:8000"}, "no host below which users can have names"),
        ({"subdomain_host": "http://[::1]:8000"}, "no host below which users can have names"),
        ({"subdomain_host": "http://localhost:8000"}, "no host below which users can have names"),
        ({"subdomain_host": "https://*.example.com"}, "no host below which users can have names"),
        ({"subdomain_host": f"{GPUS}/prefix"}, "no host below which users can have names"),
        ({"subdomain_host": f"{GPUS}:port"}, "no host below which users can have names"),
        ({"subdomain_host": "ftp://gpus.example.com"}, "no host below which users can have names"),
        ({"subdomain_host": "https://a@gpus.example.com"}, "no host below which users can have names"),
        ({"subdomain_host": GPUS, "subdomain_hook": "legacy"}, "a user could have the name of the panel's host"),
        ({"subdomain_host": GPUS, "subdomain_hook": lambda name, domain, kind: domain}, "that no user has"),
        ({"subdomain_host": GPUS, "subdomain_hook": lambda name, domain, kind: f"{name}.{domain}"}, "no user has"),
        ({"subdomain_host": GPUS, "public_url": "https://other.example.com/"}, "public_url names another host"),
        ({"subdomain_host": GPUS, "public_url": "http://gpus.example.com/"}, "public_url names another host"),
    ],
)
def test_what_cannot_work_is_refused_in_words(hub: dict[str, Any], words: str) -> None:
    with pytest.raises(CannotStart, match=words):
        read_subdomains(hub)


def test_a_hook_of_the_site_may_give_other_names() -> None:
    hook = lambda name, domain, kind: f"{kind}-{name}.{domain}"  # noqa: E731
    result = read_subdomains({"subdomain_host": GPUS, "subdomain_hook": hook, "public_url": f"{GPUS}/"})
    assert result == Subdomains(GPUS, "https://service-makeway.gpus.example.com")


@BOTH
def test_one_machine_is_told_of_the_names(read: READ, tmp_path: Any, where: str) -> None:
    lines = "c.JupyterHub.subdomain_host = 'gpus.example.com'\nc.JupyterHub.base_url = '/x/'"
    app = read(**{where: lines})
    assert app.subdomain_host == GPUS
    assert app.public_url == f"{GPUS}/x/"
    assert app.cookie_host_prefix_enabled
    result = address(tmp_path)
    assert result is not None
    assert (result.browser_url, result.loopback_url) == (f"{GPUS}/x", "http://127.0.0.1:8000/x")
    spawner = app.config.MakewayLocalSpawner
    assert spawner.makeway_public_path == app.template_vars["makeway_panel"] == f"https://{PANEL}/x/services/makeway/"
    routes = app.config.ConfigurableHTTPProxy.extra_routes
    assert set(routes) == {f"{host}/x/services/makeway/api/" for host in ("gpus.example.com", "127.0.0.1")}
    assert set(routes.values()) == {spawner.makeway_api_url.removesuffix("/x/services/makeway")}
    assert spawner.makeway_url == spawner.makeway_api_url, "the proxy knows the service by its name for browsers"


def test_one_machine_is_refused_what_cannot_work(read: READ, tmp_path: Any) -> None:
    message = refusal(read, tmp_path, "", "c.JupyterHub.subdomain_host = 'http://127.0.0.1:8000'")
    assert "no host below which users can have names" in message


def test_cookies_without_tls_have_no_prefix(read: READ) -> None:
    app = read(after="c.JupyterHub.subdomain_host = 'http://hub.localhost:8000'")
    assert not app.cookie_host_prefix_enabled


@pytest.mark.covers("N22")
def test_a_cluster_is_told_of_the_names() -> None:
    c = zero_to_jupyterhub()
    c.JupyterHub.subdomain_host = GPUS
    c.JupyterHub.base_url = "/x/"
    c.Proxy.extra_routes = {"site.gpus.example.com/": "http://site"}
    configure_cluster(c, SETTINGS)
    panel = f"https://{PANEL}/x/services/makeway/"
    assert c.MakewayKubeSpawner.makeway_public_path == c.JupyterHub.template_vars["makeway_panel"] == panel
    assert c.MakewayKubeSpawner.makeway_url == SETTINGS.notebook_url, "notebooks stay inside of the cluster"
    assert c.ConfigurableHTTPProxy.extra_routes == {
        "site.gpus.example.com/": "http://site",
        "proxy-public/x/services/makeway/": "http://makeway-service:8765",
        "gpus.example.com/x/services/makeway/api/": "http://makeway-service:8765",
    }
    assert c.JupyterHub.cookie_host_prefix_enabled


def test_a_cluster_without_names_has_no_such_routes() -> None:
    c = zero_to_jupyterhub()
    configure_cluster(c, SETTINGS)
    assert "extra_routes" not in c.ConfigurableHTTPProxy
    assert "cookie_host_prefix_enabled" not in c.JupyterHub
