"""What is wrong with a document: file, line, place, and a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

MOST = 100
"""More issues than this help nobody; the last one says how many were left out."""


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing that is wrong. `line` counts from 1; `where` is like `policies[1].quotas[0].reserved`."""

    file: str
    line: int | None
    where: str
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.where}: {self.message}" if self.where else f"{place}: {self.message}"


class PolicyInvalid(Exception):
    """The document cannot be used; `issues` holds everything that is wrong with it."""

    def __init__(self, issues: list[Issue]) -> None:
        super().__init__("\n".join(str(issue) for issue in issues))
        self.issues = issues


class Findings:
    """Collects issues while a document is read, so that all are told at once."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._issues: list[Issue] = []

    def say(self, line: int | None, where: str, message: str) -> None:
        """Add one."""
        self._issues.append(Issue(self.file, line, where, message))

    @property
    def full(self) -> bool:
        """True once reading on is a waste of time."""
        return len(self._issues) > 10 * MOST

    def stop(self) -> None:
        """Raise PolicyInvalid if anything was found."""
        if not self._issues:
            return
        issues = sorted(self._issues, key=lambda issue: (issue.line or 0, issue.where))
        if len(issues) > MOST:
            more = Issue(self.file, None, "", f"and at least {len(issues) - MOST} more; mend these first")
            issues = [*issues[:MOST], more]
        raise PolicyInvalid(issues)


def quote(value: object, longest: int = 60) -> str:
    """Show a value of the document in a sentence, shortened."""
    text = str(value)
    return f'"{text}"' if len(text) <= longest else f'"{text[: longest - 1]}…"'


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say which of the known names is the nearest, else list them."""
    names = sorted(known)
    small = {known.lower(): known for known in names}
    near = get_close_matches(name[:80].lower(), small, n=1, cutoff=0.6)
    if near:
        return f'did you mean "{small[near[0]]}"?'
    if not names:
        return "there are none"
    listed = ", ".join(names[:20])
    return f"there are: {listed}{', …' if len(names) > 20 else ''}"


def number(milli: int) -> str:
    """Write thousandths as people do: 5, 0.5, 1.25."""
    return f"{milli / 1000:.3f}".rstrip("0").rstrip(".")
