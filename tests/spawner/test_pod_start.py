"""What a start says that takes too long, or cannot go on: the last step of Kubernetes, its age, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from makeway_spawner.pod_start import PodStart

PLACED = {"spec": {"nodeName": "node-1"}}
NOTEBOOK = "spec.containers{notebook}"


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(clock: Clock) -> PodStart:
    return PodStart(clock)


def event(reason: str, message: str, uid: str = "1", version: str = "1", path: str = "") -> dict[str, Any]:
    return {
        "metadata": {"uid": uid, "resourceVersion": version},
        "reason": reason,
        "message": message,
        "type": "Warning" if reason.startswith("Failed") else "Normal",
        "involvedObject": {"fieldPath": path},
    }


def status(state: dict[str, Any]) -> dict[str, Any]:
    return PLACED | {"status": {"containerStatuses": [{"name": "notebook", "image": "lab:2", "state": state}]}}


def messages(start: PodStart, pod: dict[str, Any], *events: dict[str, Any]) -> list[str]:
    return [step.message for step in start.update(pod, events)]


@pytest.mark.covers("N05")
def test_a_volume_that_cannot_be_mounted_stays_the_reason(start: PodStart, clock: Clock) -> None:
    assert messages(start, PLACED) == ["Kubernetes has placed the notebook on node-1"]
    failed = event("FailedMount", 'MountVolume.SetUp failed for volume "data" : secret "missing" not found')
    clock.now += 5
    (message,) = messages(start, PLACED, failed)
    assert message.startswith("A volume is not there yet")
    assert messages(start, PLACED, failed) == [], "where the pod is has been said"
    clock.now += 290
    assert start.failure_message(PLACED) == (
        "The notebook did not start within 4 min 55 s. Kubernetes has reported for 4 min 50 s: A volume is not "
        "there yet: "
        'MountVolume.SetUp failed for volume "data" : secret "missing" not found. An administrator has to look at that '
        "volume, or at the Secret or ConfigMap that it names."
    )


def test_a_volume_that_fails_before_the_placement_is_seen_stays_the_reason(start: PodStart) -> None:
    (message,) = messages(start, PLACED, event("FailedMount", "no such volume"))
    assert message == "A volume is not there yet: no such volume"
    assert message in start.failure_message(PLACED)


def test_what_the_scheduler_said_is_over_once_the_pod_has_a_node(start: PodStart) -> None:
    unfit = event("FailedScheduling", "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    messages(start, {}, unfit)
    assert "Insufficient nvidia.com/gpu" in start.failure_message({})
    messages(start, PLACED, unfit)
    assert messages(start, PLACED, event("FailedScheduling", "late", version="2")) == []
    assert "Kubernetes has reported for 0 s: Kubernetes has placed the notebook on node-1. " in start.failure_message(
        PLACED
    )


def test_a_slow_image_is_named_with_its_age(start: PodStart, clock: Clock) -> None:
    messages(start, PLACED)
    clock.now += 35
    messages(start, PLACED, event("Pulling", 'Pulling image "lab:2"', path=NOTEBOOK))
    clock.now += 260
    message = start.failure_message(PLACED)
    assert message.startswith(
        "The notebook did not start within 4 min 55 s. Kubernetes has reported for 4 min 20 s: Pulling "
        "the image lab:2. "
    )
    assert "start_timeout" in message


def test_an_image_that_cannot_be_pulled_is_as_old_as_its_first_failure(start: PodStart, clock: Clock) -> None:
    missing = status({"waiting": {"reason": "ErrImagePull", "message": "not found"}})
    for version in range(3):
        failed = event("Failed", 'Failed to pull image "lab:2": not found', version=str(version), path=NOTEBOOK)
        messages(start, missing, failed)
        clock.now += 20
    message = start.failure_message(missing)
    assert "Kubernetes has reported for 1 min: The image lab:2 cannot be pulled: not found. Check the name" in message


def test_an_image_without_a_valid_name_is_refused_at_once(start: PodStart) -> None:
    wrong = status({"waiting": {"reason": "InvalidImageName", "message": "invalid reference format"}})
    messages(start, wrong)
    assert start.failure_message(wrong).startswith(
        "The notebook could not be started: The image lab:2 cannot be pulled: invalid reference format."
    )


def test_a_server_that_does_not_listen_is_told_from_a_pod_that_does_not_run(start: PodStart, clock: Clock) -> None:
    running = status({"running": {}})
    assert messages(start, running)[-1] == "The container runs; waiting for the notebook server to answer"
    clock.now += 120
    message = start.failure_message(running, "http://10.0.0.7:8888")
    assert "its container has run for 2 min, but accepts no connection at http://10.0.0.7:8888. Check that" in message


def test_a_hub_that_sees_no_pod_says_so(start: PodStart, clock: Clock) -> None:
    clock.now += 295
    assert start.failure_message(None) == (
        "The notebook did not start within 4 min 55 s, and the Hub does not see its pod. An administrator can "
        "check that the Hub's account may list and watch pods and events."
    )
    assert "Kubernetes says nothing about its pod" in start.failure_message({})
    assert ": Could not create pod default/ana. Start it again" in start.failure_message(
        None, message="Could not create pod default/ana"
    )


def test_the_time_without_a_place_counts_from_the_schedulers_first_word(start: PodStart, clock: Clock) -> None:
    words = "0/3 nodes are available: 1 node(s) had volume node affinity conflict."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    unfit = {"status": {"conditions": [condition]}}
    start.update({}, ())
    clock.now += 10
    start.update(unfit, ())
    clock.now += 61
    start.update(unfit, ())
    assert start.unscheduled_for == 61
    message = start.unplaced_message(unfit, "node-1")
    assert message.startswith(f"Kubernetes has not placed the notebook on node-1 for 1 min 1 s: {words} ")
    assert "homes that every node can mount" in message
    condition["message"] = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    assert start.unplaced_message(unfit, "node-1").endswith(
        "Start it again or choose another profile. An administrator can check what else runs on node-1."
    )
    start.update(PLACED, ())
    assert start.unscheduled_for == 0


def test_a_gated_pod_gives_its_gpus_back_in_time_and_says_who_holds_it(start: PodStart, clock: Clock) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gates"}
    held = {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}, "status": {"conditions": [condition]}}
    words = "it is kept from the scheduler by the scheduling gate kueue.x-k8s.io/admission"
    assert messages(start, held) == [f"Kubernetes does not place the notebook yet: {words}"]
    clock.now += 61
    assert messages(start, held) == [], "it has been said"
    assert start.unscheduled_for == 61
    for message in (start.unplaced_message(held, "node-1"), start.failure_message(held)):
        assert f"{words}. An administrator has to look at what sets and removes these gates" in message
    assert messages(start, PLACED) == ["Kubernetes has placed the notebook on node-1"]
    assert start.unscheduled_for == 0


@pytest.mark.parametrize(
    "words",
    [
        "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
        '0/3 nodes are available: persistentvolumeclaim "home" not found.',
        "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind.",
    ],
)
def test_a_claim_without_a_volume_is_what_an_administrator_has_to_look_at(start: PodStart, words: str) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    unfit = {"status": {"conditions": [condition]}}
    messages(start, unfit, event("FailedScheduling", words))
    for message in (start.unplaced_message(unfit, "node-1"), start.failure_message(unfit)):
        assert f"{words} An administrator has to look at that claim, at its storage class, and at what " in message


def test_a_pod_without_its_claims_of_devices_gives_its_gpus_back_in_time(start: PodStart, clock: Clock) -> None:
    spec = {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]}
    failed = event("FailedResourceClaimCreation", 'PodResourceClaim gpus: template "one-gpu" not found')
    (message,) = messages(start, {"spec": spec}, failed)
    assert message == 'A claim of devices is not made yet: PodResourceClaim gpus: template "one-gpu" not found'
    clock.now += 61
    start.update({"spec": spec}, [failed])
    assert start.is_unplaced(60), "although the scheduler says nothing of such a pod"
    message = start.unplaced_message({"spec": spec}, "node-1")
    assert "for 1 min 1 s: no claim has been generated for it from the ResourceClaimTemplate one-gpu. An adm" in message
    assert "at the drivers of these" in message
    made = {"spec": spec, "status": {"resourceClaimStatuses": [{"name": "gpus", "resourceClaimName": "c"}]}}
    start.update(made, ())
    assert start.unscheduled_for == 0


def test_kubernetes_has_time_to_make_the_claims_of_many_pods(start: PodStart, clock: Clock) -> None:
    claims = {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]}}
    assert messages(start, claims) == ["Waits for Kubernetes to make its claims of devices"]
    assert messages(start, claims) == [], "it has been said"
    clock.now += 600
    assert not start.is_unplaced(60)
    assert "for 10 min: Waits for Kubernetes to make its claims of devices. Start it again" in start.failure_message(
        claims
    )
    clock.now += 1
    assert start.is_unplaced(60)
    assert not start.is_unplaced(601)
    assert messages(start, PLACED) == ["Kubernetes has placed the notebook on node-1"]
    assert not start.is_unplaced(0)


def test_a_pod_that_fits_nowhere_once_it_has_its_claims_is_as_old_as_what_the_scheduler_says(
    start: PodStart, clock: Clock
) -> None:
    spec = {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]}
    start.update({"spec": spec}, ())
    clock.now += 300
    words = "0/2 nodes are available: 2 cannot allocate all claims."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    made = [{"name": "gpus", "resourceClaimName": "c"}]
    start.update({"spec": spec, "status": {"resourceClaimStatuses": made, "conditions": [condition]}}, ())
    assert start.unscheduled_for == 0
    clock.now += 61
    assert start.is_unplaced(60)


@pytest.mark.covers("F83")
def test_a_pod_for_which_a_node_is_coming_is_not_given_up(start: PodStart, clock: Clock) -> None:
    words = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    unfit = {"status": {"conditions": [condition]}}
    start.update(unfit, [event("FailedScheduling", words)])
    clock.now += 50
    (message,) = messages(start, unfit, event("TriggeredScaleUp", "pod triggered scale-up: [{a 1->2}]", uid="2"))
    assert message == "The cluster is adding a node. That takes some minutes."
    clock.now += 1000
    assert messages(start, unfit, event("FailedScheduling", words, version="2")) == [], "it is being dealt with"
    assert not start.is_unplaced(60)
    assert "An administrator can raise the node_seconds" in start.failure_message(unfit)
    assert start.node_wait == 1000
    failed = event("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 in backoff after failed scale-up", uid="3")
    (message,) = messages(start, unfit, failed)
    assert message == "The cluster's autoscaler adds no node for it: 1 in backoff after failed scale-up"
    assert not start.is_unplaced(60), "it has its whole time to be placed elsewhere"
    clock.now += 61
    start.update(unfit, ())
    assert start.is_unplaced(60)
    assert start.node_wait == 1000, "none is coming any more"


@pytest.mark.covers("F83")
def test_the_wait_for_a_node_ends_once_the_pod_has_one_whatever_events_come_late(start: PodStart, clock: Clock) -> None:
    start.update({}, [event("TriggeredScaleUp", "pod triggered scale-up: [{a 1->2}]")])
    clock.now += 70
    start.update(PLACED, ())
    clock.now += 30
    assert messages(start, PLACED, event("TriggeredScaleUp", "pod triggered scale-up: [{a 1->2}]", uid="2")) == []
    clock.now += 30
    assert start.node_wait == 70


@pytest.mark.covers("F83")
def test_karpenter_says_by_nominated_that_a_node_is_coming(start: PodStart) -> None:
    told = {**event("Nominated", "Pod should schedule on: nodeclaim/gpu-x1"), "source": {"component": "karpenter"}}
    assert messages(start, {}, told) == ["The cluster has a node for it: Pod should schedule on: nodeclaim/gpu-x1"]
    none = {
        **event("FailedScheduling", "Failed to schedule pod, no nodepool", uid="3"),
        "reportingComponent": "karpenter",
    }
    assert messages(start, {}, none) == ["The cluster's autoscaler adds no node for it: no nodepool"]
    assert start.node_wait == 0
    other = {**event("Nominated", "elected", uid="2"), "source": {"component": "another"}}
    assert messages(start, {}, other) == []


def test_a_claim_that_kubernetes_cannot_make_after_a_while_is_not_waited_for(start: PodStart, clock: Clock) -> None:
    claims = {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]}}
    start.update(claims, ())
    clock.now += 61
    failed = event("FailedResourceClaimCreation", 'PodResourceClaim gpus: template "one-gpu" not found')
    (message,) = messages(start, claims, failed)
    assert message.startswith("A claim of devices is not made yet")
    assert not start.is_unplaced(60), "the next try may make it"
    clock.now += 61
    assert start.is_unplaced(60)


def test_claims_that_are_made_are_the_reason_no_more(start: PodStart) -> None:
    spec = {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]}
    messages(start, {"spec": spec})
    made = {"spec": spec, "status": {"resourceClaimStatuses": [{"name": "gpus", "resourceClaimName": "c"}]}}
    assert messages(start, made) == []
    assert "Kubernetes says nothing about its pod" in start.failure_message(made)


@pytest.mark.parametrize(
    "words", ["0/2 nodes are available: 2 cannot allocate all claims.", "request gpu: device class x does not exist"]
)
def test_devices_that_no_driver_gives_are_what_an_administrator_has_to_look_at(start: PodStart, words: str) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    unfit = {"status": {"conditions": [condition]}}
    messages(start, unfit)
    assert "at the ResourceClaimTemplates and DeviceClasses that they name" in start.unplaced_message(unfit, "node-1")


def test_claims_are_named_only_while_the_scheduler_says_nothing_of_their_pod(start: PodStart) -> None:
    claims = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in ("data", "home")]
    spec = {"volumes": [{"name": "tmp", "emptyDir": {}}, *claims]}
    assert "It needs a volume for data and home. " in start.failure_message({"spec": spec})
    for pod in ({"spec": spec | {"nodeName": "node-1"}}, {"spec": {}}):
        assert "Kubernetes says nothing about its pod" in start.failure_message(pod)
