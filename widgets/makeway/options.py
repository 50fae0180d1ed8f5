"""Define the options of the magics, with the help that `?` shows."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

from makeway_api.bars import WHEN_NEEDED

from .problems import Refused
from .words import did_you_mean


class MagicParser(argparse.ArgumentParser):
    """An argument parser that raises Refused with one sentence and never exits."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise Refused with what is wrong on the line."""
        hint = ""
        if message.startswith("unrecognized arguments: "):
            first = message.split(": ", 1)[1].split()[0]
            hint = did_you_mean(first, self.options())
            message = f"{first!r} is not an option"
        raise Refused(f"{self.prog}: {message}.{hint} `{self.prog}?` shows the options.")

    def options(self) -> list[str]:
        """Return the long name of every option."""
        return [o for action in self._actions for o in action.option_strings if o.startswith("--")]

    def read(self, line: str) -> argparse.Namespace:
        """Return the parsed line, split as a shell would, without its comment; raise Refused where that fails."""
        try:
            words = shlex.split(without_comment(line))
        except ValueError as error:
            if str(error) == "No escaped character":
                raise Refused(f"{self.prog}: the line ends with \\, but no line follows that continues it.") from None
            raise Refused(
                f"{self.prog}: a quote on this line is not closed; write names with spaces as --name 'my run'."
            ) from None
        return self.parse_args(words)


def without_comment(line: str) -> str:
    """Return a line without the comment at its end: from a `#` at the start of a word on, outside of quotes."""
    quote, before = "", " "
    for at, character in enumerate(line):
        if before == "\\" and quote != "'":
            before = ""
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and before.isspace():
            return line[:at].strip()
        before = character
    return line.strip()


def continued(line: str, cell: str) -> tuple[str, str, int]:
    """Return the line of a cell magic with those that it continues on, the cell below, and how many those were."""
    taken = 0
    while (line := without_comment(line)).endswith("\\") and cell.strip():
        following, _, cell = cell.partition("\n")
        line, taken = f"{line[:-1]} {following}", taken + 1
    return line, cell, taken


