"""Define what a provider of machines has to do, and how it fails.

Calls block: they are made outside the control loop. A provider keeps no state of its own, tags each instance with its
machine and deployment in the launching call, and never answers that something is done before it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from .backoff import FailureClass
from .instances import Instance, InstanceList


@dataclass(frozen=True, slots=True)
class JoinData:
    """What a new instance needs to join the service: its user data, apart from the request, as it has a secret.

    The same for each call for one machine. `url`: the service as machines reach it, http://host:port/prefix.
    """

    url: str
    token: str = field(repr=False)


class Provider(Protocol):
    """A cloud, or what stands for one. Every method may raise a ProviderError."""

    def check(self) -> None:
        """Raise a ProviderError that tells what is wrong with the credentials or the settings."""

    def list(self, deployment: str, now: float) -> InstanceList:
        """Return all instances with the tag of a deployment; `now` is when the call begins."""

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        """Launch an instance, which joins the service if it is told how to.

        The same token with the same request and join data returns the same instance, also if it has ended.
        """

    def terminate(self, instance: str) -> bool:
        """End an instance for good. False if there is no such instance, or none any more; may be repeated."""

    def console(self, instance: str) -> str:
        """Return the newest output of the console of an instance, "" where there is none."""


class ProviderError(Exception):
    """A call failed. `certain`: nothing was done, nor will be. `instance`: what may have been listed meanwhile."""

    failure: ClassVar[FailureClass]
    certain: ClassVar[bool] = True
    instance: str = ""


class UnusableProvider:
    """What stands for a provider that cannot be made, as its credential or a package is missing: refuses each call."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def check(self) -> None:
        """Raise Denied with the problem, as all methods do."""
        raise Denied(self._problem)

    def list(self, deployment: str, now: float) -> InstanceList:
        raise Denied(self._problem)

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        raise Denied(self._problem)

    def terminate(self, instance: str) -> bool:
        raise Denied(self._problem)

    def console(self, instance: str) -> str:
        raise Denied(self._problem)


class StockOut(ProviderError):
    """The provider has no such machine in this zone and market now."""

    failure = "stock_out"


class QuotaReached(ProviderError):
    """The account may have no more machines of this kind."""

    failure = "quota"


class Throttled(ProviderError):
    """Too many calls: the call was not started, and may be repeated later."""

    failure = "throttled"


class Denied(ProviderError):
    """The credentials are wrong, or do not allow the call."""

    failure = "denied"


class InvalidLaunch(ProviderError):
    """The provider does not take the request, and never will."""

    failure = "invalid"


class CallOutcomeUnknown(ProviderError):
    """The outcome is unknown, as there was no answer, or none that says what was done: an instance may exist."""

    failure = "no_answer"
    certain = False
