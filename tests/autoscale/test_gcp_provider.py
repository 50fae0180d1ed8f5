"""Compute Engine: what is asked for, what each of its answers means, and what becomes of answers that never come.

Google's own library talks to a server of its REST interface. Where a docstring names a report, users of another
autoscaler made it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from autoscale.fleet import Fleet, gpu_work
from gce_cloud import GCP, GCP_TYPE, IMAGE, PROJECT, ZONES, GceCloud, account_key, served, set_environment
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.provider import (
    CallOutcomeUnknown,
    Denied,
    InvalidLaunch,
    JoinData,
    ProviderError,
    QuotaReached,
    StockOut,
    Throttled,
)
from makeway_quota.autoscale.providers import gcp, gcp_launch
from makeway_quota.autoscale.providers.boot_script import boot_script
from makeway_quota.autoscale.providers.gcp import GcpProvider
from makeway_quota.autoscale.step import answer

JOIN = JoinData("https://gpus.example/services/makeway", "m-1.secret-of-the-join")


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[GceCloud]:
    result = GceCloud()
    with served(result) as address:
        set_environment(monkeypatch, address, tmp_path)
        yield result


@pytest.fixture
def provider(cloud: GceCloud) -> GcpProvider:
    return GcpProvider(GCP, "here")


def request(
    machine: str = "m-1", zone: str = ZONES[0], market: Any = "on_demand", settings: Any = None, **fields: Any
) -> str:
    machine_type = replace(GCP_TYPE, **fields)
    deployment = replace(GCP, settings={**GCP.settings, **(settings or {})})
    return deployment.request(machine_type, zone, market, machine_type.price_in(market), machine)


def launched(cloud: GceCloud, **fields: Any) -> dict[str, Any]:
    """Return the instance of a launch, as Compute Engine gets it."""
    GcpProvider(GCP, "here").launch(request(**fields), "m-1", JOIN)
    return cloud.called("instances.insert")[-1].body


def test_an_instance_has_its_labels_its_disk_and_no_rights_from_the_call_that_launches_it(cloud: GceCloud) -> None:
    """terraform-aws-gitlab-runner#450: untagged spot machines for ever."""
    sent = launched(cloud)
    labels = {"makeway-installation": "here", "makeway-deployment": "cloud", "makeway-machine": "m-1"}
    assert sent["labels"] == labels
    [disk] = sent["disks"]
    assert disk["initializeParams"]["labels"] == labels
    assert (disk["autoDelete"], disk["initializeParams"]["sourceImage"]) == (True, IMAGE)
    assert "diskSizeGb" not in disk["initializeParams"]
    assert sent["machineType"].endswith(f"zones/{ZONES[0]}/machineTypes/g2-standard-24")
    assert sent["scheduling"] == {
        "provisioningModel": "STANDARD",
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
    }
    assert sent["networkInterfaces"] == [{"network": "global/networks/default"}]
    assert not {"serviceAccounts", "guestAccelerators", "tags"} & set(sent)
    insert = cloud.called("instances.insert")[-1]
    assert uuid.UUID(insert.query["requestId"]).version == 5


def test_a_spot_machine_is_deleted_when_it_is_taken_back(cloud: GceCloud) -> None:
    """karpenter-provider-gcp#143: a stopped spot machine is not a deleted one."""
    sent = launched(cloud, market="spot", spot_price=1_100_000)
    assert sent["scheduling"]["provisioningModel"] == "SPOT"
    assert sent["scheduling"]["instanceTerminationAction"] == "DELETE"
    assert sent["scheduling"]["automaticRestart"] is False


def test_disk_network_rights_gpus_and_the_longest_run_are_asked_for_where_the_document_has_them(
    cloud: GceCloud,
) -> None:
    settings = {"external_ip": "true", "service_account": "gpu@x.iam", "max_run_hours": "48", "disk_type": "pd-ssd"}
    sent = launched(
        cloud, settings=settings, instance_type="n1-standard-8", accelerator="nvidia-tesla-t4", disk=200 * 1024 + 1,
        subnets={ZONES[0]: "gpus"}, security_groups=("gpu-machine",),
    )  # fmt: skip
    parameters = sent["disks"][0]["initializeParams"]
    assert (parameters["diskSizeGb"], parameters["diskType"]) == ("201", f"zones/{ZONES[0]}/diskTypes/pd-ssd")
    [network] = sent["networkInterfaces"]
    assert network["subnetwork"] == "regions/europe-west4/subnetworks/gpus"
    assert network["accessConfigs"] == [{"name": "External NAT", "type": "ONE_TO_ONE_NAT"}]
    assert sent["serviceAccounts"][0]["email"] == "gpu@x.iam"
    assert sent["tags"] == {"items": ["gpu-machine"]}
    [accelerator] = sent["guestAccelerators"]
    assert accelerator["acceleratorCount"] == 2
    assert accelerator["acceleratorType"].endswith(f"zones/{ZONES[0]}/acceleratorTypes/nvidia-tesla-t4")
    assert sent["scheduling"]["maxRunDuration"] == {"seconds": str(48 * 3600)}
    assert sent["scheduling"]["instanceTerminationAction"] == "DELETE"


