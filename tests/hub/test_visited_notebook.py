"""What a page of a notebook server can do with the panel of the person who visits it: in a real Chromium.

With subdomains nothing. Where all share one origin, what security.md says.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Person, chromium
from hub.portal import SERVICE, Portal
from hub.test_proxies import environment_of
from playwright.sync_api import Browser, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.e2e]

SUBDOMAINS = "import os\nc.JupyterHub.subdomain_host = f'http://hub.localhost:{os.environ[\"PORT\"]}'"
"""Chromium takes every name below localhost for this machine."""
TOLD = "The policy is changed by a visited page"

FETCH = """async ([panel, told]) => {
  const tried = {};
  const attempt = async (name, url, options) => {
    try {
      const answer = await fetch(url, { credentials: "include", ...options });
      const text = await answer.text();
      tried[name] = { type: answer.type, status: answer.status, told: text.includes("policies") };
    } catch (error) {
      tried[name] = { type: error.name, status: 0, told: false };
    }
  };
  const body = JSON.stringify({ document: told });
  const json = { "Content-Type": "application/json" };
  await attempt("page", `${panel}policy`, {});
  await attempt("page without cors", `${panel}policy`, { mode: "no-cors" });
  await attempt("read", `${panel}api/v1/policy`, {});
  await attempt("put", `${panel}api/v1/policy`, { method: "PUT", headers: json, body });
  await attempt("put as text", `${panel}api/v1/policy`, { method: "POST", mode: "no-cors", body });
  return tried;
}"""
"""Requests with the visitor's cookies."""
FRAME = """async (panel) => {
  const frame = document.createElement("iframe");
  frame.src = `${panel}policy`;
  document.body.append(frame);
  await new Promise((done) => { frame.onload = done; setTimeout(done, 5000); });
  try {
    return (frame.contentDocument?.querySelector("textarea")?.value || "").includes("policies");
  } catch (error) {
    return error.name;
  }
}"""
FORM = """async ([panel, told]) => {
  const frame = Object.assign(document.createElement("iframe"), { name: "to" });
  const form = Object.assign(document.createElement("form"), { method: "post", target: "to" });
  form.action = `${panel}policy`;
  for (const [name, value] of Object.entries({ document: told, action: "apply", base: "1" }))
    form.append(Object.assign(document.createElement("input"), { name, value }));
  document.body.append(frame, form);
  const loaded = new Promise((done) => { frame.onload = done; setTimeout(done, 5000); });
  form.submit();
  await loaded;
}"""
POPUP = """async (panel) => {
  const popup = window.open(`${panel}policy`, "panel");
  for (let i = 0; i < 60; i += 1) {
    await new Promise((done) => setTimeout(done, 100));
    try {
      const text = popup.document?.querySelector("textarea")?.value;
      if (text) return text.includes("policies") ? "the policy" : text;
      if (popup.closed) return "closed";
    } catch (error) {
      return error.name;
    }
  }
  return "nothing";
}"""
"""What the page reads of a window with the panel that it opens."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@contextmanager
def visited(person: Person, origin: str, **headers: str) -> Iterator[Page]:
    """Open a page that bo's server might send, which may set any header, in the browser of the person."""
    url = f"{origin}/user/bo/page"
    body = "<!doctype html><title>bo</title><body>Look at my results"
    page = person.context.new_page()
    page.route(url, lambda route: route.fulfill(body=body, content_type="text/html", headers=headers))
    page.goto(url)
    yield page
    page.close()


def version(portal: Portal) -> int:
    with portal.client() as client:
        return client.policy().version


def administrator(portal: Portal, browser: Browser, hub: str) -> Person:
    person = Person(browser, hub, "admin", portal.state.password())
    person.log_in("/hub/home")
    person.page.click("#makeway-policy")
    expect(person.page.locator("#document")).to_contain_text("policies")
    return person


