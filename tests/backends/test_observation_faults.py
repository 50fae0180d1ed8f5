"""One pod, node, report or attempt with which an observation fails is told, and hides no other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, node, pod
from makeway_quota.backends.base import AttemptStatus, Phase
from makeway_quota.backends.kubernetes.attempts import attempt_pods, pod_attempt
from makeway_quota.backends.kubernetes.cluster import inventory
from makeway_quota.backends.local import backend as local
from makeway_quota.backends.remote import remote_attempt
from makeway_quota.backends.remote.workers import WorkerStatus
from makeway_quota.quarantine import Quarantine
from makeway_quota.store.records import NewWorkload
from makeway_quota.store.store import open_store
from makeway_quota.store.tables import worker_reports
from pod_backend import Backend
from sqlalchemy import update
from workshop import Workshop

RUNS = WorkerStatus(started_at=10.0)
GOOD = {"started_at": 10.0}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Backend]:
    """Two nodes; a job on the first, which is the bad one, and another beside it."""
    store, server = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}"), ApiServer()
    server.lists["/api/v1/nodes"] = [node(name) for name in ("n0", "n1")]
    made = Backend(server, store)
    made.quarantine_in(Quarantine(lambda: made.now))
    await made.open()
    for job in ("bad", "good"):
        store.add_workload(NewWorkload(job, kind="job", team="rnd", profile="gpu1", owner="ana", gpus=1000), now=1.0)
        store.worker_reports.claim((job, 1, 0), "launcher", 1.0)
        store.worker_reports.write((job, 1, 0), GOOD, 1.0)
        made.hear("ADDED", pod(job))
    await made.phases()
    made.channel.quarantine = made.quarantine
    made.now += 100
    yield made
    await made.close(stop_jobs=False)
    store.close()


def failing(patch: pytest.MonkeyPatch, owner: Any, name: str, about: Callable[..., bool]) -> list[bool]:
    """Have a function fail where it is about something, while the list that is returned is not empty."""
    real, on = getattr(owner, name), [True]

    def called(*args: Any, **more: Any) -> Any:
        if on and about(*args, **more):
            raise RecursionError("deep inside of it")
        return real(*args, **more)

    patch.setattr(owner, name, called)
    return on


def changed(backend: Backend) -> None:
    """Have both pods and both nodes change."""
    for at, job in enumerate(("bad", "good")):
        result = pod(job, version=str(30 + at))
        result["status"]["reason"] = "Changed"
        backend.hear("MODIFIED", result)
    for at, name in enumerate(("n0", "n1")):
        larger = node(name)
        larger["metadata"]["resourceVersion"] = str(30 + at)
        larger["status"]["allocatable"]["nvidia.com/gpu"] = "9"
        backend.inventory.nodes._event(json.dumps({"type": "MODIFIED", "object": larger}).encode())


OF_ATTEMPTS: list[tuple[Any, str, Callable[..., bool]]] = [
    (attempt_pods, "with_cause", lambda pod, before: pod.key[0] == "bad"),
    (pod_attempt, "hosts_of", lambda pods, *_: any(pod.key[0] == "bad" for pod in pods)),
    (remote_attempt, "attempt_of", lambda key, *_: key[0] == "bad"),
]


@pytest.mark.parametrize(("owner", "name", "about"), OF_ATTEMPTS, ids=[name for _, name, _ in OF_ATTEMPTS])
async def test_an_error_with_one_attempt_hides_no_other(
    cluster: Backend, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, about: Callable[..., bool]
) -> None:
    on = failing(monkeypatch, owner, name, about)
    changed(cluster)
    cluster.hear("MODIFIED", pod("good", phase="Failed", version="40"))
    cluster.store.worker_reports.write(("good", 1, 0), {**GOOD, "exit": {"exit_code": 0, "ended_at": 2.0}}, 2.0)
    cluster.store.worker_reports.write(("bad", 1, 0), {**GOOD, "step": 3, "saved_at": 11.0}, 2.0)
    result = await cluster.phases()
    assert result["good"] is Phase.EXITED
    assert result["bad"] is Phase.RUNNING, "it stays as it was seen last"
    assert "bad" in (cluster.quarantine.sentence(named=True) or "")
    on.clear()
    cluster.now += 1000
    seen = {item.workload: item for item in (await cluster.observe()).attempts}
    assert (seen["bad"].phase, seen["bad"].step) == (Phase.RUNNING, 3)
    assert cluster.quarantine.size == 0


async def test_an_attempt_that_was_never_understood_counts_as_there(
    cluster: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, remote_attempt, "attempt_of", lambda key, *_: key[0] == "new")
    cluster.hear("ADDED", pod("new", version="50"))
    assert (await cluster.phases())["new"] is Phase.STARTING, "else it would be started a second time"


OF_NODES: list[tuple[Any, str, Callable[..., bool]]] = [
    (inventory, "_node_status", lambda node, *_: node.name == "n0"),
    (inventory, "model_of", lambda node: node.name == "n0"),
]


@pytest.mark.parametrize(("owner", "name", "about"), OF_NODES, ids=[name for _, name, _ in OF_NODES])
async def test_an_error_with_one_node_hides_no_other_and_nothing_starts_on_it(
    cluster: Backend, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, about: Callable[..., bool]
) -> None:
    on = failing(monkeypatch, owner, name, about)
    changed(cluster)
    result = {item.name: item for item in (await cluster.observe()).nodes}
    assert (len(result["n1"].devices), result["n1"].cordoned) == (9, False)
    assert (len(result["n0"].devices), result["n0"].cordoned) == (8, True)
    assert "node n0" in (cluster.quarantine.sentence(named=True) or "")
    on.clear()
    cluster.now += 1000
    result = {item.name: item for item in (await cluster.observe()).nodes}
    assert (len(result["n0"].devices), result["n0"].cordoned) == (9, False)
    assert cluster.quarantine.size == 0


async def test_an_error_with_one_pod_of_others_hides_no_node(cluster: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    on = failing(monkeypatch, cluster.inventory, "_move", lambda key, *_: key.endswith("/odd"))
    for at, name in enumerate(("odd", "usual")):
        other = {
            "metadata": {"name": name, "namespace": "theirs", "uid": name, "resourceVersion": str(60 + at)},
            "spec": {"nodeName": "n0", "containers": [{"resources": {"requests": {"nvidia.com/gpu": "1"}}}]},
            "status": {"phase": "Running"},
        }
        cluster.inventory.pods._event(json.dumps({"type": "ADDED", "object": other}).encode())
    nodes = {item.name: item for item in (await cluster.observe()).nodes}
    assert nodes["n0"].foreign_gpus == 1000
    assert "pod theirs/odd" in (cluster.quarantine.sentence(named=True) or "")
    on.clear()
    cluster.now += 1000
    nodes = {item.name: item for item in (await cluster.observe()).nodes}
    assert nodes["n0"].foreign_gpus == 2000


DAMAGED = {"cut off": "{", "a list": "[1]", "null": "null", "deep": "[" * 100_000, "odd": '{"exit": [1]}', "empty": ""}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
async def test_a_report_that_is_damaged_hides_no_other_and_stays_as_it_was_read(cluster: Backend, text: str) -> None:
    reports = cluster.store.worker_reports
    reports.write(("good", 1, 0), {**GOOD, "step": 4, "saved_at": 11.0}, 2.0)
    with reports._database.write(quiet=True) as connection:
        serial = 1000
        bad = worker_reports.c.workload == "bad"
        connection.execute(update(worker_reports).where(bad).values(report=text, serial=serial))
    seen = {item.workload: item for item in (await cluster.observe()).attempts}
    assert (seen["good"].step, seen["good"].phase) == (4, Phase.RUNNING)
    assert seen["bad"].phase is Phase.RUNNING
    assert "bad" in (cluster.quarantine.sentence(named=True) or "")
    with reports._database.write(quiet=True) as connection:
        connection.execute(
            update(worker_reports)
            .where(bad)
            .values(report='{"started_at": 10, "step": 9, "saved_at": 11}', serial=1001)
        )
    cluster.now += 1000
    seen = {item.workload: item for item in (await cluster.observe()).attempts}
    assert seen["bad"].step == 9
    assert cluster.quarantine.size == 0


async def test_a_worker_whose_report_is_damaged_reports_again(cluster: Backend) -> None:
    reports = cluster.store.worker_reports
    with reports._database.write(quiet=True) as connection:
        connection.execute(update(worker_reports).values(report="{"))
    assert reports.write(("bad", 1, 0), {**GOOD, "step": 5, "saved_at": 11.0}, 3.0) is not None
    seen = {item.workload: item for item in (await cluster.observe()).attempts}
    assert seen["bad"].step == 5


async def test_a_final_report_that_cannot_be_recorded_keeps_no_other(
    cluster: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = json.dumps({"started_at": 10.0, "exit": {"exit_code": 0, "ended_at": 30.0, "message": ""}})
    on = failing(monkeypatch, cluster.store.worker_reports, "write", lambda key, *_: key[0] == "bad")
    for at, job in enumerate(("bad", "good")):
        cluster.hear("MODIFIED", pod(job, phase="Succeeded", version=str(70 + at), words=words))
    for _ in range(3):
        assert await cluster.phases() == {"good": Phase.EXITED, "bad": Phase.RUNNING}
    assert "bad" in (cluster.quarantine.sentence(named=True) or "")
    on.clear()
    cluster.now += 1000
    assert (await cluster.phases())["bad"] is Phase.EXITED
    assert cluster.quarantine.size == 0


async def test_a_step_of_an_observation_that_fails_stops_no_other(
    cluster: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((cluster._removals, "retry_due"), (cluster._dead_nodes, "observe")):
        failing(monkeypatch, owner, name, lambda *_, **__: True)
    changed(cluster)
    assert set(await cluster.phases()) == {"bad", "good"}
    told = cluster.quarantine.sentence(named=True) or ""
    assert "looking for dead nodes" in told
    assert "deleting pods that stay" in told


async def test_an_error_with_one_process_of_this_machine_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Workshop(tmp_path / "state")
    await shop.backend.open()
    try:
        for id in ("j-bad", "j-good"):
            await shop.run(id, "sleep", "100")
            await shop.until(id, lambda seen: seen.phase is Phase.RUNNING)
        bad = shop.backend._attempts["j-bad", 1]

        def unreadable(now: float) -> bool:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(bad, "refresh", unreadable)
        seen: dict[str, AttemptStatus] = {item.workload: item for item in (await shop.backend.observe()).attempts}
        assert set(seen) == {"j-bad", "j-good"}
        assert "j-bad" in (shop.backend.quarantine.sentence(named=True) or "")
        monkeypatch.undo()
        sweep = local.sweep

        def swept(marks: Any) -> Any:
            if any("j-bad" in mark.job_dir for mark in marks):
                raise RecursionError("deep inside of it")
            return sweep(marks)

        monkeypatch.setattr(local, "sweep", swept)
        await shop.backend.kill("j-bad", 1)
        await shop.backend.kill("j-good", 1)
        await shop.until("j-good", lambda seen: seen.phase is Phase.EXITED)
    finally:
        monkeypatch.undo()
        await shop.backend.close(stop_jobs=True)
