"""Read documents and print answers of the API, as all verbs of the `makeway` command do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from makeway_api.models import PolicyCheck

from .problems import Refused


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json` to a command."""
    parser.add_argument("--json", action="store_true", help="print the API's answer as JSON, for other programs")


def print_json(answers: Sequence[Any], *, single: bool = False) -> None:
    """Print answers of the API as one JSON list, or the only one as an object."""
    data = [answer.model_dump(mode="json") for answer in answers]
    print(json.dumps(data[0] if single else data, indent=2))


def read_document(file: str) -> str:
    """Return the text of a file, or of standard input for `-`, with its line ends as they are."""
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise Refused(f"{file} cannot be read: {reason}.") from None


def print_issues(file: str, check: PolicyCheck) -> None:
    """Print what is wrong or odd in a document to standard error, each with its line."""
    for issue, kind in [*((item, "") for item in check.issues), *((item, "warning: ") for item in check.warnings)]:
        where = ":".join(str(part) for part in (file, issue.line) if part is not None)
        message = f"{issue.where}: {kind}{issue.message}" if issue.where else f"{kind}{issue.message}"
        print(f"{where}: {message}", file=sys.stderr)


def print_changes(changes: Sequence[str]) -> None:
    """Print what a document changes, one line each."""
    print(*(f"  {change}" for change in changes), sep="\n", end="\n" if changes else "")
