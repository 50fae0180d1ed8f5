"""Complete options, teams, profiles, states and jobs; never raises, never blocks for longer than TIMEOUT."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from makeway_api.models import Priority, State

from . import options
from .connection import client, configured
from .options import MagicParser

TIMEOUT = 0.8
"""Seconds that one completion may wait for the service."""
KEPT = 15.0
"""Seconds for which an answer is cached."""

LINES: dict[str, Callable[[], MagicParser]] = {
    "%%train": options.train,
    "%gpus": options.gpus,
    "%jobs": options.jobs,
    "%job": options.job,
    "%logs": options.logs,
    "%cancel": options.cancel,
    "%move": options.move,
    "%quota": options.quota,
    "%delete": options.delete,
}


class Known:
    """Names from the service, fetched in a background thread and cached for KEPT seconds."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, list[str]]] = {}
        self._busy: dict[str, threading.Thread] = {}

    def names(self, what: str) -> list[str]:
        """Return teams, profiles or jobs; the cached ones if the service is slow."""
        at, names = self._kept.get(what, (0.0, []))
        if not configured() or (at and time.monotonic() - at < KEPT):
            return names
        thread = self._busy.get(what)
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=self._fetch, args=(what,), daemon=True, name="makeway-completion")
            self._busy[what] = thread
            thread.start()
        thread.join(TIMEOUT)
        return self._kept.get(what, (0.0, names))[1]

    def _fetch(self, what: str) -> None:
        try:
            self._kept[what] = (time.monotonic(), _fetch_names(what))
        except Exception:
            # The magic itself reports an unreachable service; completion only has nothing to offer.
            self._kept.setdefault(what, (0.0, []))


def _fetch_names(what: str) -> list[str]:
    if what == "teams":
        return list(client().me().teams)
    if what == "profiles":
        return [p.name for p in client().profiles() if "job" in p.kinds]
    jobs = client().jobs(mine=True, limit=50).jobs
    if what == "jobs":
        return [j.id for j in jobs]
    if what == "pending":
        return [j.id for j in jobs if j.state is State.PENDING]
    return [j.id for j in jobs if j.state.ended == (what == "ended")]


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
    """Return the completions at the cursor of one of our magics (IPython's hook)."""
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
        result = [o for o in LINES[command]().options() if o not in words]
        if command in ("%job", "%logs") and not event.symbol.startswith("-"):
            result = KNOWN.names("jobs") + result
        if command == "%move" and not event.symbol.startswith("-"):
            result = KNOWN.names("pending") + result
        if command == "%cancel":
            result = KNOWN.names("unfinished") + result
        if command == "%delete" and not event.symbol.startswith("-"):
            result = KNOWN.names("ended") + result
        return result
    except Exception:
        # A completion that fails must not break typing.
        return []


def install(shell: Any) -> None:
    """Register the completions of our magics."""

    def completer(_: Any, event: Any) -> list[str]:
        return complete(shell, event)

    for command in LINES:
        shell.set_hook("complete_command", completer, str_key=command)


def remove(shell: Any) -> None:
    """Remove the completions of our magics."""
    completers = shell.strdispatchers.get("complete_command")
    for command in LINES:
        if completers is not None:
            completers.strs.pop(command, None)