class Pairs(argparse.Action):
    """Collects K=V words into a dict."""

    def __call__(
        self, parser: argparse.ArgumentParser, into: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Add the words of one option."""
        pairs = dict(getattr(into, self.dest) or {})
        for word in values:
            key, equals, value = word.partition("=")
            if not equals or not key.isidentifier():
                parser.error(f"{option} {word}: write it as NAME=VALUE")
            pairs[key] = value
        setattr(into, self.dest, pairs)


class VariableNames(argparse.Action):
    """Collects comma- or space-separated names."""

    def __call__(
        self, parser: argparse.ArgumentParser, into: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Add the names of one option."""
        result = [name for word in values for name in word.split(",") if name]
        for name in result:
            if not name.isidentifier():
                parser.error(f"{option} {name}: that is not the name of a variable")
        setattr(into, self.dest, [*(getattr(into, self.dest) or []), *result])


def describe(parser: argparse.ArgumentParser, several: str | int = "+") -> None:
    """Add the options that `%%train` and `makeway submit` share; `several` is the `nargs` of `--files` and `--env`."""
    add = parser.add_argument
    add("--profile", "-p", metavar="PROFILE", help="the profile, e.g. gpu1 (default: the team's first job profile)")
    add("--team", "-t", metavar="TEAM", help="the team whose quota it uses (default: this notebook's team)")
    add(
        "--image",
        metavar="IMAGE",
        help="one of the images that the profile offers (default: this notebook's, if it is one of them)",
    )
    add("--name", "-n", metavar="NAME", default="", help="the job's name (default: the notebook's)")
    add(
        "--files",
        "-f",
        metavar="GLOB",
        nargs=several,
        action="extend",
        default=[],
        help="files and folders to send along, 50 MB at most",
    )
    add("--env", "-e", metavar="K=V", nargs=several, action=Pairs, default={}, help="environment variables of the job")
    add("--time-limit", metavar="TIME", help="end each attempt of the job after this time: 90s, 30m, 2h, 1h30m")
    add("--priority", metavar="low|normal|high", default="normal", help="its priority among your team's jobs")
    add("--workers", metavar="N", type=_positive, help="the number of workers (default: the profile's)")
    add(
        "--retries",
        metavar="N",
        type=_not_negative,
        default=0,
        help="how often a failed attempt is retried; preemptions never count",
    )
    add("--dry-run", action="store_true", help="show what would happen; submit nothing")
    add("--wait", "-w", action="store_true", help="wait until it has ended")


def train() -> MagicParser:
    """Return the parser of `%%train`."""
    line = MagicParser(
        "%%train",
        "Submit this cell as a training job and return the Job at once.",
        "The job runs on its own GPUs, also after this notebook has ended. Its result is the cell's last expression,\n"
        "or the variable `result`: job = _ in the next cell, then job.wait().result(). The cell sees only\n"
        "variables given by --with. They keep what they share; a function or class of the notebook brings along\n"
        "the variables that it uses. Over your team's reservation it borrows idle GPUs and makes way\n"
        f"{WHEN_NEEDED}: save with makeway.checkpoint, and it resumes\n"
        "from its checkpoint.\n\n"
        "  %%train --profile gpu1 --name 'lr 0.1' --with data,lr --files 'src/*.py'",
    )
    describe(line)
    line.add_argument(
        "--with",
        metavar="VAR",
        dest="variables",
        nargs="+",
        action=VariableNames,
        default=[],
        help="variables of this notebook that the cell needs",
    )
    line.add_argument(
        "--local",
        "-l",
        action="store_true",
        help="run the cell here, as a process of this notebook, and return its result",
    )
    return line


def gpus() -> MagicParser:
    """Return the parser of `%gpus`."""
    line = MagicParser(
        "%gpus", "Show my teams' GPUs (reserved, limit, used, mine, borrowed, lent, free) and what I can have now."
    )
    line.add_argument("--live", action="store_true", help="a widget that follows every change")
    return line


def jobs() -> MagicParser:
    """Return the parser of `%jobs`."""
    line = MagicParser("%jobs", "List my newest jobs.")
    line.add_argument("--all", "-a", action="store_true", help="all jobs of my teams")
    line.add_argument("--team", "-t", metavar="TEAM", help="all jobs of this team")
    line.add_argument("--state", "-s", metavar="STATE", help="only those in this state, e.g. running")
    line.add_argument("--limit", "-n", metavar="N", type=_positive, default=20, help="how many (default 20)")
    return line


def job() -> MagicParser:
    """Return the parser of `%job`."""
    line = MagicParser("%job", "Show one job; without an ID the last one submitted here.")
    _id(line)
    line.add_argument(
        "--preempt-test",
        action="store_true",
        help="test the preemption of my own job: what it saves, how fast, and what is lost",
    )
    return line


def logs() -> MagicParser:
    """Return the parser of `%logs`."""
    line = MagicParser(
        "%logs", "Print the newest part of a job's log; without an ID that of the last one submitted here."
    )
    _id(line)
    line.add_argument(
        "--follow", "-f", action="store_true", help="follow it as it grows, over all attempts, until the job ends"
    )
    line.add_argument("--attempt", metavar="N", type=_positive, help="of this attempt (default: the newest)")
    line.add_argument("--tail", "-n", metavar="N", type=_positive, help="only the last N lines so far")
    line.add_argument("--all", "-a", action="store_true", help="all of it (default: the newest 256 KiB)")
    return line


def cancel() -> MagicParser:
    """Return the parser of `%cancel`."""
    line = MagicParser(
        "%cancel", "Cancel jobs; their GPUs are free at once. Without an ID the last one submitted here."
    )
    line.add_argument("ids", metavar="ID", nargs="*", help="ids or names")
    return line


def move() -> MagicParser:
    """Return the parser of `%move`."""
    line = MagicParser(
        "%move",
        "Move pending jobs to another queue: another team, another profile, or both. They keep their submission time.\n"
        "Without an ID the last one submitted here.",
    )
    line.add_argument("ids", metavar="ID", nargs="*", help="ids or names")
    destination(line)
    return line


def destination(parser: argparse.ArgumentParser) -> None:
    """Add the options that `%move` and `makeway move` share."""
    parser.add_argument("--team", "-t", metavar="TEAM", help="the team whose quota they use from now on")
    parser.add_argument("--profile", "-p", metavar="PROFILE", help="the profile that fixes their GPUs from now on")


def quota() -> MagicParser:
    """Return the parser of `%quota`."""
    return MagicParser("%quota", "Show the bytes that are kept for me, my teams and all, and what I can delete.")


def delete() -> MagicParser:
    """Return the parser of `%delete`."""
    line = MagicParser(
        "%delete",
        "Delete ended jobs for good, with their files, logs, results and checkpoints, or one attempt's output.",
    )
    line.add_argument("ids", metavar="ID", nargs="+", help="ids of jobs that have ended, see %%quota")
    line.add_argument(
        "--attempt", metavar="N", type=_positive, help="only the log and the result of this attempt, which has ended"
    )
    return line


def _id(line: MagicParser) -> None:
    line.add_argument("id", metavar="ID", nargs="?", help="an id or a name, see %%jobs")


def _positive(text: str) -> int:
    return _whole_number(text, 1)


def _not_negative(text: str) -> int:
    return _whole_number(text, 0)


def _whole_number(text: str, minimum: int) -> int:
    if not text.isdigit() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
    return int(text)


FIELDS = ("profile", "team", "image", "name", "files", "env", "time_limit", "priority", "workers", "retries")


def fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a parsed line that a Submission takes."""
    return {name: getattr(options, name) for name in FIELDS}
