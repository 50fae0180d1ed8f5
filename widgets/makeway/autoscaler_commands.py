"""Run `makeway autoscaler`: read and change deployments of machines, and show their machines and log."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from makeway_api.errors import MakewayError
from makeway_api.models import Deployment, Machine, MachineDetail, MachineLogEntry
from makeway_api.models.money import costs, gpu_hours, kind, spent
from makeway_api.quantities import count, listed
from makeway_api.tables import Column, plain, text_table

from .command_io import add_json_option, print_changes, print_issues, print_json, read_document
from .connection import client
from .credential_commands import add_credentials
from .problems import Refused

OLDER = "this service is of a release without deployments of machines; upgrade it first."


def add_commands(commands: Any) -> None:
    """Add `autoscaler` with its verbs to a parser's commands."""
    what = "read and change deployments of machines, as an administrator"
    verbs = commands.add_parser("autoscaler", help=what).add_subparsers(metavar="VERB", required=True)
    _verb(verbs, "list", _list, "list deployments: machines by state, spend beside the budget, the cost of a GPU-hour")
    _verb(verbs, "get", _get, "print the document of a deployment, and beside it what its machines cost", named=True)
    for name, run, what in (
        ("validate", _validate, "report what is wrong in a document, and what it would change"),
        ("apply", _apply, "create a deployment, or replace its document; the name is in the document"),
    ):
        add = _verb(verbs, name, run, what, json=name == "apply")
        add.add_argument("--file", "-f", required=True, metavar="FILE", help="the document; - reads standard input")
        if name == "apply":
            add.add_argument(
                "--version", type=int, metavar="N", help="refuse if another version than N is there (0: none)"
            )
    _verb(verbs, "duplicate", _duplicate, "print the document of a deployment under a free name", named=True)
    for name, run, what in (
        ("pause", _pause, "launch nothing any more, and end what runs after a notice"),
        ("resume", _resume, "launch machines again when work waits"),
        ("delete", _delete, "delete a deployment; its machines are ended first"),
    ):
        add = _verb(verbs, name, run, what, named=True)
        add.add_argument("--version", type=int, metavar="N", help="refuse if another version than N is there")
    add_credentials(verbs, _verb)
    add = _verb(verbs, "machines", _machines, "list the machines of a deployment, newest first", named=True)
    add.add_argument("--all", "-a", action="store_true", help="those that are gone or failed, too")
    add.add_argument("--limit", "-n", type=int, default=100, help="how many (default 100)")
    add = _verb(verbs, "machine", _machine, "show one machine with its history and its outputs", named=True)
    add.add_argument("id", metavar="ID")
    add.add_argument("--console", action="store_true", help="first ask the provider what its console says now")
    add = _verb(verbs, "log", _log, "print the log of a deployment, newest first", named=True)
    add.add_argument("--limit", "-n", type=int, default=50, help="how many lines (default 50)")
    add.add_argument("--before", type=int, metavar="ID", help="only lines before this one, to go on")


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], what: str, named: bool = False, json: bool = True
) -> argparse.ArgumentParser:
    add: argparse.ArgumentParser = verbs.add_parser(name, help=what, description=f"{what[:1].upper()}{what[1:]}.")
    if named:
        add.add_argument("name", metavar="NAME")
    if json:
        add_json_option(add)

    def checked(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except MakewayError as error:
            raise (Refused(OLDER, code="older_service") if _unknown_route(error) else error) from None

    add.set_defaults(run=checked)
    return add


def _unknown_route(error: MakewayError) -> bool:
    """Whether the service has no such route: its own refusals of what is not there name a deployment or a machine."""
    return error.status in (404, 405) and error.message.startswith(("There is nothing at ", "PUT is not possible at "))


def _state(deployment: Deployment) -> str:
    if deployment.deleting:
        return "deleting"
    return "invalid" if deployment.problem else "paused" if deployment.paused else "active"


def _by_state(deployment: Deployment) -> str:
    return listed([f"{n} {state}" for state, n in deployment.machines.items()]) or "none"


def _hour(deployment: Deployment) -> str:
    spend = deployment.spend
    return "" if spend is None else spent(spend.hour, spend.max_hour, spend.currency)


def _month(deployment: Deployment) -> str:
    spend = deployment.spend
    return "" if spend is None else spent(spend.month, spend.max_month, spend.currency)


def _gpu_hour(deployment: Deployment) -> str:
    spend = deployment.spend
    return "" if spend is None else gpu_hours(deployment.prices, spend.currency)


def _time(at: datetime) -> str:
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S}"


