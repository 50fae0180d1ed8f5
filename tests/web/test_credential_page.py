"""The page of credentials: they are added, rotated and deleted there, and no byte that is served has a value."""

from __future__ import annotations

import html
import json
import re

import httpx2
import pytest
import yaml
from autoscale.fleet import machine
from axe import AXE
from makeway_api.models import PolicyRequest
from makeway_quota.autoscale.step import MachineChanges
from playwright.async_api import Response, expect
from web.portal import EVIL, PEOPLE, PREFIX, Portal, serving
from web.test_deployment_story import administrator
from web.test_deployments import CLOUD, saved, store_of
from web.test_pages import check, words, xsrf

PAGE = f"{PREFIX}credentials"
TOKEN = "hunter2-of-the-git-server"
KEY = "hunter3-of-the-cloud"
CLOUD_KEY = {"name": "cloud", "kind": "cloud", "value": f"access_key_id=AKIA\r\nsecret_access_key={KEY}"}
GIT = {"name": "git-server", "kind": "git", "team": "rnd", "host": "https://git.example.org", "user": "deploy"}


class Secretive:
    """A browser that keeps all bytes that it was served."""

    def __init__(self, browser: httpx2.AsyncClient) -> None:
        self.browser = browser
        self.served = ""

    async def get(self, address: str, status: int = 200) -> str:
        return self._kept(check(await self.browser.get(address), status))

    async def post(self, address: str, status: int = 200, **data: str) -> str:
        sent = xsrf(await self.get(PAGE)) | data
        answer = await self.browser.post(address, data=sent)
        self.served += f"{answer.url} {answer.headers}"
        return self._kept(check(answer, status))

    def _kept(self, text: str) -> str:
        self.served += text
        return text


def stored(web: Portal) -> dict[str, tuple[str, str, str]]:
    return {one.name: (one.kind, one.team, one.updated_by) for one in store_of(web).secrets.list()}


def opened(web: Portal, name: str) -> dict[str, str]:
    """What is kept of a credential, as launchers and providers get it."""
    service, secrets = web.services.credentials, store_of(web).secrets
    found = secrets.opened(service._keys, ("git", "file"), "rnd")
    return next((values for one, values in found if one.name == name), secrets.cloud(service._keys, name) or {})


@pytest.mark.covers("F73", "F76", "F77")
async def test_credentials_are_added_rotated_and_deleted_and_no_served_byte_has_a_value(web: Portal) -> None:
    admin = Secretive(await web.browser("root"))
    assert "There are no credentials." in words(await admin.get(PAGE))
    assert f'href="{PAGE}"' in await admin.get(f"{PREFIX}deployments"), "the page Machines leads there"
    shown = words(await admin.post(PAGE, **GIT, value=f" {TOKEN}\r\n"))
    assert "git-server of R&D is set." in html.unescape(shown)
    assert re.search(r"git-server git jobs of R&D .* by root", html.unescape(shown)), shown
    assert opened(web, "git-server") == {"host": GIT["host"], "user": "deploy", "token": TOKEN}

    form = await admin.get(f"{PAGE}?rotate=git-server&team=rnd")
    assert "Rotate git-server of R&D Server and user are sealed too: enter them again." in html.unescape(words(form))
    again = GIT | {"replaces": "git-server"}
    await admin.post(PAGE, **again, value=f"{TOKEN}-new")
    assert opened(web, "git-server")["token"] == f"{TOKEN}-new"

    missing = await admin.post(f"{PAGE}/git-server/delete", 404)
    assert "There is no credential git-server." in words(missing), "there is none of all teams"
    asked = words(await admin.post(f"{PAGE}/git-server/delete", team="rnd"))
    assert "git-server is for jobs of R&D. Attempts that run keep it; jobs that start or resume later do without." in (
        html.unescape(asked)
    )
    assert "git-server" in stored(web), "the first press deletes nothing that is in use"
    page = await admin.post(f"{PAGE}/git-server/delete", team="rnd")
    token = re.findall(r'name="confirmation" value="([^"]+)"', page)[0]
    gone = words(await admin.post(f"{PAGE}/git-server/delete", team="rnd", confirmation=token))
    assert "git-server of R&D is deleted." in html.unescape(gone)
    assert stored(web) == {}
    log = await admin.get(f"{PREFIX}decisions")
    assert "root set the credential git-server (git) of rnd." in words(log)
    assert TOKEN not in admin.served