def test_the_metadata_are_the_boot_script_with_the_token_of_the_machine_and_no_other_secret(cloud: GceCloud) -> None:
    sent = launched(cloud, init_script="echo password")
    [item] = sent["metadata"]["items"]
    assert item == {"key": "startup-script", "value": boot_script(JOIN, "m-1", "cloud", 900.0, "gcp")}
    assert JOIN.token in item["value"]
    assert "--spot gcp" in item["value"]
    assert "password" not in json.dumps(sent)
    assert "PRIVATE KEY" not in json.dumps(sent)


@pytest.mark.parametrize(
    ("status", "reason", "meaning"),
    [
        (403, "quotaExceeded", QuotaReached),
        (403, "rateLimitExceeded", Throttled),
        (429, "tooManyRequests", Throttled),
        (403, "forbidden", Denied),
        (403, "accessNotConfigured", Denied),
        (401, "authError", Denied),
        (400, "invalid", InvalidLaunch),
        (404, "notFound", InvalidLaunch),
        (412, "conditionNotMet", InvalidLaunch),
        (400, "resourceNotReady", CallOutcomeUnknown),
        (500, "internalError", CallOutcomeUnknown),
        (503, "backendError", CallOutcomeUnknown),
    ],
)
def test_every_refusal_of_a_launch_has_one_meaning_and_is_called_once(
    cloud: GceCloud, provider: GcpProvider, status: int, reason: str, meaning: type[ProviderError]
) -> None:
    cloud.errors["instances.insert"] = [(status, reason)] * (3 if status == 401 else 1)  # it gets other tokens first
    with pytest.raises(meaning, match=reason) as refused:
        provider.launch(request(), "m-1")
    assert type(refused.value) is meaning
    assert "http" not in str(refused.value)
    if status != 401:
        assert len(cloud.called("instances.insert")) == 1
    assert not cloud.instances


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        ("ZONE_RESOURCE_POOL_EXHAUSTED", StockOut),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", StockOut),
        ("UNSUPPORTED_OPERATION", StockOut),
        ("QUOTA_EXCEEDED", QuotaReached),
        ("IP_SPACE_EXHAUSTED", QuotaReached),
        ("RESOURCE_OPERATION_RATE_EXCEEDED", QuotaReached),
        ("PERMISSIONS_ERROR", Denied),
        ("RESOURCE_NOT_FOUND", InvalidLaunch),
        ("SOMETHING_NEW", InvalidLaunch),
        ("INTERNAL_ERROR", CallOutcomeUnknown),
    ],
)
def test_an_operation_that_fails_later_is_the_answer_of_its_launch(
    cloud: GceCloud, provider: GcpProvider, code: str, meaning: type[ProviderError]
) -> None:
    """The call itself is answered with 200: a stock-out only shows in its operation."""
    cloud.failures, cloud.slow = [code], 3
    with pytest.raises(meaning, match=code) as refused:
        provider.launch(request(), "m-1")
    assert type(refused.value) is meaning
    assert refused.value.instance.startswith(f"{ZONES[0]}/makeway-")
    assert len(cloud.called("zoneOperations.get")) == 3
    assert len(cloud.called("instances.insert")) == 1


def test_a_type_that_a_zone_does_not_have_is_out_of_stock_there(cloud: GceCloud, provider: GcpProvider) -> None:
    cloud.missing = {"g2-standard-24"}
    with pytest.raises(StockOut, match="does not exist in zone"):
        provider.launch(request(), "m-1")


