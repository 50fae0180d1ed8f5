"""What Kubernetes reports of a starting pod, in phases and words; the events are those of a kubelet and a scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from makeway_spawner.pod_events import (
    StartStatus,
    cannot_be_pulled,
    event_status,
    gated,
    placed,
    running,
    unschedulable,
    waiting,
)

NOTEBOOK = "spec.containers{notebook}"


def event(reason: str, message: str, path: str = "", type: str = "Normal") -> dict[str, Any]:
    return {"reason": reason, "message": message, "type": type, "involvedObject": {"fieldPath": path}}


@pytest.mark.covers("N05")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (event("Scheduled", "Successfully assigned default/jupyter-ana to node-1"), None),
        (
            event("FailedScheduling", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", type="Warning"),
            StartStatus(
                "node",
                "Kubernetes does not place the notebook yet: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                problem=True,
                unscheduled=True,
            ),
        ),
        (event("Pulling", 'Pulling image "lab:1"', NOTEBOOK), StartStatus("image", "Pulling the image lab:1")),
        (
            event("Pulled", 'Successfully pulled image "lab:1" in 3.1s (4s including waiting). Image size: 9 bytes.'),
            StartStatus("image", "The image is pulled, in 3.1s."),
        ),
        (
            event("Pulled", 'Container image "lab:1" already present on machine'),
            StartStatus("image", "The image is on the node already."),
        ),
        (
            event("Failed", 'Failed to pull image "lab:2": not found', NOTEBOOK, "Warning"),
            StartStatus("image", 'The image cannot be pulled: Failed to pull image "lab:2": not found', problem=True),
        ),
        (
            event("Started", "Started container notebook", NOTEBOOK),
            StartStatus("server", "The container runs; waiting for the notebook server to answer"),
        ),
        (event("Started", "Started container copy", "spec.initContainers{copy}"), None),
        (event("Created", "Created container notebook", NOTEBOOK), None),
        (
            event("FailedMount", "MountVolume.SetUp failed for volume home", type="Warning"),
            StartStatus(
                "node",
                "A volume is not there yet: MountVolume.SetUp failed for volume home",
                problem=True,
                volume=True,
            ),
        ),
        (
            event("BackOff", "Back-off restarting failed container notebook", NOTEBOOK, "Warning"),
            StartStatus("server", "Back-off restarting failed container notebook", problem=True),
        ),
    ],
)
def test_an_event_is_a_phase_and_a_sentence(given: dict[str, Any], expected: StartStatus | None) -> None:
    assert event_status(given) == expected


def pod(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"status": {"containerStatuses": [{"name": "notebook", "image": "lab:2", "state": state}]}}


def test_a_pod_says_itself_that_its_image_is_missing() -> None:
    result = waiting(pod("ImagePullBackOff", "not found"))
    assert result == StartStatus("image", "The image lab:2 cannot be pulled: not found", problem=True)
    assert waiting(pod("ContainerCreating")) is None
    assert waiting({}) is None


@pytest.mark.parametrize("reason", ["ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"])
def test_a_pod_whose_image_fails_in_a_rarer_way_says_so_itself(reason: str) -> None:
    result = waiting(pod(reason, 'Failed to inspect image "lab:2"'))
    words = 'The image lab:2 cannot be pulled: Failed to inspect image "lab:2"'
    assert result == StartStatus("image", words, problem=True)


def test_a_pod_says_itself_where_it_runs() -> None:
    assert placed({"spec": {"nodeName": "node-1"}}) == StartStatus(
        "node", "Kubernetes has placed the notebook on node-1"
    )
    assert placed({"spec": {}}) is None


def test_a_pod_says_itself_that_its_server_runs() -> None:
    status = {"containerStatuses": [{"name": "notebook", "state": {"running": {}}}]}
    assert running({"status": status}) == event_status(event("Started", "Started container notebook", NOTEBOOK))
    assert running({"status": {"containerStatuses": [{"name": "copy", "state": {"running": {}}}]}}) is None
    assert running(pod("ContainerCreating")) is None


def test_a_pod_says_itself_that_no_node_fits() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes fit."}
    assert unschedulable({"status": {"conditions": [condition]}}) == "0/1 nodes fit."
    assert not unschedulable({"status": {"conditions": [condition | {"status": "True"}]}})


def test_a_pod_that_is_gated_gets_no_node_and_names_the_gates() -> None:
    gates = [{"name": "kueue.x-k8s.io/admission"}, {"name": "example.com/budget"}]
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gates"}
    held = {"spec": {"schedulingGates": gates[:1]}, "status": {"conditions": [condition]}}
    words = "it is kept from the scheduler by the scheduling gate kueue.x-k8s.io/admission"
    assert unschedulable(held) == words
    assert unschedulable({"spec": {"schedulingGates": gates}}).endswith(
        "by the scheduling gates kueue.x-k8s.io/admission and example.com/budget"
    )
    assert unschedulable({"status": {"conditions": [condition]}}) == "gates"
    assert gated(held) == StartStatus(
        "node", f"Kubernetes does not place the notebook yet: {words}", problem=True, unscheduled=True, gated=True
    )
    free = {"spec": {"nodeName": "node-1", "schedulingGates": []}, "status": {"conditions": []}}
    assert (unschedulable(free), gated(free)) == ("", None)


def test_an_image_without_a_valid_name_is_told_from_one_that_may_come() -> None:
    assert cannot_be_pulled(pod("InvalidImageName"))
    assert not cannot_be_pulled(pod("ImagePullBackOff"))
    assert not cannot_be_pulled({})