async def test_a_credential_of_a_cloud_names_its_deployment_and_goes_at_once_without_one(
    web: Portal,
) -> None:
    admin = Secretive(await web.browser("root"))
    shown = words(await admin.post(PAGE, **CLOUD_KEY))
    assert "cloud cloud no deployment: none is named cloud" in shown
    assert "cloud is deleted." in words(await admin.post(f"{PAGE}/cloud/delete"))
    assert stored(web) == {}
    await admin.post(PAGE, **CLOUD_KEY)
    await saved(web, CLOUD)
    form = words(await admin.get(f"{PAGE}?rotate=cloud"))
    assert "sealed too" not in form, "a credential of a cloud has no server and no user"
    assert "the deployment cloud" in words(await admin.get(PAGE))
    assert "cloud is in use by the deployment cloud." in words(await admin.post(f"{PAGE}/cloud/delete"))
    assert "cloud" in stored(web)
    assert KEY not in admin.served


@pytest.mark.covers("F73")
async def test_the_credential_of_a_deployment_with_machines_is_not_deleted_and_the_page_says_what_to_do(
    web: Portal,
) -> None:
    admin = Secretive(await web.browser("root"))
    await admin.post(PAGE, **CLOUD_KEY)
    await saved(web, CLOUD)
    store = store_of(web)
    term = web.run.service.components.leader.check()
    launched = MachineChanges((machine(term=term),), credential_set_at=store.secrets.cloud_times()["cloud"])
    assert store.machines.commit("cloud", term, launched)
    asks = await admin.post(f"{PAGE}/cloud/delete")
    [token] = re.findall(r'name="confirmation" value="([^"]+)"', asks)
    refused = words(await admin.post(f"{PAGE}/cloud/delete", 409, confirmation=html.unescape(token)))
    assert "The deployment cloud logs in with this credential, and has 1 machine that could not be ended" in refused
    assert "cloud" in stored(web)
    assert KEY not in admin.served


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"name": "Bad Name"}, 422, "at most 63, beginning and ending with a letter or digit."),
        ({"host": "https://git.example.org/path"}, 422, "The server (host) is an address such as"),
        ({"user": ""}, 422, "needs its server and its user."),
        ({"team": "moon"}, 422, "There is no team moon."),
        ({"kind": "cloud", "team": "", "value": TOKEN}, 422, "is lines NAME=VALUE"),
        ({"kind": "cloud", "team": "", "value": f'{{"key": ["{TOKEN}"]}}'}, 422, "is a JSON object of texts"),
        ({"kind": "cloud", "value": f"key={TOKEN}"}, 422, "is of a deployment, not of a team."),
        ({"kind": "file", "value": TOKEN * 10_000}, 422, "more than 65,536 characters."),
        ({"kind": "file", "name": "git-credentials"}, 422, "is the file of credentials of the kind git."),
        ({"name": "there"}, 409, "There is a credential there of R&D already: rotate it in the list"),
        (
            {"name": "there", "replaces": "there", "team": ""},
            409,
            "There is no credential there any more: add it anew.",
        ),
        ({"value": " "}, 422, "There is no value."),
    ],
)
async def test_what_is_wrong_is_said_without_the_value_and_the_rest_stays_typed(
    web: Portal, change: dict[str, str], status: int, message: str
) -> None:
    admin = Secretive(await web.browser("root"))
    await admin.post(PAGE, **(GIT | {"name": "there", "value": "before"}))
    page = await admin.post(PAGE, status, **(GIT | {"value": TOKEN} | change))
    assert message in html.unescape(words(page))
    again = "The value was not kept: enter it again." in words(page)
    assert again == (change.get("value") != " "), "there was one"
    assert html.escape(change.get("name", "git-server")) in page
    assert TOKEN not in admin.served
    assert opened(web, "there")["token"] == "before"
    assert set(stored(web)) == {"there"}