def test_an_operation_that_goes_on_is_unknown_and_the_next_call_finds_it(
    cloud: GceCloud, provider: GcpProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcp, "LAUNCH_SECONDS", 0.3)
    cloud.slow, cloud.failures = 1_000_000, ["", "ZONE_RESOURCE_POOL_EXHAUSTED"]
    for machine in ("m-1", "m-2"):
        with pytest.raises(CallOutcomeUnknown, match="goes on"):
            provider.launch(request(machine), machine)
    assert sorted((one.machine, one.state) for one in provider.list("cloud", 0.0).instances)[1] == ("m-2", "pending")
    for operation in cloud._operations.values():
        operation.polls = 1
    assert provider.launch(request(), "m-1").state == "running"
    with pytest.raises(StockOut):
        provider.launch(request("m-2"), "m-2")
    assert [one.machine for one in provider.list("cloud", 0.0).instances] == ["m-1"]


def test_polls_that_fail_say_nothing_of_the_launch(cloud: GceCloud, provider: GcpProvider) -> None:
    cloud.errors["zoneOperations.get"] = [(403, "rateLimitExceeded"), (503, "backendError"), (403, "forbidden")]
    assert provider.launch(request(), "m-1").state == "running"
    cloud.errors["instances.get"] = [(403, "forbidden")]
    with pytest.raises(CallOutcomeUnknown):
        provider.launch(request("m-2"), "m-2")
    assert len(cloud.instances) == 2


def test_a_request_id_that_google_has_forgotten_finds_the_instance_by_its_name(
    cloud: GceCloud, provider: GcpProvider
) -> None:
    cloud.lost_after = 1
    with pytest.raises(CallOutcomeUnknown):
        provider.launch(request(), "m-1", JOIN)
    cloud.ignores_tokens = True
    made = provider.launch(request(), "m-1", JOIN)
    assert [made.id] == list(cloud.instances)
    cloud._resources[made.id]["labels"] = {"makeway-machine": "m-1"}
    with pytest.raises(InvalidLaunch, match="is not of this deployment"):
        provider.launch(request(), "m-1", JOIN)


def test_an_instance_that_is_taken_back_while_it_is_launched_has_ended(cloud: GceCloud, provider: GcpProvider) -> None:
    cloud.on_launch = lambda made, script: cloud.interrupt(made.id)
    assert provider.launch(request(), "m-1").state == "terminated"


def test_a_list_is_asked_for_again_a_few_times(cloud: GceCloud, provider: GcpProvider) -> None:
    cloud.errors["instances.aggregatedList"] = [(503, "backendError"), (500, "internalError")]
    assert provider.list("cloud", 0.0).complete
    cloud.errors["instances.aggregatedList"] = [(403, "rateLimitExceeded")] * 3
    with pytest.raises(Throttled):
        provider.list("cloud", 0.0)
    assert len(cloud.called("instances.aggregatedList")) == 6


