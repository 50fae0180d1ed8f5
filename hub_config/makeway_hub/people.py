"""Who may log in: the demo's sample users with one generated password, or the accounts of this machine."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
from secrets import compare_digest
from typing import Any

from jupyterhub.auth import Authenticator, PAMAuthenticator
from traitlets import Unicode

from .pages import WithPages


class SampleAuthenticator(WithPages, Authenticator):  # type: ignore[misc]
    """The demo's people: known names, one password for all; it keeps outsiders out, not one from another."""

    password = Unicode("", help="The password of every sample user.").tag(config=True)

    async def authenticate(self, handler: Any, data: dict[str, str]) -> str | None:
        """Answer the name where the password is right; which names exist is `allowed_users`' business."""
        given = (data.get("password") or "").encode("utf-8", "replace")
        if self.password and compare_digest(given, self.password.encode()):
            return data.get("username")
        return None


class SystemAuthenticator(WithPages, PAMAuthenticator):  # type: ignore[misc]
    """Accounts of this machine by PAM; a person's Unix groups become groups of the Hub.

    They are looked at again while somebody works (every `auth_refresh_age` seconds at most): who is taken out of a
    group loses its team within seconds, and who has no account any more, or no allowed one, is shut out.

    JupyterHub refuses to start with both `manage_groups` and `load_groups`. A site that lists its groups in the
    configuration sets `c.Authenticator.manage_groups = False`.
    """

    def authenticate(self, handler: Any, data: dict[str, str]) -> Any:
        """Ask PAM, then add the groups."""
        answer = super().authenticate(handler, data)
        return self._with_groups(answer)

    async def refresh_user(self, user: Any, handler: Any = None) -> dict[str, Any] | bool:
        """Read the groups again; False, which means log in again, where the account is gone or not allowed."""
        if not self.manage_groups:
            return True
        model: dict[str, Any] = {"name": user.name}
        model["groups"] = await asyncio.to_thread(unix_groups, user.name)
        if not model["groups"] or is_root(user.name):
            return False
        allowed = self.check_allowed(user.name, model)
        if hasattr(allowed, "__await__"):
            allowed = await allowed
        if not allowed and not user.admin:
            return False
        if self.admin_groups:
            model["admin"] = await self.is_admin(handler, model)
        return model

    async def _with_groups(self, answer: Any) -> dict[str, Any] | None:
        if hasattr(answer, "__await__"):
            answer = await answer
        if not answer:
            return None
        model: dict[str, Any] = dict(answer) if isinstance(answer, dict) else {"name": answer}
        if is_root(model["name"]):
            self.log.warning("Refused the login of %s: nobody works as root here", model["name"])
            return None
        if self.manage_groups:
            model["groups"] = unix_groups(model["name"])
        return model


def is_root(name: str) -> bool:
    """Tell whether an account is root by its number, whatever its name; a notebook of root's would own the machine."""
    try:
        return pwd.getpwnam(name).pw_uid == 0
    except KeyError:
        return False


def unix_groups(name: str) -> list[str]:
    """Name the Unix groups of an account, its own group included; an unknown account has none."""
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        return []
    names = []
    for gid in os.getgrouplist(name, account.pw_gid):
        try:
            names.append(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return sorted(set(names))
