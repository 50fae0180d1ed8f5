"""Each route answers what the contract says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from web.portal import API, PEOPLE, PREFIX, Portal, portal

ASK: dict[str, Any] = {"name": "train", "profile": "gpu3", "command": ["python", "train.py"]}


async def test_me_names_the_caller_and_their_teams(web: Portal) -> None:
    me = (await web.as_("ana").get(f"{API}/me")).json()
    assert me == {
        "name": "ana",
        "admin": False,
        "teams": ["rnd"],
        "scopes": ["custom:makeway:read", "custom:makeway:submit"],
    }


@pytest.mark.covers("F01")
async def test_pools_and_nodes_have_the_numbers_of_the_inventory(web: Portal) -> None:
    root = web.as_("root")
    (pool,) = (await root.get(f"{API}/pools")).json()
    assert (pool["name"], pool["kind"], pool["total"], pool["free"], pool["virtual"]) == ("gpu", "static", 10, 10, True)
    assert {"cpu", "gpu1", "gpu3"} <= {profile["name"] for profile in (await root.get(f"{API}/profiles")).json()}
    assert [policy["name"] for policy in (await root.get(f"{API}/policies")).json()] == ["rnd", "devops"]
    usage = (await root.get(f"{API}/usage")).json()
    assert (usage["total"], usage["used"], usage["free"], usage["virtual"]) == (10, 0, 10, True)


async def test_a_job_from_submission_to_resume(web: Portal) -> None:
    ana = web.as_("ana")
    dry = await ana.post(f"{API}/jobs", json=ASK | {"dry_run": True})
    assert (dry.status_code, dry.json()["offer"]["code"]) == (200, "ready_now")
    made = await ana.post(f"{API}/jobs", json=ASK)
    assert made.status_code == 201
    id = made.json()["id"]
    await web.run.job(id, "running")

    assert [job["id"] for job in (await ana.get(f"{API}/jobs", params={"mine": "1"})).json()["jobs"]] == [id]
    assert (await ana.get(f"{API}/jobs", params={"state": "starting,running"})).json()["jobs"][0]["id"] == id
    assert (await ana.get(f"{API}/jobs", params={"state": "succeeded"})).json()["jobs"] == []
    events = (await ana.get(f"{API}/jobs/{id}/events")).json()
    assert [event["verb"] for event in events][:2] == ["submit", "start"]
    assert (await ana.get(f"{API}/decisions", params={"workload": id})).json() == events[::-1]

    web.backend.leaves_after = 0.2
    tested = (await ana.post(f"{API}/jobs/{id}/preempt-test")).json()
    assert (tested["state"], tested["notice"]["preempt_test"]) == ("checkpointing", True)
    await web.run.until(lambda: _attempt(web, id, 2), "it came back")
    cancelled = await ana.post(f"{API}/jobs/{id}/cancel")
    assert cancelled.status_code == 200
    await web.run.job(id, "cancelled")
    assert (await ana.post(f"{API}/jobs/{id}/resume")).json()["state"] in ("pending", "starting", "running")
    clones = await ana.post(f"{API}/jobs/{id}/clone", json={"n": 2, "overrides": {"name": "copy", "profile": "gpu1"}})
    assert clones.status_code == 201
    assert [(job["name"], job["clone_of"]) for job in clones.json()] == [("copy", id), ("copy", id)]


async def test_pools_are_the_same_as_models_and_as_text(web: Portal) -> None:
    await web.running_job()
    await web.run.session("ana", "gpu1", "rnd")
    web.backend.nodes["virtual-1"] = replace(web.backend.nodes["virtual-1"], foreign={9: 400}, model='A "quoted" GPU')
    await web.run.converged()
    shown = (await web.as_("root").get(f"{API}/pools")).json()
    assert shown == [pool.model_dump(mode="json") for pool in await web.services.inventory.pools(PEOPLE["root"])]
    (pool,) = shown
    assert [device["free"] for device in pool["nodes"][0]["devices"]].count(0) == 4
    assert pool["nodes"][0]["devices"][9]["free"] == 0.6
    holder = pool["nodes"][0]["devices"][0]["holders"][0]
    assert {"workload", "kind", "team", "owner", "name", "gpus", "over_quota", "state"} == set(holder)


async def _attempt(web: Portal, id: str, number: int) -> bool:
    job = (await web.as_("root").get(f"{API}/jobs/{id}")).json()
    return job["state"] == "running" and job["attempt"] == number


async def test_logs_result_and_error(web: Portal) -> None:
    id = await web.running_job()
    attempt = web.backend.attempts[(id, 1)]
    attempt.log.extend("Zeile eins\nzwei ä\n".encode())
    ana = web.as_("ana")
    chunk = (await ana.get(f"{API}/jobs/{id}/logs")).json()
    assert (chunk["text"], chunk["attempt"], chunk["eof"]) == ("Zeile eins\nzwei ä\n", 1, False)
    rest = (await ana.get(f"{API}/jobs/{id}/logs", params={"offset": -8})).json()
    assert rest["text"].endswith("zwei ä\n")
    assert rest["next_offset"] == chunk["next_offset"]

    for what, code in (("result", "no_result"), ("error", "no_error")):
        nothing = await ana.get(f"{API}/jobs/{id}/{what}")
        assert (nothing.status_code, nothing.json()["code"]) == (404, code)
    attempt.result = b"\x80pickle"
    attempt.error = b'{"type": "ValueError", "message": "no", "traceback": "..."}'
    result = await ana.get(f"{API}/jobs/{id}/result")
    assert (result.content, result.headers["content-type"]) == (b"\x80pickle", "application/octet-stream")
    assert (await ana.get(f"{API}/jobs/{id}/error")).json()["type"] == "ValueError"


async def test_a_session_from_asking_to_release(web: Portal) -> None:
    spawner = web.as_("spawner")
    made = await spawner.post(f"{API}/sessions", json={"user": "ana", "profile": "gpu1", "team": "rnd"})
    assert made.status_code == 201, made.text
    session = made.json()
    seen = await spawner.get(f"{API}/sessions/{session['id']}", params={"wait": 20, "version": session["version"]})
    assert seen.json()["version"] > session["version"]
    session = (await web.run.granted(session["id"])).model_dump(mode="json")
    assert (session["phase"], session["virtual"]) == ("granted", True)
    assert (await spawner.post(f"{API}/sessions/{session['id']}/started")).json()["phase"] == "running"
    assert (await spawner.post(f"{API}/sessions/{session['id']}/renew")).status_code == 200

    assert [s["id"] for s in (await web.as_("ana").get(f"{API}/sessions")).json()] == [session["id"]]
    assert (await web.as_("bo").get(f"{API}/sessions")).json() == []
    assert (await web.as_("bo").get(f"{API}/sessions", params={"all": "1"})).json() == []
    assert len((await web.as_("root").get(f"{API}/sessions", params={"all": "1"})).json()) == 1
    assert (await web.as_("ana").get(f"{API}/sessions/{session['id']}")).status_code == 200
    assert (await web.as_("bo").get(f"{API}/sessions/{session['id']}")).status_code == 404

    for why in ("Its server ended.", "again"):
        gone = await spawner.delete(f"{API}/sessions/{session['id']}", params={"why": why})
        assert gone.status_code == 204
    over = await spawner.post(f"{API}/sessions/{session['id']}/renew")
    assert (over.status_code, over.json()["code"]) == (410, "session_over")
    assert "ana's notebook ended (its server ended)" in over.json()["detail"]


@pytest.mark.covers("N03")
async def test_offers_with_a_ticket_for_the_spawn_page(web: Portal) -> None:
    table = (await web.as_("ana").get(f"{API}/offers", params={"kind": "session"})).json()
    assert (table["user"], table["teams"]) == ("ana", ["rnd"])
    assert {offer["code"] for offer in table["offers"]} == {"ready_now", "refused"}
    live = await web.as_(None).get(f"{API}/offers/live", params={"ticket": table["ticket"]})
    assert (live.status_code, live.json()["user"], live.json()["ticket"]) == (200, "ana", table["ticket"])
    other = await web.as_("spawner").get(f"{API}/offers", params={"user": "bo"})
    assert (other.json()["user"], other.json()["teams"]) == ("bo", ["devops"])


async def test_a_foreign_or_forged_ticket_is_refused(web: Portal) -> None:
    outsider = web.as_(None)
    for ticket in (
        "x",
        "x.y",
        "e30.e30",
        "💥",
        web.app.state.authenticator.signer.sign("cookie", ["root", "session"], 60),
    ):
        answer = await outsider.get(f"{API}/offers/live", params={"ticket": ticket})
        assert (answer.status_code, answer.json()["code"]) == (401, "ticket")
    old = web.app.state.authenticator.signer.sign("offers", ["ana", "session"], -1)
    answer = await outsider.get(f"{API}/offers/live", params={"ticket": old})
    assert "more than 15 minutes ago" in answer.json()["detail"]


async def test_the_policy_document_is_read_checked_and_applied(web: Portal) -> None:
    root = web.as_("root")
    current = (await root.get(f"{API}/policy")).json()
    assert current["version"] == 1
    text = current["document"].replace("limit: 9", "limit: 10")
    check = (await root.post(f"{API}/policy/validate", json={"document": text})).json()
    assert (check["ok"], len(check["changes"])) == (True, 2)
    assert (await root.post(f"{API}/policy/preview", json={"document": text})).json()["starts"] == []
    body = {"document": text, "comment": "more", "base": 1}
    made = await root.put(f"{API}/policy", json=body)
    assert (made.status_code, made.json()["version"], made.json()["author"]) == (200, 2, "root")
    conflict = await root.put(f"{API}/policy", json=body)
    assert (conflict.status_code, conflict.json()["code"]) == (409, "conflict")
    assert [v["version"] for v in (await root.get(f"{API}/policy/history")).json()] == [2, 1]
    assert (await root.get(f"{API}/policy/versions/1")).json()["document"] == current["document"]
    assert (await root.get(f"{API}/policy/versions/9")).status_code == 404

    wrong = current["document"].replace("reserved: 5", "reserved: 500", 1)
    check = (await root.post(f"{API}/policy/validate", json={"document": wrong})).json()
    assert not check["ok"]
    assert check["issues"][0]["line"] > 0
    refused = await root.put(f"{API}/policy", json={"document": wrong})
    assert (refused.status_code, refused.json()["code"]) == (422, "policy_invalid")
    assert (await root.get(f"{API}/policy")).json()["version"] == 2


@pytest.mark.covers("N19")
async def test_probes_need_no_login_and_metrics_below_the_prefix_do(web: Portal) -> None:
    outsider = web.as_(None)
    await web.run.until(lambda: web.run.service.components.world.cycled, "a first cycle")
    for base in ("/", PREFIX):
        assert (await outsider.get(f"{base}healthz")).json()["ok"]
        ready = await outsider.get(f"{base}readyz")
        assert (ready.status_code, ready.json()["checks"]["database"]) == (200, "writes")
    assert "makeway_cycle_seconds" in (await outsider.get("/metrics")).text
    assert (await outsider.get(f"{PREFIX}metrics")).status_code == 401
    assert (await web.as_("ana").get(f"{PREFIX}metrics")).status_code == 403
    assert "makeway_gpus" in (await web.as_("root").get(f"{PREFIX}metrics")).text


async def test_metrics_at_the_root_take_the_token_that_is_set(tmp_path: Path) -> None:
    async with portal(tmp_path, metrics_token="s3cret") as web:
        outsider = web.as_(None)
        for sent in ({}, {"Authorization": "Bearer other"}, {"Authorization": "token s3cret"}):
            refused = await outsider.get("/metrics", headers=sent)
            assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
        result = await outsider.get("/metrics", headers={"Authorization": "Bearer s3cret"})
        assert "makeway_gpus" in result.text


async def test_every_route_says_how_it_refuses(web: Portal) -> None:
    document = (await web.as_(None).get(f"{API}/openapi.json")).json()
    seen = set()
    for path, methods in document["paths"].items():
        assert path.startswith(API), path
        for operation in methods.values():
            seen.add(operation["operationId"])
            for status in ("401", "403", "422", "503"):
                assert list(operation["responses"][status]["content"]) == ["application/problem+json"], operation
    assert len(seen) == sum(len(methods) for methods in document["paths"].values()) >= 30
    assert document["components"]["schemas"]["Problem"]["required"] == ["title", "status", "code", "detail"]
