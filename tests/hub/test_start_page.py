"""The Hub's pages and API in front of a real quota service: offers and refusals."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hub.portal import SERVICE, Portal, until
from makeway_spawner.home import home_of, prepare

pytestmark = pytest.mark.e2e


@pytest.mark.covers("N01")
def test_a_user_of_two_teams_chooses_and_a_user_of_none_gets_cpu_and_the_reason(portal: Portal) -> None:
    lea = portal.browser("lea").get("/hub/spawn").text
    assert 'value="rnd/gpu1"' in lea
    assert 'value="devops/gpu1"' in lea
    guest = portal.browser("guest").get("/hub/spawn").text
    assert re.findall(r'type="radio"[^>]*value="([^"]*)"', guest) == ["/cpu"]
    assert "You are in no team that has GPUs" in guest


@pytest.mark.covers("N02")
@pytest.mark.parametrize(
    ("form", "status", "words"),
    [
        ({"choice": "devops/gpu1"}, 403, "ana is not a member of the team devops"),
        ({"choice": "rnd/gpu99"}, 403, "The profile gpu99 is not available to ana"),
        ({"choice": "rnd/<script>"}, 400, "is not the name of a profile"),
        ({}, 400, "No profile was chosen"),
        ({"profile": "gpu8", "team": "rnd"}, 409, "5 guaranteed"),
    ],
)
def test_a_posted_form_that_is_not_allowed_is_refused_with_a_sentence(
    portal: Portal, form: dict[str, str], status: int, words: str
) -> None:
    answer = portal.pick(portal.browser("ana"), **form)
    assert answer.status_code == status
    shown = re.search(r'class="spawn-error-msg[^>]*>(.*?)</div>', answer.text, re.S)
    assert shown
    assert words in shown[1]
    assert "<script>" not in shown[1]
    assert not portal.server("ana")


@pytest.mark.covers("N02")
@pytest.mark.parametrize("options", [{"profile": "gpu1", "team": "devops"}, {"profile": "nope"}, {"image": "evil"}])
def test_options_of_the_api_that_are_not_allowed_are_refused_with_a_sentence(
    portal: Portal, options: dict[str, str]
) -> None:
    """The Hub answers after a second at most; a start that is refused later than that says so in its progress."""
    answer = portal.start_server("ana", wait=False, **options)
    if answer.is_success:
        told = portal.events_of_start("ana")[-1]
        assert told.get("failed"), told
        message = told["message"].removeprefix("Spawn failed: ")
    else:
        assert answer.status_code in (400, 403, 404)
        message = answer.json()["message"]
    assert len(message) > 20
    until(lambda: not portal.server("ana"), "nothing is left of it")
    assert not [s for s in portal.live_sessions() if s.user == "ana"]


@pytest.mark.covers("N02")
def test_a_link_marks_a_profile_and_starts_nothing(portal: Portal) -> None:
    ana = portal.browser("ana")
    page = ana.get("/hub/spawn", params={"profile": "gpu2"})
    assert re.findall(r'type="radio"[^>]*value="([^"]*)"\s+checked', page.text) == ["rnd/gpu2"]
    page = ana.get("/hub/spawn", params={"profile": "secret", "team": "finance"})
    assert page.status_code == 200
    assert "which is not available to ana" in page.text
    assert not portal.server("ana")


@pytest.mark.covers("N04", "N06")
def test_a_notebook_gets_its_gpus_and_nothing_of_the_hubs_secrets(portal: Portal) -> None:
    bo = portal.browser("bo")
    answer = portal.pick(bo, choice="devops/gpu2")
    assert answer.status_code == 200
    until(lambda: (portal.server("bo") or {}).get("ready"), "bo's server is ready")
    session = next(s for s in portal.live_sessions() if s.user == "bo")
    until(lambda: [s for s in portal.live_sessions() if s.id == session.id and s.phase == "running"], "it counts as up")
    pid = portal.hub("GET", "/users/bo?include_stopped_servers=0").json()["servers"][""]["state"]["pid"]
    env = dict(
        line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0") if "=" in line
    )
    devices = [str(d) for worker in session.placement for d in worker.devices]
    assert env["CUDA_VISIBLE_DEVICES"].split(",") == devices
    assert len(devices) == 2
    assert env["MAKEWAY_TEAM"] == "devops"
    assert env["MAKEWAY_URL"] == portal.url + SERVICE
    secrets = [file.read_text().strip() for file in portal.state.secrets.iterdir()]
    assert not [name for name, value in env.items() if value in secrets]
    with portal.client(env["JUPYTERHUB_API_TOKEN"]) as notebook:
        me = notebook.me()
    assert me.name == "bo"
    assert not any(scope.endswith(("admin", "reserve")) for scope in me.scopes)
    portal.hub("DELETE", "/users/bo/server")
    until(lambda: not [s for s in portal.live_sessions() if s.user == "bo"], "bo's lease is given back")
    page = bo.get("/hub/spawn").text
    assert re.findall(r'type="radio"[^>]*value="([^"]*)"\s+checked', page) == ["devops/gpu2"]


def test_secrets_are_for_their_owner_only(portal: Portal) -> None:
    assert portal.state.secrets.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in portal.state.secrets.iterdir()} == {0o600}
    for name in ("jupyterhub.sqlite", "makeway.sqlite"):
        assert (portal.state.root / name).stat().st_mode & 0o077 == 0


def test_the_pages_link_to_the_panel_and_load_nothing_from_outside(portal: Portal) -> None:
    page = portal.browser("ana").get("/hub/spawn").text
    assert f'href="{SERVICE}/"' in page
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)


def test_live_offers_need_a_ticket_and_no_cookie(portal: Portal) -> None:
    import httpx2

    page = portal.browser("ana").get("/hub/spawn").text
    live = re.search(r'data-live="([^"]+)"', page)
    assert live
    answer = httpx2.get(portal.url + live[1].replace("&amp;", "&"))
    assert answer.status_code == 200
    assert json.loads(answer.text)["user"] == "ana"
    assert httpx2.get(portal.url + SERVICE + "/api/v1/offers/live", params={"ticket": "x"}).status_code in (401, 403)


@pytest.mark.covers("N05")
def test_a_server_that_dies_of_its_users_configuration_says_so_at_once(portal: Portal) -> None:
    home = home_of(portal.state.homes, "ana")
    prepare(home)
    faulty = home / ".jupyter" / "jupyter_server_config.py"
    faulty.parent.mkdir(parents=True, exist_ok=True)
    faulty.write_text("import sys\nsys.exit('broken by ana')\n")
    try:
        began = time.monotonic()
        session = portal.browser("ana")
        portal.pick(session, choice="rnd/gpu1")
        until(lambda: not portal.server("ana"), "the start has failed")
        assert time.monotonic() - began < 60, "the Hub itself would ask for two minutes"
        until(lambda: not [s for s in portal.live_sessions() if s.user == "ana"], "the GPU is free")
        page = session.get("/hub/user/ana/").text + session.get("/hub/spawn-pending/ana").text
        assert "with exit code 1" in page
        assert "broken by ana" in page
    finally:
        faulty.unlink()