def test_all_pages_of_all_zones_are_read(
    cloud: GceCloud, provider: GcpProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        provider.launch(request(f"m-{number}", ZONES[number % 2]), f"m-{number}")
    cloud.calls.clear()
    cloud.page = 5
    result = provider.list("cloud", 0.0)
    assert (len({one.id for one in result.instances}), result.complete) == (12, True)
    assert len(cloud.called("instances.aggregatedList")) == 3
    monkeypatch.setattr(gcp, "LIST_SECONDS", -1.0)
    result = provider.list("cloud", 0.0)
    assert (len(result.instances), result.complete) == (5, False)


def test_a_list_without_a_zone_that_google_cannot_reach_is_not_complete(cloud: GceCloud, provider: GcpProvider) -> None:
    """aec#405: a partial page taken for all."""
    for number, zone in enumerate(ZONES):
        provider.launch(request(f"m-{number}", zone), f"m-{number}")
    cloud.unreachable = {ZONES[1]}
    result = provider.list("cloud", 0.0)
    assert ([one.machine for one in result.instances], result.complete) == (["m-0"], False)
    cloud.unreachable = set()
    assert provider.list("cloud", 0.0).complete


def test_installations_of_one_project_see_and_end_nothing_of_each_other(cloud: GceCloud) -> None:
    here, there = GcpProvider(GCP, "here"), GcpProvider(GCP, "there")
    here.launch(request(), "m-1")
    there.launch(request(), "m-1")
    assert len(cloud.instances) == 2
    [one], [other] = here.list("cloud", 0.0).instances, there.list("cloud", 0.0).instances
    assert one.id != other.id


@pytest.mark.parametrize(
    ("fault", "state"),
    [({"boot": 600.0}, "pending"), ({}, "running"), ({"end_delay": 600.0}, "stopping"), ({"stop": True}, "stopped")],
)
def test_the_state_of_an_instance_is_what_compute_engine_says(
    cloud: GceCloud, provider: GcpProvider, fault: dict[str, Any], state: str
) -> None:
    """karpenter-provider-gcp#143: Compute Engine calls a stopped machine TERMINATED, and it is not deleted."""
    made = provider.launch(request(), "m-1")
    if "stop" in fault:
        cloud.interrupt(made.id, stop=True)
    else:
        for name, value in fault.items():
            setattr(cloud, name, value)
    if state == "stopping":
        assert provider.terminate(made.id)
    [result] = provider.list("cloud", 0.0).instances
    assert result.state == state
    assert provider.terminate(made.id), "what is stopped or being deleted is still there"


def test_only_an_instance_that_is_not_found_counts_as_gone(cloud: GceCloud, provider: GcpProvider) -> None:
    """A project that is not found says nothing of its machines."""
    made = provider.launch(request(), "m-1")
    other = GcpProvider(replace(GCP, settings={"project": "other-project"}), "here")
    with pytest.raises(InvalidLaunch, match="other-project"):
        other.terminate(made.id)
    cloud.errors["instances.delete"] = [(400, "resourceNotReady")] * 3
    with pytest.raises(CallOutcomeUnknown):
        provider.terminate(made.id)
    assert provider.terminate(made.id)
    assert not provider.terminate(made.id)


def test_a_console_is_the_newest_output(cloud: GceCloud, provider: GcpProvider) -> None:
    made = provider.launch(request(), "m-1")
    assert provider.console(made.id) == ""
    cloud.consoles[made.id] = "ready ✓\n"
    assert provider.console(made.id) == "ready ✓\n"


@pytest.mark.parametrize("call", ["list", "launch", "terminate", "console"])
def test_a_call_without_an_answer_ends_in_time_and_says_that_nothing_is_known(
    cloud: GceCloud, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(gcp, "READ_SECONDS", 0.3)
    monkeypatch.setattr(gcp, "READ_TRIES", 1)
    provider = GcpProvider(GCP, "here")
    cloud.hang = 8.0
    began = time.monotonic()
    calls = {
        "list": lambda: provider.list("cloud", 0.0),
        "launch": lambda: provider.launch(request(), "m-1"),
        "terminate": lambda: provider.terminate(f"{ZONES[0]}/m-1"),
        "console": lambda: provider.console(f"{ZONES[0]}/m-1"),
    }
    with pytest.raises(CallOutcomeUnknown, match="no answer") as lost:
        calls[call]()
    assert not lost.value.certain
    assert time.monotonic() - began < 7.0


def test_a_launch_and_its_time_outs_end_before_its_row_is_given_up() -> None:
    call = gcp.CONNECT_SECONDS + gcp.READ_SECONDS
    assert GCP.request_timeout > gcp.LAUNCH_SECONDS + gcp.POLL_SECONDS + 2 * call


def test_an_address_that_nothing_answers_at_is_a_lost_answer(cloud: GceCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gcp.ENDPOINT, "http://127.0.0.1:9")
    with pytest.raises(CallOutcomeUnknown):
        GcpProvider(GCP, "here").launch(request(), "m-1")


def test_without_credentials_every_call_is_denied(
    cloud: GceCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with pytest.raises(Denied, match="credentials"):
        GcpProvider(GCP, "here").list("cloud", 0.0)
    provider = GcpProvider(GCP, "here", account_key())
    assert provider.list("cloud", 0.0).complete
    assert "PRIVATE KEY" not in repr(provider)


def test_a_key_that_google_does_not_know_is_denied(cloud: GceCloud) -> None:
    with pytest.raises(Denied, match="authError"):
        GcpProvider(GCP, "here", account_key(other=True)).list("cloud", 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"access_key_id": "hunter2"}, "has access_key_id, which no key of a service account has"),
        ({"client_email": ""}, "has no client_email"),
        ({"type": "authorized_user"}, "is no key of a service account"),
        ({"private_key": "hunter2"}, "cannot be read"),
    ],
)
def test_a_credential_that_is_no_key_is_denied_without_its_values(
    cloud: GceCloud, change: dict[str, str], message: str
) -> None:
    with pytest.raises(Denied, match=message) as refused:
        GcpProvider(GCP, "here", account_key() | change).check()
    assert "hunter2" not in str(refused.value)
    assert "PRIVATE" not in str(refused.value)
    assert cloud.calls == []


