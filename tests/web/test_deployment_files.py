"""Export and import of deployments on the pages; a double click sends a form once. Partly in a real Chromium."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from autoscale.test_deployment_document import AWS_DOCUMENT, GCP_DOCUMENT
from makeway import cli, connection
from makeway_quota.autoscale.document import read_deployment, schema
from playwright.async_api import Page, expect
from web.portal import PREFIX, Portal
from web.test_browser import page, url
from web.test_deployment_pages import FORM, WHOLE, confirmed, fields
from web.test_deployments import CLOUD, saved, store_of
from web.test_pages import check, words, xsrf

__all__ = ["page", "url"]

IMPORT = f"{PREFIX}deployment-import"
OTHER = CLOUD.replace("6.50", "7")


async def imported(browser: httpx2.AsyncClient, content: bytes, status: int = 200) -> str:
    """The page after a file was chosen and sent."""
    form = xsrf(check(await browser.get(IMPORT)))
    return check(await browser.post(IMPORT, data=form, files={"file": ("cloud.yaml", content)}), status)


async def send(browser: httpx2.AsyncClient, page: str, status: int) -> str:
    """The page after Save now was pressed."""
    sent = xsrf(page) | fields(page) | confirmed(page) | {"action": "save"}
    return check(await browser.post(FORM, data=sent), status)


def changes(page: str) -> str:
    """What the page says of what a document changes."""
    return words(page.partition('id="h-check"')[2].partition("</section>")[0])


@pytest.mark.covers("F58")
@pytest.mark.parametrize(
    "text",
    [CLOUD, CLOUD.replace("\n", "\r\n"), f"\ufeff{CLOUD}", WHOLE.format(evil="x").replace("whole", "cloud")],
    ids=["as typed", "of Windows", "with a mark", "with every field"],
)
async def test_an_exported_document_is_that_of_the_command_byte_for_byte_and_imports_without_a_change(
    web: Portal, text: str
) -> None:
    await saved(web, text)
    browser = await web.browser("root")
    assert f'href="{PREFIX}deployments/cloud/document"' in check(await browser.get(f"{PREFIX}deployments/cloud"))
    file = await browser.get(f"{PREFIX}deployments/cloud/document")
    assert file.content == text.encode()
    assert file.headers["content-disposition"] == 'attachment; filename="cloud.yaml"'
    again = await imported(browser, file.content)
    assert "Nothing." in changes(again)
    assert fields(again)["version"] == "1"


@pytest.mark.covers("F58")
async def test_every_field_of_the_schema_goes_from_the_form_to_the_file_and_back(web: Portal) -> None:
    browser, filled = await web.browser("root"), set[str]()
    for text in (WHOLE.format(evil="x"), AWS_DOCUMENT, GCP_DOCUMENT.replace("name: cloud", "name: google")):
        before = read_deployment(text)
        await saved(web, text)
        sent = fields(check(await browser.get(f"{FORM}?name={before.name}")))
        filled |= {re.sub(r"\.\d+", "", key) for key, value in sent.items() if key.startswith("f.") and value}
        asks = check(await browser.post(FORM, data=sent | {"f.title": "Typed", "action": "save"}))
        await send(browser, asks, 200)
        file = (await browser.get(f"{PREFIX}deployments/{before.name}/document")).content
        assert read_deployment(file.decode()) == replace(before, title="Typed")
        assert "Nothing." in words(
            (await imported(browser, file)).partition('id="h-check"')[2].partition("</section>")[0]
        )
    tables = {"document": "f.", "machine_types": "f.machine_types.", "schedule": "f.machine_types.schedule."}
    known = {f"{tables[table]}{key}" for table, lines in schema().items() if table in tables for key, _, _ in lines}
    assert filled == known - {"f.version", "f.machine_types", "f.machine_types.schedule"}


@pytest.mark.covers("F58")
async def test_an_imported_document_is_saved_by_the_second_press(web: Portal) -> None:
    browser = await web.browser("root")
    asks = await imported(browser, CLOUD.encode())
    assert "Nothing is saved yet." in words(asks)
    assert "The deployment cloud is new." in words(asks)
    assert store_of(web).deployments.list() == []
    await send(browser, asks, 200)
    [stored] = store_of(web).deployments.list()
    assert (stored.document, stored.version, stored.updated_by) == (CLOUD, 1, "root")
    changed = await imported(browser, OTHER.encode())
    assert "Nothing is saved yet." in words(changed)
    await send(browser, changed, 200)
    assert [(one.document, one.version) for one in store_of(web).deployments.list()] == [(OTHER, 2)]


MANY_TYPES = CLOUD + "".join(
    f"  - {{name: type-{number}, pool: gpu, instance: i-{number}, gpus: 1, price: 1}}\n" for number in range(31)
)


@pytest.mark.covers("F58")
@pytest.mark.parametrize("text", [MANY_TYPES, f"{CLOUD}moves: {{}}\n"], ids=["31 more types", "an empty table"])
async def test_a_document_that_the_form_has_no_fields_for_is_imported_over_the_one_that_is_there(
    web: Portal, text: str
) -> None:
    await saved(web, text)
    browser = await web.browser("root")
    asks = await imported(browser, text.replace("6.50", "7").encode())
    sent = fields(asks)
    assert (sent["mode"], sent["name"], sent["version"]) == ("yaml", "cloud", "1")
    await send(browser, asks, 200)
    [stored] = store_of(web).deployments.list()
    assert (stored.document, stored.version) == (text.replace("6.50", "7"), 2)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no file was chosen, or it is empty."),
        (b"\xff\xfe\x00n", "the file is no text in UTF-8."),
        (b"name: a\0", "the file is no text in UTF-8."),
        (b"#" * 500_001, "the file is larger than the 500,000 bytes of a document."),
    ],
    ids=["empty", "in UTF-16", "with NUL", "large"],
)
async def test_a_file_that_is_no_document_is_refused_where_it_was_chosen(
    web: Portal, content: bytes, told: str
) -> None:
    await saved(web)
    answer = await imported(await web.browser("root"), content, 422)
    assert f"Nothing is saved: {told}" in words(answer)
    assert 'type="file"' in answer
    assert [(one.document, one.version) for one in store_of(web).deployments.list()] == [(CLOUD, 1)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (CLOUD.replace("hour: 6.50", "hour: much"), "correct the marked fields"),
        (CLOUD.replace("hour:", "hours:"), "hours"),
        ("{", "What is wrong"),
        ("- 1\n", "What is wrong"),
        (CLOUD + "---\n" + CLOUD, "What is wrong"),
    ],
    ids=["a value", "a key", "no YAML", "a list", "two documents"],
)
async def test_a_wrong_document_is_shown_with_its_mistakes_and_nothing_is_lost(
    web: Portal, text: str, told: str
) -> None:
    await saved(web)
    browser = await web.browser("root")
    answer = await imported(browser, text.encode(), 422)
    assert told in words(answer)
    assert fields(answer)["document"] == text, "it can be corrected here"
    assert not confirmed(answer)
    assert [(one.document, one.version) for one in store_of(web).deployments.list()] == [(CLOUD, 1)]


@pytest.mark.covers("F58")
@pytest.mark.parametrize("before", [None, CLOUD], ids=["new", "known"])
async def test_the_second_of_two_who_import_at_once_is_told_of_the_conflict(web: Portal, before: str | None) -> None:
    if before:
        await saved(web, before)
    first, second = await web.browser("root"), await web.browser("root")
    theirs = CLOUD.replace("6.50", "8")
    pages = await asyncio.gather(imported(first, OTHER.encode()), imported(second, theirs.encode()))
    await send(first, pages[0], 200)
    refused = await send(second, pages[1], 409)
    assert f'href="{FORM}?name=cloud"' in refused, "what the other saved is one press away"
    assert fields(refused)["document"] == theirs, "what was imported is kept"
    assert [one.document for one in store_of(web).deployments.list()] == [OTHER]


async def test_export_and_import_are_for_administrators(web: Portal) -> None:
    await saved(web)
    ana, root = await web.browser("ana"), await web.browser("root")
    check(await ana.get(IMPORT), 403)
    check(await ana.get(f"{PREFIX}deployments/cloud/document"), 403)
    form = xsrf(check(await ana.get(PREFIX)))
    check(await ana.post(IMPORT, data=form, files={"file": ("cloud.yaml", OTHER.encode())}), 403)
    foreign = await root.post(IMPORT, files={"file": ("cloud.yaml", OTHER.encode())})
    assert foreign.status_code == 403, "without the token of the page"
    check(await root.get(f"{PREFIX}deployments/none/document"), 404)


@pytest.mark.browser
@pytest.mark.covers("F58")
async def test_a_deployment_is_exported_edited_and_imported_in_the_browser(
    web: Portal, url: str, page: Page, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await saved(web)

    def get() -> str:
        connection.connect(f"{url}{PREFIX.rstrip('/')}", "root")
        try:
            assert cli.main(("autoscaler", "get", "cloud")) == 0
        finally:
            connection.disconnect()
        return capfd.readouterr().out

    printed = await asyncio.to_thread(get)
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await page.goto(f"{url}{PREFIX}deployments/cloud")
    async with page.expect_download() as event:
        await page.get_by_role("link", name="Export").click()
    download = await event.value
    assert download.suggested_filename == "cloud.yaml"
    file = tmp_path / "cloud.yaml"
    await download.save_as(file)
    assert file.read_text() == printed == CLOUD
    file.write_text(OTHER)
    await page.get_by_role("link", name="All deployments").click()
    await page.get_by_role("link", name="Import").click()
    await page.get_by_label("File, as YAML").set_input_files(file)
    await page.get_by_role("button", name="Show what it changes").click()
    await expect(page.get_by_role("alert")).to_contain_text("Nothing is saved yet.")
    await page.get_by_role("button", name="Save now").click()
    await expect(page.locator("#mw-live")).to_have_text("live")
    assert [(one.document, one.version) for one in store_of(web).deployments.list()] == [(OTHER, 2)]


@pytest.mark.browser
@pytest.mark.parametrize("gap", [0, 250])
async def test_a_double_click_does_one_thing(web: Portal, url: str, page: Page, gap: int) -> None:
    """After 250 ms, the button at the same place is that of the next page, which does the opposite."""
    await page.goto(f"{url}{PREFIX}?login_token=root")
    sent: list[str] = []
    page.on("request", lambda asked: sent.append(asked.post_data or "") if asked.method == "POST" else None)

    async def twice(name: str) -> None:
        sent.clear()
        button = page.get_by_role("button", name=name, exact=True)
        await button.scroll_into_view_if_needed()
        box = await button.bounding_box()
        assert box
        await page.mouse.move(box["x"] + 8, box["y"] + 8)
        for count in (1, 2):
            await page.mouse.down(click_count=count)
            await page.mouse.up(click_count=count)
            if count == 1 and gap:
                await page.wait_for_timeout(gap)

    await page.goto(f"{url}{PREFIX}deployment-form")
    await page.locator('[name="f.name"]').fill("cloud")
    await twice("Save")
    await expect(page.get_by_role("button", name="Save now")).to_be_visible()
    assert (len(sent), store_of(web).deployments.list()) == (1, []), "nothing is saved before it was shown"
    await twice("Save now")
    await expect(page.locator("#mw-live")).to_have_text("live")
    assert [one.version for one in store_of(web).deployments.list()] == [1]
    await twice("Pause")
    await expect(page.get_by_role("button", name="Resume")).to_be_visible()
    await page.wait_for_timeout(300)
    assert [one.version for one in store_of(web).deployments.list()] == [2]
    assert len(sent) == 1
    await page.get_by_role("button", name="Resume").click()
    await expect(page.get_by_role("button", name="Pause")).to_be_visible()
    await twice("Delete")
    await expect(page.get_by_role("alert")).to_contain_text("Nothing is deleted yet.")
    await twice("Delete cloud now")
    await page.wait_for_timeout(300)
    assert len(sent) == 1
    assert [one.deleting for one in store_of(web).deployments.list()] == [True]


@pytest.mark.browser
async def test_the_focus_goes_to_a_question_and_back_and_to_what_is_wrong(web: Portal, url: str, page: Page) -> None:
    await saved(web)
    await page.goto(f"{url}{PREFIX}?login_token=root")
    await page.goto(f"{url}{PREFIX}deployments/cloud")
    delete = page.get_by_role("button", name="Delete", exact=True)
    await delete.focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("link", name="Keep it")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(page.get_by_text("Nothing is deleted yet.")).to_have_count(0)
    await expect(delete).to_be_focused()
    assert [one.deleting for one in store_of(web).deployments.list()] == [False]
    await page.goto(f"{url}{FORM}?name=cloud")
    await page.locator('[name="f.hour"]').fill("much")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_be_focused()
    await expect(page.get_by_role("alert")).to_contain_text("Nothing is saved: correct the marked fields.")
    await page.locator('[name="f.hour"]').fill("7")
    await page.get_by_role("button", name="Save", exact=True).click()
    await expect(page.get_by_role("alert")).to_be_focused()
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Save now")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("#mw-live")).to_have_text("live")
    assert [one.version for one in store_of(web).deployments.list()] == [2]
