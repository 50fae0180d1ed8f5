"""Deployments of machines through the API: documents in the version that was read, machines, outputs, log, rights."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from autoscale.fleet import machine
from makeway_quota import metrics
from makeway_quota.autoscale.backoff import LaunchBackoff
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.services import Caller
from makeway_quota.store.store import Store
from web.portal import API, PEOPLE, PREFIX, Portal
from web.test_pages import applied, check, words, xsrf

AT = f"{API}/deployments"
CLOUD = """\
# Machines for the nights
version: 1
name: cloud  # also their tag
provider: local
hour: 6.50
machine_types:
  # the cheap one first
  - {name: gpu-2, pool: gpu, instance: big-2, gpus: 2, price: 3.10, max_machines: 2}
"""


PRICES = """\
name: prices
provider: local
machine_types:
  - {name: spare, pool: gpu, instance: big-8, gpus: 8, price: 8.08, spot_price: 0.7, market: spot_first}
  - {name: cheap, pool: gpu, instance: spot-2, gpus: 2, spot_price: 1, market: spot}
  - {name: gift, pool: gpu, instance: big-2, gpus: 2}
  - {name: cpu, pool: gpu, instance: small, price: 0.20}
  - {name: hidden, pool: gpu, instance: big-2, gpus: 2, cpu_only: true, price: 3}
"""


async def saved(web: Portal, text: str = CLOUD, version: int | None = 0) -> dict[str, Any]:
    answer = await web.as_("root").put(AT, json={"document": text, "version": version})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def store_of(web: Portal) -> Store:
    return web.services.context.store


def launch(web: Portal, *ids: str, revision: int, **more: Any) -> None:
    """Commit machines as the leader does."""
    rows = tuple(machine(id=id, deployment="cloud", **more) for id in ids)
    term = web.run.service.components.leader.term or 0
    assert store_of(web).machines.commit("cloud", term, MachineChanges(rows, revision=revision))


@pytest.mark.covers("F58")
async def test_a_deployment_is_saved_and_read_back_as_it_is(web: Portal) -> None:
    root = web.as_("root")
    assert (await root.get(AT)).json() == []
    made = await saved(web)
    assert (made["version"], made["updated_by"], made["document"]) == (1, "root", CLOUD)
    [listed] = (await root.get(AT)).json()
    assert (listed["name"], listed["document"], listed["machines"]) == ("cloud", None, {})
    assert listed["spend"] == {
        **{"currency": "EUR", "hour": 0.0, "max_hour": 6.5, "month": 0.0, "max_month": None},
        "unpriced": 0,
    }
    assert (
        listed["message"]
        == "Nothing is launched: this service has no backend for machines. Add machines to MAKEWAY_BACKEND "
        "(in the chart: clusterAutoscaler.enabled)."
    )
    assert (await root.get(f"{AT}/cloud")).json() == made
    again = await saved(web, version=made["version"])
    assert again == made, "the same document makes no new version"


async def test_another_change_meanwhile_is_a_conflict_with_what_is_there_now(web: Portal) -> None:
    root = web.as_("root")
    await saved(web)
    cheaper = CLOUD.replace("6.50", "5")
    await saved(web, cheaper, version=1)
    for version in (0, 1, 7):
        answer = await root.put(AT, json={"document": CLOUD.replace("6.50", "9"), "version": version})
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (409, "conflict")
        assert problem["numbers"] == {"current": 2, "document": cheaper}
    assert "saved by root" in problem["detail"]
    assert (await root.post(f"{AT}/cloud/pause", params={"version": 1})).status_code == 409
    assert (await root.post(f"{AT}/cloud/resume", params={"version": 1})).status_code == 409
    assert (await root.delete(f"{AT}/cloud", params={"version": 1})).status_code == 409
    assert (await root.get(f"{AT}/cloud")).json()["document"] == cheaper
    replaced = await saved(web, CLOUD, version=None)
    assert (replaced["version"], replaced["document"]) == (3, CLOUD)


async def test_a_type_whose_pool_is_not_autoscaled_is_told_before_it_is_saved_and_in_the_state(
    web: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no mistake: the machines that are kept idle are launched, and the policy may follow."""
    monkeypatch.setattr(web.services.deployments, "_launches_machines", True)
    root = web.as_("root")
    [warning] = (await root.post(f"{AT}/validate", json={"document": CLOUD})).json()["warnings"]
    assert (warning["line"], warning["where"]) == (8, "machine_types[0].pool")
    assert warning["message"] == (
        "the pool gpu is not of kind autoscaled, so no machine is launched for work that waits there; "
        "name one that is, or give it kind: autoscaled"
    )
    told = (
        "No machine is launched for work that waits for the pool gpu: give it kind: autoscaled in the policy, "
        "or name another pool."
    )
    assert (await saved(web))["message"] == told
    browser = await web.browser("root")
    form = xsrf(check(await browser.get(f"{PREFIX}deployment-form?name=cloud")))
    shown = await browser.post(f"{PREFIX}deployment-form", data=form | {"document": CLOUD, "action": "validate"})
    assert warning["message"] in words(check(shown))

    document = (await web.services.policies.current(PEOPLE["root"])).document or ""
    document = document.replace("\npools:\n", "\npools:\n  - {name: grows, kind: autoscaled}\n", 1)
    policy = xsrf(check(await browser.get(f"{PREFIX}policy")))
    await applied(browser, policy | {"base": "1", "document": document, "comment": ""})
    second = "  - {name: second, pool: grows, instance: big-2, gpus: 2, price: 3.10}\n"
    assert (await saved(web, CLOUD + second, 1))["message"] == f"Launches machines when work waits for them. {told}"
    growing = CLOUD.replace("pool: gpu", "pool: grows")
    assert (await root.post(f"{AT}/validate", json={"document": growing})).json()["warnings"] == []
    assert (await saved(web, growing, 2))["message"] == "Launches machines when work waits for them."


