"""Tab completion of options, teams, profiles, states and jobs; it never raises and never keeps you waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from makeway_api.models import Priority, State

from . import options
from .connection import client, configured
from .options import Line

PATIENCE = 0.8
"""Seconds that one press of the tab key may wait for the service."""
KEPT = 15.0
"""Seconds that an answer is used again."""

LINES: dict[str, Callable[[], Line]] = {
    "%%train": options.train,
    "%gpus": options.gpus,
    "%jobs": options.jobs,
    "%job": options.job,
    "%logs": options.logs,
    "%cancel": options.cancel,
}


class Known:
    """Names that the service told, fetched beside the kernel and kept for a moment."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, list[str]]] = {}
        self._busy: dict[str, threading.Thread] = {}

    def names(self, what: str) -> list[str]:
        """Teams, profiles or jobs; what was known before when the service is slow."""
        at, names = self._kept.get(what, (0.0, []))
        if not configured() or (at and time.monotonic() - at < KEPT):
            return names
        thread = self._busy.get(what)
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=self._fetch, args=(what,), daemon=True, name="makeway-completion")
            self._busy[what] = thread
            thread.start()
        thread.join(PATIENCE)
        return self._kept.get(what, (0.0, names))[1]

    def _fetch(self, what: str) -> None:
        try:
            self._kept[what] = (time.monotonic(), _ask(what))
        except Exception:
            # Completion is a convenience: an unreachable service is told by the magic itself, not by the tab key.
            self._kept.setdefault(what, (0.0, []))


def _ask(what: str) -> list[str]:
    if what == "teams":
        return list(client().me().teams)
    if what == "profiles":
        return [p.name for p in client().profiles() if "job" in p.kinds]
    jobs = client().jobs(mine=True, limit=50).jobs
    return [j.id for j in jobs] if what == "jobs" else [j.id for j in jobs if not j.state.ended]


KNOWN = Known()
VALUES: dict[str, Callable[[], list[str]]] = {
    "--team": lambda: KNOWN.names("teams"),
    "-t": lambda: KNOWN.names("teams"),
    "--profile": lambda: KNOWN.names("profiles"),
    "-p": lambda: KNOWN.names("profiles"),
    "--state": lambda: [s.value for s in State],
    "-s": lambda: [s.value for s in State],
    "--priority": lambda: [p.value for p in Priority],
}


def complete(shell: Any, event: Any) -> list[str]:
    """IPython's hook: what may stand at the cursor of one of our lines."""
    try:
        words = event.text_until_cursor.split()
        if event.symbol and words:
            words.pop()
        before = words[-1] if words else ""
        if before in VALUES:
            return VALUES[before]()
        command = event.command if event.command in LINES else f"%{event.command}"
        if before == "--with":
            return [n for n in shell.user_ns if not n.startswith("_")]
        found = [o for o in LINES[command]().options() if o not in words]
        if command in ("%job", "%logs") and not event.symbol.startswith("-"):
            found = KNOWN.names("jobs") + found
        if command == "%cancel":
            found = KNOWN.names("unfinished") + found
        return found
    except Exception:
        # A broken completion must never get between somebody and their cell.
        return []


def install(shell: Any) -> None:
    """Register for our magics."""

    def completer(_: Any, event: Any) -> list[str]:
        return complete(shell, event)

    for command in LINES:
        shell.set_hook("complete_command", completer, str_key=command)


def remove(shell: Any) -> None:
    """Take them out again."""
    completers = shell.strdispatchers.get("complete_command")
    for command in LINES:
        if completers is not None:
            completers.strs.pop(command, None)
