"""Authenticate the demo's sample users (one generated password) or the accounts of this machine (PAM)."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
from contextlib import suppress
from secrets import compare_digest
from typing import Any

from jupyterhub.auth import Authenticator, PAMAuthenticator
from makeway_api.accounts import account_of_user
from tornado.web import HTTPError
from traitlets import Unicode

from .pages import WithPages


class SampleAuthenticator(WithPages, Authenticator):  # type: ignore[misc]
    """The demo's users: known names, one password for all; it separates users from outsiders, not from each other."""

    password = Unicode("", help="The password of every sample user.").tag(config=True)

    async def authenticate(self, handler: Any, data: dict[str, str]) -> str | None:
        """Return the user name if the password is right; JupyterHub checks it against `allowed_users`."""
        given = (data.get("password") or "").encode("utf-8", "replace")
        if self.password and compare_digest(given, self.password.encode()):
            return data.get("username")
        return None


class SystemAuthenticator(WithPages, PAMAuthenticator):  # type: ignore[misc]
    """Accounts of this machine by PAM; an account's Unix groups become its groups in the Hub.

    Groups are read again while a user is active (every `auth_refresh_age` seconds at most): an account that is removed
    from a group loses its team within seconds, and one that is deleted or no longer allowed is logged out.

    JupyterHub refuses to start with both `manage_groups` and `load_groups`. A site that lists its groups in the
    configuration sets `c.Authenticator.manage_groups = False`.
    """

    def authenticate(self, handler: Any, data: dict[str, str]) -> Any:
        """Return PAM's answer with the account's groups.

        Names of accounts may have capitals, which the Hub writes small: typed in small letters they mean that account.
        """
        named = data | {"username": account_name(data["username"])}
        self._check_namesakes(named["username"])
        return self._with_groups(super().authenticate(handler, named))

    def _check_namesakes(self, name: str) -> None:
        """Refuse an account that the Hub would take for another one, whose name has other capitals."""
        try:
            account = pwd.getpwnam(name)
            taken_for = self.normalize_username(name)
        except (KeyError, ValueError):
            return
        if taken_for != name.lower() or taken_for == name:
            return  # the site maps names itself
        try:
            meant = account_of_user(taken_for).pw_uid == account.pw_uid
        except KeyError:
            meant = False
        if not meant:
            self.log.warning("Refused the login of %s: another account differs from it in capitals only", name)
            raise HTTPError(
                403,
                f"JupyterHub writes names in small letters, and this machine has several accounts that it would call "
                f"{taken_for}. Ask the administrator to give one of them another name.",
            )

    @staticmethod
    def _getpwnam(name: str) -> pwd.struct_passwd:
        return account_of_user(name)

    @staticmethod
    def _getgrouplist(name: str, group: int) -> list[int]:
        return os.getgrouplist(account_of_user(name).pw_name, group)

    async def refresh_user(self, user: Any, handler: Any = None) -> dict[str, Any] | bool:
        """Return the user with present groups; False (log in again) if the account is gone or not allowed."""
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
            self.log.warning("Refused the login of %s: root accounts get no notebooks", model["name"])
            return None
        if self.manage_groups:
            model["groups"] = unix_groups(model["name"])
        return model


def account_name(typed: str) -> str:
    """Return the name of the account that was typed at the login, with its capitals; as typed where there is none."""
    for name in (typed, typed.lower()):
        with suppress(KeyError):
            return account_of_user(name).pw_name
    return typed


def is_root(name: str) -> bool:
    """Whether an account has root's number, whatever its name; a notebook of root would own the machine."""
    try:
        return account_of_user(name).pw_uid == 0
    except KeyError:
        return False


def unix_groups(name: str) -> list[str]:
    """Return the Unix groups of an account, its primary group included; empty for an unknown account."""
    try:
        account = account_of_user(name)
    except KeyError:
        return []
    names = []
    for gid in os.getgrouplist(account.pw_name, account.pw_gid):
        try:
            names.append(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return sorted(set(names))
