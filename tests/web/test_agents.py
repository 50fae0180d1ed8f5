"""Agents of machines: one token opens one machine, and nothing else opens it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from machine_agents import BOOT, add, change, join_token, ready, requested
from makeway_quota.backends.machines.backend import MachinesBackend
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.backends.routing.backend import RoutingBackend
from makeway_quota.control.machines import channel as machine_channel
from makeway_quota.control.machines.tokens import MachineTokens
from makeway_quota.control.workers.tokens import RENEWAL_SECONDS, TOKEN_SECONDS
from running import running
from web.portal import PEOPLE, PREFIX, Portal

POLICY = """
version: 1
pools:
  - {name: here, nodes: {local: {gpus: all}}}
  - {name: cloud, nodes: {labels: {kind: cloud}}}
profiles: [{name: gpu1, gpus: 1, pools: [cloud], policies: [[rnd]]}]
policies: [{name: rnd, groups: [rnd], quotas: [{pools: [cloud], reserved: 4}]}]
"""
HELD, PROMPT = 25, 15
AGENTS = f"{PREFIX}api/v1/agents"


class Fleet:
    """The web of a service with machines, and its agents as raw HTTP."""

    def __init__(self, web: Portal) -> None:
        self.web = web
        self.service = web.run.service

    @property
    def channel(self) -> machine_channel.MachineChannel:
        result = self.service.components.machines
        assert result is not None
        return result

    async def post(self, path: str, token: str, **body: Any) -> httpx2.Response:
        return await self.as_(token).post(f"{AGENTS}/{path}", json=body)

    async def get(self, path: str, token: str, **params: Any) -> httpx2.Response:
        return await self.as_(token).get(f"{AGENTS}/{path}", params=params)

    def as_(self, token: str) -> httpx2.AsyncClient:
        return self.web.as_(None, headers={"Authorization": f"Bearer {token}"})

    async def join(self, name: str, boot: str = BOOT, token: str = "", **facts: Any) -> httpx2.Response:
        body = {"machine": name, "boot": boot, "gpus": 2, **facts}
        return await self.post("join", token or join_token(self.service, name), **body)

    async def node(self, name: str = "m-1") -> str:
        """Add a machine that is ready, as a node; return the token of its agent."""
        add(self.service, requested(name))
        token: str = (await self.join(name)).json()["token"]
        ready(self.service, name)
        world = self.service.components.world
        await self.web.run.until(
            lambda: any(node.name == name for node in world.observation.nodes), f"{name} is a node"
        )
        return token

    async def placed(self) -> str:
        """Place a job on a machine; return its id."""
        job = await self.web.run.submit("ana", "train", profile="gpu1")
        await self.web.run.job(job.id, "starting")
        return job.id


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    backend = RoutingBackend([MemoryBackend(), MachinesBackend()])
    settings = {"MAKEWAY_BACKEND": "local,machines", "MAKEWAY_TICKET_SECRET": "s" * 32, "MAKEWAY_TICK_SECONDS": "0.2"}
    async with running(tmp_path, POLICY, backend=backend, people=PEOPLE, **settings) as run:
        web = Portal(run, backend.parts[0].backend)  # type: ignore[arg-type]
        try:
            yield Fleet(web)
            assert run.service.components.world.failure is None
        finally:
            await web.close()


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def worker(job: str, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {"job": job, "attempt": attempt, "worker": 0, "state": "running", "exit_code": None, **fields}


async def test_a_machine_joins_once_and_gets_what_its_document_says(fleet: Fleet) -> None:
    add(fleet.service, requested("m-1", init_script="echo hello", image="site/base", cpu_only=True, orphan_after=60))
    answer = await fleet.join("m-1")
    joined = answer.json()
    assert joined.pop("token")
    assert joined == {
        "report_seconds": 10.0,
        "init_script": "echo hello",
        "cpu_only": True,
        "image": "site/base",
        "orphan_after": 60.0,
        "lost_after": 120.0,
        "checkpoints": None,
    }
    assert (await fleet.join("m-1")).status_code == 200, "the answer may have been lost"
    assert code(await fleet.join("m-1", boot="another-boot")) == (409, "other_boot")
    ready(fleet.service, "m-1")
    assert code(await fleet.join("m-1")) == (409, "joined"), "a job of the machine may know the token by now"
    assert code(await fleet.join("m-1", boot="another-boot")) == (409, "other_boot")
    change(fleet.service, "m-1", state="terminating")
    assert code(await fleet.join("m-1")) == (410, "machine_over")
    assert code(await fleet.join("m-9")) == (410, "machine_over")


async def test_a_token_opens_its_own_machine_and_nothing_else(fleet: Fleet) -> None:
    mine, other = await fleet.node("m-1"), await fleet.node("m-2")
    job = await fleet.placed()
    channel = fleet.service.components.channel
    path, of_worker = channel.credentials(job, 1, 0)
    assert code(await fleet.join("m-1", token=join_token(fleet.service, "m-2"))) == (401, "unauthorized")
    for wrong in (other, of_worker, join_token(fleet.service, "m-1"), "root", "spawner", "", mine[:-1], "\u00e9"):
        try:
            opened = [
                await fleet.post("m-1/report", wrong, boot=BOOT),
                await fleet.get("m-1/orders", wrong),
                await fleet.join("m-1", token=wrong or "none") if wrong != join_token(fleet.service, "m-1") else None,
            ]
        except UnicodeEncodeError:
            continue
        assert [one.status_code for one in opened if one is not None] == [401] * sum(one is not None for one in opened)
    for name in ("root", "spawner", "ana"):
        person = fleet.web.as_(name)
        assert (await person.get(f"{AGENTS}/m-1/orders")).status_code == 401
        assert (await person.post(f"{AGENTS}/m-1/report", json={"boot": BOOT})).status_code == 401
    browser = await fleet.web.browser("root")
    assert (await browser.get(f"{AGENTS}/m-1/orders")).status_code == 401
    for at in (f"{PREFIX}{path}/orders", f"{PREFIX}api/v1/jobs", f"{PREFIX}api/v1/usage"):
        assert (await fleet.as_(mine).get(at)).status_code in (401, 403), at
    assert (await fleet.as_(mine).post(f"{PREFIX}{path}/claim", json={"instance": "launcher-1"})).status_code == 401


async def test_a_workers_token_is_given_to_its_machine_alone_and_while_it_lives(fleet: Fleet) -> None:
    tokens = {name: await fleet.node(name) for name in ("m-1", "m-2")}
    job = await fleet.placed()
    answers = {name: (await fleet.get(f"{name}/orders", token)).json() for name, token in tokens.items()}
    [(name, order)] = [(name, attempt) for name, answer in answers.items() for attempt in answer["attempts"]]
    [place] = fleet.service.components.store.workload(job).placement  # type: ignore[union-attr]
    assert (place.node, place.backend) == (name, "machines")
    assert (order["job"], order["attempt"], order["worker"], order["devices"]) == (job, 1, 0, [0])
    path = order["url"].partition("/services/makeway/")[2]
    claim = await fleet.as_(order["token"]).post(f"{PREFIX}{path}/claim", json={"instance": "launcher-1"})
    assert claim.status_code == 200
    assert claim.json()["lost_after"] == 120.0, "it ends before its machine's work is started elsewhere"
    await fleet.web.run.client("ana").cancel(job)
    after = (await fleet.get(f"{name}/orders", tokens[name])).json()
    assert after["attempts"] == []
    assert after["revision"] != answers[name]["revision"]


async def test_a_held_request_is_answered_as_soon_as_something_is_placed_there(fleet: Fleet) -> None:
    token = await fleet.node()
    known = (await fleet.get("m-1/orders", token)).json()
    assert (known["attempts"], known["drain"], known["stop"]) == ([], False, False)
    held = asyncio.create_task(fleet.get("m-1/orders", token, known=known["revision"], wait=HELD))
    await asyncio.sleep(0)
    job = await fleet.placed()
    async with asyncio.timeout(PROMPT):
        started = (await held).json()
    assert [one["job"] for one in started["attempts"]] == [job]
    again = (await fleet.get("m-1/orders", token)).json()
    assert again["revision"] == started["revision"], "tokens are new with each answer, and no change"
    held = asyncio.create_task(fleet.get("m-1/orders", token, known=started["revision"], wait=HELD))
    await asyncio.sleep(0)
    change(fleet.service, "m-1", state="draining", drain="pause")
    async with asyncio.timeout(PROMPT):
        assert (await held).json()["drain"] is True
    held = asyncio.create_task(fleet.get("m-1/orders", token, known="x", wait=HELD))
    change(fleet.service, "m-1", state="terminating")
    async with asyncio.timeout(PROMPT):
        assert (await held).status_code in (200, 410)
    await fleet.web.run.until(lambda: fleet.channel.known("m-1").state == "terminating", "it is read")  # type: ignore[union-attr]
    assert code(await fleet.get("m-1/orders", token)) == (410, "machine_over")


async def test_reports_of_a_machine_are_kept_as_they_change(fleet: Fleet) -> None:
    token = await fleet.node()
    init = {"exit_code": 3, "output": "no driver"}
    assert (await fleet.post("m-1/report", token, boot=BOOT, gpus=2, init=init)).json()["token"] is None
    store = fleet.service.components.store
    report = store.machine_reports.of("m-1")
    assert report is not None
    assert (report.facts["init_exit_code"], report.facts["gpus"]) == (3, 2)
    [output] = store.machine_log.outputs("m-1")
    assert (output.kind, output.exit_code, output.text) == ("init", 3, "no driver")
    await fleet.channel.refresh()
    await fleet.post("m-1/report", token, boot=BOOT, gpus=2, init=init)
    assert store.machine_reports.of("m-1") == report, "an unchanged one writes nothing"
    await fleet.post("m-1/report", token, boot=BOOT, gpus=2, init=init, attempts=[worker("j-1")])
    changed = store.machine_reports.of("m-1")
    assert changed is not None
    assert changed.serial > report.serial
    assert code(await fleet.post("m-1/report", token, boot="another-boot")) == (409, "other_boot")
    change(fleet.service, "m-1", state="terminating")
    change(fleet.service, "m-1", state="gone")
    await fleet.web.run.until(lambda: fleet.channel.known("m-1") is None, "its row is read")
    assert code(await fleet.post("m-1/report", token, boot=BOOT)) == (410, "machine_over")


async def test_what_nothing_expects_holds_its_gpu_until_its_agent_has_ended_it(fleet: Fleet) -> None:
    token = await fleet.node()
    await fleet.post("m-1/report", token, boot=BOOT, gpus=2, attempts=[worker("j-unknown", devices=[1])])
    world = fleet.service.components.world

    def terminating() -> list[Any]:
        return [held for node in world.observation.nodes if node.name == "m-1" for held in node.terminating]

    [held] = await fleet.web.run.until(terminating, "its GPU counts as held")
    assert (held.workload, held.devices) == ("j-unknown", (1,))
    assert (await fleet.get("m-1/orders", token)).json()["attempts"] == []
    await fleet.post("m-1/report", token, boot=BOOT, gpus=2)
    await fleet.web.run.until(lambda: not terminating(), "it is free")


@pytest.mark.parametrize(
    "odd",
    [
        {"gpus": -1},
        {"boot": "x"},
        {"attempts": [worker("../etc")]},
        {"attempts": [worker("j", attempt=0)]},
        {"attempts": [worker("j", state="sleeps")]},
        {"attempts": [worker("j")] * 5000},
        {"init": {"exit_code": 10**9, "output": ""}},
        {"spot_deadline": 1e300},
        {"model": "x" * 300_000},
    ],
)
async def test_an_odd_report_is_refused_and_changes_nothing(fleet: Fleet, odd: dict[str, Any]) -> None:
    token = await fleet.node()
    before = fleet.service.components.store.machine_reports.of("m-1")
    answer = await fleet.post("m-1/report", token, **{"boot": BOOT, "gpus": 2, **odd})
    assert answer.status_code in (413, 422)
    assert fleet.service.components.store.machine_reports.of("m-1") == before


@pytest.mark.parametrize(
    "facts", [{}, {"gpus": "many"}, {"gpus": 2**70, "attempts": 7}, {"attempts": [None, [], {"job": 3}, {"job": "j"}]}]
)
async def test_an_odd_row_of_one_machine_keeps_nothing_from_the_others(fleet: Fleet, facts: dict[str, Any]) -> None:
    await fleet.node("m-1")
    assert fleet.service.components.store.machine_reports.report("m-1", BOOT, facts, time.time()) is not None
    await fleet.node("m-2")
    assert {name: seen.gpus for name, seen in fleet.channel.machines().items()} == {"m-1": 2, "m-2": 2}


async def test_without_the_backend_there_are_no_machines(web: Portal) -> None:
    tokens = MachineTokens(b"s" * 32)
    for token in (tokens.join_token("m-1"), "root"):
        agent = web.as_(None, headers={"Authorization": f"Bearer {token}"})
        assert (await agent.post(f"{AGENTS}/join", json={"machine": "m-1", "boot": BOOT})).status_code == 404
        assert (await agent.get(f"{AGENTS}/m-1/orders")).status_code == 404


def test_join_tokens_are_the_same_each_time_and_of_one_machine_each() -> None:
    tokens, again, other = MachineTokens(b"s" * 32), MachineTokens(b"s" * 32), MachineTokens(b"t" * 32)
    token = tokens.join_token("m-1.a")
    assert again.join_token("m-1.a") == token
    assert tokens.joining(token) == "m-1.a"
    for wrong in (other.join_token("m-1.a"), token.replace("m-1", "m-2"), token + "x", "m-1.a.", "", ".", "\ud800.x"):
        assert tokens.joining(wrong) == ""
    assert tokens.check(token, "m-1.a").validity == "void"
    with pytest.raises(ValueError, match="at least 16 bytes"):
        MachineTokens(b"short")


def test_a_token_of_a_machine_ages_and_names_its_boot() -> None:
    now = [1000.0]
    tokens = MachineTokens(b"s" * 32, lambda: now[0])
    token = tokens.token("m-1", BOOT)
    checks = []
    for age in (0, TOKEN_SECONDS / 2 + 1, TOKEN_SECONDS + 1, RENEWAL_SECONDS + 1):
        now[0] = 1000.0 + age
        checks.append(tokens.check(token, "m-1"))
    assert [one.validity for one in checks] == ["valid", "old", "expired", "void"]
    assert {one.boot for one in checks[:3]} == {BOOT}
    now[0] = 1000.0
    assert tokens.check(token, "m-2").validity == "void"
    assert tokens.joining(token) == ""


async def test_an_expired_token_is_renewed_by_a_report_alone(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.node()
    tokens = MachineTokens(b"s" * 32, lambda: time.time() - TOKEN_SECONDS - 60)
    old = tokens.token("m-1", BOOT)
    assert code(await fleet.get("m-1/orders", old)) == (401, "token_expired")
    renewed = (await fleet.post("m-1/report", old, boot=BOOT, gpus=2)).json()["token"]
    assert (await fleet.get("m-1/orders", renewed)).status_code == 200
