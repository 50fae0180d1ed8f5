"""Pods are deleted some at a time, and those of a refused start without holding up a cycle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
from api_server import PODS, ApiServer, pod
from makeway_quota.backends.base import BackendRejected, BackendUnavailable
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, Object, run_all
from makeway_quota.backends.kubernetes.attempts.removals import AT_ONCE
from makeway_quota.backends.kubernetes.backend import REMOVAL_GRACE
from makeway_quota.backends.remote.backend import REPORT_GRACE
from makeway_quota.backends.remote.workers import WorkerStatus
from makeway_quota.store.store import open_store
from makeway_quota.values import Notice
from pod_backend import Backend, order


class Slow(ApiServer):
    """An API server that answers requests for single pods when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.under_way, self.most = 0, 0

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        if path.startswith(f"{PODS}/"):
            await self.open.wait()
            name = path.rpartition("/")[2]
            metadata = {"name": name, "uid": "u", "labels": {"makeway/instance": "here"}}
            return {**await super().get(path, query), "metadata": metadata}
        return await super().get(path, query)

    async def delete(self, path: str, *, uid: str = "", grace: int | None = None) -> bool:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.01)
        self.under_way -= 1
        return await super().delete(path, uid=uid, grace=grace)

    def deleted(self) -> list[str]:
        return [asked for asked in self.asked if asked.startswith(f"DELETE {PODS}/")]


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    made = Backend(Slow(), store)
    await made.open()
    await made.nodes()
    yield made
    await made.close(stop_jobs=False)
    store.close()


def slow(backend: Backend) -> Slow:
    assert isinstance(backend.server, Slow)
    return backend.server


def no_secrets(method: str, path: str) -> None:
    if path.endswith("/secrets"):
        raise ApiStatusError(503, "ServiceUnavailable", "etcd is down")


async def test_a_refused_start_does_not_wait_until_its_pods_are_deleted(backend: Backend) -> None:
    server = slow(backend)
    server.answer = no_secrets
    async with asyncio.timeout(60):
        with pytest.raises(BackendUnavailable, match="etcd is down"):
            await backend.start(order("j1", workers=3))
    server.answer = lambda method, path: None
    with pytest.raises(BackendUnavailable, match="are being deleted"):
        await backend.start(order("j1", workers=3))
    server.open.set()
    await backend.undone("j1")
    assert len(server.deleted()) == 3
    await backend.start(order("j1", workers=3))


async def test_a_replica_that_leads_no_more_leaves_the_pods_of_a_refused_start_to_the_next_one(
    backend: Backend,
) -> None:
    server, leads = slow(backend), True
    backend.fence_with(lambda: leads)
    server.answer = no_secrets
    with pytest.raises(BackendUnavailable):
        await backend.start(order("j1"))
    leads = False
    server.open.set()
    await backend.undone("j1")
    assert server.deleted() == []


async def test_a_gang_runs_without_a_network_policy_only_where_the_account_may_not_create_one(backend: Backend) -> None:
    def refused(message: str) -> Callable[[str, str], None]:
        def answer(method: str, path: str) -> None:
            if path.endswith("/networkpolicies"):
                raise ApiStatusError(403, "Forbidden", message)

        return answer

    forbidden = (
        'networkpolicies.networking.k8s.io is forbidden: User "makeway" cannot create resource "networkpolicies"'
    )
    backend.server.answer = refused(forbidden)
    await backend.start(order("j1", workers=2))
    backend.server.answer = refused('admission webhook "net.example.com" denied the request: no owner')
    with pytest.raises(BackendRejected, match="no owner"):
        await backend.start(order("j2", workers=2))


async def test_the_pods_of_a_gang_are_deleted_some_at_a_time(backend: Backend) -> None:
    for worker in range(3 * AT_ONCE):
        backend.hear("ADDED", pod("j1", worker=worker, of=3 * AT_ONCE))
    await backend.remove("j1", 1)
    assert len(slow(backend).deleted()) == 3 * AT_ONCE
    assert slow(backend).most == AT_ONCE


async def test_a_deadline_ends_what_follows_a_failed_request_as_a_timeout() -> None:
    """A TaskGroup that failed lets the cancellation through, before Python 3.13: it would end the control loop."""
    ended: list[bool] = []

    async def refused() -> None:
        await asyncio.sleep(0)
        raise ApiStatusError(503, "", "")

    async def hangs() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def goes_on() -> None:
        with pytest.raises(ApiStatusError):
            await run_all([refused(), hangs()])
        assert ended, "the others have ended when the first error is raised"
        await asyncio.sleep(60)

    async def in_time() -> None:
        async with asyncio.timeout(0.1):
            await goes_on()

    with pytest.raises(TimeoutError):
        await in_time()
    assert await run_all([]) == []


async def test_requests_end_with_who_waits_for_them() -> None:
    ended: list[bool] = []

    async def hangs() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await run_all([hangs(), hangs()])
    assert ended == [True, True]


async def test_what_an_earlier_term_deletes_is_not_deleted_in_a_later_one(backend: Backend) -> None:
    server, leads = slow(backend), True
    backend.fence_with(lambda: leads)
    server.answer = no_secrets
    with pytest.raises(BackendUnavailable, match="etcd is down"):
        await backend.start(order("j1", workers=3))
    server.answer = lambda method, path: None
    leads = False
    await backend.observe()
    leads = True
    backend.begin_term()
    server.open.set()
    await backend.undone("j1")
    assert server.deleted() == [], "they may be the pods of the leader between"


@pytest.mark.parametrize(
    ("worker", "grace"),
    [
        (WorkerStatus(started_at=1.0), None),
        (None, None),
        (WorkerStatus(started_at=1.0, notice_received=True), REMOVAL_GRACE),
        (WorkerStatus(started_at=1.0, ended_at=2.0, exit_code=0), REMOVAL_GRACE),
    ],
    ids=["cut off", "never heard of", "noticed", "ended"],
)
async def test_a_pod_has_its_own_grace_unless_its_job_had_its_notice(
    backend: Backend, worker: WorkerStatus | None, grace: int | None
) -> None:
    backend.hear("ADDED", pod("j1"))
    backend.report("j1", *([worker] if worker else []))
    await backend.notice("j1", 1, Notice("reclaim", at=100.0, deadline=130.0))
    backend.now += 30.0 + REPORT_GRACE - 1.0
    await backend.observe()
    assert backend.server.graces == []
    backend.now += 1.0
    await backend.observe()
    await backend.remove("j1", 1)
    assert backend.server.graces[-1] == grace


async def test_a_pod_of_a_job_that_is_cancelled_has_no_grace(backend: Backend) -> None:
    backend.hear("ADDED", pod("j1"))
    await backend.kill("j1", 1)
    await backend.observe()
    assert backend.server.graces == [REMOVAL_GRACE]
