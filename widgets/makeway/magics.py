"""Define the magics `%gpus`, `%%train`, `%jobs`, `%job`, `%logs`, `%cancel`, `%move`, `%quota`, `%delete`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from makeway_api.errors import MakewayError

from . import completion, follow, local, options, payload, preemption, quota, submission, teams, training
from .connection import explain
from .options import MagicParser
from .problems import Refused
from .submission import CellInNotebook, DryRunResult, Submission


def _magic(line: Callable[[], MagicParser]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that parses the line, shows errors as their message, and puts the options into `?`."""

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def magic(self: Any, text: str = "", cell: str | None = None) -> Any:
            parser = line()
            first_line = 2 + _lines_above(self.shell)
            if cell is not None:
                text, cell, taken = options.continued(text, cell)
                first_line += taken
            if text.strip() in ("-h", "--help", "help", "?"):
                print(parser.format_help())
                return None
            try:
                args = parser.read(text)
                return method(self, args) if cell is None else method(self, args, cell, first_line)
            except MakewayError as error:
                raise explain(error) from None

        magic.__doc__ = line().format_help()
        return magic

    return around


@magics_class
class MakewayMagics(Magics):
    """Makeway's magics of one kernel, and the id of the last job submitted here."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.space: dict[str, Any] = shell.user_ns
        before = shell.magics_manager.registry.get(type(self).__name__)
        self.last: str | None = getattr(before, "last", None)

    @line_magic
    @_magic(options.gpus)
    def gpus(self, args: Any) -> Any:
        if args.live:
            from .team_usage import usage

            return usage()
        return teams.gpus_now()

    @cell_magic
    @_magic(options.train)
    def train(self, args: Any, cell: str = "", first_line: int = 2) -> Any:
        payload.check_cell(cell, first_line)
        variables = payload.chosen(args.variables, self.space)
        around = CellInNotebook(self._variables(), first_line)
        wanted = Submission(source=cell, variables=variables, cell=around, **options.fields(args))
        if args.local and not args.dry_run:
            return local.run(wanted)
        job = submission.send(wanted, dry_run=args.dry_run)
        if isinstance(job, DryRunResult):
            return job
        self.last = job.id
        if notices := submission.notices(job, wanted):
            print(notices)
        return job.wait() if args.wait else job

    @line_magic
    @_magic(options.jobs)
    def jobs(self, args: Any) -> Any:
        return training.jobs(all=args.all, team=args.team, state=args.state, limit=args.limit)

    @line_magic
    @_magic(options.job)
    def job(self, args: Any) -> Any:
        job = training.job(self._id(args.id))
        return preemption.run_test(job) if args.preempt_test else job

    @line_magic
    @_magic(options.logs)
    def logs(self, args: Any) -> None:
        job = training.job(self._id(args.id))
        print_log = follow.print_log if args.follow else follow.print_newest
        print_log(job.id, args.attempt, args.tail, args.all)

    @line_magic
    @_magic(options.cancel)
    def cancel(self, args: Any) -> Any:
        jobs = [training.job(id) for id in args.ids or [self._id(None)]]
        return training.Jobs(job.cancel() for job in jobs)

    @line_magic
    @_magic(options.move)
    def move(self, args: Any) -> Any:
        jobs = [training.job(id) for id in args.ids or [self._id(None)]]
        moved = training.Jobs(job.move(team=args.team, profile=args.profile) for job in jobs)
        if notes := [note for job in moved for note in submission.notes(job)]:
            print(*notes, sep="\n")
        return moved

    @line_magic
    @_magic(options.quota)
    def quota(self, args: Any) -> Any:
        return quota.quota_now()

    @line_magic
    @_magic(options.delete)
    def delete(self, args: Any) -> None:
        for id in args.ids:
            print(quota.delete(id, args.attempt))

    def _variables(self) -> dict[str, Any]:
        """Return the notebook's own variables, without those that IPython puts into every one."""
        hidden = getattr(self.shell, "user_ns_hidden", {})
        return {name: value for name, value in self.space.items() if hidden.get(name, self) is not value}

    def _id(self, given: str | None) -> str:
        if given or self.last:
            return given or self.last or ""
        raise Refused("no job was submitted from this notebook yet, so an id is needed. `%jobs` lists yours.")


def _lines_above(shell: Any) -> int:
    """Return the number of empty lines above the magic, which the notebook counts and IPython leaves out."""
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    code = str(parent.get("content", {}).get("code", ""))
    return code[: len(code) - len(code.lstrip())].count("\n") if code.lstrip().startswith("%%") else 0


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and their completions (`%load_ext makeway`)."""
    shell.register_magics(MakewayMagics(shell))
    completion.install(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Remove the magics and their completions (`%unload_ext makeway`)."""
    for kind, names in {
        "line": ("gpus", "jobs", "job", "logs", "cancel", "move", "quota", "delete"),
        "cell": ("train",),
    }.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    completion.remove(shell)
