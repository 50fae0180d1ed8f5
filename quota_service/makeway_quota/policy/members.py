"""Compare the users that a policy document names with users of the Hub, whose names JupyterHub normalizes.

Used by the document's index, and where an administrator types a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from .issues import Loc, Problem, quote

SERVICE = "service/"
"""Before the names of the Hub's services among owners: no user's name has a slash."""


def hub_name(name: str) -> str:
    """Return a user's name as JupyterHub writes it: in small letters. A service of the Hub keeps its name."""
    return name if name.startswith(SERVICE) else name.lower()


def member_problems(document: Any) -> Iterator[Problem]:
    """Yield the users in a valid document that no user of the Hub can be, or not as they are written."""
    policies = document.get("policies") if isinstance(document, dict) else None
    for at, policy in enumerate(policies if isinstance(policies, list) else ()):
        users = policy.get("users") if isinstance(policy, dict) else None
        named = users if isinstance(users, list) else [] if users is None else [users]
        for n, name in enumerate(named):
            others = (str(other).strip() for other in named[:n])
            loc: Loc = ("policies", at, "users", *([n] if isinstance(users, list) else []))
            yield from ((loc, message) for message in _warnings(str(name).strip(), others))


def _warnings(name: str, others: Iterable[str]) -> Iterator[str]:
    written = hub_name(name)
    plain = name.removeprefix(SERVICE)
    if not plain or "/" in plain or {*plain} == {"."} or {*unquote(plain)} == {"."}:
        yield f"no user of the Hub can be called {quote(name)}, so that this entry has no effect; remove it"
    elif same := next((other for other in others if other != name and hub_name(other) == written), None):
        yield f"{quote(name)} and {quote(same)} are the same user, whom the Hub calls {quote(written)}; keep one"
    elif written != name:
        yield (
            f"the Hub writes {quote(name)} as {quote(written)}, which is the user that this entry means; "
            "write it like that"
        )