async def test_every_mistake_of_a_document_is_told_with_its_line(web: Portal) -> None:
    root = web.as_("root")
    wrong = CLOUD.replace("6.50", "-1").replace("pool: gpu", "pool: gpuu").replace("provider: local", "provider: moon")
    answer = await root.put(AT, json={"document": wrong, "version": 0})
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "deployment_invalid")
    assert [error["line"] for error in problem["errors"]] == [4, 5, 8]
    check = (await root.post(f"{AT}/validate", json={"document": wrong})).json()
    assert (check["ok"], check["issues"]) == (False, problem["errors"])
    secret = f"{CLOUD}settings: {{secret_key: hidden-in-vain}}\n"
    refused = await root.put(AT, json={"document": secret, "version": 0})
    assert refused.status_code == 422
    assert "hidden-in-vain" not in refused.text, "what was sent as a secret is not repeated"
    assert (await root.get(AT)).json() == []


@pytest.mark.covers("F58")
async def test_a_pause_keeps_the_comments_and_is_undone(web: Portal) -> None:
    root = web.as_("root")
    await saved(web)
    paused = (await root.post(f"{AT}/cloud/pause")).json()
    assert (paused["paused"], paused["version"]) == (True, 2)
    assert paused["document"] == CLOUD.replace("their tag\n", "their tag\npaused: true\n")
    assert paused["message"] == "Paused: nothing is launched."
    assert (await root.post(f"{AT}/cloud/pause")).json() == paused, "a second pause changes nothing"
    resumed = (await root.post(f"{AT}/cloud/resume", params={"version": 2})).json()
    assert resumed["document"] == CLOUD.replace("their tag\n", "their tag\npaused: false\n")
    assert (await root.post(f"{AT}/nothing/pause")).status_code == 404


@pytest.mark.covers("F59")
async def test_a_duplicate_is_a_document_under_a_free_name(web: Portal) -> None:
    root = web.as_("root")
    await saved(web)
    draft = (await root.get(f"{AT}/cloud/duplicate")).json()
    assert draft == {"name": "cloud-2", "document": CLOUD.replace("name: cloud ", "name: cloud-2 ")}
    assert [one["name"] for one in (await root.get(AT)).json()] == ["cloud"]
    await saved(web, draft["document"])
    assert (await root.get(f"{AT}/cloud/duplicate")).json()["name"] == "cloud-3"
    assert (await root.get(f"{AT}/cloud-2/duplicate")).json()["name"] == "cloud-3"


