"""A Hub that hangs, refuses, pages or stops slowly: no decision waits for it, and no GPU is given out twice."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest
from hub_fake import FakeHub, fake_hub
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.hub.client import HubApi, HubUnreachable
from makeway_quota.control.hub.leases import Leases
from makeway_quota.control.hub.servers import HubServers
from makeway_quota.store.records import Workload
from running import SAMPLE, Running, running

NODE = NodeStatus("local", "", tuple(range(10)), virtual=True)
SHORT_GRACE = SAMPLE.read_text(encoding="utf-8").replace("    gpus: 8\n", "    gpus: 8\n    grace: 1\n")


def api(hub: FakeHub, timeout: float = 5.0) -> HubApi:
    return HubApi(hub.url, "secret", timeout=timeout)


@pytest.mark.parametrize("paged", [True, False])
async def test_all_pages_of_the_hubs_list_are_read(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not paged:
        monkeypatch.setattr("makeway_quota.control.hub.client.PAGINATION", "application/json")
    async with fake_hub(page_limit=25) as hub:
        for number in range(60):
            hub.start(f"user-{number:02d}", "gpu" if number % 2 else "")
        client = api(hub)
        result = await client.active_servers()
        await client.close()
    assert result == {(f"user-{number:02d}", "gpu" if number % 2 else "") for number in range(60)}


@pytest.mark.parametrize("answer", [[], ["ana"], "ana", {"servers": 5}, {"items": [{"servers": {"": {}}}]}, 7])
async def test_an_answer_of_another_form_is_a_hub_that_cannot_be_reached(answer: object) -> None:
    async with fake_hub() as hub:
        hub.result = lambda method, target, paged: (200, answer)  # type: ignore[method-assign]
        client = api(hub)
        if answer != []:  # an empty list of users is a valid one
            with pytest.raises(HubUnreachable):
                await client.active_servers()
        with pytest.raises(HubUnreachable):
            await client.user("ana")
        if not (isinstance(answer, dict) and "items" in answer):
            with pytest.raises(HubUnreachable):
                await client.servers_of("ana")
        await client.close()


@pytest.mark.parametrize(
    "head",
    ["200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnone", "302 Found\r\nLocation: http://[\r\n\r\n"],
)
async def test_a_broken_response_is_a_hub_that_cannot_be_reached(head: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {head}".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = HubApi(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hub/api", "secret")
    for request in (client.user("ana"), client.servers_of("ana"), client.active_servers()):
        with pytest.raises(HubUnreachable):
            await request
    await client.close()
    server.close()


def test_a_follower_forgets_renewals_that_are_older_than_a_lease() -> None:
    now = 0.0
    leases = Leases(30.0, clock=lambda: now)
    leases.renew("s-1")
    now = 20.0
    leases.renew("s-2")
    assert leases.unwritten() == {"s-1", "s-2"}
    now = 40.0
    assert leases.unwritten() == set()
    assert set(leases._renewed) == {"s-2"}


async def test_a_request_ends_in_time_however_slowly_the_hub_answers() -> None:
    async with fake_hub() as hub:
        hub.hangs = True
        client = api(hub, timeout=0.2)
        for request in (client.active_servers(), client.servers_of("ana"), client.stop_server("ana", "")):
            with pytest.raises(HubUnreachable, match=r"no answer within 0\.2 s"):
                await request
        await client.close()


async def held(run: Running, hub: FakeHub, **ask: object) -> Workload:
    """A preemptible session whose server runs, on 8 of the 10 GPUs."""
    session = await run.granted((await run.session("ana", "gpu8", "rnd", preemptible=True, **ask)).id)
    assert session.phase == "granted"
    hub.start("ana")
    hub.add("bo", "devops")
    await run.client("spawner").session_started(session.id)
    return (await run.service.components.world.rows())[session.id]


@pytest.mark.covers("F40")
async def test_a_session_holds_its_gpus_until_the_hub_lists_its_server_no_more(tmp_path: Path) -> None:
    backend = MemoryBackend([NODE], real_time=True)
    async with (
        fake_hub() as hub,
        running(tmp_path, SHORT_GRACE, backend=backend, hub=api(hub), MAKEWAY_TICK_SECONDS=0.1) as run,
    ):
        hub.slow.add(("ana", ""))
        session = await held(run, hub)
        job = await run.submit("bo", "owner", profile="gpu3")
        await hub.until(1, "DELETE /hub/api/users/ana/server")
        await hub.until(3, "GET /hub/api/users/ana")  # it was listed as stopping, again and again
        row = (await run.service.components.world.rows())[session.id]
        assert (row.state, row.placement) == ("checkpointing", session.placement), "202 is not stopped"
        assert (await run.job(job.id)).state.value == "pending"
        assert backend.starts == 0
        assert hub.count("DELETE") == 1, "a stop that was accepted is not repeated at once"
        hub.end("ana")
        await run.job(job.id, "running")
        over = await run.client("spawner").session(session.id)
        assert (over.phase, over.reason.code) == ("over", "made_way")


async def test_a_stop_that_the_hub_refuses_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("makeway_quota.control.hub.servers.ERROR_RETRY", 0.2)
    backend = MemoryBackend([NODE], real_time=True)
    async with (
        fake_hub() as hub,
        running(tmp_path, SHORT_GRACE, backend=backend, hub=api(hub), MAKEWAY_TICK_SECONDS=0.1) as run,
    ):
        session = await held(run, hub)
        hub.status = 500
        job = await run.submit("bo", "owner", profile="gpu3")
        await hub.until(2, "DELETE /hub/api/users/ana/server")
        assert (await run.service.components.world.rows())[session.id].placement == session.placement
        hub.status = None
        await run.job(job.id, "running")
        assert (await run.client("spawner").session(session.id)).phase == "over"


async def test_no_decision_waits_for_a_hub_that_hangs(tmp_path: Path) -> None:
    backend = MemoryBackend([NODE], real_time=True, lasts=lambda order: 0.1)
    settings = {"MAKEWAY_TICK_SECONDS": 0.1, "MAKEWAY_LEASE_SECONDS": 3}
    async with (
        fake_hub() as hub,
        running(tmp_path, SHORT_GRACE, backend=backend, hub=api(hub, 60.0), **settings) as run,
    ):
        session = await held(run, hub)
        other = await run.granted((await run.session("lea", "gpu1", "rnd")).id)
        hub.hangs = True
        owner = await run.submit("bo", "owner", profile="gpu3")
        await hub.until(2, "")  # the stop of ana's server, and whether lea's still runs: neither is answered
        slowest = 0.0
        for number in range(5):
            asked = time.monotonic()
            job = await run.submit("lea", f"quick {number}", profile="gpu1", team="devops")
            await run.job(job.id, "succeeded")
            slowest = max(slowest, time.monotonic() - asked)
        assert slowest < 30, "a decision waited for the Hub, which hangs for 60 s"
        rows = await run.service.components.world.rows()
        assert rows[session.id].placement == session.placement
        assert rows[other.id].live, "nothing is concluded while the Hub is silent"
        assert (await run.job(owner.id)).state.value == "pending"


async def test_leases_end_only_where_the_hub_has_no_such_server(tmp_path: Path) -> None:
    settings = {"MAKEWAY_TICK_SECONDS": 0.1, "MAKEWAY_LEASE_SECONDS": 3}
    backend = MemoryBackend([NODE], real_time=True)
    async with fake_hub() as hub, running(tmp_path, backend=backend, hub=api(hub), **settings) as run:
        kept = await run.granted((await run.session("ana", "gpu1", "rnd")).id)
        gone = await run.granted((await run.session("lea", "gpu1", "rnd")).id)
        hub.start("ana")
        after = await run.client("spawner").session(gone.id, wait=20, version=gone.version)
        assert after.reason.code == "lease_expired"
        assert "the Hub has no such server" in after.reason.message
        assert (await run.client("spawner").session(kept.id)).phase == "granted"


async def test_a_server_that_is_missing_from_the_pages_is_read_by_its_user() -> None:
    async with fake_hub() as hub:
        users = [f"user-{number:02d}" for number in range(20)]
        for user in users[:-1]:
            hub.start(user)
        hub.servers[users[-1]] = set()
        known = asyncio.Event()
        servers = HubServers(api(hub))
        servers.on_change(known.set)
        page = hub.page
        hub.page = lambda query, paged: [u for u in page(query, False) if u["name"] != "user-07"]  # type: ignore[attr-defined,method-assign]
        at = time.monotonic()
        assert {servers.state((user, ""), at) for user in users} == {"unknown"}
        async with asyncio.timeout(60):
            while servers.state((users[0], ""), at) == "unknown":
                known.clear()
                await known.wait()
        assert [servers.state((user, ""), at) for user in users] == ["active"] * 19 + ["gone"]
        assert hub.count("GET /hub/api/users?") >= 1
        assert hub.count("GET /hub/api/users/user-") == 2, "only those that the list does not have"
        assert servers.state((users[0], ""), time.monotonic()) == "unknown", "an answer holds for its moment only"
        await servers.close()


async def test_a_replica_that_does_not_lead_stops_no_server() -> None:
    async with fake_hub() as hub:
        hub.start("ana")
        leads = False
        servers = HubServers(api(hub), may_act=lambda: leads, poll=0.05)
        assert servers.stop({"s-1": ("ana", "")}) == set()
        await hub.until(1, "GET /hub/api/users/ana")
        leads = True
        stopped = asyncio.Event()
        servers.on_change(stopped.set)
        servers.stop({"s-1": ("ana", "")})
        async with asyncio.timeout(60):
            await stopped.wait()
        assert servers.stop({"s-1": ("ana", "")}) == {"s-1"}
        lines = [line.split()[0] for line in hub.requests]
        assert lines.index("DELETE") == len(lines) - 2, "no stop before it led"
        await servers.close()


async def test_a_session_that_is_over_is_stopped_no_more() -> None:
    async with fake_hub() as hub:
        hub.start("ana")
        hub.slow.add(("ana", ""))
        servers = HubServers(api(hub), poll=0.05)
        servers.stop({"s-1": ("ana", "")})
        await hub.until(2, "GET /hub/api/users/ana")
        assert servers.stop({}) == set()
        before = len(hub.requests)
        hub.start("ana")  # a new server of the same name, which a new session holds
        await asyncio.sleep(0.3)
        assert len(hub.requests) <= before + 1
        assert hub.count("DELETE") == 1
        await servers.close()


async def test_a_server_that_does_not_stop_is_reported_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    async with fake_hub() as hub:
        hub.start("ana")
        hub.slow.add(("ana", ""))
        servers = HubServers(api(hub), clock=lambda: now, poll=0.02)
        with caplog.at_level(logging.WARNING, "makeway.hub"):
            servers.stop({"s-1": ("ana", "")})
            await hub.until(1, "GET")
            for minutes in range(1, 4):
                now = 65.0 * minutes
                await hub.until(hub.count("GET") + 3, "GET")
        tried = servers.termination_progress("s-1", 1000.0)
        assert tried is not None
        assert (tried.targets, tried.tries) == (("server “default” of ana",), 4), "once, and again each minute"
        assert (tried.next_at, tried.problem) == (1030.0, "the Hub still lists it")
        servers.stop({})
        assert servers.termination_progress("s-1", 1000.0) is None
        await servers.close()
    assert caplog.messages[0] == (
        "The server “default” of ana was asked to stop 1 min 5 s ago and has not stopped: the Hub still lists it. "
        "Its session keeps its GPUs until the server is gone."
    )
    assert len(caplog.messages) == 3