def test_a_check_launches_and_ends_nothing_and_tells_what_is_not_there(cloud: GceCloud) -> None:
    second = replace(
        GCP_TYPE, name="t4", instance_type="n1-standard-8", accelerator="nvidia-tesla-t4", zones=(ZONES[1],),
        machine_image=f"projects/{PROJECT}/global/images/gpu-7",
    )  # fmt: skip
    deployment: Deployment = replace(GCP, types=(GCP_TYPE, second))
    provider = GcpProvider(deployment, "here")
    provider.check()
    assert not cloud.called("instances.insert")
    cloud.missing = {"gpu-7", "nvidia-tesla-t4", "debian-12"}
    with pytest.raises(InvalidLaunch, match=r"g2: images.*debian-12.*t4: images.*gpu-7.*nvidia-tesla-t4"):
        provider.check()
    cloud.missing = set()
    wrong = replace(GCP, types=(replace(GCP_TYPE, gpus=1),))
    with pytest.raises(InvalidLaunch, match="g2-standard-24 has 2 GPUs, and the document says 1"):
        GcpProvider(wrong, "here").check()


@pytest.mark.parametrize("change", [{"machine": "M 1"}, {"deployment": "a.b"}, {"zone": ""}, {"settings": {}}])
def test_what_no_label_can_have_or_no_zone_is_refused_for_certain(
    provider: GcpProvider, change: dict[str, Any]
) -> None:
    wanted = json.loads(request()) | change
    with pytest.raises(InvalidLaunch):
        provider.launch(json.dumps(wanted), "m-1")


def test_the_name_and_the_request_id_of_a_machine_are_always_the_same_and_of_no_other() -> None:
    names = {gcp_launch.instance_name(where, f"m-{number}") for where in ("here", "there") for number in range(5)}
    assert len(names) == 10
    assert gcp_launch.request_id("here", "m-1") == gcp_launch.request_id("here", "m-1")
    assert gcp_launch.request_id("here", "m-1") != gcp_launch.request_id("there", "m-1")


@pytest.mark.parametrize("slow", [1, 3])
def test_a_launch_whose_operation_was_throttled_is_another_machine_the_next_time(
    cloud: GceCloud, provider: GcpProvider, slow: int
) -> None:
    """Google answers a repeated request id with the operation that failed: the machine would never be launched."""
    fleet = Fleet(replace(GCP, provider="memory"), pending=[gpu_work()])
    fleet.provider = provider  # type: ignore[assignment]
    cloud.failures, cloud.slow = ["RESOURCE_OPERATION_RATE_EXCEEDED"], slow
    fleet.run(60)
    states = [(row.state, row.reason) for row in fleet.store.all_machines().values()]
    assert states == [("failed", "quota"), ("booting", "launched")]
    assert len(cloud.running()) == 1
    assert len(cloud.called("instances.insert")) == 2
    [back] = fleet.store.read("cloud").backoffs
    assert (back.type, back.zone, back.failure) == ("g2", ZONES[0], "quota"), "the other zones and types go on"


def test_a_stock_out_after_the_instance_was_listed_counts_with_those_before(
    cloud: GceCloud, provider: GcpProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance is listed while its operation goes on, which is no success yet: the pauses grow."""
    machine_type = replace(GCP_TYPE, zones=ZONES[:1])
    fleet = Fleet(replace(GCP, types=(machine_type,)), pending=[gpu_work()])
    fleet.provider = provider  # type: ignore[assignment]
    cloud.clock = lambda: fleet.now
    cloud.stock_out = {(machine_type.instance_type, ZONES[0], "on_demand")}
    pauses = []
    for _ in range(3):
        [call] = [one for one in fleet.step().calls if one.kind == "launch"]
        cloud.slow = 10_000
        monkeypatch.setattr(gcp, "LAUNCH_SECONDS", 0.0)
        assert isinstance(call.make(provider), CallOutcomeUnknown)
        fleet.step()
        assert fleet.states[-1:] == ["booting"]
        for operation in cloud._operations.values():
            operation.polls = 1
        monkeypatch.setattr(gcp, "LAUNCH_SECONDS", 60.0)
        result = call.make(provider)
        assert isinstance(result, StockOut)
        assert answer(fleet.store, fleet.deployment, [(call, fleet.now, result)], fleet.store.term, fleet.now)
        [back] = fleet.store.read("cloud").backoffs
        pauses.append(back.until - fleet.now)
        fleet.run(back.until - fleet.now - 1)
        fleet.now += 1.5
    assert pauses == [300.0, 600.0, 1200.0]
