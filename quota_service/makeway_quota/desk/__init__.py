"""The service's one counter: everything that the web may ask, answered from the books and by the engine."""

from __future__ import annotations

from .caller import Caller
from .jobs import Jobs
from .journal import Journal
from .policies import Policies
from .sessions import Sessions


class Desk(Jobs, Sessions, Journal, Policies):
    """All of the desk in one object; `web.ports.Desk` lists what it promises."""


__all__ = ["Caller", "Desk"]
