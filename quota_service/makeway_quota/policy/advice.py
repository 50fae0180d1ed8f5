"""Warn of what is valid in a policy document and still does not do what its author expects.

Shown by `makeway-quota policy validate` beside the errors; never a reason to refuse a document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .issues import Issue, Problem, text_of_loc
from .members import member_problems
from .source import UnreadableDocument, parse

CAUGHT_BY_FRAMEWORKS = {
    "SIGUSR1": "NCCL, PyTorch Lightning and others catch it for purposes of their own",
    "SIGUSR2": "profilers and others catch it for purposes of their own",
    "SIGINT": "Python raises KeyboardInterrupt in the middle of a step where a job does not use makeway.checkpoint",
}
"""Why a signal does not reach the code of a job as a notice"""


def policy_warnings(text: str, file: str = "policy.yaml") -> list[Issue]:
    """Return the warnings about a valid document, by line."""
    try:
        source = parse(text)
    except UnreadableDocument:
        return []
    problems = [*member_problems(source.value), *_caught_signals(source.value)]
    result = sorted(problems, key=lambda problem: source.line(problem[0]) or 0)
    return [Issue(file, source.line(loc), text_of_loc(loc), message) for loc, message in result]


def _caught_signals(document: Any) -> Iterator[Problem]:
    """Yield a problem for each profile whose signal training frameworks catch themselves."""
    profiles = document.get("profiles") if isinstance(document, dict) else None
    for at, profile in enumerate(profiles if isinstance(profiles, list) else ()):
        name = profile.get("signal") if isinstance(profile, dict) else None
        if isinstance(name, str) and (why := CAUGHT_BY_FRAMEWORKS.get(name.strip())):
            message = (
                f"{name.strip()} may not be taken as a notice to save: {why}; SIGTERM, the default, is meant for it"
            )
            yield ("profiles", at, "signal"), message
