"""Submit a cell or a command as a job: collect files, build the request, send it."""

from __future__ import annotations

import base64
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from makeway_api.bars import WHEN_NEEDED
from makeway_api.durations import duration
from makeway_api.errors import MakewayError
from makeway_api.models import DryRun, FileIn, JobRequest, Kind, Priority, Victim
from makeway_api.quantities import count, gpus, listed, size

from . import payload, snapshot
from .cellcheck import CellCheck
from .checkpoint_use import uses_checkpoint
from .connection import client, explain
from .notebook_name import check_name, name_of_cell, notebook_name
from .problems import Refused
from .words import did_you_mean, seconds, typed

if TYPE_CHECKING:
    from .training import Job


def _victim(victim: Victim) -> str:
    """Return who would make way; of another team's work neither name nor owner are known."""
    team = victim.team_title or victim.team
    if not victim.owner:
        return f"work of {team} ({gpus(victim.gpus)})"
    return f"{victim.name or victim.id} of {team} ({victim.owner}, {gpus(victim.gpus)})"


@dataclass(frozen=True)
class CellInNotebook:
    """Where a cell was typed: the variables around it, and the number of its first line there."""

    namespace: Mapping[str, Any] = field(default_factory=dict, repr=False)
    first_line: int = 1


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A cell or a command with its files and variables; nothing is read or sent before `request()`."""

    source: str = ""
    command: Sequence[str] = ()
    name: str = ""
    team: str | None = None
    profile: str | None = None
    image: str | None = None
    files: Sequence[str] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    time_limit: str | int | None = None
    priority: str = "normal"
    workers: int | None = None
    retries: int = 0
    cell: CellInNotebook = field(default_factory=CellInNotebook)

    def collect_files(self) -> list[FileIn]:
        """Return every file that the job needs, checked; raise Refused for what cannot be sent."""
        if not self.command:
            payload.check_cell(self.source, self.cell.first_line)
        taken = snapshot.take(self.files)
        self.check()
        own = [] if self.command else payload.cell_files(self.source, self.variables, self.cell.first_line)
        sizes = {_shown(f.path): len(f.data) * 3 // 4 for f in [*taken, *own]}
        snapshot.check_size(sizes)
        return [*own, *taken]

    def check(self) -> list[str]:
        """Return what may fail in the job; raise Refused for what fails there."""
        sent = [*snapshot.paths(self.files)]
        if self.command:
            return CellCheck("pass", sent=sent).command(self.command)
        given = set(self.variables)
        for value in self.variables.values():
            given |= set(payload.brought_along(value))
        cell = self.cell
        check = CellCheck(
            self.source, sent=sent, given=given, namespace=cell.namespace, first_line=cell.first_line, image=self.image
        )
        return check.run()

    def request(self) -> JobRequest:
        """Return the complete request; raise Refused where something is wrong."""
        fields: dict[str, Any] = {
            "name": self.name or notebook_name() or ("" if self.command else name_of_cell(self.source)),
            "command": list(self.command) or list(payload.COMMAND),
            "env": dict(self.env),
            "priority": _priority(self.priority),
            "source": self.source,
            "max_failures": self.retries,
        }
        team = self.team or os.environ.get("MAKEWAY_TEAM") or None  # "" in a notebook without a GPU
        optional = {"team": team, "profile": self.profile, "image": self.image, "workers": self.workers}
        if self.image is None:
            optional["server"] = os.environ.get("JUPYTERHUB_SERVER_NAME")
        fields |= {key: value for key, value in optional.items() if value is not None}
        if self.time_limit is not None:
            fields["time_limit"] = seconds(str(self.time_limit))
        check_name(fields["name"])
        return JobRequest(files=self.collect_files(), **fields)


@dataclass(frozen=True)
class DryRunResult:
    """The answer of a dry run: what submitting would do now."""

    answer: DryRun
    notes: Sequence[str] = ()
    """What may fail in the job, seen in its cell"""

    def __repr__(self) -> str:
        offer = self.answer.offer
        runs = " ".join(self.answer.command)
        lines = [
            f"Dry run: {offer.profile} in {offer.team_title or offer.team or 'no team'}. Nothing was submitted.",
            f"  {offer.message}",
            f"  Sends {count(self.answer.files, 'file')}, {size(self.answer.bytes)}; runs `{runs}`.",
        ]
        if offer.victims:
            names = listed(_victim(v) for v in offer.victims)
            within = f" within {duration(offer.seconds)}" if offer.seconds is not None else ""
            lines.append(f"  Would make way{within}: {names}.")
        lines += [f"  {note}" for note in [*self.answer.notes, *self.notes]]
        if self.answer.risk:
            lines.append(f"  Risk: {self.answer.risk}")
        return "\n".join(lines)


def submit(
    source: str = "",
    *,
    dry_run: bool = False,
    script: str | Path | None = None,
    args: Sequence[str] = (),
    **details: Any,
) -> Job | DryRunResult:
    """Submit code (a string), a `script` with `args`, or a `command=[…]`, and return the Job at once.

    Details: name, team, profile, files (globs), variables (a dict), env, time_limit, priority, workers, retries.
    With `dry_run=True` nothing is submitted, and what would happen is returned.
    """
    if script is not None:
        details["files"] = [str(script), *details.get("files", ())]
        details["command"] = [payload.COMMAND[0], "-u", Path(script).as_posix(), *args]
    known = set(Submission.__dataclass_fields__) - {"cell"}
    if unknown := set(details) - known:
        wrong = sorted(unknown)[0]
        raise Refused(f"submit() has no argument {wrong!r}.{did_you_mean(wrong, sorted(known))}")
    if not isinstance(source, str):
        raise Refused(f"code is given as text, not as a {type(source).__name__}; a command goes into command=['…'].")
    if not source and not details.get("command"):
        raise Refused("there is nothing to run: give the code as text, script='train.py' or command=['…'].")
    return send(Submission(source=source, **details), dry_run=dry_run)


def send(submission: Submission, *, dry_run: bool = False) -> Job | DryRunResult:
    """Send one submission; return the Job, or the result of a dry run."""
    from .training import Job

    request = submission.request()
    try:
        try:
            answer = _answer(request, dry_run)
        except MakewayError as error:
            if error.status != 422 or not any(one.get("field") == "server" for one in error.errors):
                raise
            # A service of an earlier release knows no images of notebooks. It has checked, and taken nothing.
            older = request.model_dump(exclude_unset=True, exclude={"server"})
            answer = _answer(JobRequest.model_validate(older), dry_run)
    except MakewayError as error:
        raise _with_hint(error, request) from None
    return DryRunResult(answer, submission.check()) if isinstance(answer, DryRun) else Job(answer)


def _answer(request: JobRequest, dry_run: bool) -> Any:
    return client().dry_run(request) if dry_run else client().submit(request)


def notices(job: Job, submission: Submission) -> str:
    """Return what the service says about the pods of a job that was just submitted, and its risk, one line each."""
    warnings = [_wrapped(note) for note in submission.check()]
    return "\n".join([*notes(job), *warnings, *filter(None, [risk(job, submission)])])


def notes(job: Job) -> list[str]:
    """Return what the service says about the pods and the limits of a job that was just submitted or moved."""
    return [_wrapped(note) for note in job.data.notes]


def _wrapped(note: str) -> str:
    return textwrap.fill(note, 100, break_long_words=False, break_on_hyphens=False)


def risk(job: Job, submission: Submission) -> str:
    """Return what running over quota means for this job (row F44); empty for a job in quota."""
    data = job.data
    if not data.over_quota:
        return ""
    lender = f"GPUs of {listed(data.lenders)}" if data.borrowed_from else "idle GPUs of other teams"
    text = (
        f"Over quota: {data.title(data.team)}'s reservation does not cover this job's {gpus(data.gpus)}. It runs on "
        f"{lender}. It makes way {WHEN_NEEDED}: it gets a notice, "
    )
    if not data.durable_checkpoints:
        text += "ends, and later starts from the beginning by itself, because checkpoints are not kept here."
        return textwrap.fill(text, 100)
    text += "saves, ends, and resumes later by itself. "
    return textwrap.fill(text + _saves(submission, data.id), 100)


def _saves(submission: Submission, id: str) -> str:
    """Return whether the job saves checkpoints, as far as its code shows it."""
    uses = [uses_checkpoint(code) for code in _code(submission)]
    if True in uses:
        return typed("No checkpoint yet; `%job` shows the newest one.", id)
    what = "The cell" if not submission.command else _script(submission)
    if what and None not in uses and not submission.variables:
        return f"{what} does not use makeway.checkpoint: after making way it would start from the beginning."
    what = "the command" if submission.command else "the code"
    return f"Whether {what} saves checkpoints cannot be seen here; if not, it would start from the beginning."


def _script(submission: Submission) -> str:
    """Return the Python file of the submission that its command runs, for the start of a sentence; "" for others."""
    sent = {file.path for file in snapshot.take(submission.files)}
    program = Path(submission.command[0]).name
    scripts = [word for word in submission.command[1:] if word.endswith(".py") and Path(word).as_posix() in sent]
    return scripts[0] if program.startswith("python") and scripts else ""


def _code(submission: Submission) -> Iterator[str]:
    """Yield the cell, and the Python files of the submission."""
    yield submission.source
    for file in snapshot.take(submission.files):
        if file.path.endswith(".py"):
            yield base64.b64decode(file.data).decode("utf-8", "replace")


def _with_hint(error: MakewayError, request: JobRequest) -> Refused:
    """Return the service's refusal; for an unknown profile or team with the names that are available."""
    plain = explain(error)
    if error.status not in (400, 403, 404, 409, 422):
        return plain
    try:
        result, caller = client().profiles(), client().me()
    except MakewayError:
        return plain
    teams = caller.teams
    if not teams or caller.admin:
        return plain
    if request.team and request.team not in teams:
        hint = did_you_mean(request.team, teams)
        return Refused(f"you are not in a team {request.team!r}.{hint} Yours: {listed(teams)}.", code=error.code)
    profiles = [p.name for p in result if Kind.JOB in p.kinds]
    if request.profile and request.profile not in [p.name for p in result]:
        yours = f"Yours: {listed(profiles)}." if profiles else "None is open to you; ask an administrator."
        return Refused(
            f"there is no profile {request.profile!r} for you.{did_you_mean(request.profile, profiles)} {yours}",
            code=error.code,
        )
    return plain


def _priority(text: str) -> Priority:
    try:
        return Priority(text)
    except ValueError:
        raise Refused(f"unknown priority {text!r}. Valid priorities: low, normal, high.") from None


def _shown(path: str) -> str:
    return "the variables (--with)" if path == f"{payload.FOLDER}/variables.pkl" else path
