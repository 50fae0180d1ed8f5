"""Run the `makeway` command, all through the API: jobs, logs, usage, quota, policy, people, autoscaler."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from makeway_api.errors import MakewayError
from makeway_api.models import PolicyCheck, PolicyVersion, Preview, WorkloadEffect
from makeway_api.quantities import count, gpus, listed, number
from makeway_api.tables import Column, text_table

from . import autoscaler_commands, options, preemption, quota, submission, teams, training
from .blocks import text_of
from .command_io import add_json_option, print_changes, print_issues, print_json, read_document
from .connection import client, explain
from .problems import Interrupted, JobError, Refused
from .submission import DryRunResult, Submission
from .words import speaking_shell

Run = Callable[[argparse.Namespace], int]
BUSY = frozenset({429, 503, 504})
"""Statuses of answers that are there again in a moment"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, or 1 after an error, which is printed as one sentence."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        with speaking_shell():
            run: Run = args.run
            return run(args)
    except MakewayError as error:
        print(f"makeway: {explain(error).message}", file=sys.stderr)
    except (Interrupted, JobError, TimeoutError) as error:
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
    command = commands.add_parser(
        "submit", help="submit a script or a command", description="Submit a script or a command."
    )
    options.describe(command, several=1)
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARG …] | -- COMMAND …")
    command.set_defaults(run=_submit)
    command = commands.add_parser("jobs", help="list jobs, newest first")
    command.add_argument("--all", "-a", action="store_true", help="all jobs of my teams")
    command.add_argument("--team", "-t", help="all jobs of this team")
    command.add_argument("--state", "-s", help="only those in this state")
    command.add_argument("--limit", "-n", type=int, default=20, help="how many (default 20)")
    add_json_option(command)
    command.set_defaults(run=_jobs)
    for name, run, what in (
        ("job", _job, "show one job"),
        ("cancel", _cancel, "cancel jobs"),
        ("resume", _resume, "requeue jobs that have ended; they continue from their checkpoints"),
        ("preempt-test", _preempt_test, "test the preemption of my own job: what it saves, how fast, and what is lost"),
    ):
        command = commands.add_parser(name, help=what, description=what.capitalize() + ".")
        several = name in ("cancel", "resume")
        command.add_argument("ids" if several else "id", nargs="+" if several else None, metavar="ID")
        if name != "preempt-test":
            add_json_option(command)
        command.set_defaults(run=run)
    _queue_commands(commands)
    command = commands.add_parser("logs", help="print a job's log")
    command.add_argument("id", metavar="ID")
    command.add_argument("--follow", "-f", action="store_true", help="follow it as it grows, until the job ends")
    command.add_argument("--attempt", type=int, help="of this attempt (default: the newest)")
    command.add_argument("--tail", "-n", type=int, help="only the last N lines so far")
    command.set_defaults(run=_logs)
    command = commands.add_parser("usage", help="show the present usage of teams")
    command.add_argument("--now", action="store_true", help="also what a job of mine could have now, in each team")
    add_json_option(command)
    command.set_defaults(run=_usage)
    command = commands.add_parser(
        "quota", help="show the bytes that are kept for me, my teams and all, and what to delete"
    )
    add_json_option(command)
    command.set_defaults(run=_quota)
    command = commands.add_parser(
        "delete", help="delete ended jobs for good, with files, logs, results and checkpoints"
    )
    command.add_argument("ids", nargs="+", metavar="ID")
    command.add_argument("--attempt", type=int, metavar="N", help="only the log and the result of this attempt")
    command.set_defaults(run=_delete)
    _policy_commands(commands)
    _people_commands(commands)
    autoscaler_commands.add_commands(commands)
    return parser


def _queue_commands(commands: Any) -> None:
    what = "move pending jobs to another queue: another team, another profile, or both"
    command = commands.add_parser(
        "move", help=what, description=what.capitalize() + ". They keep their submission time."
    )
    command.add_argument("ids", nargs="+", metavar="ID")
    options.destination(command)
    add_json_option(command)
    command.set_defaults(run=_move)
    command = commands.add_parser("clone", help="submit copies of a job, with its files")
    command.add_argument("id", metavar="ID")
    command.add_argument("--copies", "-n", type=int, default=1, metavar="N", help="how many (default 1)")
    for option in ("name", "team", "profile"):
        command.add_argument(f"--{option}", help=f"another {option} than the job's")
    add_json_option(command)
    command.set_defaults(run=_clone)


