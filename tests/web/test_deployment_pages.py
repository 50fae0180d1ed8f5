"""The pages of deployments: a list, one with its four panels, a machine, the form; for administrators."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
from makeway_quota.autoscale.document import DeploymentTable, TypeTable, read_deployment, schema
from makeway_quota.autoscale.provider import Denied, Throttled
from makeway_quota.wording.machines import readable
from web.portal import API, EVIL, PREFIX, Portal
from web.test_deployments import CLOUD, PRICES, launch, saved, store_of
from web.test_pages import check, words, xsrf

FORM = f"{PREFIX}deployment-form"
WHOLE = """\
version: 1
name: whole
title: '{evil}'
provider: local
settings: {{region: eu-1, "odd key": "1", yes: "no"}}
currency: USD
hour: 6.505
month: 1000
max_machines: 7
paused: true
timezone: Europe/Berlin
drain_timeout: 5m
orphan_after: 20m
poll_interval: 20
request_timeout: 100
lost_after: 90
visibility: 200
priority: 3
moves: {{every: 2h, headroom: 4, most: 1}}
machine_types:
  - name: gpu-2
    pool: gpu
    instance: "12"
    gpus: 2
    cpu: 1.5
    memory: 60Gi
    model: H100
    image: example.org/train:1
    idle_timeout: 5m
    spin_up_timeout: 900
    init_script: |
      echo one
      echo two
    zones: [eu-1a, "1"]
    market: spot_first
    price: 3.10
    spot_price: 1
    min_idle: 1
    max_machines: 3
    schedule:
      - {{machines: 2, days: [mon, tue], start: "08:30", end: "24:00"}}
      - {{machines: 1, start: 22:00, end: 06:00}}
    max_age: 1d
    cpu_only: false
  - {{name: cpu, pool: gpu, instance: small, price: 1}}
