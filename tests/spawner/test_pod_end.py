"""When a pod has ended, and for how long it has been deleted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from makeway_spawner import pod_end

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp()


def pod(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    return {"metadata": metadata, "status": status or {}}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory"),
        (
            {"containerStatuses": [{"name": "notebook", "state": {"terminated": {"reason": "Error", "exitCode": 1}}}]},
            "Error: exit code 1",
        ),
        (
            {
                "reason": "NodeLost",
                "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByX", "message": "y"}],
            },
            "DeletionByX: y",
        ),
        ({"conditions": [{"type": "DisruptionTarget", "status": "False", "reason": "x"}]}, ""),
        ({}, ""),
    ],
)
def test_the_end_is_described_in_kubernetes_words(status: dict[str, Any], words: str) -> None:
    assert pod_end.cause(pod(status)) == words


def deleted(reason: str = "", message: str = "") -> dict[str, Any]:
    target = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    return pod({"phase": "Failed", "conditions": [target] if reason else []}, deletionTimestamp="now")


def exited(reason: str, code: int, memory: str = "") -> dict[str, Any]:
    state = {"terminated": {"reason": reason, "exitCode": code}}
    return pod({"phase": "Failed", "containerStatuses": [{"name": "notebook", "state": state}]}) | limited(memory)


def limited(memory: str) -> dict[str, Any]:
    other = {"name": "other", "resources": {"limits": {"memory": "1Gi"}}}
    return {"spec": {"containers": [other, {"name": "notebook", "resources": {"limits": {"memory": memory}}}]}}


@pytest.mark.parametrize(
    ("seen", "gone", "words"),
    [
        (None, True, "Its pod is gone, and Kubernetes does not say why."),
        (pod({"phase": "Running"}), True, "Its pod was deleted in Kubernetes, not by Makeway."),
        (deleted(), True, "Its pod was deleted in Kubernetes, not by Makeway."),
        (
            deleted("EvictionByEvictionAPI", "Eviction API: evicting"),
            True,
            "Its pod was evicted, as before maintenance of its node (EvictionByEvictionAPI: Eviction API: evicting).",
        ),
        (
            pod({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory. "}),
            False,
            "Its node evicted its pod (Evicted: The node was low on resource: memory).",
        ),
        (
            exited("OOMKilled", 137, memory="16Gi"),
            False,
            "It used more memory than the 16 GiB that it may use (OOMKilled: exit code 137). Choose a profile with "
            "more memory, or hold less data in memory at a time.",
        ),
        (
            exited("OOMKilled", 137),
            False,
            "Its node ran out of memory (OOMKilled: exit code 137). Start it again with a profile that sets a "
            "memory limit, or on another node.",
        ),
        (
            pod({"phase": "Failed", "reason": "Terminated", "message": "Pod was terminated in response to shutdown."}),
            False,
            "Its node was shut down (Terminated: Pod was terminated in response to shutdown).",
        ),
        (
            pod({"phase": "Failed", "reason": "Preempting", "message": "Preempted to admit critical pod"}),
            False,
            "Its node ended its pod for one that the cluster needs (Preempting: Preempted to admit critical pod).",
        ),
        (exited("Error", 137), True, "Its server ended by itself (Error: exit code 137)."),
        (pod({"phase": "Failed"}), False, "Its server ended by itself."),
    ],
)
def test_the_end_is_told_to_the_user(seen: dict[str, Any] | None, gone: bool, words: str) -> None:
    assert pod_end.end_message(seen, gone) == words


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("536870912", "512 MiB"),
        ("1500M", "1.397 GiB"),
        ("0.5Gi", "512 MiB"),
        ("2Ti", "2 TiB"),
        ("1e9", "1e9"),
        ("", ""),
    ],
)
def test_the_limit_of_memory_is_read_from_the_pod(written: str, read: str) -> None:
    assert pod_end.memory_limit(limited(written)) == read


def test_only_a_failed_or_succeeded_pod_has_ended() -> None:
    phases = ("Pending", "Running", "Succeeded", "Failed")
    assert [phase for phase in phases if pod_end.has_ended(pod({"phase": phase}))] == ["Succeeded", "Failed"]
    assert not pod_end.has_ended(pod())


@pytest.mark.parametrize(
    ("until", "seconds"), [("11:59:50", 0.0), ("11:50:30", 540.0), ("12:00:29", 0.0)], ids=["now", "long ago", "later"]
)
def test_a_pod_was_deleted_long_ago_only_where_clocks_cannot_explain_it(until: str, seconds: float) -> None:
    deleted = pod(deletionTimestamp=f"2026-01-01T{until}Z", deletionGracePeriodSeconds=30)
    assert pod_end.seconds_since_deletion(deleted, NOW) == seconds
    assert pod_end.grace_seconds(deleted) == 30