DEPLOYMENTS: Sequence[Column[Deployment, str]] = (
    Column("NAME", lambda one: one.name),
    Column("STATE", _state),
    Column("MACHINES", _by_state),
    Column("AN HOUR", _hour),
    Column("THIS MONTH", _month),
    Column("A GPU-HOUR", _gpu_hour),
    Column("VERSION", lambda one: str(one.version), right=True),
    Column("SAVED BY", lambda one: one.updated_by),
)
MACHINES: Sequence[Column[Machine, str]] = (
    Column("ID", lambda one: one.id),
    Column("TYPE", lambda one: one.type),
    Column("STATE", lambda one: one.state),
    Column("SINCE", lambda one: _time(one.since)),
    Column("ATTEMPTS", lambda one: "" if one.attempts is None else str(one.attempts), right=True),
    Column("AN HOUR", lambda one: "not known" if one.price is None else f"{one.price:.2f}", right=True),
    Column("INSTANCE", lambda one: one.instance or ""),
    Column("WHY", lambda one: one.message or one.reason),
)
EVENTS: Sequence[Column[MachineLogEntry, str]] = (
    Column("ID", lambda one: str(one.id), right=True),
    Column("AT", lambda one: _time(one.at)),
    Column("MACHINE", lambda one: one.machine or "–"),
    Column("STATE", lambda one: one.state or one.reason),
    Column("MESSAGE", lambda one: one.message),
)


def _list(args: argparse.Namespace) -> int:
    deployments = client().deployments()
    if args.json:
        print_json(deployments)
        return 0
    print(text_table(DEPLOYMENTS, deployments) if deployments else "There are no deployments of machines.")
    for one in deployments:
        if one.problem or (one.step is not None and one.step.problem):
            print(plain(f"{one.name}: {one.message}"))
    return 0


def _get(args: argparse.Namespace) -> int:
    deployment = client().deployment(args.name)
    if args.json:
        print_json([deployment], single=True)
        return 0
    print(deployment.document or "", end="")
    sys.stdout.flush()
    for line in _costs(deployment):  # not part of the document, which may be written into a file
        print(plain(line), file=sys.stderr)
    return 0


def _costs(deployment: Deployment) -> list[str]:
    """Return what a deployment costs, and what its machine types cost, a line each."""
    spend = deployment.spend
    if spend is None:
        return []
    unpriced = f"; {count(spend.unpriced, 'machine')} without a known price" if spend.unpriced else ""
    now = f"{deployment.name}: {_hour(deployment)} an hour, {_month(deployment)} this month{unpriced}"
    return [now, *(f"{kind(one)}: {costs(one, spend.currency)}" for one in deployment.prices)]


def _validate(args: argparse.Namespace) -> int:
    check = client().deployment_validate(read_document(args.file))
    print_issues(args.file, check)
    if check.ok:
        print(f"{args.file} is valid. " + ("It would change:" if check.changes else "It changes nothing."))
        print_changes(check.changes)
    return 0 if check.ok else 1


def _apply(args: argparse.Namespace) -> int:
    text = read_document(args.file)
    check = client().deployment_validate(text)
    print_issues(args.file, check)
    if not check.ok:
        return 1
    saved = client().deployment_save(text, args.version)
    if args.json:
        print_json([saved], single=True)
        return 0
    print(
        f"The deployment {saved.name} has version {saved.version}. " + ("Changed:" if check.changes else "No change.")
    )
    print_changes(check.changes)
    return 0


def _duplicate(args: argparse.Namespace) -> int:
    draft = client().deployment_duplicate(args.name)
    if args.json:
        print_json([draft], single=True)
    else:
        print(draft.document, end="")
    return 0


def _pause(args: argparse.Namespace) -> int:
    return _changed(args, client().deployment_pause(args.name, args.version))


def _resume(args: argparse.Namespace) -> int:
    return _changed(args, client().deployment_resume(args.name, args.version))


def _delete(args: argparse.Namespace) -> int:
    return _changed(args, client().deployment_delete(args.name, args.version))


def _changed(args: argparse.Namespace, changed: Deployment) -> int:
    if args.json:
        print_json([changed], single=True)
    else:
        print(f"{changed.name}: {changed.message}")
    return 0


LIVE = ("requested", "booting", "joining", "ready", "draining", "lost", "terminating")
MAX_PAGE = 1000


def _machines(args: argparse.Namespace) -> int:
    shown: list[Machine] = []
    cursor = None
    while True:
        limit = min(MAX_PAGE, args.limit - len(shown))
        page = client().deployment_machines(args.name, None if args.all else LIVE, limit, cursor)
        shown += page.machines
        cursor = page.next
        if cursor is None or len(shown) >= args.limit:
            break
    if args.json:
        print_json(shown)
    else:
        print(text_table(MACHINES, shown) if shown else "It has no machines.")
    return 0


def _machine(args: argparse.Namespace) -> int:
    read = client().deployment_console if args.console else client().deployment_machine
    machine: MachineDetail = read(args.name, args.id)
    if args.json:
        print_json([machine], single=True)
        return 0
    print(text_table(MACHINES, [machine]))
    print(text_table(EVENTS, machine.events))
    for output in machine.outputs:
        ended = "" if output.exit_code is None else f", exit code {output.exit_code}"
        cut = f", {count(output.omitted, 'character')} left out" if output.omitted else ""
        print(f"── {output.kind}{ended}{cut}")
        print(*(plain(line) for line in output.text.splitlines()), sep="\n")
    return 0


def _log(args: argparse.Namespace) -> int:
    events = client().deployment_log(args.name, args.limit, args.before)
    if args.json:
        print_json(events)
    else:
        print(text_table(EVENTS, events) if events else "Nothing happened yet.")
    return 0
