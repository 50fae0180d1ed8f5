"""Unix accounts for a test, and a portal in system users mode that they can log in to with their passwords."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub.portal import Portal

PASSWORD = "correct-horse-9"
ROOT = Path(__file__).parents[1]
PARTS = (".venvs", "node_modules", "hub_config", "spawner", "quota_service", "widgets")
"""The folders of the checkout that a portal needs besides the virtual environment."""

# Other accounts may not enter root's home, nor a checkout that only its owner may enter. The processes of a test see
# the same files in folders that every account may enter; nothing outside of their mount namespace changes.
OPEN = """
set -e
while [ "$1" != -- ]; do
    closed=$1 many=$2; shift 2
    open=$(mktemp -d)
    mount -t tmpfs -o mode=755 tmpfs "$open"
    while [ "$many" -gt 0 ]; do
        if [ -d "$closed/$1" ]; then mkdir "$open/$1"; else touch "$open/$1"; fi
        mount --rbind "$closed/$1" "$open/$1"
        shift; many=$((many - 1))
    done
    mount --rbind "$open" "$closed"
    umount -l "$open"
    rmdir "$open"
done
shift
exec "$@"
"""


def closed_folders(paths: Iterable[Path]) -> dict[Path, set[str]]:
    """Return the folders above these paths that other accounts may not enter, with the needed names inside."""
    result: dict[Path, set[str]] = {}
    for path in paths:
        for name, folder in zip((path, *path.parents), path.parents, strict=False):
            if not folder.stat().st_mode & 0o001:
                result.setdefault(folder, set()).add(name.name)
    return result


def wrapper() -> list[str]:
    """Return the words before a command whose Python and checkout other accounts may use."""
    python = Path(sys.executable).resolve()
    parts = [ROOT / name for name in PARTS]
    closed = closed_folders([python, Path(sys.prefix), *(part for part in parts if part.exists())])
    if not closed:
        return []
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip(f"no account but root may enter {min(closed)}, and this machine makes no mount namespaces")
    words = []
    for folder in sorted(closed, key=lambda folder: len(folder.parts), reverse=True):  # the innermost first
        words += [str(folder), str(len(closed[folder])), *sorted(closed[folder])]
    return ["unshare", "-m", "sh", "-c", OPEN, "sh", *words, "--"]


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


def compile_notebook() -> None:
    """Compile what a notebook imports: other accounts cannot write bytecode into the environment."""
    code = "import jupyterhub.singleuser, jupyterlab.labapp, jupyter_server.serverapp, ipykernel.kernelapp"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)


@contextmanager
def shared_portal(groups: Mapping[str, str], more: str = "") -> Iterator[Portal]:
    """The portal in system users mode with the sample policy, whose teams are these Unix groups."""
    compile_notebook()
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
