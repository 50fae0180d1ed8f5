"""System users mode: people log in with their accounts, and their notebooks are theirs alone."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub.portal import Portal, until
from makeway_hub import checks
from makeway_hub.people import is_root, unix_groups
from makeway_hub.settings import read

pytestmark = [pytest.mark.root, pytest.mark.e2e]
ANA, BO = "mkw-una", "mkw-duo"
TEAMS = {"mkw-rnd": ANA, "mkw-devops": BO}
PASSWORD = "correct-horse-9"
ROOT = Path(__file__).parents[2]

# Accounts cannot use a Python below root's home. Where that is all there is, the portal of this test sees the same
# files in a place that everybody may enter; nothing outside of its mount namespace changes.
OPEN_UP = """
set -e
closed=$1 inside=$2; shift 2
bare=$(mktemp -d) && chmod 755 "$bare"
mkdir -p "$bare/$inside" && mount --bind "$closed/$inside" "$bare/$inside"
mount --rbind "$bare" "$closed"
exec "$@"
"""


def wrapper() -> list[str]:
    python = Path(sys.executable).resolve()
    closed = next((d for d in reversed(python.parents) if not d.stat().st_mode & 0o001), None)
    if closed is None:
        return []
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip(f"no account but root may use {python}, and this machine makes no mount namespaces")
    return ["unshare", "-m", "sh", "-c", OPEN_UP, "sh", str(closed), python.relative_to(closed).parts[0]]


@pytest.fixture(scope="module")
def people() -> Iterator[None]:
    """Two accounts with a password, each in the Unix group of a team."""
    for team in TEAMS:
        subprocess.run(["groupadd", "--force", team], check=True)
    for team, name in TEAMS.items():
        subprocess.run(["useradd", "-m", "-s", "/bin/bash", "-G", team, name], check=True, capture_output=True)
    passwords = "".join(f"{name}:{PASSWORD}\n" for name in (ANA, BO))
    subprocess.run(["chpasswd"], input=passwords, text=True, check=True)
    yield
    for name in (ANA, BO):
        subprocess.run(["userdel", "--force", "--remove", name], check=True, capture_output=True)
    for team in TEAMS:
        subprocess.run(["groupdel", team], check=True)


@pytest.fixture(scope="module")
def shared(people: None) -> Iterator[Portal]:
    root = Path(tempfile.mkdtemp(prefix="makeway-"))
    root.chmod(0o755)
    policy = (ROOT / "hub_config" / "policy.yaml").read_text()
    for team in ("rnd", "devops"):
        policy = policy.replace(f"groups: [{team}]", f"groups: [mkw-{team}]")
    (root / "policy.yaml").write_text(policy)
    env = {"MAKEWAY_MODE": "system", "MAKEWAY_POLICY_FILE": str(root / "policy.yaml")}
    portal = Portal(root, wrap=wrapper(), **env).start()
    yield portal
    portal.stop()
    shutil.rmtree(root)


def process(portal: Portal, user: str) -> Path:
    pid = portal.hub("GET", f"/users/{user}").json()["servers"][""]["state"]["pid"]
    return Path(f"/proc/{pid}")


def as_user(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    entry = pwd.getpwnam(name)
    groups = os.getgrouplist(name, entry.pw_gid)
    return subprocess.run(
        command, user=entry.pw_uid, group=entry.pw_gid, extra_groups=groups, capture_output=True, text=True
    )


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


def test_nobody_reads_anothers_token_or_the_portals_secrets(shared: Portal) -> None:
    shared.start_server(ANA, profile="gpu1", team="rnd") if not shared.server(ANA) else None
    assert as_user(BO, "cat", str(process(shared, ANA) / "environ")).returncode != 0
    for path in (shared.state.secrets, shared.state.logs, shared.state.root / "jupyterhub.sqlite"):
        found = as_user(BO, "cat" if path.is_file() else "ls", str(path))
        assert found.returncode != 0, f"{path} can be read by others"


def test_root_and_wrong_passwords_do_not_get_in(shared: Portal) -> None:
    for name, password in ((ANA, "wrong"), ("root", PASSWORD), ("nobody-here", PASSWORD)):
        with pytest.raises(AssertionError, match="may not log in"):
            shared.browser(name, password)
    assert is_root("root")
    assert not is_root(ANA)


def test_groups_are_those_of_the_machine(people: None) -> None:
    assert unix_groups(ANA) == sorted([ANA, "mkw-rnd"])
    assert unix_groups("nobody-here") == []


def test_a_python_that_others_cannot_reach_is_named(tmp_path: Path) -> None:
    settings = read({"MAKEWAY_MODE": "system", "MAKEWAY_STATE_DIR": str(tmp_path / "var")})
    tmp_path.chmod(0o700)
    with pytest.raises(checks.CannotStart, match="other accounts may not enter"):
        checks.check_reachable(settings)