async def test_the_key_of_a_service_account_is_taken_as_google_writes_it(web: Portal) -> None:
    admin = Secretive(await web.browser("root"))
    key = {"type": "service_account", "private_key": f"-----BEGIN\n{KEY}\n"}
    text = json.dumps(key, indent=2).replace("\n", "\r\n")  # as a browser sends lines
    await admin.post(PAGE, name="google", kind="cloud", value=text)
    assert opened(web, "google") == key
    assert KEY not in admin.served


async def test_members_see_their_teams_credentials_and_only_its_leads_change_them(web: Portal) -> None:
    admin, lead, ana = [Secretive(await web.browser(name)) for name in ("root", "lead", "ana")]
    await admin.post(PAGE, **CLOUD_KEY)
    for team, name in (("devops", "git-server"), ("devops", "of-devops"), ("", "of-all")):
        await admin.post(PAGE, **(GIT | {"name": name, "team": team, "value": KEY}))
    assert f'href="{PAGE}"' in await ana.get(f"{PREFIX}teams/rnd"), "the page of a team leads there"
    shown = words(await lead.post(PAGE, **GIT, value=TOKEN))
    assert "git-server of R&D is set." in html.unescape(shown)
    assert "git-server git jobs of R&D" in html.unescape(shown)
    await lead.post(PAGE, **GIT, replaces="git-server", value=f"{TOKEN}-new")
    assert opened(web, "git-server")["token"] == f"{TOKEN}-new"
    form = await lead.get(PAGE)
    assert re.findall(r'<option value="([^"]*)"', form) == ["git", "file", "rnd"], "neither cloud nor all teams"
    assert "Leads of a team and administrators set them." in (read := await ana.get(PAGE))
    assert "git-server git jobs of R&D" in html.unescape(words(read))
    assert "<form" not in read.partition("<main")[2]

    for browser, team in ((lead, "devops"), (lead, ""), (ana, "rnd"), (ana, "devops")):
        await browser.post(PAGE, 403, **(GIT | {"name": "new", "team": team, "value": TOKEN}))
        await browser.post(f"{PAGE}/git-server/delete", 403, team=team)
    for browser in (lead, ana):
        assert not re.search("of-devops|of-all|cloud", browser.served.replace("mw-cloud", ""))
        assert "DevOps" not in browser.served
        assert TOKEN not in browser.served
        assert KEY not in browser.served
    kept = {(one.name, one.team) for one in store_of(web).secrets.list()}
    others = {("git-server", "devops"), ("of-devops", "devops"), ("of-all", ""), ("cloud", "")}
    assert kept == {("git-server", "rnd"), *others}
    page = await lead.post(f"{PAGE}/git-server/delete", team="rnd")
    token = re.findall(r'name="confirmation" value="([^"]+)"', page)[0]
    await lead.post(f"{PAGE}/git-server/delete", team="rnd", confirmation=token)
    assert {(one.name, one.team) for one in store_of(web).secrets.list()} == others


