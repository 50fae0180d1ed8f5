"""`makeway autoscaler` against the real service: documents round-trip, and what an older service answers."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from autoscale.fleet import machine
from makeway import cli, connection
from makeway_api.client import Client
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.control.machines.deployment_driver import DeploymentStatus

from .conftest import Portal

CLOUD = """\
# Machines for the nights
name: cloud
provider: local
hour: 6.50
machine_types:
  - {name: gpu-2, pool: gpu, instance: big-2, gpus: 2, price: 3.10}  # the cheap one
"""


class Said:
    """A command's exit code and output."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def makeway(portal: Portal, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Run commands as the administrator; deployments are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    connection.connect(portal.url, "root")

    def run(*words: str) -> Said:
        code = cli.main(("autoscaler", *words))
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return Said(code, out, err)

    yield run
    connection.disconnect()
    store = portal.store
    with portal.client("root") as root:
        for deployment in root.deployments():
            root.deployment_delete(deployment.name)
            live = [one for one in store.machines.live() if one.deployment == deployment.name]
            gone = tuple(machine(id=one.id, version=one.version, state="gone") for one in live)
            store.machines.commit(deployment.name, portal.term, MachineChanges(changed=gone))
            assert store.deployments.close(deployment.name, portal.term, 1.0)


@pytest.mark.covers("F58")
@pytest.mark.parametrize("text", [CLOUD, CLOUD.replace("\n", "\r\n"), CLOUD.rstrip("\n"), f"\ufeff{CLOUD}"])
def test_a_document_that_was_read_is_applied_without_a_change(makeway, portal: Portal, text: str) -> None:  # type: ignore[no-untyped-def]
    Path("x.yaml").write_bytes(text.encode())
    result = makeway("apply", "-f", "x.yaml")
    assert result.code == 0, result.err
    assert result.out.startswith("The deployment cloud has version ")
    assert "The deployment cloud is new." in result.out
    with portal.client("root") as root:
        before = root.deployment("cloud")
        assert before.document == text
        Path("y.yaml").write_bytes(makeway("get", "cloud").out.encode())
        result = makeway("apply", "-f", "y.yaml")
        assert result.out == f"The deployment cloud has version {before.version}. No change.\n"
        assert root.deployment("cloud").version == before.version


def test_a_document_is_applied_from_standard_input(makeway, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CLOUD.encode())))
    assert makeway("apply", "-f", "-").code == 0
    assert makeway("get", "cloud").out == CLOUD


@pytest.mark.covers("F58", "F59", "F72")
def test_deployments_are_listed_paused_duplicated_and_deleted(makeway, portal: Portal) -> None:  # type: ignore[no-untyped-def]
    assert makeway("list").out == "There are no deployments of machines.\n"
    Path("x.yaml").write_text(CLOUD)
    version = json.loads(makeway("apply", "-f", "x.yaml", "--version", "0", "--json").out)["version"]
    assert makeway("pause", "cloud").out == "cloud: Paused: nothing is launched.\n"
    assert "paused: true\n" in makeway("get", "cloud").out
    line = makeway("list").out.splitlines()[1].split()
    assert line[:3] == ["cloud", "paused", "none"]
    assert (
        makeway("resume", "cloud").out
        == "cloud: Nothing is launched: this service has no backend for machines. Add machines to MAKEWAY_BACKEND "
        "(in the chart: clusterAutoscaler.enabled).\n"
    )
    result = makeway("apply", "-f", "x.yaml", "--version", str(version))
    assert (result.code, result.out) == (1, "")
    assert f"Version {version} of the deployment cloud was edited, but it has version {version + 2}" in result.err
    store = portal.store
    rows = (machine(id="m-1", state="booting"), machine(id="m-2", state="failed", reason="stock_out"))
    assert store.machines.commit("cloud", portal.term, MachineChanges(rows))
    assert "1 booting" in makeway("list").out
    assert "3.00 of 6.50 EUR" in makeway("list").out
    assert [one["id"] for one in json.loads(makeway("machines", "cloud", "--json").out)] == ["m-1"]
    whole = makeway("machines", "cloud", "--all").out
    assert "The provider has no such machine now." in whole
    Path("copy.yaml").write_text(makeway("duplicate", "cloud").out)
    assert makeway("apply", "-f", "copy.yaml").out.startswith("The deployment cloud-2 has version ")
    assert makeway("delete", "cloud").out == "cloud: Being deleted: 1 machine ends first.\n"
    assert "deleting" in makeway("list").out
    assert "saved" in makeway("log", "cloud").out
    assert len(json.loads(makeway("log", "cloud", "--limit", "2", "--json").out)) == 2


