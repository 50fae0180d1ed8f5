"""The picker and the pending page in a real Chromium, in front of a real service with real jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe import violations
from browser import Person, chromium
from hub.portal import Portal, until
from makeway_api.models import JobRequest, SessionRequest
from makeway_spawner.home import home_of, prepare
from playwright.sync_api import Browser, Route, expect

pytestmark = [pytest.mark.browser, pytest.mark.e2e]

STUBBORN = ["bash", "-c", "trap '' TERM; while :; do sleep 1; done"]
"""A job that ignores the notice until its deadline, so that the phase of reclaim lasts."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def person(portal: Portal, browser: Browser) -> Iterator[object]:
    users: list[Person] = []

    def log_in(name: str, to: str = "/hub/spawn", dark: bool = False) -> Person:
        users.append(Person(browser, portal.url, name, portal.state.password(), dark=dark))
        users[-1].log_in(to)
        return users[-1]

    yield log_in
    for one in users:
        assert one.outside == [], "a page asked outside of the portal"
        assert one.errors == []
        one.close()


@pytest.fixture
def full(portal: Portal) -> Iterator[None]:
    """Run three jobs of ana's with three GPUs each; one of ten GPUs is idle."""
    with portal.client(portal.user_token("ana")) as ana:
        jobs = [
            ana.submit(JobRequest(team="rnd", profile="gpu3", command=STUBBORN, name=f"train-{i}")) for i in range(3)
        ]
        until(lambda: all(ana.job(job.id).state == "running" for job in jobs), "ana's jobs run")
        yield
        for job in jobs:
            ana.cancel(job.id)
        until(lambda: all(ana.job(job.id).state.ended for job in jobs), "ana's jobs are gone")


def leases_of(portal: Portal, user: str) -> list[str]:
    return [session.id for session in portal.live_sessions() if session.user == user]


@pytest.mark.covers("N03")
def test_the_picker_follows_what_others_do_without_a_reload(portal: Portal, person: object) -> None:
    ana = person("ana")
    row = ana.row("rnd/gpu3")
    expect(row).to_have_attribute("data-code", "ready_now")
    expect(ana.page.locator("#mw-live")).to_have_text("live")
    row.locator("input[type=radio]").check()
    ana.page.evaluate("window.sameDocument = true")
    with portal.client(portal.state.secret("spawner_token")) as hub:
        lease = hub.request_session(SessionRequest(user="lea", profile="gpu3", team="rnd"))
        expect(row).to_have_attribute("data-code", "refused")
        expect(row.locator(".mw-message")).to_contain_text("lea 3")
        expect(row.locator("input[type=radio]")).to_be_disabled()
        expect(ana.page.locator(".mw-team[data-team=rnd] .mw-team-text")).to_contain_text("3 in use")
        row.locator("input[type=checkbox]").check()
        expect(row.locator("input[type=radio]")).to_be_checked()  # a preemptible session is possible instead
        hub.release(lease.id)
    expect(row).to_have_attribute("data-code", "ready_now")
    assert ana.page.evaluate("window.sameDocument")