"""


def typed(text: str) -> str:
    """The document in the form."""
    return html.unescape(re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", text, re.DOTALL)[0])


def confirmed(text: str) -> dict[str, str]:
    return dict(re.findall(r'name="(confirmation)" value="([^"]+)"', text))


def fields(text: str) -> dict[str, str]:
    """What a browser would send of the form: hidden and typed values, without buttons."""
    sent = {
        name: html.unescape(value) for name, value in re.findall(r'<input[^>]*?name="([^"]+)"\s+value="([^"]*)"', text)
    }
    sent |= {
        name: html.unescape(value)
        for name, value in re.findall(r'<textarea[^>]*?name="([^"]+)"[^>]*>\n(.*?)</textarea>', text, re.DOTALL)
    }
    for name, options in re.findall(r'<select[^>]*?name="([^"]+)"[^>]*>(.*?)</select>', text, re.DOTALL):
        sent[name] = next(iter(re.findall(r'value="([^"]*)" selected', options)), "")
    return sent


@pytest.mark.covers("F55", "F59")
async def test_a_deployment_is_created_edited_and_duplicated_in_the_form(web: Portal) -> None:
    browser = await web.browser("root")
    assert "There are no deployments of machines." in words(check(await browser.get(f"{PREFIX}deployments")))
    empty = check(await browser.get(FORM))
    sent = xsrf(empty) | {"document": CLOUD, "version": "0", "action": "save"}
    first = check(await browser.post(FORM, data=sent))
    assert "Nothing is saved yet." in words(first)
    assert "The deployment cloud is new." in words(first)
    assert typed(first) == CLOUD
    assert store_of(web).deployments.list() == [], "the first press shows what the document changes"
    shown = check(await browser.post(FORM, data=sent | confirmed(first)))
    assert "this service has no backend for machines. Add machines to MAKEWAY_BACKEND (in the chart:" in words(shown)
    edited = fields(check(await browser.get(f"{FORM}?name=cloud")))
    assert edited["version"] == "1"
    assert (edited["f.name"], edited["f.machine_types.0.price"]) == ("cloud", "3.10")
    copied = fields(check(await browser.get(f"{FORM}?copy=cloud")))
    assert (copied["f.name"], copied["version"], copied["f.hour"]) == ("cloud-2", "0", "6.50")
    stale = check(await browser.post(FORM, data=sent | confirmed(first)), 409)
    assert "was edited, but it has version 1" in words(stale)
    assert f'href="{FORM}?name=cloud"' in stale, "what was saved meanwhile is one press away"
    assert typed(stale) == CLOUD, "what was typed is kept"


@pytest.mark.covers("F57")
async def test_every_field_of_the_document_has_help_and_its_default_in_the_form(web: Portal) -> None:
    browser = await web.browser("root")
    sent = fields(check(await browser.get(FORM)))
    page = check(await browser.post(FORM, data=sent | {"action": "add:machine_types.0.schedule"}))
    prefixes = {"document": "", "machine_types": "machine_types.0.", "schedule": "machine_types.0.schedule.0."}
    rest = {("document", "version"), ("document", "machine_types"), ("machine_types", "schedule")}
    for table, lines in schema().items():
        for key, default, help in lines if table in prefixes else ():
            name = prefixes[table] + key
            if (table, key) in rest:
                continue
            told = html.escape(help.replace("`", ""), quote=False)
            assert f'aria-describedby="h-{name}"' in page, name
            described = html.unescape(
                page.partition(f'<span id="h-{name}" class="visually-hidden">')[2].partition("</span>")[0]
            )
            assert described.startswith(html.unescape(told)), name
            assert default in ("required", "none") or f"Default: {default}" in described, name
            assert (
                f'data-tip="{html.escape(html.unescape(told))}"'.replace("&#x27;", "&#39;").replace("&quot;", "&#34;")
                in page
            ), name
    assert "`" not in page
    assert "1440" not in page
    assert "24:00" in page
    assert 'value="memory"' not in page, "a provider for tests alone"


async def test_what_is_wrong_is_shown_beside_its_field_and_nothing_is_lost(web: Portal) -> None:
    browser = await web.browser("root")
    sent = fields(check(await browser.get(FORM))) | {"action": "save"}
    wrong = sent | {
        "f.hour": "3,50",
        "f.machine_types.0.zones": "a, a",
        "f.machine_types.0.pool": "moon",
        "f.title": EVIL,
    }
    page = check(await browser.post(FORM, data=wrong), 422)
    for name, message in (
        ("hour", "amount of money"),
        ("machine_types.0.zones", "a zone is listed twice"),
        ("machine_types.0.pool", "there is no pool"),
    ):
        error = page.partition(f'<div id="e-{name}" class="invalid-feedback">')[2].partition("</div>")[0]
        assert message in html.unescape(error), name
        assert f'aria-describedby="h-{name} e-{name}" aria-invalid="true"' in page
    assert "correct the marked fields" in words(page)
    kept = fields(page)
    assert {name: kept[name] for name in wrong if name.startswith("f.")} == {
        name: value for name, value in wrong.items() if name.startswith("f.")
    }
    assert store_of(web).deployments.list() == []
    empty = {name: "" if name.startswith("f.") else value for name, value in sent.items()}
    page = check(await browser.post(FORM, data=empty), 422)
    assert "the name is missing" in html.unescape(page.partition('<div id="e-name"')[2].partition("</div>")[0])


async def test_a_key_that_was_typed_twice_is_refused_and_kept(web: Portal) -> None:
    browser = await web.browser("root")
    twice = "region: eu-1\nregion: eu-2"
    sent = fields(check(await browser.get(FORM))) | {"action": "save", "f.settings": twice}
    page = check(await browser.post(FORM, data=sent), 422)
    assert 'the key "region" comes twice' in html.unescape(words(page))
    assert fields(page)["f.settings"] == twice


async def test_the_marks_of_wrong_fields_stay_when_a_machine_type_is_added_or_removed(web: Portal) -> None:
    browser = await web.browser("root")
    sent = fields(check(await browser.get(FORM)))
    more = check(await browser.post(FORM, data=sent | {"f.hour": "3,50", "action": "add:machine_types"}))
    assert "invalid-feedback" not in more, "nothing was checked yet"
    wrong = check(await browser.post(FORM, data=sent | {"f.hour": "3,50", "action": "validate"}), 422)
    more = check(await browser.post(FORM, data=fields(wrong) | {"action": "add:machine_types"}))
    assert re.findall(r'id="e-([^"]+)" class="invalid-feedback"', more) == ["hour"], "the new type is not marked yet"
    assert "f.machine_types.1.name" in fields(more)
    less = check(await browser.post(FORM, data=fields(more) | {"action": "remove:machine_types.1"}))
    assert re.findall(r'id="e-([^"]+)" class="invalid-feedback"', less) == ["hour"]
    mended = fields(less) | {"f.hour": "3.50", "action": "add:machine_types"}
    assert "invalid-feedback" not in check(await browser.post(FORM, data=mended))


@pytest.mark.covers("F58", "F57")
async def test_fields_and_documents_are_the_same_both_ways(web: Portal) -> None:
    browser, root = await web.browser("root"), web.as_("root")

    async def press(action: str, sent: dict[str, str], status: int = 200) -> str:
        return check(await browser.post(FORM, data=sent | {"action": action}), status)

    async def save(sent: dict[str, str]) -> None:
        asked = await press("save", sent)
        await press("save", fields(asked) | confirmed(asked))

    whole = WHOLE.format(evil=EVIL.replace("'", "''"))
    left_out = {field for field in DeploymentTable.known() if not re.search(rf"^{field}:", whole, re.MULTILINE)}
    left_out |= {field for field in TypeTable.known() if not re.search(rf"^  [- ] {field}:", whole, re.MULTILINE)}
    clouds = {"accelerator", "disk", "machine_image", "security_groups", "subnets"}
    assert left_out == clouds, "the document has every field but those that only machines of a cloud have"
    await saved(web, whole)
    sent = fields(check(await browser.get(f"{FORM}?name=whole")))
    await save(
        sent
        | {"f.title": "Machines, of all kinds: # 1", "f.machine_types.1.init_script": "echo a\r\n\r\necho 'b' # c\r\n"}
    )
    text = (await root.get(f"{API}/deployments/whole")).json()["document"]
    old, new = read_deployment(whole), read_deployment(text)
    assert new.title == "Machines, of all kinds: # 1"
    assert new.types[1].init_script == "echo a\n\necho 'b' # c\n"
    changed = replace(new, title=old.title, types=(new.types[0], replace(new.types[1], init_script="")))
    assert changed == old
    again = fields(check(await browser.get(f"{FORM}?name=whole")))
    asked = await press("save", again)
    assert "Nothing." in words(asked)
    await press("save", fields(asked) | confirmed(asked))
    assert (await root.get(f"{API}/deployments/whole")).json()["version"] == 2, "the same document is no new version"
    as_yaml = await press("yaml", again)
    assert typed(as_yaml) == text
    back = await press("fields", fields(as_yaml))
    assert {k: v for k, v in fields(back).items() if k.startswith("f.")} == {
        k: v for k, v in again.items() if k.startswith("f.")
    }


async def test_comments_are_kept_until_a_field_is_changed(web: Portal) -> None:
    await saved(web)
    browser = await web.browser("root")
    page = check(await browser.get(f"{FORM}?name=cloud"))
    assert "This document has comments." in words(page)
    asked = check(await browser.post(FORM, data=fields(page) | {"action": "yaml"}))
    assert typed(asked) == CLOUD
    other = check(await browser.post(FORM, data=fields(page) | {"action": "yaml", "f.hour": "7"}))
    assert "#" not in typed(other)
    assert "hour: 7" in typed(other)


async def test_machine_types_are_added_and_removed(web: Portal) -> None:
    browser = await web.browser("root")
    sent = fields(check(await browser.get(FORM)))
    two = fields(check(await browser.post(FORM, data=sent | {"action": "add:machine_types"})))
    assert two["f.machine_types.1.name"] == ""
    two["f.machine_types.1.name"] = "second"
    one = fields(check(await browser.post(FORM, data=two | {"action": "remove:machine_types.0"})))
    assert [one[name] for name in one if name.endswith(".name") and "types" in name] == ["second"]
    page = check(await browser.post(FORM, data=one | {"action": "validate"}), 422)
    assert "pool is missing" in html.unescape(
        page.partition('<div id="e-machine_types.1.pool"')[2].partition("</div>")[0]
    )
    for action in ("add:nothing", "remove:", "remove:machine_types.0.name", "format"):
        check(await browser.post(FORM, data=one | {"action": action}), 422)


async def test_a_document_that_fields_cannot_show_is_edited_as_yaml(web: Portal) -> None:
    browser = await web.browser("root")
    form = fields(check(await browser.get(FORM))) | {"mode": "yaml", "action": "fields"}
    for text in (
        "name: [a]",
        "a: b",
        "name: x\nmachine_types: 3",
        "- 1",
        "",
        "hour: {a: b}",
        "machine_types: [{zones: ['a,b']}]",
    ):
        page = check(await browser.post(FORM, data=form | {"document": text}))
        assert "The form has no fields for all of this document" in words(page), text
        assert typed(page) == text


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
    for part in (
        "Idle machines 1",
        "Running machines 1",
        "Jobs and notebooks per queue 1 waiting",
        "Log",
        "1 without a known price",
    ):
        assert part in words(whole), part
    assert whole.index("m-idle") < whole.index('id="h-running"') < whole.index("m-busy")
    assert "patient" in words(check(await browser.get(f"{PREFIX}live/deployments/cloud")))
    form = xsrf(whole)
    paused = words(check(await browser.post(f"{PREFIX}deployments/cloud", data=form | {"action": "pause"})))
    assert "Paused: nothing is launched, and 2 machines are being ended." in paused
    resumed = words(check(await browser.post(f"{PREFIX}deployments/cloud", data=form | {"action": "resume"})))
    assert "this service has no backend for machines" in resumed
    question = check(await browser.post(f"{PREFIX}deployments/cloud", data=form | {"action": "delete"}))
    assert "Delete the deployment cloud? That ends its 2 machines after a notice" in words(question)
    assert not store_of(web).deployments.read("cloud").deleting, "the first press asks"
    sent = form | {"action": "delete"} | confirmed(question)
    deleted = words(check(await browser.post(f"{PREFIX}deployments/cloud", data=sent)))
    assert "Being deleted: 2 machines end first." in deleted
    assert "Pause" not in deleted
    assert "being deleted" in words(
        check(await browser.post(f"{PREFIX}deployments/cloud", data=form | {"action": "pause"}), 409)
    )


@pytest.mark.covers("F72")
async def test_the_cost_of_a_gpu_hour_and_the_spend_beside_the_budget_are_on_the_list_and_the_page(
    web: Portal,
) -> None:
    await saved(web)
    await saved(web, PRICES)
    launch(web, "m-1", revision=1, state="ready", price=3_100_000, requested_at=web.services.context.clock())
    browser = await web.browser("root")
    cloud, prices = [
        words(row) for row in check(await browser.get(f"{PREFIX}deployments")).split("<tr>") if "href=" in row
    ][-2:]
    assert re.search(r"3\.10 of 6\.50 EUR 0\.\d\d EUR 1\.55 EUR", cloud), cloud
    assert "0.0875 to 1.01 EUR, others not known" in prices
    page = words(check(await browser.get(f"{PREFIX}deployments/cloud")))
    assert re.search(r"3\.10 of 6\.50 EUR an hour · 0\.\d\d EUR this month", page), page
    assert "gpu-2, on demand, 2 GPUs 3.10 EUR an hour, 1.55 EUR a GPU-hour" in page
    text = check(await browser.get(f"{PREFIX}deployments/cloud"))
    assert "1.55\N{NO-BREAK SPACE}EUR a GPU-hour" in text, "an amount stays on one line with its currency"
    assert not re.search(r"\d EUR", text)
    page = words(check(await browser.get(f"{PREFIX}deployments/prices")))
    for line in (
        "spare, spot, 8 GPUs at most 0.70 EUR an hour, 0.0875 EUR a GPU-hour",
        "spare, on demand, 8 GPUs 8.08 EUR an hour, 1.01 EUR a GPU-hour",
        "gift, on demand, 2 GPUs price not known",
        "cpu, on demand 0.20 EUR an hour, no GPUs",
    ):
        assert line in page, line


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


async def test_the_console_of_a_machine_is_read_by_a_button_and_shown_as_text(web: Portal) -> None:
    await saved(web)
    launch(web, "m-1", revision=1, state="booting", instance="i-1")
    launch(web, "m-2", revision=1, state="requested", instance="")
    at, answers = f"{PREFIX}deployments/cloud/machines/", list[str | Exception]()
    root, ana = await web.browser("root"), await web.browser("ana")
    first = check(await root.get(f"{at}m-1"))
    assert "Read the console" in first
    assert "Read the console" not in check(await root.get(f"{at}m-2"))

    async def read(deployment: str, instance: str) -> str:
        assert (deployment, instance) == ("cloud", "i-1")
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def press(status: int, machine: str = "m-1") -> str:
        answer = await root.post(f"{at}{machine}", data=xsrf(first))
        return words(check(answer, status)) if status != 303 else words(check(await root.get(f"{at}{machine}")))

    assert "This service has no backend for machines: it asks no provider." in await press(409)
    web.services.machines.read_consoles_with(read)
    assert "m-2 has no instance at the provider yet." in await press(409, "m-2")
    coloured = f"\x1b[31m{EVIL}\x1b[0m\r\nok\a"
    answers += ["", Denied("the credentials are refused"), Throttled(), OSError("x"), coloured]
    assert "The provider has no output of the console of m-1 now." in await press(404)
    assert "The console of m-1 cannot be read: the credentials are refused." in await press(503)
    assert "The console of m-1 cannot be read: The provider takes no more calls for now." in await press(503)
    assert "The console of m-1 cannot be read: OSError; the service's log says more." in await press(503)
    assert f"{EVIL} ok\\x07" in await press(303)
    check(await ana.post(f"{at}m-1", data=xsrf(check(await ana.get(PREFIX)))), 403)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;a title\x07\x1b[1;31mred\x1b[0m", "red"),
        ("10 %\r20 %\r\r\nend", "10 %\n20 %\nend"),
        ("a\tb\u202ec\u200b\x1b\x00", "a\tb\\u202ec\\u200b\\x1b\\x00"),
        ("äöü ✓ 日本", "äöü ✓ 日本"),
        ("pass\u00adword \u180e\U000e0041", "pass\\xadword \\u180e\\U000e0041"),
    ],
)
def test_what_cannot_be_seen_in_a_console_is_shown_as_its_number(text: str, shown: str) -> None:
    assert readable(text) == shown


async def test_the_middle_that_is_left_out_of_a_long_output_is_told(web: Portal) -> None:
    await saved(web)
    launch(web, "m-1", revision=1, state="booting")
    store_of(web).machine_log.write_output("m-1", "console", "a" * 40_000 + "b" * 40_000, None, 50.0)
    shown = check(await (await web.browser("root")).get(f"{PREFIX}deployments/cloud/machines/m-1"))
    assert "aaa\n… (14,464 characters are left out)\nbbb" in shown


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
    [result] = store_of(web).deployments.list()
    assert (result.version, result.deleting) == (1, False)
