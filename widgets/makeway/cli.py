"""The `makeway` command: submit, jobs, logs, cancel, usage, policy and preempt-test, all through the API."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from makeway_api.errors import MakewayError
from makeway_api.models import PolicyCheck, Preview, WorkloadEffect

from . import options, rehearsal, submission, teams, training
from .connection import client, explain
from .problems import JobError, Left, Refused
from .submission import Plan, Submission
from .words import count, listed, number, table

Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it did what was asked, 1 with one sentence when not."""
    parser = _parser()
    asked = parser.parse_args(argv)
    try:
        run: Run = asked.run
        return run(asked)
    except MakewayError as error:
        print(f"makeway: {explain(error).message}", file=sys.stderr)
    except (Left, JobError, TimeoutError) as error:
        print(f"makeway: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("makeway: stopped.", file=sys.stderr)
    except BrokenPipeError:
        sys.stderr.close()
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="makeway",
        description="Submit and watch GPU jobs. Needs MAKEWAY_URL and MAKEWAY_TOKEN (a Makeway notebook has both).",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add = commands.add_parser(
        "submit", help="submit a script or a command", description="Submit a script or a command."
    )
    options.describe(add, several=1)
    add.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARG …] | -- COMMAND …")
    add.set_defaults(run=_submit)
    add = commands.add_parser("jobs", help="list jobs, newest first")
    add.add_argument("--all", "-a", action="store_true", help="everybody's in my teams")
    add.add_argument("--team", "-t", help="everybody's in this team")
    add.add_argument("--state", "-s", help="only those in this state")
    add.add_argument("--limit", "-n", type=int, default=20, help="how many (default 20)")
    add.set_defaults(run=_jobs)
    for name, run, what in (
        ("job", _job, "show one job"),
        ("cancel", _cancel, "cancel jobs"),
        ("preempt-test", _preempt_test, "rehearse: let my own job make way now, and tell what it saved"),
    ):
        add = commands.add_parser(name, help=what, description=what.capitalize() + ".")
        add.add_argument("ids" if name == "cancel" else "id", nargs="+" if name == "cancel" else None, metavar="ID")
        add.set_defaults(run=run)
    add = commands.add_parser("logs", help="print a job's log")
    add.add_argument("id", metavar="ID")
    add.add_argument("--follow", "-f", action="store_true", help="go on as it grows, until the job ends")
    add.add_argument("--attempt", type=int, help="of this attempt (default: the newest)")
    add.add_argument("--tail", "-n", type=int, help="only the last N lines so far")
    add.set_defaults(run=_logs)
    commands.add_parser("usage", help="who uses what now").set_defaults(run=_usage)
    _policy_commands(commands)
    return parser


def _policy_commands(commands: Any) -> None:
    policy = commands.add_parser("policy", help="read, check and change the policy document")
    verbs = policy.add_subparsers(metavar="VERB", required=True)
    add = verbs.add_parser("get", help="print the document in force, or a former version")
    add.add_argument("--version", type=int, metavar="N")
    add.set_defaults(run=_policy_get)
    verbs.add_parser("history", help="who changed it when").set_defaults(run=_policy_history)
    for name, run, what in (
        ("validate", _policy_validate, "tell what is wrong in a file, and what it would change"),
        ("preview", _policy_preview, "tell what would start, leave and wait"),
        ("apply", _policy_apply, "put a file into force"),
    ):
        add = verbs.add_parser(name, help=what)
        add.add_argument("file", metavar="FILE", help="a policy file; - reads standard input")
        if name == "apply":
            add.add_argument("--comment", "-m", default="", help="why, for the history")
            add.add_argument("--base", type=int, metavar="N", help="refuse if another version than N is in force")
        add.set_defaults(run=run)


def _submit(asked: argparse.Namespace) -> int:
    words = list(asked.command)
    if not words:
        raise Refused("say what to run: makeway submit train.py, or makeway submit -- python -m train.")
    files = list(asked.files)
    if words[0] == "--":
        command = words[1:]
        if not command:
            raise Refused("there is nothing after --; write the command there.")
    else:
        if not Path(words[0]).is_file():
            raise Refused(f"there is no file {words[0]!r} here; for any other command write makeway submit -- COMMAND.")
        files.append(words[0])
        command = [*(["python3", "-u"] if words[0].endswith(".py") else []), *_runnable(words)]
    fields = options.fields(asked) | {"files": files, "command": command}
    fields["name"] = fields["name"] or Path(words[0] if words[0] != "--" else words[1]).stem
    wanted = Submission(**fields)
    job = submission.send(wanted, dry_run=asked.dry_run)
    print(job)
    if isinstance(job, Plan):
        return 0
    if note := submission.risk(job, wanted):
        print(note)
    return _ended(job.wait()) if asked.wait else 0


