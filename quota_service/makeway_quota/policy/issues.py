"""Collect the issues of a document: file, line, place, and a sentence with the reason and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

MAX_ISSUES = 100
"""More issues than this help no reader; the last one counts the rest."""

Loc = tuple[str | int, ...]
"""A place in a document: `("policies", 1, "quotas", 0, "reserved")`."""
Problem = tuple[Loc, str]


@dataclass(frozen=True, slots=True)
class Issue:
    """One issue. `line` counts from 1; `where` is like `policies[1].quotas[0].reserved`."""

    file: str
    line: int | None
    where: str
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.where}: {self.message}" if self.where else f"{place}: {self.message}"


class PolicyInvalid(Exception):
    """The policy document is refused; `issues` has every reason."""

    def __init__(self, issues: list[Issue]) -> None:
        super().__init__("\n".join(str(issue) for issue in issues))
        self.issues = issues


def sorted_issues(issues: Iterable[Issue]) -> list[Issue]:
    """Return issues by line, at most MAX_ISSUES and one that counts the rest."""
    result = sorted(issues, key=lambda issue: (issue.line or 0, issue.where))
    if len(result) <= MAX_ISSUES:
        return result
    more = Issue(result[0].file, None, "", f"and at least {len(result) - MAX_ISSUES} more; correct these first")
    return [*result[:MAX_ISSUES], more]


def text_of_loc(loc: Loc) -> str:
    """Return a place as text: `policies[1].quotas[0].reserved`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part[:60]}" for part in loc).removeprefix(".")


def quote(value: object, limit: int = 60) -> str:
    """Return a value of the document in quotation marks, shortened."""
    text = str(value)
    return f'"{text}"' if len(text) <= limit else f'"{text[: limit - 1]}…"'


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `name`, None if none is."""
    small = {known.lower(): known for known in sorted(known)}
    near = get_close_matches(name[:80].lower(), small, n=1, cutoff=0.6)
    return small[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint with the closest known name, else with all of them."""
    names = sorted(known)
    if near := closest(name, names):
        return f'did you mean "{near}"?'
    listed = ", ".join(names[:20])
    return f"there are: {listed}{', …' if len(names) > 20 else ''}" if names else "there are none"
