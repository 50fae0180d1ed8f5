"""System users mode: accounts of the machine log in, and their notebooks are private to them."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounts import PASSWORD, accounts, as_user, shared_portal
from hub.portal import Portal, until
from makeway_api.models import JobRequest
from makeway_hub import checks
from makeway_hub.settings import read
from makeway_hub.users import is_root, unix_groups

pytestmark = [pytest.mark.root, pytest.mark.e2e]
ANA, BO, TRI = "mkw-una", "mkw-duo", "mkw-Tri"


@pytest.fixture(scope="module")
def accounts_of_teams() -> Iterator[None]:
    """Create accounts with a password, each in the Unix group of a team."""
    with accounts({ANA: "mkw-rnd", BO: "mkw-devops", TRI: "mkw-devops"}):
        yield


@pytest.fixture(scope="module")
def shared(accounts_of_teams: None) -> Iterator[Portal]:
    with shared_portal({"rnd": "mkw-rnd", "devops": "mkw-devops"}) as portal:
        yield portal


def process(portal: Portal, user: str) -> Path:
    pid = portal.hub("GET", f"/users/{user}").json()["servers"][""]["state"]["pid"]
    return Path(f"/proc/{pid}")


@pytest.mark.covers("N22", "N01")
def test_unix_groups_are_teams_and_notebooks_belong_to_the_account(shared: Portal) -> None:
    ana = shared.browser(ANA, PASSWORD)
    page = ana.get("/hub/spawn").text
    assert 'value="rnd/gpu1"' in page
    assert 'value="devops/gpu1"' not in page
    shared.pick(ana, choice="rnd/gpu1")
    until(lambda: (shared.server(ANA) or {}).get("ready"), "ana's notebook is up")
    entry = pwd.getpwnam(ANA)
    status = (process(shared, ANA) / "status").read_text()
    assert f"Uid:\t{entry.pw_uid}\t{entry.pw_uid}" in status
    groups = next(line for line in status.splitlines() if line.startswith("Groups:")).split()[1:]
    assert set(map(int, groups)) == set(os.getgrouplist(ANA, entry.pw_gid))
    assert os.readlink(process(shared, ANA) / "cwd") == entry.pw_dir
    environ = (process(shared, ANA) / "environ").read_bytes().decode().split("\0")
    assert f"HOME={entry.pw_dir}" in environ


def test_an_account_with_capitals_is_the_hubs_user_in_small_letters(shared: Portal) -> None:
    name = TRI.lower()
    for typed in (TRI, name):
        tri = shared.browser(typed, PASSWORD)
        assert 'value="devops/gpu1"' in tri.get("/hub/spawn").text
    shared.pick(tri, choice="devops/gpu1")
    until(lambda: (shared.server(name) or {}).get("ready"), "the notebook is up")
    entry = pwd.getpwnam(TRI)
    assert f"Uid:\t{entry.pw_uid}\t{entry.pw_uid}" in (process(shared, name) / "status").read_text()
    with shared.client(shared.user_token(name)) as client:
        job = client.submit(JobRequest(team="devops", profile="gpu1", command=["sh", "-c", "id -un; echo $HOME"]))
        until(lambda: client.job(job.id).state.ended, "its job has ended")
        assert client.logs(job.id).text == f"{TRI}\n{entry.pw_dir}\n"


def test_tokens_and_secrets_are_private_to_their_accounts(shared: Portal) -> None:
    shared.start_server(ANA, profile="gpu1", team="rnd") if not shared.server(ANA) else None
    assert as_user(BO, "cat", str(process(shared, ANA) / "environ")).returncode != 0
    for path in (shared.state.secrets, shared.state.logs, shared.state.root / "jupyterhub.sqlite"):
        result = as_user(BO, "cat" if path.is_file() else "ls", str(path))
        assert result.returncode != 0, f"{path} can be read by others"


def test_root_and_wrong_passwords_do_not_get_in(shared: Portal) -> None:
    for name, password in ((ANA, "wrong"), ("root", PASSWORD), ("unknown-here", PASSWORD)):
        with pytest.raises(AssertionError, match="may not log in"):
            shared.browser(name, password)
    assert is_root("root")
    assert not is_root(ANA)


def test_groups_are_those_of_the_machine(accounts_of_teams: None) -> None:
    assert unix_groups(ANA) == sorted([ANA, "mkw-rnd"])
    assert unix_groups("unknown-here") == []


def test_a_python_that_others_cannot_reach_is_named(tmp_path: Path) -> None:
    settings = read({"MAKEWAY_MODE": "system", "MAKEWAY_STATE_DIR": str(tmp_path / "var")})
    tmp_path.chmod(0o700)
    with pytest.raises(checks.CannotStart, match="other accounts may not enter"):
        checks.check_reachable(settings)


def test_a_state_directory_with_too_long_a_path_is_named() -> None:
    settings = read({"MAKEWAY_MODE": "system", "MAKEWAY_STATE_DIR": "/var/lib/" + "long/" * 20})
    with pytest.raises(checks.CannotStart, match="too long for the sockets of kernels"):
        checks.check_sockets(settings)