def _runnable(words: list[str]) -> list[str]:
    """A script as it is called in the job's own folder."""
    script = words[0] if "/" in words[0] or words[0].endswith(".py") else f"./{words[0]}"
    return [script, *words[1:]]


def _ended(job: training.Job) -> int:
    return 0 if job.data.state.value == "succeeded" else 1


def _jobs(asked: argparse.Namespace) -> int:
    print(training.jobs(all=asked.all, team=asked.team, state=asked.state, limit=asked.limit))
    return 0


def _job(asked: argparse.Namespace) -> int:
    print(training.job(asked.id))
    return 0


def _cancel(asked: argparse.Namespace) -> int:
    for id in asked.ids:
        job = training.job(id).cancel()
        print(f"{job.id}: {job.data.state.value}")
    return 0


def _preempt_test(asked: argparse.Namespace) -> int:
    rehearsal.rehearse(training.job(asked.id))
    return 0


def _logs(asked: argparse.Namespace) -> int:
    text = training.job(asked.id).logs(follow=asked.follow, attempt=asked.attempt, tail=asked.tail)
    if text:
        print(text, end="" if text.endswith("\n") else "\n")
    return 0


def _usage(_: argparse.Namespace) -> int:
    usage = client().usage()
    rows = [teams.row(team) for team in usage.teams]
    print(table(teams.HEAD, rows, right=frozenset(range(1, len(teams.HEAD)))) if rows else teams.NO_TEAM)
    print(*teams.borrowing(usage.teams), sep="\n", end="\n" if teams.borrowing(usage.teams) else "")
    print(f"{number(usage.used)} of {number(usage.total)} GPUs in use, {number(usage.free)} idle.")
    if usage.virtual:
        print(teams.VIRTUAL)
    return 0


def _policy_get(asked: argparse.Namespace) -> int:
    found = client().policy() if asked.version is None else client().policy_version(asked.version)
    print(found.document or "", end="")
    return 0


def _policy_history(_: argparse.Namespace) -> int:
    rows = [
        (str(v.version), f"{v.at.astimezone():%Y-%m-%d %H:%M}", v.author, v.comment) for v in client().policy_history()
    ]
    print(table(("VERSION", "AT", "AUTHOR", "COMMENT"), rows))
    return 0


def _policy_validate(asked: argparse.Namespace) -> int:
    check: PolicyCheck = client().policy_validate(_document(asked.file))
    for issue in check.issues:
        where = ":".join(str(part) for part in (asked.file, issue.line) if part is not None)
        said = f"{issue.where}: {issue.message}" if issue.where else issue.message
        print(f"{where}: {said}", file=sys.stderr)
    if check.ok:
        print(f"{asked.file} is valid. " + ("It would change:" if check.changes else "It changes nothing."))
        print(*(f"  {change}" for change in check.changes), sep="\n", end="\n" if check.changes else "")
    return 0 if check.ok else 1


def _policy_preview(asked: argparse.Namespace) -> int:
    preview: Preview = client().policy_preview(_document(asked.file))
    effects = (("would start", preview.starts), ("would leave", preview.leaves), ("would wait", preview.waits))
    refused = (("would be refused", preview.refused),) if preview.refused else ()
    for word, touched in (*effects, *refused):
        print(f"{count(len(touched), 'workload')} {word}{':' if touched else ''}")
        print(*(_effect(effect) for effect in touched), sep="\n", end="\n" if touched else "")
    return 0


def _effect(effect: WorkloadEffect) -> str:
    return f"  {effect.id} {effect.name} ({listed([effect.team, effect.owner], 'of')}): {effect.message}"


def _policy_apply(asked: argparse.Namespace) -> int:
    version = client().policy_apply(_document(asked.file), asked.comment, asked.base)
    print(f"Version {version.version} of the policy is in force.")
    return 0


def _document(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise Refused(f"{file} cannot be read: {why}.") from None


if __name__ == "__main__":
    sys.exit(main())
