"""Logging in through the Hub: OAuth with state and PKCE, tokens, groups, and a Hub that is gone."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from fastapi import FastAPI, Request, Response
from jupyterhub.services.auth import HubOAuth
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import COOKIE
from makeway_quota.web.login.hub_login import HubDirectory, caller_of
from makeway_quota.web.settings import WebSettings
from web.portal import API, PREFIX, SECRET, Portal, serving

SCOPES = ["custom:makeway:read", "custom:makeway:submit", "access:services!service=makeway", "read:users:name!user=ana"]


PKCE = hasattr(HubOAuth, "pkce_enabled")
"""JupyterHub 6 has it, 5 does not; Makeway works with both."""


class Hub:
    """The four answers of the Hub's REST API that a service needs, as JupyterHub 6 gives them."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.tokens: dict[str, dict[str, Any]] = {
            "ana-token": {"name": "ana", "kind": "user", "groups": ["rnd"], "scopes": SCOPES, "admin": True},
            "boss-token": {"name": "boss", "kind": "user", "groups": [], "scopes": [*SCOPES, "custom:makeway:admin"]},
        }
        self.users: dict[str, Any] = {"bo": {"name": "bo", "groups": ["devops"]}}
        self.challenges: dict[str, str] = {}
        self.asked: list[str] = []
        self.app.get("/hub/api/user")(self.user)
        self.app.get("/hub/api/users/{name}")(self.of_name)
        self.app.post("/hub/api/oauth2/token")(self.token)

    async def user(self, request: Request) -> Response:
        self.asked.append("user")
        token = request.headers["authorization"].split()[-1]
        result = self.tokens.get(token)
        return Response(json.dumps(result or {"status": 403}), status_code=200 if result else 403)

    async def of_name(self, name: str, request: Request) -> Response:
        self.asked.append(name)
        assert request.headers["authorization"] == "token service-token"
        result = self.users.get(name)
        return Response(json.dumps(result or {}), status_code=200 if result else 404)

    async def token(self, request: Request) -> Response:
        form = parse_qs((await request.body()).decode())
        code = form["code"][0]
        digest = hashlib.sha256(form.get("code_verifier", [""])[0].encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=") if PKCE else ""
        if form["client_secret"] != ["service-token"] or self.challenges.get(code) != challenge:
            return Response('{"error": "invalid_grant", "error_description": "wrong code"}', status_code=400)
        return Response('{"access_token": "ana-token"}')


@pytest.fixture
async def hub() -> AsyncIterator[tuple[Hub, str]]:
    made = Hub()
    async with serving(made.app) as address:
        yield made, f"{address}/hub/api"


def directory(url: str) -> HubDirectory:
    settings = WebSettings(prefix=PREFIX, secret=SECRET)
    oauth = HubOAuth(
        api_url=url,
        api_token="service-token",
        oauth_client_id="service-makeway",
        base_url=PREFIX,
        oauth_redirect_uri=f"{PREFIX}oauth_callback",
        access_scopes={"access:services!service=makeway"},
        cache_max_age=settings.auth_cache_seconds,
    )
    return HubDirectory(settings, oauth)


@pytest.fixture
async def browser(web: Portal, hub: tuple[Hub, str]) -> AsyncIterator[httpx2.AsyncClient]:
    """A browser before the portal whose people come from the Hub."""
    people = directory(hub[1])
    app = create_app(web.services, WebSettings(prefix=PREFIX, secret=SECRET), people)
    transport = httpx2.ASGITransport(app=app)
    headers = {"Accept": "text/html"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://hub.test", headers=headers) as client:
        yield client
    await people.close()


async def login(browser: httpx2.AsyncClient, hub: Hub, path: str) -> httpx2.Response:
    """Go to a page, be sent to the Hub, come back with a code."""
    away = await browser.get(path)
    assert away.status_code == 302
    query = parse_qs(urlsplit(away.headers["location"]).query)
    assert urlsplit(away.headers["location"]).path == "/hub/api/oauth2/authorize"
    assert (query["client_id"], query["response_type"]) == (["service-makeway"], ["code"])
    assert ("code_challenge" in query) is PKCE
    hub.challenges["a-code"] = query.get("code_challenge", [""])[0]
    return await browser.get(f"{PREFIX}oauth_callback", params={"code": "a-code", "state": query["state"][0]})


async def test_login_brings_back_to_the_page(browser: httpx2.AsyncClient, hub: tuple[Hub, str]) -> None:
    back = await login(browser, hub[0], f"{PREFIX}teams/rnd?x=1")
    assert (back.status_code, back.headers["location"]) == (302, f"{PREFIX}teams/rnd?x=1")
    page = await browser.get(back.headers["location"])
    assert page.status_code == 200
    assert "R&amp;D" in page.text
    assert "ana-token" not in page.text
    assert [cookie.name for cookie in browser.cookies.jar] == [COOKIE]


async def test_a_login_that_was_started_elsewhere_is_refused(browser: httpx2.AsyncClient, hub: tuple[Hub, str]) -> None:
    for query in ({}, {"code": "a-code"}, {"code": "a-code", "state": "x"}, {"error": "access_denied"}):
        answer = await browser.get(f"{PREFIX}oauth_callback", params=query)
        assert answer.status_code == 403
        assert "Logging in did not work" in answer.text
    await browser.get(PREFIX)
    state = next(cookie.name for cookie in browser.cookies.jar).removeprefix("makeway-oauth-")
    stolen = await browser.get(f"{PREFIX}oauth_callback", params={"code": "a-code", "state": state + "other"})
    assert stolen.status_code == 403


async def test_a_code_that_the_hub_refuses(browser: httpx2.AsyncClient, hub: tuple[Hub, str]) -> None:
    away = await browser.get(PREFIX)
    state = parse_qs(urlsplit(away.headers["location"]).query)["state"][0]
    answer = await browser.get(f"{PREFIX}oauth_callback", params={"code": "wrong", "state": state})
    assert answer.status_code == 403
    assert "wrong code" in answer.text
    assert COOKIE not in [cookie.name for cookie in browser.cookies.jar]


async def test_tokens_are_believed_for_seconds_only(browser: httpx2.AsyncClient, hub: tuple[Hub, str]) -> None:
    ana = {"Authorization": "token ana-token", "Accept": "*/*"}
    for _ in range(3):
        me = (await browser.get(f"{API}/me", headers=ana)).json()
    assert (me["name"], me["admin"], me["teams"]) == ("ana", False, ["rnd"])
    assert me["scopes"] == ["custom:makeway:read", "custom:makeway:submit"]
    assert hub[0].asked == ["user"]
    assert (await browser.get(f"{API}/me", headers={"Authorization": "token unknown"})).status_code == 401
    assert WebSettings(auth_cache_seconds=300).auth_cache_seconds == 10


async def test_administrators_are_those_with_the_scope() -> None:
    boss = caller_of({"name": "boss", "scopes": ["custom:makeway:admin", "read:metrics", "list:users"]})
    assert (boss.admin, boss.scopes) == (True, frozenset({"custom:makeway:admin", "read:metrics"}))
    assert not caller_of({"name": "ana", "admin": True, "scopes": []}).admin


async def test_groups_come_from_the_hub(hub: tuple[Hub, str]) -> None:
    people = directory(hub[1])
    for _ in range(3):
        assert list(await people.groups_of("bo")) == ["devops"]
    assert list(await people.groups_of("unknown")) == []
    assert hub[0].asked == ["bo", "unknown"]
    await people.close()


async def test_a_hub_that_does_not_answer_is_a_503(web: Portal) -> None:
    people = directory("http://127.0.0.1:9/hub/api")
    app = create_app(web.services, WebSettings(prefix=PREFIX, secret=SECRET), people)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://hub.test") as client:
        answer = await client.get(f"{API}/me", headers={"Authorization": "token x"})
        assert (answer.status_code, answer.json()["code"]) == (503, "hub_unreachable")
        assert "Running jobs and notebooks continue" in answer.json()["detail"]
    with pytest.raises(Exception, match="cannot be asked"):
        await people.groups_of("ana")
    await people.close()