def test_the_form_works_without_scripts(portal: Portal, browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{portal.url}/hub/login?next=/hub/spawn")
    page.fill("#username_input", "guest")
    page.fill("#password_input", portal.state.password())
    page.click("#login_submit")
    page.check("input[value='/cpu']")
    page.click("#spawn_form button[type=submit]")
    until(lambda: (portal.server("guest") or {}).get("ready"), "guest's notebook is up")
    context.close()
    portal.hub("DELETE", "/users/guest/server")


@pytest.mark.covers("N03", "N05", "F40")
@pytest.mark.usefixtures("full")
def test_reclaim_is_announced_shown_and_can_be_stopped(portal: Portal, person: object, pictures: Path | None) -> None:
    bo = person("bo")
    bo.context.add_init_script("const right = Date.now; Date.now = () => right() + 36e5;")  # a clock that is wrong
    row = bo.row("devops/gpu2")
    expect(row).to_have_attribute("data-code", "ready_after_reclaim")
    expect(row.locator(".mw-badge")).to_contain_text("Ready in ≤")
    expect(row.locator(".mw-message")).to_contain_text("R&D's job (3 GPUs) makes way")
    bo.start("devops/gpu2")
    bo.page.wait_for_url("**/spawn-pending/**")
    now = bo.page.locator(".mw-phases li.now")
    expect(now).to_have_attribute("data-phase", "reclaim")
    expect(bo.page.locator("#progress-message")).to_contain_text("R&D's job")
    expect(bo.page.locator("#mw-until")).to_have_text(re.compile(r"^at the latest in [1-9]\d? s$"))
    expect(bo.page.locator("#progress-log time").nth(1)).to_have_text(re.compile(r"^after \d+(\.\d)? s$"))
    for phase in ("admission", "reclaim"):
        clock = bo.page.locator(f".mw-phases li[data-phase={phase}] .mw-phase-clock")
        expect(clock).to_have_text(re.compile(r"^\d+(\.\d)? s$"))
    expect(bo.page.locator(".mw-phases li[data-phase=server] .mw-phase-clock")).to_be_empty()
    if pictures:
        bo.page.screenshot(path=pictures / "pending.png")
    assert leases_of(portal, "bo")
    bo.page.click("#stop-server-btn")
    expect(bo.page.locator("#mw-heading")).to_have_text("Stopped")
    expect(bo.page.locator("#mw-again")).to_be_visible()
    assert leases_of(portal, "bo") == []
    until(lambda: not portal.server("bo"), "no server is left")


@pytest.mark.covers("N05")
@pytest.mark.usefixtures("full")
def test_stop_on_a_named_servers_page_leaves_the_default_server_alone(portal: Portal, person: object) -> None:
    portal.start_server("bo", profile="cpu")
    bo = person("bo", "/hub/spawn/bo/second")
    bo.start("devops/gpu3")
    bo.page.wait_for_url("**/spawn-pending/bo/second**")
    expect(bo.page.locator("#mw-heading")).to_contain_text("second")
    expect(bo.page.locator(".mw-phases li.now")).to_have_attribute("data-phase", "reclaim")
    bo.page.click("#stop-server-btn")
    expect(bo.page.locator("#mw-heading")).to_have_text("Stopped")
    assert (portal.server("bo") or {})["ready"]
    assert not portal.server("bo", "second")
    portal.hub("DELETE", "/users/bo/server")
    until(lambda: not portal.server("bo"), "bo's default server is gone")


@pytest.mark.covers("N05")
def test_a_start_that_is_refused_on_its_way_says_why_and_offers_another_choice(portal: Portal, person: object) -> None:
    ana = person("ana")
    row = ana.row("rnd/gpu3")
    row.locator("input[type=radio]").check()
    ana.page.route("**/offers/live**", lambda route: route.abort())  # this page's numbers are old now
    with portal.client(portal.state.secret("spawner_token")) as hub:
        lease = hub.request_session(SessionRequest(user="lea", profile="gpu3", team="rnd"))
        ana.page.click("#spawn_form button[type=submit]")
        expect(ana.page.locator(".spawn-error-msg")).to_contain_text("lea 3")
        hub.release(lease.id)
    expect(ana.page.locator("#spawn_form")).to_be_visible()
    assert leases_of(portal, "ana") == []


@pytest.mark.covers("N05")
def test_a_start_that_fails_says_why_on_the_page_that_waits_and_on_the_next_one(portal: Portal, person: object) -> None:
    home = home_of(portal.state.homes, "ana")
    prepare(home)
    faulty = home / ".jupyter" / "jupyter_server_config.py"
    faulty.parent.mkdir(parents=True, exist_ok=True)
    faulty.write_text("import sys\nsys.exit('broken by <b>ana</b>')\n")
    try:
        ana = person("ana")
        ana.start("rnd/gpu1")
        shown = ana.page.locator("#progress-message, .spawn-error-msg, .mw-refusal")
        expect(shown).to_contain_text("broken by <b>ana</b>")
        expect(shown).to_contain_text("exit code 1")
        until(lambda: not portal.server("ana"), "the start has failed")
        ana.page.goto(f"{ana.base}/hub/user/ana/")
        refusal = ana.page.locator(".mw-refusal")
        expect(refusal).to_contain_text("broken by <b>ana</b>")
        expect(refusal).to_be_in_viewport()
        assert violations(ana.page) == []
        ana.page.get_by_role("button", name="Choose again").click()
        expect(ana.row("rnd/gpu1")).to_have_attribute("data-code", "ready_now")
    finally:
        faulty.unlink()


@pytest.mark.covers("N03")
def test_the_open_picker_says_when_the_cluster_cannot_be_read_and_when_it_can_again(
    portal: Portal, person: object
) -> None:
    ana = person("ana")
    message = "Nodes and jobs are shown as they were seen last, and nothing starts: the API server does not answer."
    problems = [message]

    def answer(route: Route) -> None:
        table = route.fetch()
        route.fulfill(response=table, json={**table.json(), "problem": problems[0] if problems else None})

    expect(ana.page.locator("#mw-problem")).to_be_hidden()
    ana.page.route("**/offers/live**", answer)
    expect(ana.page.locator("#mw-problem")).to_have_text(message)
    assert violations(ana.page) == []
    problems.clear()
    expect(ana.page.locator("#mw-problem")).to_be_hidden()


@pytest.mark.covers("N03", "N05")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.usefixtures("full")
def test_the_picker_and_the_pending_page_pass_axe_core(portal: Portal, person: object, dark: bool) -> None:
    bo = person("bo", dark=dark)
    expect(bo.row("devops/gpu3")).to_have_attribute("data-code", "ready_after_reclaim")
    expect(bo.row("devops/gpu8")).to_have_attribute("data-code", "refused")
    assert violations(bo.page) == []
    bo.start("devops/gpu3")
    bo.page.wait_for_url("**/spawn-pending/**")
    expect(bo.page.locator(".mw-phases li.now")).to_have_attribute("data-phase", "reclaim")
    expect(bo.page.locator("#mw-title")).to_have_text("3 GPUs · DevOps")
    assert violations(bo.page) == []
    bo.page.click("#stop-server-btn")
    expect(bo.page.locator("#mw-heading")).to_have_text("Stopped")
    assert violations(bo.page) == []
    until(lambda: not portal.server("bo"), "no server is left")
