"""The backend for pods, where an API server answers what it should not, or not at all."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from api_server import PODS, ApiServer, pod
from makeway_quota.application import can_lead_with
from makeway_quota.backends.base import (
    BackendError,
    BackendFull,
    BackendUnavailable,
    Observation,
    Phase,
)
from makeway_quota.backends.kubernetes.api.client import (
    REQUEST_SECONDS,
    ApiClient,
    ApiStatusError,
    ApiUnreachable,
    Object,
)
from makeway_quota.backends.kubernetes.api.connection import Connection
from makeway_quota.backends.kubernetes.api.health_check import HEALTH_CHECK_TIMING, HealthCheck, HealthCheckTiming
from makeway_quota.backends.kubernetes.attempts.pod_attempt import MAX_RECREATIONS, PodAttempt
from makeway_quota.backends.kubernetes.attempts.pod_waits import MAX_WAIT_SECONDS
from makeway_quota.backends.kubernetes.backend import KEEP_GONE_PODS, UNREACHABLE_PAUSE, KubernetesBackend
from makeway_quota.backends.kubernetes.pods.manifest import TOKEN
from makeway_quota.backends.remote.backend import REPORT_GRACE
from makeway_quota.backends.remote.workers import WorkerStatus
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.workers.channel import WorkerChannel
from makeway_quota.control.workers.tokens import AttemptTokens
from makeway_quota.policy import read_policy
from makeway_quota.store.records import NewWorkload
from makeway_quota.store.rows import initial_record
from makeway_quota.store.store import open_store
from makeway_quota.values import Notice, Place
from pod_backend import POLICY, SETTINGS, Backend, order


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    made = Backend(ApiServer(), store)
    await made.open()
    await made.nodes()
    yield made
    await made.close(stop_jobs=False)
    store.close()


async def test_the_service_begins_without_an_api_server_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makeway_quota.backends.kubernetes.backend.OPEN_TIMEOUT", 0.2)
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    server = ApiServer()
    server.answer = away
    made = Backend(server, store)
    await made.open()
    seen = await made.observe()
    assert (seen.synced, seen.nodes, seen.problem) == (False, (), "the Kubernetes API server does not answer")
    with pytest.raises(BackendUnavailable, match="does not answer"):
        await made.start(order("j1"))
    server.answer = lambda method, path: None
    await asyncio.wait_for(made.inventory.nodes.wait_synced(), 60)
    await asyncio.wait_for(made.inventory.pods.wait_synced(), 60)
    await asyncio.wait_for(made.pods.wait_synced(), 60)
    seen = await made.observe()
    assert (seen.synced, [node.name for node in seen.nodes], seen.problem) == (True, ["n0"], "")
    await made.close(stop_jobs=False)
    store.close()


async def test_the_service_does_not_begin_where_it_may_not_read_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makeway_quota.backends.kubernetes.backend.OPEN_TIMEOUT", 0.2)
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    server = ApiServer()

    def refuse(method: str, path: str) -> None:
        raise ApiStatusError(403, "Forbidden", "nodes is forbidden")

    server.answer = refuse
    closed: list[str] = []
    monkeypatch.setattr(server, "close", partial(_note, closed))
    refused = Backend(server, store)
    with pytest.raises(BackendError, match=r"cannot be read: .*nodes is forbidden"):
        await refused.open()
    assert not closed  # a right that is granted later lets it be opened again
    server.answer = lambda method, path: None
    await refused.open()
    assert (await refused.observe()).synced
    await refused.close(stop_jobs=False)
    assert closed
    store.close()


async def _note(closed: list[str]) -> None:
    closed.append("closed")


async def test_a_follower_does_not_keep_what_only_the_leader_forgets(backend: Backend) -> None:
    leads = False
    backend.fence_with(lambda: leads)
    for number in range(20):
        backend.hear("ADDED", pod(f"j{number}"))
        backend.hear("DELETED", pod(f"j{number}", "Succeeded"))
    assert len(await backend.phases()) == 20
    backend.now += KEEP_GONE_PODS
    assert await backend.phases() == {}
    leads = True
    backend.hear("DELETED", pod("j21"))
    backend.now += 2 * KEEP_GONE_PODS
    assert set(await backend.phases()) == {"j21"}, "a leader has to hear of it, however late"


async def test_a_pod_that_ends_while_it_is_forgotten_leaves_nothing(backend: Backend) -> None:
    backend.hear("ADDED", pod("j1"))
    assert set(await backend.phases()) == {"j1"}

    def gone(method: str, path: str) -> None:
        if method == "DELETE":
            backend.hear("DELETED", pod("j1"))

    backend.server.answer = gone
    await backend.forget("j1", 1)
    assert await backend.phases() == {}
    assert backend.attempt_pods.of(("j1", 1)) == []
    backend.server.answer = lambda method, path: None
    backend.hear("ADDED", pod("j1"))
    assert set(await backend.phases()) == {"j1"}, "a pod that others create under the name is seen"


RUNS = WorkerStatus(started_at=10.0)
SAVED = replace(RUNS, notice_received=True, acknowledged=True, ended_at=20.0, exit_code=75)


def away(method: str, path: str) -> None:
    raise ApiUnreachable("the Kubernetes API server does not answer")


async def test_an_api_server_that_hangs_is_waited_for_once(backend: Backend) -> None:
    for number in range(5):
        backend.hear("ADDED", pod(f"j{number}"))
    await backend.observe()
    backend.server.asked.clear()
    backend.server.answer = away
    for number in range(5):
        with pytest.raises(BackendUnavailable, match="does not answer"):
            await backend.start(order(f"new{number}", workers=4))
        with pytest.raises(BackendUnavailable, match="does not answer"):
            await backend.remove(f"j{number}", 1)
    assert len(backend.server.asked) <= 4, "the pods of one attempt, at the same time, and nothing after that"
    backend.server.answer = lambda method, path: None
    backend.now += UNREACHABLE_PAUSE
    await backend.start(order("new0"))


@pytest.mark.parametrize(
    "refusal",
    [
        ApiStatusError(500, "InternalError", "etcd is down"),
        ApiStatusError(
            409, "Conflict", "Operation cannot be fulfilled on resourcequotas: the object has been modified"
        ),
        ApiStatusError(429, "TooManyRequests", "later"),
    ],
)
async def test_a_start_that_broke_off_is_ordered_again(backend: Backend, refusal: ApiStatusError) -> None:
    def no_secrets(method: str, path: str) -> None:
        if path.endswith("/secrets"):
            raise refusal

    backend.server.answer = no_secrets
    with pytest.raises(BackendUnavailable):
        await backend.start(order("j1"))
    await backend.undone("j1")
    assert any(asked.startswith(f"GET {PODS}/") for asked in backend.server.asked), "half of it would hold a quota"
    backend.hear("ADDED", pod("j1", "Pending"))
    assert (await backend.seen("j1")).start_broke_off
    backend.hear("DELETED", pod("j1", "Pending"))
    for _ in range(3):
        seen = await backend.seen("j1")
        assert (seen.phase, seen.start_broke_off) == (Phase.STARTING, True), "that its pod was deleted is no loss"
        backend.now += REPORT_GRACE
    backend.server.answer = lambda method, path: None
    backend.server.asked.clear()
    await backend.start(order("j1"))
    assert f"POST {PODS}" in backend.server.asked, "its pod was deleted"
    assert backend.server.asked[-1].endswith("/secrets"), "no launcher runs before the rest is there"
    seen = await backend.seen("j1")
    assert (seen.phase, seen.start_broke_off) == (Phase.STARTING, False), "before its pod is listed"
    backend.hear("ADDED", pod("j1"))
    backend.hear("DELETED", pod("j1"))
    await backend.observe()
    backend.now += REPORT_GRACE
    assert await backend.phases() == {"j1": Phase.LOST}


async def test_a_start_that_broke_off_is_unfinished_until_its_workers_report_or_it_is_removed(backend: Backend) -> None:
    backend.server.answer = away
    for job in ("j1", "j2", "j3"):
        with pytest.raises(BackendUnavailable):
            await backend.start(order(job))
        backend.now += UNREACHABLE_PAUSE
    for job in ("j1", "j2"):
        backend.hear("ADDED", pod(job))
    backend.now += 3600.0
    assert {seen.workload for seen in (await backend.observe()).attempts if seen.start_broke_off} == {"j1", "j2", "j3"}
    backend.report("j2", WorkerStatus(started_at=10.0))
    assert (await backend.seen("j2")).phase is Phase.RUNNING, "it started all the same"
    backend.server.answer = lambda method, path: None
    for job in ("j1", "j3"):
        await backend.kill(job, 1)
    await backend.observe()
    assert [asked for asked in backend.server.asked if asked.startswith("DELETE")] == [f"DELETE {PODS}/makeway-j1-1-0"]
    backend.hear("DELETED", pod("j1"))
    phases = await backend.phases()
    assert (phases["j1"], phases["j2"], "j3" in phases) == (Phase.EXITED, Phase.RUNNING, False)


async def test_pods_that_are_deleted_before_they_run_are_no_loss(backend: Backend) -> None:
    for worker in range(2):
        backend.hear("ADDED", pod("j1", "Pending", worker=worker, of=2))
    assert (await backend.seen("j1")).phase is Phase.STARTING
    for worker in range(2):
        backend.hear("DELETED", pod("j1", "Pending", worker=worker, of=2))
    for _ in range(3):
        seen = await backend.seen("j1")
        assert (seen.phase, seen.start_broke_off) == (Phase.STARTING, True)
        backend.now += REPORT_GRACE
    await backend.start(order("j1"))
    assert not (await backend.seen("j1")).start_broke_off
    backend.hear("ADDED", pod("j1"))
    backend.report("j1", WorkerStatus(started_at=10.0))
    await backend.observe()
    backend.hear("DELETED", pod("j1", "Pending"))
    await backend.observe()
    backend.now += REPORT_GRACE
    assert (await backend.seen("j1")).phase is Phase.LOST, "its worker ran, before its pod said so"


@pytest.mark.parametrize("listed", [True, False])
async def test_a_job_ends_whose_pods_are_deleted_before_they_run(backend: Backend, listed: bool) -> None:
    for job in ("killed", "noticed"):
        backend.hear("ADDED", pod(job, "Pending"))
    await backend.observe()
    if not listed:  # by others
        for job in ("killed", "noticed"):
            backend.hear("DELETED", pod(job, "Pending"))
        assert (await backend.seen("killed")).start_broke_off
    await backend.kill("killed", 1)
    await backend.notice("noticed", 1, Notice("reclaim", 0.0, 30.0, "evict", "devops", "bo"))
    backend.now += (30.0 + REPORT_GRACE) if listed else 0.0
    await backend.observe()
    for job in ("killed", "noticed") if listed else ():
        assert f"DELETE {PODS}/makeway-{job}-1-0" in backend.server.asked
        backend.hear("DELETED", pod(job, "Pending"))
    assert await backend.phases() == {"killed": Phase.EXITED, "noticed": Phase.EXITED}
    backend.begin_term()
    await backend.kill("killed", 1)
    await backend.observe()
    assert (await backend.phases())["killed"] is Phase.EXITED, "in a new term, too"


async def test_a_job_that_requests_a_part_of_a_gpu_leaves_no_token(backend: Backend) -> None:
    with pytest.raises(BackendError, match="can only be requested as a whole"):
        await backend.start(replace(order("j1"), workers=(Place("n0", (0,), (500,)),)))
    assert backend._tokens._of == {}


async def test_pods_that_others_delete_again_and_again_are_made_a_few_times(backend: Backend) -> None:
    for _ in range(MAX_RECREATIONS):
        backend.hear("ADDED", pod("j1", "Pending"))
        backend.hear("DELETED", pod("j1", "Pending"))
        assert (await backend.seen("j1")).start_broke_off
        await backend.start(order("j1"))
        await backend.observe()
    backend.hear("ADDED", pod("j1", "Pending"))
    backend.hear("DELETED", pod("j1", "Pending"))
    await backend.observe()
    backend.now += REPORT_GRACE
    seen = await backend.seen("j1")
    assert (seen.phase, seen.start_broke_off) == (Phase.LOST, False)
    assert seen.never_ran, "the job waits, and is no loss"
    await backend.forget("j1", 1)
    await backend.observe()
    assert backend.attempt_pods.attempt(("j1", 1)) == PodAttempt(), "nothing of it is left"


async def test_a_follower_does_not_remember_how_often_it_made_pods_again(backend: Backend) -> None:
    """The next leader forgets the attempt, of which a follower does not hear."""
    backend.hear("ADDED", pod("j1", "Pending"))
    backend.hear("DELETED", pod("j1", "Pending"))
    assert (await backend.seen("j1")).start_broke_off
    await backend.start(order("j1"))
    assert backend.attempt_pods.attempt(("j1", 1)).recreations == 1
    backend.fence_with(lambda: False)
    await backend.observe()
    assert backend.attempt_pods.attempt(("j1", 1)).recreations == 0


async def test_a_worker_that_reports_runs_although_its_pod_is_still_shown_as_pending(backend: Backend) -> None:
    backend.hear("ADDED", pod("j1", "Pending"))
    assert (await backend.seen("j1")).waiting_reason == "init"
    backend.report("j1", WorkerStatus(started_at=10.0))
    backend.now += 2 * max(MAX_WAIT_SECONDS.values())
    seen = await backend.seen("j1")
    assert (seen.phase, seen.waiting_reason) == (Phase.RUNNING, "")


async def test_an_order_that_takes_too_long_is_given_again_later_and_does_not_begin_anew(backend: Backend) -> None:
    hangs = asyncio.Event()
    create = backend.server.create

    created: list[Object] = []

    async def slow(path: str, body: Object) -> Object:
        created.append(body)
        result = await create(path, body)
        if body["metadata"]["name"].endswith("-1"):
            await hangs.wait()
        return result

    backend.server.create = slow  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await backend.start(order("j1", workers=2))
    with pytest.raises(BackendUnavailable, match="does not answer"):
        await backend.start(order("j2"))
    there = pod("j1", "Pending", of=2)
    there["spec"] |= created[0]["spec"]
    backend.hear("ADDED", there)
    assert (await backend.seen("j1")).start_broke_off
    backend.now += UNREACHABLE_PAUSE
    hangs.set()
    backend.server.asked.clear()
    await backend.start(order("j1", workers=2))
    assert backend.server.asked.count(f"POST {PODS}") == 1, "only the pod that is missing"
    assert await backend.phases() == {"j1": Phase.STARTING}


async def test_a_pod_that_cannot_be_described_is_its_jobs_problem_alone(backend: Backend) -> None:
    document = read_policy(POLICY)
    strange = {"spec": {"containers": [{"name": "worker", "env": [5]}]}}  # of a policy before this was checked
    facts = {**document.profile_facts, "gpu1": replace(document.profile_facts["gpu1"], pod=strange)}
    changed = replace(document, profile_facts=facts)
    backend.follow_policy(lambda: changed)
    with pytest.raises(BackendError, match="with the pod template of its profile"):
        await backend.start(order("j1"))
    assert await backend.phases() == {}


async def test_what_is_refused_leaves_no_pods(backend: Backend) -> None:
    def refused(method: str, path: str) -> None:
        if method == "POST":
            raise ApiStatusError(403, "Forbidden", 'pods "makeway-j1-1-0" is forbidden: an admission rule')

    backend.server.answer = refused
    with pytest.raises(BackendFull, match=r"an administrator has to act: .*an admission rule"):
        await backend.start(order("j1"))
    await backend.undone("j1")
    assert any(asked.startswith(f"GET {PODS}/") for asked in backend.server.asked)


async def test_a_scheduler_that_is_away_gives_no_job_up_and_its_refusal_does(backend: Backend) -> None:
    waits = pod("j1", "Pending")
    waits["spec"] = {}
    backend.hear("ADDED", waits)
    for _ in range(10):
        assert await backend.phases() == {"j1": Phase.STARTING}
        backend.now += MAX_WAIT_SECONDS["unschedulable"]
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    backend.hear("MODIFIED", {**waits, "status": {"phase": "Pending", "conditions": [refused]}})
    for _ in range(3):
        result = await backend.seen("j1")
        backend.now += MAX_WAIT_SECONDS["unschedulable"]
    assert (result.phase, result.never_ran, result.node_lost) == (Phase.LOST, True, False)
    assert result.message == "its pod waited for 1 min: Kubernetes does not place its pod: 0/1 nodes"


@pytest.mark.parametrize("gates", [["kueue.x-k8s.io/admission"], ["a/b", "c/d"], []])
async def test_a_gated_pod_gives_its_gpus_back_in_time_and_names_its_gates(backend: Backend, gates: list[str]) -> None:
    held = pod("j1", "Pending")
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked"}
    held["spec"] = {"schedulingGates": [{"name": name} for name in gates]}
    held["status"] = {"phase": "Pending", "conditions": [condition] if not gates or len(gates) == 1 else []}
    backend.hear("ADDED", held)
    assert (await backend.seen("j1")).waiting_reason == "unschedulable"
    for _ in range(2):
        result = await backend.seen("j1")
        backend.now += MAX_WAIT_SECONDS["unschedulable"]
    result = await backend.seen("j1")
    assert (result.phase, result.never_ran) == (Phase.LOST, True)
    assert (" and ".join(gates) or "SchedulingGated") in result.message
    assert "an administrator has to take its namespace out of what sets" in result.message


async def test_an_attempt_says_what_its_largest_pod_requests_with_all_that_admission_added(backend: Backend) -> None:
    waits = pod("j1", "Pending", worker=0, of=2)
    sidecar = {"name": "mesh", "restartPolicy": "Always", "resources": {"requests": {"cpu": "2"}}}
    small = {"name": "worker", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}
    waits["spec"] = {"containers": [small], "initContainers": [sidecar], "overhead": {"memory": "128Mi"}}
    backend.hear("ADDED", waits)
    backend.hear("ADDED", pod("j1", worker=1, of=2))
    seen = await backend.seen("j1")
    assert (seen.cpu, seen.memory) == (3000, 1024 + 128)


async def test_a_pod_that_its_node_refuses_is_no_loss(backend: Backend) -> None:
    refused = pod("j1", "Failed")
    refused["status"] |= {"reason": "OutOfcpu", "message": "Node didn't have enough resource: cpu"}
    backend.hear("ADDED", refused)
    seen = await backend.seen("j1")
    assert (seen.phase, seen.never_ran, seen.refused) == (Phase.LOST, True, True), "no launcher could report anything"
    assert seen.message == "its node n0 refused its pod (OutOfcpu): Node didn't have enough resource: cpu"


@pytest.mark.parametrize("reason", ["NodeAffinity", "NodeShutdown", "TopologyAffinityError", "Evicted", "Terminated"])
async def test_a_refusal_that_does_not_pass_in_seconds_has_the_job_go_elsewhere(backend: Backend, reason: str) -> None:
    refused = pod("j1", "Failed")
    refused["status"] |= {"reason": reason, "message": "Pod was rejected"}
    backend.hear("ADDED", refused)
    for _ in range(2):
        seen = await backend.seen("j1")
        backend.now += REPORT_GRACE
    assert (seen.phase, seen.never_ran, seen.refused) == (Phase.LOST, True, False)


@pytest.mark.parametrize(
    ("reports", "at_once", "refused"),
    [([], True, True), ([RUNS], True, True), ([RUNS, RUNS], False, False)],
)
async def test_a_gang_of_which_a_node_refuses_one_pod_is_refused_unless_that_worker_ran(
    backend: Backend, reports: list[WorkerStatus], at_once: bool, refused: bool
) -> None:
    """The kubelet says the same of a pod that runs, when it has lost the device plugin at its own start."""
    backend.hear("ADDED", pod("j1", of=2))
    rejected = pod("j1", "Failed", worker=1, of=2)
    rejected["status"] |= {"reason": "UnexpectedAdmissionError", "message": "no healthy devices present"}
    backend.hear("ADDED", rejected)
    backend.report("j1", *reports)
    seen = await backend.seen("j1")
    assert (seen.phase is Phase.LOST) is at_once
    backend.now += REPORT_GRACE
    seen = await backend.seen("j1")
    assert (seen.phase, seen.refused, seen.never_ran, seen.worker) == (Phase.LOST, refused, refused, 1)


@pytest.mark.parametrize(("ends", "never_ran"), [({}, True), ({"ended_at": 20.0, "exit_code": 1}, False)])
async def test_a_gang_of_which_one_pod_is_not_placed_never_ran_unless_a_worker_ended(
    backend: Backend, ends: dict[str, Any], never_ran: bool
) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    waits = pod("j1", "Pending", worker=1, of=2)
    backend.hear("ADDED", pod("j1", worker=0, of=2))
    backend.hear("ADDED", {**waits, "spec": {}, "status": {"phase": "Pending", "conditions": [condition]}})
    backend.report("j1", replace(RUNS, **ends))
    for _ in range(3):
        seen = await backend.seen("j1")
        backend.now += MAX_WAIT_SECONDS["unschedulable"]
    assert (seen.phase, seen.never_ran, seen.worker) == (Phase.LOST, never_ran, 1)


async def test_a_gang_that_loses_a_pod_before_it_runs_is_started_anew(backend: Backend) -> None:
    for worker in range(2):
        backend.hear("ADDED", pod("j1", "Pending", worker=worker, of=2))
    await backend.observe()
    backend.hear("DELETED", pod("j1", "Pending", of=2))
    backend.hear("MODIFIED", pod("j1", worker=1, of=2))
    for _ in range(2):
        seen = await backend.seen("j1")
        backend.now += MAX_WAIT_SECONDS["incomplete"]
    assert (seen.phase, seen.start_broke_off) == (Phase.STARTING, True)


async def test_a_killed_worker_is_explained_by_the_end_of_its_pod(backend: Backend) -> None:
    killed = replace(RUNS, ended_at=20.0, exit_code=-9, message="killed by SIGKILL (out of memory?)")
    for job in ("j1", "j2", "j3"):
        backend.hear("ADDED", pod(job))
        backend.report(job, killed)
        seen = await backend.seen(job)
        assert (seen.phase, seen.exit_code) == (Phase.RUNNING, None), "its pod ends in a moment"
    over = pod("j1", "Failed")
    over["spec"]["containers"] = [{"name": "worker", "resources": {"limits": {"memory": "64Mi"}}}]
    state = {"terminated": {"exitCode": 1, "reason": "OOMKilled"}}
    over["status"]["containerStatuses"] = [{"name": "worker", "state": state}]
    backend.hear("MODIFIED", over)
    backend.hear("MODIFIED", pod("j2", "Failed"))
    out_of_memory = (
        "it used more memory than the 64 MiB that its container may use: choose a profile with more memory, or use less"
    )
    for job, says in (("j1", out_of_memory), ("j2", killed.message)):
        backend.report(job, killed)
        seen = await backend.seen(job)
        assert (seen.phase, seen.exit_code, seen.message) == (Phase.EXITED, -9, says)
    backend.now += REPORT_GRACE
    backend.report("j3", killed)
    seen = await backend.seen("j3")
    assert (seen.phase, seen.message) == (Phase.EXITED, killed.message), "its pod does not end"


STOPPED = replace(RUNS, notice_received=True, ended_at=20.0, exit_code=-15, message="killed by SIGTERM")


@pytest.mark.parametrize("report", [STOPPED, SAVED], ids=["killed", "saved"])
async def test_a_stop_for_more_disk_than_it_may_use_is_the_fault_of_the_job(
    backend: Backend, report: WorkerStatus
) -> None:
    backend.hear("ADDED", pod("j1"))
    backend.report("j1", report)
    assert (await backend.seen("j1")).phase is Phase.RUNNING, "its pod says in a moment why it was stopped"
    evicted = pod("j1", "Failed")
    evicted["status"] |= {
        "reason": "Evicted",
        "message": 'Usage of EmptyDir volume "makeway" exceeds the limit "1Gi". ',
    }
    backend.hear("MODIFIED", evicted)
    seen = await backend.seen("j1")
    assert (seen.phase, seen.exit_code, seen.notice_received) == (Phase.EXITED, 137, False)
    assert "wrote more to the disk" in seen.message


async def test_a_stop_by_others_and_what_was_done_before_it_stay_what_they_are(backend: Backend) -> None:
    for job in ("deleted", "hangs"):
        backend.hear("ADDED", pod(job))
        backend.report(job, SAVED)
        await backend.observe()
    backend.hear("DELETED", pod("deleted"))
    backend.report("deleted", SAVED)
    seen = await backend.seen("deleted")
    assert (seen.phase, seen.exit_code, seen.acknowledged) == (Phase.EXITED, 75, True)
    backend.now += REPORT_GRACE
    backend.report("hangs", SAVED)
    assert (await backend.seen("hangs")).phase is Phase.EXITED, "its pod does not end"
    backend.hear("ADDED", pod("done"))
    backend.report("done", replace(RUNS, notice_received=True, ended_at=20.0, exit_code=0, completed=True))
    assert (await backend.seen("done")).phase is Phase.EXITED, "nothing that its pod says would change that"


@pytest.mark.parametrize("resource", ["memory", "ephemeral-storage"])
async def test_a_job_that_exhausts_node_after_node_ends_and_one_that_is_evicted_once_returns_to_the_queue(
    backend: Backend, resource: str
) -> None:
    backend.hear("ADDED", pod("j1"))
    backend.report("j1", RUNS)
    await backend.observe()
    evicted = pod("j1", "Failed")
    evicted["status"] |= {
        "reason": "Evicted",
        "message": f"The node was low on resource: {resource}. Threshold quantity: 100Mi, available: 91244Ki. "
        f"Container worker was using 62914560Ki, request is 0, has larger consumption of {resource}. ",
        "containerStatuses": [{"name": "worker", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}],
    }
    backend.hear("MODIFIED", evicted)
    await backend.observe()
    backend.now += REPORT_GRACE
    seen = await backend.seen("j1")
    assert (seen.phase, seen.exit_code, seen.node_lost, seen.never_ran) == (Phase.LOST, None, False, False)
    job = initial_record(NewWorkload("j1", "job", "rnd", "gpu1", "ana", name="x"), 0.0)
    for times in range(1, 4):
        place = Place(f"n{times}", (0,), (1000,))
        job = job._replace(state="running", attempt=1, started_at=10.0, placement=(place,))
        (change,) = reconcile({"j1": job}, Observation((), (seen,)), now=100.0, max_infra_failures=2).changes
        job = job._replace(**change.fields)  # type: ignore[arg-type]
        assert (job.state, job.infra_failures) == (("pending", times) if times < 3 else ("failed", 2))
        assert f"Container worker was using 62914560Ki, request is 0, has larger consumption of {resource}" in (
            job.reason_message
        )


async def test_a_worker_that_ends_without_a_report_is_over_though_its_sidecar_runs(backend: Backend) -> None:
    backend.hear("ADDED", pod("j1"))
    backend.report("j1", RUNS)
    await backend.observe()
    torn = pod("j1")
    states = {"worker": {"terminated": {"exitCode": 1, "reason": "Error"}}, "beside": {"running": {}}}
    torn["status"]["containerStatuses"] = [{"name": name, "state": state} for name, state in states.items()]
    backend.hear("MODIFIED", torn)
    for _ in range(2):
        seen = await backend.seen("j1")
        backend.now += REPORT_GRACE
    assert (seen.phase, seen.message) == (Phase.LOST, "its launcher ended with exit code 1 without a report")


def fetching(reason: str, message: str, site_image: bool = False) -> Object:
    """Return a pod whose image is not there yet."""
    waiting = {"reason": reason, "message": message}
    result = pod("j1", "Pending")
    result["metadata"]["annotations"] = {} if site_image else {"makeway/own-image": "true"}
    result["status"]["containerStatuses"] = [{"name": "worker", "image": "notebook:1", "state": {"waiting": waiting}}]
    return result


async def test_a_pod_that_a_restored_database_does_not_know_is_not_adopted(backend: Backend) -> None:
    labels = {"makeway/instance": "here"}
    result = {
        "metadata": {"name": "older", "uid": "old", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    }

    async def get(path: str, query: object = None) -> Object:
        return result

    def exists(method: str, path: str) -> None:
        if method == "POST" and path == PODS:
            raise ApiStatusError(409, "AlreadyExists", "exists")

    backend.server.get = get  # type: ignore[method-assign]
    backend.server.answer = exists
    await backend.start(replace(order("j1"), admitted_at=1767225600.0))
    assert not [asked for asked in backend.server.asked if asked.startswith("DELETE")], "of this very attempt"
    with pytest.raises(BackendUnavailable, match="is from an earlier time"):
        await backend.start(replace(order("j2"), admitted_at=1767225600.0 + 86_400.0))
    assert f"DELETE {PODS}/makeway-j2-1-0" in backend.server.asked


async def test_a_pod_that_goes_while_its_start_is_repeated_is_no_administrators_task(backend: Backend) -> None:
    async def get(path: str, query: object = None) -> Object:
        raise ApiStatusError(404, "NotFound", 'pods "makeway-j1-1-0" not found')

    def exists(method: str, path: str) -> None:
        if method == "POST" and path == PODS:
            raise ApiStatusError(409, "AlreadyExists", "exists")

    backend.server.get = get  # type: ignore[method-assign]
    backend.server.answer = exists
    with pytest.raises(BackendUnavailable, match="makeway-j1-1-0 was there, and was just removed") as refused:
        await backend.start(order("j1"))
    assert "administrator" not in str(refused.value)


async def test_a_registry_that_does_not_answer_keeps_its_jobs_waiting(backend: Backend) -> None:
    for _ in range(60):
        backend.hear("MODIFIED", fetching("ErrImagePull", "dial tcp 10.0.0.9:443: i/o timeout"))
        seen = await backend.seen("j1")
        assert (seen.phase, seen.message) == (
            Phase.STARTING,
            "its image cannot be pulled: dial tcp 10.0.0.9:443: i/o timeout",
        )
        backend.now += 300.0
        backend.hear("MODIFIED", fetching("ImagePullBackOff", 'Back-off pulling image "x"'))
        assert (await backend.seen("j1")).phase is Phase.STARTING


@pytest.mark.parametrize("site_image", [False, True])
async def test_a_job_whose_image_does_not_exist_fails_soon_unless_the_site_chose_it(
    backend: Backend, site_image: bool
) -> None:
    missing = "code = NotFound desc = x: not found"
    backend.hear("ADDED", fetching("ErrImagePull", missing, site_image))
    assert (await backend.seen("j1")).phase is Phase.STARTING, "it may just be pushed"
    for _ in range(3):
        backend.now += MAX_WAIT_SECONDS["no_image"] / 2
        backend.hear("MODIFIED", fetching("ImagePullBackOff", 'Back-off pulling image "x"', site_image))
        told = await backend.seen("j1")
        assert missing in told.message or told.message == "", "between two tries the cause of the last one stays"
        backend.hear("MODIFIED", fetching("ErrImagePull", missing, site_image))
        seen = await backend.seen("j1")
    if site_image:
        assert (seen.phase, seen.never_ran) == (Phase.LOST, True)
        assert "image of jobs notebook:1 cannot be pulled, and an administrator has to change it" in seen.message
    else:
        assert (seen.phase, seen.exit_code) == (Phase.EXITED, 127)
        assert seen.message == f"its image cannot be pulled: {missing}"


def of_gang(worker: int, waits: str, message: str = "", ready: str = "True") -> Object:
    """Return a pod of a gang of two whose own image is not there, or that waits for what `ready` leaves open."""
    result = pod("j1", "Pending", worker=worker, of=2)
    result["metadata"]["annotations"] = {"makeway/own-image": "true"}
    state = {"waiting": {"reason": waits, "message": message}}
    result["status"]["containerStatuses"] = [{"name": "worker", "image": "notebook:1", "state": state}]
    result["status"]["conditions"] = [{"type": "PodReadyToStartContainers", "status": ready}]
    return result


def unplaced(worker: int) -> Object:
    """Return a pod of a gang of two for which no node has room."""
    result = pod("j1", "Pending", worker=worker, of=2)
    del result["spec"]["nodeName"]
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node has room"}
    result["status"]["conditions"] = [refused]
    return result


@pytest.mark.parametrize("blocked", [0, 1])
async def test_the_worker_of_a_gang_that_may_wait_the_shortest_is_the_one_that_counts(
    backend: Backend, blocked: int
) -> None:
    backend.hear("ADDED", of_gang(1 - blocked, "ContainerCreating"))
    assert (await backend.seen("j1")).message == "its image is being pulled"
    backend.now += MAX_WAIT_SECONDS["unschedulable"] * 2
    backend.hear("ADDED", unplaced(blocked))
    message = "Kubernetes does not place its pod: no node has room"
    assert (await backend.seen("j1")).message == message
    backend.now += MAX_WAIT_SECONDS["unschedulable"] + REPORT_GRACE
    await backend.observe()
    backend.now += REPORT_GRACE
    seen = await backend.seen("j1")
    assert (seen.phase, seen.never_ran, seen.worker) == (Phase.LOST, True, blocked)
    assert message in seen.message


async def test_a_worker_of_a_gang_without_its_token_is_noticed_while_another_pulls_its_image(backend: Backend) -> None:
    backend.hear("ADDED", of_gang(0, "ContainerCreating"))
    waits = of_gang(1, "CreateContainerConfigError", 'secret "makeway-tokens-1" not found')
    source = {"secretKeyRef": {"name": "makeway-tokens-1", "key": "makeway-j1-1-1"}}
    env = [{"name": TOKEN, "valueFrom": source}]
    waits["spec"]["containers"] = [{"name": "worker", "env": env}]
    backend.hear("ADDED", waits)
    for _ in range(2):
        seen = await backend.seen("j1")
        backend.now += MAX_WAIT_SECONDS["token"]
    assert (seen.phase, seen.start_broke_off) == (Phase.STARTING, True)


async def test_the_clock_of_a_gang_goes_on_between_two_tries_to_pull_an_image(backend: Backend) -> None:
    missing = "code = NotFound desc = x: not found"
    backend.hear("ADDED", of_gang(1, "ContainerCreating", ready="False"))
    for _ in range(5):
        backend.hear("MODIFIED", of_gang(0, "ErrImagePull", missing))
        await backend.observe()
        backend.now += 5.0
        backend.hear("MODIFIED", of_gang(0, "ImagePullBackOff", 'Back-off pulling image "x"'))
        seen = await backend.seen("j1")
        backend.now += MAX_WAIT_SECONDS["no_image"] / 3
    assert (seen.phase, seen.exit_code, seen.message) == (Phase.EXITED, 127, f"its image cannot be pulled: {missing}")


async def test_a_worker_that_reports_does_not_wait_though_its_pod_is_shown_as_pending(backend: Backend) -> None:
    backend.hear("ADDED", of_gang(0, "ContainerCreating"))
    backend.hear("ADDED", of_gang(1, "ContainerCreating", ready="False"))
    result = {("j1", 1): {1: RUNS}}
    backend.channel.worker_statuses = lambda: result  # type: ignore[method-assign]
    backend.channel.changed = lambda: set(result)  # type: ignore[method-assign]
    for _ in range(2):
        assert (await backend.seen("j1")).message == "its image is being pulled"
        backend.now += MAX_WAIT_SECONDS["volumes"]


async def test_the_others_of_a_gang_save_as_long_as_they_may_after_one_pod_was_drained(backend: Backend) -> None:
    for worker in range(2):
        backend.hear("ADDED", pod("j1", worker=worker, of=2))
    backend.report("j1", RUNS, RUNS)
    assert (await backend.seen("j1")).phase is Phase.RUNNING
    backend.hear("MODIFIED", pod("j1", of=2, drained=True))
    backend.report("j1", SAVED, replace(RUNS, notice_received=True))
    backend.hear("DELETED", pod("j1", "Failed", of=2, drained=True))
    for _ in range(20):
        backend.now += 30.0
        assert (await backend.seen("j1")).phase is Phase.STOPPING
    backend.report("j1", SAVED, SAVED)
    seen = await backend.seen("j1")
    assert (seen.phase, seen.node_lost) == (Phase.EXITED, True), "and that one was drained does not count"
    assert seen.evicted, "it was preempted"


async def test_a_gang_whose_pod_ends_without_a_report_is_over_at_once(backend: Backend) -> None:
    for job in ("j1", "j2"):
        for worker in range(2):
            backend.hear("ADDED", pod(job, worker=worker, of=2))
    backend.report("j1", RUNS, RUNS)
    await backend.observe()
    killed = pod("j1", "Failed", worker=1, of=2)
    killed["status"]["containerStatuses"] = [
        {"name": "worker", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    ]
    backend.hear("MODIFIED", killed)
    assert (await backend.seen("j1")).phase is Phase.RUNNING, "its report may be on its way"
    backend.now += REPORT_GRACE
    seen = await backend.seen("j1")
    assert (seen.phase, seen.exit_code) == (Phase.EXITED, 137)
    assert seen.message == "worker 1: its node ran out of memory"


async def test_a_report_that_comes_after_the_end_of_its_pod_counts(backend: Backend) -> None:
    for worker in range(2):
        backend.hear("ADDED", pod("j1", worker=worker, of=2))
    backend.report("j1", RUNS, RUNS)
    await backend.observe()
    backend.hear("MODIFIED", pod("j1", "Succeeded", worker=1, of=2))
    await backend.observe()
    backend.report("j1", RUNS, replace(RUNS, ended_at=20.0, exit_code=0))
    backend.now += REPORT_GRACE
    assert (await backend.seen("j1")).phase is Phase.RUNNING


async def test_a_gang_whose_pod_is_deleted_without_a_report_is_lost(backend: Backend) -> None:
    for worker in range(2):
        backend.hear("ADDED", pod("j1", worker=worker, of=2))
    backend.report("j1", RUNS, RUNS)
    await backend.observe()
    backend.hear("DELETED", pod("j1", of=2))
    for _ in range(4):
        backend.now += MAX_WAIT_SECONDS["incomplete"]
        seen = await backend.seen("j1")
    assert (seen.phase, seen.node_lost) == (Phase.LOST, False)


async def test_a_silent_api_server_is_noticed_and_taken_up_again_at_once(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    server = ApiServer()
    backend = Backend(server, store, HealthCheckTiming(interval=0.01))
    await backend.open()
    assert can_lead_with(backend)()

    def away(method: str, path: str) -> None:
        raise ApiUnreachable("the Kubernetes API server does not answer")

    try:
        server.answer = away
        async with asyncio.timeout(60):
            while can_lead_with(backend)():  # noqa: ASYNC110 - a matter of time
                await asyncio.sleep(0.01)
        watches = backend.pods.counts.watches
        with pytest.raises(BackendUnavailable):
            await backend.start(order("j1"))
        server.answer = lambda method, path: None
        async with asyncio.timeout(60):
            while backend.pods.counts.watches == watches or backend.problem or not can_lead_with(backend)():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await backend.start(order("j1"))
    finally:
        await backend.close(stop_jobs=False)
        store.close()


async def test_an_order_does_not_hang_longer_than_the_silence_is_unnoticed(tmp_path: Path) -> None:
    """A leader hands over between two cycles, and a cycle waits for its orders."""
    silent, asked = asyncio.Event(), list[asyncio.StreamWriter]()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        await silent.wait()
        writer.close()

    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = ApiClient(Connection(f"http://127.0.0.1:{port}", ssl.create_default_context(), namespace="jobs"))
    backend = KubernetesBackend(client, SETTINGS, health_check_timing=HealthCheckTiming(interval=0.01, timeout=0.1))
    backend.connect(WorkerChannel(store, AttemptTokens(b"secret" * 8)))
    backend.follow_policy(lambda: read_policy(POLICY))
    starting = asyncio.create_task(backend.start(order("j1")))
    try:
        async with asyncio.timeout(60):
            while not asked:  # noqa: ASYNC110 - a matter of time
                await asyncio.sleep(0.01)
        pulse = asyncio.create_task(backend._health_check.run())
        with pytest.raises(BackendUnavailable, match="does not answer"):
            async with asyncio.timeout(REQUEST_SECONDS / 2):
                await starting
        pulse.cancel()
        await asyncio.gather(pulse, return_exceptions=True)  # it closes its connection
    finally:
        silent.set()
        await client.close()
        server.close()
        await asyncio.gather(*(writer.wait_closed() for writer in asked), return_exceptions=True)
        store.close()


async def falls_silent_and_answers_again(server: ApiServer) -> None:
    """Request signs of life until there were none, and then some again; nothing else may be heard."""
    heard = list[bool]()
    task = asyncio.create_task(HealthCheck(server, heard.append, HealthCheckTiming(interval=0.0)).run())
    async with asyncio.timeout(60):
        while heard != [False, True]:  # noqa: ASYNC110 - a matter of time
            await asyncio.sleep(0)
    task.cancel()


async def test_signs_of_life_go_on_after_an_unexpected_error() -> None:
    server = ApiServer()
    broken = [
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        for _ in range(HEALTH_CHECK_TIMING.failures + 1)
    ]

    def answer(method: str, path: str) -> None:
        if broken:
            raise broken.pop()

    server.answer = answer
    await falls_silent_and_answers_again(server)


async def test_a_refusal_is_a_sign_of_life_and_a_failure_is_none() -> None:
    server = ApiServer()
    answers = iter([403, 503, 404, 502, 503, 200])

    def answer(method: str, path: str) -> None:
        if (status := next(answers, 200)) != 200:
            raise ApiStatusError(status, "", "")

    server.answer = answer
    await falls_silent_and_answers_again(server)
    assert len(server.asked) >= 6


async def test_a_launcher_that_reaches_no_service_is_named_with_the_address(backend: Backend) -> None:
    """One of the gang does: whatever is in the way is on the way of the other one."""
    for worker in range(2):
        backend.hear("ADDED", pod("j1", worker=worker, of=2))
    backend.report("j1", WorkerStatus(started_at=1.0))
    assert (await backend.seen("j1")).phase is Phase.STARTING
    backend.now += backend.report_within
    seen = await backend.seen("j1")
    assert (seen.phase, seen.node_lost) == (Phase.LOST, False)
    assert seen.message == (
        "the launcher of worker 1 on n0 did not reach http://10.0.0.1:1/services/makeway within 5 min: check "
        "MAKEWAY_WORKER_URL and the network policies"
    )


async def test_a_folder_of_checkpoints_that_the_kubelet_cannot_make_is_the_fault_of_the_volume(
    backend: Backend,
) -> None:
    message = 'failed to create subPath directory for volumeMount "checkpoints" of container "worker"'
    waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": message}}
    waits = pod("j1", "Pending")
    waits["status"] = {"phase": "Pending", "containerStatuses": [{"name": "worker", "state": waiting}]}
    backend.hear("ADDED", waits)
    result = await backend.seen("j1")
    assert (result.phase, result.waiting_reason) == (Phase.STARTING, "checkpoint_storage")
    for _ in range(2):
        backend.now += MAX_WAIT_SECONDS["checkpoint_storage"]
        result = await backend.seen("j1")
    assert (result.phase, result.never_ran, result.storage_failed) == (Phase.LOST, True, True)
    assert "an administrator has to act" in result.message
    assert "may write" not in result.message, "the volume may be away, or its mount on this node hang"


async def test_a_folder_of_checkpoints_that_no_user_may_make_is_a_matter_of_rights(backend: Backend) -> None:
    message = (
        'failed to create subPath directory for volumeMount "checkpoints" of container "worker": permission denied'
    )
    waits = pod("j1", "Pending")
    waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": message}}
    waits["status"] = {"phase": "Pending", "containerStatuses": [{"name": "worker", "state": waiting}]}
    backend.hear("ADDED", waits)
    assert "neither the user of jobs nor root may write" in (await backend.seen("j1")).message


async def test_a_gang_whose_machines_are_gone_after_a_worker_could_not_write_never_ran(backend: Backend) -> None:
    for worker in range(2):
        backend.hear("ADDED", pod("j1", worker=worker, of=2))
    backend.report("j1", WorkerStatus(ended_at=5.0, exit_code=73, storage_failed=True, message="full"))
    assert (await backend.seen("j1")).phase is Phase.STARTING
    for worker in range(2):
        backend.hear("DELETED", pod("j1", worker=worker, of=2))
    await backend.seen("j1")
    backend.now += 3600.0
    result = await backend.seen("j1")
    assert (result.phase, result.storage_failed, result.message) == (Phase.LOST, True, "full")