def _policy_commands(commands: Any) -> None:
    policy = commands.add_parser("policy", help="read, check and change the policy document")
    verbs = policy.add_subparsers(metavar="VERB", required=True)
    command = verbs.add_parser("get", help="print the document in force, or an earlier version")
    command.add_argument("--version", type=int, metavar="N")
    command.set_defaults(run=_policy_get)
    verbs.add_parser("history", help="list the versions with their authors").set_defaults(run=_policy_history)
    for name, run, what in (
        ("validate", _policy_validate, "report what is wrong in a file, and what it would change"),
        ("preview", _policy_preview, "report which workloads would start, be evicted, wait or be refused"),
        ("apply", _policy_apply, "put a file into force"),
    ):
        command = verbs.add_parser(name, help=what)
        command.add_argument("file", metavar="FILE", help="a policy file; - reads standard input")
        if name == "apply":
            command.add_argument("--comment", "-m", default="", help="the reason, for the history")
            command.add_argument("--base", type=int, metavar="N", help="refuse if another version than N is in force")
        command.set_defaults(run=run)


def _people_commands(commands: Any) -> None:
    people = commands.add_parser("people", help="act on everything of one person, as an administrator")
    verbs = people.add_subparsers(metavar="VERB", required=True)
    command = verbs.add_parser("cancel", help="cancel every job of a person, also of a deleted one")
    command.add_argument("name", metavar="NAME")
    command.set_defaults(run=_people_cancel)
    command = verbs.add_parser("give", help="give the work of a deleted person (NAME/deleted-1) to a user")
    command.add_argument("name", metavar="NAME")
    command.add_argument("to", metavar="USER")
    command.set_defaults(run=_people_give)


def _submit(args: argparse.Namespace) -> int:
    words = list(args.command)
    if not words:
        raise Refused("nothing to run was given: makeway submit train.py, or makeway submit -- python -m train.")
    files = list(args.files)
    if words[0] == "--":
        command = words[1:]
        if not command:
            raise Refused("there is nothing after --; write the command there.")
    else:
        if not Path(words[0]).is_file():
            raise Refused(f"there is no file {words[0]!r} here; for any other command write makeway submit -- COMMAND.")
        files.append(words[0])
        command = [*(["python3", "-u"] if words[0].endswith(".py") else []), *_runnable(words)]
    fields = options.fields(args) | {"files": files, "command": command}
    fields["name"] = fields["name"] or Path(words[0] if words[0] != "--" else words[1]).stem
    wanted = Submission(**fields)
    job = submission.send(wanted, dry_run=args.dry_run)
    print(job)
    if isinstance(job, DryRunResult):
        return 0
    if notices := submission.notices(job, wanted):
        print(notices)
    return _ended(job.wait()) if args.wait else 0


def _runnable(words: list[str]) -> list[str]:
    """Return a script's command line in the job's working directory."""
    script = words[0] if "/" in words[0] or words[0].endswith(".py") else f"./{words[0]}"
    return [script, *words[1:]]


def _ended(job: training.Job) -> int:
    return 0 if job.data.state.value == "succeeded" else 1


def _jobs(args: argparse.Namespace) -> int:
    result = training.jobs(all=args.all, team=args.team, state=args.state, limit=args.limit)
    if args.json:
        print_json([job.data for job in result])
    else:
        print(result)
    return 0


def _job(args: argparse.Namespace) -> int:
    job = training.job(args.id)
    if args.json:
        print_json([job.data], single=True)
    else:
        print(job)
    return 0


def _cancel(args: argparse.Namespace) -> int:
    return _changed(args, training.Job.cancel)


def _resume(args: argparse.Namespace) -> int:
    return _changed(args, training.Job.resume)


def _move(args: argparse.Namespace) -> int:
    return _changed(
        args,
        lambda job: job.move(team=args.team, profile=args.profile),
        lambda job: "\n".join([f"{job.id}: waits for {job.team}/{job.profile}", *submission.notes(job)]),
    )


def _state(job: training.Job) -> str:
    return f"{job.id}: {job.data.state.value}"


def _changed(
    args: argparse.Namespace,
    change: Callable[[training.Job], training.Job],
    outcome: Callable[[training.Job], str] = _state,
) -> int:
    """Change jobs one by one, and print what became of each as soon as it is changed."""
    changed = []
    for id in args.ids:
        changed.append(job := change(training.job(id)))
        if not args.json:
            print(outcome(job))
    if args.json:
        print_json([job.data for job in changed])
    return 0