async def test_a_deletion_ends_the_machines_first_and_says_so(web: Portal) -> None:
    root = web.as_("root")
    await saved(web)
    launch(web, "m-1", "m-2", revision=1)
    marked = (await root.delete(f"{AT}/cloud")).json()
    assert (marked["deleting"], marked["message"]) == (True, "Being deleted: 2 machines end first.")
    again = (await root.delete(f"{AT}/cloud", params={"version": 1})).json()
    assert (again["version"], again["deleting"], again["message"]) == (2, True, marked["message"])
    refused = await root.put(AT, json={"document": CLOUD, "version": None})
    assert refused.status_code == 409
    assert "is being deleted" in refused.json()["detail"]
    assert (await root.get(AT)).json()[0]["deleting"]
    assert (await root.delete(f"{AT}/nothing")).status_code == 404


@pytest.mark.covers("F72")
async def test_machines_are_counted_by_state_with_their_price(web: Portal) -> None:
    root = web.as_("root")
    await saved(web)
    launch(web, "m-1", "m-2", revision=1, price=3_100_000, requested_at=web.services.context.clock())
    launch(web, "m-3", revision=1, price=None, state="booting")
    [listed] = (await root.get(AT)).json()
    assert listed["machines"] == {"requested": 2, "booting": 1}
    assert (listed["spend"]["hour"], listed["spend"]["unpriced"]) == (6.2, 1)


@pytest.mark.covers("F72")
async def test_a_gpu_hour_costs_its_share_a_spot_machine_its_maximum_and_what_is_unknown_is_no_number(
    web: Portal,
) -> None:
    root = web.as_("root")
    made = await saved(web, PRICES)
    assert [tuple(one.values()) for one in made["prices"]] == [
        ("spare", "gpu", "spot", 8, 0.7, 0.0875),
        ("spare", "gpu", "on_demand", 8, 8.08, 1.01),
        ("cheap", "gpu", "spot", 2, 1.0, 0.5),
        ("gift", "gpu", "on_demand", 2, None, None),
        ("cpu", "gpu", "on_demand", 0, 0.2, None),
        ("hidden", "gpu", "on_demand", 0, 3.0, None),
    ]
    [listed] = (await root.get(AT)).json()
    assert listed["prices"] == made["prices"]


@pytest.mark.covers("F65")
async def test_a_machine_is_shown_with_its_history_and_outputs(web: Portal) -> None:
    root = web.as_("root")
    await saved(web)
    launch(web, "m-1", revision=1, price=3_100_000, state="terminating", reason="init_failed")
    log = store_of(web).machine_log
    assert log.write_output("m-1", "init", "installing\nno space left\n", 3, 50.0)
    assert log.write_output("m-1", "console", "booted\n", None, 60.0)
    shown = (await root.get(f"{AT}/cloud/machines/m-1")).json()
    assert (shown["state"], shown["message"], shown["price"]) == ("terminating", "Its init script failed.", 3.1)
    assert [(one["kind"], one["exit_code"], one["text"]) for one in shown["outputs"]] == [
        ("console", None, "booted\n"),
        ("init", 3, "installing\nno space left\n"),
    ]
    assert [(event["state"], event["message"]) for event in shown["events"]] == [
        ("terminating", "Its init script failed.")
    ]
    assert (await root.get(f"{AT}/other/machines/m-1")).status_code == 404, "of another deployment"
    assert (await root.get(f"{AT}/cloud/machines/m-9")).status_code == 404


