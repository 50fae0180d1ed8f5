"""The service on a name of its own: links and logos of the Hub's origin, live offers for its page, cookies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from makeway_quota.settings import load
from makeway_quota.web.login.auth import COOKIE
from web.portal import API, PREFIX, Portal, portal

HUB = "https://gpus.example.com"
TLS = {"X-Forwarded-Proto": "https"}


@pytest.fixture
async def apart(tmp_path: Path) -> AsyncIterator[Portal]:
    async with portal(tmp_path, hub_origin=HUB) as made:
        yield made


@pytest.mark.covers("N22")
@pytest.mark.parametrize(
    ("hub", "callback", "origin"),
    [
        (HUB, "https://makeway--service.gpus.example.com/services/makeway/oauth_callback", HUB),
        (
            f"{HUB}:8443",
            "https://makeway--service.gpus.example.com:8443/services/makeway/oauth_callback",
            f"{HUB}:8443",
        ),
        (HUB, f"{HUB}/services/makeway/oauth_callback", ""),  # the Hub has a public address, and no subdomains
        (HUB, "/services/makeway/oauth_callback", ""),
        ("", "/services/makeway/oauth_callback", ""),
        ("", "", ""),
    ],
)
def test_the_service_sees_whether_it_has_a_name_of_its_own(hub: str, callback: str, origin: str) -> None:
    told = {"JUPYTERHUB_HOST": hub, "JUPYTERHUB_OAUTH_CALLBACK_URL": callback}
    assert load(environ=told).hub_origin == origin


async def test_pages_lead_to_the_hub_and_load_nothing_else(apart: Portal) -> None:
    page = await (await apart.browser("ana")).get(PREFIX)
    assert f'href="{HUB}/hub/home"' in page.text
    assert f'src="{HUB}/hub/logo"' in page.text
    policy = page.headers["content-security-policy"]
    assert f"img-src 'self' data: {HUB};" in policy
    assert f"form-action 'self' {HUB};" in policy, "a form whose login has ended leads to the Hub's"
    assert "default-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy


async def test_the_spawn_page_reads_offers_by_its_ticket_and_nothing_else(apart: Portal) -> None:
    ana = apart.as_("ana")
    ticket = (await ana.get(f"{API}/offers")).json()["ticket"]
    for text, status in ((ticket, 200), ("x", 401)):
        answer = await apart.as_(None).get(f"{API}/offers/live", params={"ticket": text}, headers={"Origin": HUB})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == HUB
        assert "access-control-allow-credentials" not in answer.headers
    for path in (f"{API}/offers", f"{API}/policy", PREFIX):
        assert "access-control-allow-origin" not in (await ana.get(path, headers={"Origin": HUB})).headers


async def test_no_server_below_the_same_host_can_set_the_login_cookie(apart: Portal) -> None:
    """By its prefix, which browsers let only the host itself set, for the path / and with TLS."""
    browser = apart.as_(None, headers={"Accept": "text/html", **TLS})
    cookie = (await browser.get(f"{PREFIX}?login_token=ana")).headers["set-cookie"]
    name, _, value = cookie.partition(";")[0].partition("=")
    assert name == f"__Host-{COOKIE}"
    for part in ("HttpOnly", "SameSite=lax", "Path=/;", "Secure"):
        assert part in cookie
    assert "Domain" not in cookie
    signed_in = apart.as_(None, headers={"Accept": "text/html", "Cookie": f"{name}={value}", **TLS})
    assert (await signed_in.get(PREFIX)).status_code == 200
    set_by_another = apart.as_(None, headers={"Accept": "text/html", "Cookie": f"{COOKIE}={value}", **TLS})
    assert (await set_by_another.get(PREFIX)).status_code == 401


async def test_a_change_from_a_notebook_of_the_same_host_is_refused(apart: Portal) -> None:
    id = await apart.running_job()
    browser = await apart.browser("ana")
    xsrf = (await browser.get(PREFIX)).text.partition('name="makeway-xsrf" content="')[2].partition('"')[0]
    for headers in ({"Sec-Fetch-Site": "same-site"}, {"Origin": "https://ana.gpus.example.com"}, {"Origin": HUB}):
        answer = await browser.post(f"{PREFIX}jobs/{id}/cancel", data={"_xsrf": xsrf}, headers=headers)
        assert answer.status_code == 403