async def test_credentials_of_a_removed_team_are_shown_as_disabled_and_enabled_by_administrators(web: Portal) -> None:
    admin, lead, root = Secretive(await web.browser("root")), Secretive(await web.browser("lead")), PEOPLE["root"]
    await admin.post(PAGE, **GIT, value=TOKEN)
    whole = yaml.safe_load((await web.services.policies.current(root)).document or "")
    for profile in whole["profiles"]:
        profile.pop("policies", None)
    without = {**whole, "policies": [team for team in whole["policies"] if team["name"] != "rnd"]}
    checked = await admin.post(f"{PREFIX}policy", document=yaml.safe_dump(without), action="preview")
    assert "not in this document, which disables its credential git-server." in words(checked)
    await web.services.policies.apply(root, PolicyRequest(document=yaml.safe_dump(without)))
    page = await admin.get(PAGE)
    assert "git-server git no job: disabled, as the team rnd left the policy" in words(page)
    assert "Enable" not in words(page)
    assert "Rotate" not in words(page)
    refused = await admin.post(f"{PAGE}/git-server/enable", 409, team="rnd")
    assert "There is no team rnd: add it to the policy first." in words(refused)
    await web.services.policies.apply(root, PolicyRequest(document=yaml.safe_dump(whole)))
    assert opened(web, "git-server") == {}
    assert "git-server git no job: disabled, as it was set for an earlier team" in words(await lead.get(PAGE))
    assert "Enable" not in words(await lead.get(PAGE))
    await lead.post(f"{PAGE}/git-server/enable", 403, team="rnd")
    assert "Enable git-server of R&D" in html.unescape(await admin.get(PAGE))
    shown = words(await admin.post(f"{PAGE}/git-server/enable", team="rnd"))
    assert "git-server of R&D is enabled." in html.unescape(shown)
    assert opened(web, "git-server")["token"] == TOKEN
    await web.services.policies.apply(root, PolicyRequest(document=yaml.safe_dump(without)))
    assert "git-server of rnd is deleted." in words(await admin.post(f"{PAGE}/git-server/delete", team="rnd"))
    assert stored(web) == {}
    assert TOKEN not in admin.served + lead.served


async def test_names_that_look_like_markup_stay_text(web: Portal) -> None:
    admin = Secretive(await web.browser("root"))
    page = await admin.post(PAGE, 422, **(GIT | {"name": EVIL, "host": EVIL, "user": EVIL, "value": TOKEN}))
    assert EVIL not in page


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.covers("F73")
async def test_an_administrator_keeps_credentials_in_the_browser(web: Portal) -> None:
    await saved(web, CLOUD)
    async with serving(web.app) as address, administrator(f"{address}{PREFIX}") as page:
        served: list[str] = []

        async def keep(answer: Response) -> None:
            if answer.request.resource_type == "document" and answer.status == 200:
                served.append(await answer.text())

        page.on("response", keep)
        await page.goto(f"{address}{PREFIX}deployments")
        await page.get_by_role("link", name="Credentials").click()
        await page.get_by_label("Name").fill("cloud")
        await page.get_by_label("Kind").select_option("cloud")
        await page.get_by_label("Value").fill(f"access_key_id=AKIA\nsecret_access_key={KEY}")
        assert await page.get_by_label("Value").evaluate("e => getComputedStyle(e).webkitTextSecurity") == "disc"
        await page.get_by_role("button", name="Set").click()
        await expect(page.get_by_role("status").first).to_have_text("cloud is set.")
        assert opened(web, "cloud")["secret_access_key"] == KEY
        other = await page.context.browser.new_page()  # axe-core applies styles, which the page's policy reports
        await other.goto(f"{address}{PREFIX}credentials?login_token=root")
        await other.evaluate(AXE.read_text(encoding="utf-8"))
        result = await other.evaluate("() => axe.run(document.querySelector('main') ?? document)")
        assert [found["id"] for found in result["violations"]] == []
        await other.close()
        await page.get_by_role("link", name="Rotate cloud").click()
        await page.get_by_label("Value").fill(f"access_key_id=AKIA\nsecret_access_key={KEY}-2")
        await page.get_by_role("button", name="Replace its value").click()
        await expect(page.get_by_role("status").first).to_have_text("cloud is set.")
        assert opened(web, "cloud")["secret_access_key"] == f"{KEY}-2"
        await page.get_by_role("button", name="Delete cloud").click()
        await expect(page.get_by_role("alert")).to_contain_text("cloud is in use by the deployment cloud.")
        await page.get_by_role("button", name="Delete cloud now").click()
        await expect(page.get_by_text("There are no credentials.")).to_be_visible()
        assert stored(web) == {}
        assert served
        assert KEY not in "".join(served)
        assert KEY not in await page.content()
