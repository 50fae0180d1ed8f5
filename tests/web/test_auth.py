"""Scopes and teams: which request is allowed, and the sentence of a refusal."""

from __future__ import annotations

import httpx2
import pytest
from makeway_quota.web.login.auth import COOKIE
from web.portal import API, PREFIX, Portal

READS = [
    "me", "pools", "profiles", "policies", "usage", "offers", "decisions", "sessions", "sessions/s-1", "jobs",
    "jobs/j-1", "jobs/j-1/events", "jobs/j-1/logs", "jobs/j-1/result", "jobs/j-1/error", "events",
    "policy", "policy/history", "policy/versions/1",
]  # fmt: skip
WRITES = [
    ("POST", "sessions", "reserve"), ("POST", "sessions/s-1/started", "reserve"),
    ("POST", "sessions/s-1/renew", "reserve"), ("DELETE", "sessions/s-1", "reserve"),
    ("POST", "jobs", "submit"), ("POST", "jobs/j-1/cancel", "submit"), ("POST", "jobs/j-1/resume", "submit"),
    ("POST", "jobs/j-1/clone", "submit"), ("POST", "jobs/j-1/move", "submit"),
    ("POST", "jobs/j-1/preempt-test", "submit"),
    ("POST", "policy/validate", "manage"), ("POST", "policy/preview", "manage"), ("PUT", "policy", "admin"),
]  # fmt: skip
BODIES = {
    "sessions": {"user": "ana", "profile": "gpu1", "team": "rnd"},
    "jobs": {"command": ["true"]},
    "jobs/j-1/clone": {"n": 1},
    "jobs/j-1/move": {"team": "rnd"},
    "policy": {"document": "x"},
    "policy/validate": {"document": "x"},
    "policy/preview": {"document": "x"},
}


async def call(client: httpx2.AsyncClient, method: str, path: str) -> httpx2.Response:
    body = BODIES.get(path) if method != "GET" else None
    return await client.request(method, f"{API}/{path}", json=body)


