"""Accounts of the machine whose names have capitals log in; the Hub writes their names in small letters."""

from __future__ import annotations

import asyncio
import pwd
from types import SimpleNamespace
from typing import Any

import pamela
import pytest
from makeway_api.accounts import account_of_user
from makeway_hub import users
from makeway_hub.users import SystemAuthenticator
from makeway_quota.backends.base import BackendError
from makeway_quota.backends.local.users import account_of
from makeway_spawner.local import MakewayLocalSpawner
from tornado.web import HTTPError

ACCOUNTS = {"root": 0, "Ana": 2001, "bo": 2002, "Cy": 2003, "CY": 2004, "Dan": 2005, "dan": 2006, "Toor": 0}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with these accounts, whose password is always right."""
    entries = {
        name: pwd.struct_passwd((name, "x", uid, uid, "", f"/home/{name}", "/bin/sh")) for name, uid in ACCOUNTS.items()
    }
    monkeypatch.setattr(pwd, "getpwnam", lambda name: entries[name])
    monkeypatch.setattr(pwd, "getpwall", lambda: list(entries.values()))
    monkeypatch.setattr("os.getgrouplist", lambda name, gid: [entries[name].pw_gid])
    monkeypatch.setattr(users, "unix_groups", lambda name: [f"group-of-{account_of_user(name).pw_name}"])

    def authenticate(username: str, *_: Any, **__: Any) -> None:
        if username not in entries:
            raise pamela.PAMError("no such account")

    monkeypatch.setattr(pamela, "authenticate", authenticate)
    monkeypatch.setattr(pamela, "check_account", lambda *_, **__: None)


async def login(name: str, **traits: Any) -> dict[str, Any] | None:
    authenticator = SystemAuthenticator(allow_all=True, manage_groups=True, **traits)
    model = await authenticator.get_authenticated_user(None, {"username": name, "password": "x"})
    if model is not None:
        await authenticator.add_user(SimpleNamespace(name=model["name"]))  # as the Hub does at a first login
    return dict(model) if model is not None else None


@pytest.mark.covers("N22")
@pytest.mark.parametrize(
    ("typed", "account"), [("Ana", "Ana"), ("ana", "Ana"), ("ANA", "Ana"), ("bo", "bo"), ("dan", "dan")]
)
def test_an_account_logs_in_whatever_its_capitals(typed: str, account: str) -> None:
    model = asyncio.run(login(typed))
    assert model is not None
    assert (model["name"], model["groups"]) == (account.lower(), [f"group-of-{account}"])


@pytest.mark.parametrize("typed", ["Cy", "CY", "Dan"])
def test_accounts_that_the_hub_would_call_alike_are_refused_in_words(typed: str) -> None:
    with pytest.raises(HTTPError, match="several accounts that it would call") as told:
        asyncio.run(login(typed))
    assert told.value.status_code == 403


@pytest.mark.parametrize("typed", ["root", "Root", "Toor", "toor", "cy", "unknown-here", "a\0b", ""])
def test_root_and_unknown_accounts_do_not_get_in(typed: str) -> None:
    assert asyncio.run(login(typed)) is None


def test_groups_that_may_log_in_are_those_of_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grp.getgrnam", lambda name: SimpleNamespace(gr_gid=2001))
    authenticator = SystemAuthenticator(allowed_groups={"staff"})
    assert authenticator.check_allowed_groups("ana")
    assert not authenticator.check_allowed_groups("bo")


def test_a_name_that_the_site_maps_is_the_sites_matter() -> None:
    model = asyncio.run(login("Dan", username_map={"dan": "bo"}))
    assert model is not None
    assert model["name"] == "bo"


def test_jobs_and_notebooks_run_as_the_account() -> None:
    account = account_of("ana")
    assert (account.name, account.uid, account.personal["HOME"]) == ("Ana", 2001, "/home/Ana")
    with pytest.raises(BackendError, match="no account 'cy'"):
        account_of("cy")
    with pytest.raises(BackendError, match="no account 'BO'"):
        account_of("BO")
    with pytest.raises(BackendError, match="no account 'ANA'"):
        account_of("ANA")
    spawner = MakewayLocalSpawner(user=SimpleNamespace(name="ana", url="/user/ana/"), mode="system")
    assert spawner.user_env({}) == {"USER": "Ana", "HOME": "/home/Ana", "SHELL": "/bin/sh"}
    spawner.make_preexec_fn("ana")
