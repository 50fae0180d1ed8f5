"""Whatever an object of the cluster says of itself, only that object is concerned, and nothing waits for it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makeway_quota.backends.kubernetes.api.quantities import LARGEST, in_service_units, parse_quantity
from makeway_quota.backends.kubernetes.cluster.inventory import MAX_DEVICES, _node_status
from makeway_quota.backends.kubernetes.cluster.nodes import NodeSelector, project_node
from makeway_quota.backends.kubernetes.cluster.pod_requests import project_share
from makeway_quota.backends.kubernetes.pods.checkpoint_folders import RemovalFailed, folders_in_the_way

GPU = "nvidia.com/gpu"
SELECTOR = NodeSelector("gpu", GPU)


@pytest.mark.parametrize(
    ("text", "up", "down"),
    [
        ("1e999999999", LARGEST, LARGEST),
        ("1E+9999999999999999", LARGEST, LARGEST),
        ("9" * 90, LARGEST, LARGEST),
        ("1e-999999999", 1, 0),
        ("0e999999999", 0, 0),
        ("-1e999999999", 0, 0),
        ("-3", 0, 0),
        ("9223372036854775807E", LARGEST, LARGEST),
        ("1500m", 2, 1),
        ("2", 2, 2),
        ("1e3", 1000, 1000),
    ],
)
def test_a_quantity_of_any_size_is_read_at_once_and_is_none_below_zero(text: str, up: int, down: int) -> None:
    began = time.process_time()
    assert (in_service_units(GPU, text), in_service_units(GPU, text, round_up=False)) == (up, down)
    assert time.process_time() - began < 10, "its digits are written out"


@pytest.mark.parametrize(
    "text",
    [
        "١٢",
        "１",
        "1e１",
        "²",
        "",
        " ",
        "+",
        ".",
        "1e",
        "e5",
        "1_000",
        "0x10",
        "NaN",
        "inf",
        "1Ki i",
        "1k8",
        "9" * 101,
        "\0",
        "\ud800",
    ],
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


@given(
    st.text(max_size=120) | st.from_regex(r"[+-]?[0-9.]{1,12}([eE][+-]?[0-9]{1,12}|[numkMGTPE]?i?)?", fullmatch=True)
)
@settings(max_examples=300, deadline=500)
def test_no_text_is_read_as_anything_but_a_quantity(text: str) -> None:
    for resource in ("cpu", "memory", GPU):
        with suppress(ValueError):
            assert 0 <= in_service_units(resource, text) <= LARGEST


def node(**status: Any) -> dict[str, Any]:
    ready = [{"type": "Ready", "status": "True"}]
    return {"metadata": {"name": "n1", "uid": "u"}, "spec": {}, "status": {"conditions": ready, **status}}


@pytest.mark.parametrize("offered", ["1e999999999", "9223372036854775807", str(MAX_DEVICES + 1), "-4", "0", "0.5"])
def test_a_node_that_claims_impossible_devices_takes_no_work(offered: str) -> None:
    began = time.process_time()
    seen = _node_status(project_node(node(allocatable={GPU: offered, "cpu": "8", "memory": "64Gi"})), (SELECTOR,), ())
    assert seen.devices == ()
    assert time.process_time() - began < 10, "each device is counted"
    if int(in_service_units(GPU, offered)) > MAX_DEVICES:
        assert seen.cordoned


@pytest.mark.parametrize("offered", ["0", "-8", "1e-9"])
def test_a_node_that_offers_no_cpu_or_memory_is_not_one_without_a_limit(offered: str) -> None:
    seen = _node_status(project_node(node(allocatable={GPU: "4", "cpu": offered, "memory": offered})), (SELECTOR,), ())
    assert (seen.cpu, seen.memory) == (1, 1)
    assert _node_status(project_node(node(allocatable={GPU: "4"})), (SELECTOR,), ()).cpu == 0, "it does not say it"


@pytest.mark.parametrize(
    "at", ["", None, "yesterday", "0000-00-00T00:00:00Z", "9" * 5000, 7, {}, "2026-11-25T10:00:00Z"]
)
def test_a_node_that_is_down_is_so_whatever_the_time_since_when(at: object) -> None:
    result = node(allocatable={GPU: "4"})
    result["status"]["conditions"] = [{"type": "Ready", "status": "False", "lastTransitionTime": at}]
    kept = project_node(result)
    assert not kept.ready
    assert kept.down_since is None or kept.down_since > 1e9


@pytest.mark.parametrize(
    "labels", [{"a" * 5000: "b" * 5000}, {"": ""}, {"\ud800": "\udfff"}, {"x": None}, {"x": 7}, {"x": ["deep"]}]
)
def test_any_labels_of_a_node_are_read(labels: dict[str, Any]) -> None:
    result = node(allocatable={GPU: "4"})
    result["metadata"]["labels"] = labels
    assert _node_status(project_node(result), (SELECTOR,), ()).devices == (0, 1, 2, 3)


def test_a_foreign_pod_that_requests_everything_takes_its_node_and_no_other() -> None:
    requests = {GPU: "1e999999999", "cpu": "1e999999999", "memory": "1e999999999"}
    spec = {"nodeName": "n1", "containers": [{"name": "x", "resources": {"requests": requests, "limits": requests}}]}
    pod = {"metadata": {"name": "p", "namespace": "other", "uid": "u"}, "spec": spec, "status": {"phase": "Running"}}
    share = project_share(pod, instance="here", namespace="jobs")
    seen = _node_status(project_node(node(allocatable={GPU: "4", "cpu": "8", "memory": "64Gi"})), (SELECTOR,), [share])
    assert seen.foreign_gpus >= 4000


DEEP = "[" * 50_000
REPORTS: list[object] = [
    DEEP,
    '{"left": ' + DEEP,
    '{"left": {"1": ' + "[" * 900 + "]" * 900 + '}, "why": ""}',
    json.dumps({"left": {"1" * 5000: ["j-1"]}, "why": "x"}),
    '{"left": {"1": [1' + "0" * 5000 + ']}, "why": ""}',
    json.dumps({"left": {"١": ["j-1"]}, "why": "x"}),
    json.dumps({"left": [1], "why": "x"}),
    json.dumps({"left": {"1": 7}, "why": "x"}),
    json.dumps({"left": {"1": [None, {}]}, "why": {}}),
    '{"left": {"1": ["\\ud800"]}, "why": "\\udfff\\u0000"}',
    "NaN",
    "",
    None,
    7,
    {"a": 1},
    "x" * 10**6,
]


@pytest.mark.parametrize("message", REPORTS, ids=lambda value: str(value)[:20])
def test_whatever_a_removal_pod_leaves_is_its_report_or_none(message: object) -> None:
    state = {"terminated": {"exitCode": 1, "message": message}}
    pod = {"metadata": {"name": "p"}, "status": {"phase": "Failed", "containerStatuses": [{"state": state}]}}
    text, remaining = "", {}
    try:
        remaining, text = folders_in_the_way(pod)
    except RemovalFailed as error:
        text = str(error)
    assert len(text.encode()) < 10_000
    for id, user in remaining.items():
        id.encode()
        assert 0 <= user < 2**53