def test_why_a_deployment_launches_nothing_stands_below_the_list(makeway, portal: Portal) -> None:  # type: ignore[no-untyped-def]
    Path("x.yaml").write_text(CLOUD)
    assert makeway("apply", "-f", "x.yaml").code == 0
    assert len(makeway("list").out.splitlines()) == 2, "nothing is said of what has no problem"
    portal.deployments.show_status_of(lambda name: DeploymentStatus(1.0, "boto3 is missing.", unusable=True))
    try:
        assert makeway("list").out.splitlines()[2:] == [
            "cloud: Nothing is launched: the service cannot use its provider, and tries again. boto3 is missing."
        ]
    finally:
        portal.deployments.show_status_of(lambda name: None)


@pytest.mark.covers("F72")
def test_the_cost_of_a_gpu_hour_is_listed_and_stands_beside_the_document(makeway) -> None:  # type: ignore[no-untyped-def]
    both = CLOUD.replace("price: 3.10", "price: 3.10, spot_price: 0.7, market: spot_first")
    Path("x.yaml").write_text(both)
    assert makeway("apply", "-f", "x.yaml").code == 0
    unknown = CLOUD.replace(", price: 3.10", "").replace("hour: 6.50\n", "").replace("name: cloud", "name: gift")
    Path("y.yaml").write_text(unknown)
    assert makeway("apply", "-f", "y.yaml").code == 0
    head, *lines = makeway("list").out.splitlines()
    at = head.index("A GPU-HOUR")
    assert [line[at : head.index("VERSION")].strip() for line in lines] == ["0.35 to 1.55 EUR", "not known"]
    message = makeway("get", "cloud")
    assert message.out == both
    assert message.err.splitlines() == [
        "cloud: 0.00 of 6.50 EUR an hour, 0.00 EUR this month",
        "gpu-2, spot, 2 GPUs: at most 0.70 EUR an hour, 0.35 EUR a GPU-hour",
        "gpu-2, on demand, 2 GPUs: 3.10 EUR an hour, 1.55 EUR a GPU-hour",
    ]
    assert makeway("get", "gift").err.splitlines()[1] == "gpu-2, on demand, 2 GPUs: price not known"
    [first, _] = json.loads(makeway("get", "cloud", "--json").out)["prices"]
    assert (first["market"], first["price"], first["gpu_price"]) == ("spot", 0.7, 0.35)


@pytest.mark.covers("F65")
def test_a_machine_is_shown_with_what_its_init_script_wrote(makeway, portal: Portal) -> None:  # type: ignore[no-untyped-def]
    Path("x.yaml").write_text(CLOUD)
    assert makeway("apply", "-f", "x.yaml").code == 0
    store = portal.store
    row = machine(id="m-9", state="terminating", reason="init_failed")
    assert store.machines.commit("cloud", portal.term, MachineChanges((row,)))
    store.machine_log.write_output("m-9", "init", "no space left\x1b[2J\x07\n", 3, 5.0)
    result = makeway("machine", "cloud", "m-9")
    assert "Its init script failed." in result.out
    assert "── init, exit code 3\nno space left\\x07\n" in result.out, "no control character reaches the terminal"
    refused = makeway("machine", "cloud", "m-9", "--console")
    assert (refused.code, "This service has no backend for machines" in refused.err) == (1, True), refused.err
    assert makeway("machine", "cloud", "m-0").err.startswith("makeway: The deployment cloud has no machine m-0")


def test_every_mistake_is_printed_with_its_line(makeway) -> None:  # type: ignore[no-untyped-def]
    Path("x.yaml").write_text(CLOUD.replace("6.50", "-1").replace("pool: gpu", "pool: gpuu"))
    for verb in ("validate", "apply"):
        result = makeway(verb, "-f", "x.yaml")
        assert result.code == 1
        assert [line.split(": ")[0] for line in result.err.splitlines()] == ["x.yaml:4", "x.yaml:6"]
    assert makeway("apply", "-f", "absent.yaml").err == (
        "makeway: absent.yaml cannot be read: No such file or directory.\n"
    )
    assert "There is no deployment nothing." in makeway("pause", "nothing").err


def test_people_are_told_that_it_is_for_administrators(makeway, ana: Client) -> None:  # type: ignore[no-untyped-def]
    result = makeway("list")
    assert result.code == 1
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("words", [("list",), ("get", "cloud"), ("apply", "-f", "x.yaml"), ("pause", "cloud")])
def test_an_older_service_is_named_as_the_reason(
    makeway, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:  # type: ignore[no-untyped-def]
    Path("x.yaml").write_text(CLOUD)
    real = Client._send

    def without_the_routes(self: Client, call):  # type: ignore[no-untyped-def]
        call.path = call.path.replace("/deployments", "/what-an-older-service-does-not-know")
        return real(self, call)

    with monkeypatch.context() as older:
        older.setattr(Client, "_send", without_the_routes)
        result = makeway(*words)
    assert result.code == 1
    assert result.err == "makeway: this service is of a release without deployments of machines; upgrade it first.\n"
