"""Choose the Unix account of a job: the one that started Makeway, or (system users mode) its owner's.

Used by the local backend. In system users mode the service runs as root and every launcher as the owner of its job,
with that account's groups and home.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from makeway_api.accounts import account_of_user
from makeway_api.proxies import USERS_VARIABLES, without_proxy

from ..base import BackendError

OWN = ("HOME", "USER", "LOGNAME", "SHELL")
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class UnixAccount:
    """A Unix account; `switch` is true where a process has to change to it."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    personal: Mapping[str, str]
    switch: bool

    def environment(self, python: str) -> dict[str, str]:
        """Return the environment of a job of this account; `python`'s folder comes first in PATH."""
        known = USERS_VARIABLES if self.switch else (*USERS_VARIABLES, "TMPDIR")
        kept = {name: value for name, value in os.environ.items() if name in known or name.startswith("LC_")}
        kept |= without_proxy(kept)
        path = [os.path.dirname(python), kept.get("PATH") or DEFAULT_PATH]
        return {**kept, "PATH": os.pathsep.join(filter(None, path)), **self.personal}


def this_account() -> UnixAccount:
    """Return the account that Makeway runs under (demo mode)."""
    personal = {name: os.environ[name] for name in OWN if name in os.environ}
    return UnixAccount(personal.get("USER", ""), os.geteuid(), os.getegid(), (), personal, switch=False)


def account_of(owner: str) -> UnixAccount:
    """Return a job owner's account; BackendError where there is none, or where it is root."""
    try:
        entry = account_of_user(owner)
    except KeyError:
        raise BackendError(
            f"There is no account {owner!r} on {socket.gethostname()}, and jobs run under their owner's account; "
            "ask the administrator to create it."
        ) from None
    if entry.pw_uid == 0:
        raise BackendError(f"Jobs never run as root ({owner!r}); log in under a personal account.")
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    shell = entry.pw_shell or "/bin/sh"
    personal = {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name, "SHELL": shell}
    return UnixAccount(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, personal, switch=True)


def closed_folder(path: Path) -> Path | None:
    """Find the first folder above `path` that other accounts cannot pass through; None when all are open."""
    for folder in reversed(path.resolve().parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None
