"""A whole portal below a prefix behind a web server with TLS, and one with a certificate; none is open to others."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from http.cookiejar import Cookie, CookieJar
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from hub.portal import SERVICE, Portal, until
from hub.test_proxies import environment_of
from hub.test_site_settings import certificate
from makeway_spawner.process import marked

pytestmark = [pytest.mark.e2e, pytest.mark.covers("N22")]
FRONT = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "gpus.example", "Host": "gpus.example"}
"""What a web server with TLS adds to a request that it passes on."""


def listening(portal: Portal) -> set[str]:
    """Return the addresses on which the processes of a portal listen."""
    assert portal.process
    own = psutil.Process(portal.process.pid)
    processes = {own, *own.children(recursive=True)}
    processes |= {psutil.Process(pid) for pid in marked("MAKEWAY_STATE_DIR", str(portal.state.root))}
    return {
        one.laddr.ip
        for process in processes
        for one in process.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }


def start_and_use(portal: Portal, session: httpx2.Client, prefix: str, url: str) -> None:
    """Log in, pick a profile, see the panel, and use the service from the notebook."""
    session.get(f"{prefix}/hub/login")
    answer = session.post(
        f"{prefix}/hub/login",
        params={"_xsrf": session.cookies["_xsrf"]},
        data={"username": "ana", "password": portal.state.password()},
    )
    assert answer.status_code in (200, 302), answer.text
    page = session.get(f"{prefix}/hub/spawn").text
    assert f'href="{prefix}{SERVICE}/"' in page
    assert 'value="rnd/gpu1"' in page
    live = re.search(r'data-live="([^"]+)"', page)
    assert live
    assert session.get(live[1].replace("&amp;", "&")).json()["user"] == "ana"
    action = re.search(r'id="spawn_form"[^>]*action="([^"]+)"', page)
    assert action
    session.post(action[1].replace("&amp;", "&"), data={"choice": "rnd/gpu1"})
    until(lambda: (portal.server("ana") or {}).get("ready"), "ana's server is ready")
    pid = portal.hub("GET", "/users/ana").json()["servers"][""]["state"]["pid"]
    notebook = environment_of(pid)
    ask = "from makeway_api.client import Client; print(Client().me().name)"
    told = subprocess.run(
        [sys.executable, "-c", ask], env=notebook, capture_output=True, text=True, timeout=60, check=False
    )
    assert told.stdout.strip() == "ana", told.stderr
    assert url in portal.printed
    assert listening(portal) <= {"127.0.0.1", "::1"}


class _Plain(CookieJar):
    """Cookies that a browser keeps of a web server with TLS, which this test is itself."""

    def set_cookie(self, cookie: Cookie) -> None:
        cookie.secure = False
        super().set_cookie(cookie)


@pytest.fixture
def below(tmp_path: Path) -> Iterator[Portal]:
    portal = Portal(
        tmp_path,
        "c.JupyterHub.base_url = '/gpus/team/'\nc.JupyterHub.template_vars['announcement'] = 'Hi'\n"
        "c.JupyterHub.tornado_settings = {'cookie_options': {'secure': True}}",
    )
    portal.base = portal.url = f"{portal.base}/gpus/team"
    yield portal
    portal.stop()


def test_a_portal_below_a_prefix_behind_a_web_server_with_tls(below: Portal) -> None:
    below.start()
    origin = f"http://127.0.0.1:{below.port}"
    plain: dict[str, Any] = {"base_url": origin, "timeout": 60, "trust_env": False}
    with httpx2.Client(**plain, headers=FRONT, cookies=_Plain()) as session:
        login = session.get("/gpus/team/hub/login")
        assert "Hi" in login.text, "the site's own variables of templates"
        data = {"username": "ana", "password": below.state.password()}
        xsrf = {"_xsrf": session.cookies["_xsrf"]}
        done = session.post("/gpus/team/hub/login", params=xsrf, data=data)
        (cookie,) = [one for one in done.headers.get_list("Set-Cookie") if one.startswith("jupyterhub-hub-login=")]
        assert "; Secure" in cookie, "the browser speaks TLS to the web server"
        panel = session.get(f"/gpus/team{SERVICE}/")
        assert panel.status_code == 302
        assert panel.headers["Location"].startswith("/gpus/team/hub/api/oauth2/authorize")
    with httpx2.Client(**plain, follow_redirects=True, cookies=_Plain()) as session:
        start_and_use(below, session, "/gpus/team", f"{origin}/gpus/team")
        assert session.get(f"/gpus/team{SERVICE}/").status_code == 200
    assert httpx2.get(f"{origin}/hub/login", trust_env=False).status_code == 404


def test_a_portal_with_a_certificate_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, cert = certificate(tmp_path)
    portal = Portal(tmp_path, f"c.JupyterHub.ssl_key = '{key}'\nc.JupyterHub.ssl_cert = '{cert}'")
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    portal.base = portal.url = f"https://127.0.0.1:{portal.port}"
    trusted = ssl.create_default_context(cafile=str(cert))
    monkeypatch.setattr(
        portal,
        "hub",
        lambda method, path, **more: httpx2.request(
            method,
            f"{portal.base}/hub/api{path}",
            headers={"Authorization": f"token {portal.token}"},
            verify=trusted,
            **more,
        ),
    )
    try:
        portal.start()
        with httpx2.Client(base_url=portal.url, timeout=60, verify=trusted, follow_redirects=True) as session:
            start_and_use(portal, session, "", portal.url)
    finally:
        portal.stop()


@pytest.mark.parametrize("lines", ["c.JupyterHub.ip = ''", "c.JupyterHub.bind_url = 'http://0.0.0.0:8000/gpus/'"])
def test_a_demo_that_would_be_open_ends_at_once_with_the_reason(tmp_path: Path, lines: str) -> None:
    portal = Portal(tmp_path, lines)
    process = portal.launch()
    assert process.wait(60) == 1
    assert "Makeway cannot start. The site's configuration has the portal listen on" in portal.printed
    assert "opens the demo to the network" in portal.printed.splitlines()[-1]
