"""The service's one counter: everything that the web may ask, answered from the store and by the engine."""

from __future__ import annotations

from .audit import Journal
from .caller import Caller
from .jobs import Jobs
from .policies import Policies
from .sessions import Sessions


class Services(Jobs, Sessions, Journal, Policies):
    """All of the services in one object; `web.ports.Services` lists what it promises."""


__all__ = ["Caller", "Services"]
