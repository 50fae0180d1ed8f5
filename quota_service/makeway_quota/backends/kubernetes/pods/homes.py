"""Find the volume with the home of a job's owner, and say why a job's pods have none.

The setting names a claim in the jobs' namespace, as a pod mounts only claims of its own namespace, and if need be a
folder on it: `home-{user}`, or `homes/{user}`. Names of users are written as KubeSpawner writes them.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ....policy.pod_template import folder_problem, path_problem
from ..api.client import SILENT, ApiClient, ApiStatusError, ApiUnreachable, Object
from .volumes import Mount

KEPT_SECONDS = 60.0
"""How long what was read of a claim is used: of a job that is started, and of those submitted after it."""
MAX_KEPT = 10_000
TIMEOUT_SECONDS = 2.0
"""Seconds that a submission waits for what the API server says about its owner's home."""
SILENT_SECONDS = 10.0
"""How long no submission asks an API server that did not answer in that time."""
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class HomeSetting:
    """Where homes are: the claim, the folder on it ("" for the whole) and the path that pods have them under."""

    claim: str
    folder: str = ""
    path: str = "/home/jovyan"


def home_setting(text: str, path: str) -> HomeSetting | None:
    """Return the setting, None where it is empty; ValueError says what is wrong."""
    if not text:
        return None
    claim, _, folder = text.partition("/")
    filled = re.sub(r"\{(user|escaped_user)\}", "x", text)
    if "{" in filled or "}" in filled:
        raise ValueError(f"MAKEWAY_KUBE_HOME_CLAIM={text!r}: it may have {{user}} and {{escaped_user}}, and no others.")
    if not CLAIM.fullmatch(filled.partition("/")[0]) or folder_problem(folder):
        raise ValueError(
            f"MAKEWAY_KUBE_HOME_CLAIM={text!r} names no claim: expected home-{{user}}, or a claim and a folder on it, "
            "homes/{user}."
        )
    if problem := path_problem(path):
        raise ValueError(f"MAKEWAY_KUBE_HOME_PATH={path!r}: {problem}.")
    return HomeSetting(claim, folder, str(PurePosixPath(path)))


def slug(name: str) -> str:
    """Return a user's name as KubeSpawner's `{username}`: as it is where it is a valid name of an object.

    Else with a hash: no two names meet, as far as eight digits of SHA-256 do not.
    """
    if "--" not in name and len(name) <= 48 and re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name):
        return name
    safe = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-")[:37].rstrip("-")
    if safe and not "a" <= safe[0] <= "z":
        safe = f"x-{safe[:35]}"
    return f"{safe or 'x'}---{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def escaped(name: str) -> str:
    """Return a user's name as KubeSpawner's `{escaped_username}`: other bytes than a to z and 0 to 9 as `-2d`.

    A name with control characters is a slug: KubeSpawner writes the lowest of them with one digit, so that names meet.
    """
    safe = "abcdefghijklmnopqrstuvwxyz0123456789"
    if any(character < " " for character in name):
        return slug(name)
    return "".join(c if c in safe else "".join(f"-{byte:x}" for byte in c.encode()) for c in name)


class Homes:
    """The homes of owners on one cluster, as the claims of one namespace show them."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        setting: HomeSetting | None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._setting = setting
        self._monotonic = monotonic
        self._known: dict[str, tuple[float, str]] = {}
        """claims, until when what was read of them is used, and why they cannot be mounted (empty: they can)"""
        self._silent_until = 0.0

    async def mount(self, owner: str) -> Mount | None:
        """Return the mount of a home, None where its claim cannot be mounted; ApiUnreachable without an answer."""
        mount = self._mount(owner)
        return None if mount is None or await self._problem(mount) else mount

    async def home_notice(self, owner: str, volumes: Sequence[str]) -> str:
        """Return why an owner's jobs do not see their home, and what to do; "" where they do, or where none has a home.

        `volumes` are the paths of the team's volumes.
        """
        mount = self._mount(owner)
        if mount is None:
            return ""
        why = f"Makeway cannot tell, as {SILENT}"
        if self._monotonic() >= self._silent_until:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    why = await self._problem(mount)
            except (ApiUnreachable, TimeoutError):
                self._silent_until = self._monotonic() + SILENT_SECONDS
        if not why:
            return ""
        instead = f", or use the volumes of your team: {', '.join(volumes)}" if volumes else ""
        return f"The job does not see your home folder: {why}. Send the files that it needs with --files{instead}."

    def _mount(self, owner: str) -> Mount | None:
        setting = self._setting
        if setting is None:
            return None
        claim, folder = (
            text.replace("{user}", slug(owner)).replace("{escaped_user}", escaped(owner))
            for text in (setting.claim, setting.folder)
        )
        return Mount("makeway-home", claim, setting.path, sub_path=folder, home=True)

    async def _problem(self, mount: Mount) -> str:
        """Return why the claim of a home cannot be mounted, "" where it can."""
        now = self._monotonic()
        known = self._known.get(mount.claim)
        if known is not None and now < known[0]:
            return known[1]
        path = f"/api/v1/namespaces/{self._namespace}/persistentvolumeclaims/{mount.claim}"
        try:
            why = claim_problem(await self._client.get(path))
        except ApiStatusError as refusal:
            why = f"Makeway has no right to read the claim {mount.claim} ({refusal.message})"
            if refusal.status == 404:
                why = f"there is no claim {mount.claim} in the namespace {self._namespace}"
        if len(self._known) >= MAX_KEPT:
            self._known.clear()
        self._known[mount.claim] = now + KEPT_SECONDS, why
        return why


def claim_problem(claim: Object) -> str:
    """Return why a claim cannot be mounted by pods on any node, "" where it can."""
    name = claim["metadata"]["name"]
    status = claim.get("status") or {}
    modes = status.get("accessModes") or claim.get("spec", {}).get("accessModes") or []
    if claim["metadata"].get("deletionTimestamp"):
        return f"the claim {name} is being deleted"
    if status.get("phase") == "Lost":
        return f"the volume of the claim {name} is lost"
    if "ReadWriteMany" not in modes:
        return f"the claim {name} is {' and '.join(modes)}, and only one that is ReadWriteMany is mounted on all nodes"
    return ""