def _clone(args: argparse.Namespace) -> int:
    overrides = {key: getattr(args, key) for key in ("name", "team", "profile") if getattr(args, key) is not None}
    made = training.job(args.id).clone(args.copies, **overrides).submit()
    if args.json:
        print_json([job.data for job in made])
    else:
        print(made)
    return 0


def _preempt_test(args: argparse.Namespace) -> int:
    preemption.run_test(training.job(args.id))
    return 0


def _logs(args: argparse.Namespace) -> int:
    text = training.job(args.id).logs(follow=args.follow, attempt=args.attempt, tail=args.tail, all=True)
    if text:
        print(text, end="" if text.endswith("\n") else "\n")
    return 0


def _usage(args: argparse.Namespace) -> int:
    usage = client().usage()
    if args.json:
        print_json([usage], single=True)
        return 0
    print(text_of([teams.usage_table(usage.teams)]) if usage.teams else teams.NO_TEAM)
    print(*teams.borrowing(usage.teams), sep="\n", end="\n" if teams.borrowing(usage.teams) else "")
    print(f"{number(usage.used)} of {gpus(usage.total)} in use, {number(usage.free)} idle.")
    if args.now:
        _print_offers()
    if usage.virtual:
        print(teams.VIRTUAL)
    return 0


def _print_offers() -> None:
    """Print what a job could have now: a question to the engine for each team and profile, which may be too many."""
    try:
        offers = client().offers(kind="job")
    except MakewayError as error:
        if error.status not in BUSY:
            raise
        print("What a job could have now is not known at the moment.")
    else:
        if offers.teams:
            print(teams.now_line(offers), *teams.machine_lines(offers), sep="\n")


def _quota(args: argparse.Namespace) -> int:
    result = quota.quota_now()
    if args.json:
        print_json([result.report], single=True)
    else:
        print(result)
    return 0


def _delete(args: argparse.Namespace) -> int:
    for id in args.ids:
        print(quota.delete(id, args.attempt))
    return 0


def _policy_get(args: argparse.Namespace) -> int:
    policy = client().policy() if args.version is None else client().policy_version(args.version)
    print(policy.document or "", end="")
    return 0


HISTORY: Sequence[Column[PolicyVersion, str]] = (
    Column("VERSION", lambda version: str(version.version)),
    Column("AT", lambda version: f"{version.at.astimezone():%Y-%m-%d %H:%M}"),
    Column("AUTHOR", lambda version: version.author),
    Column("COMMENT", lambda version: version.comment),
)
"""The versions of the policy"""


def _policy_history(_: argparse.Namespace) -> int:
    print(text_table(HISTORY, client().policy_history()))
    return 0


def _policy_validate(args: argparse.Namespace) -> int:
    check: PolicyCheck = client().policy_validate(read_document(args.file))
    print_issues(args.file, check)
    if check.ok:
        print(f"{args.file} is valid. " + ("It would change:" if check.changes else "It changes nothing."))
        print_changes(check.changes)
    return 0 if check.ok else 1


def _policy_preview(args: argparse.Namespace) -> int:
    text = read_document(args.file)
    changes = client().policy_validate(text).changes
    preview: Preview = client().policy_preview(text)
    print("It would change:" if changes else "It changes nothing.")
    print_changes(changes)
    effects = (("would start", preview.starts), ("would make way", preview.evicts), ("would wait", preview.waits))
    rare = (("would be refused", preview.refused), ("would go on outside of every pool", preview.outside))
    for word, touched in (*effects, *(one for one in rare if one[1])):
        print(f"{count(len(touched), 'workload')} {word}{':' if touched else ''}")
        print(*(_effect(effect) for effect in touched), sep="\n", end="\n" if touched else "")
    return 0


def _effect(effect: WorkloadEffect) -> str:
    return f"  {effect.id} {effect.name} ({listed([effect.team, effect.owner], 'of')}): {effect.message}"


def _policy_apply(args: argparse.Namespace) -> int:
    version = client().policy_apply(read_document(args.file), args.comment, args.base)
    print(f"Version {version.version} of the policy is in force.")
    return 0


def _people_cancel(args: argparse.Namespace) -> int:
    print(f"{count(client().cancel_all_of(args.name).workloads, 'job')} of {args.name} cancelled.")
    return 0


def _people_give(args: argparse.Namespace) -> int:
    live = client().give_work(args.name, args.to).workloads
    print(f"The work of {args.name} is that of {args.to} now; {count(live, 'workload')} of it has not ended.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
