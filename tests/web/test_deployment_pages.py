"""The pages of deployments: a list, one with its four panels, a machine, the form; for administrators."""

from __future__ import annotations

import html
import re

import pytest
from makeway_quota.autoscale.document import schema
from web.portal import EVIL, PREFIX, Portal
from web.test_deployments import CLOUD, launch, saved, store_of
from web.test_pages import check, words, xsrf

FORM = f"{PREFIX}deployment-form"


def typed(text: str) -> str:
    """The document in the form."""
    return html.unescape(re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", text, re.DOTALL)[0])


def confirmed(text: str) -> dict[str, str]:
    return dict(re.findall(r'name="(confirmation)" value="([^"]+)"', text))


@pytest.mark.covers("F55", "F57", "F59")
async def test_a_deployment_is_created_edited_and_duplicated_in_the_form(web: Portal) -> None:
    browser = await web.browser("root")
    assert "There are no deployments of machines." in words(check(await browser.get(f"{PREFIX}deployments")))
    empty = check(await browser.get(FORM))
    for table in schema().values():
        for key, _, help in table:
            assert f"<code>{key}</code>" in empty
            assert " ".join(help.split()) in words(empty), key
    sent = xsrf(empty) | {"document": CLOUD, "version": "0", "action": "save"}
    first = check(await browser.post(FORM, data=sent))
    assert "Nothing is saved yet." in words(first)
    assert "The deployment cloud is new." in words(first)
    assert typed(first) == CLOUD
    assert store_of(web).deployments.list() == [], "the first press shows what the document changes"
    shown = check(await browser.post(FORM, data=sent | confirmed(first)))
    assert "Nothing is launched: this service has no backend for machines. Add machines to MAKEWAY_BACKEND." in words(
        shown
    )
    edited = check(await browser.get(f"{FORM}?name=cloud"))
    assert typed(edited) == CLOUD
    assert 'name="version" value="1"' in edited
    copied = check(await browser.get(f"{FORM}?copy=cloud"))
    assert "name: cloud-2" in typed(copied)
    assert 'name="version" value="0"' in copied
    stale = check(await browser.post(FORM, data=sent | confirmed(first)), 409)
    assert "was edited, but it has version 1" in words(stale)
    assert typed(stale) == CLOUD, "what was typed is kept"


async def test_what_is_wrong_is_shown_and_what_was_typed_is_kept(web: Portal) -> None:
    browser = await web.browser("root")
    form = xsrf(check(await browser.get(FORM))) | {"version": "0", "action": "save"}
    wrong = CLOUD.replace("6.50", "-1")
    shown = check(await browser.post(FORM, data=form | {"document": wrong}), 422)
    assert 'data-line="5"' in shown
    assert typed(shown) == wrong
    for evil in (EVIL, "a: [", "\x01", "</textarea>" + EVIL, ""):
        check(await browser.post(FORM, data=form | {"document": evil}), 422)


@pytest.mark.covers("F55", "F56", "F72")
async def test_a_deployment_has_four_panels_and_is_paused_and_deleted(web: Portal) -> None:
    await saved(web, CLOUD + "title: <script>alert(1)</script>\n")
    launch(web, "m-idle", revision=1, state="ready", attempts=0, price=3_100_000)
    launch(web, "m-busy", revision=1, state="ready", attempts=2, price=None)
    await web.run.submit("ana", "patient", profile="gpu3", workers=4)
    browser = await web.browser("root")
    shown = words(check(await browser.get(f"{PREFIX}deployments")))
    assert "2 ready" in shown
    assert "3.10 of 6.50 EUR" in shown
    whole = check(await browser.get(f"{PREFIX}deployments/cloud"))
    for part in ("Idle machines 1", "Running machines 1", "Waiting work 1", "Log", "1 without a known price"):
        assert part in words(whole), part
    assert whole.index("m-idle") < whole.index('id="h-running"') < whole.index("m-busy")
    assert "patient" in words(check(await browser.get(f"{PREFIX}live/deployments/cloud")))
    form = xsrf(whole)
    paused = words(check(await browser.post(f"{PREFIX}deployments/cloud", data=form | {"action": "pause"})))
    assert "Paused: nothing is launched, and 2 machines are being ended." in paused
    resumed = words(check(await browser.post(f"{PREFIX}deployments/cloud", data=form | {"action": "resume"})))
    assert "this service has no backend for machines" in resumed
    deleted = words(check(await browser.post(f"{PREFIX}deployments/cloud", data=form | {"action": "delete"})))
    assert "Being deleted: 2 machines end first." in deleted
    assert "Pause" not in deleted
    assert "being deleted" in words(
        check(await browser.post(f"{PREFIX}deployments/cloud", data=form | {"action": "pause"}), 409)
    )


@pytest.mark.covers("F65")
async def test_a_machine_has_a_page_with_its_outputs(web: Portal) -> None:
    await saved(web)
    launch(web, "m-1", revision=1, state="terminating", reason="init_failed")
    store_of(web).machine_log.write_output("m-1", "init", EVIL, 3, 50.0)
    browser = await web.browser("root")
    for path in ("deployments", "live/deployments"):
        shown = words(check(await browser.get(f"{PREFIX}{path}/cloud/machines/m-1")))
        assert "Its init script failed." in shown
        assert "Init script exit code 3" in shown
        assert EVIL in shown
    check(await browser.get(f"{PREFIX}deployments/cloud/machines/m-2"), 404)
    check(await browser.get(f"{PREFIX}deployments/nothing"), 404)


async def test_pages_of_deployments_are_for_administrators(web: Portal) -> None:
    await saved(web)
    ana, root = await web.browser("ana"), await web.browser("root")
    assert f'href="{PREFIX}deployments"' in check(await root.get(PREFIX))
    panel = check(await ana.get(PREFIX))
    assert "deployment" not in panel
    for path in ("deployments", "live/deployments", "deployments/cloud", "deployment-form"):
        check(await ana.get(PREFIX + path), 403)
    form = xsrf(panel)
    check(await ana.post(f"{PREFIX}deployments/cloud", data=form | {"action": "delete"}), 403)
    check(await ana.post(FORM, data=form | {"document": CLOUD, "version": "1", "action": "save"}), 403)
    foreign = await root.post(f"{PREFIX}deployments/cloud", data={"action": "delete"})
    assert foreign.status_code == 403, "without the token of the page"
    [found] = store_of(web).deployments.list()
    assert (found.version, found.deleting) == (1, False)
