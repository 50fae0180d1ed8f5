"""The form of copies on the page of a job: the same as `job.clone(n, **overrides).submit()`, once for each press."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from axe import AXE
from playwright.async_api import Page, expect
from web.portal import API, EVIL, PREFIX, Portal
from web.test_browser import page, url
from web.test_pages import check, words

__all__ = ["page", "url"]


def form_of(text: str) -> dict[str, str]:
    """What a browser would send of the untouched form of copies."""
    form = text.partition("/clone")[2].partition("</form>")[0]
    sent = {
        name: html.unescape(value) for name, value in re.findall(r'<input[^>]*?name="(\w+)"\s+value="([^"]*)"', form)
    }
    return sent | dict.fromkeys(re.findall(r'<select[^>]*?name="(\w+)"', form), "") | {"env": ""}


async def jobs(web: Portal) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = (await web.as_("root").get(f"{API}/jobs")).json()["jobs"]
    return result


@pytest.mark.covers("F53")
async def test_copies_with_changed_arguments_are_submitted_as_by_clone(web: Portal) -> None:
    original = await web.running_job(env={"SEED": "1"}, priority="low")
    browser = await web.browser("ana")
    text = check(await browser.get(f"{PREFIX}jobs/{original}"))
    changed = {"n": "3", "name": "again", "time_limit": "3600", "max_failures": "2", "env": "SEED=7\n"}
    check(await browser.post(f"{PREFIX}jobs/{original}/clone", data=form_of(text) | changed))
    by_form = [one for one in await jobs(web) if one["name"] == "again"]
    overrides = {"name": "again", "time_limit": 3600, "max_failures": 2, "env": {"SEED": "7"}}
    answer = await web.as_("ana").post(f"{API}/jobs/{original}/clone", json={"n": 3, "overrides": overrides})
    assert answer.status_code == 201, answer.text
    ids = {one["id"] for one in answer.json()}
    fields = ("team", "profile", "workers", "priority", "time_limit", "clone_of", "owner")
    copied = [{key: one[key] for key in fields} for one in by_form]
    assert len(copied) == 3
    assert copied == [{key: one[key] for key in fields} for one in await jobs(web) if one["id"] in ids]
    rows = [web.services.context.store.workload(id) for id in (by_form[0]["id"], *ids)]
    assert {(row.max_failures, row.env["SEED"], tuple(row.command)) for row in rows if row} == {
        (2, "7", tuple(rows[0].command)) if rows[0] else ()
    }


@pytest.mark.covers("F53")
async def test_a_double_click_submits_once_and_another_change_submits_anew(web: Portal) -> None:
    original = await web.running_job()
    browser = await web.browser("ana")
    text = check(await browser.get(f"{PREFIX}jobs/{original}"))
    sent = form_of(text) | {"name": "twice"}
    first = await browser.post(f"{PREFIX}jobs/{original}/clone", data=sent)
    second = await browser.post(f"{PREFIX}jobs/{original}/clone", data=sent)
    assert "This copy was submitted." in words(check(first))
    assert first.url == second.url
    assert len([one for one in await jobs(web) if one["name"] == "twice"]) == 1
    check(await browser.post(f"{PREFIX}jobs/{original}/clone", data=sent | {"name": "twice more", "n": "2"}))
    assert len([one for one in await jobs(web) if one["name"] == "twice more"]) == 2
    check(
        await browser.post(
            f"{PREFIX}jobs/{original}/clone", data=form_of(check(await browser.get(f"{PREFIX}jobs/{original}")))
        )
    )
    assert len(await jobs(web)) == 5, "a page that is opened again submits anew"


@pytest.mark.covers("F53")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", "0", "Copies: Input should be greater than or equal to 1"),
        ("n", "many", "Copies: Input should be a valid integer"),
        ("n", "101", "Copies: Input should be less than or equal to 100"),
        ("time_limit", "1h", "Time limit, in seconds: Input should be a valid integer"),
        ("priority", "urgent", "Priority: Input should be"),
        ("env", "no value", "Environment: each line is NAME=VALUE."),
        ("queue", "moon/gpu3", "moon"),
    ],
)
async def test_a_wrong_field_is_named_and_nothing_typed_is_lost(
    web: Portal, field: str, value: str, message: str
) -> None:
    original = await web.running_job()
    browser = await web.browser("ana")
    sent = form_of(check(await browser.get(f"{PREFIX}jobs/{original}"))) | {"name": EVIL, field: value}
    answer = await browser.post(f"{PREFIX}jobs/{original}/clone", data=sent)
    assert answer.status_code in (400, 403, 404, 422), answer.status_code
    text = answer.text
    assert message in words(text)
    if field != "queue":
        assert form_of(text)["name"] == EVIL
    assert EVIL not in text
    assert len(await jobs(web)) == 1


@pytest.mark.covers("F53")
async def test_only_those_who_may_submit_and_read_the_job_clone_it(web: Portal) -> None:
    original = await web.running_job()
    token = form_of(check(await (await web.browser("ana")).get(f"{PREFIX}jobs/{original}")))
    for person in ("eve", "eye", "bo", "lone"):
        browser = await web.browser(person)
        own = re.search(r'name="makeway-xsrf" content="([^"]+)"', (await browser.get(PREFIX)).text)
        sent = token | {"_xsrf": own[1] if own else ""}
        answer = await browser.post(f"{PREFIX}jobs/{original}/clone", data=sent)
        assert answer.status_code in (403, 404), (person, answer.status_code)
        assert "/clone" not in (await browser.get(f"{PREFIX}jobs/{original}")).text, person
    ana = await web.browser("ana")
    foreign = await ana.post(f"{PREFIX}jobs/{original}/clone", data={**token, "_xsrf": ""})
    assert foreign.status_code == 403
    assert len(await jobs(web)) == 1


async def _run(web: Portal, name: str, many: int) -> bool:
    return len([one for one in await jobs(web) if one["name"] == name and one["state"] == "running"]) == many


@pytest.mark.browser
@pytest.mark.covers("F53")
async def test_the_form_works_without_a_script_and_for_a_screen_reader(
    web: Portal, url: str, page: Page, tmp_path: Path
) -> None:
    original = await web.running_job()
    assert page.context.browser is not None
    plain = await page.context.browser.new_page(java_script_enabled=False, viewport={"width": 390, "height": 900})
    await plain.goto(f"{url}{PREFIX}?login_token=ana")
    await plain.goto(f"{url}{PREFIX}jobs/{original}")
    await plain.get_by_text("Clone", exact=True).click()
    await plain.get_by_label("Copies", exact=True).fill("2")
    await plain.get_by_label("Name", exact=True).fill("plain")
    await plain.screenshot(path=tmp_path / "clone-390.png", full_page=True)
    await plain.get_by_role("button", name="Submit copies").click()
    await expect(plain.get_by_role("status").filter(has_text="2 copies were submitted")).to_be_visible()
    await web.run.until(lambda: _run(web, "plain", 2), "both copies run")
    await plain.get_by_role("link", name="run", exact=True).click()
    await expect(plain.get_by_role("link", name="plain")).to_have_count(2)
    for theme in ("light", "dark"):
        other = await page.context.browser.new_page(color_scheme=theme)
        await other.goto(f"{url}{PREFIX}?login_token=ana")
        await other.goto(f"{url}{PREFIX}jobs/{original}")
        await other.locator("#h-clone").press("Enter")
        await expect(other.get_by_label("Copies", exact=True)).to_be_visible()
        await other.screenshot(path=tmp_path / f"clone-{theme}.png", full_page=True)
        await other.evaluate(AXE.read_text(encoding="utf-8"))
        result = await other.evaluate("() => axe.run(document.querySelector('main'))")
        assert [(rule["id"], [one["html"][:120] for one in rule["nodes"]]) for rule in result["violations"]] == []