def problem(answer: httpx2.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == code


async def test_requests_without_a_login_get_nothing(web: Portal) -> None:
    for path in READS:
        problem(await call(web.as_(None), "GET", path), 401, "unauthorized")
    for method, path, _ in WRITES:
        problem(await call(web.as_(None), method, path), 401, "unauthorized")


async def test_a_wrong_token_is_no_login(web: Portal) -> None:
    for header in ("token unknown", "Bearer unknown", "Basic YTpi", "token", "", "token \x7f", "ana"):
        answer = await web.as_(None, headers={"Authorization": header}).get(f"{API}/me")
        problem(answer, 401, "unauthorized")


async def test_bearer_is_as_good_as_token(web: Portal) -> None:
    answer = await web.as_(None, headers={"Authorization": "Bearer ana"}).get(f"{API}/me")
    assert answer.json()["name"] == "ana"


async def test_each_write_takes_its_scope(web: Portal) -> None:
    for method, path, scope in WRITES:
        answer = await call(web.as_("eye"), method, path)
        problem(answer, 403, "forbidden")
        assert f"custom:makeway:{scope}" in answer.json()["detail"]


async def test_each_read_takes_the_scope_read(web: Portal) -> None:
    for path in READS:
        problem(await call(web.as_("blind"), "GET", path), 403, "forbidden")


async def test_reserve_is_not_for_administrators(web: Portal) -> None:
    problem(await call(web.as_("root"), "POST", "sessions"), 403, "forbidden")
    assert (await web.as_("root").delete(f"{API}/sessions/s-1")).status_code == 204


@pytest.mark.covers("F11")
async def test_an_outsider_cannot_submit_to_a_foreign_queue(web: Portal) -> None:
    answer = await web.as_("bo").post(f"{API}/jobs", json={"team": "rnd", "profile": "gpu3", "command": ["true"]})
    problem(answer, 403, "foreign_team")


@pytest.mark.covers("F30")
async def test_without_a_team_nothing_is_guessed(web: Portal) -> None:
    answer = await web.as_("lone").post(f"{API}/jobs", json={"profile": "gpu3", "command": ["true"]})
    assert answer.status_code == 403
    assert "team" in answer.json()["detail"]


async def test_people_see_their_teams_and_administrators_all(web: Portal) -> None:
    id = await web.running_job(owner="ana")
    assert (await web.as_("eye").get(f"{API}/jobs/{id}")).status_code == 200
    assert (await web.as_("root").get(f"{API}/jobs/{id}")).status_code == 200
    for path in (f"jobs/{id}", f"jobs/{id}/logs", f"jobs/{id}/events", f"jobs/{id}/result", f"jobs/{id}/error"):
        problem(await call(web.as_("bo"), "GET", path), 404, "not_found")
    for action in ("cancel", "resume", "preempt-test"):
        problem(await call(web.as_("bo"), "POST", f"jobs/{id}/{action}"), 404, "not_found")
    bo = web.as_("bo")
    assert (await bo.get(f"{API}/jobs")).json()["jobs"] == []
    assert [entry["team"] for entry in (await bo.get(f"{API}/usage")).json()["teams"]] == ["devops"]
    assert [policy["name"] for policy in (await bo.get(f"{API}/policies")).json()] == ["devops"]
    assert (await bo.get(f"{API}/decisions")).json() == []
    problem(await bo.get(f"{API}/jobs", params={"team": "rnd"}), 403, "foreign_team")
    problem(await bo.get(f"{API}/decisions", params={"team": "rnd"}), 403, "foreign_team")
    problem(await bo.get(f"{API}/offers", params={"user": "ana"}), 403, "forbidden")


async def test_team_members_may_read_and_leads_may_change(web: Portal) -> None:
    id = await web.running_job(owner="ana")
    problem(await web.as_("eye").post(f"{API}/jobs/{id}/cancel"), 403, "forbidden")
    assert (await web.as_("lead").post(f"{API}/jobs/{id}/cancel")).status_code == 200


# -- cookies ---------------------------------------------------------------------------------------------------


def xsrf_of(page: httpx2.Response) -> str:
    return page.text.partition('name="makeway-xsrf" content="')[2].partition('"')[0]


async def test_the_cookie_alone_opens_pages_but_not_the_api(web: Portal) -> None:
    browser = await web.browser("ana")
    page = await browser.get(PREFIX)
    assert page.status_code == 200
    for method, path in (("GET", "me"), ("GET", "events"), ("POST", "jobs")):
        problem(await browser.request(method, f"{API}/{path}", headers={"Accept": "*/*"}), 403, "xsrf")
    sent = {"X-XSRFToken": xsrf_of(page), "Sec-Fetch-Mode": "cors"}
    assert (await browser.get(f"{API}/me", headers=sent)).json()["name"] == "ana"
    assert (await browser.get(f"{API}/me", params={"_xsrf": xsrf_of(page)})).json()["name"] == "ana"
    problem(await browser.get(f"{API}/me", headers={"X-XSRFToken": b"\xe9"}), 403, "xsrf")


async def test_a_foreign_script_at_the_same_origin_cannot_read_pages(web: Portal) -> None:
    browser = await web.browser("ana")
    stolen = await browser.get(PREFIX, headers={"Sec-Fetch-Mode": "cors", "Accept": "*/*"})
    assert stolen.status_code == 403
    refreshed = {"Sec-Fetch-Mode": "cors", "X-XSRFToken": xsrf_of(await browser.get(PREFIX)), "HX-Request": "true"}
    assert (await browser.get(f"{PREFIX}live/panel", headers=refreshed)).status_code == 200


async def test_a_form_of_another_site_is_refused(web: Portal) -> None:
    id = await web.running_job()
    browser = await web.browser("ana")
    for form in ({}, {"_xsrf": "x"}, {"_xsrf": xsrf_of(await (await web.browser("bo")).get(PREFIX))}):
        answer = await browser.post(f"{PREFIX}jobs/{id}/cancel", data=form)
        assert answer.status_code == 403
        assert "Reload the page" in answer.text
    assert (await web.run.client("root").job(id)).state == "running"


@pytest.mark.parametrize(
    ("said", "accepted"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://hub.test"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "another word"}, False),
        ({"Origin": "http://hub.test"}, True),
        ({"Origin": "https://HUB.test"}, True),
        ({"Origin": "https://gpus.example:8443", "X-Forwarded-Host": "gpus.example:8443"}, True),
        ({"Origin": "http://ana.hub.test"}, False),
        ({"Origin": "http://hub.test:8000"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://[x"}, False),
        ({}, True),
    ],
)
async def test_a_change_comes_from_a_page_of_the_service_alone(
    web: Portal, said: dict[str, str], accepted: bool
) -> None:
    """By what browsers say of a request, even where the page of another origin has read the token of this one."""
    id = await web.running_job()
    browser = await web.browser("ana")
    form = {"_xsrf": xsrf_of(await browser.get(PREFIX))}
    answer = await browser.post(f"{PREFIX}jobs/{id}/cancel", data=form, headers=said, follow_redirects=False)
    assert answer.status_code == (303 if accepted else 403), answer.text
    read = await browser.get(f"{API}/me", headers={"X-XSRFToken": form["_xsrf"], **said})
    assert read.status_code == 200, "reading is for the browser to keep from others"
    program = web.as_("ana", headers=said)
    assert (await program.post(f"{API}/jobs/{id}/cancel")).status_code == 200, "a token is a program's"


async def test_what_concerns_all_is_not_changed_by_the_cookie_at_the_api(web: Portal) -> None:
    browser = await web.browser("root")
    sent = {"X-XSRFToken": xsrf_of(await browser.get(PREFIX)), "Sec-Fetch-Site": "same-origin"}
    policy = (await browser.get(f"{API}/policy", headers=sent)).json()
    document = {"document": policy["document"].replace("limit: 9", "limit: 10")}
    for method, path, body in (
        ("PUT", "policy", document),
        ("POST", "people/cancel", {"name": "ana"}),
        ("POST", "people/give", {"name": "ana/deleted-1", "to": "ana"}),
    ):
        problem(await browser.request(method, f"{API}/{path}", json=body, headers=sent), 403, "confirmation")
    assert (await web.as_("root").put(f"{API}/policy", json=document)).json()["version"] == policy["version"] + 1


async def test_the_cookie_is_signed_and_for_scripts_invisible(web: Portal) -> None:
    browser = web.as_(None, headers={"Accept": "text/html"})
    first = await browser.get(f"{PREFIX}?login_token=ana", headers={"X-Forwarded-Proto": "https"})
    cookie = first.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=lax", f"Path={PREFIX}", "Secure"):
        assert part in cookie
    for forged in ("ana", "x.y", web.app.state.authenticator.signer.sign("offers", "root", 60)):
        outsider = web.as_(None, cookies={COOKIE: forged}, headers={"Accept": "text/html"})
        assert (await outsider.get(PREFIX)).status_code == 401


async def test_a_part_of_a_page_asks_for_a_reload_after_the_login_ended(web: Portal) -> None:
    answer = await web.as_(None, headers={"HX-Request": "true"}).get(f"{PREFIX}live/panel")
    assert (answer.status_code, answer.headers["HX-Refresh"]) == (204, "true")
