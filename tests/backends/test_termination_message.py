"""How workers ended whose launchers could not tell the service: their pods say so, and nothing beyond that."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, pod
from makeway_api.models.attempts import WorkerReportIn
from makeway_quota.backends.base import AttemptStatus, Phase
from makeway_quota.backends.kubernetes.attempts.pod_states import MAX_LINE, JobPod
from makeway_quota.backends.kubernetes.attempts.termination_message import report_of
from makeway_quota.backends.remote.backend import REPORT_GRACE
from makeway_quota.store.records import NewWorkload
from makeway_quota.store.store import Store, open_store
from makeway_quota.values import Notice
from pod_backend import Backend

NOTICE = Notice("reclaim", 100.0, 130.0, "evict", "rnd", "bo", "j2")
END = {"exit_code": 0, "ended_at": 1005.0, "message": "saved at step 9"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    result = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    result.add_workload(NewWorkload("j1", "job", "rnd", "gpu1", "ana", gpus=1000), now=0.0)
    return result


@pytest.fixture
async def backend(store: Store) -> AsyncIterator[Backend]:
    made = Backend(ApiServer(), store)
    await made.open()
    await made.nodes()
    yield made
    await made.close(stop_jobs=False)
    store.close()


def began(store: Store, workers: int = 1) -> None:
    """Have the launchers of an attempt report that they began."""
    for number in range(workers):
        store.worker_reports.claim(("j1", 1, number), "a-launcher", 1.0)
        store.worker_reports.write(("j1", 1, number), {"started_at": 2.0, "step": 4, "saved_at": 3.0}, 3.0)


def words(exit: dict[str, Any], **more: Any) -> str:
    return json.dumps({"started_at": 2.0, "step": 9, "saved_at": 1004.0, "noticed": False, **more, "exit": exit})


async def outcome(backend: Backend) -> AttemptStatus:
    """Return how the attempt ends when nothing more is heard of it."""
    for _ in range(4):
        await backend.observe()
        backend.now += REPORT_GRACE / 2
    return await backend.seen("j1")


async def test_a_pod_tells_that_its_worker_finished(backend: Backend, store: Store) -> None:
    began(store)
    backend.hear("ADDED", pod("j1"))
    assert (await backend.seen("j1")).phase is Phase.RUNNING
    backend.hear("MODIFIED", pod("j1", "Succeeded", words=words({**END, "completed": True}, tail="step 9")))
    seen = await outcome(backend)
    assert (seen.phase, seen.exit_code, seen.completed, seen.step) == (Phase.EXITED, 0, True, 9)
    assert seen.message.startswith("saved at step 9; its launcher did not reach the service any more")


async def test_a_pod_that_was_killed_while_its_result_was_sent_tells_so(backend: Backend, store: Store) -> None:
    began(store)
    store.outputs.append(("j1", 1, 0), "result", 0, b"a part", 100)
    message = words({**END, "completed": True, "result_unsent": True}, noticed=True)
    backend.hear("ADDED", pod("j1", "Failed", words=message))
    seen = await outcome(backend)
    assert (seen.phase, seen.exit_code, seen.notice_received, seen.completed) == (Phase.EXITED, 0, True, False)
    assert not store.outputs.has("j1", 1, "result")


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_pod_tells_that_its_worker_saved_because_the_service_was_away(
    backend: Backend, store: Store, deleted: bool
) -> None:
    began(store)
    message = words({**END, "exit_code": 75, "acknowledged": True, "unheard": True}, noticed=True)
    backend.hear("ADDED", pod("j1", "Failed", words=message))
    if deleted:
        backend.hear("DELETED", pod("j1", "Failed", words=message))
    seen = await outcome(backend)
    assert (seen.phase, seen.exit_code, seen.acknowledged, seen.node_lost) == (Phase.EXITED, 75, True, True)


async def test_a_gang_is_over_when_all_of_its_pods_tell_so(backend: Backend, store: Store) -> None:
    began(store, 2)
    backend.hear("ADDED", pod("j1", "Succeeded", worker=0, of=2, words=words(END)))
    backend.hear("ADDED", pod("j1", worker=1, of=2))
    assert (await outcome(backend)).phase is Phase.RUNNING, "the other one goes on"
    backend.hear("MODIFIED", pod("j1", "Succeeded", worker=1, of=2, words=words(END)))
    assert (await outcome(backend)).phase is Phase.EXITED


async def test_containers_beside_the_job_that_go_on_do_not_hide_its_end(backend: Backend, store: Store) -> None:
    began(store)
    backend.hear("ADDED", pod("j1", words=words(END)))
    assert (await backend.seen("j1")).phase is Phase.EXITED


async def test_a_report_that_arrives_while_its_pod_is_read_counts(backend: Backend, store: Store) -> None:
    """The pod ended after it, but was seen before it was read."""
    began(store)
    backend.hear("ADDED", pod("j1"))
    assert (await backend.seen("j1")).phase is Phase.RUNNING
    backend.hear("MODIFIED", pod("j1", "Failed", words=words(END)))
    store.worker_reports.write(("j1", 1, 0), {"exit": {"exit_code": 3, "ended_at": 5.0, "message": "its own"}}, 5.0)
    await backend.hosts()
    seen = await backend.seen("j1")
    assert (seen.exit_code, seen.message) == (3, "its own")


async def test_what_a_worker_reported_counts_more_than_its_pod(backend: Backend, store: Store) -> None:
    began(store)
    store.worker_reports.write(("j1", 1, 0), {"exit": {"exit_code": 3, "ended_at": 5.0, "message": "its own"}}, 5.0)
    backend.hear("ADDED", pod("j1", "Succeeded", words=words(END)))
    seen = await outcome(backend)
    assert (seen.exit_code, seen.message) == (3, "its own")


async def test_a_pod_that_is_deleted_after_its_notice_tells_that_its_worker_saved(
    backend: Backend, store: Store
) -> None:
    """Its launcher was cut off from the service, and learned it by the deletion."""
    began(store)
    backend.hear("ADDED", pod("j1"))
    await backend.notice("j1", 1, NOTICE)
    backend.now += NOTICE.deadline - NOTICE.at + REPORT_GRACE
    assert (await backend.seen("j1")).phase is Phase.RUNNING
    assert backend.server.graces == [None], "its own"
    message = words({**END, "exit_code": 75, "acknowledged": True}, noticed=True)
    backend.hear("DELETED", pod("j1", "Failed", words=message))
    seen = await backend.seen("j1")
    assert (seen.phase, seen.exit_code, seen.acknowledged, seen.step) == (Phase.EXITED, 75, True, 9)


async def test_a_follower_takes_no_ends_from_pods(backend: Backend, store: Store) -> None:
    began(store)
    backend.fence_with(lambda: False)
    backend.hear("ADDED", pod("j1", "Succeeded", words=words(END)))
    assert (await outcome(backend)).phase is Phase.LOST


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the termination messages that are read, in a list that grows."""
    result: list[str] = []

    def noted(one: JobPod) -> WorkerReportIn | None:
        result.append(one.termination_message)
        return report_of(one)

    monkeypatch.setattr("makeway_quota.backends.kubernetes.attempts.termination_message.report_of", noted)
    return result


