"""An error with one lease, notice, server or job in backoff keeps no other from its turn, and is quarantined."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control import actuate, start_backoff, transitions
from makeway_quota.control.actuate import Actuator
from makeway_quota.control.hub.leases import Leases
from makeway_quota.control.hub.servers import HubServers
from makeway_quota.control.start_backoff import START_DEFERRED, StartBackoff
from makeway_quota.quarantine import Quarantine
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Notice


def row(id: str, **more: Any) -> Workload:
    new = NewWorkload(id, kind="job", team="rnd", profile="gpu1", owner=id, gpus=1000)
    return initial_record(new, 0.0)._replace(**more)


def fails(id: str, real: Any) -> Any:
    """Return a function that fails where an argument names or is one workload."""

    def called(*args: Any, **more: Any) -> Any:
        if any(id in str(getattr(item, "id", item)) for item in args):
            raise RecursionError("deep inside of it")
        return real(*args, **more)

    return called


def test_a_job_that_cannot_be_tried_again_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    backoff, quarantine = StartBackoff(), Quarantine()
    numbers = {"tries": 13}
    deferred = {"reason_code": START_DEFERRED, "reason_numbers": numbers, "not_before": 3000.0, "start_tries": 13}
    rows = {id: row(id, **deferred) for id in ("bad", "good")}
    backoff.committed(list(rows.values()))
    monkeypatch.setattr(start_backoff, "backoff_until", fails("bad", start_backoff.backoff_until))
    assert [transition.change.workload for transition in backoff.wake(rows, ["n1"], 100.0, quarantine)] == ["good"]
    assert quarantine.all("workload") == {"bad"}


def test_a_lease_that_cannot_be_ended_or_timed_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    parts = Leases(10.0, clock=lambda: now[0])
    parts.quarantine = Quarantine(lambda: now[0])
    rows = [row(id, kind="session", state="running") for id in ("bad", "good", "odd")]
    parts.reconcile(rows, 0.0)
    now[0] = 100.0
    parts._renewed["odd"] = "yesterday"  # type: ignore[assignment]
    monkeypatch.setattr(transitions, "release", fails("bad", transitions.release))
    assert [change.workload for change in parts.reconcile(rows, 100.0).changes] == ["good"]
    assert parts.quarantine.all("workload") == {"bad", "odd"}


def test_a_notice_that_cannot_be_timed_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    actuator = Actuator(None, MemoryBackend(), None)  # type: ignore[arg-type]
    notice = Notice("reclaim", at=0.0, deadline=10.0)
    rows = [row(id, kind="session", state="checkpointing", notice=notice) for id in ("bad", "good")]
    rows[0] = rows[0]._replace(notice=replace(notice, deadline="soon"))  # type: ignore[arg-type]
    monkeypatch.setattr(actuate, "_grace_passed", lambda notice, now: float(notice.deadline) - notice.at)
    assert set(actuator._sessions_past_notice(rows, 20.0)) == {"good"}
    assert actuator.quarantine.all("workload") == {"bad"}


class Hub:
    """A Hub whose answers about one user cannot be understood."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.bad = True

    async def servers_of(self, user: str) -> frozenset[str]:
        if user == "bad" and self.bad:
            raise RecursionError("deep inside of it")
        return frozenset() if user in self.stopped else frozenset({""})

    async def stop_server(self, user: str, name: str) -> None:
        self.stopped.append(user)

    async def active_servers(self) -> set[tuple[str, str]]:
        raise RecursionError("deep inside of it")

    async def close(self) -> None:
        """Nothing is open."""


async def changes(servers: HubServers, count: int = 1) -> None:
    """Wait until more is known, so many times."""
    heard = asyncio.Semaphore(0)
    servers.on_change(heard.release)
    async with asyncio.timeout(30):
        for _ in range(count):
            await heard.acquire()


async def test_a_user_whose_servers_cannot_be_understood_hides_no_other() -> None:
    hub = Hub()
    servers = HubServers(hub, poll=0.01)  # type: ignore[arg-type]
    users = ["bad", "good", *(f"u{number}" for number in range(12))]
    for user in users:
        assert servers.state((user, ""), 0.0) == "unknown"
    await changes(servers)
    assert {user: servers.state((user, ""), 0.0) for user in users} == dict.fromkeys(users, "active") | {
        "bad": "unreachable"
    }
    assert servers.quarantine.all("person") == {"bad"}
    await servers.close()


async def test_a_server_that_cannot_be_stopped_keeps_no_other_and_is_not_tried_all_the_time() -> None:
    hub, now = Hub(), [0.0]
    servers = HubServers(hub, poll=0.01)  # type: ignore[arg-type]
    servers.quarantine = Quarantine(lambda: now[0])
    wanted = {"s-bad": ("bad", ""), "s-good": ("good", "")}
    servers.stop(wanted)
    await changes(servers)
    assert servers.stop(wanted) == {"s-good"}
    assert servers.quarantine.all("workload") == {"s-bad"}
    tries = hub.stopped.count("bad")
    for _ in range(10):
        servers.stop(wanted)
        await asyncio.sleep(0)
    assert hub.stopped.count("bad") == tries
    hub.bad, now[0] = False, 1000.0
    servers.stop(wanted)
    await changes(servers)
    assert servers.stop(wanted) == {"s-bad", "s-good"}
    assert servers.quarantine.size == 0
    await servers.close()
