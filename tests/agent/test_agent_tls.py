"""An agent whose service speaks TLS: it trusts what the machine trusts, and nothing else."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from agent.machine_service import MachineService, answering
from agent.machines import TestMachine
from agent.trust import hash_certificates
from makeway.agent.client import AgentClient
from makeway.launcher import service as launcher_service
from pods import wait_until

from kube_cluster.certificates import Authority


def test_an_agent_trusts_the_authorities_of_the_file_that_its_environment_gives(
    machine: TestMachine, service: MachineService, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    service.encrypt(authority)
    (tmp_path / "authority.pem").write_bytes(authority.file.read_bytes())
    machine.env["SSL_CERT_FILE"] = str(tmp_path / "authority.pem")
    machine.start()
    machine.joined()
    assert service.joins


@pytest.mark.parametrize(
    ("host", "trusted", "message"),
    [("localhost", False, "certificate verify failed"), ("other.test", True, "mismatch")],
    ids=["unknown authority", "certificate of another host"],
)
def test_an_agent_sends_its_token_to_no_service_whose_certificate_it_cannot_verify(
    host: str, trusted: bool, message: str, machine: TestMachine, service: MachineService, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    service.encrypt(authority, host)
    (tmp_path / "authority.pem").write_bytes(
        (authority if trusted else Authority(tmp_path / "other")).file.read_bytes()
    )
    machine.env["SSL_CERT_FILE"] = str(tmp_path / "authority.pem")
    machine.start()
    wait_until(lambda: "has not joined" in machine.log(), "what the agent says of it")
    assert message in machine.log(), machine.log()
    assert not service.requests


def test_an_agent_trusts_an_authority_that_is_added_while_it_runs(
    machine: TestMachine, service: MachineService, tmp_path: Path
) -> None:
    authority, earlier = Authority(tmp_path / "authority"), Authority(tmp_path / "earlier", "earlier authority")
    service.encrypt(authority)
    (tmp_path / "authority.pem").write_bytes(earlier.file.read_bytes())
    machine.env["SSL_CERT_FILE"] = str(tmp_path / "authority.pem")
    machine.start()
    wait_until(lambda: "has not joined" in machine.log(), "what the agent says of it")
    (tmp_path / "authority.pem").write_bytes(earlier.file.read_bytes() + authority.file.read_bytes())
    machine.joined()
    assert len(service.joins) == 1


def test_an_agent_reads_no_file_of_all_authorities_where_a_folder_has_that_of_its_service(
    machine: TestMachine, service: MachineService, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    service.encrypt(authority)
    folder = tmp_path / "certificates"
    folder.mkdir()
    (folder / "authority.pem").write_bytes(authority.file.read_bytes())
    hash_certificates(folder)
    machine.env["SSL_CERT_DIR"] = str(folder)
    machine.start()
    machine.joined()
    assert "not reached" not in machine.log()


def test_a_folder_without_the_authority_of_the_service_is_not_all_that_an_agent_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL has two places: where the folder does not do, the file of all authorities is read, within one request."""
    authority, other = Authority(tmp_path / "authority"), Authority(tmp_path / "other")
    folder = tmp_path / "certificates"
    folder.mkdir()
    (folder / "other.pem").write_bytes(other.file.read_bytes())
    hash_certificates(folder)
    paths = ssl.get_default_verify_paths()._replace(capath=str(folder), cafile=str(authority.file))
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(folder))
    trusting = launcher_service._Authorities()
    monkeypatch.setattr(launcher_service, "AUTHORITIES", trusting)
    load = ssl.SSLContext.set_default_verify_paths
    files: list[int] = []

    def load_all(context: ssl.SSLContext) -> None:
        """Stand for the file that OpenSSL was built with, which no test may change."""
        load(context)
        context.load_verify_locations(cafile=str(authority.file))
        files.append(1)

    monkeypatch.setattr(ssl.SSLContext, "set_default_verify_paths", load_all)
    with answering() as encrypted:
        encrypted.encrypt(authority)
        client = AgentClient(encrypted.url, "m-1", encrypted.token)
        client.report({"attempts": []})
        client.close()
    assert len(files) == 1
    assert len(encrypted.reports) == 1


def test_all_connections_of_a_process_share_one_tls_context(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = []
    create = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **more: contexts.append(create(**more)) or contexts[-1])
    monkeypatch.setattr(launcher_service, "AUTHORITIES", launcher_service._Authorities())
    for number in range(3):
        service = launcher_service.Service(f"https://host-{number}.test/a", "token")
        service._connection(1.0)
        service._connection(1.0)
    assert len(contexts) == 1
    assert contexts[0].verify_mode == ssl.CERT_REQUIRED
    assert contexts[0].check_hostname


def test_certificates_of_the_authority_pass_the_strict_checks_of_newer_pythons(tmp_path: Path) -> None:
    """Python 3.13 makes these checks by default."""
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.server_certificate("server", "server", ["localhost"])
    serving, asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(authority.file))
    serving.load_cert_chain(certificate, key)
    asking.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    client = asking.wrap_bio(to_client, to_server, server_hostname="localhost")
    for end in (client, server, client):  # each reads what the other has written
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert client.getpeercert()
