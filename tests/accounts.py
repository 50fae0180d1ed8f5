"""Unix accounts for a test, and a portal in system users mode that they can log in to with their passwords."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub.portal import Portal

PASSWORD = "correct-horse-9"
ROOT = Path(__file__).parents[1]

# Accounts cannot use a Python below root's home. Where that is all there is, the portal of a test sees the same
# files in a place that every account may enter; nothing outside of its mount namespace changes.
OPEN_UP = """
set -e
closed=$1 inside=$2; shift 2
bare=$(mktemp -d) && chmod 755 "$bare"
mkdir -p "$bare/$inside" && mount --bind "$closed/$inside" "$bare/$inside"
mount --rbind "$bare" "$closed"
exec "$@"
"""


def wrapper() -> list[str]:
    """What to put before a command so that other accounts may use this Python."""
    python = Path(sys.executable).resolve()
    closed = next((d for d in reversed(python.parents) if not d.stat().st_mode & 0o001), None)
    if closed is None:
        return []
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip(f"no account but root may use {python}, and this machine makes no mount namespaces")
    return ["unshare", "-m", "sh", "-c", OPEN_UP, "sh", str(closed), python.relative_to(closed).parts[0]]


@contextmanager
def accounts(people: Mapping[str, str]) -> Iterator[None]:
    """Make accounts with a password, each in a Unix group, and remove them in the end."""
    groups = sorted(set(people.values()))
    try:
        for group in groups:
            subprocess.run(["groupadd", "--force", group], check=True)
        for name, group in people.items():
            # A run that was killed leaves its accounts behind.
            subprocess.run(["userdel", "--force", "--remove", name], check=False, capture_output=True)
            command = ["useradd", "--create-home", "--shell", "/bin/bash", "--groups", group, name]
            subprocess.run(command, check=True, capture_output=True)
        passwords = "".join(f"{name}:{PASSWORD}\n" for name in people)
        subprocess.run(["chpasswd"], input=passwords, text=True, check=True)
        yield
    finally:
        for name in people:
            subprocess.run(["userdel", "--force", "--remove", name], check=False, capture_output=True)
        for group in groups:
            subprocess.run(["groupdel", group], check=False, capture_output=True)


@contextmanager
def shared_portal(groups: Mapping[str, str], more: str = "") -> Iterator[Portal]:
    """The portal in system users mode with the sample policy, whose teams are these Unix groups."""
    root = Path(tempfile.mkdtemp(prefix="makeway-"))
    root.chmod(0o755)
    policy = (ROOT / "hub_config" / "policy.yaml").read_text()
    for team, group in groups.items():
        policy = policy.replace(f"groups: [{team}]", f"groups: [{group}]")
    (root / "policy.yaml").write_text(policy)
    env = {"MAKEWAY_MODE": "system", "MAKEWAY_POLICY_FILE": str(root / "policy.yaml")}
    portal = Portal(root, more, wrap=wrapper(), **env)
    try:
        yield portal.start()
    finally:
        portal.stop()
        shutil.rmtree(root)


def as_user(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as that person would from a shell."""
    entry = pwd.getpwnam(name)
    groups = os.getgrouplist(name, entry.pw_gid)
    return subprocess.run(
        command, user=entry.pw_uid, group=entry.pw_gid, extra_groups=groups, capture_output=True, text=True
    )
