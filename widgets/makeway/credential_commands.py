"""Run `makeway autoscaler credentials`: set, list, delete, enable and seal anew the credentials of jobs.

Values come from standard input or a file: a command line can be read by all processes of a machine.
"""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from makeway_api.models import Credential
from makeway_api.models.credentials import parse_cloud_values
from makeway_api.tables import Column, text_table

from .command_io import print_json
from .connection import client
from .problems import Refused

COLUMNS: Sequence[Column[Credential, str]] = (
    Column("NAME", lambda one: one.name),
    Column("KIND", lambda one: one.kind),
    Column("TEAM", lambda one: one.team or "all"),
    Column("SET", lambda one: f"{one.updated_at.astimezone():%Y-%m-%d %H:%M:%S}"),
    Column("BY", lambda one: one.updated_by),
    Column("STATE", lambda one: "disabled" if one.disabled_at else "enabled"),
)
Verb = Callable[..., argparse.ArgumentParser]


def add_credentials(verbs: Any, verb: Verb) -> None:
    """Add `credentials` with its actions; `verb` adds one with the options of all."""
    what = "set, list, enable and delete credentials of jobs; nothing shows their values"
    actions = verbs.add_parser("credentials", help=what).add_subparsers(metavar="ACTION", required=True)
    verb(actions, "list", _list, "list credentials, without their values")
    add = verb(actions, "set", _set, "keep a credential in place of the one of its team and name", named=True)
    add.add_argument("--kind", choices=("cloud", "git", "file"), default="file", help="what it is (default file)")
    _add_team(add, "whose jobs get it; without it, those of all teams, if no team has the name")
    add.add_argument("--host", default="", help="git: the server, such as https://git.example.org")
    add.add_argument("--user", default="", help="git: the user to whom the token belongs")
    add.add_argument(
        "--file", "-f", default="-", metavar="FILE", help="the token, or the content; - reads standard input"
    )
    gone = verb(
        actions, "delete", _delete, "delete a credential; attempts that run keep theirs", named=True, json=False
    )
    _add_team(gone, "of which team; without it, the only one of its name")
    back = verb(actions, "enable", _enable, "enable a credential of a team that is in the policy again", named=True)
    back.add_argument("--team", required=True, help="its team")
    verb(actions, "reseal", _reseal, "seal all credentials with the first key of the service", json=False)


def _add_team(add: argparse.ArgumentParser, what: str) -> None:
    whose = add.add_mutually_exclusive_group()
    whose.add_argument("--team", help=what)
    whose.add_argument("--all-teams", action="store_const", const="", dest="team", help="of all teams, and no other")


def _list(args: argparse.Namespace) -> int:
    credentials = client().credentials()
    if args.json:
        print_json(credentials)
    else:
        print(text_table(COLUMNS, credentials) if credentials else "There are no credentials.")
    return 0


def _set(args: argparse.Namespace) -> int:
    if args.kind == "git" and not (args.host and args.user):
        raise Refused("a credential of the kind git needs --host and --user.")
    value = _value(args.file)
    values = {"content": value}
    if args.kind == "git":
        values = {"host": args.host, "user": args.user, "token": value.strip()}
    if args.kind == "cloud":
        values = _cloud(value)
    saved = client().credential_save(args.name, args.kind, values, team=args.team)
    if args.json:
        print_json([saved], single=True)
    else:
        whose = f"jobs of {saved.team}" if saved.team else "all jobs"
        used = f"{whose} get it from their next attempt on"
        used = f"the deployment {saved.name} uses it from its next step on" if args.kind == "cloud" else used
        print(f"{saved.name} is set: {used}.")
    return 0


def _delete(args: argparse.Namespace) -> int:
    client().credential_delete(args.name, args.team)
    print(f"{args.name} is deleted.")
    return 0


def _enable(args: argparse.Namespace) -> int:
    enabled = client().credential_enable(args.name, args.team)
    if args.json:
        print_json([enabled], single=True)
    else:
        print(f"{enabled.name} is enabled: jobs of {enabled.team} get it from their next attempt on.")
    return 0


def _reseal(args: argparse.Namespace) -> int:
    count = client().credentials_reseal().credentials
    print(f"Sealed with the first key: {count}. The other keys of the file can be removed.")
    return 0


def _cloud(text: str) -> dict[str, str]:
    try:
        return parse_cloud_values(text)
    except ValueError as error:
        raise Refused(str(error)) from None


def _value(file: str) -> str:
    """Return the value from a file, from standard input, or from a person who types it unseen."""
    if file != "-":
        try:
            return Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise Refused(f"{file} cannot be read: {error}") from None
    return getpass.getpass("Value: ") if sys.stdin.isatty() else sys.stdin.read()