async def test_what_a_pod_tells_is_read_once_in_a_term(backend: Backend, store: Store, read: list[str]) -> None:
    began(store, 2)
    for number, message in enumerate(("Segmentation fault", words({}))):
        backend.hear("ADDED", pod("j1", "Failed", worker=number, of=2, words=message))
    for _ in range(3):
        await backend.observe()
    assert sorted(read) == ["Segmentation fault", words({})]
    backend.hear("MODIFIED", pod("j1", "Failed", worker=0, of=2, words="Bus error"))
    backend.hear("DELETED", pod("j1", "Failed", worker=1, of=2, words=words({})))
    for _ in range(3):
        await backend.observe()
    assert read[2:] == ["Bus error"], "the other one tells nothing new"
    backend.begin_term()
    for _ in range(3):
        await backend.observe()
    assert sorted(read[3:]) == ["Bus error", words({})], "in a new term all are read"
    await backend.forget("j1", 1)
    backend.hear("DELETED", pod("j1", "Failed", worker=0, of=2, words="Bus error"))
    await backend.observe()
    pods = backend.attempt_pods
    assert (len(read), pods.attempt(("j1", 1)).read_reports, pods.with_final_report()) == (5, {}, [])


async def test_what_a_pod_tells_is_read_again_where_it_could_not_be_recorded(
    backend: Backend, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    began(store)
    backend.hear("ADDED", pod("j1", "Succeeded", words=words(END)))

    async def fails(ends: object) -> None:
        raise OSError("the database is away")

    with monkeypatch.context() as away:
        away.setattr(backend.channel, "record_final_reports", fails)
        for _ in range(2):
            with pytest.raises(OSError, match="away"):
                await backend.observe()
    assert (await backend.seen("j1")).phase is Phase.EXITED


async def test_what_a_pod_tells_counts_where_it_is_read_later_that_its_worker_began(
    backend: Backend, store: Store
) -> None:
    backend.hear("ADDED", pod("j1", "Succeeded", words=words(END)))
    await backend.observe()
    began(store)
    assert (await outcome(backend)).phase is Phase.EXITED


async def test_a_follower_that_becomes_the_leader_reads_what_all_pods_tell(
    backend: Backend, store: Store, read: list[str]
) -> None:
    began(store)
    backend.hear("ADDED", pod("j1", "Failed", words="Segmentation fault"))
    for leads, times in ((False, 0), (True, 1), (True, 1), (False, 1), (True, 2)):
        backend.fence_with(lambda leads=leads: leads)  # type: ignore[misc]
        await backend.observe()
        assert len(read) == times


async def test_a_pod_tells_nothing_of_a_worker_that_never_began(backend: Backend) -> None:
    backend.hear("ADDED", pod("j1", "Succeeded", words=words(END)))
    assert (await outcome(backend)).phase is Phase.LOST


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Segmentation fault",
        "[" * 4000,
        "null",
        "[]",
        "{}",
        words({}),
        words({**END, "exit_code": 10**30}),
        words({**END, "exit_code": "0"[:0]}),
        words({**END, "ended_at": float("nan")}),
        words({**END, "message": {"a": "table"}}),
        words(END, step=2**60),
        words(END)[:-1],
        words({**END, "message": "x" * 5000}),
        json.dumps({"exit": [END]}),
    ],
)
async def test_what_is_no_report_is_not_believed(backend: Backend, store: Store, said: str) -> None:
    began(store)
    backend.hear("ADDED", pod("j1", "Succeeded", words=said))
    seen = await outcome(backend)
    line = f": {said[:MAX_LINE]}" if said[:1] not in ("", "{") else ""
    assert (seen.phase, seen.message) == (Phase.LOST, f"its launcher ended with exit code 0 without a report{line}")
