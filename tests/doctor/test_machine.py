"""`doctor` on one machine, its database, addresses and certificates: faults that are planted, and none without."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from makeway_quota.doctor import database, machine, network
from makeway_quota.doctor.command import diagnose
from makeway_quota.doctor.network import check_address, check_own_address
from makeway_quota.doctor.server import clock_skew, expiring
from makeway_quota.main import main
from makeway_quota.settings import ServiceSettings, load
from makeway_quota.store.database.postgres_check import ServerFacts, read_facts, stored_policy
from makeway_quota.store.store import open_store
from pooler import pooler
from postgres import empty_database, postgres_server

GOOD = ServerFacts(version=150_004, encrypted=True, latency=0.001, clock_skew=0.2, free_connections=80)


def settings(folder: Path, **changes: Any) -> ServiceSettings:
    return replace(load(environ={"MAKEWAY_STATE_DIR": str(folder)}), port=free_port(), **changes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_healthy_machine_has_no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_disk_space", lambda folder: iter(()))  # whatever the disk of the tests has
    assert await diagnose(settings(tmp_path)) == []
    assert list(tmp_path.iterdir()) == [], "nothing is left, and no database is made"


def test_a_folder_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (result,) = machine.folders(settings(tmp_path / "file" / "state"))
    assert (result.severity, "cannot be written to" in result.what) == ("error", True)


def test_little_room_and_few_inodes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 100, machine.GIB // 2))
    real = os.statvfs(tmp_path)
    few = namedtuple("few", "f_files f_favail")
    monkeypatch.setattr(os, "statvfs", lambda path: few(1000, 0))
    assert real
    disk, inodes = machine.folders(settings(tmp_path))
    assert (disk.severity, inodes.severity) == ("error", "error")
    assert "0.5 GiB free" in disk.what
    assert "0 free inodes of 1000" in inodes.what


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_a_port_that_another_program_has_is_named(tmp_path: Path, host: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        port = taken.getsockname()[1]
        (result,) = machine.port(replace(settings(tmp_path), host=host, port=port))
    assert result.what == f"The port {port} cannot be used: address already in use."
    assert result.where == (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


@pytest.mark.parametrize("host", ["", "127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_free_port_is_none_of_another_program(tmp_path: Path, host: str) -> None:
    assert list(machine.port(replace(settings(tmp_path), host=host))) == []


def test_secrets_that_others_may_read_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir(mode=0o700)
    (folder / "password").write_text("x")
    (folder / "password").chmod(0o644)
    (result,) = machine.exposed_secrets(settings(tmp_path))
    assert result.remedy == f"chmod go-rwx {folder}/password"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(GOOD, version=110_002), "PostgreSQL 11 is too old"),
        (replace(GOOD, version=130_022), "PostgreSQL 13 is too old"),
        (replace(GOOD, encrypted=False), "not encrypted"),
        (replace(GOOD, latency=0.3), "A statement takes 300 ms"),
        (replace(GOOD, free_connections=2), "has 2 connections left"),
        (replace(GOOD, clock_skew=-45.0), "45 s apart"),
    ],
)
def test_each_fault_of_a_database_is_named(facts: ServerFacts, words: str) -> None:
    assert list(database._findings(GOOD)) == []
    (result,) = database._findings(facts)
    assert words in result.what


def test_a_real_postgresql_has_no_findings_and_one_behind_a_pooler_has() -> None:
    with postgres_server() as folder:
        url = empty_database(folder)
        assert stored_policy(url) is None
        facts = read_facts(url)
        assert facts is not None
        assert facts.version > database.MIN_VERSION
        assert abs(facts.clock_skew) < 5
        assert [one.what for one in database.check_database(url) if "statement takes" not in one.what] == []
        with pooler(folder) as made, pytest.raises(Exception, match="pool_mode = transaction"):
            database.check_database(made.url)


def test_the_policy_in_force_is_read_without_a_change_of_the_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'makeway.sqlite'}"
    assert stored_policy(url) is None
    assert not (tmp_path / "makeway.sqlite").exists()
    store = open_store(url)
    store.policies.add("version: 1", "ana", "", 0, 1.0)
    store.close()
    assert stored_policy(url) == "version: 1"


async def test_addresses_without_a_name_or_an_answer_are_named() -> None:
    (unknown,) = await check_address("http://no-such-host.invalid:8081/hub", "The Hub", "Start it.")
    assert "The name no-such-host.invalid of The Hub is not resolved" in unknown.what
    (refused,) = await check_address(f"http://127.0.0.1:{free_port()}/hub", "The Hub", "Start it.")
    assert (refused.severity, refused.remedy) == ("error", "Start it.")
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        there.listen()
        assert list(await check_address(f"http://127.0.0.1:{there.getsockname()[1]}", "The Hub", "-")) == []


async def test_a_service_that_is_not_led_back_to_itself_is_not_taken_for_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the pod of a lone replica, the Service's address leads to that pod, or nowhere."""
    monkeypatch.setattr(network, "SECONDS", 0.2)
    with socket.socket() as silent, socket.socket() as own:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        fill = [socket.socket() for _ in range(4)]  # so that it drops further connections, as a network may
        for one in fill:
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        own.bind(("127.0.0.1", 0))
        own.listen()
        port = own.getsockname()[1]
        for address in (silent.getsockname()[1], free_port()):
            url = f"http://127.0.0.1:{address}"
            (note,) = await check_own_address(url, port, "The service", "Start it.")
            assert note.severity == "note"
            assert "its own pod is not led back to itself" in note.what
            (error,) = await check_own_address(url, free_port(), "The service", "Start it.")
            assert (error.severity, error.remedy) == ("error", "Start it."), "in another pod it is a fault"
        assert await check_own_address(f"http://127.0.0.1:{port}", port, "The service", "-") == []
        (unknown,) = await check_own_address("http://no-such-host.invalid:1", port, "The service", "-")
        assert unknown.severity == "error", "a name is resolved everywhere, or nowhere"
        for one in fill:
            one.close()


def test_clocks_and_certificates_are_findings_only_where_it_matters() -> None:
    assert clock_skew(2.0, "x") == expiring(90 * 86_400.0) == []
    assert [one.severity for one in (*clock_skew(9.0, "x"), *clock_skew(60.0, "x"))] == ["warning", "error"]
    (soon,) = expiring(3 * 86_400.0)
    assert "ends in 3 days" in soon.what


def test_the_command_ends_with_1_where_something_will_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("MAKEWAY_STATE_DIR", str(tmp_path / "file" / "state"))
    assert main(["doctor", "--format", "json"]) == 1
    result = json.loads(capsys.readouterr().out)["findings"]
    assert result[0]["severity"] == "error"
    monkeypatch.setenv("MAKEWAY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(machine, "port", lambda settings: [])
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "No problems found.\n"


def test_the_account_of_the_hub_is_checked_only_on_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAKEWAY_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("MAKEWAY_BACKEND", "local")
    assert main(["doctor", "--hub"]) == 2
    assert "MAKEWAY_BACKEND=kubernetes" in capsys.readouterr().err


def test_a_service_that_finds_no_cluster_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAKEWAY_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("MAKEWAY_BACKEND", "kubernetes")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert main(["doctor"]) == 1
    assert "No Kubernetes cluster is named" in capsys.readouterr().out