async def test_machines_and_log_are_read_page_by_page(web: Portal) -> None:
    root = web.as_("root")
    await saved(web)
    for n in range(5):
        launch(web, f"m-{n}", revision=1, requested_at=100.0 + n // 2)
    seen, cursor = [], None
    while True:
        params: dict[str, Any] = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = (await root.get(f"{AT}/cloud/machines", params=params)).json()
        seen += [one["id"] for one in page["machines"]]
        if (cursor := page["next"]) is None:
            break
    assert seen == ["m-4", "m-3", "m-2", "m-1", "m-0"]
    assert (await root.get(f"{AT}/cloud/machines", params={"state": "gone"})).json() == {"machines": [], "next": None}
    assert (await root.get(f"{AT}/cloud/machines", params={"cursor": "odd"})).status_code == 422
    whole = (await root.get(f"{AT}/cloud/log")).json()
    assert [line["machine"] for line in whole] == ["m-4", "m-3", "m-2", "m-1", "m-0", ""]
    assert whole[-1]["message"] == "version 1, by root"
    first = (await root.get(f"{AT}/cloud/log", params={"limit": 4})).json()
    rest = (await root.get(f"{AT}/cloud/log", params={"limit": 4, "before": first[-1]["id"]})).json()
    assert first + rest == whole
    assert (await root.get(f"{AT}/nothing/log")).status_code == 404
    assert (await root.get(f"{AT}/nothing/machines")).status_code == 404


async def test_every_change_is_a_line_of_the_decision_log(web: Portal) -> None:
    root = web.as_("root")
    await saved(web)
    await saved(web, CLOUD.replace("6.50", "5").replace("max_machines: 2", "max_machines: 3"), version=1)
    await root.post(f"{AT}/cloud/pause")
    await root.delete(f"{AT}/cloud")
    lines = [line for line in (await root.get(f"{API}/decisions")).json() if line["verb"] == "deployment"]
    assert [line["message"] for line in reversed(lines)] == [
        "root saved version 1 of the deployment cloud: The deployment cloud is new.",
        "root saved version 2 of the deployment cloud: hour: 6.5 → 5. gpu-2, max_machines: 2 → 3.",
        "root saved version 3 of the deployment cloud: paused: false → true.",
        "root deletes the deployment cloud: its machines are ended first.",
    ]
    assert lines[0]["numbers"] == {"deployment": "cloud", "version": 4}
    for other in ("ana", "lead"):
        seen = (await web.as_(other).get(f"{API}/decisions")).json()
        assert not [line for line in seen if line["verb"] == "deployment"], other


async def test_only_administrators_reach_deployments(web: Portal) -> None:
    await saved(web)
    launch(web, "m-1", revision=1)
    before = store_of(web).deployments.list()
    body = {"document": CLOUD.replace("6.50", "1"), "version": 1}
    requests = [
        ("GET", ""),
        ("GET", "/cloud"),
        ("PUT", ""),
        ("DELETE", "/cloud"),
        ("POST", "/validate"),
        ("POST", "/cloud/pause"),
        ("POST", "/cloud/resume"),
        ("GET", "/cloud/duplicate"),
        ("GET", "/cloud/machines"),
        ("GET", "/cloud/machines/m-1"),
        ("GET", "/cloud/log"),
    ]
    for person, status in (("ana", 403), ("lead", 403), ("spawner", 403), (None, 401)):
        client = web.as_(person)
        for method, path in requests:
            sent = {"json": body} if (method, path) in (("PUT", ""), ("POST", "/validate")) else {}
            answer = await client.request(method, AT + path, **sent)
            assert answer.status_code == status, (person, method, path)
    assert store_of(web).deployments.list() == before


async def test_a_deployment_does_not_move_to_another_place_where_its_machines_would_be_forgotten(web: Portal) -> None:
    root = web.as_("root")
    await saved(web)
    moved = CLOUD.replace("provider: local", "provider: memory")
    check = (await root.post(f"{AT}/validate", json={"document": moved})).json()
    answer = await root.put(AT, json={"document": moved, "version": 1})
    assert (answer.status_code, answer.json()["code"]) == (422, "deployment_invalid")
    assert (check["ok"], check["issues"]) == (False, answer.json()["errors"])
    assert "are at local, and would be forgotten there" in check["issues"][0]["message"]
    assert (await root.get(f"{AT}/cloud")).json()["document"] == CLOUD


async def test_a_document_of_a_later_release_is_shown_and_can_be_corrected(web: Portal) -> None:
    root = web.as_("root")
    later = CLOUD.replace("provider: local", "provider: moon")
    store_of(web).deployments.save("cloud", later, 0, "root", 1.0)
    [listed] = (await root.get(AT)).json()
    assert listed["problem"].startswith("deployment.yaml:4: provider: ")
    assert listed["message"] == "Its document cannot be read, so nothing is launched: correct it."
    assert listed["spend"] is None
    assert (await root.get(f"{AT}/cloud")).json()["document"] == later
    for answer in (await root.post(f"{AT}/cloud/pause"), await root.get(f"{AT}/cloud/duplicate")):
        assert (answer.status_code, answer.json()["code"]) == (422, "deployment_invalid")
    assert (await saved(web, version=1))["problem"] == ""


@pytest.mark.covers("N19", "F72")
async def test_machines_and_their_money_are_metrics(web: Portal) -> None:
    async def numbers() -> list[str]:
        text = (await web.as_("root").get(f"{PREFIX}metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("makeway_machine")]
        counted = ("makeway_machine_boot", "makeway_machine_failures")  # of all tests of this process
        return [line for line in lines if 'deployment="cloud' in line and not line.startswith(counted)]

    await saved(web)
    launch(web, "m-1", "m-2", revision=1, state="ready", type="gpu-2", price=3_100_000)
    launch(web, "m-3", revision=1, state="terminating", type="gpu-2", price=None)
    store, term = store_of(web), web.run.service.components.leader.term or 0
    now = web.services.context.clock()
    backoffs = (
        LaunchBackoff("gpu-2", "a", "on_demand", "stock_out", 1, now - 1, now + 300),
        LaunchBackoff("gpu-2", "b", "on_demand", "quota", 1, now - 400, now - 100),
    )
    assert store.machines.commit("cloud", term, MachineChanges(backoffs=backoffs))
    assert store.deployments.save("damaged", "provider: moon", 0, "root", 1.0)
    result = await numbers()
    for line in (
        'makeway_machines{deployment="cloud",state="ready",type="gpu-2"} 2.0',
        'makeway_machines{deployment="cloud",state="terminating",type="gpu-2"} 1.0',
        'makeway_machines_overdue{deployment="cloud"} 1.0',
        'makeway_machine_types_held{deployment="cloud",failure="stock_out",type="gpu-2"} 1.0',
        'makeway_machine_spend{currency="EUR",deployment="cloud",period="hour"} 6.2',
        'makeway_machine_budget{currency="EUR",deployment="cloud",period="hour"} 6.5',
    ):
        assert line in result, result
    assert not [line for line in result if 'failure="quota"' in line], "it is over"
    assert not [line for line in result if "makeway_machine_budget" in line and 'period="month"' in line]
    stored = store.deployments.read("cloud")
    assert stored is not None
    store.deployments.delete("cloud", stored.version, "root", now)
    rows = {row.id: row for row in store.machines.live()}
    gone = tuple(replace(row, state="gone", state_since=now) for row in rows.values())
    assert store.machines.commit("cloud", term, MachineChanges(changed=gone))
    assert store.deployments.close("cloud", term, now)
    assert await numbers() == [], "what is gone is no series"


async def test_further_deployments_are_one_series_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_deployments", set())
    monkeypatch.setattr(metrics, "MAX_DEPLOYMENTS", 2)
    result = [metrics.DeploymentNumbers(f"d{n}", None, (machine(id=f"m-{n}", deployment=f"d{n}"),)) for n in range(5)]
    metrics.show_deployments(result, 0.0)
    text = metrics.render().decode()
    assert 'makeway_machines{deployment="d1",state="requested",type="g2"} 1.0' in text
    assert 'makeway_machines{deployment="other",state="requested",type="g2"} 3.0' in text
    assert 'deployment="d2"' not in text
    metrics.show_deployments([], 0.0)


async def test_all_open_pages_share_one_reading_of_what_has_changed(
    web: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, readings = store_of(web).machine_log, list[object]()
    read = log.mark

    def counted() -> object:
        readings.append(read())
        return readings[-1]

    monkeypatch.setattr(log, "mark", counted)
    root = Caller("root", admin=True)
    marks = await asyncio.gather(*(web.services.machines.mark(root) for _ in range(50)))
    assert len(readings) == 1
    assert set(marks) == {readings[0]}