def attempts(page: Page, panel: str) -> dict[str, object]:
    """Try everything but windows; return what worked."""
    result: dict[str, object] = page.evaluate(FETCH, [panel, TOLD])
    result["frame"] = page.evaluate(FRAME, panel)
    page.evaluate(FORM, [panel, TOLD])
    return result


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], Portal]]:
    made: list[Portal] = []

    def start(more: str) -> Portal:
        made.append(Portal(tmp_path, more))
        return made[0].start()

    yield start
    for portal in made:
        portal.stop()


@pytest.mark.covers("N22", "N15")
def test_with_subdomains_a_visited_page_gets_nothing(started: Callable[[str], Portal], browser: Browser) -> None:
    portal = started(SUBDOMAINS)
    hub = f"http://hub.localhost:{portal.port}"
    assert f"Makeway is ready at  {hub}" in portal.printed
    panel = f"http://makeway--service.hub.localhost:{portal.port}{SERVICE}/"
    root = administrator(portal, browser, hub)
    assert root.page.url == f"{panel}policy"
    before = version(portal)
    theirs = f"http://bo.hub.localhost:{portal.port}"
    for headers in ({}, {"Cross-Origin-Opener-Policy": "same-origin"}, {"Cross-Origin-Opener-Policy": "unsafe-none"}):
        with visited(root, theirs, **headers) as page:
            result = attempts(page, panel)
            refused = {"type": "TypeError", "status": 0, "told": False}
            frame = result.pop("frame")
            assert result == dict.fromkeys(("page", "page without cors", "read", "put", "put as text"), refused)
            assert frame in (False, "SecurityError", "TypeError")
            assert page.evaluate(POPUP, panel) in ("closed", "SecurityError", "nothing")
            page.evaluate("document.cookie = 'makeway-login=x; domain=hub.localhost; path=/services/makeway/'")
    assert version(portal) == before
    root.close()

    ana = Person(browser, hub, "ana", portal.state.password())
    ana.log_in()
    expect(ana.page.locator("#mw-live")).to_have_text("live")
    live = ana.page.locator("#mw-live")
    with ana.page.expect_response(lambda answer: answer.url.startswith(f"{panel}api/v1/offers/live")) as read:
        expect(live).to_have_text("live")
    assert read.value.status == 200
    ana.start("rnd/gpu1")
    ana.page.wait_for_url(f"http://ana.hub.localhost:{portal.port}/user/ana/lab**", timeout=180_000)
    expect(ana.page.locator("#jp-main-dock-panel")).to_have_count(1, timeout=180_000)
    notebook = environment_of(portal.hub("GET", "/users/ana").json()["servers"][""]["state"]["pid"])
    ask = "from makeway_api.client import Client; print(Client().me().name)"
    assert subprocess.check_output([sys.executable, "-c", ask], env=notebook, text=True, timeout=60).strip() == "ana"
    ana.page.goto(panel)
    expect(ana.page.locator("h1").first).to_be_visible()
    ana.page.click("#logout")
    ana.page.wait_for_url(f"{hub}/hub/log**")
    ana.page.goto(panel)
    ana.page.wait_for_url(f"{hub}/hub/login**")
    assert ana.errors == []
    ana.close()


@pytest.mark.covers("N22")
def test_with_one_origin_only_a_window_of_its_own_gives_the_panel_away(
    started: Callable[[str], Portal], browser: Browser
) -> None:
    portal = started("")
    panel = f"{portal.url}{SERVICE}/"
    root = administrator(portal, browser, portal.url)
    before = version(portal)
    with visited(root, portal.url) as page:
        result = attempts(page, panel)
        for name in ("page", "page without cors", "read", "put"):
            assert result[name] == {"type": "basic", "status": 403, "told": False}, name
        assert result["frame"] in (False, "SecurityError", "TypeError")
        assert page.evaluate(POPUP, panel) in ("closed", "SecurityError", "nothing"), "the window is not its own"
    with visited(root, portal.url, **{"Cross-Origin-Opener-Policy": "same-origin"}) as page:
        assert page.evaluate(POPUP, panel) == "the policy", "security.md says so"
    assert version(portal) == before
    root.close()
