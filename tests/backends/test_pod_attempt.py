"""The phase of an attempt follows from its record, its pods, its reports and the time: one outcome for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makeway_quota.backends.kubernetes.attempts.pod_attempt import (
    MAX_RECREATIONS,
    AttemptPhase,
    ClusterConditions,
    PodAttempt,
    step,
)
from makeway_quota.backends.kubernetes.attempts.pod_states import NO_CONFIG, JobPod
from makeway_quota.backends.kubernetes.attempts.pod_waits import MAX_WAIT_SECONDS
from makeway_quota.backends.remote.workers import WorkerStatus

KEY = ("j1", 1)
NODES = {"n0": True, "n1": True, "down": False}
CLUSTER = ClusterConditions(NODES)
BEGIN, LATER = 1000.0, 1000.0 + max(MAX_WAIT_SECONDS.values())
P = AttemptPhase


def pod(worker: int = 0, phase: str = "Running", node: str = "n0", of: int = 2, **more: object) -> JobPod:
    """Return a pod of a gang of two."""
    began = phase == "Running"
    made = JobPod(f"j1-1-{worker}", f"uid-{worker}", KEY, worker, of, node, 0.0, phase, began=began)
    return replace(made, **more)  # type: ignore[arg-type]


WAITS = [pod(0), pod(1, "Pending", "", waiting="Unschedulable", message="too little room")]
RUNS = [pod(0), pod(1)]
TORN = [pod(0), pod(1, "Failed", exit_code=3)]
OVER = [pod(0, "Failed", exit_code=0), pod(1, "Failed", exit_code=3)]
NO_TOKEN = [pod(n, "Pending", waiting=NO_CONFIG, message='secret "tok" not found', tokens="tok") for n in range(2)]
HALF = [pod(0, "Pending", waiting="", ready="True")]
REPORTS = {0: WorkerStatus(started_at=1.0)}
ENDED = {1: WorkerStatus(started_at=1.0, ended_at=2.0, exit_code=0)}

OUTCOMES: list[tuple[str, list[JobPod], dict[int, WorkerStatus], float, AttemptPhase]] = [
    ("no pods", [], {}, BEGIN, P.UNSEEN),
    ("no pods, and a worker reports", [], REPORTS, BEGIN, P.UNSEEN),
    ("all run", RUNS, {}, BEGIN, P.RUNNING),
    ("all run, and one reports", RUNS, REPORTS, LATER, P.RUNNING),
    ("one waits", WAITS, {}, BEGIN, P.WAITING),
    ("one waits for too long", WAITS, {}, LATER, P.EXPIRED),
    ("one waits that reports", WAITS, {1: WorkerStatus()}, LATER, P.RUNNING),
    ("the token is missing", NO_TOKEN, {}, BEGIN, P.WAITING),
    ("the token is missing for too long", NO_TOKEN, {}, LATER, P.UNRECOVERABLE),
    ("the token is missing for too long, and one reports", NO_TOKEN, REPORTS, LATER, P.EXPIRED),
    ("half of the gang is missing for too long", RUNS[:1], {}, LATER, P.UNRECOVERABLE),
    ("half of the gang is missing for too long, and one reports", RUNS[:1], REPORTS, LATER, P.EXPIRED),
    ("the missing half has reported its end", RUNS[:1], ENDED, LATER, P.RUNNING),
    ("one ended without a report", TORN, {}, BEGIN, P.PARTLY_ENDED),
    ("one ended with a report", TORN, ENDED, BEGIN, P.RUNNING),
    ("all ended", OVER, {}, BEGIN, P.ENDED),
]
"""What is observed of an attempt that waits for the same since BEGIN, and its phase then"""
AS_ITS_PODS = [phase for phase in P if phase not in (P.BROKEN_OFF, P.CREATED, P.FORGOTTEN)]
"""Phases that do not outlive what was observed: the next one is that of the pods alone"""


def observed(phase: AttemptPhase, pods: list[JobPod], reports: dict[int, WorkerStatus]) -> PodAttempt:
    """Return an attempt that has been observed so since BEGIN, and is in this phase all the same."""
    seen = step(PodAttempt(), pods, reports, BEGIN, CLUSTER)
    return replace(seen, phase=phase, workers=2)


@pytest.mark.parametrize(
    ("pods", "reports", "now", "expected"), [row[1:] for row in OUTCOMES], ids=[row[0] for row in OUTCOMES]
)
def test_every_phase_has_one_outcome_for_every_observation(
    pods: list[JobPod], reports: dict[int, WorkerStatus], now: float, expected: AttemptPhase
) -> None:
    outcomes = {phase: step(observed(phase, pods, reports), pods, reports, now, CLUSTER).phase for phase in P}
    assert {outcomes[phase] for phase in AS_ITS_PODS} == {expected}
    assert outcomes[P.BROKEN_OFF] is (expected if reports else P.BROKEN_OFF), "a worker that reports has started"
    assert outcomes[P.CREATED] is (expected if pods else P.CREATED), "its pods are listed in a moment"
    assert outcomes[P.FORGOTTEN] is (P.FORGOTTEN if pods else P.UNSEEN), "until its last pod is gone"


@pytest.mark.parametrize("phase", [phase for phase in P if phase is not P.FORGOTTEN])
@pytest.mark.parametrize("recreations", [0, MAX_RECREATIONS])
@pytest.mark.parametrize(
    ("last", "reports", "anew"),
    [
        (pod(phase="Pending"), {}, True),
        (pod(phase="Pending", node=""), {}, True),
        (pod(phase="Pending"), REPORTS, False),
        (pod(phase="Pending", node="down"), {}, False),
        (pod(phase="Pending", node="gone"), {}, False),
        (pod(phase="Pending", disruption="DeletionByTaintManager"), {}, False),
        (pod(), {}, False),
    ],
    ids=["waited", "unplaced", "reported", "node down", "node gone", "drained", "ran"],
)
def test_pods_that_others_delete_are_made_again_only_where_nothing_of_them_ran(
    phase: AttemptPhase, recreations: int, last: JobPod, reports: dict[int, WorkerStatus], anew: bool
) -> None:
    before = replace(PodAttempt(phase, recreations=recreations).pod_gone(last, BEGIN))
    after = step(before, [], reports, LATER, CLUSTER)
    assert after.hosts is not None
    if phase is P.BROKEN_OFF and not reports:
        assert after.hosts.start_broke_off, "its start has to be repeated anyway"
    else:
        assert after.phase is P.DELETED
        assert after.hosts.start_broke_off is (anew and recreations < MAX_RECREATIONS)
        assert after.hosts.present is after.hosts.start_broke_off


def pods_of_a_gang() -> st.SearchStrategy[list[JobPod]]:
    """Return pods of up to two workers, in any state."""
    states = st.builds(
        pod,
        phase=st.sampled_from(["Pending", "Running", "Failed", "Succeeded"]),
        node=st.sampled_from(["", "n0", "down", "gone"]),
        waiting=st.sampled_from(["", "Unschedulable", "ErrImagePull", NO_CONFIG]),
        message=st.sampled_from(["", "not found", 'secret "tok" not found']),
        tokens=st.just("tok"),
        reason=st.sampled_from(["", "Evicted", "OOMKilled", "NodeLost"]),
        exit_code=st.sampled_from([None, 0, 1, 137]),
        disruption=st.sampled_from(["", "EvictionByEvictionAPI"]),
    )
    return st.lists(states, max_size=2).map(
        lambda found: [replace(one, worker=n, name=f"j1-1-{n}", uid=f"uid-{n}") for n, one in enumerate(found)]
    )


REPORTED = st.dictionaries(st.integers(0, 1), st.builds(WorkerStatus, exit_code=st.sampled_from([None, 0, 1])))
RECORDS = st.builds(
    PodAttempt,
    phase=st.sampled_from(P),
    workers=st.just(2),
    recreations=st.integers(0, MAX_RECREATIONS),
    waits_for=st.sampled_from(["", *MAX_WAIT_SECONDS]),
    waits_since=st.floats(0, LATER),
    last=pods_of_a_gang().map(lambda pods: {one.name: one for one in pods}),
)


@given(RECORDS, pods_of_a_gang(), REPORTED, st.floats(BEGIN, 2 * LATER))
def test_a_step_is_complete_and_changes_nothing_twice(
    before: PodAttempt, pods: list[JobPod], reports: dict[int, WorkerStatus], now: float
) -> None:
    after = step(before, pods, reports, now, CLUSTER)
    assert step(after, pods, reports, now, CLUSTER) == after, "the same observation again is no news"
    machines = after.hosts
    assert (machines is None) is (after.phase in (P.UNSEEN, P.FORGOTTEN))
    if machines is None:
        return
    assert not (machines.start_broke_off and reports), "what reports is not started a second time"
    assert bool(machines.waiting_reason) is (after.phase in (P.WAITING, P.UNRECOVERABLE))
    if pods and after.phase is not P.BROKEN_OFF:
        assert bool(after.waits_for) is (after.phase in (P.WAITING, P.UNRECOVERABLE, P.EXPIRED))
    if after.phase in (P.EXPIRED, P.PARTLY_ENDED, P.ENDED):
        assert not machines.present
    if after.phase in (P.BROKEN_OFF, P.UNRECOVERABLE):
        assert machines.start_broke_off
    if after.phase in (P.WAITING, P.RUNNING, P.CREATED):
        assert machines.present
        assert not machines.start_broke_off
